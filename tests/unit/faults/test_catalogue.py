"""The catalogue of seeded faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_kvqual.faults import FAULTS
from pytest_kvqual.faults.catalogue import GATES, NOT_EXPRESSIBLE, live, lookup
from pytest_kvqual.faults.document import BEGIN, END, by_row, summary, table
from pytest_kvqual.worker.wire import resolve

DOCS = Path(__file__).parents[3] / "docs" / "faults.md"
# The rows of the public catalogue whose faults are of K, V, their maps or their attention.
ROWS = {
    *(1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 19, 20, 22, 23, 25, 26, 27, 29, 30, 31, 32, 33, 35, 37, 38, 39),
    *(41, 42, 44, 45, 46, 47, 48, 50, 51, 53, 54, 55, 56, 58, 60, 61, 62, 63, 64, 65, 66, 67, 69, 70, 71, 73, 74, 75),
    *(77, 78, 79, 80, 81, 82, 83, 84, 86, 87, 89, 92, 93, 94, 96, 97, 98, 100, 102, 103, 104),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault_can_be_planted_by_its_name(name: str) -> None:
    """A fault's name leads to a function whose docstring is its mechanism, and it names a gate and what exposes it."""
    pytest.importorskip("torch")
    fault = FAULTS[name]
    assert fault.name == name
    told = " ".join((resolve(lookup(name)).__doc__ or "").split()).rstrip(".")
    assert " ".join(told.lower().split()) == " ".join(fault.mechanism.lower().split())
    assert fault.claimed_by in GATES
    assert fault.exposed_by
    assert set(fault.where) <= {"live", "transfer"}
    assert fault.where


def test_an_unknown_fault_lists_the_known_ones() -> None:
    """A mistyped fault is an error that lists what there is."""
    with pytest.raises(KeyError, match=r"unknown fault 'slot-of-by-one', expected one of .*slot-off-by-one"):
        lookup("slot-of-by-one")


def test_every_row_has_a_fault_or_a_reason() -> None:
    """No row of the public catalogue is passed over, and none has both a fault and a reason to have none."""
    assert {int(row.partition("-")[2]) for row in by_row()} == ROWS
    assert not {row for row in NOT_EXPRESSIBLE if by_row()[row]}


def test_benign_rows_are_there() -> None:
    """The reports that turned out to be none are seeded as differences that must stay green."""
    assert {"P1-47", "P1-103", "P1-104"} <= {row for fault in FAULTS.values() if fault.benign for row in fault.rows}


def test_every_gate_has_a_live_fault() -> None:
    """Each gate that claims faults can be shown one in a served arm without scales and on the stock kernel."""
    assert {fault.claimed_by for fault in live(scales=False, ours=False) if not fault.benign} == set(GATES)


def test_an_arm_is_given_no_fault_that_it_cannot_show() -> None:
    """Faults of scales need scales, and changed lengths need a backend that takes them."""
    bare, full = live(scales=False, ours=False), live(scales=True, ours=True)
    assert {fault.needs for fault in bare} == {""}
    assert {fault.needs for fault in full} == {"", "scales", "ours"}


def test_the_document_has_the_table() -> None:
    """``docs/faults.md`` holds the table of this catalogue and no older one."""
    found = re.search(re.escape(BEGIN) + "(.*)" + re.escape(END), DOCS.read_text(encoding="utf-8"), re.S)
    assert found is not None
    assert found[1].strip() == table().strip()


def test_the_table_names_the_pass_that_a_live_fault_needs() -> None:
    """A fault that the usual pass does not show says which one does; the others say nothing of passes."""
    lines = [line for line in table().splitlines() if "live pass" in line]
    assert len(lines) == sum(max(1, len(f.rows)) for f in FAULTS.values() if f.live_pass != "probe")
    assert all("`chunk-sees-only-itself`" not in line or "live pass whole" in line for line in lines)


def test_a_summary_counts_by_gate_and_by_row() -> None:
    """A missed fault is counted as seeded and named as missed; a benign one is no seeded fault."""
    lines = list(summary({"slot-off-by-one": True, "key-value-swapped": False, "heads-in-another-order": True}))
    assert lines[0].split() == ["routing", "1", "of", "2", "caught", "MISSED", "key-value-swapped"]
    assert lines[1].split() == ["benign", "1", "of", "1", "left", "green"]
    assert any(line.startswith("P1-06") and "key-value-swapped MISSED" in line for line in lines)
