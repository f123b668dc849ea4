"""What the order of a plan's blocks makes of a machine that gets slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod

import pytest
from timed_plan import plan

from pytest_kvqual.stats.blocks import effect, median_interval, sign_test


def effects(orders: Sequence[Sequence[str]], time: Callable[[int], Fraction]) -> list[Fraction]:
    """Candidate over native in each block, where both are the same and only the slot decides the time."""
    slots = [(block, arm) for block, order in enumerate(orders) for arm in order]
    times = {slot: time(place) for place, slot in enumerate(slots)}
    return [effect(times[block, "candidate"], times[block, "native"]) for block in range(len(orders))]


@pytest.mark.parametrize("arms", [("native", "candidate"), ("native", "reference", "candidate")])
def test_a_drift_is_an_effect_of_a_fixed_order_alone(arms: tuple[str, ...]) -> None:
    """A/A, 10 % slower each slot: in the order AB +10 % and significant, counterbalanced 0 % and p = 1."""
    orders = [block.order for block in plan(arms=arms).blocks if block.kind == "measured"]
    tenth = Fraction(11, 10)
    naive = effects([("native", "candidate")] * len(orders), lambda place: tenth**place)
    assert median_interval(naive, confidence=0.95).median == tenth
    assert sign_test(naive).p == Fraction(1, 32)
    balanced = effects(orders, lambda place: tenth**place)
    assert prod(balanced, start=Fraction(1)) == Fraction(1)
    assert sign_test(balanced).p == Fraction(1)


@pytest.mark.parametrize("arms", [("native", "candidate"), ("native", "reference", "candidate")])
def test_a_steady_drift_falls_on_all_arms_alike(arms: tuple[str, ...]) -> None:
    """One second more in each slot adds up to the same for every arm."""
    orders = [block.order for block in plan(arms=arms).blocks if block.kind == "measured"]
    slots = [arm for order in orders for arm in order]
    assert len({sum(place for place, name in enumerate(slots) if name == arm) for arm in arms}) == 1
