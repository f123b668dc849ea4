"""The timing plan of a study, as it was frozen, and held against the rules that it follows from (check 18)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import comb
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Tree, parse, pretty, sha256
from pytest_kvqual.audit.frozen import FOLDER, Frozen
from pytest_kvqual.audit.recorded import trace_lines
from pytest_kvqual.audit.shapes import get, integer, items, shown, strings, table, text

#: What a plan says as the study's rules say it.
_AS_DECLARED: Final = (
    "arms", "warm_up", "settle_s", "alpha", "confidence", "practical", "lateness_fraction",
    "server_ttft_ms", "failed_share", "cold",
)  # fmt: skip
_CELL: Final = ("name", "mode", "trace", "requests", "max_tokens", "concurrency", "rate")
_COMPARISON: Final = ("candidate", "control", "cell", "metric", "better")
_SINGLE: Final = "output_throughput|request_throughput|goodput_tokens"
#: The figures that may be compared, by whether the loop is closed.
_FIGURES: Final = {
    False: re.compile(rf"(ttft_intended|tpot|e2e)_(p50|p90|p99|max)|{_SINGLE}"),
    True: re.compile(rf"(burst_)?(ttft_intended|ttft_send|tpot|e2e)_(p50|p90|p99|max)|{_SINGLE}"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One primary comparison of the family; ``lower``: whether a lower figure is the better one."""

    candidate: str
    control: str
    cell: str
    metric: str
    lower: bool

    def words(self) -> str:
        """What is compared, in words."""
        return f"{self.metric} of {self.candidate} against '{self.control}' in {self.cell}"


@dataclass(kw_only=True, slots=True)
class Plan:
    """A frozen plan.

    ``blocks`` maps a block's number to its order, ``canaries`` a canary's id to its parity item, ``prompts`` each item
    of the timing panel to its prompt's tokens.
    """

    rules: Mapping[str, object]
    sha256: str
    arms: list[str]
    blocks: dict[int, list[str]]
    measured: list[int]
    null_arm: str
    null_pairs: list[tuple[int, int]]
    comparisons: list[Comparison]
    cells: dict[str, Mapping[str, object]]
    traces: dict[str, bytes] = field(default_factory=dict)
    canaries: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, list[object]] = field(default_factory=dict)

    def share(self, key: str) -> Fraction:
        """A number of the rules, as the decimal that it prints as.

        Raises:
            DamagedError: There is none.
        """
        return decimal(self.rules, key, "timing")


def decimal(outer: Mapping[str, object], key: str, where: str) -> Fraction:
    """A number as the decimal that it prints as.

    Raises:
        DamagedError: There is none.
    """
    value = get(outer, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DamagedError(f"{where}.{key}: found {shown(value)}, expected a number")
    return Fraction(str(value))


def rules_of(frozen: Frozen, length: int) -> dict[str, object]:
    """The study's timing rules at a length; empty where it has none."""
    return frozen.part("timing", str(length))


def read(tree: Tree, frozen: Frozen, length: int, report: Report) -> Plan | None:
    """The plan of a length; None where the study times nothing there, or, with findings, where it cannot be read."""
    rules = rules_of(frozen, length)
    if not rules:
        return None
    where = f"{FOLDER}/{frozen.sha256}/{rules.get('plan')}"
    report.look(18)
    with report.reading(18, where):
        data = _file(tree, frozen, text(rules, "plan", "timing"))
        document = parse(data)
        if pretty(document) != data:
            report.find(1, where, "found bytes in another form than a plan is written in")
        outer = table(document, "plan")
        plan = _plan(outer, rules, sha256(data))
        _declared(plan, outer, rules, frozen, length, where, report)
        _primary(plan, where, report)
        _balanced(plan, where, report)
        _reachable(plan, outer, where, report)
        _traces(tree, frozen, plan, where, report)
        _panel(tree, frozen, plan, outer.get("panel_sha256"), where, report)
        return plan
    return None


def _file(tree: Tree, frozen: Frozen, path: str) -> bytes:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    files = frozen.lock.get("files")
    stated = files.get("/".join(parts)) if isinstance(files, dict) else None
    data = tree.read(FOLDER, frozen.sha256, *parts)
    if sha256(data) != stated:
        raise DamagedError(f"{path}: found sha256 {sha256(data)}, expected {shown(stated)}, the lock's")
    return data


def _plan(outer: Mapping[str, object], rules: Mapping[str, object], digest: str) -> Plan:
    blocks: dict[int, list[str]] = {}
    measured: list[int] = []
    for value in items(outer, "blocks", "plan"):
        block = table(value, "block", ("block", "kind", "order"))
        number = integer(block, "block", "block", minimum=1)
        if number in blocks:
            raise DamagedError(f"blocks: found {number} again, expected each once")
        blocks[number] = strings(block, "order", "block")
        if block["kind"] == "measured":
            measured.append(number)
        elif block["kind"] != "null":
            raise DamagedError(f"blocks: found the kind {shown(block['kind'])}, expected measured or null")
    pairs = []
    for pair in items(outer, "null_pairs", "plan"):
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(it) is int and it in blocks for it in pair):
            raise DamagedError("null_pairs: found something else than pairs of blocks")
        pairs.append((pair[0], pair[1]))
    family = []
    for value in items(outer, "comparisons", "plan"):
        one = table(value, "comparison")
        family.append(
            Comparison(
                **{key: text(one, key, "comparison") for key in _COMPARISON[:-1]},
                lower=text(one, "better", "comparison") == "lower",
            )
        )
    cells = [table(value, "cell") for value in items(outer, "cells", "plan")]
    return Plan(
        rules=rules,
        sha256=digest,
        arms=strings(outer, "arms", "plan"),
        blocks=blocks,
        measured=measured,
        null_arm=text(rules, "null_arm", "timing"),
        null_pairs=pairs,
        comparisons=family,
        cells={text(cell, "name", "cell"): cell for cell in cells},
    )


def _declared(
    plan: Plan, outer: Mapping[str, object], rules: Mapping[str, object], frozen: Frozen, length: int, where: str,
    report: Report,
) -> None:  # fmt: skip
    expected: dict[str, object] = {key: rules.get(key) for key in _AS_DECLARED}
    expected |= {"schema": 1, "kind": "plan", "study": frozen.name, "length": length, "design": "williams"}
    for key, value in expected.items():
        if key not in outer or outer[key] != value:
            report.find(18, where, f"{key}: found {shown(outer.get(key))}, expected {shown(value)}, the study's")
    for key, names in (("cells", _CELL), ("comparisons", _COMPARISON)):
        declared = rules.get(key)
        wanted = [
            tuple(one.get(name) for name in names)
            for one in (declared if isinstance(declared, list) else [])
            if isinstance(one, dict)
        ]
        found = [tuple(table(one, key).get(name) for name in names) for one in items(outer, key, "plan")]
        if found != wanted:
            report.find(18, where, f"{key}: found others than the study declares, expected the same in order")
    numbers = (len(plan.measured), len(plan.null_pairs))
    if numbers != (rules.get("blocks"), rules.get("null_pairs")):
        report.find(
            18, where, f"blocks: found {numbers[0]} measured and {numbers[1]} pairs, expected "
            f"{shown(rules.get('blocks'))} and {shown(rules.get('null_pairs'))}, the study's",
        )  # fmt: skip


def _primary(plan: Plan, where: str, report: Report) -> None:
    """Each comparison is of a figure over every offered request, in an open loop not from the send."""
    for one in plan.comparisons:
        closed = plan.cells.get(one.cell, {}).get("mode") == "closed"
        if _FIGURES[closed].fullmatch(one.metric) is None:
            report.find(
                18, where, f"comparisons: found {one.words()}, expected a figure of every offered request, in an open "
                "loop from its intended arrival",
            )  # fmt: skip


def _balanced(plan: Plan, where: str, report: Report) -> None:
    """Each arm in each position as often as any other, and each arm right after each other arm as often."""
    orders = [plan.blocks[number] for number in plan.measured]
    for number in plan.measured:
        if sorted(plan.blocks[number]) != sorted(plan.arms):
            report.find(18, where, f"block {number}: found {plan.blocks[number]}, expected each arm once")
    places = Counter((place, arm) for order in orders for place, arm in enumerate(order))
    follows = Counter(pair for order in orders for pair in pairwise(order))
    wanted = (len(plan.arms) ** 2, len(plan.arms) * (len(plan.arms) - 1))
    for what, counts, kinds in (("positions", places, wanted[0]), ("successions", follows, wanted[1])):
        if len(counts) != kinds or len(set(counts.values())) > 1:
            report.find(18, where, f"blocks: found {what} of the arms that are not balanced, expected each as often")
    null = {number for pair in plan.null_pairs for number in pair}
    for number, order in plan.blocks.items():
        if (number in plan.measured) == (number in null) or (number in null and order != [plan.null_arm]):
            report.find(18, where, f"block {number}: found {order}, expected a measured block or one of an A/A pair")


def coverage(blocks: int, rank: int) -> Fraction:
    """The coverage of the median by the interval from the ``rank``-th smallest to the ``rank``-th largest of n."""
    inside = sum(comb(blocks, k) for k in range(rank, blocks - rank + 1))
    return Fraction(inside, 2**blocks)


def rank_of(blocks: int, confidence: Fraction) -> int:
    """The largest rank whose interval has at least ``confidence``; 0 where not even rank 1 has."""
    rank = 0
    while 2 * (rank + 1) <= blocks and coverage(blocks, rank + 1) >= confidence:
        rank += 1
    return rank


def _reachable(plan: Plan, outer: Mapping[str, object], where: str, report: Report) -> None:
    blocks, family = len(plan.measured), len(plan.comparisons)
    if not blocks or not family:
        report.find(18, where, "found no measured block or no comparison, expected some")
        return
    p, level = min(Fraction(1), Fraction(2, 2**blocks)), plan.share("alpha") / family
    covered = coverage(blocks, rank_of(blocks, plan.share("confidence")) or 1)
    expected = {"p": float(p), "holm_alpha": float(level), "coverage": float(covered)}
    if outer.get("reachable") != expected:
        report.find(18, where, f"reachable: found {outer.get('reachable')!r}, expected {expected}")
    if p > level:
        report.find(18, where, f"found a smallest p of {float(p):g}, expected at most {float(level):g}: it cannot pass")


def _traces(tree: Tree, frozen: Frozen, plan: Plan, where: str, report: Report) -> None:
    sent: dict[str, str] = {}
    for name, cell in plan.cells.items():
        data = _file(tree, frozen, text(cell, "trace", "cell"))
        if cell.get("trace_sha256") != sha256(data):
            report.find(
                18,
                where,
                f"cell {name}: trace_sha256: found {shown(cell.get('trace_sha256'))}, expected {sha256(data)}",
            )
        plan.traces[name] = data
        head, *asked = trace_lines(data)
        for key, value in (("cell", name), ("mode", cell.get("mode")), ("concurrency", cell.get("concurrency"))):
            if head.get(key) != value:
                report.find(18, where, f"trace of {name}: {key}: found {shown(head.get(key))}, expected {shown(value)}")
        if len(asked) != cell.get("requests"):
            report.find(
                18, where, f"trace of {name}: found {len(asked)} requests, expected {shown(cell.get('requests'))}"
            )
        for line in asked:
            prompt = str(line.get("prompt"))
            if sent.setdefault(prompt, name) != name:
                report.note(f"{where}: the prompt {prompt} is in the traces of {sent[prompt]} and {name}")


def _panel(tree: Tree, frozen: Frozen, plan: Plan, stated: object, where: str, report: Report) -> None:
    data = _file(tree, frozen, text(plan.rules, "panel", "timing"))
    if stated != sha256(data):
        report.find(18, where, f"panel_sha256: found {shown(stated)}, expected {sha256(data)}, the timing panel's")
    document = table(parse(data), "panel")
    for value in items(document, "items", "panel"):
        item = table(value, "item")
        plan.prompts[text(item, "id", "item")] = items(item, "prompt", "item")
        if item.get("grade") == "canary":
            plan.canaries[text(item, "id", "item")] = text(item, "expected", "item")


def trials(plan: Plan) -> Sequence[tuple[str, int]]:
    """Every trial, as (arm, block)."""
    return [(arm, number) for number, order in plan.blocks.items() for arm in order]
