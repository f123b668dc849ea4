"""What a number of paired questions shows, and could show: the lines of ``kvqual bound`` and ``kvqual power``."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pytest_kvqual._decode import Table
from pytest_kvqual.errors import ReceiptError, StudyError
from pytest_kvqual.receipt.statement import parse
from pytest_kvqual.stats.bounds import most_lost, preservation_upper
from pytest_kvqual.stats.net import net_interval
from pytest_kvqual.stats.power import passing_probability, smallest_possible, smallest_total

LARGEST = 20_000
"""The most questions that the commands take: the exact integers grow with them, and the waiting with their square."""

GATES = ("retrieval", "recall", "gsm8k")
"""The gates whose receipts hold a null in questions lost."""

_DIGITS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The lines of :func:`bound`, and whether the upper bound is below the limit."""

    lines: tuple[str, ...]
    passed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Null:
    """A control captured twice: ``lost`` of ``total`` questions were right the first time and not the second."""

    lost: int
    total: int


def bound(*, lost: int, total: int, limit: float, confidence: float, gained: int | None = None) -> Bound:
    """The upper bound of the loss probability against the limit, and what would have passed.

    With ``gained`` also the net change and its two-sided interval at ``confidence``, in percentage points; it decides
    nothing.

    Raises:
        ValueError: An argument is out of range; the message is one line.
    """
    _limited("total", total)
    upper = preservation_upper(lost, total, confidence)
    most = most_lost(total, limit, confidence)
    passed = upper < limit
    side = "below" if passed else "not below"
    lines = [f"{lost} lost of {total}: {_percent(confidence)} upper bound {_share(upper)}, {side} {_percent(limit)}"]
    if most is None:
        lines.append(f"no count would pass: {_fewest(limit, confidence)} questions are the fewest that can")
    else:
        lines.append(f"up to {most} lost would pass")
    if gained is not None:
        found = net_interval(lost, gained, total, confidence)
        lines.append(
            f"{gained} gained: net {found.net:+d} of {total}, {_points(found.net, total)} points "
            f"[{_points(found.lower, total)}, {_points(found.upper, total)}] at {_percent(confidence)}; decides nothing"
        )
    return Bound(lines=tuple(lines), passed=passed)


def power(
    *,
    total: int,
    limit: float,
    confidence: float,
    wanted: float,
    loss_rate: float | None = None,
    null: Null | None = None,
) -> tuple[str, ...]:
    """With what probability a design passes, and how many questions would make it ``wanted``.

    Exactly one of ``loss_rate`` (the candidate's true loss probability) and ``null`` is given. With a null the
    candidate is one that loses no more against the control than the control against itself: at the share that was
    observed, and at that share's upper bound, at ``confidence``.

    Raises:
        StudyError: So few questions that even with none lost the bound is not below the limit.
        ValueError: An argument is out of range; the message is one line.
    """
    if (loss_rate is None) == (null is None):
        raise ValueError("found none or both of a loss rate and a null, expected one of them")
    _limited("total", total)
    most = most_lost(total, limit, confidence)
    fewest = smallest_possible(limit, confidence)
    if most is None:
        raise StudyError(
            f"total: found {total} questions, expected at least {fewest}: with fewer the {_percent(confidence)} upper "
            f"bound is not below {_percent(limit)} with 0 lost",
            advice="ask more questions, or declare a wider limit",
        )
    rule = f"{_percent(confidence)} upper bound below {_percent(limit)}"
    lines = [f"{total} questions, {rule}: up to {most} lost pass; {fewest} questions are the fewest that can pass"]
    rates: list[float | Fraction]
    if null is not None:
        _limited("null total", null.total)
        if not 0 <= null.lost <= null.total:
            raise ValueError(f"null lost: found {null.lost}, expected 0 to {null.total}")
        observed, upper = Fraction(null.lost, null.total), preservation_upper(null.lost, null.total, confidence)
        lines.append(
            f"null: {null.lost} lost of {null.total} where the control was captured twice: {_share(observed)}, "
            f"{_percent(confidence)} upper bound {_share(upper)}"
        )
        rates = [observed, upper]
    else:
        rates = [0.0 if loss_rate is None else loss_rate]
    return (*lines, *(_passing(total, limit, confidence, wanted, rate) for rate in rates))


def null_of(path: Path) -> Null:
    """The null of a gate's receipt.

    Raises:
        ReceiptError: The receipt cannot be read, is not as it was written, is of another gate, or holds no null.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReceiptError(f"{path}: cannot be read: {error.strerror}, expected a gate's receipt") from error
    receipt = parse(data, name=str(path))
    if receipt.gate not in GATES:
        raise ReceiptError(f"{path}: found a receipt of '{receipt.gate}', expected one of {', '.join(GATES)}")
    details = receipt.verdict.details
    for key in ("questions", "null"):
        if details.get(key) is None:
            raise ReceiptError(
                f"{path}: predicate.details.{key}: found none, expected one",
                advice="name the receipt of a gate that judged a null",
            )
    table = Table(details, origin=str(path), error=ReceiptError, known=None, path="predicate.details")
    questions = table.integer("questions", minimum=1)
    null = table.table("null", known=None)
    lost = null.strings("lost")
    if len(set(lost)) != len(lost) or len(lost) > questions:
        null.fail("lost", f"{len(lost)} ids, {len(set(lost))} of them different", f"up to {questions} different ids")
    return Null(lost=len(lost), total=questions)


def _passing(total: int, limit: float, confidence: float, wanted: float, rate: float | Fraction) -> str:
    probability = passing_probability(total, limit, confidence, rate)
    try:
        enough = f"from {smallest_total(limit, confidence, rate, wanted)} questions on it is at least {wanted:g}"
    except ValueError:
        # The other arguments were taken by the calls before, so it is this one or the rate.
        if not 0 < wanted < 1:
            raise
        if rate < limit:
            enough = f"it is so close to {_percent(limit)} that no total was found at which that is at least {wanted:g}"
        else:
            enough = f"no total makes that {wanted:g}, for the rate is not below {_percent(limit)}"
    return f"at a loss rate of {_share(rate)}: passes with probability {_probability(probability)}; {enough}"


def _fewest(limit: float, confidence: float) -> str:
    try:
        return str(smallest_possible(limit, confidence))
    except ValueError:
        return "more than 1000000"


def _limited(name: str, total: int) -> None:
    if not 1 <= total <= LARGEST:
        raise ValueError(f"{name}: found {total}, expected 1 to {LARGEST} questions")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _share(share: float | Fraction) -> str:
    return f"{100 * float(share):.3f} %"


def _points(net: int, total: int) -> str:
    return f"{100 * net / total:+.3f}"


def _probability(probability: float) -> str:
    """Six decimals; a float that is neither 0 nor 1 is not printed as if it were."""
    shown = f"{probability:.{_DIGITS}f}"
    if float(shown) == 1 and probability < 1:
        return f"above {1 - 10**-_DIGITS:.{_DIGITS}f}"
    if float(shown) == 0 and probability > 0:
        return f"below {10**-_DIGITS:.{_DIGITS}f}"
    return shown
