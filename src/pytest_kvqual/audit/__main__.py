"""``python -m pytest_kvqual.audit RUN_DIR``."""

from __future__ import annotations

import sys

from pytest_kvqual.audit.command import main

if __name__ == "__main__":
    sys.exit(main())
