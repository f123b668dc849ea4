"""What a degradation hands on in place of K and V, on modules without an engine, and that no oracle sees it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic_engine import SyntheticEngine, workload

from pytest_kvqual.faults import degradations
from pytest_kvqual.faults.degradations import rounded_to_levels, through_e4m3
from pytest_kvqual.worker.wire import WorkerError

HEADS, ELEMENTS, QUERY = 3, 64, 9 * 64
BITS = {"v_two_bits": 2, "v_three_bits": 3, "v_four_bits": 4, "k_two_bits": 2}
DEGRADATIONS = (*BITS, "v_times_four", "k_e4m3_unscaled")
SECTIONS = ("row_map", "stale-maps", "routing", "shifted-outputs", "placement")


class Layer(torch.nn.Module):
    """Keeps what its forward was given last."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.impl = SimpleNamespace(num_kv_heads=heads)
        self.seen: tuple[Any, ...] = ()

    def forward(self, query: Any, key: Any, value: Any, output_shape: Any = None) -> Any:
        self.seen = (query, key, value, output_shape)
        return query


class Worker:
    """The part of a worker that a degradation uses."""

    def __init__(self, *layers: Any) -> None:
        self.kvqual_undo: list[Callable[[], None]] = []
        self.layers = {f"layers.{number}": layer for number, layer in enumerate(layers)}

    def kvqual_layers(self) -> dict[str, Any]:
        return self.layers


def projection(
    tokens: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, K and V as views of one projection's output."""
    random = torch.Generator().manual_seed(seed)
    width = HEADS * ELEMENTS
    whole = torch.randn(tokens, QUERY + 2 * width, generator=random).to(dtype)
    return whole[:, :QUERY], whole[:, QUERY : QUERY + width], whole[:, QUERY + width :]


def planted(name: str, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The K and V that a layer's forward is given under a degradation."""
    layer = Layer()
    getattr(degradations, name)(Worker(layer))
    layer(*tensors)
    return layer.seen[1], layer.seen[2]


def heads_apart(tensor: torch.Tensor) -> torch.Tensor:
    """``[T, Hkv, D]``."""
    return tensor.reshape(tensor.shape[0], HEADS, ELEMENTS)


def changed_one(name: str) -> int:
    """The place among (query, K, V) of the tensor that a degradation changes."""
    return 1 if name.startswith("k_") else 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DEGRADATIONS)
def test_one_of_k_and_v_changes_and_keeps_shape_and_dtype(name: str, dtype: torch.dtype) -> None:
    """The degraded tensor has other values, its shape and dtype and a dense layout; the other is the very object."""
    given = projection(7, dtype=dtype)
    which = changed_one(name)
    found = (None, *planted(name, given))
    other = 3 - which
    assert found[other] is given[other]
    degraded = found[which]
    assert degraded is not None
    assert (degraded.shape, degraded.dtype) == (given[which].shape, dtype)
    assert degraded.is_contiguous()
    assert not given[which].is_contiguous()
    assert degraded.view(-1, HEADS, ELEMENTS).shape == (7, HEADS, ELEMENTS)
    assert (degraded != given[which]).float().mean() > 0.5


@pytest.mark.parametrize("name", DEGRADATIONS)
def test_the_callers_tensors_are_not_altered(name: str) -> None:
    """The projection that K and V are views of keeps every bit, and the degraded tensor shares no memory with it."""
    given = projection(5)
    kept = [tensor.clone() for tensor in given]
    degraded = planted(name, given)[changed_one(name) - 1]
    degraded.fill_(7.0)
    for tensor, before in zip(given, kept, strict=True):
        assert torch.equal(tensor.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("name", DEGRADATIONS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_step_of_no_token_or_one(name: str, tokens: int) -> None:
    """Shapes hold for a step without tokens and for one token."""
    for found in planted(name, projection(tokens)):
        assert found.shape == (tokens, HEADS * ELEMENTS)


@pytest.mark.parametrize("name", DEGRADATIONS)
def test_heads_as_a_dimension_of_their_own(name: str) -> None:
    """K and V of three dimensions give the elements of those of two."""
    query, key, value = projection(6)
    flat = planted(name, (query, key, value))
    shaped = planted(name, (query, heads_apart(key), heads_apart(value)))
    for left, right in zip(flat, shaped, strict=True):
        assert right.shape == (6, HEADS, ELEMENTS)
        assert torch.equal(left, right.flatten(1))


@pytest.mark.parametrize(("name", "bits"), BITS.items())
def test_levels_of_each_token_and_head(name: str, bits: int) -> None:
    """A vector has at most 2**bits values, evenly spaced up to the type's rounding, and keeps its ends where they are.

    No element moves by more than half a step, and some vector takes most of its levels.
    """
    given = projection(40)
    degraded = heads_apart(planted(name, given)[changed_one(name) - 1]).float()
    original = heads_apart(given[changed_one(name)]).float()
    low, high = original.amin(-1, keepdim=True), original.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    assert torch.equal(degraded.amin(-1, keepdim=True), low)
    assert torch.equal(degraded.amax(-1, keepdim=True), high)
    assert torch.equal(degraded[original == low.expand_as(original)], original[original == low.expand_as(original)])
    rounding = 2.0**-8 * torch.maximum(low.abs(), high.abs())
    assert bool(((degraded - original).abs() <= step / 2 + rounding).all())
    code = (degraded - low) / step
    assert bool(((code - code.round()).abs() * step <= rounding).all())
    counts = {len(vector.unique()) for vector in degraded.flatten(0, 1)}
    assert max(counts) <= 2**bits
    assert max(counts) >= min(2**bits, 12)


def test_four_levels_of_a_known_vector() -> None:
    """The levels of a vector from 1 to 4 are 1, 2, 3 and 4: the range lies on one side of zero and loses none."""
    given = torch.tensor([[1.0, 1.4, 1.6, 2.4, 2.6, 3.4, 3.6, 4.0]])
    assert rounded_to_levels(given, bits=2).tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]]


@pytest.mark.parametrize("number", [0.0, -3.25, 1e-38])
def test_a_constant_vector_stays(number: float) -> None:
    """A vector without a range is handed on with its values, and without a NaN."""
    given = torch.full((2, 3, 8), number)
    assert torch.equal(rounded_to_levels(given, bits=2), given)


@pytest.mark.parametrize("name", [name for name in DEGRADATIONS if name != "v_times_four"])
def test_rounding_twice_is_rounding_once(name: str) -> None:
    """Degraded again, a degraded tensor keeps its values, also where the range is a few units in the last place."""
    for seed, (scale, offset) in enumerate([(1.0, 0.0), (0.01, 1.0), (0.002, -4.0), (100.0, 30.0), (1e-4, 0.0)]):
        query, key, value = projection(50, seed=seed)
        given = (query, key * scale + offset, value * scale + offset)
        once = planted(name, given)
        twice = planted(name, (query, *once))
        for left, right in zip(once, twice, strict=True):
            assert torch.equal(left, right)


def test_times_four_is_exact() -> None:
    """V comes out 4 times as large, exactly, and twice so 16 times."""
    given = projection(9)
    once = planted("v_times_four", given)
    assert torch.equal(once[1].double(), given[2].double() * 4)
    assert torch.equal(planted("v_times_four", (given[0], *once))[1].double(), given[2].double() * 16)


def test_e4m3_without_a_scale_against_torch() -> None:
    """Rounded values are those of torch's own cast of the clamped values; beyond 448 they saturate, tiny ones are 0."""
    random = torch.Generator().manual_seed(3)
    given = torch.ldexp(torch.randn(4000, generator=random), torch.randint(-14, 11, (4000,), generator=random))
    assert torch.equal(through_e4m3(given), given.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    edges = torch.tensor([1e9, -1e9, float("inf"), 449.0, 2.0**-10, 2.0**-9, 0.0, 17.0, 18.0])
    assert through_e4m3(edges).tolist() == [448.0, -448.0, 448.0, 448.0, 0.0, 2.0**-9, 0.0, 16.0, 18.0]
    assert bool(through_e4m3(torch.tensor([float("nan")])).isnan().all())


def test_key_and_value_by_name_and_further_arguments() -> None:
    """A layer called with keywords, or with further arguments, is degraded the same; what it returns is handed back."""
    layer = Layer()
    degradations.v_two_bits(Worker(layer))
    query, key, value = projection(3)
    assert layer(query, key, value, "shape") is query
    positional = layer.seen
    assert layer(query=query, key=key, value=value, output_shape="shape") is query
    assert layer.seen[0] is positional[0] is query
    assert torch.equal(layer.seen[2], positional[2])
    assert layer.seen[3] == positional[3] == "shape"


def test_a_layer_without_k_and_v_of_its_own() -> None:
    """None, of a layer that reads another's cache, is handed on."""
    layer = Layer()
    degradations.v_two_bits(Worker(layer))
    degradations.k_two_bits(Worker(layer))
    layer(projection(2)[0], None, None)
    assert layer.seen[1:3] == (None, None)


def test_every_layer_and_back() -> None:
    """Each layer has its own number of KV heads, and undoing gives back the class's own forward."""
    first, second = Layer(), Layer(heads=1)
    worker = Worker(first, second)
    degradations.v_two_bits(worker)
    query, key, value = projection(4)
    first(query, key, value)
    second(query, key, value)
    assert {len(vector.unique()) for vector in second.seen[2]} == {4}
    assert not torch.equal(first.seen[2], second.seen[2])
    while worker.kvqual_undo:
        worker.kvqual_undo.pop()()
    for layer in (first, second):
        assert "forward" not in vars(layer)
        layer(query, key, value)
        assert layer.seen[2] is value


def test_two_degradations_add_up() -> None:
    """One after the other they change both K and V, and each is undone."""
    layer = Layer()
    worker = Worker(layer)
    degradations.v_times_four(worker)
    degradations.k_two_bits(worker)
    degradations.v_two_bits(worker)
    query, key, value = projection(4)
    layer(query, key, value)
    assert torch.equal(layer.seen[1], planted("k_two_bits", (query, key, value))[0])
    assert torch.equal(layer.seen[2], planted("v_two_bits", (query, key, value))[1] * 4)
    assert len(worker.kvqual_undo) == 3


def test_nothing_to_degrade_is_refused() -> None:
    """No attention layer, none with a forward, and one that takes a latent are refused before anything is replaced."""

    class Latent(torch.nn.Module):
        def forward(self, q: Any, kv_c_normed: Any, k_pe: Any) -> Any:
            return q

    with pytest.raises(WorkerError, match="found no attention layer"):
        degradations.v_two_bits(Worker())
    with pytest.raises(WorkerError, match=r"layers\.0: found a forward that takes \[\], expected"):
        degradations.v_two_bits(Worker(SimpleNamespace()))
    good = Layer()
    with pytest.raises(WorkerError, match=r"layers\.1: found a forward that takes \['q', 'kv_c_normed', 'k_pe'\]"):
        degradations.v_two_bits(Worker(good, Latent()))
    assert "forward" not in vars(good)


# -- the oracles ------------------------------------------------------------------------------------------------------


class Attending(SyntheticEngine):
    """The engine without a model, whose layers are called as the engine's modules are: ``forward`` hands K and V on."""

    def __init__(self, kv_format: str) -> None:
        super().__init__(kv_format)
        self.outputs: list[torch.Tensor] = []
        for layer in self.kvqual_layers().values():
            layer.forward = self._forwarding(layer)

    def _forwarding(self, layer: Any) -> Callable[..., object]:
        def forward(query: Any, key: Any, value: Any, metadata: Any, mapping: Any) -> object:
            output = torch.zeros_like(query)
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, mapping)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)
            self.outputs.append(output)
            return output

        return forward

    def _forward(self, batch: Any, padding: int) -> None:
        impls = {name: layer.impl for name, layer in self.kvqual_layers().items()}
        for layer in self.kvqual_layers().values():
            layer.impl = _Through(layer)
        try:
            super()._forward(batch, padding)
        finally:
            for name, layer in self.kvqual_layers().items():
                layer.impl = impls[name]


class _Through:
    """Stands where the engine calls a layer's two parts: calls its ``forward`` once, with both parts' arguments."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._impl = layer, layer.impl
        self._mapping: Any = None

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self._mapping = slot_mapping

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        self._layer.impl = self._impl
        output.copy_(self._layer.forward(query, key, value, metadata, self._mapping))


@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8"])
@pytest.mark.parametrize("name", DEGRADATIONS)
def test_no_oracle_objects_to_a_degradation(name: str, kv_format: str) -> None:
    """Outputs differ from those without it, every row was checked, and no section of the record has a finding."""
    healthy, degraded = Attending(kv_format), Attending(kv_format)
    getattr(degradations, name)(degraded)
    records = []
    for engine in (healthy, degraded):
        window = engine.open()
        workload(engine)
        records.append(window.finish())
    for record in records:
        section: Any
        for part in SECTIONS:
            section = record[part]
            assert section["findings_total"] == 0, (part, section["findings"])
        section = record["routing"]
        assert section["cells_checked"] > 100
    same = [torch.equal(left, right) for left, right in zip(healthy.outputs, degraded.outputs, strict=True)]
    assert len(same) > 20
    assert not any(same)
