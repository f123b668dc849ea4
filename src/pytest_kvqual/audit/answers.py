"""The auditor's own reading of answers: what one capture record says, and what the answer in it is worth.

Nothing here knows how the judges read: records, response bodies, numbers and words are scanned again from what the
formats say. A record is ``{"id", "order", "index", "status", "body", "error"}``, its body the raw JSON of a completion.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from typing import Any, NoReturn

RIGHT, WRONG, EMPTY, TRUNCATED, ERROR = KINDS = ("right", "wrong", "empty", "truncated", "error")

CLAMP = -9999.0
"""The engine writes every log-probability at or below this, minus infinity too, as this value: nothing was measured."""

_KEYS = ("id", "order", "index", "status", "body", "error")


class RecordError(ValueError):
    """A record that is no evidence. The text says where, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Body:
    """One request's answer. ``logprobs`` (nats) and ``text`` are None where they were not asked for."""

    id: str
    order: str
    index: int
    prompt: list[int]
    tokens: list[int]
    finish: str
    logprobs: list[float] | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that brought back no answer, and the words for it."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one question: its kind, the answer found in it, and its tokens.

    ``lenient``: the expected answer stands somewhere where a lenient reading finds it; it decides nothing.
    """

    kind: str
    found: str | None
    tokens: tuple[int, ...]
    lenient: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a text that is the answer. ``cut``: a marker ended it; ``unfinished``: reasoning never ended."""

    text: str
    cut: bool
    unfinished: bool


def outcome(task: str, record: object, item: Mapping[str, Any], rules: Mapping[str, Any], where: str = "") -> Outcome:
    """What became of one question of a scored task (``retrieval``, ``recall`` or ``gsm8k``).

    Args:
        task: The task.
        record: The capture record.
        item: The panel's item, with ``prompt``, ``max_tokens`` and ``expected``.
        rules: The study's table of this task.
        where: The place that the words of an error name.

    Raises:
        RecordError: The record is neither an answer nor a failed request.
    """
    answer = read(record, where, text=True)
    if isinstance(answer, Failed):
        return Outcome(ERROR, None, (), False)
    where = f"{where}, request '{answer.id}'"
    same_tokens(f"{where}, prompt", answer.prompt, item["prompt"])
    count, most = len(answer.tokens), item["max_tokens"]
    if answer.text and not count:
        raise RecordError(f"{where}: found a text and no token, expected the tokens that it was made of")
    if answer.finish not in ("stop", "length"):
        raise RecordError(f"{where}: found finish_reason {_line(answer.finish)!r}, expected 'stop' or 'length'")
    if count > most or (answer.finish == "length" and count != most):
        raise RecordError(
            f"{where}: found {count} tokens and finish_reason '{answer.finish}', expected {most} with 'length' or at "
            f"most {most} with 'stop'"
        )
    kind, found, lenient = grade(task, answer.text or "", answer.finish == "length", str(item["expected"]), rules)
    return Outcome(kind, None if found is None else _glimpse(found), tuple(answer.tokens), lenient)


def grade(task: str, text: str, limited: bool, expected: str, rules: Mapping[str, Any]) -> tuple[str, str | None, bool]:
    """The kind of an answer's text, what it says, and whether a lenient reading finds the expected answer.

    ``limited``: the limit on the tokens ended the text.
    """
    part = segment(text, rules)
    says, right, complete, lenient = (_final_number if task == "gsm8k" else _first_word)(part, expected)
    empty = not part.text.strip()
    if limited and (part.unfinished or (not complete and not empty)):
        return TRUNCATED, says, lenient
    if empty:
        return EMPTY, None, False
    return (RIGHT if right else WRONG), says, lenient


def losses(record: object, item: Mapping[str, Any], where: str = "") -> list[float]:
    """One document's losses in nats, a decode step each; the prefill's step zero is left out.

    Raises:
        RecordError: The record is no answer; the prompt or a forced target differs; a log-probability was not measured.
    """
    answer = read(record, where, logprobs=True)
    if isinstance(answer, Failed):
        raise RecordError(f"{where}, request '{answer.id}'{answer.reason}")
    where = f"{where}, document '{answer.id}'"
    same_tokens(f"{where}, prompt", answer.prompt, item["prompt"])
    same_tokens(f"{where}, targets", answer.tokens, item["targets"])
    if answer.finish != "length":
        raise RecordError(f"{where}: found finish_reason '{answer.finish}', expected 'length'")
    values = answer.logprobs or []
    for step, value in enumerate(values):
        if not value <= 0.0:
            raise RecordError(f"{where}, step {step}: found a log-probability of {value!r}, expected at most 0")
        if not value > CLAMP:
            raise RecordError(f"{where}, step {step}: found {value!r}, the engine's clamp, expected a measured value")
    return [-value for value in values[1:]]


@dataclass(frozen=True, slots=True)
class Serial:
    """One prompt's greedy tokens, and the order and place in which it was asked."""

    id: str
    order: str
    index: int
    tokens: tuple[int, ...]
    finish: str


def serial(record: object, item: Mapping[str, Any], where: str = "", *, reference: bool = False) -> Serial:
    """One prompt's greedy tokens, from an HTTP record or from one of the in-process reference.

    Raises:
        RecordError: The record is no answer; the prompt differs; or the tokens do not fit the finish reason.
    """
    if reference:
        keys = ("order", "index", "id", "token_ids", "finish_reason", "prompt_token_ids")
        table = _table(record, where, "", keys)
        result = Serial(
            id=_string(table, "id", where, ""),
            order=_string(table, "order", where, ""),
            index=_integer(table, "index", where, "", minimum=0),
            tokens=tuple(_ids(table, "token_ids", where, "")),
            finish=_string(table, "finish_reason", where, ""),
        )
        if "prompt_token_ids" in table:
            prompt = _ids(table, "prompt_token_ids", where, "")
            same_tokens(f"{where}, prompt '{result.id}'", prompt, item["prompt"])
    else:
        answer = read(record, where)
        if isinstance(answer, Failed):
            raise RecordError(f"{where}, request '{answer.id}'{answer.reason}")
        same_tokens(f"{where}, prompt '{answer.id}'", answer.prompt, item["prompt"])
        result = Serial(answer.id, answer.order, answer.index, tuple(answer.tokens), answer.finish)
    count, most = len(result.tokens), item["max_tokens"]
    if (result.finish == "length" and count == most) or (result.finish == "stop" and 1 <= count <= most):
        return result
    raise RecordError(
        f"{where}, prompt '{result.id}': found {count} tokens and finish_reason '{result.finish}', expected {most} "
        f"with 'length' or 1 to {most} with 'stop'"
    )


def read(record: object, where: str, *, logprobs: bool = False, text: bool = False) -> Body | Failed:
    """The answer in one capture record, or that its request failed.

    A request failed where the record has an error, another status than 200, or an error object under 200.

    Raises:
        RecordError: Anything else that keeps it from being an answer.
    """
    table = _table(record, where, "", _KEYS)
    name = _string(table, "id", where, "")
    place = f"{where}, request '{_line(name)}'"
    order, index = _string(table, "order", where, ""), _integer(table, "index", where, "", minimum=0)
    if _value(table, "error", where, "", "a value") is not None:
        return Failed(name, f": found the error {_string(table, 'error', where, '')!r}, expected an answer")
    status = _integer(table, "status", where, "")
    if status != 200:
        body = table.get("body")
        head = repr(body[:80]) if isinstance(body, str) else "with no text"
        return Failed(name, f": found status {status}, expected 200; the body begins {head}")
    source = _text(table, "body", where, "")
    inside = f"{place}, body"
    outer = _table(_json(source, inside), inside, "", None)
    if outer.get("error") is not None:
        return Failed(name, ", body: found an error object under status 200, expected an answer")
    choices = _value(outer, "choices", inside, "", "a value")
    if not isinstance(choices, list) or len(choices) != 1:
        found = f"{len(choices)} choices" if isinstance(choices, list) else "no list choices"
        raise RecordError(f"{inside}: in 'choices': found {found}, expected exactly 1")
    choice = _table(choices[0], inside, "choices[0]", None)
    prompt = _ids(choice, "prompt_token_ids", inside, "choices[0]")
    tokens = _ids(choice, "token_ids", inside, "choices[0]")
    usage = _table(_value(outer, "usage", inside, "", "a table"), inside, "usage", None)
    for key, ids in (("prompt_tokens", prompt), ("completion_tokens", tokens)):
        count = _integer(usage, key, inside, "usage")
        if count != len(ids):
            raise RecordError(
                f"{inside}: in 'usage.{key}': found {count}, expected {len(ids)}, the number of token ids in the choice"
            )
    return Body(
        id=name,
        order=order,
        index=index,
        prompt=prompt,
        tokens=tokens,
        finish=_string(choice, "finish_reason", inside, "choices[0]"),
        logprobs=_logprobs(choice, len(tokens), inside) if logprobs else None,
        text=_text(choice, "text", inside, "choices[0]") if text else None,
    )


def same_tokens(where: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse two lists of token ids that differ, at the first place where they do."""
    if found == expected:
        return
    if len(found) != len(expected):
        raise RecordError(f"{where}: found {len(found)} tokens, expected {len(expected)}")
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            raise RecordError(f"{where}: found token {one} at position {place}, expected {other}")


# ---- the answer's part of a text


def segment(text: str, rules: Mapping[str, Any]) -> Segment:
    """The answer in a text: without reasoning, up to the first marker of a run-on (with reasoning, or of a stop).

    Reasoning stands between its two markers, together with the white space behind; a closing marker alone ends
    reasoning that the prompt had opened. Markers inside reasoning end nothing.
    """
    reasoning = tuple(rules.get("reasoning") or ())
    ends = [*rules.get("run_on", ()), *(rules.get("stop", ()) if reasoning else ())]
    if not reasoning:
        places = [place for place in map(text.find, ends) if place >= 0]
        return Segment(text[: min(places)], True, False) if places else Segment(text, False, False)
    opening, closing = reasoning
    outside, inside = _markers(opening, closing, tuple(ends))
    # The prompt may have opened the reasoning: then the first of the two markers is the closing one.
    first = re.search(f"{re.escape(opening)}|{re.escape(closing)}", text)
    thinking = first is not None and first[0] == closing
    kept, place = "", 0
    while True:
        found = (inside if thinking else outside).search(text, place)
        if found is None:
            return Segment(kept if thinking else kept + text[place:], False, thinking)
        if thinking:
            thinking = False
        elif found.lastgroup == "end":
            return Segment(kept + text[place : found.start()], True, False)
        elif found.lastgroup == "open":
            kept += text[place : found.start()]
            thinking = True
        else:
            kept = ""
        place = found.end()


@lru_cache(maxsize=64)
def _markers(opening: str, closing: str, ends: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    close = rf"(?P<close>{re.escape(closing)}\s*)"
    end = "".join(f"|(?P<end>{'|'.join(map(re.escape, ends))})" if ends else "")
    return re.compile(rf"(?P<open>{re.escape(opening)})|{close}{end}"), re.compile(close)


# ---- numbers


_ASCII = str.maketrans(
    {
        **dict.fromkeys("‐‑‒–−﹣－", "-"),
        "＋": "+",
        **dict.fromkeys("٬﹐，", ","),
        **dict.fromkeys("٫﹒．", "."),
        **dict.fromkeys("⁄∕／", "/"),
        **dict.fromkeys("﹩＄", "$"),
        "￡": "£",
        **dict.fromkeys("٪﹪％", "%"),
        "＊": "*",
    }
)
_DIGITS = "0123456789"
_MONEY = "$€£"
_MOST_DIGITS = 600


def _final_number(part: Segment, expected: str) -> tuple[str | None, bool, bool, bool]:
    """GSM8K: the number behind the last ``####``. What it says, whether right, whole, and right by the lenient rule."""
    wanted = number(expected)
    lenient = wanted is not None and _last_number(part.text) == wanted
    _, mark, rest = part.text.rpartition("####")
    if not mark:
        return None, False, part.cut, lenient
    line = re.split(r"[\r\n]", rest, maxsplit=1)[0]
    value, end = _strict(line)
    whole = part.cut or len(line) < len(rest) or (value is not None and end < len(line))
    says = (line.strip() or None) if value is None else str(value)
    return says, value is not None and value == wanted, whole, lenient


def number(text: str) -> Fraction | None:
    """The number that a text is, as an exact rational; None where it is not exactly one."""
    return _strict(text)[0]


def ascii_digits(text: str) -> str:
    """Decimal digits of every script as ASCII ones."""
    if text.isascii():
        return text
    return "".join(char if char.isascii() else str(unicodedata.decimal(char, char)) for char in text)


def _ascii(text: str) -> str:
    """A text with the digits and the signs that numbers are made of in ASCII, character for character."""
    return text if text.isascii() else ascii_digits(text.translate(_ASCII))


def _strict(text: str) -> tuple[Fraction | None, int]:
    """The number that ``text`` is, and where its characters end (with a point behind them)."""
    text = _ascii(text)
    at = _past(text, 0)
    if text.startswith("**", at):
        at = _past(text, at + 2)
    negative = False
    if text[at : at + 1] in ("+", "-"):
        negative = text[at] == "-"
        at = _past_money(text, _past_money(text, at + 1))
    else:
        behind = _past_money(text, at)
        if behind > at and text[behind : behind + 1] in ("+", "-"):
            negative = text[behind] == "-"
            behind = _past_money(text, behind + 1)
        at = behind
    scanned = _scan(text, at)
    if scanned is None:
        return None, 0
    value, end = scanned
    rest = text[end:]
    if value is None or any(map(str.isnumeric, rest)):
        return None, 0
    # Behind the number: a percent sign, the end of bold, a period, the end of bold, then a unit.
    unit = rest.lstrip().removeprefix("%").lstrip().removeprefix("**").removeprefix(".").removeprefix("**").lstrip()
    if unit and not (unit[0].isalpha() or unit[0] in "%$€£¥°\\("):
        return None, 0
    return (-value if negative else value), end + rest.startswith(".")


def _last_number(text: str) -> Fraction | None:
    """The value of the last number in a text; a sign counts where nothing that it could be subtracted from precedes."""
    text = _ascii(text)
    place = max(map(text.rfind, _DIGITS))
    # Nothing but these characters joins two digits of one number, so no number reaches over the others.
    while place > 0 and text[place - 1] in "0123456789.,/":
        place -= 1
    last = None
    while 0 <= place < len(text):
        if text[place] not in "0123456789.,/":
            break
        scanned = _scan(text, place)
        if scanned is None:
            place += 1
            continue
        value, behind = scanned
        last = None if value is None else value * _sign_before(text, place)
        place = behind
    return last


def _sign_before(text: str, place: int) -> int:
    """-1 where a minus stands before the number at ``place``, on either side of a currency sign, else 1."""
    at, signs = place, ""
    if _is_sign(text, at - 1):
        at -= 1
        signs += text[at]
    blank = at
    while blank > 0 and text[blank - 1].isspace() and text[blank - 1] not in "\r\n":
        blank -= 1
    if blank > 0 and text[blank - 1] in _MONEY:
        at = blank - 1
        if text[max(at - 1, 0) : at] == "\\":
            at -= 1
    if at < place and _is_sign(text, at - 1):
        signs += text[at - 1]
    return -1 if "-" in signs else 1


def _is_sign(text: str, place: int) -> bool:
    """Whether a sign stands at ``place``, and nothing right before it that it would connect with."""
    if place < 0 or text[place] not in "+-":
        return False
    return place == 0 or not (text[place - 1].isalnum() or text[place - 1] in "_)].")


def _scan(text: str, at: int) -> tuple[Fraction | None, int] | None:
    """The number whose characters begin at ``at``: its value (None: no value) and its end. None where none begins."""
    whole, end = _whole(text, at)
    if whole and text[end : end + 1] == "/":
        under, behind = _whole(text, end + 1)
        if under:
            if len(whole) + len(under) > _MOST_DIGITS:
                return None, behind
            below = int(under.replace(",", ""))
            return (Fraction(int(whole.replace(",", "")), below) if below else None), behind
    part = ""
    if text[end : end + 1] == ".":
        behind = end + 1
        while text[behind : behind + 1] in tuple(_DIGITS):
            behind += 1
        part = text[end + 1 : behind]
        end = behind if part else end
    if not whole and not part:
        return None
    if len(whole) + len(part) > _MOST_DIGITS:
        return None, end
    return Fraction(int((whole + part).replace(",", "")), 10 ** len(part)), end


def _whole(text: str, at: int) -> tuple[str, int]:
    """The digits at ``at``, with the groups of three behind commas that follow them, and where they end."""
    end = at
    while end < len(text) and text[end] in _DIGITS:
        end += 1
    if 1 <= end - at <= 3 and text[at] != "0":
        while text[end : end + 1] == "," and _group(text, end + 1):
            end += 4
    return text[at:end], end


def _group(text: str, at: int) -> bool:
    digits = text[at : at + 4]
    return len(digits) >= 3 and all(char in _DIGITS for char in digits[:3]) and digits[3:] not in tuple(_DIGITS)


def _past(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _past_money(text: str, at: int) -> int:
    """Behind a currency sign at ``at`` (a backslash may stand before it) and the blanks of its line; else ``at``."""
    sign = at + 1 if text[at : at + 1] == "\\" else at
    if sign >= len(text) or text[sign] not in _MONEY:
        return at
    sign += 1
    while sign < len(text) and text[sign].isspace() and text[sign] not in "\r\n":
        sign += 1
    return sign


# ---- words


_BEFORE = frozenset("\"'`:=$#" + "\uff02\uff07\uff1a\uff1d\uff04\uff03")


def _first_word(part: Segment, expected: str) -> tuple[str | None, bool, bool, bool]:
    """Retrieval and recall: the first run of letters and digits, behind spaces, quotes and opening brackets at most."""
    text = ascii_digits(part.text)
    # Each character becomes a letter of the alphabet of three: a word's, one that may stand before it, any other.
    kinds = "".join("w" if char.isalnum() else "b" if _introduces(char) else "x" for char in text)
    found = re.match("([bx]*)(w*)", kinds)
    start, end = found.span(2) if found else (0, 0)
    word = text[start:end]
    right = word == expected and word != "" and "x" not in kinds[:start]
    says = word if word and "x" not in kinds[:start] else text.strip() or None
    return says, right, part.cut or bool(word and end < len(text)), bool(expected) and expected in text


def _introduces(char: str) -> bool:
    return char.isspace() or char in _BEFORE or unicodedata.category(char) in ("Ps", "Pi", "Pf")


# ---- JSON and its values


def _json(source: str, where: str) -> object:
    def constant(name: str) -> NoReturn:
        raise RecordError(f"{where}: found {name}, expected a finite number")

    def finite(text: str) -> float:
        value = float(text)
        if not isfinite(value):
            raise RecordError(f"{where}: found {text}, expected a number that float64 can hold")
        return value

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table: dict[str, object] = {}
        for key, value in pairs:
            if key in table:
                raise RecordError(_line(f"{where}: found the key '{key}' twice, expected it once"))
            table[key] = value
        return table

    try:
        source.encode()
        # Integers are left to the parser, because a body is mostly token ids; the few that are used are checked.
        return json.loads(source, object_pairs_hook=once, parse_constant=constant, parse_float=finite)
    except RecordError:
        raise
    except UnicodeEncodeError as error:
        # JSON in UTF-8 has no bytes for half of a pair; its first byte would have been this one.
        place = len(source[: error.start].encode())
        raise RecordError(f"{where} at byte {place}: found the byte 0xed, expected JSON in UTF-8") from None
    except RecursionError:
        raise RecordError(f"{where}: found nesting beyond the parser's limit, expected JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{where}, line {error.lineno}, column {error.colno}: found '{error.msg}', expected JSON in UTF-8"
        ) from None
    except ValueError as error:
        raise RecordError(f"{where}: found '{error}', expected JSON in UTF-8") from None


def _table(value: object, where: str, path: str, known: Sequence[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecordError(f"{_at(where, path)}: found {_shown(value)}, expected a table")
    for key in value:
        if not isinstance(key, str):
            raise RecordError(f"{_at(where, path)}: found {_shown(key)}, expected keys that are strings")
        if known is not None and key not in known:
            raise RecordError(
                _line(f"{_at(where, path)}: found the unknown key '{key}', expected only {', '.join(known)}")
            )
    return value


def _value(table: Mapping[str, Any], key: str, where: str, path: str, expected: str) -> Any:
    if key not in table:
        raise RecordError(f"{_at(where, path)}: found no key '{key}', expected {expected}")
    return table[key]


def _string(table: Mapping[str, Any], key: str, where: str, path: str) -> str:
    value = _value(table, key, where, path, "a string")
    if not isinstance(value, str) or not value:
        _refuse(value, key, where, path, "a string that is not empty")
    return str(value)


def _text(table: Mapping[str, Any], key: str, where: str, path: str) -> str:
    value = _value(table, key, where, path, "a string")
    if not isinstance(value, str):
        _refuse(value, key, where, path, "a string")
    return str(value)


def _integer(table: Mapping[str, Any], key: str, where: str, path: str, minimum: int | None = None) -> int:
    expected = "an integer" if minimum is None else f"an integer of at least {minimum}"
    value = _value(table, key, where, path, expected)
    if type(value) is not int or (minimum is not None and value < minimum):
        _refuse(value, key, where, path, expected)
    return int(value)


def _ids(table: Mapping[str, Any], key: str, where: str, path: str) -> list[int]:
    values = _value(table, key, where, path, "a list of integers")
    if not isinstance(values, list):
        _refuse(values, key, where, path, "a list of integers")
    # Types first, all at once: True equals 1, and so does 1.0.
    if not set(map(type, values)) <= {int} or (values and min(values) < 0):
        for place, value in enumerate(values):
            if type(value) is not int or value < 0:
                _refuse(value, f"{key}[{place}]", where, path, "an integer of at least 0")
    return list(values)


def _logprobs(choice: Mapping[str, Any], expected: int, where: str) -> list[float]:
    path = "choices[0].logprobs"
    inner = _table(_value(choice, "logprobs", where, "choices[0]", "a table"), where, path, None)
    values = _value(inner, "token_logprobs", where, path, "a list of numbers")
    if not isinstance(values, list):
        _refuse(values, "token_logprobs", where, path, "a list of numbers")
    for place, value in enumerate(values):
        if type(value) not in (int, float) or abs(value) > 1.7976931348623157e308 or value != value:
            _refuse(value, f"token_logprobs[{place}]", where, path, "a finite number")
    if len(values) != expected:
        raise RecordError(
            f"{where}: in '{path}.token_logprobs': found {len(values)} values, expected {expected}, one per token id"
        )
    return [float(value) for value in values]


def _refuse(value: object, key: str, where: str, path: str, expected: str) -> NoReturn:
    place = _at(where, f"{path}.{key}" if path else key)
    raise RecordError(_line(f"{place}: found {_shown(value)}, expected {expected}"))


def _at(where: str, path: str) -> str:
    return f"{where}: in '{path}'" if path else where


def _shown(value: object) -> str:
    """A value and its type in a few words."""
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "a table"
        return f"{kind} of {len(value)}" if value else f"{kind} that is empty"
    kinds: dict[type, str] = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    shown = json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else str(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"


def _glimpse(text: str) -> str:
    """The beginning of a text, for one line."""
    line = _line(text[:61])
    return line if len(line) <= 60 else f"{line[:59]}…"


def _line(text: str) -> str:
    """A text on one line: characters that do not print stand as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
