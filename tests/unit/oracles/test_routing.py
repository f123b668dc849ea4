"""The routing oracle: slot mappings, shared blocks, and the words for wrong cells."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.kv import formats
from pytest_kvqual.kv.formats import Cells, Format
from pytest_kvqual.oracles import routing
from pytest_kvqual.oracles.findings import Tally
from pytest_kvqual.oracles.shadow import differing
from pytest_kvqual.oracles.step import NO_SLOT, RowRequest, StepPlan, plan_step
from pytest_kvqual.oracles.whereabouts import Holding

HEADS, SIZE, BLOCK, BLOCKS = 3, 8, 4, 6


def _plan() -> StepPlan:
    return plan_step(
        [
            RowRequest(request="a", start=0, scheduled=6, blocks=(5, 2)),
            RowRequest(request="b", start=7, scheduled=1, blocks=(1, 3)),
        ],
        BLOCK,
    )


def _mapping(slots: torch.Tensor) -> Tally:
    tally = Tally()
    routing.check_slot_mapping(tally, _plan(), layer="L", slot_mapping=slots)
    return tally


def test_a_mapping_that_follows_the_plan_passes() -> None:
    """The planned slots pass in either integer type, and -1 in each padding row."""
    for dtype in (torch.int32, torch.int64):
        tally = _mapping(torch.cat([_plan().slots, torch.tensor([-1, -1, -1])]).to(dtype))
        assert tally.to_dict() == {"padding_rows": 3, "findings": [], "findings_total": 0, "kinds": {}}


@pytest.mark.parametrize(
    ("delta", "words"),
    [(1, "one slot late"), (-1, "one slot early"), (BLOCK, "one block late"), (-8, "2 blocks early")],
)
def test_a_wrong_slot_says_how_far_it_is(delta: int, words: str) -> None:
    """A mapping off by some slots is counted per row and named for the first."""
    tally = _mapping(_plan().slots + delta)
    assert tally.kinds == {"wrong-slot": 7}
    assert tally.findings == [f"L: slot of request a position 0 is {20 + delta}, expected 20: {words} (7 of 7 rows)"]


@given(st.integers(0, 6), st.integers(-1, 23))
def test_any_wrong_slot_is_found(row: int, slot: int) -> None:
    """One row mapped anywhere else is one finding of that row."""
    slots = _plan().slots.clone()
    same = int(slots[row]) == slot
    slots[row] = slot
    tally = _mapping(slots)
    assert tally.findings_total == (0 if same else 1)
    assert same or f"slot of {_plan().name(row)} is {slot}, expected {int(_plan().slots[row])}" in tally.findings[0]


def test_a_row_without_a_block_must_not_be_mapped() -> None:
    """A position without a block has slot -1; any other is wrong, and no distance is given."""
    plan = plan_step([RowRequest(request="a", start=0, scheduled=1, blocks=())], BLOCK)
    tally = Tally()
    routing.check_slot_mapping(tally, plan, layer="L", slot_mapping=torch.tensor([0]))
    assert tally.findings == ["L: slot of request a position 0 is 0, expected -1 (1 of 1 rows)"]


def test_padding_rows_must_be_skipped() -> None:
    """A padding row that is mapped to a slot is a finding, slot 0 too; -1 is none."""
    tally = _mapping(torch.cat([_plan().slots, torch.tensor([-1, 0, 9, -1])]))
    assert tally.counts["padding_rows"] == 4
    assert tally.kinds == {"padding-slot": 2}
    assert tally.findings == ["L: padding row 8 is mapped to slot 0, expected -1"]


def test_a_short_mapping_is_a_finding() -> None:
    """A slot mapping with fewer rows than the step is objected to, not compared in part."""
    tally = _mapping(_plan().slots[:6])
    assert tally.kinds == {"wrong-slot": 7}
    assert tally.findings == ["L: slot mapping has 6 rows, expected 7"]
    assert "padding_rows" not in tally.counts


def test_blocks_have_one_holder_unless_they_may_be_shared() -> None:
    """Two holders are a finding, unless they are two requests with the same logical block that may share it."""
    asked: list[tuple[str, str, int]] = []

    def may_share(left: str, right: str, number: int) -> bool:
        asked.append((left, right, number))
        return (left, right) == ("a", "b")

    tally = Tally()
    holders = {
        3: [("a", 0), ("b", 0)],
        4: [("a", 1), ("b", 2)],
        5: [("a", 2), ("c", 2), ("b", 2)],
        6: [("d", 0), ("d", 0)],
        7: [("e", 4)],
    }
    routing.check_sharing(tally, holders, may_share)
    assert tally.findings == [
        "block 4 is held by request a block 1 and by request b block 2, expected one holder",
        "block 5 is held by request a block 2 and by request c block 2, expected one holder",
        "block 6 is held by request d block 0 and by request d block 0, expected one holder",
    ]
    assert tally.kinds == {"shared-block": 3}
    assert asked == [("a", "b", 0), ("a", "c", 2), ("a", "b", 2)]


# -- wrong cells in words ------------------------------------------------------------------------------------------


def _random(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(rows, HEADS, SIZE, generator=generator).bfloat16() for _ in range(2))
    return key, value


class _Pool:
    """A cache in which request a lies in blocks 4, 2 and request b in block 1, as it must be; then damaged."""

    def __init__(self, name: str = "k16v8") -> None:
        self.codec: Format = formats.declared(name)
        content = formats.cell_bytes(self.codec, SIZE)
        raw = torch.zeros(BLOCKS, HEADS, BLOCK, content, dtype=torch.uint8)
        self.cache = raw.view(torch.bfloat16) if name == "k16v16" else raw
        self.slots = {"a": torch.tensor([16, 17, 18, 19, 8, 9]), "b": torch.tensor([4, 5, 6])}
        self.held = {}
        for seed, (request, slots) in enumerate(self.slots.items()):
            cells = self.codec.encode(*_random(slots.numel(), seed), 0.01)
            self.codec.place(self.cache, slots, cells)
            self.held[request] = Holding(request=request, k=cells.k, v=cells.v, slots=slots)
        self.before = self.cache.clone()

    def read(self, *slots: int) -> Cells:
        return self.codec.read(self.before, torch.tensor(slots))

    def put(self, slot: int, cells: Cells) -> None:
        self.codec.place(self.cache, torch.tensor([slot]), cells)

    def found(self, kind: str = "wrong-cell", blocks: range = range(BLOCKS)) -> Tally:
        tally = Tally()
        every = torch.tensor([block * BLOCK + offset for block in blocks for offset in range(BLOCK)])
        routing.check_cells(
            tally,
            differing(every, self.codec.read(self.cache, every), self.codec.read(self.before, every)),
            layer="L",
            kind=kind,
            block_size=BLOCK,
            owner=lambda slot: f"owner of {slot}",
            holdings=list(self.held.values()),
            decode=lambda cells: self.codec.decode(cells, 0.01),
            peek=lambda slots: self.codec.read(self.cache, slots),
            slots=BLOCKS * BLOCK,
        )
        return tally


@pytest.mark.parametrize("name", ["k16v16", "k16v8"])
def test_no_wrong_cell_is_no_finding(name: str) -> None:
    """Where nothing differs nothing is recorded."""
    assert _Pool(name).found().findings_total == 0


def test_a_cell_that_holds_a_neighbours_value_says_so() -> None:
    """A shift by one slot: whose K and V it is, how far it lies, and where the own value went."""
    pool = _Pool()
    for slot in (17, 18, 19):
        pool.put(slot, pool.read(slot - 1))
    tally = pool.found("some-kind")
    assert tally.kinds == {"some-kind": 9}
    (line,) = tally.findings
    assert line == (
        "L: block 4 offset 1 (slot 17, owner of 17), K and V of KV head 0, 1, 2: holds K of request a position 0"
        " (one slot late); its own value lies in slot 18, one slot late (9 K and 9 V cells differ)"
    )


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        (17, 18, "holds K of request a position 2 (one slot early)"),
        (12, 8, "holds K of request a position 4 (one block late)"),
        (4, 8, "holds K of request a position 4 (one block early)"),
        (0, 5, "holds K of request b position 1 (home is block 1 offset 1)"),
        (16, 6, "holds K of request b position 2 (home is block 1 offset 2)"),
    ],
)
def test_a_misplaced_value_is_named(target: int, source: int, words: str) -> None:
    """Wherever a value of the ledger lands, it is named with its request, position and distance."""
    pool = _Pool()
    pool.put(target, pool.read(source))
    (line,) = pool.found().findings
    assert f"(slot {target}, owner of {target}), K and V of KV head 0, 1, 2: {words}" in line
    assert line.endswith(" (3 K and 3 V cells differ)")


def test_only_one_head_is_named_where_one_differs() -> None:
    """K of one head from another position: K, the head, and the position."""
    pool = _Pool()
    cells = pool.read(9)
    cells.k[0, 2] = pool.read(17).k[0, 2]
    pool.put(9, cells)
    tally = pool.found()
    assert tally.kinds == {"wrong-cell": 1}
    (line,) = tally.findings
    assert line == (
        "L: block 2 offset 1 (slot 9, owner of 9), K of KV head 2: holds K of request a position 1 (2 blocks"
        " early) (1 K and 0 V cells differ)"
    )


def test_swapped_heads_are_named() -> None:
    """The value of another KV head of the same cell names that head."""
    pool = _Pool()
    cells = pool.read(5)
    cells.v[0] = cells.v[0, [1, 0, 2]]
    pool.put(5, cells)
    (line,) = pool.found().findings
    assert "V of KV head 0, 1: holds V of request b position 1, KV head 1 (in its own slot)" in line
    assert line.endswith(" (0 K and 2 V cells differ)")


def test_v_in_the_place_of_k_is_named() -> None:
    """K and V exchanged: by the bytes where they have as many, by their values where not."""
    pool = _Pool("k16v16")
    cells = pool.read(5)
    pool.put(5, Cells(k=cells.v, v=cells.k))
    (line,) = pool.found().findings
    assert "K and V of KV head 0, 1, 2: holds V of request b position 1 (in its own slot)" in line
    pool = _Pool()
    key, value = (it[1:2] for it in _random(3, 1))
    wrong = pool.codec.encode(value, key, 0.01)
    pool.put(5, Cells(k=wrong.k, v=pool.read(5).v))
    (line,) = pool.found().findings
    assert "K of KV head 0, 1, 2: holds V where K belongs" in line
    pool.put(5, Cells(k=pool.read(5).k, v=wrong.v))
    (line,) = pool.found().findings
    assert "V of KV head 0, 1, 2: holds K where V belongs" in line


@pytest.mark.parametrize(("which", "factor"), [("K", 0.5), ("V", 0.25), ("V", 2.0), ("K", -1.0)])
def test_a_multiple_is_named(which: str, factor: float) -> None:
    """A scale that was not applied, or applied twice, is named as a multiple of what belongs there."""
    pool = _Pool()
    key, value = (it[2:3].clone() for it in _random(3, 1))
    cells = (
        pool.codec.encode(key * factor, value, 0.01) if which == "K" else pool.codec.encode(key, value, 0.01 / factor)
    )
    pool.put(6, cells)
    (line,) = pool.found().findings
    found = float(line.split("holds ")[1].split(" times the ")[0])
    assert abs(found / factor - 1) < 0.05
    assert f" times the {which} that belongs there" in line


def test_a_multiple_of_small_values_is_named() -> None:
    """The ratio is that of the values, however small they are."""
    pool = _Pool("k16v16")
    key, value = (it[2:3] * 2.0**-12 for it in _random(3, 1))
    own = pool.codec.encode(key, value, 1.0)
    pool.codec.place(pool.before, torch.tensor([6]), own)
    pool.put(6, pool.codec.encode(key * 0.5, value, 1.0))
    (line,) = pool.found().findings
    assert "holds 0.5 times the K that belongs there" in line


def test_other_bytes_are_shown() -> None:
    """A value that is nothing known is shown by its first wrong byte, in K before V."""
    pool = _Pool()
    cells = pool.read(4)
    cells.k[0, 1, 5] ^= 0xFF
    cells.v[0, 2, 3] ^= 0x80
    pool.put(4, cells)
    (line,) = pool.found().findings
    old = int(pool.read(4).k[0, 1, 5])
    assert "K and V of KV head 1, 2: " in line
    assert f"byte 5 of K is 0x{old ^ 0xFF:02x}, expected 0x{old:02x}; the ledger holds this value nowhere" in line
    assert line.endswith(" (1 K and 1 V cells differ)")
    cells.k[0, 1, 5] ^= 0xFF
    pool.put(4, cells)
    (line,) = pool.found().findings
    assert f"byte 3 of V is 0x{int(pool.read(4).v[0, 2, 3]) ^ 0x80:02x}, expected" in line


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_values_without_a_size_have_no_multiple(value: float) -> None:
    """A cell full of NaN, infinity or zero is a finding in bytes."""
    pool = _Pool("k16v16")
    one = torch.full((1, HEADS, SIZE), value).bfloat16()
    pool.put(9, pool.codec.encode(one, one, 1.0))
    tally = pool.found()
    assert tally.kinds == {"wrong-cell": 3}
    assert "of K is 0x" in tally.findings[0]


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        (21, "one block late"),
        (13, "one block early"),
        (0, "home is block 4 offset 1"),
        (3, "home is block 4 offset 1"),
        (5, None),
        (20, None),
    ],
)
def test_where_the_own_value_lies_is_said(lies: int, words: str | None) -> None:
    """A value that went beside its slot, or to block 0, is pointed at; elsewhere it is not looked for."""
    pool = _Pool()
    own = pool.read(17)
    # Slot 17 keeps what was there before its write, and a block that is not compared got the write.
    pool.put(17, pool.codec.encode(*_random(1, 77), 0.01))
    pool.put(lies, own)
    (line,) = pool.found(blocks=range(4, 5)).findings
    assert "slot 17" in line
    assert ("its own value" in line) == (words is not None)
    assert words is None or f"; its own value lies in slot {lies}, {words} (3 K and 3 V cells differ)" in line


def test_the_own_value_of_a_cell_that_nobody_wrote_is_not_looked_for() -> None:
    """In a fresh pool an unwritten cell's zeros lie everywhere: that says nothing."""
    pool = _Pool()
    pool.put(21, pool.codec.encode(*_random(1, 77), 0.01))
    (line,) = pool.found().findings
    assert "slot 21" in line
    assert "its own value" not in line


def test_a_value_that_only_agrees_in_k_is_not_its_own() -> None:
    """The own value is K and V together."""
    pool = _Pool()
    own = pool.read(17)
    pool.put(17, pool.codec.encode(*_random(1, 77), 0.01))
    pool.codec.place(pool.before, torch.tensor([18]), Cells(k=own.k, v=pool.read(18).v))
    pool.put(18, Cells(k=own.k, v=pool.read(18).v))
    (line,) = pool.found().findings
    assert "its own value" not in line
    pool.codec.place(pool.before, torch.tensor([18]), Cells(k=pool.read(19).k, v=own.v))
    pool.put(18, pool.read(18))
    (line,) = pool.found().findings
    assert "its own value" not in line


def test_the_ends_of_the_pool_are_searched_within_it() -> None:
    """The first and the last slot of the pool have neighbours on one side only."""
    for slot, neighbour, words in ((0, 1, "one slot late"), (23, 22, "one slot early")):
        pool = _Pool()
        own = pool.codec.encode(*_random(1, 5), 0.01)
        pool.held["c"] = Holding(request="c", k=own.k, v=own.v, slots=torch.tensor([slot]))
        pool.codec.place(pool.before, torch.tensor([slot]), own)
        pool.codec.place(pool.before, torch.tensor([neighbour]), own)
        pool.put(neighbour, own)
        pool.put(slot, pool.codec.encode(*_random(1, 6), 0.01))
        (line,) = pool.found().findings
        assert f"; its own value lies in slot {neighbour}, {words}" in line


def test_a_cell_whose_value_is_known_is_named_before_one_whose_is_not() -> None:
    """Of several wrong cells the first whose value the ledger holds is put in words; all are counted."""
    pool = _Pool()
    pool.put(4, pool.codec.encode(*_random(1, 91), 0.01))
    pool.put(18, pool.read(19))
    tally = pool.found()
    assert tally.kinds == {"wrong-cell": 6}
    assert "slot 18, owner of 18" in tally.findings[0]
    assert "holds K of request a position 3 (one slot early)" in tally.findings[0]


def test_a_position_without_a_slot_has_no_distance_to_be_near() -> None:
    """The ledger's positions of a block that was taken back are at no slot, and are still found by value."""
    pool = _Pool()
    pool.held["a"].slots[0] = NO_SLOT
    pool.put(20, pool.read(16))
    (line,) = pool.found().findings
    assert "holds K of request a position 0" in line
