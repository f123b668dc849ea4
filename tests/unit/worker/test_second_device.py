"""The oracles over caches on another device: nothing is compared across devices, and the findings are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from second_device import MixedError, SecondDevice  # noqa: E402 - torch may be absent
from synthetic_engine import SyntheticEngine, workload  # noqa: E402

from pytest_kvqual.worker import taps  # noqa: E402


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondDevice]:
    """A second device, which is where the taps let the oracles make their tensors."""
    second = SecondDevice()
    monkeypatch.setattr(taps, "made_on", lambda place: second.default(True))
    monkeypatch.setattr(taps, "made_by_the_engine", lambda place: second.unwatched())
    with second:
        yield second


def test_the_stand_in_refuses_what_a_device_would(device: SecondDevice) -> None:
    """An operator over both, and a look at its memory, are refused; a copy to the host is on the host."""
    there = device.mark(torch.ones(3))
    here = torch.ones(3)
    with pytest.raises(MixedError):
        there + here
    with pytest.raises(MixedError):
        there.numpy()
    assert device.holds(there * 2)
    assert device.holds(there[1:])
    assert not device.holds(there.cpu())
    assert (there.cpu() + here).tolist() == [2.0, 2.0, 2.0]
    with device.default(True):
        assert device.holds(torch.arange(3))
        assert device.holds(torch.tensor([1, 2]))
    assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("options", [{}, {"probe": True, "fills": True}])
@pytest.mark.parametrize("kv_format", ["k16v16", "k16v8"])
def test_a_window_stays_on_the_caches_device(kv_format: str, options: dict[str, bool], device: SecondDevice) -> None:
    """A healthy run over caches on the second device mixes nothing and has no finding."""
    record = _record(device, SyntheticEngine(kv_format), options)
    assert {name: part["kinds"] for name, part in record.items() if isinstance(part, dict) and part.get("kinds")} == {}
    assert record["row_map"]["checked"] == record["rows"]["scheduled"] > 60


def test_a_finding_is_reported_from_the_caches_device(device: SecondDevice) -> None:
    """A wrong cell on the second device is found, named and packed as a reproducer."""
    engine = SyntheticEngine("k16v8")
    impl = next(iter(engine.kvqual_layers().values())).impl
    original = impl.do_kv_cache_update

    def late(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        original(layer, key, value, kv_cache, torch.where(slot_mapping >= 0, slot_mapping ^ 1, -1))

    impl.do_kv_cache_update = late
    record = _record(device, engine, {"probe": True})
    assert record["routing"]["kinds"]["wrong-cell"] > 0
    assert {entry["gate"] for entry in record["reproducers"]} >= {"routing", "placement"}


def _record(device: SecondDevice, engine: SyntheticEngine, options: dict[str, bool]) -> dict[str, Any]:
    for layer in engine.kvqual_layers().values():
        device.mark(layer.kv_cache)
    for tables in engine._tables.values():
        for table in tables:
            device.mark(table)
    with device.default(True):
        window = engine.open(**options)
        workload(engine, seed=1)
        return window.finish()
