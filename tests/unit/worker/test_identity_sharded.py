"""What a tensor-parallel rank must hold of each tensor of the weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pytest_kvqual.worker import identity
from pytest_kvqual.worker.wire import WorkerError

SIZE = 2


class _Layer(torch.nn.Module):
    """A layer of the engine, as far as the expectation looks at it."""

    def __init__(self, shape: tuple[int, ...], *, size: int = SIZE, bias: int | None = None, **facts: int) -> None:
        super().__init__()
        self.tp_size = size
        self.weight = torch.nn.Parameter(torch.zeros(shape))
        if bias is not None:
            self.bias = torch.nn.Parameter(torch.zeros(bias))
        for name, value in facts.items():
            setattr(self, name, value)


class ColumnParallelLinear(_Layer):
    """Named as the engine's: the expectation goes by the names of the classes."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Two outputs in one."""


class QKVParallelLinear(ColumnParallelLinear):
    """Three outputs in one."""


class RowParallelLinear(_Layer):
    """Inputs divided."""


class VocabParallelEmbedding(_Layer):
    """Rows divided after padding."""


class ParallelLMHead(VocabParallelEmbedding):
    """The output matrix."""


class _Model(torch.nn.Module):
    packed_modules_mapping = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}  # noqa: RUF012  # as in the engine

    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def expected(folder: Path, model: _Model, files: dict[str, torch.Tensor], rank: int, size: int = SIZE) -> Any:
    """The expected digests of one rank."""
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, folder / "model.safetensors")
    return identity.expected_digests(model, folder, torch.float32, rank=rank, size=size)


def grid(rows: int, columns: int, start: int = 0) -> torch.Tensor:
    """Distinct values."""
    return torch.arange(start, start + rows * columns, dtype=torch.float32).reshape(rows, columns)


@pytest.mark.parametrize("rank", range(SIZE))
def test_column_and_row_shards(tmp_path: Path, rank: int) -> None:
    """A column parallel layer holds its rows of the file, a row parallel one its columns and the whole bias."""
    up, down, bias = grid(4, 3), grid(3, 4, 100), torch.tensor([1.0, 2.0, 3.0])
    model = _Model(up=ColumnParallelLinear((2, 3)), down=RowParallelLinear((3, 2), bias=3))
    found = expected(tmp_path, model, {"up.weight": up, "down.weight": down, "down.bias": bias}, rank)
    assert found == {
        "up.weight": identity.tensor_digest(up[2 * rank : 2 * rank + 2]),
        "down.weight": identity.tensor_digest(down[:, 2 * rank : 2 * rank + 2]),
        "down.bias": identity.tensor_digest(bias),
    }


@pytest.mark.parametrize("rank", range(SIZE))
def test_merged_shards(tmp_path: Path, rank: int) -> None:
    """Each part of a merged layer is divided for itself, then stacked: not a slice of the stack."""
    gate, up = grid(4, 3), grid(4, 3, 100)
    model = _Model(gate_up=MergedColumnParallelLinear((4, 3)))
    found = expected(tmp_path, model, {"gate.weight": gate, "up.weight": up}, rank)
    rows = slice(2 * rank, 2 * rank + 2)
    assert found == {"gate_up.weight": identity.tensor_digest(torch.cat([gate[rows], up[rows]]))}
    assert found["gate_up.weight"] != identity.tensor_digest(torch.cat([gate, up])[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize(("kv_heads", "heads"), [(4, (0, 1, 2, 3)), (2, (0, 0, 1, 1)), (1, (0, 0, 0, 0))])
@pytest.mark.parametrize("rank", range(4))
def test_kv_heads_fewer_than_ranks_are_kept_by_several(
    tmp_path: Path, rank: int, kv_heads: int, heads: tuple[int, ...]
) -> None:
    """With four ranks and two KV heads, ranks 0 and 1 hold the first; the query heads are divided all the same."""
    head = 2
    q, k, v = grid(8, 3), grid(kv_heads * head, 3, 100), grid(kv_heads * head, 3, 200)
    model = _Model(qkv=QKVParallelLinear((6, 3), size=4, total_num_kv_heads=kv_heads))
    found = expected(tmp_path, model, {"q.weight": q, "k.weight": k, "v.weight": v}, rank, size=4)
    own = slice(heads[rank] * head, heads[rank] * head + head)
    stacked = torch.cat([q[2 * rank : 2 * rank + 2], k[own], v[own]])
    assert found == {"qkv.weight": identity.tensor_digest(stacked)}


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, ParallelLMHead])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_vocabulary_is_padded_and_divided(tmp_path: Path, kind: type[_Layer], rank: int, size: int) -> None:
    """Rows of zeros fill the vocabulary up to the padding, and the padded rows are divided."""
    table = grid(6, 3, 1)
    model = _Model(table=kind((8 // size, 3), size=size, padding_size=4))
    padded = torch.cat([table, torch.zeros(2, 3)])
    found = expected(tmp_path, model, {"table.weight": table}, rank, size)
    assert found == {"table.weight": identity.tensor_digest(padded.chunk(size)[rank])}


def test_a_layer_without_tensor_parallelism_is_whole(tmp_path: Path) -> None:
    """A layer that says it is not divided, and a layer of another kind, are expected whole on every rank."""
    weight, norm = grid(4, 3), torch.tensor([1.0, 2.0])
    model = _Model(proj=ColumnParallelLinear((4, 3), size=1), norm=_Layer((2,)))
    found = expected(tmp_path, model, {"proj.weight": weight, "norm.weight": norm}, rank=1)
    assert found == {"proj.weight": identity.tensor_digest(weight), "norm.weight": identity.tensor_digest(norm)}


def test_what_cannot_be_divided_is_named(tmp_path: Path) -> None:
    """Five rows over two ranks are an error that names the parameter."""
    model = _Model(proj=ColumnParallelLinear((2, 3)))
    with pytest.raises(WorkerError, match=r"parameter proj\.weight: axis 0 has 5 elements, expected a multiple of 2"):
        expected(tmp_path, model, {"proj.weight": grid(5, 3)}, rank=0)
