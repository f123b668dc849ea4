"""Build the panels and the V scales of this study. The same sources give the same bytes.

    python studies/smollm2-cpu/build.py --model FOLDER [--bible FILE] [--only panels|scales]

``FOLDER`` is the model folder that ``kvqual model`` leaves. ``FILE`` is the King James text as Debian's ``bible-kjv``
prints it, one verse a line (``bible -f 'gen1:1-rev22:21' > FILE``); without ``--bible`` that program is run.

Panels are cut from two streams of token ids: the topics of CPython's ``pydoc_data`` and the King James text. Each
window is taken once, in the order of :func:`build_panels`; a window that shares a run of :data:`RUN` tokens with an
earlier one is moved on until it shares none (both texts repeat themselves). So no two items overlap, within a panel or
across panels, and the calibration text of the scales overlaps none of them.

A source whose digest is not the one in :data:`SOURCES` is refused: its panels would be another study.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
Encode = Callable[[str], list[int]]

# Name, licence and SHA-256 of each source. CPython's is the digest of the topics module of 3.11.7.
SOURCES = {
    "cpython": (
        "CPython 3.11.7, Lib/pydoc_data/topics.py (PSF-2.0)",
        "abaa56a64551d8eead1b19cbae3c6db443f99f0cab81df07bed3cb75c0db9346",
    ),
    "kjv": (
        "Debian bible-kjv-text 4.38, printed by bible-kjv 4.38 as gen1:1-rev22:21 (public domain)",
        "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d",
    ),
    "own": ("questions of build.py (Apache-2.0)", ""),
}

# Retrieval: one sentence gives a name's secret word, at such a share of the text; further sentences give the words of
# other names. Grades are (other names, depth). The rest of the text is the King James text.
DEPTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
RETRIEVAL = {  # prompt tokens, and the grades in turn
    1024: (896, tuple((others, depth) for others in (0, 0, 0, 1) for depth in DEPTHS) * 4),
    8192: (7936, tuple((others, depth) for others in (0, 0, 0, 0, 1) for depth in DEPTHS) * 2),
}

# Timing: prompts of so many tokens, each its own text, and which of the parity panel's prompts are sent along. Each arm
# answers those alike one at a time and in waves of 32: their answers do not hang on the batch.
TIMING = {1024: (1000, 32, 6)}  # prompt tokens, measured, warm-up
CANARIES = ("p05", "p20", "p29", "p30")
TIMING_TOKENS = 24

# Recall: a list of so many names with a word each; three of its lines are repeated, then the beginning of a fourth.
RECALL_PAIRS = (4, 8, 12, 16)
RECALL_QUESTIONS = 320
ANSWER_TOKENS = 8
NAMES = (
    "amber", "anchor", "basin", "beacon", "bridge", "candle", "canyon", "castle", "cedar", "cellar", "cliff", "copper",
    "coral", "crown", "desert", "drum", "eagle", "ember", "engine", "falcon", "feather", "forest", "fountain", "garden",
    "garnet", "glacier", "granite", "hammer", "harbor", "hazel", "island", "ivory", "jacket", "jungle", "kettle",
    "ladder", "lantern", "lemon", "lily", "lion", "magnet", "maple", "marble", "meadow", "mirror", "needle", "ocean",
    "olive", "orchard", "otter", "palace", "pearl", "pepper", "pillar", "planet", "quartz", "rabbit", "river", "saddle",
    "sailor", "silver", "spider", "stone", "summit", "temple", "thunder", "tiger", "timber", "tunnel", "valley",
    "velvet", "violet", "wagon", "walnut", "willow", "window", "winter", "wolf", "yarrow", "zebra",
)  # fmt: skip

RUN = 64  # tokens: two windows that share a run this long overlap
DECODE = 128  # cached decode steps of a document
E4M3_MAX = 448.0
HEADROOM = 1.5  # a V beyond 1.5 times the calibration's largest is clamped
SCALE_BITS = 12  # significant bits of a scale: float32-exact, and coarser than what thread counts change in amax
CALIBRATION = (("cpython", 1024), ("kjv", 1024), ("cpython", 1024), ("kjv", 1024))

# Documents per stream, longest first: a long window without a shared run is the harder one to find. 113,108 CPython
# tokens are too few for thirty-two documents of 8,320.
DOCUMENTS = {8192: (("cpython", 6), ("kjv", 26)), 1024: (("cpython", 16), ("kjv", 16))}

# (prompt tokens, max_tokens): one token, and each side of a multiple of the block size 128. 127, 255 and 383 fill a
# block with their first decode step, 128 and 256 open one; finishing steps differ, so that the batch shrinks between.
ORACLE = ((1, 5), (17, 9), (127, 7), (128, 4), (129, 11), (200, 3), (255, 12), (256, 6), (257, 14), (383, 8))
ORACLE_LONG = {1024: (1000, 10), 8192: (8000, 10)}

PARITY_TOKENS = 24
PARITY_EXCERPTS = (20, 24, 33, 40, 52, 64, 80, 100, 127, 128, 160, 200)
QUESTIONS = (
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


def sha256(data: bytes) -> str:
    """SHA-256 in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def checked(name: str, data: bytes) -> bytes:
    """``data`` when it is the declared source; otherwise the program ends with both digests."""
    label, expected = SOURCES[name]
    found = sha256(data)
    if found != expected:
        sys.exit(f"build.py: {label}: found sha256 {found}, expected {expected}")
    return data


def read_topics() -> str:
    """The topics of ``pydoc_data`` in the order of their names."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        sys.exit("build.py: this Python has no pydoc_data.topics")
    checked("cpython", Path(spec.origin).read_bytes())
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_bible(path: Path | None) -> str:
    """The King James text, one verse a line, without the verse numbers."""
    data = (
        path.read_bytes() if path else subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, stdout=-1).stdout
    )
    text = checked("kjv", data).decode("ascii")
    return "\n".join(re.sub(r"^\S+ ", "", line) for line in text.splitlines())


class Stream:
    """Windows of one text's token ids, each taken once.

    Args:
        ids: The text's token ids.
        seen: Every run of :data:`RUN` ids taken so far; shared by all streams.
    """

    def __init__(self, ids: Sequence[int], seen: set[tuple[int, ...]]) -> None:
        self.ids = ids
        self.seen = seen
        self.at = 0

    def take(self, count: int, *, not_first: Collection[int] = ()) -> list[int]:
        """The next ``count`` ids that share no run with an earlier window and do not begin with ``not_first``."""
        while self.at + count <= len(self.ids):
            window = list(self.ids[self.at : self.at + count])
            runs = [tuple(window[i : i + RUN]) for i in range(max(1, count - RUN + 1))]
            shared = [i for i, run in enumerate(runs) if run in self.seen]
            if not shared and window[0] not in not_first:
                self.seen.update(runs)
                self.at += count
                return window
            self.at += shared[-1] + 1 if shared else 1
        raise SystemExit(f"build.py: no window of {count} tokens is left")


def write(path: Path, head: dict[str, object], key: str, rows: Sequence[object]) -> None:
    """One JSON object: ``head``, then ``key`` with one row a line."""
    path.parent.mkdir(exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    body = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text("{\n" + "\n".join(lines) + f'\n "{key}": [\n{body}\n ]\n}}\n', encoding="utf-8")
    print(f"{sha256(path.read_bytes())}  {path.relative_to(HERE)}")


def build_panels(model: Path, streams: dict[str, Stream], encode: Encode) -> None:
    """Write every panel. The order of the calls is the order in which windows are taken."""
    tokenizer = sha256((model / "tokenizer.json").read_bytes())

    def head(task: str, length: int | None, *sources: str) -> dict[str, object]:
        labels = [f"{SOURCES[s][0]} sha256:{SOURCES[s][1]}".removesuffix(" sha256:") for s in sources]
        return {"schema": 1, "task": task, "length": length, "tokenizer_sha256": tokenizer, "sources": labels}

    for length, shares in DOCUMENTS.items():
        # In turn, so that a panel's first documents, on which faults are judged, come from both texts.
        turns = sorted((turn, name) for name, count in shares for turn in range(count))
        documents = [streams[name].take(length + DECODE) for _, name in turns]
        rows: list[dict[str, object]] = [
            # The first target is forced at prefill, from the logits of the prompt's last token; DECODE steps follow.
            {"id": f"doc-{i:02d}", "prompt": ids[: length - 1], "targets": ids[length - 1 :]}
            for i, ids in enumerate(documents)
        ]
        write(HERE / f"panels/nll-{length}.json", head("nll", length, "cpython", "kjv"), "items", rows)

    for length, long in ORACLE_LONG.items():
        first: set[int] = set()
        requests: list[dict[str, object]] = []
        for i, (tokens, steps) in enumerate((*ORACLE, long)):
            # K and V at position 0 depend on the first token alone: it differs between requests, or an output that came
            # from another request's first position could not be told apart.
            stream = streams["cpython" if i % 2 else "kjv"]
            prompt = stream.take(tokens, not_first=first)
            first.add(prompt[0])
            requests.append({"id": f"r{i:02d}-{tokens}", "prompt": prompt, "max_tokens": steps})
        write(HERE / f"panels/oracle-{length}.json", head("oracle", length, "cpython", "kjv"), "items", requests)

    from transformers import AutoTokenizer

    chat = AutoTokenizer.from_pretrained(str(model))
    prompts = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        prompts.append(encode(chat.apply_chat_template(message, add_generation_prompt=True, tokenize=False)))
    for i, tokens in enumerate(PARITY_EXCERPTS):
        prompts.append(streams["kjv" if i % 2 else "cpython"].take(tokens))
    parity = [{"id": f"p{i:02d}", "prompt": ids, "max_tokens": PARITY_TOKENS} for i, ids in enumerate(prompts)]
    write(HERE / "panels/parity.json", head("parity", None, "cpython", "kjv", "own"), "items", parity)

    for length, (size, grades) in RETRIEVAL.items():
        rows = [
            retrieval_item(i, size, others, depth, streams["kjv"], encode) for i, (others, depth) in enumerate(grades)
        ]
        write(HERE / f"panels/retrieval-{length}.json", head("retrieval", length, "kjv", "own"), "items", rows)
    rows = [recall_item(i, RECALL_PAIRS[i % len(RECALL_PAIRS)], encode) for i in range(RECALL_QUESTIONS)]
    write(HERE / "panels/recall.json", head("recall", None, "own"), "items", rows)

    for length, (size, measured, warm_up) in TIMING.items():
        rows = [
            {"id": f"{kind}-{i:02d}", "prompt": streams["kjv"].take(size), "max_tokens": TIMING_TOKENS, "grade": kind}
            for kind, count in (("measured", measured), ("warm-up", warm_up))
            for i in range(count)
        ]
        rows += [
            {**item, "id": f"canary-{item['id']}", "expected": item["id"], "grade": "canary"}
            for item in parity
            if item["id"] in CANARIES
        ]
        write(HERE / f"panels/timing-{length}.json", head("timing", length, "cpython", "kjv", "own"), "items", rows)


def words_of(count: int, *labels: object) -> dict[str, str]:
    """So many names with a word each; no word is a name, nor another's."""
    order = sorted(NAMES, key=lambda name: sha256(repr((*labels, name)).encode()))
    return dict(zip(order[:count], order[count : 2 * count], strict=True))


def retrieval_item(
    index: int, size: int, others: int, depth: float, stream: Stream, encode: Encode
) -> dict[str, object]:
    """A prompt of ``size`` tokens in which one sentence gives the secret word that its end asks for."""
    given = words_of(1 + others, "retrieval", size, index)
    asked, word = next(iter(given.items()))
    needles = [encode(f"\n\nThe secret word of the {name} is {each}.\n\n") for name, each in given.items()]
    tail = encode(f"\n\nThe secret word of the {asked} is")
    filler = stream.take(size - len(tail) - sum(map(len, needles)))
    shares = [depth, *((place + 0.5) / others for place in range(others))]
    prompt, last = [], 0
    for share, needle in sorted(zip(shares, needles, strict=True)):
        at = round(share * len(filler))
        prompt += [*filler[last:at], *needle]
        last = at
    prompt += [*filler[last:], *tail]
    grade = f"{others} other names, at {depth:g}"
    return {"id": f"s{index:03d}", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "expected": word, "grade": grade}


def recall_item(index: int, pairs: int, encode: Encode) -> dict[str, object]:
    """A list of names and words, three lines of it again, and the name whose word comes next."""
    given = words_of(pairs, "recall", index)
    names = sorted(given, key=lambda name: sha256(repr(("recall asked", index, name)).encode()))
    lines = {name: f"{name}: {word}\n" for name, word in given.items()}
    text = "".join(lines.values()) + "\n" + "".join(lines[name] for name in names[1:4]) + f"{names[0]}:"
    prompt, expected, grade = encode(text), given[names[0]], f"{pairs} names"
    return {"id": f"n{index:03d}", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "expected": expected, "grade": grade}


def round_up(value: float, bits: int) -> float:
    """The smallest number of ``bits`` significant bits that is at least ``value``."""
    step = 2.0 ** (math.frexp(value)[1] - bits)
    return math.ceil(value / step) * step


def build_scales(model: Path, windows: Sequence[Sequence[int]]) -> None:
    """Write the candidate's V scales: per layer, amax of |V| over ``windows``, times headroom, over 448.

    V is what ``v_proj`` returns, in float32 arithmetic on the model's bfloat16 weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    layers = network.model.layers
    amax = [0.0] * len(layers)

    def watch(index: int) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: torch.Tensor) -> None:
            amax[index] = max(amax[index], float(output.abs().max()))

        return hook

    for index, layer in enumerate(layers):
        layer.self_attn.v_proj.register_forward_hook(watch(index))
    with torch.inference_mode():
        for window in windows:
            network.model(torch.tensor([list(window)]))
    scales = [round_up(value * HEADROOM / E4M3_MAX, SCALE_BITS) for value in amax]
    if len({1.0, *scales}) != len(scales) + 1:
        raise SystemExit(f"build.py: scales must differ from 1.0 and from each other, found {scales}")
    write(HERE / "scales/candidate-v.json", {"schema": 1}, "v_scale", scales)


def main() -> None:
    """Read the sources, then write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model folder")
    parser.add_argument("--bible", type=Path, help="the King James text; default: run `bible`")
    parser.add_argument("--only", choices=("panels", "scales"), help="write only these")
    options = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    seen: set[tuple[int, ...]] = set()
    texts = {"cpython": read_topics(), "kjv": read_bible(options.bible)}
    streams = {name: Stream(encode(text), seen) for name, text in texts.items()}
    calibration = [streams[name].take(count) for name, count in CALIBRATION]
    if options.only != "scales":
        build_panels(options.model, streams, encode)
    if options.only != "panels":
        build_scales(options.model, calibration)


if __name__ == "__main__":
    main()
