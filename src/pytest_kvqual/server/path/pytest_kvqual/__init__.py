"""Stands for the package on the import path of an arm's processes: this folder's parent holds nothing else.

Where the package is installed, its own parent is the ``site-packages`` of the interpreter that drives. On the path of
an arm that has an interpreter of its own, it would bring that folder's torch and vLLM in place of the arm's.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_package = Path(__file__).resolve().parents[3]
_spec = spec_from_file_location("pytest_kvqual", _package / "__init__.py", submodule_search_locations=[str(_package)])
if _spec is None or _spec.loader is None:
    raise ImportError(f"found no package at {_package}", name="pytest_kvqual", path=str(_package))
_module = module_from_spec(_spec)
# The import system hands out what stands here when this file has run.
sys.modules["pytest_kvqual"] = _module
_spec.loader.exec_module(_module)
