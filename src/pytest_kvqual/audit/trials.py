"""Timed trials and their statistics, derived again from the recordings (checks 17 and 18).

Exact arithmetic of its own: figures come from :mod:`pytest_kvqual.audit.recording`, effects, sign test, interval and
Holm's correction from here. What it cannot see of a trial: whether layers, parameters and scales were those that were
qualified; the receipt says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import comb
from typing import Final

from pytest_kvqual.audit import recording
from pytest_kvqual.audit.attempts import FOLDER, Attempt
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Tree, parse, sha256
from pytest_kvqual.audit.frozen import FOLDER as STUDY
from pytest_kvqual.audit.receipts import Receipt, read_folder
from pytest_kvqual.audit.recording import Found, Value, spelled
from pytest_kvqual.audit.rederive import Records
from pytest_kvqual.audit.timing import judgment

RECORDINGS: Final = 17
STATISTICS: Final = 18
TRIAL: Final = "trial.json"
TRIAL_GATE: Final = "trial"
SUPERIORITY: Final = "superiority"
WARM_UP: Final = "warm-up"
_RECORDING: Final = re.compile(r"(cell-[a-z][a-z0-9-]*|warm-up|fidelity-(?!poison-)[a-z-]+)\.jsonl")


@dataclass(kw_only=True, slots=True)
class Trial:
    """One trial: why it is void (nothing where it is valid), and its figures by (cell, name)."""

    name: str
    arm: str
    block: int
    objections: list[str] = field(default_factory=list)
    figures: dict[tuple[str, str], Value] = field(default_factory=dict)
    cells: dict[str, dict[str, object]] = field(default_factory=dict)
    """What a receipt of the trial says of each cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The frozen plan, and what goes with it: rules, each trace's bytes, and which prompts are canaries of what."""

    document: Mapping[str, object]
    rules: Mapping[str, object]
    sha256: str
    traces: Mapping[str, bytes]
    canaries: Mapping[str, str]


def check(tree: Tree, records: Records, newest: Mapping[str, Receipt], report: Report) -> None:
    """Verify every recording, then hold the receipts of trial and superiority against what follows from them."""
    timed = [receipt for receipt in newest.values() if receipt.gate in ("fidelity", TRIAL_GATE, SUPERIORITY)]
    for receipt in timed:
        _sealed(records, receipt, report)
    length = next((receipt.scope.length for receipt in newest.values()), 0)
    plan: Plan | None = None
    # A receipt that says PASS of trials needs them, and the plan, whatever lies in the evidence.
    passed = any(receipt.gate in (TRIAL_GATE, SUPERIORITY) and receipt.outcome == "PASS" for receipt in timed)
    if passed or any(TRIAL in attempt.sealed for attempt in records.attempts.values()):
        with report.reading(STATISTICS, f"{STUDY}/{records.frozen.sha256}"):
            plan = _plan(tree, records, length)
            if plan is not None:
                _planned(plan, f"{STUDY}/{records.frozen.sha256}", report)
    trials: list[Trial] = []
    for attempt in records.attempts.values():
        found: dict[str, Found] = {}
        for name in attempt.sealed:
            match = _RECORDING.fullmatch(name)
            if match is None or attempt.outcome == "unfinished":
                continue
            where = f"{FOLDER}/{attempt.name}/{name}"
            with report.reading(RECORDINGS, where):
                trace = plan.traces.get(match[1].removeprefix("cell-")) if plan is not None else None
                found[match[1].removeprefix("cell-")] = _verified(tree, attempt, name, trace, where, report)
        if plan is not None and TRIAL in attempt.sealed and attempt.outcome == "complete":
            with report.reading(STATISTICS, f"{FOLDER}/{attempt.name}/{TRIAL}"):
                trials.append(_trial(tree, records, attempt, plan, found))
        elif plan is not None and attempt.outcome == "failed":
            # A block is timed once: an attempt at it that failed voids it, whatever was recorded later.
            trials += [_failed(attempt, load) for load in list(found.values())[:1] if _about(load, "block") is not None]
    if plan is None:
        return
    for receipt in timed:
        with report.reading(STATISTICS, receipt.name):
            if receipt.gate == TRIAL_GATE:
                _compare_trial(receipt, trials, report)
            elif receipt.gate == SUPERIORITY:
                _compare_superiority(receipt, plan, trials, report)


def _sealed(records: Records, receipt: Receipt, report: Report) -> None:
    """Check 7 of a timing receipt: each file that it names is sealed as it says, in an attempt that is read here."""
    for name, digest in receipt.evidence.items():
        report.look(7)
        folder, _, file = name.rpartition("/")
        attempt = records.attempts.get(folder)
        if attempt is None or attempt.sealed.get(file) != digest or file not in attempt.intact:
            now = None if attempt is None else attempt.sealed.get(file)
            report.find(
                7, receipt.name, f"evidence {name}: found {now or 'no such sealed file'}, expected sha256 {digest}"
            )


def _verified(tree: Tree, attempt: Attempt, name: str, trace: bytes | None, where: str, report: Report) -> Found:
    data = tree.read(FOLDER, attempt.bundle, f"attempt-{attempt.number}", name)
    if sha256(data) != attempt.sealed[name]:
        raise DamagedError(f"found sha256 {sha256(data)}, expected {attempt.sealed[name]} as sealed")
    found = recording.read(data, trace=trace)
    report.look(RECORDINGS)
    for number, text in found.findings:
        report.find(RECORDINGS, where, f"verify check {number}: {text}")
    return found


# -- the frozen plan -------------------------------------------------------------------------------------------------


def _plan(tree: Tree, records: Records, length: int) -> Plan:
    lock = records.frozen.sha256
    rules = records.frozen.part("timing", str(length))
    data = tree.read(STUDY, lock, *_path(rules, "plan"))
    document = _mapping(parse(data), "the plan")
    panel = _mapping(parse(tree.read(STUDY, lock, *_path(rules, "panel"))), "the timing panel")
    items = panel.get("items")
    cells = rules.get("cells")
    return Plan(
        document=document,
        rules=rules,
        sha256=sha256(data),
        traces={
            str(cell.get("name")): tree.read(STUDY, lock, *_path(cell, "trace"))
            for cell in (cells if isinstance(cells, list) else [])
            if isinstance(cell, dict)
        },
        canaries={
            str(item.get("id")): str(item.get("expected"))
            for item in (items if isinstance(items, list) else [])
            if isinstance(item, dict) and item.get("grade") == "canary"
        },
    )


def _planned(plan: Plan, where: str, report: Report) -> None:
    """The plan is of the study's rules and traces, and its order is balanced."""
    document, rules = plan.document, plan.rules
    report.look(STATISTICS)
    same = ("arms", "null_arm", "warm_up", "settle_s", "alpha", "confidence", "practical", "lateness_fraction")
    for key in (*same, "server_ttft_ms", "failed_share", "cold"):
        if document.get(key) != rules.get(key):
            report.find(
                STATISTICS, where, f"plan: {key}: found {document.get(key)!r:.60}, expected {rules.get(key)!r:.60} of "
                "the study"
            )  # fmt: skip
    keys = ("candidate", "control", "cell", "metric", "better")
    found, expected = ([[it.get(k) for k in keys] for it in _list(table, "comparisons")] for table in (document, rules))
    if found != expected:
        report.find(STATISTICS, where, f"plan: found the comparisons {found!r:.80}, expected {expected!r:.80}")
    digests = {str(it.get("name")): it.get("trace_sha256") for it in _list(document, "cells")}
    if digests != {name: sha256(data) for name, data in plan.traces.items()}:
        report.find(STATISTICS, where, "plan: found other digests of traces than the study's, expected theirs")
    blocks = [(it.get("block"), it.get("kind"), it.get("order")) for it in _list(document, "blocks")]
    orders = [order for _, kind, order in blocks if kind == "measured" and isinstance(order, list)]
    idle = [number for number, kind, order in blocks if kind == "null" and order == [rules.get("null_arm")]]
    pairs = [list(pair) for pair in zip(idle[::2], idle[1::2], strict=False)]
    numbered = [number for number, _, _ in blocks] == list(range(1, len(blocks) + 1))
    wanted = (rules.get("blocks"), rules.get("null_pairs"), pairs)
    if not numbered or (len(orders), len(pairs), document.get("null_pairs")) != wanted or not _balanced(orders, rules):
        report.find(STATISTICS, where, "plan: found other blocks than the study's rules give, expected them balanced")


def _balanced(orders: Sequence[list[object]], rules: Mapping[str, object]) -> bool:
    """Whether each arm stands in each place, and follows each other arm, equally often."""
    arms = rules.get("arms")
    if not isinstance(arms, list) or any(sorted(map(str, order)) != sorted(map(str, arms)) for order in orders):
        return False
    places = Counter((str(arm), place) for order in orders for place, arm in enumerate(order))
    follows = Counter((str(one), str(other)) for order in orders for one, other in pairwise(order))
    size = len(arms)
    whole = len(places) == size * size and len(follows) == size * (size - 1)
    return whole and len(set(places.values())) == 1 and len(set(follows.values())) <= 1


def _path(table: Mapping[str, object], key: str) -> list[str]:
    value = table.get(key)
    if not isinstance(value, str):
        raise DamagedError(f"timing.{key}: found {value!r:.60}, expected a file of the study")
    return [part for part in value.split("/") if part not in ("", ".")]


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise DamagedError(f"found no JSON object, expected {what}")
    return value


def _exact(table: Mapping[str, object], key: str) -> Fraction:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DamagedError(f"{key}: found {value!r:.60}, expected a number")
    return Fraction(repr(value))


def _about(load: Found, key: str) -> object:
    about = load.header.get("about")
    return about.get(key) if isinstance(about, dict) else None


def _failed(attempt: Attempt, load: Found) -> Trial:
    block = _about(load, "block")
    return Trial(
        name=attempt.name,
        arm=str(_about(load, "arm")),
        block=block if type(block) is int else 0,
        objections=["the attempt failed"],
    )


# -- one trial -------------------------------------------------------------------------------------------------------


def _trial(tree: Tree, records: Records, attempt: Attempt, plan: Plan, found: Mapping[str, Found]) -> Trial:
    path = (FOLDER, attempt.bundle, f"attempt-{attempt.number}")
    document = _mapping(parse(tree.read(*path, TRIAL)), TRIAL)
    block = document.get("block")
    trial = Trial(
        name=attempt.name,
        arm=str(document.get("arm")),
        block=block if type(block) is int else 0,
    )
    say = trial.objections.append
    if document.get("plan_sha256") != plan.sha256 or document.get("exploratory") is not False:
        say("it is not of the frozen plan")
    if attempt.scope is None or attempt.scope.arm != trial.arm or attempt.scope.lock != records.frozen.sha256:
        say("it is of another arm or lock than its attempt")
    say_of = _permitted(tree, records, attempt)
    if document.get("judgment") != say_of:
        say("it was made under another permit than its arm's receipts give")
    names = [cell.get("name") for cell in _list(plan.rules, "cells")]
    for name in (WARM_UP, *names):
        if name not in found:
            say(f"{name}: no recording")
            return trial
        if found[str(name)].findings:
            say(f"{name}: its recording does not verify")
        _headed(trial, str(name), found[str(name)], document)
    _loads(trial, document, plan, {str(name): found[str(name)] for name in (WARM_UP, *names)})
    _warmed(trial, plan, found, names)
    _qualified(trial, tree, records, document, plan, found)
    for name in names:
        load = found[str(name)]
        trial.figures |= {(str(name), key): value for key, value in load.figures.items()}
        trial.cells[str(name)] = {
            "offered": load.offered,
            "completed": load.completed,
            "failed": load.failed,
            "figures": {key: spelled(value) for key, value in load.figures.items()},
        }
    return trial


def _permitted(tree: Tree, records: Records, attempt: Attempt) -> str:
    """The judgment of a trial of the attempt's arm, from the newest of that arm's receipts."""
    if attempt.scope is None:
        return ""
    found = read_folder(tree, attempt.bundle, Report()).newest()
    return judgment(records.frozen, "trial", attempt.scope, {name: it.sha256 for name, it in found.items()})


def _headed(trial: Trial, name: str, load: Found, document: Mapping[str, object]) -> None:
    """A recording is of this trial: its header says the same as ``trial.json``."""
    same = [_about(load, key) == document.get(key) for key in ("arm", "block", "plan_sha256", "qualified")]
    same += [load.header.get(key) == document.get(key) for key in ("judgment", "exploratory")]
    if not all(same) or load.header.get("cell") != name:
        trial.objections.append(f"{name}: its recording is of another cell, trial or permit")


def _warmed(trial: Trial, plan: Plan, found: Mapping[str, Found], names: Sequence[object]) -> None:
    """The warm-up sent as many prompts as the plan says, none of which a cell sends; cells sent their canaries."""
    warm = {it.prompt for it in found[WARM_UP].answers}
    cells = {str(name): [it.prompt for it in found[str(name)].answers] for name in names}
    if found[WARM_UP].offered != plan.rules.get("warm_up") or any(warm & set(prompts) for prompts in cells.values()):
        trial.objections.append(f"{WARM_UP}: other prompts than the plan says, or a cell's")
    for cell in _list(plan.rules, "cells"):
        name = str(cell.get("name"))
        if sum(prompt in plan.canaries for prompt in cells[name]) != cell.get("canaries"):
            trial.objections.append(f"{name}: another number of canaries than the plan says")


def _list(table: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    value = table.get(key)
    return [it for it in value if isinstance(it, dict)] if isinstance(value, list) else []


def _loads(trial: Trial, document: Mapping[str, object], plan: Plan, loads: Mapping[str, Found]) -> None:
    """Taps, failures, the server's counters, lateness and the server's own TTFT, load by load."""
    say = trial.objections.append
    readings = {str(it.get("when")): it.get("values") for it in _list(document, "counters")}
    taps = _list(document, "taps")
    wanted = [f"before-{WARM_UP}", f"after {WARM_UP}"]
    wanted += [f"{when} {name}" for name in loads if name != WARM_UP for when in ("before", "after")]
    if [it.get("when") for it in taps] != wanted or list(readings) != wanted:
        say("taps or counters were not read before and after each load")
        return
    for it in taps:
        ranks = it.get("ranks")
        clean = {"installed": False, "faults": 0, "held": 0}
        if not isinstance(ranks, list) or not ranks or any(rank != clean for rank in ranks):
            say(f"a tap, fault or held block was in place {it.get('when')}")
    previous: Mapping[str, object] | None = None
    for name, found in loads.items():
        before = readings[f"before-{WARM_UP}" if name == WARM_UP else f"before {name}"]
        after = readings[f"after {name}"]
        if not isinstance(before, dict) or not isinstance(after, dict):
            say(f"{name}: counters that cannot be read")
            continue
        if previous is not None and previous != before:
            say(f"counters moved before {name}, while nothing was sent")
        previous = after
        _counted(trial, plan, name, found, before, after)
        if name != WARM_UP:
            _client(trial, plan, name, found, before, after)


def _counted(
    trial: Trial, plan: Plan, name: str, found: Found, before: Mapping[str, object], after: Mapping[str, object]
) -> None:
    say = trial.objections.append
    failed = sum(found.failed.values())
    allowed = Fraction(0) if name == WARM_UP else _exact(plan.rules, "failed_share") * found.offered
    if failed > allowed:
        say(f"{name}: {failed} of {found.offered} requests failed")
    tokens = {
        "generation_tokens": sum(len(it.ids) for it in found.answers),
        "prompt_tokens": sum(it.prompt_tokens or 0 for it in found.answers),
    }
    for key, value in tokens.items():
        moved = _integer(after, key) - _integer(before, key)
        if moved != value and (not failed or moved < value):
            say(f"{name}: {moved} {key} on the server, {value} at the client")
    ended = sum(_ended(after).values()) - sum(_ended(before).values())
    if ended < found.completed or (not failed and ended != found.completed):
        say(f"{name}: {ended} requests ended on the server, {found.completed} at the client")
    if _integer(after, "preemptions") != _integer(before, "preemptions"):
        say(f"{name}: preemptions")
    if plan.rules.get("cold") is True and _integer(after, "prefix_cache_hits") != _integer(before, "prefix_cache_hits"):
        say(f"{name}: prompts in the prefix cache, of a plan that says cold")


def _client(
    trial: Trial, plan: Plan, name: str, found: Found, before: Mapping[str, object], after: Mapping[str, object]
) -> None:
    say = trial.objections.append
    late, ttft = found.figures["lateness_p99"], found.figures["ttft_intended_p50"]
    share = _exact(plan.rules, "lateness_fraction") * _exact(plan.rules, "practical")
    if not isinstance(late, Fraction) or not isinstance(ttft, Fraction) or not late <= share * ttft:
        say(f"{name}: dispatch lateness p99 beyond the share of the practical effect")
    count = _integer(after, "ttft_count") - _integer(before, "ttft_count")
    if count != sum(bool(it.arrivals) and it.sent is not None for it in found.answers):
        say(f"{name}: {count} first tokens on the server, another number at the client")
    mean, sums = found.figures["mean_ttft_send"], (before.get("ttft_sum_s"), after.get("ttft_sum_s"))
    if count <= 0 or not isinstance(mean, Fraction) or not all(isinstance(it, float | int) for it in sums):
        say(f"{name}: no mean TTFT of client and server to compare")
        return
    server_ms = (float(sums[1]) - float(sums[0])) * 1e3 / count  # type: ignore[arg-type]  # checked above
    if not abs(float(mean) / 1e6 - server_ms) <= float(_exact(plan.rules, "server_ttft_ms")):
        say(f"{name}: mean TTFT {float(mean) / 1e6:.1f} ms at the client, {server_ms:.1f} ms at the server")


def _integer(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    if type(value) is not int:
        raise DamagedError(f"counter {key}: found {value!r:.60}, expected an integer")
    return value


def _ended(values: Mapping[str, object]) -> dict[str, int]:
    success = values.get("success")
    return {key: it for key, it in success.items() if type(it) is int} if isinstance(success, dict) else {}


def _qualified(
    trial: Trial, tree: Tree, records: Records, document: Mapping[str, object], plan: Plan, found: Mapping[str, Found]
) -> None:
    """Kernels and canaries against the attempt that was qualified."""
    say = trial.objections.append
    qualified = records.attempts.get(str(document.get("qualified")))
    if qualified is None or qualified.scope is None or qualified.scope.arm != trial.arm:
        say(f"found no qualified attempt {document.get('qualified')!r:.80} of its arm")
        return
    path = (FOLDER, qualified.bundle, f"attempt-{qualified.number}")
    dispatch = _mapping(parse(tree.read(*path, "dispatch.json")), "dispatch.json")
    kernels = next((it.get("ranks") for it in _list(dispatch, "readings")), None)
    for it in _list(document, "dispatch"):
        if not kernels or it.get("ranks") != kernels:
            say(f"other kernels {it.get('when')} than were qualified")
    if [it.get("when") for it in _list(document, "dispatch")] != ["before", "after"]:
        say("kernels were not read before and after")
    serial: dict[str, list[object]] = {}
    for line in tree.read(*path, "reference.jsonl").splitlines():
        record = _mapping(parse(line), "a record of the reference")
        ids = record.get("token_ids")
        if record.get("order") == "forward" and isinstance(ids, list):
            serial[str(record.get("id"))] = ids
    for name, load in found.items():
        for answer in load.answers:
            item = plan.canaries.get(answer.prompt)
            if item is None or name == WARM_UP:
                continue
            expected = serial.get(item, [])
            shared = min(len(expected), len(answer.ids))
            if not shared or answer.ids[:shared] != expected[:shared]:
                say(f"{answer.name}: the canary {item!r} has other tokens than serially")


# -- receipts --------------------------------------------------------------------------------------------------------


def _compare_trial(receipt: Receipt, trials: Sequence[Trial], report: Report) -> None:
    report.look(STATISTICS)
    block = receipt.details.get("block")
    if receipt.outcome != "PASS":
        return
    own = [it for it in trials if (it.arm, it.block) == (receipt.scope.arm, block)]
    if len(own) != 1:
        report.find(STATISTICS, receipt.name, f"found {len(own)} trials of block {block}, expected one")
        return
    for line in own[0].objections:
        report.find(STATISTICS, receipt.name, f"found PASS, expected a void trial: {own[0].name}: {line}")
    trial = own[0]
    said = receipt.details.get("cells")
    for name, expected in trial.cells.items():
        cell = said.get(name) if isinstance(said, dict) else None
        for key, value in expected.items():
            stated = cell.get(key) if isinstance(cell, dict) else None
            if stated != value:
                report.find(STATISTICS, receipt.name, f"{name}: {key}: {_differ(stated, value)}")
    figure = f"block {trial.block}, " + "; ".join(
        f"{name}: {cell['completed']} of {cell['offered']} completed, TTFT p50 "
        f"{_ms(trial.figures[name, 'ttft_intended_p50'])}, TPOT p50 {_ms(trial.figures[name, 'tpot_p50'])}"
        for name, cell in trial.cells.items()
    )
    if receipt.figure != figure:
        report.find(STATISTICS, receipt.name, f"figure: found {receipt.figure!r}, expected {figure!r}")


def _ms(value: Value) -> str:
    return "none" if value is None else f"{float(value) / 1e6:.1f} ms"


def _differ(found: object, expected: object) -> str:
    """What two values differ in; of tables the first key."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*map(str, found), *expected}):
            if found.get(key) != expected.get(key):
                return f"{key}: found {found.get(key)!r:.60}, expected {expected.get(key)!r:.60}"
    return f"found {found!r:.60}, expected {expected!r:.60}"


def _compare_superiority(receipt: Receipt, plan: Plan, trials: Sequence[Trial], report: Report) -> None:
    report.look(STATISTICS)
    derived = superiority(plan.document, receipt.scope.arm, trials)
    said = receipt.details.get("family")
    found = [it for it in said if isinstance(it, dict)] if isinstance(said, list) else []
    if len(found) != len(derived.family):
        report.find(
            STATISTICS,
            receipt.name,
            f"found {len(found)} comparisons, expected {len(derived.family)} over complete blocks",
        )
    for one, expected in zip(found, derived.family, strict=False):
        for key, value in expected.items():
            if one.get(key) != value:
                report.find(
                    STATISTICS, receipt.name, f"{expected['metric']} against {expected['control']!r}: {key}: found "
                    f"{one.get(key)!r:.80}, expected {value!r:.80}, from the recordings"
                )  # fmt: skip
    measured = [it.get("block") for it in _list(plan.document, "blocks") if it.get("kind") == "measured"]
    stated = {"alpha": plan.document.get("alpha"), "practical": plan.document.get("practical"), "blocks": measured}
    for key, value in stated.items():
        if receipt.details.get(key) != value:
            report.find(
                STATISTICS, receipt.name, f"{key}: found {receipt.details.get(key)!r:.60}, expected {value!r:.60}"
            )
    if receipt.outcome == "PASS" and derived.passed:
        for what, text, wanted in (
            ("figure", receipt.figure, derived.figure), ("null", receipt.null_figure, derived.null),
        ):  # fmt: skip
            if text != wanted:
                report.find(STATISTICS, receipt.name, f"{what}: found {text!r}, expected {wanted!r}")
    noise = receipt.details.get("null")
    if noise != derived.noise:
        report.find(STATISTICS, receipt.name, f"A/A: found {noise!r:.120}, expected {derived.noise!r:.120}")
    if (receipt.outcome == "PASS") != derived.passed:
        outcome = "PASS" if derived.passed else "no PASS"
        report.find(STATISTICS, receipt.name, f"found {receipt.outcome}, expected {outcome}: {'; '.join(derived.why)}")


@dataclass(kw_only=True, slots=True)
class Derived:
    """The statistics of one arm: its comparisons, the A/A differences, whether it passes, and why not."""

    family: list[dict[str, object]] = field(default_factory=list)
    noise: list[dict[str, object]] = field(default_factory=list)
    passed: bool = False
    figure: str = ""
    null: str = ""
    why: list[str] = field(default_factory=list)


def superiority(plan: Mapping[str, object], arm: str, trials: Sequence[Trial]) -> Derived:
    """Effects, sign test, interval, Holm's correction, screen, claim and A/A, from the trials' figures."""
    derived, practical, alpha = Derived(), _exact(plan, "practical"), _exact(plan, "alpha")
    measured = [it.get("block") for it in _list(plan, "blocks") if it.get("kind") == "measured"]
    comparisons = _list(plan, "comparisons")
    lines: list[str] = []
    effects = [
        _effects(derived if it.get("candidate") == arm else Derived(), it, measured, trials) for it in comparisons
    ]
    values = [Fraction(1) if one is None else _sign(one, it)[0] for it, one in zip(comparisons, effects, strict=True)]
    for it, one, p, p_holm in zip(comparisons, effects, values, _holm(values), strict=True):
        if it.get("candidate") != arm:
            continue
        if one is None:
            continue
        lower_is_better = it.get("better") == "lower"
        ranked = sorted(one)
        total, middle = len(ranked), len(ranked) // 2
        median = ranked[middle] if total % 2 else (ranked[middle - 1] + ranked[middle]) / 2
        wanted = _exact(plan, "confidence")
        rank = max((r for r in range(1, total // 2 + 1) if _coverage(total, r) >= wanted), default=0)
        low, high = (ranked[rank - 1], ranked[total - rank]) if rank else (None, None)
        bound = 1 - practical if lower_is_better else 1 + practical
        worst = high if lower_is_better else low
        screen = median <= bound if lower_is_better else median >= bound
        claim = worst is not None and (worst <= bound if lower_is_better else worst >= bound)
        better = _sign(one, it)[1]
        worse = total - better - sum(value == 1 for value in one)
        derived.family.append(
            {
                "candidate": arm, "control": it.get("control"), "cell": it.get("cell"), "metric": it.get("metric"),
                "better": it.get("better"),
                "effects": {str(block): str(value) for block, value in zip(measured, one, strict=True)},
                "median": str(median) if rank else None, "lower": str(low) if rank else None,
                "upper": str(high) if rank else None, "coverage": str(_coverage(total, rank)) if rank else None,
                "blocks_better": better, "ties": total - better - worse,
                "p": str(p), "p_holm": str(p_holm), "screen": screen, "claim": claim,
            }
        )  # fmt: skip
        lines.append(
            f"{it.get('metric')} of {arm} against '{it.get('control')}' in {it.get('cell')}: median ratio "
            f"{float(median):.4f}{_between(low, high, _coverage(total, rank))}, {better} of {total} blocks better, p = "
            f"{float(p):.4g} (Holm {float(p_holm):.4g}, alpha {float(alpha):g}); screen {_percent(practical)}: "
            f"{'met' if screen else 'not met'}; claim: {'supported' if claim else 'not supported'}"
        )
        if not (better > worse and p_holm <= alpha):
            derived.why.append(f"p = {p_holm} after Holm, {better} of {total} blocks better")
        if not screen:
            derived.why.append(f"median {float(median):.4f}, beyond which {float(bound):.4f} is asked")
        if not rank:
            derived.why.append("no interval of the confidence asked")
    if not any(it.get("candidate") == arm for it in comparisons):
        derived.why.append("the plan does not compare the arm")
    _noise(derived, plan, comparisons, trials, practical)
    largest = _percent(max((Fraction(str(it["difference"])) for it in derived.noise), default=None))
    derived.figure = "; ".join([*lines, f"A/A {largest}"])
    pairs = plan.get("null_pairs")
    derived.null = f"{len(pairs) if isinstance(pairs, list) else 0} A/A pairs, largest difference {largest}"
    derived.passed = not derived.why
    return derived


def _percent(value: Fraction | None) -> str:
    return "none" if value is None else f"{100 * float(value):.3g} %"


def _between(low: Fraction | None, high: Fraction | None, coverage: Fraction) -> str:
    if low is None or high is None:
        return ""
    return f" [{float(low):.4f}, {float(high):.4f}] at {100 * float(coverage):.1f} %"


def _one(trials: Sequence[Trial], arm: object, block: object, key: tuple[str, str]) -> Fraction | None:
    """A figure of the one valid trial of an arm in a block."""
    found = [it for it in trials if (it.arm, it.block) == (arm, block)]
    if len(found) != 1 or found[0].objections:
        return None
    value = found[0].figures.get(key)
    return value if isinstance(value, Fraction) and value > 0 else None


def _effects(
    derived: Derived, it: Mapping[str, object], measured: Sequence[object], trials: Sequence[Trial]
) -> list[Fraction] | None:
    key, found = (str(it.get("cell")), str(it.get("metric"))), []
    for block in measured:
        candidate, control = (_one(trials, it.get(name), block, key) for name in ("candidate", "control"))
        if candidate is None or control is None:
            derived.why.append(f"block {block} is not whole")
        else:
            found.append(candidate / control)
    return found if found and len(found) == len(measured) else None


def _sign(effects: Sequence[Fraction], it: Mapping[str, object]) -> tuple[Fraction, int]:
    """The two-sided p of the sign test, ties as near to the middle as they allow, and how many effects are better."""
    below, above, total = sum(e < 1 for e in effects), sum(e > 1 for e in effects), len(effects)
    fewer = min(total // 2, min(below, above) + total - below - above)
    p = 2 * Fraction(sum(comb(total, k) for k in range(fewer + 1)), 2**total)
    return min(Fraction(1), p), below if it.get("better") == "lower" else above


def _coverage(total: int, rank: int) -> Fraction:
    return 1 - Fraction(sum(comb(total, k) for k in range(rank)), 2 ** (total - 1))


def _holm(values: Sequence[Fraction]) -> list[Fraction]:
    adjusted, largest = [Fraction(1)] * len(values), Fraction(0)
    for place, (value, index) in enumerate(sorted((value, index) for index, value in enumerate(values))):
        largest = max(largest, min(Fraction(1), value * (len(values) - place)))
        adjusted[index] = largest
    return adjusted


def _noise(
    derived: Derived, plan: Mapping[str, object], comparisons: Sequence[Mapping[str, object]], trials: Sequence[Trial],
    practical: Fraction,
) -> None:  # fmt: skip
    pairs = plan.get("null_pairs")
    if not pairs:
        derived.why.append("the plan has no A/A pair")
    keys = list(dict.fromkeys((str(it.get("cell")), str(it.get("metric"))) for it in comparisons))
    for pair in pairs if isinstance(pairs, list) else []:
        for key in keys:
            first, second = (_one(trials, plan.get("null_arm"), block, key) for block in pair)
            if first is None or second is None:
                derived.why.append(f"A/A blocks {pair} are not whole")
                continue
            difference = abs(second / first - 1)
            cell, metric = key
            derived.noise.append({"pair": list(pair), "cell": cell, "metric": metric, "difference": str(difference)})
            if not difference < practical:
                derived.why.append(f"A/A blocks {pair} differ by {float(difference):.4f}")
