"""Captures record by record: what came back, of which request, and whether it is another's copy (8, 9, 11 and 15)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, parse, sha256
from pytest_kvqual.audit.frozen import SCORED
from pytest_kvqual.audit.shapes import integer, items, kind, shown, table, text

CLAMP: Final = -9999.0
"""The engine writes each log-probability at or below this as this value: nothing was measured."""
_ALL_ANSWERED: Final = ("nll", "parity", "determinism")
"""The tasks of which no request may fail."""
RECORD: Final = ("id", "order", "index", "status", "body", "error")


@dataclass(kw_only=True, slots=True)
class Responses:
    """The responses seen so far: where each one was found first, by its id and its time."""

    first: dict[tuple[object, ...], str] = field(default_factory=dict)
    texts: dict[tuple[object, ...], tuple[str, str]] = field(default_factory=dict)
    """The text of each question's tokens, and where they were found first."""
    model: object = None
    """The model's name as served, that each response must carry; None leaves that unchecked."""

    def take(self, body: Mapping[str, object], attempt: str, where: str, report: Report) -> None:
        """One response; a second one of the same id is a copy (check 15).

        Request ids differ for the life of a process that captures; another process begins anew, so that across attempts
        the second in which the response was made must be the same as well.
        """
        report.look(15)
        if self.model is not None and body.get("model") != self.model:
            report.find(13, where, f"model: found {shown(body.get('model'))}, expected {shown(self.model)}, as served")
        name = body.get("id")
        if not isinstance(name, str):
            report.find(15, where, f"id of the response: found {shown(name)}, expected a string")
            return
        for key in ((attempt, name), (name, body.get("created"))):
            if key in self.first:
                report.find(
                    15, where, f"found the response {name!r}, which is that of {self.first[key]} as well: one capture "
                    "is a copy of another",
                )  # fmt: skip
                return
        self.first[(attempt, name)] = self.first[(name, body.get("created"))] = where

    def reads(self, task: str, item: object, choice: Mapping[str, object], where: str, report: Report) -> None:
        """The text of an answer: the same tokens to the same question read the same wherever they came back.

        No tokenizer is at hand, so that a text cannot be read off its tokens; two texts of the same tokens cannot both
        be what the model said (check 10). The ends are of the key: a stop string is cut off the text.
        """
        tokens, text = choice.get("token_ids"), choice.get("text")
        if not isinstance(tokens, list) or not isinstance(text, str):
            return
        report.look(10)
        ends = (choice.get("finish_reason"), choice.get("stop_reason"))
        key = (task, item, *(repr(end) for end in ends), sha256(repr(tokens).encode()))
        first, place = self.texts.setdefault(key, (text, where))
        if text != first:
            report.find(
                10, where, f"text: found {text[:60]!r}, expected {first[:60]!r}, that of the same tokens in {place}"
            )


def check(
    task: str, records: Sequence[object], panel: Mapping[str, object], *, only: int | None, order: str, attempt: str,
    where: str, responses: Responses, report: Report,
) -> None:  # fmt: skip
    """One capture of a panel.

    Args:
        task: ``nll``, ``parity`` or a scored task.
        records: The capture.
        panel: The panel.
        only: The capture is of the panel's first items, so many; None for all of them.
        order: ``forward`` or ``reverse``.
        attempt: The attempt's folder below ``evidence``.
        where: The file.
        responses: Takes each response.
        report: Takes the findings.
    """
    asked = [table(item, "panel") for item in items(panel, "items", "panel")][:only]
    places = {text(item, "id", "panel"): place for place, item in enumerate(asked)}
    seen: dict[str, None] = {}
    for number, record in enumerate(records, start=1):
        at = f"{where}, record {number}"
        report.look(11)
        with report.reading(11, at):
            outer = table(record, "record", RECORD)
            name = text(outer, "id", "record")
            if name not in places:
                report.find(11, at, f"found the id {name!r}, expected one of the {len(places)} that were asked")
                continue
            if name in seen:
                report.find(11, at, f"found {name!r} again, expected each item once")
                continue
            seen[name] = None
            if integer(outer, "index", "record") != places[name]:
                report.find(11, at, f"index: found {shown(outer['index'])}, expected {places[name]}, the panel's")
            if outer["order"] != order:
                report.find(11, at, f"order: found {shown(outer['order'])}, expected {order!r}")
            _answer(task, outer, asked[places[name]], attempt, at, responses, report)
    missing = [name for name in places if name not in seen]
    if missing:
        report.find(11, where, f"found {len(seen)} items, expected {len(places)}: no record of {missing[0]!r}")
    sent = [places[name] for name in seen]
    if task == "parity" and sent != sorted(sent, reverse=order == "reverse"):
        report.find(11, where, f"found the records in another order than the panel's ({order})")


def _answer(
    task: str, record: Mapping[str, object], item: Mapping[str, object], attempt: str, where: str,
    responses: Responses, report: Report,
) -> None:  # fmt: skip
    if record["error"] is not None or record["status"] != 200:
        # Of a scored task a failed request is an outcome, and counted as one.
        if task in _ALL_ANSWERED:
            report.find(9 if task == "nll" else 11, where, "found a failed request, expected an answer")
        return
    body = table(parse(text(record, "body", "record")), "body")
    responses.take(body, attempt, where, report)
    choices = items(body, "choices", "body") if "choices" in body else []
    if len(choices) != 1:
        if body.get("error") is None or task in _ALL_ANSWERED:
            report.find(11, where, f"choices: found {len(choices)}, expected exactly 1")
        return
    choice = table(choices[0], "choices[0]")
    report.look(8)
    if choice.get("prompt_token_ids") != item.get("prompt"):
        report.find(8, where, "prompt_token_ids: found others than the panel's prompt, expected it as sent")
    if task in SCORED:
        responses.reads(task, item.get("id"), choice, where, report)
    if task == "nll":
        with report.reading(9, where):
            _forced(choice, item, where, report)


def _forced(choice: Mapping[str, object], item: Mapping[str, object], where: str, report: Report) -> None:
    targets, found = items(item, "targets", "panel"), items(choice, "token_ids", "choices[0]")
    if found != targets:
        place = next(
            (at for at, (one, other) in enumerate(zip(found, targets, strict=False)) if one != other),
            min(len(found), len(targets)),
        )
        one = shown(found[place]) if place < len(found) else "none"
        other = shown(targets[place]) if place < len(targets) else "none"
        report.find(8, where, f"step {place}: found token {one}, expected the target {other}: no teacher was at work")
    values = items(table(choice.get("logprobs"), "logprobs"), "token_logprobs", "logprobs")
    if len(values) != len(targets):
        raise DamagedError(f"token_logprobs: found {len(values)}, expected {len(targets)}, one for each target")
    for step, value in enumerate(values):
        # Step zero comes from the prefill and enters no figure; it is held to the same form.
        report.look(9)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DamagedError(f"step {step}: found {kind(value)}, expected a log-probability")
        if not math.isfinite(value) or not CLAMP < value <= 0:
            raise DamagedError(
                f"step {step}: found {value!r}, expected a log-probability above {CLAMP:g} and at most 0"
            )
