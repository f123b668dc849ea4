"""A study of one's own from one that is there: its folder, copied to where it may be changed and frozen anew."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pytest_kvqual._decode import one_line
from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.load import find_study, load_study

__all__ = ["copy_study"]


def copy_study(name_or_path: str, folder: Path) -> Path:
    """Copy a study's folder, with its locks, whole or not at all; returns the copy's path.

    The study keeps its name: a lock that matches the one matches the other. Hidden files and byte code stay behind.

    Args:
        name_or_path: As :func:`pytest_kvqual.study.load.find_study` takes it.
        folder: The copy's place. Nothing, or an empty folder, must be there.

    Raises:
        StudyError: The study is malformed, or does not stand on its own (it names a folder outside of its own by a
            relative path); something is at ``folder``; the copy cannot be written.
    """
    load_study(name_or_path)
    source = find_study(name_or_path).parent
    target = Path(os.path.normpath(folder.expanduser().absolute()))
    if target.is_relative_to(source):
        raise StudyError(one_line(f"found {target}, expected a folder outside of the study's own, {source}"))
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise StudyError(
                one_line(f"found something at {target}, expected nothing there, or an empty folder"),
                advice="give another folder",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, scratch, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        # An installed file may be read-only; the copy is there to be changed.
        for path in (scratch, *scratch.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        load_study(str(scratch))
        scratch.replace(target)
    except (OSError, shutil.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StudyError(one_line(f"cannot write {target}: {reason}"), advice="give another folder") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
