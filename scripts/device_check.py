"""The Triton K16/V8 backend on one GPU: is it right, are its faults seen, and what do three bytes instead of four gain.

    python scripts/device_check.py                 # one GPU, at most 8 minutes; needs torch and triton, no vLLM
    python scripts/device_check.py --cpu           # a tiny version in Triton's interpreter, on CPU tensors

Prints a table to standard error and one JSON document to standard output (and to ``--output``). Ends with 0 where every
check passed, with 1 where one failed or time ran out before it, with 2 where there is no GPU.

What is checked, in this order: E4M3 bytes as the kernels read them and as the oracles write them; decode at 8K context,
batch 32, Qwen3-8B geometry, K16/V8 against K16/V16 through the same kernels (time, bytes, outputs against float64,
unwritten cells, a row alone against the same row in the batch); a captured graph whose inputs change between replays;
prefill; the transfer geometries under all oracles; planted faults and those of the catalogue that a backend without
replaceable parts can have. Then, where time is left, FlashInfer's decode where it is installed, and other tile sizes
and pipeline depths: for information, nothing is chosen by them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before Triton is imported. The caller's shell has no say: interpreted kernels on a GPU would be timed as if compiled.
os.environ.pop("TRITON_INTERPRET", None)
if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from pytest_kvqual._clock import monotonic_ns, wall_utc

if TYPE_CHECKING:
    import torch

    from pytest_kvqual.kv.backends.triton_k16v8 import Triton
    from pytest_kvqual.kv.geometry import Geometry
    from pytest_kvqual.transfer.paged_step import PagedStep

SCHEMA = 1
FLOOR = 3 / 4
"""Bytes of a K/V pair in K16/V8 over those in K16/V16: what no kernel that reads both once can go below."""

DRAWN = (
    "hq=6,hkv=3,d=16,block=8",
    "hq=14,hkv=2,d=24,block=12",
    "hq=71,hkv=1,d=64,block=16",
    "hq=16,hkv=2,d=256,block=64",
    "hq=8,hkv=8,d=80,block=32",
)
ORACLES = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
FORMATS = ("k16v8", "k16v16")


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Clock:
    """What is left of the time that the check may take."""

    def __init__(self, seconds: float) -> None:
        self._end = monotonic_ns() + int(seconds * 1e9)
        self._start = monotonic_ns()

    @property
    def left(self) -> float:
        """Seconds."""
        return (self._end - monotonic_ns()) / 1e9

    @property
    def spent(self) -> float:
        """Seconds."""
        return (monotonic_ns() - self._start) / 1e9


class Report:
    """The document: sections with ``ok``, and what time ran out for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sections: dict[str, dict[str, Any]] = {}
        self.not_run: list[str] = []

    def section(self, name: str, run: Callable[[], dict[str, Any]], *, seconds: float, decides: bool = True) -> None:
        """Runs a section if ``seconds`` are left; one that raises has failed, and says why."""
        if self.clock.left < seconds:
            if decides:
                self.not_run.append(name)
            return
        begun = self.clock.spent
        try:
            found = run()
        except Exception as error:  # the other sections still say what they can
            found = {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
        if not decides:
            found["decides"] = False
        self.sections[name] = {**found, "seconds": round(self.clock.spent - begun, 2)}
        sys.stderr.write(f"{self.clock.spent:7.1f} s  {name}: {'ok' if found['ok'] else 'NOT OK'}\n")

    @property
    def ok(self) -> bool:
        """Whether everything that decides ran and passed."""
        deciding = [part["ok"] for part in self.sections.values() if part.get("decides", True)]
        return bool(deciding) and all(deciding) and not self.not_run


class OnDevice:
    """A backend for the transfer engine, whose tensors are on the CPU: each call runs on the device, on copies.

    The whole storage of a cache travels, so that a write between the blocks is seen too.
    """

    def __init__(self, backend: Triton, device: torch.device) -> None:
        self._backend = backend
        self._device = device

    def _cache(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        here = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        there = here.to(self._device)
        return here, there, there.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """As ``paged.write``."""
        here, there, view = self._cache(cache)
        key, value, slot_mapping = (part.to(self._device) for part in (key, value, slot_mapping))
        self._backend.write(key, value, view, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        here.copy_(there)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        scale: float,
        v_scale: float = 1.0,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """As ``paged.attend``."""
        _, _, view = self._cache(cache)
        tables = (block_table, seq_lens, query_start_loc)
        table, lengths, starts = (part.to(self._device) for part in tables)
        result = output.to(self._device)
        self._backend.attend(
            query.to(self._device), view, table, lengths, starts, scale=scale, v_scale=v_scale, output=result
        )
        return output.copy_(result)


class Check:
    """The sections; ``tiny`` is what the interpreter can do in seconds."""

    def __init__(self, device: torch.device, clock: Clock, *, tiny: bool) -> None:
        self.device = device
        self.clock = clock
        self.tiny = tiny

    # -- what it ran on -----------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, Any]:
        """Versions, and what the driver says of the device."""
        import torch
        import triton

        found: dict[str, Any] = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": "cpu, Triton's interpreter",
        }
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            found |= {
                "device": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "l2_bytes": getattr(properties, "L2_cache_size", None),
            }
        return found

    def synchronise(self) -> None:
        """Waits for the device."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -- E4M3 ---------------------------------------------------------------------------------------------------------

    def casts(self) -> dict[str, Any]:
        """Each of the 256 bytes as the kernels read it, and the oracles' own encoding on the device."""
        import torch
        from triton import language

        from pytest_kvqual.kv import formats
        from pytest_kvqual.kv.backends import triton_kernels as kernels

        raw = torch.arange(256, dtype=torch.uint8, device=self.device)
        expected = formats.e4m3_values()
        found: dict[str, Any] = {}
        for name, dtype in (("float16", language.float16), ("bfloat16", language.bfloat16)):
            for way, cast in (("bits", False), ("hardware", True)):
                if cast and kernels.INTERPRETED:
                    continue
                values = torch.empty(256, dtype=torch.float32, device=self.device)
                kernels.decode_bytes[(1,)](raw, values, DTYPE=dtype, CAST=cast)
                read = values.cpu() * (1.0 if cast else 2.0**8)
                same = (read == expected) | (read.isnan() & expected.isnan())
                found[f"{name}_{way}_wrong"] = int((~same).sum())
        found["declared_unlike_on_host"] = self.declared()
        # The hardware's way is measured, not used.
        return {"ok": not any(count for name, count in found.items() if "hardware" not in name), **found}

    def declared(self) -> int:
        """How many of all 16-bit V have another declared byte when they lie on the device; some scales make ties."""
        import torch

        from pytest_kvqual.kv import formats

        every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
        unlike = 0
        for dtype in (torch.float16, torch.bfloat16):
            codec = formats.declared("k16v8", dtype=dtype)
            value = every.view(dtype).view(-1, 1, 64)
            for scale in (0.02, *(significand * 2.0**-12 for significand in range(65, 128, 2))):
                here = codec.encode(value, value, scale).v
                there = codec.encode(value.to(self.device), value.to(self.device), scale).v
                unlike += int((there.cpu() != here).sum())
        return unlike

    # -- decode -------------------------------------------------------------------------------------------------------

    def step(self, kv_format: str, *, requests: int, positions: int, seed: int = 3) -> PagedStep:
        """Requests of one query row; lengths differ by less than a block, so that last blocks are partly filled."""
        import torch

        from pytest_kvqual.kv.geometry import NAMED
        from pytest_kvqual.transfer.paged_step import PagedStep

        size = NAMED["qwen3-8b"].block_size
        batch = [(max(1, positions - request % size), 1) for request in range(requests)]
        return PagedStep(
            self.geometry(), batch, kv_format=kv_format, dtype=torch.float16, device=self.device, padding=1, seed=seed
        )

    def geometry(self) -> Geometry:
        """Qwen3-8B; in the interpreter one KV head and a quarter of its size."""
        from pytest_kvqual.kv.geometry import NAMED, Geometry

        whole = NAMED["qwen3-8b"]
        return Geometry(query_heads=4, kv_heads=1, head_size=32, block_size=16) if self.tiny else whole

    def decode(self) -> dict[str, Any]:
        """One layer's decode step at 8K context and batch 32: both formats in turn, then what came out."""
        requests, positions = (2, 40) if self.tiny else (32, 8192)
        found = self.measure(requests=requests, positions=positions, outputs=True)
        if not self.tiny:
            found["copy_gb_per_s"] = self.copy_bandwidth()
        return found

    def smaller(self) -> dict[str, Any]:
        """The same at shorter contexts and smaller batches, for information."""
        shapes = ((1, 40),) if self.tiny else ((32, 1024), (1, 8192), (8, 8192), (128, 1024))
        found = {f"batch_{n}_context_{p}": self.measure(requests=n, positions=p, outputs=False) for n, p in shapes}
        return {"ok": all(part["ok"] for part in found.values()), **found}

    def measure(self, *, requests: int, positions: int, outputs: bool) -> dict[str, Any]:
        """Time, bytes and outputs of both formats on the same K, V and queries."""
        import torch

        from pytest_kvqual.kv.backends.triton_k16v8 import Triton

        steps = {name: self.step(name, requests=requests, positions=positions) for name in FORMATS}
        found: dict[str, Any] = {"requests": requests, "positions": positions, "geometry": str(self.geometry())}
        backends = {name: Triton(name) for name in FORMATS}
        wrong = {name: step.fill(backends[name]) for name, step in steps.items()}
        outs = {name: step.run(backends[name], max_query_len=1) for name, step in steps.items()}
        if outputs:
            found["cells_wrong"] = wrong
            found["worst_ratio"] = {name: step.worst(outs[name]) for name, step in steps.items()}
            found["alone_unlike_in_batch"] = sum(
                self.alone(step, backends[name], outs[name]) for name, step in steps.items()
            )
            found["unwritten_cells_seen"] = sum(
                self.unwritten(step, backends[name], outs[name]) for name, step in steps.items()
            )
        timed = {name: torch.empty_like(step.query) for name, step in steps.items()}
        calls = {name: self.call(step, backends[name], timed[name]) for name, step in steps.items()}
        times = self.times(calls, timed)
        for name, step in steps.items():
            content = step.cache.shape[-1] * step.geometry.kv_heads
            moved = int(step.lengths.sum()) * content
            low, middle, high = statistics.quantiles(times[name], n=4)
            found[name] = {
                "kv_bytes": moved,
                "median_us": middle,
                "quartiles_us": [low, high],
                "gb_per_s": moved / middle / 1e3,
                "repetitions": len(times[name]),
            }
        found["ratio"] = found["k16v8"]["median_us"] / found["k16v16"]["median_us"]
        found["ratio_floor"] = FLOOR
        # What the timed calls wrote is what is right.
        same = all(torch.equal(timed[name].view(torch.int16), outs[name].view(torch.int16)) for name in FORMATS)
        found["repeated_equal"] = same
        found["ok"] = same and not any(wrong.values())
        if outputs:
            found["ok"] = (
                found["ok"]
                and all(ratio <= 1.0 for ratio in found["worst_ratio"].values())
                and found["alone_unlike_in_batch"] == 0
                and found["unwritten_cells_seen"] == 0
            )
        return found

    def alone(self, step: PagedStep, backend: Triton, output: torch.Tensor) -> int:
        """How many of some requests have other bits when they are the only one, with a wider table beside."""
        import torch

        unlike = 0
        for request in (0, len(step.batch) - 1):
            table = torch.nn.functional.pad(step.table[request : request + 1], (0, 7))
            single = torch.empty_like(step.query[:1])
            backend.attend(
                step.query[request : request + 1],
                step.cache,
                table,
                step.lengths[request : request + 1],
                torch.arange(2, dtype=torch.int32, device=self.device),
                scale=step.scale,
                v_scale=step.v_scale,
                output=single,
                max_query_len=1,
            )
            unlike += not torch.equal(single[0].view(torch.int16), output[request].view(torch.int16))
        return unlike

    def unwritten(self, step: PagedStep, backend: Triton, output: torch.Tensor) -> int:
        """How many output elements change when the cells that nobody wrote hold NaN, then large numbers."""
        import torch

        changed = 0
        for value in (0xFF, 0x77):
            step.fill_unwritten(value)
            other = step.run(backend, max_query_len=1)
            changed += int((other.view(torch.int16) != output.view(torch.int16)).sum())
        return changed

    def call(self, step: PagedStep, backend: Triton, output: torch.Tensor) -> Callable[[], object]:
        """One decode call on fixed buffers, as a layer of a captured graph makes it."""
        from pytest_kvqual.kv.backends.triton_k16v8 import Workspace

        g = step.geometry
        positions = step.table.shape[1] * g.block_size
        workspace = Workspace.make(len(step.batch), g.query_heads, g.head_size, positions, self.device)
        return lambda: step.run(backend, output=output, max_query_len=1, workspace=workspace)

    def times(self, calls: dict[str, Callable[[], object]], outputs: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """Microseconds of each call, in turn, each behind a write of a buffer that is larger than the L2 cache.

        ``outputs`` is what each writes: NaN before the first timed call, so that it says afterwards what was timed.
        On a GPU a call is captured in a graph, so that no launch is timed, and CUDA events stand around its replay.
        """
        import torch

        found: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        self.synchronise()
        if self.device.type != "cuda":
            for output in outputs.values():
                output.fill_(math.nan)
            for _ in range(3):
                for name, call in calls.items():
                    begun = monotonic_ns()
                    call()
                    found[name].append((monotonic_ns() - begun) / 1e3)
            return found
        graphs = {name: self.captured(call) for name, call in calls.items()}
        for output in outputs.values():
            output.fill_(math.nan)
        flush = torch.empty(1 << 29, dtype=torch.uint8, device=self.device)
        events = []
        for repetition in range(110):
            for name, graph in graphs.items():
                begin, end = _event(), _event()
                flush.zero_()
                begin.record()
                graph.replay()
                end.record()
                if repetition >= 10:
                    events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            found[name].append(begin.elapsed_time(end) * 1e3)
        return found

    def captured(self, call: Callable[[], object]) -> Any:
        """The call in a CUDA graph."""
        import torch

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    def copy_bandwidth(self) -> float:
        """GB/s of a copy inside the device, bytes read and written together."""
        import torch

        source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=self.device) for _ in range(2))
        times = []
        for _ in range(20):
            begin, end = _event(), _event()
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return float(2 * source.numel() / statistics.median(times) / 1e3)

    # -- a peer -------------------------------------------------------------------------------------------------------

    def peer(self) -> dict[str, Any]:
        """FlashInfer's paged decode over the same 16-bit K, V and queries, where it is installed; not in a graph."""
        import torch

        from pytest_kvqual.kv.backends.triton_k16v8 import Triton

        if self.tiny or importlib.util.find_spec("flashinfer") is None:
            return {"ok": True, "flashinfer": "not installed"}
        import flashinfer

        step = self.step("k16v16", requests=32, positions=8192)
        step.fill(Triton("k16v16"))
        g = step.geometry
        lengths = step.lengths.cpu().tolist()
        needed = [math.ceil(length / g.block_size) for length in lengths]
        indices = torch.cat([step.table[row, :count] for row, count in enumerate(needed)])
        indptr = torch.tensor([0, *needed]).cumsum(0).int()
        last = torch.tensor([(length - 1) % g.block_size + 1 for length in lengths]).int()
        cells = step.cache.view(step.dtype)
        pages = (cells[..., : g.head_size].contiguous(), cells[..., g.head_size :].contiguous())
        space = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        wrapper.plan(
            indptr.to(self.device),
            indices,
            last.to(self.device),
            g.query_heads,
            g.kv_heads,
            g.head_size,
            g.block_size,
            q_data_type=step.dtype,
            kv_data_type=step.dtype,
            sm_scale=step.scale,
        )
        query = step.query[: step.rows].contiguous()
        output = wrapper.run(query, pages)
        ratio = step.worst(torch.nn.functional.pad(output, (0, 0, 0, 0, 0, 1)))
        flush = torch.empty(1 << 29, dtype=torch.uint8, device=self.device)
        times = []
        for repetition in range(60):
            begin, end = _event(), _event()
            flush.zero_()
            begin.record()
            wrapper.run(query, pages)
            end.record()
            torch.cuda.synchronize()
            if repetition >= 10:
                times.append(begin.elapsed_time(end) * 1e3)
        middle = statistics.median(times)
        moved = int(step.lengths.sum()) * 4 * g.head_size * g.kv_heads
        return {
            "ok": ratio <= 1.0,
            "flashinfer": flashinfer.__version__,
            "worst_ratio": ratio,
            "median_us": middle,
            "gb_per_s": moved / middle / 1e3,
        }

    # -- graphs -------------------------------------------------------------------------------------------------------

    def graph(self) -> dict[str, Any]:
        """A captured write and decode whose tables, lengths, slots, rows and padding change between replays."""
        import torch

        from pytest_kvqual.kv.backends.triton_k16v8 import Triton, Workspace

        geometry = self.geometry()
        backend, (rows, columns) = Triton("k16v8"), ((3, 3) if self.tiny else (8, 48))
        size, blocks = geometry.block_size, rows * columns + 1
        random = torch.Generator().manual_seed(5)
        shape = (blocks, geometry.kv_heads, size, 3 * geometry.head_size)
        cache = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        every = torch.arange(blocks * size, device=self.device)
        width = geometry.head_size
        past = [torch.randn(len(every), geometry.kv_heads, width, generator=random).half() for _ in range(2)]
        backend.write(past[0].to(self.device), past[1].to(self.device), cache, every, v_scale=0.02)
        fixed = {
            "query": torch.zeros(rows, geometry.query_heads, width, dtype=torch.float16),
            "key": torch.zeros(rows, geometry.kv_heads, width, dtype=torch.float16),
            "value": torch.zeros(rows, geometry.kv_heads, width, dtype=torch.float16),
            "table": torch.zeros(rows, columns, dtype=torch.int32),
            "lengths": torch.ones(rows, dtype=torch.int32),
            "starts": torch.arange(rows + 1, dtype=torch.int32),
            "slots": torch.full((rows,), -1, dtype=torch.int64),
        }
        fixed = {name: tensor.to(self.device) for name, tensor in fixed.items()}
        workspace = Workspace.make(rows, geometry.query_heads, width, columns * size, self.device)
        output = torch.zeros_like(fixed["query"])

        def run(inputs: dict[str, torch.Tensor], into: torch.Tensor, held: torch.Tensor, space: Workspace) -> None:
            backend.write(inputs["key"], inputs["value"], held, inputs["slots"], v_scale=0.02)
            backend.attend(
                inputs["query"],
                held,
                inputs["table"],
                inputs["lengths"],
                inputs["starts"],
                scale=0.088,
                v_scale=0.02,
                output=into,
                max_query_len=1,
                workspace=space,
            )

        def once() -> None:
            run(fixed, output, cache, workspace)

        graph = self.captured(once) if self.device.type == "cuda" else None
        unlike = 0
        replays = 2 if self.tiny else 12
        for replay in range(replays):
            live = [rows, max(1, rows - 3), 1][replay % 3]
            lengths = torch.randint(1, columns * size + 1, (rows,), generator=random)
            lengths[live:] = 0
            table = torch.randperm(blocks - 1, generator=random)[: rows * columns].view(rows, columns) + 1
            row = torch.arange(rows)
            slots = table[row, (lengths - 1).clamp(min=0) // size] * size + (lengths - 1).clamp(min=0) % size
            slots[live:] = -1
            fresh = {
                "table": table.int(),
                "lengths": lengths.int(),
                "starts": torch.arange(rows + 1).clamp(max=live).int(),
                "slots": slots,
                **{name: torch.randn(fixed[name].shape, generator=random).half() for name in ("query", "key", "value")},
            }
            eager = {name: tensor.to(self.device) for name, tensor in fresh.items()}
            other, held = torch.full_like(output, 9.0), cache.clone()
            space = Workspace.make(rows, geometry.query_heads, width, columns * size, self.device)
            run(eager, other, held, space)
            for name, tensor in eager.items():
                fixed[name].copy_(tensor)
            if graph is None:
                once()
            else:
                graph.replay()
            self.synchronise()
            unlike += not torch.equal(output.view(torch.int16), other.view(torch.int16))
            unlike += not torch.equal(cache, held)
            unlike += bool(output[live:].any())
        return {"ok": unlike == 0, "captured": graph is not None, "replays": replays, "unlike": unlike}

    # -- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self) -> dict[str, Any]:
        """Prompts, chunks of prompts over cached context and single rows in one step, against float64."""
        import torch

        from pytest_kvqual.kv.backends.triton_k16v8 import Triton
        from pytest_kvqual.transfer.paged_step import PagedStep

        batch = [(20, 20), (9, 1)] if self.tiny else [(512, 512), (4096, 256), (8191, 3), (700, 1), (1, 1), (333, 17)]
        found: dict[str, Any] = {}
        for kv_format in FORMATS:
            for dtype in (torch.float16, torch.bfloat16):
                step = PagedStep(
                    self.geometry(), batch, kv_format=kv_format, dtype=dtype, device=self.device, padding=3, seed=8
                )
                backend = Triton(kv_format)
                name = f"{kv_format}_{str(dtype).removeprefix('torch.')}"
                wrong = step.fill(backend)
                output = step.run(backend)
                found[name] = {"cells_wrong": wrong, "worst_ratio": step.worst(output)}
                wider = step.run(backend, max_query_len=step.most_rows)
                found[name]["unlike_with_known_rows"] = int((wider != output).sum())
        ok = all(
            part["cells_wrong"] == 0 and part["worst_ratio"] <= 1.0 and part["unlike_with_known_rows"] == 0
            for part in found.values()
        )
        return {"ok": ok, **found}

    # -- the transfer engine ------------------------------------------------------------------------------------------

    def subject(self, kv_format: str) -> Any:
        """The backend on this device, as the transfer engine takes it."""
        from pytest_kvqual.kv.backends.triton_k16v8 import Triton
        from pytest_kvqual.transfer.check import Subject

        backend = OnDevice(Triton(kv_format), self.device)
        return Subject(module="pytest_kvqual.kv.backends.triton_k16v8", kv_format=kv_format, backend=backend)

    def transfer(self) -> dict[str, Any]:
        """Every condition of the transfer workload on each geometry, under all oracles; then long histories."""
        import torch

        from pytest_kvqual.kv.geometry import NAMED, parse_geometry
        from pytest_kvqual.transfer.check import run
        from pytest_kvqual.transfer.workload import long_workload, short_workload, workload

        names = [DRAWN[0]] if self.tiny else [*NAMED, *DRAWN]
        objections: list[str] = []
        not_run: list[str] = []
        runs = 0

        def one(text: str, kv_format: str, script: Any, **options: Any) -> None:
            nonlocal runs
            label = f"{text} {kv_format} {options}"
            if self.clock.left < (0 if self.tiny else 100):
                not_run.append(label)
                return
            outcome = run(self.subject(kv_format), parse_geometry(text), script, **options)
            objections.extend(f"{label}: {line}" for line in outcome.objections())
            runs += 1

        # Each further type, format and geometry is compiled anew: the named geometries have them all.
        both = {"layers": 1, "probe": True, "fills": True}
        for text in names:
            size = parse_geometry(text).block_size
            if self.tiny:
                one(text, "k16v8", short_workload(size), layers=1, probe=True)
                continue
            one(text, "k16v8", workload(size), **both)
            if text in NAMED:
                one(text, "k16v8", workload(size), layers=1, dtype=torch.float16)
                one(text, "k16v8", workload(size), layers=1, probe=True, static=(12, 12 * size))
                one(text, "k16v16", workload(size), **both)
        for text in () if self.tiny else NAMED:
            blocks = max(2, 4096 // parse_geometry(text).block_size) * 2
            one(text, "k16v8", long_workload(), layers=1, blocks=blocks)
        return {
            "ok": not objections and not not_run and runs > 0,
            "runs": runs,
            "objections": len(objections),
            "first": objections[:5],
            "not_run": not_run,
        }

    # -- faults -------------------------------------------------------------------------------------------------------

    def planted(self) -> dict[str, Any]:
        """The planted faults of the transfer tests: clean without, objected to with."""
        from pytest_kvqual.kv.geometry import NAMED
        from pytest_kvqual.transfer import plants
        from pytest_kvqual.transfer.check import run
        from pytest_kvqual.transfer.engine import DEFAULT_GEOMETRY
        from pytest_kvqual.transfer.workload import short_workload

        expected: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
            "routing": (plants.write_before_block_start, {}),
            "placement": (plants.first_block_twice, {"probe": True}),
            "stale-maps": (plants.previous_lengths_and_table, {}),
            "shifted-outputs": (plants.rows_shifted, {}),
            "replay": (plants.zero_times_unwritten, {"fills": True}),
        }
        if self.tiny:
            expected = {name: expected[name] for name in ("shifted-outputs",)}
        geometry = DEFAULT_GEOMETRY if self.tiny else NAMED["qwen3-8b"]
        caught: list[str] = []
        missed: list[str] = []
        for section, (plant, flags) in expected.items():
            subject, script = self.subject("k16v8"), short_workload(geometry.block_size)
            clean = run(subject, geometry, script, layers=1, **flags).objections([section])
            faulty = run(subject, geometry, script, layers=1, plant=plant, **flags)
            # A run that ended with an error has caught nothing.
            seen = not faulty.died and faulty.objections([section])
            (caught if seen and not clean else missed).append(plant.__name__)
        return {"ok": not missed, "caught": len(caught), "seeded": len(expected), "missed": missed}

    def catalogue(self) -> dict[str, Any]:
        """The catalogue's faults that apply: the oracle gate that claims each is the first to object."""
        from pytest_kvqual.faults import matrix
        from pytest_kvqual.faults.scenarios import SCENARIOS

        chosen = list(self.applicable())
        if self.tiny:
            chosen = chosen[:1]
        right: list[str] = []
        wrong: list[str] = []
        apart: list[str] = []
        not_run: list[str] = []
        healthy: dict[str, Any] = {}
        for fault in chosen:
            scenario = SCENARIOS[fault.scenario]
            backend = self.subject(scenario.kv_format).backend
            if self.clock.left < (0 if self.tiny else 15):
                not_run.append(fault.name)
                continue
            if fault.scenario not in healthy and not self.tiny:
                healthy[fault.scenario] = matrix.windows(None, scenario, backend)
            try:
                matrix.plant(fault, scenario.engine(backend))
            except AttributeError:  # it replaces a part that only the exemplar has
                apart.append(fault.name)
                continue
            found = matrix.windows(fault, scenario, backend)
            cell = matrix.Cell(fault=fault, findings=found)
            (right if cell.right else wrong).append(str(cell) if not cell.right else fault.name)
        loud = {name: found for name, found in healthy.items() if found}
        return {
            "ok": not wrong and not loud and not not_run and bool(right),
            "right": len(right),
            "wrong": wrong,
            "of_the_exemplar_only": len(apart),
            "healthy_scenarios_objected_to": loud,
            "not_run": not_run,
        }

    def applicable(self) -> Iterator[Any]:
        """Faults of an oracle gate in a scenario of our formats; those that every qualification plants come first."""
        from pytest_kvqual.faults import FAULTS
        from pytest_kvqual.faults.scenarios import SCENARIOS
        from pytest_kvqual.faults.seeded import SEEDED

        first = [name for names in SEEDED.values() for name in names]
        order = sorted(FAULTS.values(), key=lambda fault: first.index(fault.name) if fault.name in first else 999)
        for fault in order:
            if "transfer" not in fault.where or fault.claimed_by not in ORACLES:
                continue
            scenario = SCENARIOS[fault.scenario]
            if scenario.kv_format in FORMATS and scenario.mode == "whole" and "windows" not in scenario.options:
                yield fault

    # -- other sizes --------------------------------------------------------------------------------------------------

    def sweep(self) -> dict[str, Any]:
        """Decode times of other tiles, warps, depths and casts at 8K, batch 32; two requests against float64."""
        import torch

        from pytest_kvqual.kv.backends.triton_k16v8 import Triton

        step = self.step("k16v8", requests=2 if self.tiny else 32, positions=40 if self.tiny else 8192)
        step.fill(Triton("k16v8"))
        tried: list[dict[str, Any]] = (
            [{}]
            if self.tiny
            else [
                {},
                {"cast": True},
                *({"stages": stages} for stages in (2, 3, 4, 6, 7)),
                {"warps": 2},
                {"warps": 8},
                {"tile": 32},
                {"tile": 128},
                {"tile": 32, "stages": 7},
                {"tile": 128, "stages": 4, "warps": 8},
                {"cast": True, "tile": 32, "stages": 7},
                {"cast": True, "tile": 128, "warps": 8},
            ]
        )
        found: list[dict[str, Any]] = []
        for options in tried:
            if self.clock.left < (0 if self.tiny else 10):
                break
            entry: dict[str, Any] = dict(options)
            try:
                backend = Triton("k16v8", **options)
                output = torch.empty_like(step.query)
                times = self.times({"k16v8": self.call(step, backend, output)}, {"k16v8": output})["k16v8"]
                entry["worst_ratio"] = step.worst(output, requests=[0, 1])
                entry["median_us"] = statistics.median(times)
            except Exception as error:  # too much shared memory, say
                entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            found.append(entry)
        return {"ok": True, "tried": found}


def plain(value: Any) -> Any:
    """``value`` with words where JSON has no number."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(document: dict[str, Any]) -> str:
    """The document's figures, one a line."""
    lines = [f"{name:22} {value}" for name, value in document["environment"].items()]
    for name, section in document["sections"].items():
        lines.append(f"{name:22} {'ok' if section['ok'] else 'NOT OK'}  ({section['seconds']} s)")
        lines += [
            f"    {key:26} {json.dumps(value)[:160]}" for key, value in section.items() if key not in ("ok", "seconds")
        ]
    lines.append(f"{'not run':22} {', '.join(document['not_run']) or 'nothing'}")
    lines.append(f"{'all':22} {'ok' if document['ok'] else 'NOT OK'}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the sections in order and prints what they found."""
    # No abbreviations: --cpu is looked for before the arguments are parsed.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="a tiny version in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=460.0, help="time that all sections may take together")
    parser.add_argument("--output", type=Path, help="the JSON document goes there too")
    given = parser.parse_args()
    if not 0 < given.seconds < 1e6:
        parser.error(f"--seconds: found {given.seconds}, expected a time above 0")
    if given.output is not None and (given.output.is_dir() or not given.output.parent.is_dir()):
        parser.error(f"--output: found {given.output}, expected a file in a folder that is there")
    import torch

    if not given.cpu and not torch.cuda.is_available():
        sys.stderr.write("found no GPU that torch can use, expected one; --cpu runs a tiny version without\n")
        return 2
    clock = Clock(given.seconds)
    check = Check(torch.device("cpu" if given.cpu else "cuda"), clock, tiny=given.cpu)
    report = Report(clock)
    environment = check.environment()
    report.section("casts", check.casts, seconds=0)
    report.section("decode", check.decode, seconds=0)
    report.section("graph", check.graph, seconds=20)
    report.section("prefill", check.prefill, seconds=20)
    report.section("planted", check.planted, seconds=20)
    report.section("smaller", check.smaller, seconds=20, decides=False)
    report.section("transfer", check.transfer, seconds=100 if not given.cpu else 0)
    report.section("catalogue", check.catalogue, seconds=30 if not given.cpu else 0)
    report.section("peer", check.peer, seconds=60 if not given.cpu else 0, decides=False)
    report.section("sweep", check.sweep, seconds=30 if not given.cpu else 0, decides=False)
    document = plain(
        {
            "schema": SCHEMA,
            "finished": wall_utc(),
            "ok": report.ok,
            "environment": environment,
            "sections": report.sections,
            "not_run": report.not_run,
        }
    )
    text = json.dumps(document, indent=1)
    sys.stderr.write(table(document))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
