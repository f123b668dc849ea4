"""How long the gate report of a run of full size takes, and how large it is.

    python tests/benchmarks/report.py [FOLDER]

The run is generated (``report_run.full``): 1,319 and 100 questions of 8,192 and 700 tokens, 32 documents, and 20 trials
of two loads of 96 requests. FOLDER keeps it and the page; without one both are thrown away. No engine runs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from report_run import full

from pytest_kvqual.report.gate.files import write_report


def measure(folder: Path) -> None:
    """Write the run unless it is there, then the report five times."""
    run_dir = folder / "run"
    if not run_dir.exists():
        full(folder)
    size = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    print(f"run directory: {size / 1e6:.0f} MB")
    html, junit = folder / "report.html", folder / "report.xml"
    for _ in range(5):
        begun, spent = time.perf_counter(), time.process_time()
        write_report(run_dir, html=html, junit=junit)
        wall, busy = time.perf_counter() - begun, time.process_time() - spent
        print(f"{wall:.2f} s, of which {busy:.2f} s of the processor")
    print(f"report.html {html.stat().st_size:,} bytes, report.xml {junit.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            measure(Path(made))
