"""Superiority derived anew, in exact arithmetic, from the recordings of every trial of the plan (check 19).

The rules have the numbers that the gate has; seeded faults (rule 8) are the receipt's own word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb

from pytest_kvqual.audit.files import one_line
from pytest_kvqual.audit.plans import Comparison, Plan, coverage, rank_of
from pytest_kvqual.audit.recording import Value
from pytest_kvqual.audit.trials import WARM_UP, Objections, Trial

Trials = Mapping[tuple[str, int], Trial | None]
VOID = " is void: "
"""What stands in the reason of a missing block before the trial's own words, which are those of who judged it."""


@dataclass(kw_only=True, slots=True)
class Compared:
    """One comparison; every number is exact, and None where a block is ``missing``: (rule, why)."""

    comparison: Comparison
    effects: Mapping[int, Fraction]
    missing: list[tuple[int, str]]
    rank: int = 0
    numbers: dict[str, Fraction | None]
    towards: bool = False
    screen: bool = False
    claim: bool = False

    def number(self, name: str) -> Fraction:
        """A number of a comparison that is whole."""
        return self.numbers[name] or Fraction(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One figure of an A/A pair: the later block over the earlier, or why there is none."""

    blocks: tuple[int, int]
    cell: str
    metric: str
    effect: Fraction | None
    why: str


@dataclass(kw_only=True, slots=True)
class Superiority:
    """What follows for one arm: the objections, every comparison of the plan, and the A/A pairs."""

    arm: str
    objections: Objections
    family: list[Compared]
    pairs: list[Pair]

    def details(self, plan: Plan) -> dict[str, object]:
        """What a receipt states."""
        return {
            "arm": self.arm,
            "blocks": list(plan.measured),
            **{key: plan.rules.get(key) for key in ("alpha", "confidence", "practical")},
            "family": [_detail(it) for it in self.family],
            "null": [
                {
                    "pair": list(it.blocks),
                    "cell": it.cell,
                    "metric": it.metric,
                    "effect": _exact(it.effect),
                    "float": _near(it.effect),
                }
                for it in self.pairs
            ],
        }

    def figure(self, plan: Plan) -> str:
        """The line of a receipt that passes: that of the comparison that passes by least."""
        whole = [it for it in self.family if it.comparison.candidate == self.arm and not it.missing]
        if not whole:
            return "no comparison"
        least = whole[0]
        for it in whole[1:]:
            if _margin(it) > _margin(least):
                least = it
        line = _line(plan, least, self.pairs)
        return f"{line} (the least of {len(whole)})" if len(whole) > 1 else line


def derive(plan: Plan, arm: str, trials: Trials) -> Superiority:
    """The comparisons of one arm from every trial of the plan."""
    own = Objections()
    family = [_compared(plan, it, trials) for it in plan.comparisons]
    for it, adjusted in zip(
        family, holm([Fraction(1) if it.missing else it.number("p") for it in family]), strict=True
    ):
        it.numbers["p_holm"] = None if it.missing else adjusted
    found = Superiority(arm=arm, objections=own, family=family, pairs=_pairs(plan, trials))
    for pair in found.pairs:
        if pair.effect is None or not abs(pair.effect - 1) < plan.share("practical"):
            what = pair.why or f"{_percent(abs((pair.effect or Fraction(0)) - 1))} apart"
            own.idle.append((7, f"A/A blocks {pair.blocks[0]} and {pair.blocks[1]}: {pair.metric}: found {what}"))
    for it in family:
        if it.comparison.candidate != arm:
            continue
        if it.missing:
            why = "; ".join(words for _, words in it.missing)
            own.gap(it.missing[0][0], f"{it.comparison.words()}: cannot pass: {why}")
            continue
        if not (it.towards and it.number("p_holm") <= plan.share("alpha")):
            own.find(5, f"{_line(plan, it, found.pairs)}, expected p <= {plan.rules.get('alpha')} in favour of '{arm}'")
        if not it.screen:
            own.find(6, f"{it.comparison.words()}: found a median of {float(it.number('median')):.4f}, expected it at "
                        f"least {_percent(plan.share('practical'))} better")  # fmt: skip
    for one, other in _same(plan, trials):
        own.gap(4, f"blocks {one[1]} of '{one[0]}' and {other[1]} of '{other[0]}': found the same figures")
    return found


def _figures(plan: Plan, trial: Trial) -> dict[tuple[str, str], Value]:
    return {
        (name, key): figure.value
        for name, cell in trial.cells.items()
        if name != WARM_UP and name in plan.cells
        for key, figure in cell.figures.items()
    }


def _same(plan: Plan, trials: Trials) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Trials with the same figures throughout: two of them are one."""
    valid = [(key, _figures(plan, it)) for key, it in trials.items() if it is not None and not it.why]
    return [(one, other) for (one, a), (other, b) in combinations(valid, 2) if a and a == b]


def _compared(plan: Plan, it: Comparison, trials: Trials) -> Compared:
    effects: dict[int, Fraction] = {}
    missing: list[tuple[int, str]] = []
    for block in plan.measured:
        both = [(arm, trials.get((arm, block))) for arm in (it.candidate, it.control)]
        lost = [(2, why) for arm, trial in both if (why := _unusable(arm, block, trial))]
        missing += lost
        if lost:
            continue
        values = [None if trial is None else _figures(plan, trial).get((it.cell, it.metric)) for _, trial in both]
        bad = _unfit(values, ("candidate", "control"))
        if bad:
            missing.append((3, f"block {block}: {bad}"))
        else:
            effects[block] = _ratio(values)
    names = ("median", "lower", "upper", "coverage", "p", "p_holm")
    found = Compared(comparison=it, effects=effects, missing=missing, numbers=dict.fromkeys(names))
    count, ranked = len(effects), sorted(effects.values())
    found.rank = rank_of(count, plan.share("confidence"))
    if not missing and not found.rank:
        missing.append((2, "found too few blocks for the interval"))
    if missing:
        found.rank = 0
        return found
    better, worse, p = sign_test(ranked, lower=it.lower)
    low, high, share = ranked[found.rank - 1], ranked[count - found.rank], plan.share("practical")
    median = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
    found.numbers |= {"median": median, "lower": low, "upper": high, "coverage": coverage(count, found.rank), "p": p}
    found.towards = better > worse
    found.screen = median <= 1 - share if it.lower else median >= 1 + share
    found.claim = high <= 1 - share if it.lower else low >= 1 + share
    return found


def _unusable(arm: str, block: int, trial: Trial | None) -> str:
    if trial is None:
        return f"block {block} of '{arm}' was not timed"
    return f"block {block} of '{arm}'{VOID}{one_line(trial.why)}" if trial.why else ""


def _unfit(values: Sequence[Value], names: Sequence[str]) -> str:
    """Of two figures, why the first that is not finite and above zero cannot be compared."""
    for name, value in zip(names, values, strict=True):
        if value is None or not 0 < value < math.inf:
            return f"{name}: found {value}, expected a finite number above 0"
    return ""


def _ratio(values: Sequence[Value]) -> Fraction:
    one, other = (Fraction(value or 0) for value in values)
    return one / other


def sign_test(effects: Sequence[Fraction], *, lower: bool) -> tuple[int, int, Fraction]:
    """Effects on the better and on the worse side of 1, and the exact two-sided p.

    Ties stay in n, on the side that speaks least against the hypothesis.
    """
    below, above, count = sum(it < 1 for it in effects), sum(it > 1 for it in effects), len(effects)
    fewer = count - max(below, above)
    both = Fraction(2 * sum(comb(count, k) for k in range(fewer + 1)), 2**count)
    return (below if lower else above), (above if lower else below), min(both, Fraction(1))


def holm(values: Sequence[Fraction]) -> list[Fraction]:
    """Holm's adjusted p-values: the largest, over those not above it, of p times how many are left."""
    count = len(values)
    ranked = sorted(range(count), key=lambda index: values[index])
    adjusted = [Fraction(1)] * count
    for place, index in enumerate(ranked):
        adjusted[index] = min(Fraction(1), max((count - step) * values[ranked[step]] for step in range(place + 1)))
    return adjusted


def _pairs(plan: Plan, trials: Trials) -> list[Pair]:
    found = []
    for blocks in plan.null_pairs:
        for cell, metric in dict.fromkeys((it.cell, it.metric) for it in plan.comparisons):
            both = [trials.get((plan.null_arm, block)) for block in blocks]
            why = next((words for block, trial in zip(blocks, both, strict=True)
                        if (words := _unusable("", block, trial))), "")  # fmt: skip
            values = [None if trial is None else _figures(plan, trial).get((cell, metric)) for trial in both]
            # The later over the earlier.
            why = why or _unfit(values[::-1], [f"block {block}" for block in blocks[::-1]])
            effect = None if why else _ratio(values[::-1])
            found.append(Pair(blocks=blocks, cell=cell, metric=metric, effect=effect, why=why))
    return found


def _margin(it: Compared) -> tuple[Fraction, Fraction]:
    apart = it.number("median") - 1
    return it.number("p_holm"), apart if it.comparison.lower else -apart


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _near(value: Fraction | None) -> float | str | None:
    if value is None:
        return None
    return _float(value) if math.isfinite(_float(value)) else "inf"


def _exact(value: Fraction | None) -> str | None:
    return None if value is None else f"{value.numerator}/{value.denominator}"


def _percent(value: Fraction) -> str:
    return f"{100 * _float(value):.3g} %"


def _line(plan: Plan, found: Compared, pairs: Sequence[Pair]) -> str:
    it, alpha = found.comparison, plan.share("alpha")
    median, low, high = (_float(found.number(name)) for name in ("median", "lower", "upper"))
    p_holm = found.number("p_holm")
    noise = [
        abs(pair.effect - 1)
        for pair in pairs
        if pair.effect is not None and (pair.cell, pair.metric) == (it.cell, it.metric)
    ]
    return (
        f"{it.words()}: median ratio {median:.3f} [{low:.3f}, {high:.3f}] at "
        f"{100 * float(found.number('coverage')):.1f} %, p = {float(found.number('p')):.4g} (Holm {float(p_holm):.4g} "
        f"{'<=' if p_holm <= alpha else '>'} {float(alpha):g}); screen {_percent(plan.share('practical'))}: "
        f"{'met' if found.screen else 'not met'}; claim: {'supported' if found.claim else 'not supported'}; A/A "
        f"{_percent(max(noise)) if noise else 'none'}"
    )


def _detail(found: Compared) -> dict[str, object]:
    it, whole = found.comparison, not found.missing
    return {
        "candidate": it.candidate,
        "control": it.control,
        "cell": it.cell,
        "metric": it.metric,
        "better": "lower" if it.lower else "higher",
        "effects": {str(block): _exact(value) for block, value in found.effects.items()},
        **{name: _exact(value) for name, value in found.numbers.items()},
        "floats": {name: _near(value) for name, value in found.numbers.items()},
        "order": found.rank if whole else None,
        "screen": found.screen if whole else None,
        "claim": found.claim if whole else None,
        "missing": [words for _, words in found.missing],
    }


def without_words(details: Mapping[str, object]) -> dict[str, object]:
    """Details with the reason of each void trial cut: which rule it broke first is said in the judge's own words."""
    family = details.get("family")
    if not isinstance(family, list):
        return dict(details)
    cut = []
    for entry in family:
        missing = entry.get("missing") if isinstance(entry, dict) else None
        short = [str(words).partition(VOID)[0] for words in missing] if isinstance(missing, list) else missing
        cut.append({**entry, "missing": short} if isinstance(entry, dict) and "missing" in entry else entry)
    return {**details, "family": cut}
