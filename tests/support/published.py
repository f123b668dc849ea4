"""The published result of Qwen3-8B AWQ over HTTP, as a run directory: a reconstruction of the published counts.

These are not the original records. The page gives counts: how many of 1,319 GSM8K questions each arm answered right,
how many the candidate lost and gained against each control, and the same for 100 retrieval questions. Every verdict of
the preservation rule follows from those counts alone, so that any outcomes with these counts lead to the same figures.
This generator picks one such assignment and writes it with :mod:`full_run`. It invents what the page does not say:
which questions, every text and token, the losses of nll (the page says that they passed), and a second capture of
the first control that answers as the first one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

from full_run import ARMS, CANDIDATE, CONTROLS, FULL, FullRun, Size, build_run

QUESTIONS: Final = 1319
RIGHT: Final = {CANDIDATE: 1195, "native-flashinfer": 1198, "native-fa3": 1202}
LOST: Final = {"native-flashinfer": 20, "native-fa3": 22}
GAINED: Final = {"native-flashinfer": 17, "native-fa3": 15}
RETRIEVAL_QUESTIONS: Final = 100
RETRIEVAL_RIGHT: Final = 91
SEED: Final = 1319

Table = dict[tuple[bool, ...], int]
"""Questions by who answered right: (candidate, native-flashinfer, native-fa3)."""


def joint(lost_to_both: int, gained_on_both: int) -> Table:
    """The table with so many questions lost to both controls at once, and so many gained on both.

    The counts leave exactly these two free: lost to both is between 0 and 20, gained on both between 0 and 15.

    Raises:
        ValueError: A cell would be negative.
    """
    first, second = CONTROLS
    wrong = QUESTIONS - RIGHT[CANDIDATE]
    table: Table = {
        (False, True, True): lost_to_both,
        (False, True, False): LOST[first] - lost_to_both,
        (False, False, True): LOST[second] - lost_to_both,
        (False, False, False): wrong - LOST[first] - LOST[second] + lost_to_both,
        (True, False, False): gained_on_both,
        (True, False, True): GAINED[first] - gained_on_both,
        (True, True, False): GAINED[second] - gained_on_both,
        (True, True, True): RIGHT[CANDIDATE] - GAINED[first] - GAINED[second] + gained_on_both,
    }
    for cell, count in table.items():
        if count < 0:
            raise ValueError(f"cell {cell}: found {count}, expected a count")
    return table


def tables() -> Iterator[Table]:
    """Every joint table that has the published counts."""
    for lost_to_both, gained_on_both in product(range(min(LOST.values()) + 1), range(min(GAINED.values()) + 1)):
        yield joint(lost_to_both, gained_on_both)


def gsm8k(table: Table) -> dict[str, list[str]]:
    """What each question came to, by arm. Questions of one cell are spread over the set."""
    cells = [cell for cell, count in table.items() for _ in range(count)]
    # 500 and 1,319 have no common divisor: each place is met once.
    order = [cells[500 * place % QUESTIONS] for place in range(QUESTIONS)]
    return {arm: ["right" if cell[index] else "wrong" for cell in order] for index, arm in enumerate(ARMS)}


def retrieval() -> dict[str, list[str]]:
    """91 right in each arm; the candidate loses question 17 to both controls and gains question 43 on both."""
    wrong = {17: (CANDIDATE,), 43: CONTROLS, **dict.fromkeys(range(4, 100, 12), ARMS)}
    return {
        arm: ["wrong" if arm in wrong.get(place, ()) else "right" for place in range(RETRIEVAL_QUESTIONS)]
        for arm in ARMS
    }


def build_published(folder: Path, *, size: Size = FULL) -> FullRun:
    """Write the reconstruction below ``folder``, of the page's number of questions.

    Args:
        folder: An empty or missing folder.
        size: Of prompts and answers; the page's is 8,192 tokens and 32 documents of 128 steps.
    """
    return build_run(
        folder,
        size=size,
        seed=SEED,
        outcomes={"retrieval": retrieval(), "gsm8k": gsm8k(joint(10, 7))},
        # The page's arms were asked at a client concurrency of 32.
        schedule="natural",
        name="published-result",
    )
