"""Gate 2, dispatch: each layer runs the declared backend, KV dtype and kernels, and still does after each capture.

The evidence is ``dispatch.json`` of the arm, what the profiler saw run inside each layer's cache update and attention::

    {"schema": 1, "arm": ARM,
     "readings": [{"after": MOMENT, "ranks": [{"rank": 0, "layers": {NAME: LAYER}}]}, ...],
     "poison": [{"fault": NAME, "ranks": [as in a reading]}, ...]}
    LAYER = {"backend": str, "impl": str, "cache_dtype": str, "kernels": [names, sorted]}

The rules:

1. The document is of schema 1 and of the arm under judgement. Its first reading was taken after ``boot``, no moment
   comes twice, and each moment of ``after`` is there.
2. Each reading has one record per rank, of as many ranks as ``engine.tensor_parallel_size``, in order, and in each
   every layer of the model.
3. Each layer runs the declared attention backend, through an implementation that has a name, the same in every layer.
4. Each layer's cache has the declared dtype, where the study declares one, and a dtype in any case.
5. In each layer some kernel ran, each pattern of the arm's ``kernels`` matches one that ran, and none of
   ``kernels_absent`` does. The study declares at least one pattern for the arm.
6. Every reading equals the first.
7. Null: the control's document keeps rules 1 to 6 as its own arm.
8. Poison: what was read under each planted fault is objected to under rules 3 to 6. Every fault of ``faults`` was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.verdict import Poison, Verdict
from pytest_kvqual.study.model import Arm, Study

GATE = "dispatch"
SCHEMA = 1
BOOT = "boot"
_CLAIMS = frozenset({3, 4, 5, 6})
_LAYER = ("backend", "impl", "cache_dtype", "kernels")

Layer = tuple[str, str, str, tuple[str, ...]]
"""Backend, implementation, cache dtype and kernels of one layer."""
Reading = list[dict[str, Layer]]
"""The layers of each rank, by name."""


def judge(
    study: Study,
    *,
    arm: str,
    null_arm: str,
    candidate: Mapping[str, object] | None,
    null: Mapping[str, object] | None,
    faults: Sequence[str] = (),
    after: Sequence[str] = (BOOT,),
) -> Verdict:
    """Judge what one arm runs.

    Args:
        study: The study; its arms' declarations, its layers and its ranks are what is expected.
        arm: The arm under qualification.
        null_arm: The control of ``null``.
        candidate: The arm's ``dispatch.json``, poison included; None where it is missing.
        null: The control's ``dispatch.json``; its readings are the null. None where it is missing.
        faults: The names of the faults that must have been run.
        after: The moments after which the arm must have been read.
    """
    declared = study.arms.get(arm)
    own, readings = _check(study, declared, candidate, after, arm=arm, origin="dispatch")
    null_objections, check = None, None
    if null is not None:
        null_objections, control = _check(
            study, study.arms.get(null_arm), null, (BOOT,), arm=null_arm, origin="null dispatch"
        )
        check = null_check(null_objections, f"{null_arm}: {_figure(control)}")
    first = next(iter(readings.values()), [])
    return conclude(
        GATE,
        figure=_figure(readings),
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=complete_poison(_poison(study, declared, candidate, first), faults),
        details={
            "readings": list(readings),
            "kernels": sorted({kernel for layers in first for layer in layers.values() for kernel in layer[3]}),
            "backends": sorted({layer[0] for layers in first for layer in layers.values()}),
            "implementations": sorted({layer[1] for layers in first for layer in layers.values()}),
            "cache_dtypes": sorted({layer[2] for layers in first for layer in layers.values()}),
            "layers": [len(layers) for layers in first],
        },
    )


def _check(
    study: Study, declared: Arm | None, document: object, after: Sequence[str], *, arm: str, origin: str
) -> tuple[Objections, dict[str, Reading]]:
    """Rules 1 to 6 over one document, and its readings by their moment."""
    result, readings = Objections(), dict[str, Reading]()
    if document is None:
        result.gap(1, f"{origin}: the document is missing")
        return result, readings
    if declared is None:
        result.gap(1, f"{origin}: the study has no arm '{arm}'")
        return result, readings
    if not declared.kernels:
        result.gap(5, f"{origin}: the study declares no kernels for '{arm}', expected at least one pattern")
    with result.reading(1):
        outer = Table(document, origin=origin, error=EvidenceError, known=("schema", "arm", "readings", "poison"))
        if outer.integer("schema") != SCHEMA:
            outer.fail("schema", str(outer.integer("schema")), str(SCHEMA))
        if outer.string("arm") != arm:
            outer.fail("arm", f"'{outer.string('arm')}'", f"'{arm}'")
        for place, value in enumerate(_list(outer, "readings", "reading")):
            with result.reading(1):
                one = Table(value, origin=f"{origin}, readings[{place}]", error=EvidenceError, known=("after", "ranks"))
                moment = one.string("after")
                if moment in readings:
                    one.fail("after", f"'{moment}' a second time", "each moment once")
                if place == 0 and moment != BOOT:
                    one.fail("after", f"'{moment}' first", f"'{BOOT}'")
                where = f"{origin}, after {moment}"
                readings[moment] = _ranks(result, study, one, where)
                _declared(result, declared, readings[moment], where)
                if place:
                    _unchanged(result, next(iter(readings.values())), readings[moment], where)
    for moment in after:
        if moment not in readings:
            result.gap(1, f"{origin}: no reading after {moment}, expected one")
    return result, readings


def _ranks(result: Objections, study: Study, one: Table, where: str) -> Reading:
    """Rule 2: the layers of each rank, whole or objected to."""
    ranks: Reading = []
    values, expected = _list(one, "ranks", "rank"), study.engine.tensor_parallel_size
    if len(values) != expected:
        result.gap(2, f"{where}: found {len(values)} ranks, expected {expected}")
    for place, value in enumerate(values):
        layers: dict[str, Layer] = {}
        ranks.append(layers)
        with result.reading(2):
            rank = Table(value, origin=f"{where}, rank {place}", error=EvidenceError, known=("rank", "layers"))
            if rank.integer("rank", minimum=0) != place:
                rank.fail("rank", str(rank.integer("rank")), str(place))
            named = rank.table("layers", known=None)
            for name in named.names():
                with result.reading(2):
                    layer = named.table(name, known=_LAYER)
                    layers[name] = (
                        layer.string("backend"),
                        layer.string("impl"),
                        layer.string("cache_dtype"),
                        layer.strings("kernels"),
                    )
            if len(named.names()) != study.model.layers:
                result.gap(
                    2, f"{where}, rank {place}: found {len(named.names())} layers, expected {study.model.layers}"
                )
    return ranks


def _declared(result: Objections, arm: Arm, ranks: Reading, where: str) -> None:
    """Rules 3 to 5 over one reading."""
    first = next((layer[1] for layers in ranks for layer in layers.values()), "")
    for place, layers in enumerate(ranks):
        for name, (backend, impl, dtype, kernels) in layers.items():
            spot = f"{where}, rank {place}, layer '{name}'"
            if impl != first:
                result.find(3, f"{spot}: found the implementation {impl}, expected {first}, as in the first layer")
            if backend != arm.attention_backend:
                result.find(3, f"{spot}: found the backend '{backend}', expected '{arm.attention_backend}'")
            if arm.cache_dtype is not None and dtype != arm.cache_dtype:
                result.find(4, f"{spot}: found the cache dtype {dtype}, expected {arm.cache_dtype}")
            if not kernels:
                result.gap(5, f"{spot}: no kernel was seen, expected at least one")
                continue
            for pattern in arm.kernels:
                if not any(fnmatchcase(kernel, pattern) for kernel in kernels):
                    result.find(5, f"{spot}: found no kernel '{pattern}' among {', '.join(kernels)}, expected one")
            for pattern in arm.kernels_absent:
                ran = next((kernel for kernel in kernels if fnmatchcase(kernel, pattern)), None)
                if ran is not None:
                    result.find(5, f"{spot}: found the kernel '{ran}', expected none of '{pattern}'")


def _unchanged(result: Objections, first: Reading, ranks: Reading, where: str) -> None:
    """Rule 6: what a later reading lacks is rule 2's."""
    for place, (before, now) in enumerate(zip(first, ranks, strict=False)):
        # Where no kernel was seen, nothing was: that is a gap under rule 5, and no sign of a change.
        for name in [name for name in before if name in now and now[name] != before[name] and now[name][3]]:
            key, old, new = next(
                (key, one, other)
                for key, one, other in zip(_LAYER, before[name], now[name], strict=True)
                if one != other
            )
            result.find(
                6,
                f"{where}, rank {place}, layer '{name}': found {key} {_shown(new)}, expected {_shown(old)} as at first",
            )
        # A layer that one reading lacks is a gap under rule 2; as many layers under other names are other layers.
        other = next((name for name in now if name not in before), None)
        if other is not None and len(now) == len(before):
            result.find(6, f"{where}, rank {place}: found the layer '{other}', which was not there at first")


def _poison(study: Study, arm: Arm | None, document: object, first: Reading) -> list[Poison]:
    entries = document.get("poison") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or arm is None:
        return []
    result = []
    for place, entry in enumerate(entries):
        origin = f"poison[{place}]"
        try:
            table = Table(entry, origin=origin, error=EvidenceError, known=("fault", "ranks"))
            fault = table.string("fault")
        except EvidenceError as error:
            result.append(Poison(fault=origin, caught=False, figure=str(error)))
            continue
        scratch = Objections()
        with scratch.reading(2):
            ranks = _ranks(scratch, study, table, f"{origin} '{fault}'")
            _declared(scratch, arm, ranks, f"{origin} '{fault}'")
            _unchanged(scratch, first, ranks, f"{origin} '{fault}'")
        line = next((text for rule, text in scratch.found if rule in _CLAIMS), None)
        if line is not None:
            result.append(Poison(fault=fault, caught=True, figure=line))
        else:
            figure = f"found {scratch.first() or 'no objection'}, expected one under rules 3 to 6"
            result.append(Poison(fault=fault, caught=False, figure=figure))
    return result


def _figure(readings: Mapping[str, Reading]) -> str:
    layers = sum(len(rank) for ranks in readings.values() for rank in ranks)
    return f"{layers} layers read as declared, after {', '.join(readings) or 'nothing'}"


def _shown(value: str | Sequence[str]) -> str:
    return f"'{value}'" if isinstance(value, str) else ", ".join(value) or "none"


def _list(table: Table, key: str, what: str) -> list[object]:
    value = table.raw(key)
    if not isinstance(value, list) or not value:
        table.fail(key, f"no {what}", "at least one")
    return value
