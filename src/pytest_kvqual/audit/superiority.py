"""Superiority derived anew, in exact arithmetic, from the recordings of every trial of the plan (check 19).

The rules have the numbers that the gate has; seeded faults (rule 7) are the receipt's own word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from pytest_kvqual.audit.plans import Comparison, Plan, coverage, rank_of
from pytest_kvqual.audit.trials import Objections, Trial

Trials = Mapping[tuple[str, int], Trial | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One comparison over complete blocks; every number is exact."""

    comparison: Comparison
    effects: Mapping[int, Fraction]
    better: int
    ties: int
    p: Fraction
    p_holm: Fraction
    median: Fraction
    interval: tuple[Fraction, Fraction, Fraction] | None
    screen: bool
    claim: bool


@dataclass(kw_only=True, slots=True)
class Superiority:
    """What follows for one arm: the objections, its comparisons, and how far each A/A pair differs from 1."""

    objections: Objections
    compared: list[Compared]
    noise: dict[tuple[tuple[int, int], str, str], Fraction]

    def details(self, plan: Plan) -> dict[str, object]:
        """What a receipt states."""
        return {
            "alpha": plan.rules.get("alpha"),
            "practical": plan.rules.get("practical"),
            "blocks": list(plan.measured),
            "family": [_detail(it) for it in self.compared],
            "null": [
                {"pair": list(pair), "cell": cell, "metric": metric, "difference": str(value)}
                for (pair, cell, metric), value in self.noise.items()
            ],
        }

    def figure(self, plan: Plan) -> str:
        """The line of a receipt that passes."""
        noise = _percent(max(self.noise.values(), default=None))
        return "; ".join(_line(plan, it) for it in self.compared) + f"; A/A {noise}"


def derive(plan: Plan, arm: str, trials: Trials) -> Superiority:
    """The comparisons of one arm from every trial of the plan."""
    own = Objections()
    if not any(it.candidate == arm for it in plan.comparisons):
        own.gap(1, f"found no primary comparison of '{arm}' in the plan")
    paired: list[dict[int, Fraction] | None] = []
    for it in plan.comparisons:
        effects: dict[int, Fraction] = {}
        for block in plan.measured:
            ratio = _effect(own if it.candidate == arm else Objections(), it, block, trials)
            if ratio is not None:
                effects[block] = ratio
        paired.append(effects if effects and len(effects) == len(plan.measured) else None)
    tests = [
        (0, 0, Fraction(1)) if ratios is None else sign_test(list(ratios.values()), lower=it.lower)
        for it, ratios in zip(plan.comparisons, paired, strict=True)
    ]
    adjusted = holm([p for _, _, p in tests])
    compared = []
    for it, ratios, (better, ties, p), p_holm in zip(plan.comparisons, paired, tests, adjusted, strict=True):
        if it.candidate == arm and ratios is not None:
            compared.append(_compared(own, plan, it, ratios, (better, ties, p, p_holm)))
    return Superiority(objections=own, compared=compared, noise=_noise(own, plan, trials))


def _effect(own: Objections, it: Comparison, block: int, trials: Trials) -> Fraction | None:
    values: list[Fraction] = []
    for arm in (it.candidate, it.control):
        trial = trials.get((arm, block))
        if trial is None:
            own.gap(2, f"{it.words()}: block {block}: found no trial of '{arm}'")
        elif trial.why:
            own.find(2, f"{it.words()}: block {block}: found a void trial of '{arm}' ({trial.why})")
        else:
            value = _figure_of(trial, it.cell, it.metric)
            if isinstance(value, Fraction):
                values.append(value)
            else:
                own.find(2, f"{it.words()}: block {block}: found {value} of '{arm}'")
    return values[0] / values[1] if len(values) == 2 else None


def _figure_of(trial: Trial, cell: str, metric: str) -> Fraction | str:
    """A finite figure above zero, or in a word what was found."""
    figure = trial.cells[cell].figures.get(metric) if cell in trial.cells else None
    if figure is None:
        return "no figure"
    if isinstance(figure.value, Fraction) and figure.value > 0:
        return figure.value
    return str(figure.value)


def sign_test(effects: Sequence[Fraction], *, lower: bool) -> tuple[int, int, Fraction]:
    """Effects on the better side of 1, at 1, and the exact two-sided p.

    Ties stay, and are given to the sides as near to the middle as they allow.
    """
    below, above = sum(it < 1 for it in effects), sum(it > 1 for it in effects)
    count = len(effects)
    ties = count - below - above
    least = min(below, above) + ties
    least = min(least, count // 2)
    both = Fraction(sum(comb(count, k) for k in range(least + 1)) * 2, 2**count)
    return (below if lower else above), ties, min(both, Fraction(1))


def holm(values: Sequence[Fraction]) -> list[Fraction]:
    """Holm's adjusted p-values: the largest, over those not above it, of p times how many are left."""
    count = len(values)
    ranked = sorted(range(count), key=lambda index: values[index])
    adjusted = [Fraction(1)] * count
    for place, index in enumerate(ranked):
        adjusted[index] = min(Fraction(1), max((count - step) * values[ranked[step]] for step in range(place + 1)))
    return adjusted


def _compared(
    own: Objections, plan: Plan, it: Comparison, effects: Mapping[int, Fraction],
    test: tuple[int, int, Fraction, Fraction],
) -> Compared:  # fmt: skip
    better, ties, p, p_holm = test
    ranked, count = sorted(effects.values()), len(effects)
    median = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
    rank = rank_of(count, plan.share("confidence"))
    interval = (ranked[rank - 1], ranked[count - rank], coverage(count, rank)) if rank else None
    share = plan.share("practical")

    def enough(value: Fraction) -> bool:
        return value <= 1 - share if it.lower else value >= 1 + share

    found = Compared(
        comparison=it,
        effects=dict(effects),
        better=better,
        ties=ties,
        p=p,
        p_holm=p_holm,
        median=median,
        interval=interval,
        screen=enough(median),
        claim=interval is not None and enough(interval[1] if it.lower else interval[0]),
    )
    worse = count - better - ties
    if not (better > worse and p_holm <= plan.share("alpha")):
        own.find(3, f"{_line(plan, found)}, expected p <= {plan.rules.get('alpha')} in favour of '{it.candidate}'")
    if not found.screen:
        own.find(4, f"{_line(plan, found)}, expected a median at least {_percent(share)} better")
    if interval is None:
        own.gap(5, f"{it.words()}: found no interval from {count} blocks")
    return found


def _noise(own: Objections, plan: Plan, trials: Trials) -> dict[tuple[tuple[int, int], str, str], Fraction]:
    found = {}
    if not plan.null_pairs:
        own.idle.append((6, "found no A/A pair in the plan"))
    for pair in plan.null_pairs:
        for cell, metric in dict.fromkeys((it.cell, it.metric) for it in plan.comparisons):
            values = []
            for block in pair:
                trial = trials.get((plan.null_arm, block))
                value = "no valid trial" if trial is None or trial.why else _figure_of(trial, cell, metric)
                if isinstance(value, Fraction):
                    values.append(value)
                else:
                    own.idle.append((6, f"A/A block {block}: found {value} of '{plan.null_arm}' in {cell}"))
            if len(values) == 2:
                found[pair, cell, metric] = apart = abs(values[1] / values[0] - 1)
                if not apart < plan.share("practical"):
                    own.idle.append((6, f"A/A blocks {pair[0]} and {pair[1]}: found {_percent(apart)} of {metric}"))
    return found


def _percent(value: Fraction | None) -> str:
    return "none" if value is None else f"{100 * float(value):.3g} %"


def _line(plan: Plan, found: Compared) -> str:
    between = ""
    if found.interval is not None:
        low, high, covered = (float(it) for it in found.interval)
        between = f" [{low:.4f}, {high:.4f}] at {100 * covered:.1f} %"
    return (
        f"{found.comparison.words()}: median ratio {float(found.median):.4f}{between}, {found.better} of "
        f"{len(found.effects)} blocks better, p = {float(found.p):.4g} (Holm {float(found.p_holm):.4g}, alpha "
        f"{float(plan.share('alpha')):g}); screen {_percent(plan.share('practical'))}: "
        f"{'met' if found.screen else 'not met'}; claim: {'supported' if found.claim else 'not supported'}"
    )


def _detail(found: Compared) -> dict[str, object]:
    it = found.comparison
    low, high, covered = (None, None, None) if found.interval is None else (str(one) for one in found.interval)
    return {
        "candidate": it.candidate,
        "control": it.control,
        "cell": it.cell,
        "metric": it.metric,
        "better": "lower" if it.lower else "higher",
        "effects": {str(block): str(value) for block, value in found.effects.items()},
        "median": None if found.interval is None else str(found.median),
        "lower": low,
        "upper": high,
        "coverage": covered,
        "blocks_better": found.better,
        "ties": found.ties,
        "p": str(found.p),
        "p_holm": str(found.p_holm),
        "screen": found.screen,
        "claim": found.claim,
    }
