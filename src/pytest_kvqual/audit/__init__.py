"""The independent reader: re-derives every verdict of a run directory from its raw records, and trusts none of them.

Standard library only, and nothing of this project outside this room: ``python -m pytest_kvqual.audit RUN_DIR`` runs on
a bare Python 3.11. ``audit/checks.py`` numbers what is checked.
"""

from __future__ import annotations

VERSION = "1.0.0"
"""The version of the audit's rules; stated in each audit.json."""
