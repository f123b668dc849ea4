"""The gate report on disk: each file is written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pytest_kvqual.errors import KvqualError, ReceiptError, StudyError
from pytest_kvqual.report.gate.run import read_run

SUFFIXES = (".html", ".xml")


def paths(path: Path) -> tuple[Path, Path]:
    """The two files of ``--gate-report PATH``: PATH.html and PATH.xml; a suffix ``.html`` or ``.xml`` of PATH goes.

    Raises:
        StudyError: PATH names a folder, or nothing.
    """
    if not path.name or path.is_dir():
        raise StudyError(f"found '{path}', expected the name of a file without its suffix")
    stem = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return stem.with_name(f"{stem.name}.html"), stem.with_name(f"{stem.name}.xml")


def write_report(run_dir: Path, *, html: Path | None, junit: Path | None, prefix: str = "") -> tuple[Path, ...]:
    """Write the page, the JUnit file, or both; returns the paths of what was written.

    Args:
        run_dir: The run directory. Nothing is written below it unless a path says so.
        html: Where the page goes.
        junit: Where the JUnit file goes.
        prefix: As given to the run.

    Raises:
        ReceiptError: There is no receipt, they cannot be read, or a file cannot be written.
        StudyError: Both are one path.
        KvqualError: jinja2 is not installed.
    """
    if html is not None and junit is not None and html.resolve() == junit.resolve():
        raise StudyError(f"found {html} for the page and for the JUnit file, expected a path for each")
    run = read_run(run_dir, prefix=prefix)
    written = []
    if html is not None:
        try:
            from pytest_kvqual.report.gate import page
        except ImportError as error:
            raise KvqualError(
                f"cannot import {error.name}, expected it for the page", advice="pip install jinja2, or reinstall"
            ) from error
        _write(html, page.render(run).encode("utf-8"))
        written.append(html)
    if junit is not None:
        from pytest_kvqual.report.gate import xunit

        _write(junit, xunit.render(run))
        written.append(junit)
    return tuple(written)


def _write(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of ``path``, whole."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise ReceiptError(
            f"{path}: cannot write the report: {error.strerror or error}", advice="name a file that you may write"
        ) from error
