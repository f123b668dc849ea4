"""Gate 1, identity: source, weights, physical cache and scales are what the lock says.

The evidence is one document per arm, ``identity.json``::

    {"schema": 1, "arm": "candidate", "ranks": [RANK, ...], "sockets": [["127.0.0.1", 40001], ...]}

``ranks`` holds what each worker process observed of itself, ``sockets`` every listening socket of the whole process
group as (address, port). The rules, for each rank where they speak of a record:

 1. The document is of schema 1 and of the arm under judgement, with the ranks 0 to n - 1 once each.
 2. Every layer of the model is present once, in the layer list and in the backend map; each runs the declared attention
    backend, and the record names the declared KV format.
 3. Shape, dtype, strides and bytes of the physical cache are the same over all layers.
 4. No two layers share cache memory: distinct storages, or disjoint byte ranges of one. A layer is still bound to the
    cache that was made for it.
 5. K bytes and V bytes per element, as observed, are the declared format's. Of a format without a declaration
    (:mod:`pytest_kvqual.kv.declarations`) this cannot be said: a gap.
 6. The pool is larger than 0, holds the layers' caches, and fits the budget in bytes.
 7. Every parameter was loaded as the weight files say and is the same now; none is missing on any side.
 8. Every copy of every scale, before warm-up, before graph capture and now, is bit-equal to the declared one: V as in
    the study's scales file (1.0 without one), K 1.0. The set of copies does not change.
 9. No file of a listed distribution differs from its record, and the engine's distribution has the declared version.
10. Every loaded module of those distributions was traced to a recorded file.
11. All listening sockets are loopback addresses, and there is at least one.
12. Null: the control's document keeps rules 1 to 11 as its own arm, with scales of 1.0.
13. In a study of platform ``gpu`` each rank's record names its one device, with the driver and the settings that its
    driver tells, and the control ran on the same device with the same driver and settings. What the state was at that
    moment (clocks, power, temperature) is kept in the details and decides nothing.
14. Poison: each document taken with a planted fault is objected to under the rule that claims the fault: 7 for
    ``weights-altered`` and ``packed-weights-altered``, 8 for ``scale-copy-altered``, any of 2 to 11 for another. Every
    fault of ``faults`` was run.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.verdict import Poison, Verdict
from pytest_kvqual.kv.declarations import DECLARED, not_established
from pytest_kvqual.study.model import Arm, Study

GATE = "identity"
SCHEMA = 1

CLAIMS: Mapping[str, frozenset[int]] = {
    "weights-altered": frozenset({7}),
    "packed-weights-altered": frozenset({7}),
    "scale-copy-altered": frozenset({8}),
}
_ANY = frozenset(range(2, 12))
_MOMENTS = ("before_warmup", "before_capture", "now")
_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def judge(
    study: Study,
    arm: str,
    *,
    cache_bytes: int,
    scales: Sequence[float] | None,
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    poison: Sequence[Mapping[str, object]],
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the identity of one arm.

    Args:
        study: The study; its arms, model and engine are what is expected.
        arm: The name of the arm under qualification.
        cache_bytes: The pool's budget of this scope, in bytes.
        scales: The V scales of the arm's scales file in layer order, or None for an arm without one.
        candidate: The arm's ``identity.json``; None where it is missing.
        null: A control's ``identity.json``; None where it is missing.
        poison: ``{"fault": name, "identity": document}`` for each fault planted in the arm.
        faults: The names of the faults that must be among them.
    """
    declared = study.arms.get(arm)
    own, details = Objections(), {"arm": arm, "cache_bytes": cache_bytes}
    if declared is None:
        own.gap(1, f"found the arm '{arm}', expected one of {', '.join(study.arms)}")
        return conclude(GATE, figure="", objections=own, null=None, poison=(), details=details)
    if declared.scales is not None and scales is None:
        own.gap(8, f"the scales of the file {declared.scales.name} were not given")
    own.add(_check(study, declared, candidate, cache_bytes=cache_bytes, scales=scales, origin="identity"))
    control = _control(study, null)
    if null is None:
        check, null_objections = None, None
    else:
        null_objections = Objections()
        if control is None:
            null_objections.gap(12, f"found the arm {_get(null, 'arm')!r}, expected a control")
        else:
            null_objections.add(
                _check(study, control, null, cache_bytes=cache_bytes, scales=None, origin="null identity")
            )
            if study.platform == "gpu":
                _same_devices(null_objections, candidate, null)
        check = null_check(null_objections, f"{control.name if control else ''}: every rule kept")
    return conclude(
        GATE,
        figure=_figure(candidate),
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=complete_poison(
            [_poisoned(study, declared, item, cache_bytes, scales, place) for place, item in enumerate(poison)], faults
        ),
        details={**details, **_counts(candidate)},
    )


def _poisoned(
    study: Study, arm: Arm, item: object, cache_bytes: int, scales: Sequence[float] | None, place: int
) -> Poison:
    origin = f"poison[{place}]"
    try:
        table = Table(item, origin=origin, error=EvidenceError, known=("fault", "identity"))
        fault, document = table.string("fault"), table.raw("identity")
    except EvidenceError as error:
        return Poison(fault=origin, caught=False, figure=str(error))
    objections = _check(study, arm, document, cache_bytes=cache_bytes, scales=scales, origin=f"{origin} '{fault}'")
    claims = CLAIMS.get(fault, _ANY)
    line = next((text for rule, text in objections.found if rule in claims), None)
    if line is not None:
        return Poison(fault=fault, caught=True, figure=line)
    expected = " or ".join(str(rule) for rule in sorted(claims))
    found = objections.first() or "no objection"
    return Poison(fault=fault, caught=False, figure=f"found {found}; expected one under rule {expected}")


def _check(
    study: Study, arm: Arm, document: object, *, cache_bytes: int, scales: Sequence[float] | None, origin: str
) -> Objections:
    """Rules 1 to 11 over one document."""
    result = Objections()
    if document is None:
        result.gap(1, f"{origin}: the document is missing")
        return result
    with result.reading(1):
        outer = Table(document, origin=origin, error=EvidenceError, known=("schema", "arm", "ranks", "sockets"))
        if outer.integer("schema") != SCHEMA:
            outer.fail("schema", str(outer.integer("schema")), str(SCHEMA))
        if outer.string("arm") != arm.name:
            result.find(1, f"{origin}: found the arm '{outer.string('arm')}', expected '{arm.name}'")
        records = outer.raw("ranks")
        if not isinstance(records, list) or not records:
            outer.fail("ranks", "no record", "one per rank")
        for place, record in enumerate(records):
            where = f"{origin}, ranks[{place}]"
            with result.reading(1):
                rank = Table(record, origin=where, error=EvidenceError, known=None)
                if rank.integer("rank", minimum=0) != place:
                    rank.fail("rank", str(rank.integer("rank")), str(place))
                if rank.string("arm") != arm.name:
                    result.find(1, f"{where}: found the arm '{rank.string('arm')}', expected '{arm.name}'")
                _rank(result, study, arm, rank, where, cache_bytes=cache_bytes, scales=scales)
        with result.reading(11):
            _sockets(result, outer, origin)
    return result


def _rank(
    result: Objections,
    study: Study,
    arm: Arm,
    rank: Table,
    where: str,
    *,
    cache_bytes: int,
    scales: Sequence[float] | None,
) -> None:
    layers: dict[str, Table] = {}
    with result.reading(2):
        layers = _layers(result, study, arm, rank, where)
    with result.reading(3):
        _layout(result, layers, where)
    with result.reading(4):
        _storage(result, layers, where)
    with result.reading(5):
        _bytes_per_element(result, arm, layers, where)
    with result.reading(6):
        _pool(result, rank, layers, where, cache_bytes)
    with result.reading(7):
        _parameters(result, rank, where)
    with result.reading(8):
        _scales(result, study, rank, layers, where, scales)
    with result.reading(9):
        _distributions(result, study, rank, where)
    if study.platform == "gpu":
        with result.reading(13):
            _device(result, rank, where)
    with result.reading(10):
        modules = rank.table("modules", known=None)
        modules.integer("traced", minimum=1)
        for module in modules.strings("untraced"):
            result.find(10, f"{where}: the module {module} was not traced to a recorded file")


def _layers(result: Objections, study: Study, arm: Arm, rank: Table, where: str) -> dict[str, Table]:
    layers: dict[str, Table] = {}
    indices: dict[int, str] = {}
    for position, item in enumerate(_list(rank, "layers")):
        layer = Table(item, origin=where, error=EvidenceError, known=None, path=f"layers[{position}]")
        name = layer.string("name")
        index = layer_index(name)
        if index is None:
            layer.fail("name", f"'{name}'", "a name with the layer's number in it")
        if name in layers or index in indices:
            result.find(2, f"{where}: layer {index} appears twice ('{indices.get(index, name)}', '{name}')")
            continue
        layers[name], indices[index] = layer, name
    for index in range(study.model.layers):
        if index not in indices:
            result.find(2, f"{where}: layer {index} is missing, expected {study.model.layers} layers")
    for index in sorted(set(indices) - set(range(study.model.layers))):
        result.find(2, f"{where}: found layer {index} ('{indices[index]}'), expected {study.model.layers} layers")
    backends = rank.table("attention_backend", known=None)
    for name in sorted(set(layers) ^ set(backends.names())):
        side = "backend" if name in layers else "cache"
        result.find(2, f"{where}: layer '{name}' has no {side}")
    for name in backends.names():
        if backends.string(name) != arm.attention_backend:
            result.find(
                2,
                f"{where}: layer '{name}' runs the attention backend '{backends.string(name)}', expected "
                f"'{arm.attention_backend}'",
            )
    if rank.string("kv_format") != arm.kv_format:
        result.find(2, f"{where}: found the KV format '{rank.string('kv_format')}', expected '{arm.kv_format}'")
    return layers


def _layout(result: Objections, layers: Mapping[str, Table], where: str) -> None:
    if not layers:
        result.gap(3, f"{where}: no layer to compare")
    first: tuple[str, dict[str, object]] | None = None
    for name, layer in layers.items():
        layout: dict[str, object] = {
            "cache_shape": layer.integers("cache_shape", minimum=1),
            "cache_dtype": layer.string("cache_dtype"),
            "cache_strides": layer.integers("cache_strides", minimum=0),
            "cache_bytes": layer.integer("cache_bytes", minimum=1),
        }
        if first is None:
            first = (name, layout)
        for key, value in layout.items():
            if value != first[1][key]:
                result.find(
                    3, f"{where}: {key} of layer '{name}' is {value}, expected {first[1][key]} as in layer '{first[0]}'"
                )


def _storage(result: Objections, layers: Mapping[str, Table], where: str) -> None:
    held: dict[str, list[tuple[str, int, int]]] = {}
    for name, layer in layers.items():
        identity = layer.raw("storage_id")
        if isinstance(identity, bool) or not isinstance(identity, int | str):
            layer.fail("storage_id", repr(identity), "an integer or a string")
        start = layer.integer("storage_offset", minimum=0) if layer.has("storage_offset") else -1
        if layer.has("bound") and not layer.boolean("bound"):
            result.find(4, f"{where}: layer '{name}' is bound to another cache than the one made for it")
        held.setdefault(str(identity), []).append((name, start, _span(layer)))
    for sharing in held.values():
        if len(sharing) == 1:
            continue
        names = ", ".join(f"'{name}'" for name, _, _ in sharing)
        if any(start < 0 for _, start, _ in sharing):
            result.find(4, f"{where}: the layers {names} share one storage, and storage_offset is not given")
            continue
        ordered = sorted(sharing, key=lambda part: part[1])
        for (one, start, span), (other, following, _) in pairwise(ordered):
            if start + span > following:
                result.find(
                    4,
                    f"{where}: layer '{other}' begins at byte {following} of the storage in which layer '{one}' holds "
                    f"bytes {start} to {start + span - 1}",
                )


def _span(layer: Table) -> int:
    """The bytes from a cache's first to its last one. Strides are in bytes."""
    shape, strides = layer.integers("cache_shape", minimum=1), layer.integers("cache_strides", minimum=0)
    if len(shape) != len(strides):
        layer.fail("cache_strides", f"{len(strides)} strides", f"{len(shape)}, one per dimension")
    elements = 1
    for size in shape:
        elements *= size
    total = layer.integer("cache_bytes", minimum=1)
    if total % elements:
        layer.fail("cache_bytes", str(total), f"a multiple of {elements} elements")
    return total // elements + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _bytes_per_element(result: Objections, arm: Arm, layers: Mapping[str, Table], where: str) -> None:
    declared = DECLARED.get(arm.kv_format)
    if declared is None:
        result.gap(5, not_established(arm.kv_format, "K and V bytes per element"))
        return
    for which, expected in (("k", declared.k_bytes), ("v", declared.v_bytes)):
        for name, layer in layers.items():
            found = layer.number(f"{which}_bytes_per_element", minimum=0)
            if found != expected:
                result.find(
                    5,
                    f"{where}: layer '{name}' keeps {found:g} bytes per {which.upper()} element, expected {expected} "
                    f"({arm.kv_format})",
                )


def _pool(result: Objections, rank: Table, layers: Mapping[str, Table], where: str, cache_bytes: int) -> None:
    pool = rank.integer("pool_bytes")
    held = sum(layer.integer("cache_bytes", minimum=1) for layer in layers.values())
    if not 0 < pool <= cache_bytes:
        result.find(6, f"{where}: found a pool of {pool} bytes, expected 1 to {cache_bytes}")
    elif held > pool:
        result.find(6, f"{where}: the layers hold {held} bytes, expected at most the pool's {pool}")


def _parameters(result: Objections, rank: Table, where: str) -> None:
    parameters = rank.table("parameters", known=None)
    loaded, expected = parameters.sha256_map("loaded"), parameters.sha256_map("expected")
    # A worker that finds two copies of one parameter says so in words: no digest, and not the one that was loaded.
    now = parameters.string_map("now")
    names = sorted({*loaded, *now, *expected})
    if not names:
        result.gap(7, f"{where}: found no parameter")
    for name in names:
        absent = [
            side for side, values in (("loaded", loaded), ("now", now), ("expected", expected)) if name not in values
        ]
        if absent:
            result.find(7, f"{where}: parameter '{name}' is missing in {' and '.join(absent)}")
            continue
        if loaded[name] != expected[name]:
            result.find(
                7, f"{where}: parameter '{name}' was loaded as {loaded[name]}, expected {expected[name]} from the files"
            )
        if now[name] != loaded[name]:
            result.find(7, f"{where}: parameter '{name}' is now {now[name]}, expected {loaded[name]} as loaded")


def _scales(
    result: Objections,
    study: Study,
    rank: Table,
    layers: Mapping[str, Table],
    where: str,
    scales: Sequence[float] | None,
) -> None:
    declared = [1.0] * study.model.layers if scales is None else [float(scale) for scale in scales]
    if len(declared) != study.model.layers:
        result.gap(8, f"found {len(declared)} declared scales, expected {study.model.layers}")
        return
    table = rank.table("scales", known=None)
    copies: dict[str, frozenset[str]] = {}
    for moment in _MOMENTS:
        seen: set[str] = set()
        for position, item in enumerate(_list(table, moment)):
            entry = Table(item, origin=where, error=EvidenceError, known=None, path=f"scales.{moment}[{position}]")
            name = entry.string("layer")
            index = layer_index(name)
            if name not in layers or index is None or index >= study.model.layers or name in seen:
                entry.fail("layer", f"'{name}'", "each layer of the model once")
            seen.add(name)
            for which, expected in (("k", 1.0), ("v", declared[index])):
                inner = entry.table(which, known=None)
                if not inner.names():
                    entry.fail(which, "no copy", "each copy that the engine keeps")
                before = copies.setdefault(f"{name} {which}", frozenset(inner.names()))
                for copy in sorted(before ^ set(inner.names())):
                    result.find(8, f"{where}: layer '{name}' keeps the copy {copy} at one moment and not at {moment}")
                for copy in inner.names():
                    for value in _values(inner, copy):
                        if value != expected:
                            result.find(
                                8,
                                f"{where}: scale {copy} of layer '{name}' is {value.hex()} {moment}, expected "
                                f"{expected.hex()}",
                            )
        for name in layers:
            if name not in seen:
                result.gap(8, f"{where}: scales.{moment} lacks layer '{name}'")


def _values(table: Table, key: str) -> tuple[float, ...]:
    """The numbers of one copy: a number, a hexadecimal float such as ``0x1.8p+1``, or a list of either."""
    raw = table.raw(key)
    items = raw if isinstance(raw, list) else [raw]
    if not items:
        table.fail(key, "no value", "at least one")
    values = []
    for item in items:
        if isinstance(item, str):
            try:
                values.append(float.fromhex(item))
            except (ValueError, OverflowError):
                table.fail(key, repr(item), "a hexadecimal float")
        elif isinstance(item, bool) or not isinstance(item, int | float):
            table.fail(key, repr(item), "a number or a hexadecimal float")
        else:
            values.append(float(item))
    return tuple(values)


def _distributions(result: Objections, study: Study, rank: Table, where: str) -> None:
    versions: dict[str, str] = {}
    for position, item in enumerate(_list(rank, "distributions")):
        entry = Table(item, origin=where, error=EvidenceError, known=None, path=f"distributions[{position}]")
        name = entry.string("name")
        versions[name] = entry.string("version")
        entry.integer("files", minimum=1)
        for file in entry.strings("mismatched"):
            result.find(9, f"{where}: a file of {name} {versions[name]} is not the recorded one: {file}")
    engine = study.engine
    if engine.distribution not in versions:
        result.gap(9, f"{where}: distributions lacks the engine's, {engine.distribution}")
    elif versions[engine.distribution] != engine.version:
        result.find(
            9, f"{where}: found {engine.distribution} {versions[engine.distribution]}, expected {engine.version}"
        )


def _device(result: Objections, rank: Table, where: str) -> None:
    record = rank.table("device", known=None)
    devices = record.raw("devices")
    if not isinstance(devices, list) or len(devices) != 1 or not isinstance(devices[0], Mapping):
        count = len(devices) if isinstance(devices, list) else "no list of"
        result.gap(13, f"{where}: found {count} devices, expected one: {record.string('reason') or 'no reason given'}")
        return
    for key in ("uuid", "name"):
        if not isinstance(devices[0].get(key), str) or not devices[0][key]:
            result.gap(13, f"{where}: found the device's {key} {devices[0].get(key)!r}, expected a word")
    settings = devices[0].get("settings")
    if not isinstance(settings, Mapping) or all(value is None for value in settings.values()):
        result.gap(13, f"{where}: found no settings of the device, expected what its driver tells")
    if not isinstance(record.raw("driver"), str) or not record.raw("driver"):
        result.gap(13, f"{where}: found the driver {record.raw('driver')!r}, expected its version")


def _same_devices(result: Objections, candidate: object, null: object) -> None:
    for place, (one, other) in enumerate(zip(_devices(candidate), _devices(null), strict=False)):
        for key in sorted({*one, *other} - {"state"}):
            if one.get(key) != other.get(key):
                result.gap(
                    13,
                    f"rank {place}: found the control's device with {key} {other.get(key)!r}, expected {one.get(key)!r}"
                    " as of the arm under qualification",
                )


def _devices(document: object) -> list[dict[str, object]]:
    """Per rank what its record says of its device, flat; nothing where there is none."""
    ranks = _get(document, "ranks")
    found = []
    for rank in ranks if isinstance(ranks, list) else ():
        record = _get(rank, "device")
        devices = _get(record, "devices")
        if isinstance(devices, list) and len(devices) == 1 and isinstance(devices[0], Mapping):
            one = devices[0]
            settings = one.get("settings")
            found.append(
                {
                    "driver": _get(record, "driver"),
                    "cuda": _get(record, "cuda"),
                    **{key: one.get(key) for key in ("uuid", "name", "memory_bytes", "compute_capability")},
                    **(settings if isinstance(settings, Mapping) else {}),
                    "state": one.get("state"),
                }
            )
    return found


def _sockets(result: Objections, outer: Table, origin: str) -> None:
    sockets = _list(outer, "sockets")
    if not sockets:
        result.gap(11, f"{origin}: found no listening socket, expected at least one")
    for position, item in enumerate(sockets):
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or type(item[1]) is not int:
            outer.fail(f"sockets[{position}]", repr(item), "[address, port]")
        address, port = item
        if not loopback(address):
            result.find(11, f"{origin}: the server listens on {address} port {port}, expected a loopback address")


def loopback(address: str) -> bool:
    """Whether ``address`` is a loopback IP address, an IPv4 one mapped into IPv6 included; a host name is none."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def layer_index(name: str) -> int | None:
    """The layer's number in a name such as ``model.layers.7.self_attn.attn``; None without exactly one number."""
    numbers = _INDEX.findall(name)
    return int(numbers[0]) if len(numbers) == 1 else None


def _list(table: Table, key: str) -> list[object]:
    value = table.raw(key)
    if not isinstance(value, list):
        table.fail(key, type(value).__name__, "a list")
    return value


def _control(study: Study, document: Mapping[str, object] | None) -> Arm | None:
    name = _get(document, "arm")
    arm = study.arms.get(name) if isinstance(name, str) else None
    return arm if arm is not None and arm.role == "control" else None


def _get(document: object, key: str) -> object:
    return document.get(key) if isinstance(document, Mapping) else None


def _counts(document: object) -> dict[str, object]:
    """Sizes for the record; nothing is decided by them."""
    ranks = _get(document, "ranks")
    first = ranks[0] if isinstance(ranks, list) and ranks else None
    layers, parameters = _get(first, "layers"), _get(_get(first, "parameters"), "now")
    sockets, pool = _get(document, "sockets"), _get(first, "pool_bytes")
    devices = _devices(document)
    return {
        **({"devices": devices} if devices else {}),
        "ranks": len(ranks) if isinstance(ranks, list) else 0,
        "layers": len(layers) if isinstance(layers, list) else 0,
        "parameters": len(parameters) if isinstance(parameters, Mapping) else 0,
        "sockets": len(sockets) if isinstance(sockets, list) else 0,
        "pool_bytes": pool if type(pool) is int else 0,
    }


def _figure(document: object) -> str:
    counts = _counts(document)
    return f"{counts['layers']} layers, {counts['parameters']} parameters, {counts['pool_bytes']} B pool: as declared"
