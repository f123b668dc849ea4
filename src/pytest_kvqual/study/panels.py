"""Frozen inputs of a study: panels of token IDs and the scales of a quantised cache.

An ``nll`` item is one document of ``length + steps`` tokens: the prompt is its first ``length - 1`` tokens, the targets
are the ``steps + 1`` that follow. ``targets[0]`` comes out of prefill (step zero) and is excluded from the loss;
``targets[1:]`` are the cached decode steps. Items of ``oracle`` and ``parity`` panels are prompts with a number of
tokens to generate; those of the scored tasks (``retrieval``, ``gsm8k``, ``recall``) also have the answer that is right,
and the group in which they are reported.

History of both formats:
    1: panels of nll, oracle, parity and the scored tasks; one V scale per layer.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual._decode import Table, parse_json
from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.load import SCORED_TASKS
from pytest_kvqual.study.model import Selection, Study, TimingRules

__all__ = [
    "TASKS",
    "Panel",
    "PanelItem",
    "check_files",
    "check_fit",
    "check_panels",
    "has_length",
    "load_panel",
    "load_scales",
    "parse_panel",
    "selected_scales",
]

SCHEMA: Final = 1
TASKS: Final = ("nll", "oracle", "parity", *SCORED_TASKS, "timing")
#: The tasks with a panel for each length; the others have the same questions at every one.
_BY_LENGTH: Final = ("nll", "oracle", "retrieval", "timing")
#: What an item of a timing panel is for.
MEASURED, WARM_UP, CANARY = "measured", "warm-up", "canary"
#: The shortest run of tokens that counts as an overlap: shorter ones occur between unrelated texts.
OVERLAP_TOKENS: Final = 16

_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_ID_FORM = "an id of letters, digits, '_', '.' and '-'"


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelItem:
    """One request.

    ``prompt`` and ``targets`` are token IDs. ``targets`` is empty where nothing is forced; ``max_tokens`` is the number
    of tokens to generate, and equals ``len(targets)`` where targets are forced. Of a scored panel, ``expected`` is the
    right answer, and ``grade`` the group of questions that it is reported in (``5 digits``). Of a timing panel,
    ``grade`` says what the prompt is for (``measured``, ``warm-up``, ``canary``), and ``expected`` of a canary is the
    id of the parity panel's item with the same prompt.
    """

    id: str
    prompt: tuple[int, ...]
    targets: tuple[int, ...]
    max_tokens: int
    expected: str = ""
    grade: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel: its task, its context length in tokens (None where it has none), its items in order, its digest.

    ``sha256`` is that of the file's bytes.
    """

    task: str
    length: int | None
    items: tuple[PanelItem, ...]
    sha256: str


def has_length(task: str) -> bool:
    """Whether the task has a panel of its own for each context length."""
    return task in _BY_LENGTH


def load_panel(path: Path, *, task: str, length: int | None, vocabulary: int, tokenizer: str | None = None) -> Panel:
    """The panel in a file, checked to be the one that is asked for.

    Args:
        path: The panel's JSON file.
        task: The task that it must be for.
        length: The context length that it must be for, in tokens; None for a panel without one.
        vocabulary: Token IDs lie in ``range(vocabulary)``.
        tokenizer: The SHA-256 of the tokenizer file that it must be for; None leaves that unchecked.

    Raises:
        StudyError: The file is missing or malformed; another task, length or tokenizer; an ID beyond the vocabulary; an
            id given twice; a question of retrieval or recall asked twice; for nll also a prompt or target count of the
            wrong size, or documents that overlap.
    """
    return parse_panel(
        _read(path, f"the {task} panel"),
        origin=str(path),
        task=task,
        length=length,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
    )


def parse_panel(
    data: bytes, *, origin: str, task: str, length: int | None, vocabulary: int, tokenizer: str | None = None
) -> Panel:
    """The panel in the bytes of a file; arguments and errors as for :func:`load_panel`."""
    top = Table(
        parse_json(data, origin=origin, error=StudyError),
        origin=origin, error=StudyError,
        known=("schema", "task", "length", "tokenizer_sha256", "sources", "items"),
    )  # fmt: skip
    _schema(top)
    found_task = top.choice("task", TASKS)
    if found_task != task:
        top.fail("task", f"'{found_task}'", f"'{task}'", advice="name this panel where its task belongs")
    found_length = None if top.raw("length") is None else top.integer("length", minimum=2)
    if found_length != length:
        top.fail(
            "length", _length(found_length), _length(length), advice="each length has a panel of its own, never a cut"
        )
    found_tokenizer = top.sha256("tokenizer_sha256")
    if tokenizer is not None and found_tokenizer != tokenizer:
        top.fail("tokenizer_sha256", found_tokenizer, tokenizer, advice="build the panel with the study's tokenizer")
    if not isinstance(top.raw("sources"), list):
        top.fail("sources", "no list", "a list of the texts that the panel is made of")
    answer = ("targets",) if task == "nll" else ("max_tokens",)
    scored = ("expected", "grade") if task in (*SCORED_TASKS, "timing") else ()
    tables = top.tables("items", known=("id", "prompt", *answer, *scored))
    if not tables:
        top.fail("items", "no item", "at least one")
    items = tuple(_item(table, task, vocabulary) for table in tables)
    seen: dict[str, int] = {}
    asked: dict[tuple[int, ...], str] = {}
    for index, item in enumerate(items):
        if item.id in seen:
            tables[index].fail("id", f"'{item.id}' again", f"an id that items[{seen[item.id]}] does not have")
        seen[item.id] = index
        # The questions of gsm8k are those of its data set, whatever they are.
        if task in (*SCORED_TASKS, "timing") and task != "gsm8k" and item.prompt in asked:
            tables[index].fail(
                "prompt", f"that of '{asked[item.prompt]}' in '{item.id}'", "a question of its own",
                advice="one answer would be counted twice",
            )  # fmt: skip
        asked[item.prompt] = item.id
    if task == "nll" and length is not None:
        _check_documents(tables, items, length)
    return Panel(task=task, length=length, items=items, sha256=sha256_bytes(data))


def load_scales(path: Path, layers: int) -> tuple[float, ...]:
    """The V scale of each layer: positive, finite, exact in float32.

    Raises:
        StudyError: The file is missing or malformed, has another number of layers, or holds a scale that is zero,
            negative, not finite or not a float32; names the layer.
    """
    data = _read(path, "the scales file")
    top = Table(
        parse_json(data, origin=str(path), error=StudyError), origin=str(path), error=StudyError,
        known=("schema", "v_scale"),
    )  # fmt: skip
    _schema(top)
    scales = top.numbers("v_scale")
    if len(scales) != layers:
        top.fail("v_scale", f"{len(scales)} scales", f"{layers}: one for each layer of the model")
    for layer, scale in enumerate(scales):
        if not (scale > 0 and _as_float32(scale) == scale):
            top.fail(f"v_scale[{layer}]", f"{scale!r}", "a positive number that float32 holds exactly")
    return scales


def selected_scales(selection: Selection) -> tuple[float, ...] | None:
    """The V scales of the selected arm; None where it declares none.

    Raises:
        StudyError: As :func:`load_scales`.
    """
    path = selection.arm.scales
    return None if path is None else load_scales(path, selection.study.model.layers)


def check_files(study: Study) -> None:
    """Read every panel and every scales file of the study, and hold them against what it declares.

    Raises:
        StudyError: As :func:`check_panels` and :func:`load_scales`.
    """
    for arm in study.arms.values():
        if arm.scales is not None:
            load_scales(arm.scales, study.model.layers)
    check_panels(study)


def check_panels(study: Study) -> None:
    """Read every panel of the study, and hold it against what the study declares.

    Raises:
        StudyError: As :func:`load_panel`; also a panel with another number of items, targets or tokens to generate than
            the study says, an item beyond the length's ``max_model_len``, and an nll document that is the beginning of
            a longer panel's; a timing panel with too few items, a canary without its parity item, or two prompts with
            the same first block.
    """
    vocabulary = study.model.vocabulary
    tokenizer = study.model.files.get("tokenizer.json")
    parity = load_panel(study.parity.panel, task="parity", length=None, vocabulary=vocabulary, tokenizer=tokenizer)
    _count(study.parity.panel, len(parity.items), study.parity.prompts, "items", "parity.prompts")
    for item in parity.items:
        _count(study.parity.panel, item.max_tokens, study.parity.max_tokens, f"max_tokens of '{item.id}'",
               "parity.max_tokens")  # fmt: skip
    documents: dict[int, Panel] = {}
    for length in study.lengths.values():
        check_fit(study.parity.panel, parity, length.max_model_len, length.tokens)
        for task, path in length.panels.items():
            own = length.tokens if has_length(task) else None
            panel = load_panel(path, task=task, length=own, vocabulary=vocabulary, tokenizer=tokenizer)
            check_fit(path, panel, length.max_model_len, length.tokens)
            if task in length.questions:
                rules = study.preservation[task]
                _count(path, len(panel.items), length.questions[task], "items", f"lengths.{length.tokens}.questions")
                for item in panel.items:
                    _count(path, item.max_tokens, rules.max_tokens, f"max_tokens of '{item.id}'", f"{task}.max_tokens")
            if task == "nll":
                _count(path, len(panel.items), study.nll.documents, "items", "nll.documents")
                _count(path, len(panel.items[0].targets), study.nll.decode_steps + 1, "targets of each item",
                       "nll.decode_steps and step zero")  # fmt: skip
                documents[length.tokens] = panel
    _check_cuts(study, documents)
    for tokens, timing in study.timing.items():
        panel = load_panel(timing.panel, task="timing", length=tokens, vocabulary=vocabulary, tokenizer=tokenizer)
        check_fit(timing.panel, panel, study.lengths[tokens].max_model_len, tokens)
        _check_timing(timing, panel, parity, study.engine.block_size)


def _check_timing(rules: TimingRules, panel: Panel, parity: Panel, block_size: int) -> None:
    """Refuse canaries that have no serial reference, and prompts of which a block was seen before they are measured."""
    prompts = {item.id: item.prompt for item in parity.items}
    for item in panel.items:
        if item.grade == CANARY and prompts.get(item.expected) != item.prompt:
            raise StudyError(
                f"{rules.panel}: found the canary '{item.id}' with another prompt than '{item.expected}' of the parity "
                "panel, expected the same: its serial reference is that item's"
            )
    kinds = [item.grade for item in panel.items]
    measured = sum(cell.requests - cell.canaries for cell in rules.cells)
    for grade, wanted, why in (
        (WARM_UP, rules.warm_up, "warm_up"),
        (MEASURED, measured, "its cells together"),
        (CANARY, sum(cell.canaries for cell in rules.cells), "its cells together"),
    ):
        if kinds.count(grade) < wanted:
            raise StudyError(
                f"{rules.panel}: found {kinds.count(grade)} items of grade {grade}, expected at least {wanted} for "
                f"{why}"
            )
    blocks: dict[tuple[int, ...], str] = {}
    for item in panel.items:
        head = item.prompt[:block_size]
        if len(head) == block_size and head in blocks:
            raise StudyError(
                f"{rules.panel}: found the first block of '{blocks[head]}' in '{item.id}', expected another: a prefix "
                "that was sent before is no cold prompt"
            )
        blocks[head] = item.id


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StudyError(f"found no file {path}, expected {what}", advice="restore or generate it") from None
    except OSError as error:
        raise StudyError(f"cannot read {path}, {what}: {error.strerror}") from None


def _schema(top: Table) -> None:
    found = top.integer("schema")
    if found != SCHEMA:
        top.fail("schema", str(found), str(SCHEMA), advice="use the version of pytest-kvqual that the file is for")


def _length(value: int | None) -> str:
    return "no length (null)" if value is None else f"length {value}"


def _item(table: Table, task: str, vocabulary: int) -> PanelItem:
    prompt = table.integers("prompt", minimum=0, maximum=vocabulary - 1)
    if not prompt:
        table.fail("prompt", "no token", "at least one")
    targets = table.integers("targets", minimum=0, maximum=vocabulary - 1) if task == "nll" else ()
    scored = task in SCORED_TASKS
    timed = task == "timing"
    grade = table.choice("grade", (MEASURED, WARM_UP, CANARY)) if timed else ""
    return PanelItem(
        id=table.string("id", pattern=_ID, form=_ID_FORM),
        prompt=prompt,
        targets=targets,
        max_tokens=len(targets) if task == "nll" else table.integer("max_tokens", minimum=1),
        expected=(
            table.string("expected", pattern=r".*\S.*", form="the right answer")
            if scored
            else table.string("expected", pattern=_ID, form=_ID_FORM)
            if grade == CANARY
            else ""
        ),
        grade=table.string("grade", pattern=r".*\S.*", form="the group that it is reported in") if scored else grade,
    )


def _check_documents(tables: tuple[Table, ...], items: tuple[PanelItem, ...], length: int) -> None:
    steps = len(items[0].targets)
    for table, item in zip(tables, items, strict=True):
        if len(item.prompt) != length - 1:
            table.fail("prompt", f"{len(item.prompt)} tokens", f"{length - 1}: one less than the length")
        if len(item.targets) < 2:
            table.fail("targets", f"{len(item.targets)} tokens", "step zero and at least one decode step")
        if len(item.targets) != steps:
            table.fail("targets", f"{len(item.targets)} tokens", f"{steps}, as in items[0]")
    documents = [item.prompt + item.targets for item in items]
    overlap = _overlap(documents)
    if overlap is not None:
        first, second, tokens = overlap
        tables[second].fail(
            "", f"{tokens} tokens in common with the end of '{items[first].id}' at the start of '{items[second].id}'",
            "documents that do not overlap", advice="their losses would be counted twice",
        )  # fmt: skip


def _overlap(documents: list[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """The first pair of which one ends with what the other begins with, and the number of tokens they share.

    Two windows of equal size over one text overlap exactly so. A passage that stands in two places of a text does not
    count: both are text of their own.
    """
    heads: dict[tuple[int, ...], list[int]] = {}
    for index, document in enumerate(documents):
        heads.setdefault(document[:OVERLAP_TOKENS], []).append(index)
    first_tokens = {head[0] for head in heads}
    for index, document in enumerate(documents):
        for offset in range(len(document) - OVERLAP_TOKENS + 1):
            if document[offset] not in first_tokens:
                continue
            for other in heads.get(document[offset : offset + OVERLAP_TOKENS], ()):
                if other != index and documents[other][: len(document) - offset] == document[offset:]:
                    return index, other, len(document) - offset
    return None


def check_fit(path: Path | str, panel: Panel, max_model_len: int, tokens: int) -> None:
    """Refuse a panel of which an item, prompt and generated tokens, is longer than ``max_model_len``.

    Raises:
        StudyError: One is; names it, and the length of ``tokens`` whose limit it is.
    """
    for item in panel.items:
        size = len(item.prompt) + item.max_tokens
        if size > max_model_len:
            raise StudyError(
                f"{path}: found {size} tokens in '{item.id}' (prompt and generated), expected at most {max_model_len}, "
                f"the max_model_len of length {tokens}"
            )


def _check_cuts(study: Study, documents: dict[int, Panel]) -> None:
    for short, panel in documents.items():
        for long, other in documents.items():
            if long <= short:
                continue
            starts = {item.prompt[: short - 1]: item.id for item in other.items}
            for item in panel.items:
                if item.prompt in starts:
                    raise StudyError(
                        f"{study.lengths[short].panels['nll']}: found '{item.id}', the first tokens of "
                        f"'{starts[item.prompt]}' in the panel of length {long}, expected a text of its own",
                        advice="a shorter panel is never a longer one cut off",
                    )


def _count(path: Path, found: int, expected: int, what: str, declared: str) -> None:
    if found != expected:
        raise StudyError(f"{path}: found {found} {what}, expected {expected} (the study's {declared})")


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf
