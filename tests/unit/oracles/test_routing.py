"""The routing oracle: writes, maps and blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.oracles import routing
from pytest_kvqual.oracles.findings import KEPT_FINDINGS, Tally
from pytest_kvqual.oracles.step import RowRequest, StepPlan, plan_step


def _plan() -> StepPlan:
    return plan_step(
        [
            RowRequest(request="a", start=0, scheduled=6, blocks=(5, 2)),
            RowRequest(request="b", start=7, scheduled=1, blocks=(1, 3)),
        ],
        4,
    )


def _table() -> torch.Tensor:
    return torch.tensor([[5, 2, 0], [1, 3, 9]])


def _metadata(tally: Tally, **changed: torch.Tensor) -> bool:
    arguments = {
        "block_table": _table(),
        "seq_lens": torch.tensor([6, 8]),
        "query_start_loc": torch.tensor([0, 6, 7]),
        **changed,
    }
    return routing.check_metadata(tally, _plan(), layer="L", **arguments)


def test_agreeing_metadata_finds_nothing() -> None:
    """Metadata that follow the plan pass, whatever stands behind a request's history."""
    tally = Tally()
    assert _metadata(tally)
    assert tally.findings_total == 0
    assert tally.counts["tables_compared"] == 2


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"block_table": torch.tensor([[5, 9, 0], [1, 3, 9]])}, "holds block 9 at logical block 1, expected block 2"),
        ({"block_table": torch.tensor([[5, 2, 0]])}, "holds block nothing at logical block 0, expected block 1"),
        ({"seq_lens": torch.tensor([6, 9])}, "seq_len of request b is 9, expected 8"),
        ({"seq_lens": torch.tensor([6])}, "seq_len of request b is no row, expected 8"),
        ({"query_start_loc": torch.tensor([0, 5, 7])}, r"query_start_loc is \[0, 5, 7\], expected \[0, 6, 7\]"),
    ],
)
def test_wrong_metadata_is_named(changed: dict[str, torch.Tensor], expected: str) -> None:
    """Each map that does not follow the plan is named with both values."""
    tally = Tally()
    assert not _metadata(tally, **changed)
    assert tally.findings_total >= 1
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(" ".join(tally.findings))


def test_the_slot_mapping_must_follow_the_plan() -> None:
    """A slot off by one is counted per row and named for the first."""
    tally = Tally()
    right = _plan().slots
    routing.check_slot_mapping(tally, _plan(), layer="L", slot_mapping=right)
    assert tally.findings_total == 0
    routing.check_slot_mapping(tally, _plan(), layer="L", slot_mapping=right + 1)
    assert tally.findings_total == right.numel()
    assert tally.findings == ["L: slot of request a position 0 is 21, expected 20"]


def test_padding_rows_must_be_skipped() -> None:
    """A padding row that is mapped to a slot is a finding; -1 is none."""
    tally = Tally()
    padded = torch.cat([_plan().slots, torch.tensor([-1, 0])])
    routing.check_slot_mapping(tally, _plan(), layer="L", slot_mapping=padded)
    assert tally.counts["padding_rows"] == 2
    assert tally.findings == ["L: padding row 8 is mapped to slot 0, expected -1"]


def test_a_short_slot_mapping_is_a_finding() -> None:
    """A slot mapping with fewer rows than the step is objected to, not compared in part."""
    tally = Tally()
    routing.check_slot_mapping(tally, _plan(), layer="L", slot_mapping=_plan().slots[:3])
    assert tally.findings_total == 7


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 23))
def test_any_changed_byte_is_a_wrong_cell(old: int, new: int, where: int) -> None:
    """A cell is wrong exactly when one of its bytes differs."""
    expected = torch.full((4, 3, 2), old, dtype=torch.uint8)
    found = expected.clone()
    found.view(-1)[where] = new
    wrong = routing.wrong_cells(found, expected)
    assert wrong.tolist() == [index == where // 6 and old != new for index in range(4)]


def test_cells_of_other_shape_are_refused() -> None:
    """Comparing what cannot be compared is an error and no pass."""
    with pytest.raises(ValueError, match="expected"):
        routing.wrong_cells(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(3, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="of uint8"):
        routing.wrong_cells(torch.zeros(2, 3), torch.zeros(2, 3))


@given(st.integers(0, 5), st.integers(0, 41), st.integers(1, 255))
def test_any_changed_byte_changes_the_sum_of_its_block(block: int, byte: int, delta: int) -> None:
    """One changed byte changes the sum of its block and of no other, also where rows are no multiple of eight bytes."""
    cache = torch.arange(6 * 42, dtype=torch.int64).to(torch.uint8).view(6, 3, 14)
    before = routing.block_sums(cache)
    cache.view(6, 42)[block, byte] += delta
    changed = (routing.block_sums(cache) != before).tolist()
    assert changed == [index == block for index in range(6)]


def test_sums_of_a_strided_cache_see_its_own_bytes_only() -> None:
    """A cache that is a slice of a wider allocation is summed over its own cells."""
    wide = torch.zeros(4, 2, 8, 10, dtype=torch.bfloat16)
    cache = wide[:, :, :, 2:8]
    before = routing.block_sums(cache)
    wide[:, :, :, 9] = 1
    assert torch.equal(routing.block_sums(cache), before)
    wide[2, 1, 3, 4] = 1
    assert (routing.block_sums(cache) != before).tolist() == [False, False, True, False]


def test_findings_are_kept_in_words_up_to_a_bound_and_counted_without() -> None:
    """Every finding counts, also when its words are not kept."""
    tally = Tally()
    for number in range(KEPT_FINDINGS + 5):
        tally.find(f"finding {number}", 2)
    tally.find("nothing", 0)
    assert tally.findings_total == 2 * (KEPT_FINDINGS + 5)
    assert len(tally.findings) == KEPT_FINDINGS
