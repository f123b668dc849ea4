"""The transfer engine under healthy oracles, and its seams under broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_kvqual.errors import FormatError
from pytest_kvqual.kv.backends.exemplar import Exemplar
from pytest_kvqual.kv.geometry import Geometry
from pytest_kvqual.transfer.check import SECTIONS, Outcome, Subject, check, find_backend, run
from pytest_kvqual.transfer.engine import DEFAULT_GEOMETRY, BlockPool, TransferEngine, default_backend, rank_heads
from pytest_kvqual.transfer.workload import Script, names, short_workload, stream, workload

BLOCK = DEFAULT_GEOMETRY.block_size


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One torch thread: the tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def subject(kv_format: str, backend: Any = None) -> Subject:
    return Subject(module="here", kv_format=kv_format, backend=backend or default_backend(kv_format))


def missing(outcome: Outcome) -> list[str]:
    return [name for record in outcome.records for name, count in record["conditions"].items() if not count]


@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8", "k8v8", "k8v8-inline"])
def test_the_workload_is_clean_and_shows_every_condition(kv_format: str) -> None:
    """Both runs find nothing, and each condition of the record was there."""
    for outcome in check(subject(kv_format), DEFAULT_GEOMETRY, workload(BLOCK)):
        assert outcome.objections() == []
        assert missing(outcome) == []


@pytest.mark.parametrize(
    "engine",
    [
        {"backend": Exemplar("k16v8", mode="split")},
        {"backend": Exemplar("k16v8", mode="kv-splits", splits=3)},
        {"backend": Exemplar("k16v8", mode="cascade")},
        {"backend": Exemplar("k16v8"), "windows": (11, None)},
        {"backend": Exemplar("k16v8", mode="split"), "windows": (11, 9), "evict": True},
        {"ranks": 3, "layers": 1},
        {"ranks": 6, "layers": 1},
        {"static": (8, 80)},
        {"decode_first": True},
        {"prefix_cache": False},
        {"gap": 0},
    ],
    ids=lambda engine: ",".join(f"{key}={getattr(value, 'mode', value)}" for key, value in engine.items()),
)
def test_each_mechanism_is_clean(engine: dict[str, Any]) -> None:
    """Merges, windows, ranks, static buffers, row order and dense caches bring no finding."""
    given = dict(engine)
    backend = given.pop("backend", None)
    outcome = run(subject("k16v8", backend), DEFAULT_GEOMETRY, workload(BLOCK, window=11), fills=True, **given)
    assert outcome.objections() == []
    assert len(outcome.records) == engine.get("ranks", 1)


def test_head_factors_are_declared_to_the_oracles() -> None:
    """K8/V8 with a factor of each head is clean, and differs from one without."""
    backend = Exemplar("k8v8", k_factors=(0.5, 1.0, 2.0), v_factors=(1.0, 0.75, 1.5))
    assert run(subject("k8v8", backend), DEFAULT_GEOMETRY, short_workload(BLOCK)).objections() == []
    backend.v_factors = ()

    def plant(engine: TransferEngine) -> None:
        backend.v_factors = (1.5, 0.75, 1.0)

    assert run(subject("k8v8", backend), DEFAULT_GEOMETRY, short_workload(BLOCK), plant=plant).objections(["routing"])


def seam(name: str) -> Callable[[Any], Any]:
    def set_seam(function: Any) -> Any:
        SEAMS[name] = function
        return function

    return set_seam


SEAMS: dict[str, Callable[[TransferEngine], None]] = {}


@seam("block_hash")
def _(engine: TransferEngine) -> None:
    engine.block_hash = lambda parent, tokens, identity: (parent, tokens)  # type: ignore[method-assign]


@seam("copy_block")
def _(engine: TransferEngine) -> None:
    engine.copy_block = lambda source, target, positions: None  # type: ignore[method-assign]


@seam("restore_block")
def _(engine: TransferEngine) -> None:
    engine.restore_block = lambda block, saved: None  # type: ignore[method-assign]


@seam("save_block")
def _(engine: TransferEngine) -> None:
    original = engine.save_block
    engine.save_block = lambda block: original(block - 1)  # type: ignore[method-assign]


@seam("slot_mapping")
def _(engine: TransferEngine) -> None:
    original = engine.slot_mapping
    engine.slot_mapping = lambda table, rows, positions: original(table, rows, positions) ^ 1  # type: ignore[method-assign]


@seam("resume_tokens")
def _(engine: TransferEngine) -> None:
    engine.resume_tokens = lambda request: [0] * len(request.tokens)  # type: ignore[method-assign]


@seam("row_order")
def _(engine: TransferEngine) -> None:
    original = engine.row_order
    engine.row_order = lambda schedule: original(schedule)[::-1]  # type: ignore[method-assign]


@seam("runner.advance")
def _(engine: TransferEngine) -> None:
    original = engine.runner.advance

    def advance(name: str, *, scheduled: int, kept: int, tokens: Any) -> None:
        original(name, scheduled=scheduled, kept=scheduled, tokens=tokens)

    engine.runner.advance = advance  # type: ignore[method-assign]


@seam("runner.swap")
def _(engine: TransferEngine) -> None:
    def swap(left: int, right: int) -> None:
        engine.runner.table[left] = engine.runner.table[right]
        names = engine.runner.names
        names[left], names[right] = names[right], names[left]

    engine.runner.swap = swap  # type: ignore[method-assign]


@seam("upload")
def _(engine: TransferEngine) -> None:
    engine.host_buffers = 1
    engine.upload = lambda host: host  # type: ignore[method-assign]


@seam("pool.give")
def _(engine: TransferEngine) -> None:
    engine.pool.take = lambda count: list(range(1, count + 1))  # type: ignore[method-assign]


@seam("evict")
def _(engine: TransferEngine) -> None:
    original = engine.prefix_cache.match
    engine.prefix_cache.match = lambda hashes: original(hashes)[::-1]  # type: ignore[method-assign]


@pytest.mark.parametrize("name", sorted(SEAMS))
def test_a_broken_seam_is_seen(name: str) -> None:
    """Each replaced part brings a finding in some section."""
    outcome = run(subject("k16v8"), DEFAULT_GEOMETRY, workload(BLOCK), plant=SEAMS[name])
    assert outcome.records
    assert any(record[section]["findings_total"] for record in outcome.records for section in SECTIONS)


def test_a_static_buffer_that_is_not_refreshed_is_seen() -> None:
    """A step that runs on the buffers of the first one is stale."""

    def plant(engine: TransferEngine) -> None:
        original = engine.refresh
        calls: list[int] = []

        def refresh(static: Any, inputs: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                original(static, inputs)

        engine.refresh = refresh  # type: ignore[method-assign]

    outcome = run(subject("k16v8"), DEFAULT_GEOMETRY, short_workload(BLOCK), plant=plant, static=(4, 40))
    assert outcome.objections(["stale-maps"])


def test_a_restore_of_other_heads_is_seen_in_every_rank_but_the_first() -> None:
    """With more ranks than KV heads, a slice at rank times local heads is another rank's."""

    def plant(engine: TransferEngine) -> None:
        engine.rank_heads = lambda rank: (min(rank, 2), 1)  # type: ignore[method-assign]

    outcome = run(subject("k16v8"), DEFAULT_GEOMETRY, workload(BLOCK), plant=plant, ranks=6, layers=1)
    assert sum(bool(record["routing"]["findings_total"]) for record in outcome.records) > 1


def test_undo_takes_faults_back() -> None:
    """A fault of the live catalogue is planted and taken back."""
    from pytest_kvqual.faults import live

    engine = TransferEngine()
    before = [layer.impl.do_kv_cache_update.__qualname__ for layer in engine.kvqual_layers().values()]
    live.slot_off_by_one(engine)
    assert [layer.impl.do_kv_cache_update.__qualname__ for layer in engine.kvqual_layers().values()] != before
    engine.undo()
    assert [layer.impl.do_kv_cache_update.__qualname__ for layer in engine.kvqual_layers().values()] == before


def test_the_pool_grants_its_topmost_block_second() -> None:
    """The first two grants contain the last block of the pool, and block 0 is never granted."""
    pool = BlockPool(9, torch.Generator().manual_seed(0))
    blocks = pool.take(8)
    assert blocks[1] == 8
    assert sorted(blocks) == list(range(1, 9))
    with pytest.raises(FormatError, match="found 0 free blocks, expected 1"):
        pool.take(1)


def test_caches_have_a_gap_after_each_block() -> None:
    """The cache is a strided view, and its gap keeps its bytes over a run."""
    engine = TransferEngine(gap=32)
    layer = next(iter(engine.kvqual_layers().values()))
    assert not layer.kv_cache.is_contiguous()
    gap = layer.pool[:, -32:].clone()
    workload(BLOCK).play(engine)
    assert torch.equal(layer.pool[:, -32:], gap)


def test_rank_heads() -> None:
    """Query heads are divided; KV heads are divided, or replicated to neighbouring ranks."""
    geometry = Geometry(query_heads=8, kv_heads=2, head_size=8, block_size=4)
    assert [rank_heads(geometry, 2, rank) for rank in range(2)] == [((0, 4), (0, 1)), ((4, 4), (1, 1))]
    assert [rank_heads(geometry, 4, rank)[1] for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    with pytest.raises(FormatError, match="found 8 query and 2 KV heads"):
        rank_heads(geometry, 3, 0)


def test_a_script_reads_back_what_it_prints() -> None:
    """The JSON of a script runs as the script does."""
    script = workload(BLOCK)
    again = Script.parse(str(script))
    assert str(again) == str(script)
    assert "twin" in names(again)
    assert again.lengths()["under"] == BLOCK - 1
    outcome = run(subject("k16v8"), DEFAULT_GEOMETRY, again)
    assert outcome.objections() == []


def test_streams_are_prefixes_of_longer_ones() -> None:
    """A shared prefix is a shorter count of the same seed."""
    assert stream(4, 20)[:7] == stream(4, 7)
    assert stream(4, 7) != stream(5, 7)


def test_find_backend_finds_ours_with_their_formats() -> None:
    """Our modules need no format."""
    assert find_backend("pytest_kvqual.kv.backends.k16v8").kv_format == "k16v8"
    assert find_backend("pytest_kvqual.kv.backends.reference").kv_format == "k16v16"
    assert find_backend("pytest_kvqual.kv.backends.exemplar:k8v8").backend.attend
