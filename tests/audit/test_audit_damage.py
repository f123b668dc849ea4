"""Damaged run directories, one defect each: every one is rejected, under the check that claims the defect.

Where a defect could be hidden by recomputing digests it is: :class:`attacker.Attacker` makes lock, manifests, outcomes
and receipts fit again, so that what objects is the check of the content and not a digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacker import Attacker
from full_run import CANDIDATE, CONTROLS, FAULT, SMALL, FullRun, all_right, build_run

from pytest_kvqual._canonical import digest, pretty_bytes
from pytest_kvqual.audit.auditor import Options, audit
from pytest_kvqual.audit.checks import Finding

FIRST, SECOND = CONTROLS
TRUNCATED, EMPTY = 9, 19
"""Places of gsm8k questions that no control answers right, and the candidate not in full, or not at all."""


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """A run in order, in which every gate passes."""
    outcomes = all_right(SMALL)
    outcomes["gsm8k"][CANDIDATE][TRUNCATED] = "truncated"
    outcomes["gsm8k"][CANDIDATE][EMPTY] = "empty"
    return build_run(tmp_path_factory.mktemp("whole"), outcomes=outcomes)


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """A run in order, whose candidate lost one gsm8k question: the gate says FAIL."""
    outcomes = all_right(SMALL)
    outcomes["gsm8k"][CANDIDATE][0] = "wrong"
    return build_run(tmp_path_factory.mktemp("failing"), outcomes=outcomes)


def findings(run_dir: Path) -> list[Finding]:
    """What the audit objects to."""
    return audit(Options(run_dir=run_dir)).report.findings


def numbers(found: list[Finding]) -> list[int]:
    """The checks that object, each once."""
    return sorted({finding.check for finding in found})


def test_a_run_in_order_is_accepted(whole: FullRun, failing: FullRun) -> None:
    """The runs that the battery damages have no finding, and what the audit derives is what the receipts say."""
    for run in (whole, failing):
        result = audit(Options(run_dir=run.run_dir))
        assert [finding.line() for finding in result.report.findings] == []
        derived = {gate.gate: (gate.derived, gate.derived_figure) for gate in result.gates if gate.how == "re-derived"}
        assert derived == {
            gate: (run.receipts[gate].outcome.value, run.receipts[gate].figure)
            for gate in ("parity", "nll", "retrieval", "gsm8k")
        }
        assert result.passed is result.qualifies is (run is whole)
        assert result.timing.startswith("refused: ")


Damage = Callable[[Attacker], object]


def choice(body: Any) -> Any:
    """The only choice of a body."""
    return body["choices"][0]


def swap_answers(records: list[dict[str, Any]]) -> None:
    """What the first two questions were answered, in each other's place, with the prompts left where they were."""
    bodies = [json.loads(record["body"]) for record in records[:2]]
    one, other = (choice(body) for body in bodies)
    for key in ("text", "token_ids"):
        one[key], other[key] = other[key], one[key]
    for record, body in zip(records[:2], bodies, strict=True):
        count = len(choice(body)["token_ids"])
        body["usage"] |= {"completion_tokens": count, "total_tokens": body["usage"]["prompt_tokens"] + count}
        record["body"] = json.dumps(body)


def swap_bodies(records: list[dict[str, Any]]) -> None:
    records[0]["body"], records[1]["body"] = records[1]["body"], records[0]["body"]


def set_in(path: tuple[Any, ...], value: object) -> Callable[[Any], None]:
    """Set the value at a path; a function maps the old one."""

    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value(document[path[-1]]) if callable(value) else value

    return change


def one_more_target(body: Any) -> None:
    choice(body)["token_ids"][1] += 1


def called_stop(body: Any) -> None:
    choice(body)["finish_reason"] = "stop"


def logprob(value: Callable[[float], float]) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        values = choice(body)["logprobs"]["token_logprobs"]
        values[2] = value(values[2])

    return change


def without_last_step(body: Any) -> None:
    only = choice(body)
    only["token_ids"].pop()
    for values in only["logprobs"].values():
        values.pop()
    body["usage"]["completion_tokens"] -= 1
    body["usage"]["total_tokens"] -= 1


def added(records: list[dict[str, Any]]) -> None:
    records.append({**records[0], "id": "needle-999", "index": len(records)})


def edit_bytes(attack: Attacker) -> None:
    path = attack.attempt(CANDIDATE) / "retrieval.jsonl"
    path.write_bytes(path.read_bytes().replace(b"text_completion", b"text_completioN", 1))


def remove_manifest_line(attack: Attacker) -> None:
    path = attack.attempt(FIRST) / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))


def remove_file(attack: Attacker) -> None:
    (attack.attempt(FIRST) / "gsm8k.jsonl").unlink()


def symlink(attack: Attacker) -> None:
    path = attack.attempt(CANDIDATE) / "nll.jsonl"
    moved = attack.folder.parent / "elsewhere.jsonl"
    path.rename(moved)
    path.symlink_to(moved)


def raw(arm: str, name: str, old: bytes, new: bytes) -> Damage:
    def damage(attack: Attacker) -> None:
        path = attack.attempt(arm) / name
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))
        attack.seal()

    return damage


def records(arm: str, name: str, change: Callable[[list[dict[str, Any]]], object]) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.records(arm, name, change)
        attack.seal()

    return damage


def body(arm: str, name: str, place: int, change: Callable[[Any], object]) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.body(arm, name, place, change)
        attack.seal()

    return damage


def document(arm: str, name: str, change: Callable[[Any], object]) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.document(attack.attempt(arm) / name, change)
        attack.seal()

    return damage


def study(name: str, change: Callable[[Any], object]) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.document(attack.study / name, change)
        attack.seal()

    return damage


def declared(old: str, new: str) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.text(attack.study / "study.toml", old, new)
        attack.seal()

    return damage


def receipt(gate: str, change: Callable[[Any], object]) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.predicate(gate, change)
        attack.seal()

    return damage


def replaced(name: str, arm: str, old: str, new: str) -> Damage:
    def damage(attack: Attacker) -> None:
        attack.text(attack.attempt(arm) / name, old, new)
        attack.seal()

    return damage


def copied(source: str, source_name: str, arm: str, name: str) -> Damage:
    def damage(attack: Attacker) -> None:
        shutil.copyfile(attack.attempt(source) / source_name, attack.attempt(arm) / name)
        attack.seal()

    return damage


def failed_outcome(predicate: Any) -> None:
    predicate["verdict"] |= {"outcome": "FAIL", "findings": ["rule 6: x"], "figure": "rule 6: x"}
    predicate |= {"result": "FAILED", "passedTests": [], "failedTests": [predicate["gate"]["name"]]}


def less_poison(predicate: Any) -> None:
    poison = predicate["poison"]
    poison["faults"].append({"fault": "another", "caught": True, "figure": "x"})
    poison |= {"seeded": poison["seeded"] + 1, "caught": poison["caught"] + 1}


def failed_null(predicate: Any) -> None:
    predicate["null"] = {"state": "failed", "figure": "x"}
    failed_outcome(predicate)
    predicate["verdict"]["outcome"] = "INCONCLUSIVE"


def swap_orders(attack: Attacker) -> None:
    """The receipts of nll and retrieval in each other's place in the order of the gates."""
    one, other = attack.receipt("nll"), attack.receipt("retrieval")
    places = [json.loads(path.read_bytes())["predicate"]["gate"]["order"] for path in (one, other)]
    for path, order in zip((one, other), reversed(places), strict=True):
        attack.document(path, set_in(("predicate", "gate", "order"), order))
        path.rename(path.with_name(f"{order:02d}{path.name[2:]}"))
    attack.seal()


def remove_receipt(attack: Attacker) -> None:
    attack.receipt("parity").unlink()


def not_required(gate: str, of: str) -> Callable[[Any], None]:
    def change(predicate: Any) -> None:
        assert predicate["gate"]["name"] == of
        del predicate["requires"][gate]

    return change


def edited_receipt(attack: Attacker) -> None:
    attack.predicate("nll", set_in(("verdict", "figure"), "better"))


def another_scope(attack: Attacker) -> None:
    attack.predicate("nll", set_in(("scope", "length"), 64))
    attack.seal()


def another_engine(attack: Attacker) -> None:
    def change(statement: Any) -> None:
        statement["predicate"]["scope"]["engine"] = "e" * 64
        statement["subject"][0]["digest"]["sha256"] = "e" * 64

    attack.document(attack.receipt("nll"), change)
    attack.seal()


def study_edited_alone(attack: Attacker) -> None:
    attack.text(attack.study / "study.toml", "margin_nats = 0.01", "margin_nats = 0.02")


def lock_edited_alone(attack: Attacker) -> None:
    attack.document(attack.study / "lock.json", set_in(("weights", "model.safetensors"), "7" * 64))


def another_implementation(attack: Attacker) -> None:
    attack.document(attack.study / "lock.json", set_in(("implementation", "pytest_kvqual/__init__.py"), "7" * 64))
    attack.seal()


def attempt_removed(attack: Attacker) -> None:
    shutil.rmtree(attack.attempt(SECOND))


def attempt_taken_out_of_the_numbers(attack: Attacker) -> None:
    folder = attack.attempt(SECOND)
    attack.document(folder / "attempt.json", set_in(("number",), 2))
    folder.rename(folder.with_name("attempt-2"))
    attack.seal()


def evidence_left_out(predicate: Any) -> None:
    predicate["evidence"] = [entry for entry in predicate["evidence"] if "poison" not in entry["name"]]


def control_left_out(predicate: Any) -> None:
    predicate["evidence"] = [entry for entry in predicate["evidence"] if not entry["name"].startswith(SECOND)]


def evidence_of_another_arm(predicate: Any) -> None:
    for entry in predicate["evidence"]:
        if entry["name"].startswith(CANDIDATE) and entry["name"].endswith("/retrieval.jsonl"):
            entry["name"] = entry["name"].replace(CANDIDATE, "other")
    predicate["evidence"].sort(key=lambda entry: entry["name"])


def other_panel(panel: Any) -> None:
    for item in panel["items"]:
        item["prompt"] = item["prompt"][::-1]


def poison_is_healthy(attack: Attacker) -> None:
    """The capture under a planted fault is the healthy one's beginning, with ids of its own."""
    folder = attack.attempt(CANDIDATE)
    lines = (folder / "retrieval.jsonl").read_bytes().splitlines(keepends=True)[: SMALL.poison_questions]
    path = folder / f"retrieval-poison-{FAULT}.jsonl"
    path.write_bytes(b"".join(line.replace(b"cmpl-", b"cmpl-x") for line in lines))
    attack.seal()


def timing_receipt(attack: Attacker) -> None:
    """A PASS of the timing gate, resting on what is there; the gate before it was never judged."""
    source = json.loads(attack.receipt("gsm8k").read_bytes())
    predicate = source["predicate"]
    predicate["gate"] = {"name": "trial", "order": 14}
    predicate["passedTests"] = ["trial"]
    predicate["requires"]["gsm8k"] = attack.run.receipts["gsm8k"].sha256
    predicate.pop("content")
    predicate["content"] = digest(source)
    attack.receipt("gsm8k").with_name("14-trial-1.json").write_bytes(pretty_bytes(source))


def same_panels(path: tuple[Any, ...], value: object) -> Damage:
    """One change in the gsm8k panel of every arm."""

    def damage(attack: Attacker) -> None:
        for arm in (CANDIDATE, *CONTROLS):
            attack.document(attack.attempt(arm) / "gsm8k-panel.json", set_in(path, value))
        attack.seal()

    return damage


def id_twice(records: list[dict[str, Any]]) -> None:
    first = json.loads(records[0]["body"])["id"]
    body = json.loads(records[1]["body"])
    body["id"] = first
    records[1]["body"] = json.dumps(body)


def http_error_called_answer(records: list[dict[str, Any]]) -> None:
    records[0] |= {"status": 500}


def in_body(old: str, new: str) -> Callable[[list[dict[str, Any]]], None]:
    """Replace a text in the first record's body."""

    def change(records: list[dict[str, Any]]) -> None:
        assert old in records[0]["body"]
        records[0]["body"] = records[0]["body"].replace(old, new, 1)

    return change


def too_many_tokens(body: Any) -> None:
    tokens = choice(body)["token_ids"]
    tokens.extend([20] * (13 - len(tokens)))
    body["usage"] |= {"completion_tokens": 13, "total_tokens": body["usage"]["prompt_tokens"] + 13}


def losses_under_a_fault(attack: Attacker) -> None:
    """The losses under a planted fault are the healthy ones, with ids of their own."""
    folder = attack.attempt(CANDIDATE)
    lines = (folder / "nll.jsonl").read_bytes().splitlines(keepends=True)[: SMALL.poison_documents]
    path = folder / f"nll-poison-{FAULT}.jsonl"
    path.write_bytes(b"".join(line.replace(b"cmpl-", b"cmpl-x") for line in lines))
    attack.seal()


def found_by_an_oracle(oracle: Any) -> None:
    oracle["passes"][0]["records"][0]["routing"] |= {
        "findings": ["slot 5"],
        "findings_total": 1,
        "kinds": {"wrong-cell": 1},
    }


def other_order(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["run"] == "rotated":
            body = json.loads(record["body"])
            choice(body)["token_ids"][0] += 1
            record["body"] = json.dumps(body)


def renumbered(attack: Attacker) -> None:
    path = attack.receipt("gsm8k")
    attack.predicate("gsm8k", set_in(("attempt",), 2))
    path.rename(path.with_name(path.name.replace("-1.json", "-2.json")))
    attack.seal()


def every_worker(setting: str, value: object) -> Damage:
    def damage(attack: Attacker) -> None:
        for arm in (CANDIDATE, *CONTROLS):
            attack.document(attack.attempt(arm) / "identity.json", set_in(("ranks", 0, "settings", setting), value))
        attack.seal()

    return damage


def other_kernels(document: Any) -> None:
    for layer in document["readings"][-1]["ranks"][0]["layers"].values():
        layer["kernels"] = ["sdpa"]


def silent(attack: Attacker) -> None:
    """Neither the server's log nor its worker says what the engine was told."""
    attack.text(attack.attempt(SECOND) / "server.log", "non-default args", "default args")
    attack.document(attack.attempt(SECOND) / "identity.json", lambda found: found["ranks"][0].pop("settings"))
    attack.seal()


BATTERY: dict[str, tuple[int, Damage]] = {
    # 1: form
    "a file behind a symbolic link": (1, symlink),
    "NaN in a record": (1, raw(CANDIDATE, "nll.jsonl", b'"index":0', b'"index":NaN')),
    "a key twice in a record": (1, raw(CANDIDATE, "nll.jsonl", b'"error":null', b'"error":null,"error":null')),
    "a last line without an end": (1, raw(CANDIDATE, "gsm8k.jsonl", b"}\n", b"}")),
    "bytes that are no UTF-8": (1, raw(FIRST, "retrieval.jsonl", b"forward", b"forwar\xff")),
    # 2: manifests
    "a byte of a body": (2, edit_bytes),
    "a line of a manifest removed": (2, remove_manifest_line),
    "a file removed": (2, remove_file),
    "an attempt's number left out": (2, attempt_taken_out_of_the_numbers),
    "a failed attempt behind a PASS": (2, document(CANDIDATE, "outcome.json", set_in(("outcome",), "failed"))),
    # 3: schemas
    "an attempt of an unknown schema": (3, document(CANDIDATE, "attempt.json", set_in(("schema",), 2))),
    "an outcome of an unknown schema": (3, document(FIRST, "outcome.json", set_in(("schema",), 2))),
    "a panel of an unknown schema": (3, study("panels/nll.json", set_in(("schema",), 2))),
    "a lock of an unknown schema": (3, study("lock.json", set_in(("schema",), 2))),
    "an identity of an unknown schema": (3, document(CANDIDATE, "identity.json", set_in(("schema",), 2))),
    "a study of an unknown schema": (3, declared("schema = 1", "schema = 2")),
    # 4: lock and fixtures
    "a threshold of the study": (4, study_edited_alone),
    "the lock": (4, lock_edited_alone),
    "the implementation in the lock": (4, another_implementation),
    "a panel of another length": (4, study("panels/retrieval.json", set_in(("length",), 64))),
    "a panel of another tokenizer": (4, study("panels/nll.json", set_in(("tokenizer_sha256",), "8" * 64))),
    "fewer questions than the panel has": (4, declared("retrieval = 60", "retrieval = 59")),
    "weights in the lock": (4, study("lock.json", set_in(("weights", "model.safetensors"), "7" * 64))),
    "another tokenizer in the lock": (
        4,
        declared(f'"tokenizer.json" = "{"5" * 64}"', f'"tokenizer.json" = "{"8" * 64}"'),
    ),
    # 5: scope
    "a receipt of another length": (5, another_scope),
    "a receipt of another engine": (5, another_engine),
    "an attempt of another pool": (5, document(SECOND, "attempt.json", set_in(("scope", "cache_bytes"), 1 << 30))),
    "another flag in the reference": (
        5,
        replaced("reference-config.json", CANDIDATE, "--dtype=float16", "--dtype=bfloat16"),
    ),
    # 6: receipts
    "a receipt's figure, by hand": (6, edited_receipt),
    "two receipts in each other's order": (6, swap_orders),
    "a receipt removed": (6, remove_receipt),
    "a receipt that rests on one less": (6, receipt("gsm8k", not_required("nll", "gsm8k"))),
    "a receipt of another implementation": (4, receipt("gsm8k", set_in(("implementation", "sha256"), "7" * 64))),
    "a number of a receipt left out": (6, renumbered),
    # 7: evidence
    "an attempt removed": (7, attempt_removed),
    "the poison capture left out of a receipt": (7, receipt("retrieval", evidence_left_out)),
    "evidence of an arm that is not there": (7, receipt("retrieval", evidence_of_another_arm)),
    # 8: teacher registration and prompts
    "a target in an answer": (8, body(CANDIDATE, "nll.jsonl", 1, one_more_target)),
    "a target in the panel": (8, study("panels/nll.json", set_in(("items", 0, "targets", 2), 999))),
    "a prompt in a body": (8, body(FIRST, "retrieval.jsonl", 3, set_in(("choices", 0, "prompt_token_ids", 0), 1))),
    "the bodies of two questions exchanged": (8, records(CANDIDATE, "gsm8k.jsonl", swap_bodies)),
    "another panel": (8, study("panels/retrieval.json", other_panel)),
    # 9: steps
    "a positive log-probability": (9, body(CANDIDATE, "nll.jsonl", 0, logprob(lambda value: 0.5))),
    "a log-probability at the clamp": (9, body(CANDIDATE, "nll.jsonl", 0, logprob(lambda value: -9999.0))),
    "a decode step less": (9, body(CANDIDATE, "nll.jsonl", 0, without_last_step)),
    # 10: parser decisions
    "the answers of two questions exchanged": (10, records(CANDIDATE, "gsm8k.jsonl", swap_answers)),
    "a truncated answer called stop": (10, body(CANDIDATE, "gsm8k.jsonl", TRUNCATED, called_stop)),
    "an expected answer in the panel": (
        10,
        study("panels/retrieval.json", set_in(("items", 1, "expected"), "1234")),
    ),
    "an expected answer in every gsm8k panel": (10, same_panels(("items", 0, "expected"), "12345678")),
    "a status of an answer": (10, records(CANDIDATE, "retrieval.jsonl", http_error_called_answer)),
    # 11: records
    "a record removed": (11, records(CANDIDATE, "retrieval.jsonl", lambda lines: lines.pop(5))),
    "a record twice": (11, records(FIRST, "gsm8k.jsonl", lambda lines: lines.insert(3, lines[2]))),
    "a record too many": (11, records(CANDIDATE, "retrieval.jsonl", added)),
    "serial records in each other's order": (11, records(CANDIDATE, "parity.jsonl", lambda lines: lines.reverse())),
    "NaN in a body": (11, records(CANDIDATE, "nll.jsonl", in_body('"index":0', '"index":NaN'))),
    "a key twice in a body": (11, records(CANDIDATE, "gsm8k.jsonl", in_body('"index":0', '"index":0,"index":0'))),
    "a body cut off": (11, records(FIRST, "gsm8k.jsonl", in_body('"metrics":null}', ""))),
    "a second choice": (11, body(FIRST, "gsm8k.jsonl", 0, lambda document: document["choices"].append({}))),
    "fewer records under a fault": (11, records(CANDIDATE, f"gsm8k-poison-{FAULT}.jsonl", lambda lines: lines.pop())),
    # 12: figures
    "a log-probability": (12, body(CANDIDATE, "nll.jsonl", 0, logprob(lambda value: value / 2))),
    "a log-probability of a control": (12, body(SECOND, "nll.jsonl", 2, logprob(lambda value: value - 1e-9))),
    "a threshold, frozen anew": (12, declared("margin_nats = 0.01", "margin_nats = 0.02")),
    "a limit, frozen anew": (12, declared("limit = 0.05", "limit = 0.06")),
    "an outcome": (12, receipt("nll", failed_outcome)),
    "a figure": (12, receipt("retrieval", set_in(("verdict", "figure"), "lost 0"))),
    "a number of the details": (12, receipt("gsm8k", set_in(("details", "pairs", FIRST, "upper"), 0.01))),
    "a faked mean": (12, receipt("nll", set_in(("details", "delta", FIRST, "mean"), 0.0))),
    "the count of seeded faults": (12, receipt("retrieval", less_poison)),
    "the state of a null": (12, receipt("retrieval", failed_null)),
    "usage that does not fit": (12, body(CANDIDATE, "gsm8k.jsonl", 0, set_in(("usage", "completion_tokens"), 3))),
    "more tokens than were asked for": (12, body(SECOND, "retrieval.jsonl", 0, too_many_tokens)),
    "a finish reason of its own": (
        12,
        body(SECOND, "retrieval.jsonl", 0, set_in(("choices", 0, "finish_reason"), "abort")),
    ),
    "an answer of the null's second capture": (
        12,
        body(FIRST, "gsm8k-again.jsonl", 0, set_in(("choices", 0, "text"), "#### 1")),
    ),
    "a loss of the null's second capture": (12, body(FIRST, "nll-again.jsonl", 0, logprob(lambda value: value - 0.5))),
    "losses under a fault that are healthy": (12, losses_under_a_fault),
    "an answer over HTTP": (12, body(CANDIDATE, "parity.jsonl", 0, set_in(("choices", 0, "token_ids", 0), 5))),
    "findings of an oracle": (12, document(CANDIDATE, "oracle.json", found_by_an_oracle)),
    "a fault that an oracle missed": (
        12,
        document(CANDIDATE, "oracle.json", set_in(("poison", 0, "records", 0, "stale-maps", "kinds"), {})),
    ),
    "answers that follow the order": (12, records(CANDIDATE, "determinism.jsonl", other_order)),
    "a poison capture that is healthy": (12, poison_is_healthy),
    "a token of the reference": (
        12,
        records(CANDIDATE, "reference.jsonl", lambda lines: set_in(("token_ids", 1), 5)(lines[0])),
    ),
    # 13: settings
    "another pool in one arm's server": (13, replaced("server.log", SECOND, f"{48 << 30}", f"{47 << 30}")),
    "another dtype in one arm's server": (
        13,
        replaced("server.log", CANDIDATE, "'dtype': 'float16'", "'dtype': 'bfloat16'"),
    ),
    "another flag in one arm's server": (13, replaced("server.log", FIRST, "'enable_prefix_caching': False, ", "")),
    "another backend in one layer": (
        13,
        document(
            FIRST,
            "identity.json",
            set_in(("ranks", 0, "attention_backend", "model.layers.1.self_attn.attn"), "FLASH_ATTN"),
        ),
    ),
    "another setting in one arm's worker": (
        13,
        document(
            SECOND, "identity.json", set_in(("ranks", 0, "settings", "compilation_config.cudagraph_mode"), "NONE")
        ),
    ),
    "another setting in every arm's worker": (13, every_worker("scheduler_config.max_num_seqs", 16)),
    "a setting that one arm's worker lacks": (
        13,
        document(CANDIDATE, "identity.json", lambda found: found["ranks"][0]["settings"].pop("speculative_config")),
    ),
    "a response of another model": (13, body(CANDIDATE, "gsm8k.jsonl", 4, set_in(("model",), "Qwen3-32B"))),
    "a fault left in after the captures": (
        13,
        document(CANDIDATE, "identity-after.json", set_in(("taps", 0, "faults"), 1)),
    ),
    "weights that changed while captures ran": (
        13,
        document(
            FIRST, "identity-after.json", set_in(("ranks", 0, "parameters", "now", "model.norm.weight"), "d" * 64)
        ),
    ),
    "kernels that changed after a capture": (13, document(CANDIDATE, "dispatch-after.json", other_kernels)),
    "another version in one arm": (
        13,
        document(SECOND, "identity.json", set_in(("ranks", 0, "distributions", 0, "version"), "0.31.0")),
    ),
    "other scales, frozen anew": (13, study("scales.json", set_in(("v_scale", 0), 0.75))),
    "a weight that changed in the worker": (
        12,
        document(FIRST, "identity.json", set_in(("ranks", 0, "parameters", "now", "model.norm.weight"), "d" * 64)),
    ),
    "a scale that changed in the worker": (
        12,
        document(CANDIDATE, "identity.json", set_in(("ranks", 0, "scales", "now", 0, "v", "_v_scale"), [(2.0).hex()])),
    ),
    "nothing that says how a server ran": (13, silent),
    # 14: gsm8k
    "another gsm8k panel in one arm": (14, document(SECOND, "gsm8k-panel.json", set_in(("items", 0, "grade"), "x"))),
    "other worked questions in every arm": (14, same_panels(("sources", 2), f"sha256 {'9' * 64}")),
    "a gsm8k panel of another set in every arm": (14, same_panels(("sources", 1), f"sha256 {'9' * 64}")),
    # 15: controls, null, copies
    "a control's answers copied from another": (15, copied(FIRST, "retrieval.jsonl", SECOND, "retrieval.jsonl")),
    "the candidate's answers copied from a control": (15, copied(FIRST, "gsm8k.jsonl", CANDIDATE, "gsm8k.jsonl")),
    "the candidate's losses copied from a control": (15, copied(SECOND, "nll.jsonl", CANDIDATE, "nll.jsonl")),
    "the null copied from the first capture": (15, copied(FIRST, "gsm8k.jsonl", FIRST, "gsm8k-again.jsonl")),
    "the null of nll copied from the first capture": (15, copied(FIRST, "nll.jsonl", FIRST, "nll-again.jsonl")),
    "a response's id twice": (15, records(CANDIDATE, "gsm8k.jsonl", id_twice)),
    "a control left out of a receipt": (15, receipt("gsm8k", control_left_out)),
    # 16: timing
    "a timing receipt without what it rests on": (16, timing_receipt),
}


@pytest.mark.parametrize("name", BATTERY)
def test_a_damaged_run_is_rejected(name: str, whole: FullRun, tmp_path: Path) -> None:
    """The defect is found by the check that claims it, in one line that names a place."""
    expected, damage = BATTERY[name]
    attack = Attacker.copy(whole, tmp_path / "run")
    damage(attack)
    found = findings(attack.folder)
    assert expected in numbers(found), [f"{finding.check}: {finding.line()}" for finding in found]
    for finding in found:
        assert "\n" not in finding.line()
        assert finding.where


def test_a_failed_gate_made_to_pass_is_rejected(failing: FullRun, tmp_path: Path) -> None:
    """A receipt that says PASS over records that say FAIL is found by the figures that follow from the records."""
    attack = Attacker.copy(failing, tmp_path / "run")

    def passed(predicate: Any) -> None:
        assert predicate["verdict"]["outcome"] == "FAIL"
        predicate["verdict"] |= {"outcome": "PASS", "findings": [], "figure": "lost 0"}
        predicate |= {"result": "PASSED", "passedTests": ["gsm8k"], "failedTests": []}

    attack.predicate("gsm8k", passed)
    attack.seal()
    assert numbers(findings(attack.folder)) == [12]


def test_a_lost_question_edited_away_is_rejected(failing: FullRun, tmp_path: Path) -> None:
    """A wrong answer rewritten into the right one does not fit what the receipt says was lost."""
    attack = Attacker.copy(failing, tmp_path / "run")
    panel = json.loads((attack.attempt(CANDIDATE) / "gsm8k-panel.json").read_bytes())

    def right(body: Any) -> None:
        choice(body)["text"] = f"#### {panel['items'][0]['expected']}"

    attack.body(CANDIDATE, "gsm8k.jsonl", 0, right)
    attack.seal()
    found = numbers(findings(attack.folder))
    assert found
    assert set(found) <= {10, 12}


def test_digests_made_to_fit_leave_no_trace(whole: FullRun, tmp_path: Path) -> None:
    """Sealing an unchanged copy anew changes nothing: what the battery finds is the damage and not the sealing."""
    attack = Attacker.copy(whole, tmp_path / "run")
    attack.seal()
    before = {path.relative_to(whole.run_dir): path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()}
    after = {path.relative_to(attack.folder): path.read_bytes() for path in attack.folder.rglob("*") if path.is_file()}
    assert before == after


def test_a_seed_decides_every_record(whole: FullRun, failing: FullRun, tmp_path: Path) -> None:
    """The same arguments give the same records; another seed gives other answers to the same outcomes."""
    outcomes = all_right(SMALL)
    outcomes["gsm8k"][CANDIDATE][0] = "wrong"
    same, other = (build_run(tmp_path / str(seed), seed=seed, outcomes=outcomes) for seed in (20, 21))
    for name in ("nll.jsonl", "retrieval.jsonl", "gsm8k.jsonl", "gsm8k-panel.json"):
        data = (failing.attempt(CANDIDATE) / name).read_bytes()
        assert (same.attempt(CANDIDATE) / name).read_bytes() == data
        assert (other.attempt(CANDIDATE) / name).read_bytes() != data
    assert same.receipts["gsm8k"].figure == failing.receipts["gsm8k"].figure
    assert whole.lock == failing.lock


def test_a_gate_without_a_receipt_does_not_pass(whole: FullRun, tmp_path: Path) -> None:
    """Nothing rests on the last receipt: taken away, it leaves records in order and a gate that is not established."""
    attack = Attacker.copy(whole, tmp_path / "run")
    attack.receipt("gsm8k").unlink()
    result = audit(Options(run_dir=attack.folder))
    assert not result.passed
    assert "gsm8k: no receipt" in result.verdict()
