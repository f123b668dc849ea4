"""What each worker said of itself, against the study, from arm to arm, and after the captures (check 13).

``identity.json`` holds the settings of each rank under ``settings``: ``{"cache_config.block_size": 128, …}``, after
every default was applied. ``identity-after.json`` and ``dispatch-after.json`` were read when everything was captured:
the same weights and scales, no fault left in, and the same kernels after each capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvqual.audit.attempts import Attempt
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.shapes import items, shown, table

IDENTITY: Final = "identity.json"
SETTINGS: Final = "settings"
IDENTITY_AFTER, DISPATCH_AFTER = "identity-after.json", "dispatch-after.json"
AFTER: Final = (IDENTITY_AFTER, DISPATCH_AFTER)
#: What follows from what an arm is: its backend, and how many blocks of its format a pool of the same bytes holds.
_OF_THE_FORMAT: Final = ("attention_config.backend", "cache_config.num_gpu_blocks")
#: Options whose setting has another name, or that set more than one.
_ALSO: Final[Mapping[str, tuple[str, ...]]] = {
    "kv_cache_dtype": ("cache_config.cache_dtype",),
    "compilation_config": ("compilation_config.",),
    "enforce_eager": ("model_config.enforce_eager", "compilation_config."),
    "attention_backend": ("attention_config.backend",),
    "attention_config": ("attention_config.",),
    "speculative_config": ("speculative_config",),
}


def check(frozen: Frozen, attempts: Sequence[Attempt], explained: Mapping[str, set[str]], report: Report) -> None:
    """Every rank of every attempt.

    Args:
        frozen: The study.
        attempts: The attempts that the newest receipts rest on.
        explained: The options that an arm has of its own, by the attempt's name: the study says that it differs in
            them.
        report: Takes the findings.
    """
    found: list[tuple[str, str, dict[str, object]]] = []
    for attempt in attempts:
        _after(attempt, report)
        where = f"evidence/{attempt.name}/{IDENTITY}"
        with report.reading(13, where):
            document = table(attempt.kept.get(IDENTITY), "identity")
            for place, value in enumerate(items(document, "ranks", "identity")):
                rank = table(value, f"ranks[{place}]")
                if SETTINGS in rank:
                    settings = table(rank[SETTINGS], f"ranks[{place}].{SETTINGS}")
                    report.look(13)
                    _declared(frozen, attempt, settings, place, where, report)
                    found.append((attempt.name, where, settings))
                else:
                    report.find(13, where, f"ranks[{place}]: found no settings, expected those of the engine")
    if not found:
        return
    first, _, expected = found[0]
    for name, where, settings in found[1:]:
        own = explained.get(first, set()) | explained.get(name, set())
        with report.reading(13, where):
            for key in sorted(set(expected) | set(settings)):
                if key in _OF_THE_FORMAT or _is_explained(key, own):
                    continue
                if key not in settings or key not in expected or settings[key] != expected[key]:
                    report.find(
                        13, where, f"{SETTINGS}.{key}: found {_value(settings, key)} and {_value(expected, key)} in "
                        f"{first}, expected the same: the study names no difference",
                    )  # fmt: skip


def _declared(
    frozen: Frozen, attempt: Attempt, settings: Mapping[str, object], place: int, where: str, report: Report
) -> None:
    engine = frozen.part("engine")
    expected: dict[str, object] = {
        "model_config.max_model_len": frozen.length.get("max_model_len"),
        "cache_config.block_size": engine.get("block_size"),
        "cache_config.kv_cache_memory_bytes": None if attempt.scope is None else attempt.scope.cache_bytes,
        "scheduler_config.max_num_seqs": engine.get("max_num_seqs"),
        "scheduler_config.max_num_batched_tokens": engine.get("max_num_batched_tokens"),
        "parallel_config.tensor_parallel_size": engine.get("tensor_parallel_size", 1),
    }
    for key, value in expected.items():
        if key not in settings or settings[key] != value:
            report.find(
                13, where, f"ranks[{place}].{SETTINGS}.{key}: found {_value(settings, key)}, expected {shown(value)}"
            )


def _after(attempt: Attempt, report: Report) -> None:
    where = f"evidence/{attempt.name}/{IDENTITY_AFTER}"
    if IDENTITY_AFTER not in attempt.kept:
        if attempt.outcome == "complete":
            report.find(13, where, "found no such document, expected what was read after the captures")
        else:
            report.note(f"{where}: not there, the attempt did not end; whether a fault was left in is not known")
    else:
        with report.reading(13, where):
            report.look(13)
            document = table(attempt.kept[IDENTITY_AFTER], "identity after")
            before = items(table(attempt.kept.get(IDENTITY), "identity"), "ranks", "identity")
            ranks = items(document, "ranks", "identity after")
            if len(ranks) != len(before):
                report.find(13, where, f"ranks: found {len(ranks)}, expected {len(before)}, as in {IDENTITY}")
            for place, (one, other) in enumerate(zip(ranks, before, strict=False)):
                for part in ("parameters", "scales"):
                    if table(one, "rank").get(part) != table(other, "rank").get(part):
                        report.find(13, where, f"ranks[{place}].{part}: found others than in {IDENTITY}")
            for place, tap in enumerate(items(document, "taps", "identity after")):
                left = table(tap, "tap")
                if (left.get("installed"), left.get("faults"), left.get("held")) != (False, 0, 0):
                    report.find(13, where, f"taps[{place}]: found {left}, expected no tap, no fault and no block held")
    where = f"evidence/{attempt.name}/{DISPATCH_AFTER}"
    if DISPATCH_AFTER in attempt.kept:
        with report.reading(13, where):
            report.look(13)
            readings = items(table(attempt.kept[DISPATCH_AFTER], "dispatch after"), "readings", "dispatch after")
            entries = [table(value, "reading") for value in readings]
            for entry in entries[1:]:
                if entry.get("ranks") != entries[0].get("ranks"):
                    report.find(
                        13, where, f"after {shown(entry.get('after'))}: found other kernels than after "
                        f"{shown(entries[0].get('after'))}, expected the same",
                    )  # fmt: skip


def _is_explained(key: str, own: set[str]) -> bool:
    part, _, name = key.partition(".")
    for option in own:
        if name == option or part == option:
            return True
        if any(key == other or (other.endswith(".") and key.startswith(other)) for other in _ALSO.get(option, ())):
            return True
    return False


def _value(settings: Mapping[str, object], key: str) -> str:
    if key not in settings:
        return "none"
    value = settings[key]
    return repr(value)[:80] if isinstance(value, list | dict) else shown(value)
