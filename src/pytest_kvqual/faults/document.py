"""The catalogue of seeded faults as text: the table of ``docs/faults.md``, and what of it was caught.

``python -m pytest_kvqual.faults.document docs/faults.md`` writes the table into the file, between its two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_kvqual.faults.catalogue import FAULTS, GATES, NOT_EXPRESSIBLE, Fault

BEGIN, END = "<!-- table: written by pytest_kvqual.faults.document -->", "<!-- end of the table -->"


def _number(row: str) -> int:
    return int(row.partition("-")[2])


def by_row() -> dict[str, list[Fault]]:
    """The faults of each row of the public catalogue, in the order of the rows; rows without one are there too."""
    found: dict[str, list[Fault]] = {row: [] for row in NOT_EXPRESSIBLE}
    for fault in FAULTS.values():
        for row in fault.rows:
            found.setdefault(row, []).append(fault)
    return dict(sorted(found.items(), key=lambda item: _number(item[0])))


def table() -> str:
    """Two Markdown tables: the faults by row, and those that stand for no single row."""
    lines = ["| Row | Fault | What it does | Exposed by | Gate | Planted in |", "|---|---|---|---|---|---|"]
    for row, faults in by_row().items():
        lines += [_line(row, fault) for fault in faults]
        if not faults:
            lines.append(f"| {row} | none | {NOT_EXPRESSIBLE[row]} | | | |")
    lines += ["", "Faults of no single row:", "", lines[0], lines[1]]
    lines += [_line("", fault) for fault in FAULTS.values() if not fault.rows]
    return "\n".join(lines)


def _line(row: str, fault: Fault) -> str:
    gate = "none (benign)" if fault.benign else fault.claimed_by
    where = ", ".join(fault.where) + (f" ({fault.scenario})" if "transfer" in fault.where else "")
    if "live" in fault.where:
        where += f"; live needs {fault.needs}" if fault.needs else ""
        where += f"; live not where {fault.finding} is waived" if fault.finding else ""
        where += f"; live pass {fault.live_pass}" if fault.live_pass != "probe" else ""
    return f"| {row} | `{fault.name}` | {fault.mechanism} | {fault.exposed_by} | {gate} | {where} |"


def by_gate(right: Mapping[str, bool]) -> Iterator[str]:
    """What was caught of what was seeded, one line a gate, and one for the benign ones.

    Args:
        right: Of each fault that was planted, by name, whether the gate that claims it was the first to object; of a
            benign one, whether none did.
    """
    planted = [FAULTS[name] for name in right]
    for gate in GATES:
        mine = [fault for fault in planted if fault.claimed_by == gate and not fault.benign]
        if mine:
            missed = ", ".join(fault.name for fault in mine if not right[fault.name])
            caught = sum(right[fault.name] for fault in mine)
            yield f"{gate:16} {caught:3} of {len(mine):3} caught" + (f"  MISSED {missed}" if missed else "")
    harmless = [fault for fault in planted if fault.benign]
    if harmless:
        yield f"{'benign':16} {sum(right[fault.name] for fault in harmless):3} of {len(harmless):3} left green"


def summary(right: Mapping[str, bool]) -> Iterator[str]:
    """What was caught of what was seeded, by gate as :func:`by_gate` says it, and then by row of the catalogue."""
    yield from by_gate(right)
    for row, faults in by_row().items():
        mine = [fault for fault in faults if fault.name in right]
        if mine:
            names = ", ".join(fault.name + ("" if right[fault.name] else " MISSED") for fault in mine)
            yield f"{row:7} {sum(right[fault.name] for fault in mine)}/{len(mine)}  {names}"


def main(path: str) -> None:
    """Writes the table into the file at ``path``.

    Raises:
        ValueError: The file lacks one of the two marks.
    """
    text = Path(path).read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"found no {BEGIN!r} and {END!r} in {path}, expected both")
    Path(path).write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
