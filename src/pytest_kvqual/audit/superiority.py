"""Superiority derived anew, in exact arithmetic, from the recordings of every trial of the plan (check 19).

The rules have the numbers that the gate has; seeded faults (rule 8) are the receipt's own word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from math import comb, inf

from pytest_kvqual.audit.plans import Comparison, Plan, coverage
from pytest_kvqual.audit.trials import WARM_UP, Objections, Trial

Trials = Mapping[tuple[str, int], Trial | None]


@dataclass(kw_only=True, slots=True)
class Compared:
    """One comparison of the family; of one that is incomplete only the effects that there are, and what is missing."""

    comparison: Comparison
    effects: dict[int, Fraction] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    numbers: dict[str, Fraction | None] = field(
        default_factory=lambda: dict.fromkeys(("median", "lower", "upper", "coverage", "p", "p_holm"))
    )
    order: int | None = None
    towards: bool = False
    screen: bool | None = None
    claim: bool | None = None

    def number(self, name: str) -> Fraction:
        """A number of a complete comparison."""
        value = self.numbers[name]
        return Fraction(1) if value is None else value


@dataclass(kw_only=True, slots=True)
class Superiority:
    """What follows for one arm: the objections, the whole family, and each A/A pair's later over its earlier figure."""

    arm: str
    objections: Objections
    family: list[Compared]
    null: dict[tuple[tuple[int, int], str, str], Fraction | None]

    def details(self, plan: Plan) -> dict[str, object]:
        """What a receipt states."""
        return {
            "arm": self.arm,
            "blocks": list(plan.measured),
            "alpha": plan.rules.get("alpha"),
            "confidence": plan.rules.get("confidence"),
            "practical": plan.rules.get("practical"),
            "family": [_entry(it) for it in self.family],
            "null": [
                {"pair": list(pair), "cell": cell, "metric": metric, "effect": _text(value), "float": _float(value)}
                for (pair, cell, metric), value in self.null.items()
            ],
        }

    def figure(self, plan: Plan) -> str:
        """The line of a receipt that passes: that of the arm's comparison that passes by least."""
        own = [it for it in self.family if it.comparison.candidate == self.arm and it.order is not None]
        if not own:
            return "no comparison"

        def margin(it: Compared) -> tuple[Fraction, Fraction]:
            apart = it.number("median") - 1
            return it.number("p_holm"), apart if it.comparison.lower else -apart

        line = _line(plan, max(own, key=margin), self.null)
        return f"{line} (the least of {len(own)})" if len(own) > 1 else line


def derive(plan: Plan, arm: str, trials: Trials) -> Superiority:
    """The comparisons of the family from every trial of the plan, and what follows for one arm."""
    own = Objections()
    if not any(it.candidate == arm for it in plan.comparisons):
        own.gap(1, f"'{arm}' is the candidate of no comparison of the plan")
    family = [_compared(plan, it, trials) for it in plan.comparisons]
    for it, p_holm in zip(family, holm([it.number("p") for it in family]), strict=True):
        if it.order is not None:
            it.numbers["p_holm"] = p_holm
    null = _null(own, plan, trials)
    for it in family:
        if it.comparison.candidate != arm:
            continue
        words = it.comparison.words()
        if it.order is None:
            own.gap(2, f"{words}: cannot pass: {'; '.join(it.missing)}")
            continue
        if not (it.towards and it.number("p_holm") <= plan.share("alpha")):
            own.find(5, _line(plan, it, null))
        if not it.screen:
            own.find(6, f"{words}: screen {_percent(plan.share('practical'))}: not met")
    whole = [(key, trial) for key, trial in trials.items() if trial is not None and not trial.why and trial.cells]
    for (first, one), (second, other) in combinations(whole, 2):
        if _figures(one) == _figures(other):
            own.gap(4, f"block {first[1]} of '{first[0]}' and block {second[1]} of '{second[0]}': the same figures")
    return Superiority(arm=arm, objections=own, family=family, null=null)


def _figures(trial: Trial) -> dict[str, dict[str, object]]:
    """The figures of a trial's cells: a warm-up of its own makes no second trial of the same recordings."""
    return {
        name: {key: it.value for key, it in cell.figures.items()}
        for name, cell in trial.cells.items()
        if name != WARM_UP
    }


def _compared(plan: Plan, it: Comparison, trials: Trials) -> Compared:
    found = Compared(comparison=it)
    for block in plan.measured:
        values: list[Fraction] = []
        for arm in (it.candidate, it.control):
            trial = trials.get((arm, block))
            if trial is None:
                found.missing.append(f"block {block} of '{arm}' was not timed")
            elif trial.why:
                found.missing.append(f"block {block} of '{arm}' is void: {trial.why}")
            else:
                value = _figure_of(trial, it.cell, it.metric)
                if value is None:
                    found.missing.append(f"block {block}: found no finite figure above 0 of '{arm}'")
                else:
                    values.append(value)
        if len(values) == 2:
            found.effects[block] = values[0] / values[1]
    if found.missing or not found.effects:
        return found
    ranked, count = sorted(found.effects.values()), len(found.effects)
    wanted = plan.share("confidence")
    orders = [k for k in range(1, (count + 1) // 2 + 1) if coverage(count, k) >= wanted]
    if not orders:
        found.missing.append(f"no interval of {float(wanted):g} from {count} effects")
        return found
    order = max(orders)
    middle = ranked[(count - 1) // 2 : count // 2 + 1]
    low, high, median = ranked[order - 1], ranked[count - order], sum(middle, Fraction(0)) / len(middle)
    below, above, p = sign_test(ranked)
    practical = plan.share("practical")
    found.order, found.towards = order, below > above if it.lower else above > below
    found.screen = median <= 1 - practical if it.lower else median >= 1 + practical
    found.claim = high <= 1 - practical if it.lower else low >= 1 + practical
    found.numbers |= {"median": median, "lower": low, "upper": high, "coverage": coverage(count, order), "p": p}
    return found


def _figure_of(trial: Trial, cell: str, metric: str) -> Fraction | None:
    """A finite figure above zero; None where there is none."""
    figure = trial.cells[cell].figures.get(metric) if cell in trial.cells else None
    return figure.value if figure is not None and isinstance(figure.value, Fraction) and figure.value > 0 else None


def sign_test(effects: Sequence[Fraction]) -> tuple[int, int, Fraction]:
    """Effects below and above 1, and the exact two-sided p; a tie counts with the side that has fewer."""
    below, above, count = sum(it < 1 for it in effects), sum(it > 1 for it in effects), len(effects)
    fewer = count - max(below, above)
    tail = Fraction(sum(comb(count, k) for k in range(fewer + 1)), 2**count)
    return below, above, min(Fraction(1), 2 * tail)


def holm(values: Sequence[Fraction]) -> list[Fraction]:
    """Holm's adjusted p-values: stepping down from the smallest, each times how many are left, never below the last."""
    adjusted, least = [Fraction(1)] * len(values), Fraction(0)
    for rank, index in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        least = max(least, min(Fraction(1), values[index] * (len(values) - rank)))
        adjusted[index] = least
    return adjusted


def _null(own: Objections, plan: Plan, trials: Trials) -> dict[tuple[tuple[int, int], str, str], Fraction | None]:
    found: dict[tuple[tuple[int, int], str, str], Fraction | None] = {}
    if not plan.null_pairs:
        own.idle.append((7, "found no A/A pair in the plan"))
    for pair in plan.null_pairs:
        for cell, metric in dict.fromkeys((it.cell, it.metric) for it in plan.comparisons):
            values = []
            for block in pair:
                trial = trials.get((plan.null_arm, block))
                value = None if trial is None or trial.why else _figure_of(trial, cell, metric)
                if value is not None:
                    values.append(value)
            ratio = found[pair, cell, metric] = values[1] / values[0] if len(values) == 2 else None
            if ratio is None:
                own.idle.append((7, f"A/A blocks {pair[0]} and {pair[1]} of '{plan.null_arm}': no {metric} in {cell}"))
            elif not abs(ratio - 1) < plan.share("practical"):
                own.idle.append((7, f"A/A blocks {pair[0]} and {pair[1]}: {_percent(abs(ratio - 1))} apart"))
    return found


def _text(value: Fraction | None) -> str | None:
    return None if value is None else f"{value.numerator}/{value.denominator}"


def _float(value: Fraction | None) -> float | str | None:
    """The nearest float, and in a word where there is none."""
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:
        return str(inf)


def _percent(value: Fraction) -> str:
    return f"{100 * float(value):.3g} %"


def _line(plan: Plan, it: Compared, null: Mapping[tuple[tuple[int, int], str, str], Fraction | None]) -> str:
    """The gate's own line of a complete comparison."""
    alpha, p_holm = plan.share("alpha"), it.number("p_holm")
    apart = [
        abs(ratio - 1)
        for (_, cell, metric), ratio in null.items()
        if ratio is not None and (cell, metric) == (it.comparison.cell, it.comparison.metric)
    ]
    return (
        f"{it.comparison.words()}: median ratio {float(it.number('median')):.3f} [{float(it.number('lower')):.3f}, "
        f"{float(it.number('upper')):.3f}] at {100 * float(it.number('coverage')):.1f} %, p = "
        f"{float(it.number('p')):.4g} (Holm {float(p_holm):.4g} {'<=' if p_holm <= alpha else '>'} {float(alpha):g}); "
        f"screen {_percent(plan.share('practical'))}: {'met' if it.screen else 'not met'}; claim: "
        f"{'supported' if it.claim else 'not supported'}; A/A {_percent(max(apart)) if apart else 'none'}"
    )


def _entry(it: Compared) -> dict[str, object]:
    return {
        "candidate": it.comparison.candidate,
        "control": it.comparison.control,
        "cell": it.comparison.cell,
        "metric": it.comparison.metric,
        "better": "lower" if it.comparison.lower else "higher",
        "effects": {str(block): _text(value) for block, value in it.effects.items()},
        **{name: _text(value) for name, value in it.numbers.items()},
        "floats": {name: _float(value) for name, value in it.numbers.items()},
        "order": it.order,
        "screen": it.screen,
        "claim": it.claim,
        # Why an effect is missing is said in the gate's own words; how many are, follows.
        "missing": len(it.missing),
    }
