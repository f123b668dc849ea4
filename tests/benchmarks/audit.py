"""What the audit of a full-size run directory costs on one core, and whether it agrees with the judges.

    python tests/benchmarks/audit.py --folder FOLDER

The run is ``tests/support/published.py`` at full size: three arms, 32 × 128 losses and 100 retrieval questions at
8,192 tokens, 1,319 GSM8K questions, the first control captured twice. FOLDER keeps it for the next time; it is made
anew where the generator or the judges have changed. Exits 1 where the audit takes 10 s or more of wall time or 500 MiB
or more, or objects to a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from published import build_published

from pytest_kvqual._canonical import digest, sha256_file

LIMIT_S = 10.0
LIMIT_BYTES = 500 << 20
GATES = ("parity", "nll", "retrieval", "gsm8k")


def generator() -> str:
    """A digest of everything that the run directory follows from."""
    root = Path(__file__).resolve().parents[2]
    sources = [*(root / "src").rglob("*.py"), *(root / "tests" / "support").glob("*.py")]
    return digest({path.relative_to(root).as_posix(): sha256_file(path) for path in sorted(sources)})


def made(folder: Path) -> Path:
    """The run directory, built where it is not there."""
    mark, run, wanted = folder / "generator.sha256", folder / "run", generator()
    if not mark.is_file() or mark.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        begun = time.perf_counter()
        build_published(folder)
        mark.write_text(wanted)
        print(f"built in {time.perf_counter() - begun:.1f} s")
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions: found {options.repetitions}, expected at least 1")
    run = made(options.folder)
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    print(f"{size / 2**20:.0f} MiB in {sum(path.is_file() for path in run.rglob('*'))} files")
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    output = options.folder / "audit.json"
    command = [sys.executable, "-m", "pytest_kvqual.audit", str(run), "--output", str(output)]
    walls = []
    for _ in range(options.repetitions):
        output.unlink(missing_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        walls.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{walls[-1]:.2f} s wall, {cpu:.2f} s CPU, exit status {done.returncode}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"peak {peak / 2**20:.0f} MiB; limits {LIMIT_S:g} s and {LIMIT_BYTES >> 20} MiB")
    print(done.stdout.rstrip())
    print(done.stderr.rstrip(), file=sys.stderr)
    agrees = agreement(json.loads(output.read_bytes()))
    return 0 if min(walls) < LIMIT_S and peak < LIMIT_BYTES and agrees else 1


def agreement(statement: dict[str, Any]) -> bool:
    """Whether the audit objects to nothing, and derived outcome and figure of each gate itself."""
    said = statement["predicate"]["pytest_kvqual_audit"]
    gates = {gate["gate"]: gate for gate in said["gates"]}
    agrees = not said["findings"] and all(
        gates[name]["how"] == "re-derived" and gates[name]["derived"] == gates[name]["stored"] for name in GATES
    )
    print(f"agrees with the judges on every figure: {'yes' if agrees else 'no'}")
    return agrees


if __name__ == "__main__":
    sys.exit(main())
