"""Build the panels of a study from texts and a tokenizer. Pure: same texts, tokenizer and recipe, same bytes.

Panels are cut from streams of token ids: those of the shipped studies from two, the topics of CPython's ``pydoc_data``
and the King James text; those of somebody's own model from one text. Each window is taken once, in the order of
:func:`build`; a window that shares a run of :data:`RUN` tokens with an earlier one is moved on until it shares none
(such texts repeat themselves). So no two items overlap within a panel. With one pass over the texts (``Recipe.anew``
false) none overlap across panels either. A recipe that needs more text than there is takes the fillers of retrieval and
the prompts of timing each from the beginning again; the documents of nll, the requests of the oracle and the excerpts
of parity overlap none of each other, and the calibration text of the scales overlaps none of them, under either.

Windows of documents, the needles' places and the lists of names are drawn by SHA-256, not by a generator of a library.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_kvqual.errors import StudyError
from pytest_kvqual.study.model import Study

__all__ = [
    "CPYTHON",
    "KJV",
    "OWN",
    "SHIPPED",
    "Built",
    "Recipe",
    "Source",
    "build",
    "encode_rows",
    "recipe_of",
    "round_up",
    "v_scale",
]

Encode = Callable[[str], Sequence[int]]

#: Tokens: two windows that share a run this long overlap.
RUN: Final = 64
E4M3_MAX: Final = 448.0
#: A V beyond so many times the calibration's largest is clamped.
HEADROOM: Final = 1.5
#: Significant bits of a scale: float32-exact, and coarser than what thread counts change in the largest |V|.
SCALE_BITS: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A text: its name in a recipe, what a panel says of it, and the SHA-256 of the file that it is read from."""

    name: str
    label: str
    sha256: str

    def line(self) -> str:
        """What a panel lists under ``sources``."""
        return f"{self.label} sha256:{self.sha256}" if self.sha256 else self.label


#: The digest is that of the topics module of CPython 3.11.7.
CPYTHON: Final = Source(
    name="cpython",
    label="CPython 3.11.7, Lib/pydoc_data/topics.py (PSF-2.0)",
    sha256="abaa56a64551d8eead1b19cbae3c6db443f99f0cab81df07bed3cb75c0db9346",
)
KJV: Final = Source(
    name="kjv",
    label="Debian bible-kjv-text 4.38, printed by bible-kjv 4.38 as gen1:1-rev22:21 (public domain)",
    sha256="cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d",
)
#: What the panels of the shipped studies are cut from.
SHIPPED: Final = (CPYTHON, KJV)
#: The questions of this module.
OWN: Final = Source(name="own", label="questions of build.py (Apache-2.0)", sha256="")

NAMES: Final = (
    "amber", "anchor", "basin", "beacon", "bridge", "candle", "canyon", "castle", "cedar", "cellar", "cliff", "copper",
    "coral", "crown", "desert", "drum", "eagle", "ember", "engine", "falcon", "feather", "forest", "fountain", "garden",
    "garnet", "glacier", "granite", "hammer", "harbor", "hazel", "island", "ivory", "jacket", "jungle", "kettle",
    "ladder", "lantern", "lemon", "lily", "lion", "magnet", "maple", "marble", "meadow", "mirror", "needle", "ocean",
    "olive", "orchard", "otter", "palace", "pearl", "pepper", "pillar", "planet", "quartz", "rabbit", "river", "saddle",
    "sailor", "silver", "spider", "stone", "summit", "temple", "thunder", "tiger", "timber", "tunnel", "valley",
    "velvet", "violet", "wagon", "walnut", "willow", "window", "winter", "wolf", "yarrow", "zebra",
)  # fmt: skip

QUESTIONS: Final = (
    "What is the capital of Norway, and which language is spoken there?",
    "Write one sentence about the sea in winter.",
    "List three uses of a paper clip.",
    "Explain to a child why the sky is blue.",
    "Translate into French: The train leaves at seven in the morning.",
    "What is 12 + 7? Answer with a number.",
    "Name the planets of the solar system in order from the Sun.",
    "Write a Python function that returns the larger of two numbers.",
    "Give a synonym of each word: quick, bright, silent.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers? Explain your answer.",
    "Summarise in one line: The committee met on Tuesday, and put off the vote until the engineers had reported.",
    "Complete the list: Monday, Tuesday, Wednesday,",
    "Write a two-line poem about a lamp.",
    "How do I boil an egg so that the yolk stays soft?",
    "Convert 3 hours and 20 minutes to minutes, and show each step.",
    "Correct the spelling: The wether was beutiful yesterday, and we went to the libary.",
    "A box holds four red balls and six blue ones. What is the probability that a ball drawn at random is red?",
    "Write the names of the four seasons, one on each line.",
    "What does this program print?\n\nfor i in range(3):\n    print(i * i)\n",
    "Describe the difference between a list and a tuple in Python, and give one short example of each.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is cut out of the texts. Sizes in tokens, by context length where a panel has one.

    Attributes:
        documents: How many documents come from each text, by its name.
        decode_steps: Cached decode steps of a document: it is as many tokens longer than the length.
        oracle: (prompt, tokens to generate) of each request of the oracle panel, and of the one more that is as long
            as the length allows in ``oracle_long``.
        parity_excerpts: The prompts of the parity panel after the :data:`QUESTIONS`, excerpts of so many tokens.
        parity_tokens: Tokens to generate of each.
        retrieval: The size of a prompt, and (other names, depth) of each question in turn.
        recall: The pairs of a list, in turn, and the number of questions; none where the study has no recall.
        answer_tokens: Tokens to generate of a question, by task.
        timing: The size of a prompt, and the number of measured and of warm-up ones.
        timing_tokens: Tokens to generate of each.
        canaries: The parity items that are sent along, by id.
        echo: The excerpts of canaries are repeated, so that what comes next stands in the prompt: no token of an answer
            is near a tie that the other requests of a batch could turn.
        calibration: Windows for the scales: the name of the text and the size of each.
        anew: Retrieval's fillers and timing's prompts begin at the texts' beginnings again.
    """

    documents: Mapping[int, tuple[tuple[str, int], ...]]
    decode_steps: int
    oracle: tuple[tuple[int, int], ...]
    oracle_long: Mapping[int, tuple[int, int]]
    parity_excerpts: tuple[int, ...]
    parity_tokens: int
    retrieval: Mapping[int, tuple[int, tuple[tuple[int, float], ...]]]
    recall: tuple[tuple[int, ...], int]
    answer_tokens: Mapping[str, int]
    timing: Mapping[int, tuple[int, int, int]]
    timing_tokens: int
    canaries: tuple[str, ...]
    echo: bool
    calibration: tuple[tuple[str, int], ...]
    anew: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """One panel: its task, its length (None where it has none) and the bytes of its file."""

    task: str
    length: int | None
    data: bytes


#: Of a study's own recipe: the numbers of other names and the places of the needle, in turn.
OTHERS: Final = (3, 7, 15, 31)
#: The same for the small models that a CPU serves.
FEW_OTHERS: Final = (0, 0, 0, 1)
DEPTHS: Final = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
#: Beside those around the block size, prompts of the oracle panel; and the tokens to generate, in turn.
ORACLE_PROMPTS: Final = (127, 128, 129, 200, 255, 256, 257, 383)
ORACLE_STEPS: Final = (5, 9, 7, 4, 11, 3, 12, 6, 14, 8)
EXCERPTS: Final = (20, 24, 33, 40, 52, 64, 80, 100, 127, 128, 160, 200)
#: Tokens for the scales, and how many of them a window has at most.
CALIBRATION_TOKENS, CALIBRATION_WINDOW = 4096, 1024
PAIRS: Final = (4, 8, 12, 16)
#: From this length on the topics of CPython, some 110,000 tokens, give fewer documents than the King James text.
LONG: Final = 4096


def recipe_of(study: Study, sources: Sequence[Source] = SHIPPED) -> Recipe:
    """The recipe that follows from a study's declaration: sizes and numbers are the study's, the rest is this module's.

    Args:
        study: The study; of a length without an nll or oracle panel none is cut.
        sources: The texts that there are, one or two.

    Raises:
        StudyError: The study asks for fewer parity prompts than there are :data:`QUESTIONS`, or for more canaries at a
            length than parity has excerpts.
    """
    block, parity, documents = study.engine.block_size, study.parity, study.nll.documents
    if parity.prompts < len(QUESTIONS):
        raise StudyError(f"parity.prompts: found {parity.prompts}, expected at least {len(QUESTIONS)}")
    around = {near for size in (block, 2 * block) for near in (size - 1, size, size + 1)}
    prompts = sorted({1, *(tokens for tokens in (*around, *ORACLE_PROMPTS) if tokens > 0)})
    few = {length: documents * 3 // 16 if length >= LONG else documents // 2 for length in study.lengths}
    names = tuple(source.name for source in sources)
    window = min(CALIBRATION_WINDOW, max(study.lengths))
    others = OTHERS if study.platform == "gpu" else FEW_OTHERS
    canaries = max((sum(cell.canaries for cell in rules.cells) for rules in study.timing.values()), default=0)
    if canaries > parity.prompts - len(QUESTIONS):
        raise StudyError(
            f"canaries: found {canaries} in the cells of a length, expected at most {parity.prompts - len(QUESTIONS)}, "
            f"the excerpts of {parity.prompts} parity prompts"
        )
    return Recipe(
        documents={
            length: ((names[0], few[length]), (names[1], documents - few[length]))
            if names[1:]
            else ((names[0], documents),)
            for length in sorted(study.lengths, reverse=True)
            if "nll" in study.lengths[length].panels
        },
        decode_steps=study.nll.decode_steps,
        oracle=tuple((tokens, ORACLE_STEPS[i % len(ORACLE_STEPS)]) for i, tokens in enumerate(prompts)),
        oracle_long={length: (_most(length), 10) for length, it in study.lengths.items() if "oracle" in it.panels},
        parity_excerpts=tuple(EXCERPTS[i % len(EXCERPTS)] for i in range(parity.prompts - len(QUESTIONS))),
        parity_tokens=parity.max_tokens,
        retrieval={
            length.tokens: (
                length.tokens - length.tokens // 32,
                tuple(
                    (others[i % len(others)], DEPTHS[i // len(others) % len(DEPTHS)])
                    for i in range(length.questions["retrieval"])
                ),
            )
            for length in study.lengths.values()
            if "retrieval" in length.questions
        },
        recall=(PAIRS, max((length.questions.get("recall", 0) for length in study.lengths.values()), default=0)),
        answer_tokens={task: rules.max_tokens for task, rules in study.preservation.items()},
        timing={
            length: (_most(length), sum(cell.requests - cell.canaries for cell in rules.cells), rules.warm_up)
            for length, rules in study.timing.items()
        },
        timing_tokens=max((cell.max_tokens for rules in study.timing.values() for cell in rules.cells), default=0),
        canaries=tuple(f"p{len(QUESTIONS) + i:02d}" for i in range(canaries)),
        echo=True,
        calibration=tuple((names[i % len(names)], window) for i in range(-(-CALIBRATION_TOKENS // window))),
        anew=True,
    )


def _most(length: int) -> int:
    """A prompt that is nearly as long as the length: 1,000 tokens of 1,024, 8,000 of 8,192."""
    return length * 125 // 128


class _Stream:
    """Windows of one text's token ids, each taken once.

    Args:
        name: The text's name, for errors.
        ids: The text's token ids.
        seen: Every run of :data:`RUN` ids taken so far; shared by the streams of one pass.
    """

    def __init__(self, name: str, ids: Sequence[int], seen: set[tuple[int, ...]]) -> None:
        self._name = name
        self._ids = ids
        self._seen = seen
        self._at = 0

    def take(self, count: int, *, not_first: Collection[int] = ()) -> list[int]:
        """The next ``count`` ids that share no run with an earlier window and do not begin with ``not_first``.

        Raises:
            StudyError: The text is used up.
        """
        while self._at + count <= len(self._ids):
            window = list(self._ids[self._at : self._at + count])
            runs = [tuple(window[i : i + RUN]) for i in range(max(1, count - RUN + 1))]
            shared = [i for i, run in enumerate(runs) if run in self._seen]
            if not shared and window[0] not in not_first:
                self._seen.update(runs)
                self._at += count
                return window
            self._at += shared[-1] + 1 if shared else 1
        raise StudyError(
            f"the text '{self._name}': found {len(self._ids)} tokens, all of them used, expected a window of {count} "
            "more",
            advice="give a longer text, or ask for fewer documents or questions, or a shorter length",
        )


def build(
    recipe: Recipe,
    texts: Mapping[str, str],
    *,
    encode: Encode,
    chat: Encode,
    tokenizer_sha256: str,
    sources: Sequence[Source] = SHIPPED,
) -> tuple[list[list[int]], Iterator[Built]]:
    """The calibration windows, and every panel. The order of the calls is the order in which windows are taken.

    Args:
        recipe: What is wanted.
        texts: The text of each source, by its name.
        encode: The token ids of a text, without special tokens.
        chat: The token ids of a user's message under the model's chat template, up to where the answer begins.
        tokenizer_sha256: Of the tokenizer's file; it stands in each panel.
        sources: Where the texts are from, one or two. Fillers of retrieval and prompts of timing are cut from the last.

    Raises:
        StudyError: A text is used up (also while the panels are read).
    """
    ids = {name: list(encode(text)) for name, text in texts.items()}

    def streams() -> dict[str, _Stream]:
        seen: set[tuple[int, ...]] = set()
        return {name: _Stream(name, ids[name], seen) for name in texts}

    first = streams()
    calibration = [first[name].take(count) for name, count in recipe.calibration]
    return calibration, _panels(recipe, first, streams, encode, chat, tokenizer_sha256, sources)


def _panels(
    recipe: Recipe,
    first: Mapping[str, _Stream],
    streams: Callable[[], Mapping[str, _Stream]],
    encode: Encode,
    chat: Encode,
    tokenizer_sha256: str,
    texts: Sequence[Source],
) -> Iterator[Built]:
    side, main = texts[0].name, texts[-1].name

    def panel(task: str, length: int | None, rows: Sequence[object], *sources: Source) -> Built:
        head = {
            "schema": 1,
            "task": task,
            "length": length,
            "tokenizer_sha256": tokenizer_sha256,
            "sources": [source.line() for source in sources],
        }
        return Built(task=task, length=length, data=encode_rows(head, "items", rows))

    def again() -> Mapping[str, _Stream]:
        return streams() if recipe.anew else first

    for length, shares in recipe.documents.items():
        # In turn, so that a panel's first documents, on which faults are judged, come from both texts.
        turns = sorted((turn, name) for name, count in shares for turn in range(count))
        documents = [first[name].take(length + recipe.decode_steps) for _, name in turns]
        rows: list[dict[str, object]] = [
            # The first target is forced at prefill, from the logits of the prompt's last token; decode steps follow.
            {"id": f"doc-{i:02d}", "prompt": ids[: length - 1], "targets": ids[length - 1 :]}
            for i, ids in enumerate(documents)
        ]
        yield panel("nll", length, rows, *texts)

    for length, long in recipe.oracle_long.items():
        begun: set[int] = set()
        rows = []
        for i, (tokens, steps) in enumerate((*recipe.oracle, long)):
            # K and V at position 0 depend on the first token alone: it differs between requests, or an output that came
            # from another request's first position could not be told apart.
            short = i < len(recipe.oracle)
            prompt = first[side if short and i % 2 else main].take(tokens, not_first=begun)
            begun.add(prompt[0])
            rows.append({"id": f"r{i:02d}-{tokens}", "prompt": prompt, "max_tokens": steps})
        yield panel("oracle", length, rows, *texts)

    prompts = [list(chat(question)) for question in QUESTIONS]
    for i, tokens in enumerate(recipe.parity_excerpts):
        excerpt = first[main if i % 2 else side].take(tokens)
        echoed = recipe.echo and f"p{len(prompts):02d}" in recipe.canaries
        prompts.append([*excerpt, *excerpt, *excerpt[: tokens // 2]] if echoed else excerpt)
    parity: list[dict[str, object]] = [
        {"id": f"p{i:02d}", "prompt": ids, "max_tokens": recipe.parity_tokens} for i, ids in enumerate(prompts)
    ]
    yield panel("parity", None, parity, *texts, OWN)

    for length, (size, grades) in recipe.retrieval.items():
        filler = again()[main]
        rows = [
            _retrieval_item(i, size, others, depth, filler, encode, recipe.answer_tokens["retrieval"])
            for i, (others, depth) in enumerate(grades)
        ]
        yield panel("retrieval", length, rows, texts[-1], OWN)
    pairs, questions = recipe.recall
    if questions:
        rows = [
            _recall_item(i, pairs[i % len(pairs)], encode, recipe.answer_tokens["recall"]) for i in range(questions)
        ]
        yield panel("recall", None, rows, OWN)

    for length, (size, measured, warm_up) in recipe.timing.items():
        text = again()[main]
        rows = [
            {"id": f"{kind}-{i:02d}", "prompt": text.take(size), "max_tokens": recipe.timing_tokens, "grade": kind}
            for kind, count in (("measured", measured), ("warm-up", warm_up))
            for i in range(count)
        ]
        rows += [
            {**item, "id": f"canary-{item['id']}", "expected": item["id"], "grade": "canary"}
            for item in parity
            if item["id"] in recipe.canaries
        ]
        yield panel("timing", length, rows, *texts, OWN)


def encode_rows(head: Mapping[str, object], key: str, rows: Sequence[object]) -> bytes:
    """One JSON object: ``head``, then ``key`` with one row a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    body = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    return ("{\n" + "\n".join(lines) + f'\n "{key}": [\n{body}\n ]\n}}\n').encode()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _words_of(count: int, *labels: object) -> dict[str, str]:
    """So many names with a word each; no word is a name, nor another's."""
    order = sorted(NAMES, key=lambda name: _sha256(repr((*labels, name))))
    return dict(zip(order[:count], order[count : 2 * count], strict=True))


def _retrieval_item(
    index: int, size: int, others: int, depth: float, stream: _Stream, encode: Encode, answer_tokens: int
) -> dict[str, object]:
    """A prompt of ``size`` tokens in which one sentence gives the secret word that its end asks for."""
    given = _words_of(1 + others, "retrieval", size, index)
    asked, word = next(iter(given.items()))
    needles = [list(encode(f"\n\nThe secret word of the {name} is {each}.\n\n")) for name, each in given.items()]
    tail = encode(f"\n\nThe secret word of the {asked} is")
    said = len(tail) + sum(map(len, needles))
    if said >= size:
        raise StudyError(
            f"retrieval question {index}: found sentences of {said} tokens, with {others} other names, expected fewer "
            f"than {size}, the prompt's size"
        )
    filler = stream.take(size - said)
    shares = [depth, *((place + 0.5) / others for place in range(others))]
    prompt: list[int] = []
    last = 0
    for share, needle in sorted(zip(shares, needles, strict=True)):
        at = round(share * len(filler))
        prompt += [*filler[last:at], *needle]
        last = at
    prompt += [*filler[last:], *tail]
    grade = f"{others} other names, at {depth:g}"
    return {"id": f"s{index:03d}", "prompt": prompt, "max_tokens": answer_tokens, "expected": word, "grade": grade}


def _recall_item(index: int, pairs: int, encode: Encode, answer_tokens: int) -> dict[str, object]:
    """A list of names and words, three lines of it again, and the name whose word comes next."""
    given = _words_of(pairs, "recall", index)
    names = sorted(given, key=lambda name: _sha256(repr(("recall asked", index, name))))
    lines = {name: f"{name}: {word}\n" for name, word in given.items()}
    text = "".join(lines.values()) + "\n" + "".join(lines[name] for name in names[1:4]) + f"{names[0]}:"
    prompt, expected, grade = list(encode(text)), given[names[0]], f"{pairs} names"
    return {"id": f"n{index:03d}", "prompt": prompt, "max_tokens": answer_tokens, "expected": expected, "grade": grade}


def round_up(value: float, bits: int) -> float:
    """The smallest number of ``bits`` significant bits that is at least ``value``."""
    step = 2.0 ** (math.frexp(value)[1] - bits)
    return math.ceil(value / step) * step


def v_scale(largest: Sequence[float]) -> list[float]:
    """The V scale of each layer from its largest |V|: with headroom, over the largest E4M3, rounded up.

    No two layers have the same scale, and none has 1.0: a scale of another layer, or none, could then not be told from
    the right one. A bfloat16 has 128 values in an octave, so two of some forty layers often share their largest |V|;
    the later one's scale is then the next that is free.

    Raises:
        StudyError: A value is not positive and finite.
    """
    scales: list[float] = []
    for layer, value in enumerate(largest):
        if not (0 < value < math.inf):
            raise StudyError(f"layer {layer}: found a largest |V| of {value!r}, expected a positive finite number")
        scale = round_up(value * HEADROOM / E4M3_MAX, SCALE_BITS)
        while scale in (1.0, *scales):
            scale = round_up(math.nextafter(scale, math.inf), SCALE_BITS)
        scales.append(scale)
    return scales
