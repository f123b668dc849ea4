"""Comparing the answers of one panel that was sent several times, in several orders.

The comparison is a document, ``order-comparison.json``::

    {"schema": 1, "policy": POLICY,
     "pairs": [{"left": RUN, "right": RUN, "differ": n, "of": n,
                "first": [{"id": ID, "index": n, "left": token, "right": token}, ...]}, ...]}

``differ`` counts the requests, of the ``of`` that either run has, whose tokens differ. ``first`` holds the first
:data:`KEPT` of them in the left run's order: ``index`` is the position of the first token that differs, ``left`` and
``right`` the tokens there, null where a run has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

SCHEMA: Final = 1
ORIGINAL: Final = "original"
ROTATED: Final = "rotated"
AGAIN: Final = "original-again"
NATURAL: Final = "natural"
RUNS: Final = (ORIGINAL, ROTATED, AGAIN, NATURAL)
"""The names of the runs. ``natural`` is reported only; the others must be there."""

REQUIRED: Final = (ORIGINAL, ROTATED, AGAIN)
KEPT: Final = 20

Run = Mapping[str, Sequence[int]]
"""The generated tokens of each request, by its id, in the order sent."""


def compare(left: Run, right: Run) -> dict[str, object]:
    """How two runs differ: ``{"differ", "of", "first"}`` as in this module's docstring.

    A request that one run lacks differs. Two runs without a request are equal in 0 of 0: the caller decides what that
    is worth.
    """
    names = list(dict.fromkeys((*left, *right)))
    first: list[dict[str, object]] = []
    differ = 0
    for name in names:
        one, other = left.get(name), right.get(name)
        if one is not None and other is not None and list(one) == list(other):
            continue
        differ += 1
        if len(first) < KEPT:
            first.append({"id": name, **_place(one or (), other or ())})
    return {"differ": differ, "of": len(names), "first": first}


def comparison(policy: str, runs: Mapping[str, Run]) -> dict[str, object]:
    """The order-comparison document: the original run against each other run that is there, in the order of RUNS.

    Args:
        policy: The study's policy, kept as it is given.
        runs: The runs by name; unknown names are left out. Without the original there is no pair.
    """
    pairs: list[dict[str, object]] = []
    if ORIGINAL in runs:
        for name in RUNS[1:]:
            if name in runs:
                pairs.append({"left": ORIGINAL, "right": name, **compare(runs[ORIGINAL], runs[name])})
    return {"schema": SCHEMA, "policy": policy, "pairs": pairs}


def _place(left: Sequence[int], right: Sequence[int]) -> dict[str, object]:
    for index, (one, other) in enumerate(zip_longest(left, right)):
        if one != other:
            return {"index": index, "left": one, "right": other}
    # One run lacks the request and the other answered nothing.
    return {"index": 0, "left": None, "right": None}
