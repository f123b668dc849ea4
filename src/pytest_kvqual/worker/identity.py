"""What the worker is made of, as observed in the running process."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from pytest_kvqual.worker.wire import WorkerError

_THREADS = 2


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values; for floating types -0.0 counts as 0.0.

    A weight read back through a matrix product has lost the sign of its zeros, and no forward pass can tell them apart.
    """
    data = tensor.detach().to("cpu")
    if data.is_floating_point():
        data = data + 0.0
    head = f"{data.dtype}{tuple(data.shape)}".encode()
    raw = data.contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(head)
    digest.update(raw.data)
    return digest.hexdigest()


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))


def loaded_digests(model: torch.nn.Module) -> dict[str, str]:
    """Digest of each parameter as the loader left it, before the engine repacks it for its kernels."""
    return _digests({name: parameter.data for name, parameter in model.named_parameters()})


def _read_back(module: torch.nn.Module, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight that a repacked linear layer multiplies with: ``[rows, columns]``, exact.

    The product of the identity matrix with the weight has one term per element that is not zero, so it is exact in any
    accumulation order.
    """
    identity = torch.eye(columns, dtype=dtype)
    with torch.inference_mode():
        product: torch.Tensor = module.cpu_linear(identity, module.weight, None)  # type: ignore[operator]  # the engine's
    return product.t().reshape(rows, columns)


def held_digests(model: torch.nn.Module) -> dict[str, str]:
    """Digest of each parameter as the model holds it now, in whatever form its kernels want."""
    return _digests({name: parameter.data for name, parameter in model.named_parameters() if parameter.numel()})


def output_axes(model: torch.nn.Module) -> dict[str, int]:
    """The axis of each parameter along which the engine stacks what it fuses, as the parameter itself says; else 0."""
    return {name: int(getattr(parameter, "output_dim", None) or 0) for name, parameter in model.named_parameters()}


def served_digests(
    model: torch.nn.Module,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    *,
    loaded: Mapping[str, str] | None = None,
    after_load: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Digest of each parameter as the forward pass uses it now.

    Where a kernel multiplies with a packed copy of a weight, the copy is read back through the kernel. If the engine
    kept the parameter beside the copy, both must agree; where they do not, the digest is that of both digests.

    A quantised weight is repacked for its kernel and cannot be read back. With ``after_load``, each parameter that is
    what it was right after its repacking has the digest that it was loaded with; one that is not has another. Between
    the two stands the engine's own repacking, whose code is identified and whose result is not derived again.

    Args:
        model: The served model.
        shapes: Shape and dtype of each parameter as it was loaded.
        loaded: What :func:`loaded_digests` found; needed with ``after_load``.
        after_load: What :func:`held_digests` found right after loading; empty or None for a model that is not
            quantised.
    """
    if after_load:
        return _since_load(held_digests(model), loaded or {}, after_load)
    modules = dict(model.named_modules())
    held: dict[str, torch.Tensor] = {}
    copies: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        shape, dtype = shapes.get(name, (tuple(parameter.shape), parameter.dtype))
        if parameter.numel():
            held[name] = parameter.data
        if attribute == "weight" and len(shape) == 2 and hasattr(modules[owner], "cpu_linear"):
            copies[name] = _read_back(modules[owner], shape[0], shape[1], dtype)
    found, copied = _digests(held), _digests(copies)
    for name, digest in copied.items():
        kept = found.setdefault(name, digest)
        if kept != digest:
            found[name] = hashlib.sha256(f"{kept} {digest}".encode()).hexdigest()
    return found


def _since_load(now: Mapping[str, str], loaded: Mapping[str, str], after_load: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in {**loaded, **now, **after_load}:
        held, before = now.get(name, "absent"), after_load.get(name, "absent")
        if held != before:
            found[name] = hashlib.sha256(f"{before} {held}".encode()).hexdigest()
        elif name in loaded:
            found[name] = loaded[name]
    return found


def expected_digests(
    model: torch.nn.Module,
    folder: Path,
    dtype: torch.dtype,
    *,
    rank: int = 0,
    size: int = 1,
    axes: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Digest of each parameter computed from the weight files alone, fused and sharded as the model declares.

    The model's ``packed_modules_mapping`` names the file's modules that one parameter stacks, along its first axis or
    the one that ``axes`` says. Packed integers are loaded as they are in the file.

    Args:
        model: The served model; read for its modules' kinds, never for values.
        folder: The model folder.
        dtype: The type that the engine loads floating weights as.
        rank: This rank's place in its tensor-parallel group.
        size: The group's size.
        axes: What :func:`output_axes` found when the model was loaded; its names are those of the parameters. None for
            the parameters that the model has now, stacked along their first axis.

    Raises:
        WorkerError: A tensor of the files cannot be divided over the group.
    """
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as listed:
            files.update(dict.fromkeys(listed.keys(), path))
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {}) or {}
    modules = dict(model.named_modules())
    parts: dict[str, list[str]] = {}
    stacked = dict.fromkeys((name for name, _ in model.named_parameters()), 0) if axes is None else axes
    for name in stacked:
        owner, _, attribute = name.rpartition(".")
        parent, _, leaf = owner.rpartition(".")
        leaves = packed.get(leaf, [leaf])
        parts[name] = [".".join(filter(None, (parent, each, attribute))) for each in leaves]
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(str(path), framework="pt")) for path in set(files.values())}
        for name, sources in parts.items():
            if all(source in files for source in sources):
                pieces = [_loaded(opened[files[source]].get_tensor(source), dtype) for source in sources]
                owner, _, attribute = name.rpartition(".")
                axis = stacked[name]
                if axis and size > 1:
                    raise WorkerError(
                        f"parameter {name} is stacked along axis {axis} over {size} ranks, expected one rank: how such"
                        " a weight is divided is not restated here"
                    )
                pieces = pieces if axis else _shard(modules[owner], attribute, name, pieces, rank, size)
                tensors[name] = torch.cat(pieces, dim=axis) if len(pieces) > 1 else pieces[0]
    return _digests(tensors)


def _loaded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _shard(
    module: torch.nn.Module, attribute: str, name: str, pieces: list[torch.Tensor], rank: int, size: int
) -> list[torch.Tensor]:
    """The rank's part of each piece of one parameter.

    The rules are those of ``vllm.model_executor.layers.linear`` and ``vocab_parallel_embedding``, restated: a column
    parallel layer divides its outputs, a row parallel one its inputs (its bias is whole), a vocabulary is padded with
    zeros and divided, and where a group is larger than the number of KV heads each head is kept by several ranks. The
    module says its kind and its numbers of heads, not where its shard begins.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if getattr(module, "tp_size", 1) == 1:
        rank, size = 0, 1
    counts, axis = [size] * len(pieces), 0
    if "VocabParallelEmbedding" in kinds:
        padding = int(module.padding_size)  # type: ignore[arg-type]  # an int of the engine's
        pieces = [
            torch.cat([piece, piece.new_zeros(-len(piece) % padding, *piece.shape[1:])]) if piece.ndim else piece
            for piece in pieces
        ]
    elif "QKVParallelLinear" in kinds and len(pieces) == 3:
        shared = min(size, int(module.total_num_kv_heads))  # type: ignore[arg-type]  # an int of the engine's
        counts = [size, shared, shared]
    elif "RowParallelLinear" in kinds and attribute == "weight":
        axis = 1
    elif "ColumnParallelLinear" not in kinds:
        return pieces
    shards = []
    for piece, count in zip(pieces, counts, strict=True):
        length = piece.shape[axis]
        if length % count or size % count:
            raise WorkerError(
                f"parameter {name}: axis {axis} has {length} elements, expected a multiple of {count}, as the"
                f" tensor-parallel size is {size}"
            )
        width = length // count
        shards.append(piece.narrow(axis, rank * count // size * width, width))
    return shards


def _hash_recorded(item: tuple[Path, str]) -> str | None:
    path, expected = item
    try:
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").digest()
    except OSError as error:
        return f"{path}: {error.strerror}"
    encoded = base64.urlsafe_b64encode(found).rstrip(b"=").decode()
    return None if encoded == expected else f"{path}: found sha256={encoded}, expected sha256={expected}"


def distribution_record(name: str) -> tuple[dict[str, object], set[str]]:
    """Re-hashes every file of an installed distribution against its RECORD.

    Returns:
        ``{"name", "version", "files", "mismatched"}``, and the real paths of its Python modules.
    """
    distribution = importlib.metadata.distribution(name)
    root = Path(str(distribution.locate_file("")))
    text = distribution.read_text("RECORD") or ""
    work: list[tuple[Path, str]] = []
    modules: set[str] = set()
    for row in csv.reader(text.splitlines()):
        if len(row) < 2 or not row[1].startswith("sha256="):
            continue
        path = root / row[0]
        work.append((path, row[1].removeprefix("sha256=")))
        modules.add(str(path.resolve()))
    with ThreadPoolExecutor(_THREADS) as pool:
        mismatched = sorted(line for line in pool.map(_hash_recorded, work) if line is not None)
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    record: dict[str, object] = {
        "name": name,
        "version": distribution.version,
        "files": len(work),
        "mismatched": mismatched,
        "editable": bool(direct.get("dir_info", {}).get("editable", False)),
    }
    return record, modules


#: On a GPU these packages bring kernels of an arm: each with the distribution that has it.
KERNELS: Mapping[str, str] = {"triton": "triton", "flashinfer": "flashinfer-python"}


def loaded_kernels() -> dict[str, str]:
    """The packages of :data:`KERNELS` that this process has imported and that are installed, with the distribution."""
    found = {}
    for package, distribution in KERNELS.items():
        if package in sys.modules:
            try:
                importlib.metadata.distribution(distribution)
            except importlib.metadata.PackageNotFoundError:
                # A checkout's, or nobody's: what was imported is traced all the same.
                continue
            found[package] = distribution
    return found


def checkout_records(file: Path) -> tuple[list[dict[str, object]], dict[str, set[str]], tuple[Path, ...]]:
    """Re-hashes every importable file of an arm's checkouts against the digests taken before the boot.

    Args:
        file: ``install.json`` of the attempt.

    Returns:
        A record for each checkout, as :func:`distribution_record` gives one for a distribution; the real paths of its
        modules by its name, which is that of the package in it; and the roots of all.

    Raises:
        WorkerError: The file cannot be read, or holds something else.
    """
    records: list[dict[str, object]] = []
    modules: dict[str, set[str]] = {}
    try:
        checkouts = json.loads(file.read_bytes())["checkouts"]
        work = [(it["name"], it["commit"], Path(it["path"]), dict(it["modules"])) for it in checkouts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkerError(f"{file}: found no record of checkouts that can be read: {error}") from error
    for name, commit, root, files in work:
        mismatched = []
        for relative, expected in files.items():
            path = root / relative
            try:
                with path.open("rb") as opened:
                    found = hashlib.file_digest(opened, "sha256").hexdigest()
            except OSError as error:
                found = str(error.strerror)
            if found != expected:
                mismatched.append(f"{path}: found sha256 {found}, expected sha256 {expected}")
            modules.setdefault(name, set()).add(str(path.resolve()))
        records.append(
            {
                "name": f"checkout {name}",
                "version": commit,
                "files": len(files),
                "mismatched": sorted(mismatched),
                "editable": True,
            }
        )
    return records, modules, tuple(root for _, _, root, _ in work)


def trace_modules(packages: Iterable[str], recorded: set[str]) -> dict[str, object]:
    """Traces the loaded modules of ``packages`` to recorded files: ``{"traced": n, "untraced": [name: path]}``."""
    traced, untraced = 0, []
    prefixes = tuple(packages)
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in prefixes:
            continue
        path = getattr(module, "__file__", None)
        # Modules without a spec are namespaces that the engine builds in memory (torch.ops): no file is behind them.
        if not isinstance(path, str) or getattr(module, "__spec__", None) is None:
            continue
        if str(Path(path).resolve()) in recorded:
            traced += 1
        else:
            untraced.append(f"{name}: {path}")
    return {"traced": traced, "untraced": untraced}


def trace_with_checkouts(
    packages: Iterable[str], recorded: set[str], checkouts: Mapping[str, set[str]], roots: Iterable[Path] = ()
) -> dict[str, object]:
    """As :func:`trace_modules`; a package that a checkout brings is traced to that checkout alone.

    The interpreter may have the package installed too, and what is imported must not be that one. The other way round,
    a checkout stands first on the import path: a module of any other package that comes from below one of ``roots``
    must be one of its recorded files, or it is untraced. The interpreter's own environment may lie there.
    """
    parts = [trace_modules([name for name in packages if name not in checkouts], recorded)]
    parts += [trace_modules([name], files) for name, files in checkouts.items()]
    known = recorded.union(*checkouts.values())
    looked_at = {*packages, *checkouts}
    strays = [
        f"{name}: {path}"
        for name, path in _files_below(roots)
        if name.partition(".")[0] not in looked_at and str(Path(path).resolve()) not in known
    ]
    return {
        "traced": sum(part["traced"] for part in parts),  # type: ignore[misc]  # a count
        "untraced": [*(line for part in parts for line in part["untraced"]), *strays],  # type: ignore[attr-defined]
    }


def _files_below(roots: Iterable[Path]) -> list[tuple[str, str]]:
    """Name and file of each loaded module from below one of ``roots``, outside of the interpreter's environment."""
    places = tuple(place for root in roots for place in {root, root.resolve()})
    own = Path(sys.prefix)
    found = []
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not Path(path).is_relative_to(own):
            below = any(Path(it).is_relative_to(place) for it in (path, Path(path).resolve()) for place in places)
            if below:
                found.append((name, path))
    return found


def cache_layout(name: str, cache: torch.Tensor) -> dict[str, object]:
    """Shape, dtype, strides, bytes and place of one layer's physical cache. Strides and offset in bytes."""
    size = cache.element_size()
    return {
        "name": name,
        "cache_shape": list(cache.shape),
        "cache_dtype": str(cache.dtype).removeprefix("torch."),
        "cache_strides": [stride * size for stride in cache.stride()],
        "cache_bytes": cache.numel() * size,
        "storage_id": cache.untyped_storage().data_ptr(),
        "storage_offset": cache.storage_offset() * size,
    }
