"""What the engines really ran with, as far as the records show it (checks 5 and 13).

Three sources are held against the study and against each other: ``identity.json`` (what each worker observed of
itself), the arguments that the server printed, and those that the in-process reference was given. ``checks.py`` says
what they cannot show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvqual.audit import workers
from pytest_kvqual.audit.attempts import SERVER_LOG, Attempt
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, parse
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.shapes import integer, items, kind, shown, table, text

IDENTITY: Final = "identity.json"
REFERENCE_CONFIG: Final = "reference-config.json"
#: Of a server alone; the port is another each time.
_SERVER_ONLY: Final = ("host", "port", "disable_uvicorn_access_log", "enable_log_requests", "model_tag")
_OWN_FLAGS: Final = ("additional_config",)
#: What the worker is told that follows from the arm's declaration.
_OF_THE_ARM: Final = (
    "arm", "attention_backend", "kv_format", "before_load", "after_init", "v_scales", "pythonpath", "checkouts",
)  # fmt: skip


def check(frozen: Frozen, own: Sequence[Attempt], controls: Sequence[Attempt], report: Report) -> None:
    """All attempts that the newest receipts rest on."""
    for attempt in (*own, *controls):
        _observed(frozen, attempt, report)
        _served(frozen, attempt, report)
    for attempt in own:
        _reference(frozen, attempt, report)
    explained = {attempt.name: set(_options(_flags_of_the_arm(frozen, attempt))) for attempt in (*own, *controls)}
    workers.check(frozen, (*own, *controls), explained, report)
    for left in own:
        for right in controls:
            _against(frozen, left, right, report)


# -- what the workers observed ---------------------------------------------------------------------------------------


def _observed(frozen: Frozen, attempt: Attempt, report: Report) -> None:
    where = f"evidence/{attempt.name}/{IDENTITY}"
    document = attempt.kept.get(IDENTITY)
    if document is None or attempt.scope is None:
        report.find(13, where, "found no such document, expected what the workers observed")
        return
    arm = attempt.scope.arm
    declared = frozen.arms.get(arm)
    with report.reading(13, where):
        outer = table(document, "identity")
        report.look(3)
        if outer.get("schema") != 1:
            report.find(3, where, f"schema: found {shown(outer.get('schema'))}, expected 1")
        if declared is None:
            raise DamagedError(f"found the arm {arm!r}, expected one of {', '.join(frozen.arms)}")
        if outer.get("arm") != arm:
            report.find(13, where, f"arm: found {shown(outer.get('arm'))}, expected {arm!r}")
        ranks = items(outer, "ranks", "identity")
        expected_ranks = frozen.part("engine").get("tensor_parallel_size", 1)
        if len(ranks) != expected_ranks:
            report.find(13, where, f"ranks: found {len(ranks)}, expected {shown(expected_ranks)}")
        for place, value in enumerate(ranks):
            report.look(13)
            _rank(frozen, attempt, declared, table(value, f"ranks[{place}]"), f"ranks[{place}]", where, report)


def _rank(
    frozen: Frozen, attempt: Attempt, declared: Mapping[str, object], rank: Mapping[str, object], at: str, where: str,
    report: Report,
) -> None:  # fmt: skip
    scope = attempt.scope
    if scope is None:
        return
    expected: dict[str, object] = {
        "arm": scope.arm,
        "kv_format": declared.get("kv_format"),
        "block_size": frozen.part("engine").get("block_size"),
    }
    for key, value in expected.items():
        if key in rank and rank[key] != value:
            report.find(13, where, f"{at}.{key}: found {shown(rank[key])}, expected {shown(value)}")
    backends = rank.get("attention_backend")
    for layer, backend in (backends if isinstance(backends, dict) else {}).items():
        if backend != declared.get("attention_backend"):
            report.find(
                13, where, f"{at}: found {layer} on {shown(backend)}, expected {shown(declared['attention_backend'])}"
            )
            break
    layers = frozen.part("model").get("layers")
    for key in ("attention_backend", "layers"):
        found = rank.get(key)
        if isinstance(found, dict | list) and len(found) != layers:
            report.find(13, where, f"{at}.{key}: found {len(found)} layers, expected {shown(layers)}")
    if "pool_bytes" in rank and not 0 < integer(rank, "pool_bytes", at) <= scope.cache_bytes:
        report.find(
            13, where, f"{at}.pool_bytes: found {shown(rank['pool_bytes'])}, expected at most {scope.cache_bytes}"
        )
    engine = frozen.part("engine")
    distributions = rank.get("distributions")
    for entry in distributions if isinstance(distributions, list) else []:
        if not isinstance(entry, dict):
            continue
        if entry.get("name") == engine.get("distribution") and entry.get("version") != engine.get("version"):
            report.find(
                13,
                where,
                f"{at}: found {shown(entry.get('name'))} {shown(entry.get('version'))}, expected "
                f"{shown(engine.get('version'))}",
            )
        if entry.get("mismatched"):
            report.find(13, where, f"{at}: found altered files of {shown(entry.get('name'))}, expected none")


# -- what the servers printed ----------------------------------------------------------------------------------------


def _served(frozen: Frozen, attempt: Attempt, report: Report) -> None:
    where = f"evidence/{attempt.name}/{SERVER_LOG}"
    served = attempt.kept.get(SERVER_LOG)
    if not isinstance(served, dict) or attempt.scope is None:
        report.note(f"{where}: no line of the engine's arguments; not compared")
        return
    with report.reading(13, where):
        report.look(13)
        for key, value in _declared(frozen, attempt).items():
            # The line holds what differs from the engine's defaults: what is not in it cannot be seen.
            if key in served and _normal(served[key]) != _normal(value):
                number = 5 if key in ("kv_cache_memory_bytes", "max_model_len") else 13
                report.find(number, where, f"{key}: found {shown(served[key])}, expected {shown(value)}")
        _told(frozen, attempt, served.get("additional_config"), where, report)


def _declared(frozen: Frozen, attempt: Attempt) -> dict[str, object]:
    """The engine's arguments that follow from the study and the scope, by their names."""
    engine, scope = frozen.part("engine"), attempt.scope
    found: dict[str, object] = {
        "served_model_name": frozen.part("model").get("name"),
        "block_size": engine.get("block_size"),
        "max_model_len": frozen.length.get("max_model_len"),
        "max_num_seqs": engine.get("max_num_seqs"),
        "max_num_batched_tokens": engine.get("max_num_batched_tokens"),
        "kv_cache_memory_bytes": None if scope is None else scope.cache_bytes,
        "tensor_parallel_size": engine.get("tensor_parallel_size", 1),
    }
    return found | _options(_flags(frozen, attempt))


def _flags(frozen: Frozen, attempt: Attempt) -> list[str]:
    return [*_strings(frozen.part("engine").get("flags")), *_flags_of_the_arm(frozen, attempt)]


def _flags_of_the_arm(frozen: Frozen, attempt: Attempt) -> list[str]:
    return _strings(frozen.arms.get(attempt.scope.arm, {}).get("flags")) if attempt.scope is not None else []


def _strings(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _told(frozen: Frozen, attempt: Attempt, value: object, where: str, report: Report) -> None:
    """What the worker was told, against the arm's declaration."""
    scope = attempt.scope
    outer = table(parse(value) if isinstance(value, str) else value, "additional_config")
    told = table(outer.get("kvqual"), "additional_config.kvqual")
    if scope is None:
        return
    declared = frozen.arms.get(scope.arm, {})
    expected: dict[str, object] = {
        "arm": scope.arm,
        "attention_backend": declared.get("attention_backend"),
        "kv_format": declared.get("kv_format"),
        "before_load": declared.get("before_load", []),
        "after_init": declared.get("after_init", []),
        "v_scales": frozen.scales.get(scope.arm),
        "distribution": frozen.part("engine").get("distribution"),
    }
    for key, wanted in expected.items():
        if key in told and told[key] != wanted:
            report.find(
                13, where, f"additional_config.kvqual.{key}: found {_brief(told[key])}, expected {_brief(wanted)}"
            )


# -- the reference in process ----------------------------------------------------------------------------------------


def _reference(frozen: Frozen, attempt: Attempt, report: Report) -> None:
    if REFERENCE_CONFIG not in attempt.kept:
        return
    where = f"evidence/{attempt.name}/{REFERENCE_CONFIG}"
    with report.reading(5, where):
        outer = table(attempt.kept[REFERENCE_CONFIG], "configuration", ("engine", "orders", "items"))
        report.look(5)
        words = [text({"word": word}, "word", "engine") for word in items(outer, "engine", "configuration")]
        given = _options(words)
        for key, value in _declared(frozen, attempt).items():
            if key not in given and key == "tensor_parallel_size" and value == 1:
                continue
            if _normal(given.get(key)) != _normal(value):
                report.find(5, where, f"{key}: found {shown(given.get(key))}, expected {shown(value)}, as served")
        flags = _flags(frozen, attempt)
        if flags and words[-len(flags) :] != flags:
            report.find(5, where, f"flags: found {words[-len(flags) :]}, expected {flags}, the study's")
        with report.reading(13, where):
            _told(frozen, attempt, given.get("additional_config"), where, report)
        served = attempt.kept.get(SERVER_LOG)
        for key, value in (served if isinstance(served, dict) else {}).items():
            if key not in _SERVER_ONLY and _normal(given.get(key)) != _normal(value):
                report.find(5, where, f"{key}: found {_brief(given.get(key))}, expected {_brief(value)}, as served")
        if outer["orders"] != ["forward", "reverse"]:
            report.find(5, where, f"orders: found {outer['orders']}, expected forward and reverse")
        asked = [
            {"id": item["id"], "index": index, "prompt": item["prompt"], "max_tokens": item["max_tokens"]}
            for index, item in enumerate(_items(frozen.panels.get("parity")))
        ]
        if outer["items"] != asked:
            report.find(5, where, "items: found other prompts than the parity panel's, expected those")


def _items(panel: Mapping[str, object] | None) -> list[dict[str, object]]:
    values = panel.get("items") if panel is not None else None
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


# -- one arm against another -----------------------------------------------------------------------------------------


def _against(frozen: Frozen, left: Attempt, right: Attempt, report: Report) -> None:
    one, other = left.kept.get(SERVER_LOG), right.kept.get(SERVER_LOG)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return
    where = f"evidence/{left.name}/{SERVER_LOG}"
    explained = set(_options(_flags(frozen, left))) ^ set(_options(_flags(frozen, right)))
    mine, theirs = _options(_flags(frozen, left)), _options(_flags(frozen, right))
    explained |= {key for key in mine if key in theirs and mine[key] != theirs[key]}
    with report.reading(13, where):
        report.look(13)
        for key in sorted(set(one) | set(other)):
            if key in (*_SERVER_ONLY, *_OWN_FLAGS) or key in explained:
                continue
            if one.get(key) != other.get(key):
                report.find(
                    13, where, f"{key}: found {_brief(one.get(key))} and {_brief(other.get(key))} in {right.name}, "
                    "expected the same: the study names no difference",
                )  # fmt: skip
        told, told_other = _kvqual(one), _kvqual(other)
        for key in sorted(set(told) | set(told_other)):
            if key not in _OF_THE_ARM and told.get(key) != told_other.get(key):
                report.find(
                    13, where, f"additional_config.kvqual.{key}: found {_brief(told.get(key))} and "
                    f"{_brief(told_other.get(key))} in {right.name}, expected the same",
                )  # fmt: skip


def _kvqual(served: Mapping[str, object]) -> dict[str, object]:
    value = served.get("additional_config")
    inner = value.get("kvqual") if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _options(words: Sequence[str]) -> dict[str, object]:
    """Command-line words as options: ``--a-b=1`` and ``--a-b 1`` are a_b, ``--no-a`` is a = False."""
    found: dict[str, object] = {}
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        place += 1
        if not name.startswith("--"):
            continue
        key = name[2:].replace("-", "_")
        if equals:
            found[key] = value
        elif place < len(words) and not words[place].startswith("--"):
            found[key] = words[place]
            place += 1
        elif key.startswith("no_"):
            found[key[3:]] = False
        else:
            found[key] = True
    return found


def _normal(value: object) -> object:
    """An argument's value whether it is a word, a number or a parsed document."""
    if isinstance(value, str):
        try:
            return parse(value)
        except DamagedError:
            return value
    if isinstance(value, list) and len(value) == 1:
        return _normal(value[0])
    return value


def _brief(value: object) -> str:
    return f"{kind(value)} of {len(value)}" if isinstance(value, list | dict) else shown(value)
