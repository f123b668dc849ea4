"""Scored tasks on the real engine: recall and GSM8K captured, judged against a control, and what each capture keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_kvqual.campaign import Campaign
from pytest_kvqual.errors import StudyError
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.study.freeze import freeze
from pytest_kvqual.study.load import load_study, select, studies_folder

pytestmark = pytest.mark.engine

QUESTIONS = 24
ASKED = [
    {"question": f"Ann has {n} apples and buys {n + 1} more. How many apples has she now?",
     "answer": f"She has {n} + {n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} apples.\n#### {2 * n + 1}"}
    for n in range(2, 8)
]  # fmt: skip
SHOTS = [
    {"question": "Tom reads 3 books a week. How many books does he read in 4 weeks?",
     "answer": "He reads 3 * 4 = <<3*4=12>>12 books.\n#### 12"}
]  # fmt: skip
GSM8K = """
[gsm8k]
limit = 0.6
confidence = 0.95
floor = 0.0
max_tokens = 96
stop = ["\\nQuestion:"]
run_on = ["\\nQuestion:"]
reasoning = []
empty_share = 1.0
truncated_share = 1.0
error_share = 0.0
poison_questions = 4
source = { sha256 = "DIGEST", repository = "openai/gsm8k", revision = "REVISION", file = "test.jsonl" }
shots = "shots.json"
"""


def digest(data: bytes) -> str:
    """SHA-256 in lower-case hex."""
    import hashlib

    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded study with two arms, a short recall panel, and a GSM8K of six questions that no other test knows."""
    copy = tmp_path / "studies" / "short"
    shutil.copytree(studies_folder() / "smollm2-cpu", copy)
    (copy / "lock.json").unlink()
    data = "".join(json.dumps(question) + "\n" for question in ASKED).encode()
    (tmp_path / "test.jsonl").write_bytes(data)
    (copy / "shots.json").write_text(json.dumps(SHOTS))
    panel = json.loads((copy / "panels" / "recall.json").read_text())
    panel["items"] = panel["items"][:QUESTIONS]
    (copy / "panels" / "recall.json").write_text(json.dumps(panel))
    text = (copy / "study.toml").read_text()
    for begin, end in (
        ("[arms.reference]", "[arms.candidate]"),
        ("[retrieval]", "[recall]"),
        ("[lengths.8192]", "[oracle]"),
        ("[fidelity]", "# In order."),
        ("[gates.fidelity]", "# Known findings"),
    ):
        text = text[: text.index(begin)] + text[text.index(end) :]
    changes = (
        ("retrieval = 96, recall = 320", f"recall = {QUESTIONS}, gsm8k = {len(ASKED)}"),
        ('[gates.retrieval]\nstate', '[gates.retrieval]\nstate = "planned"\n[gates.gsm8k]\nstate'),
        ("limit = 0.05", "limit = 0.2"),
        ("poison_questions = 16", f"poison_questions = {QUESTIONS}"),
        ("[gates.identity]", f"{GSM8K}\n[gates.identity]"),
        ("DIGEST", digest(data)),
        ("REVISION", "0" * 40),
    )  # fmt: skip
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    (copy / "study.toml").write_text(text)
    return copy


def test_recall_and_gsm8k_are_captured_and_judged(folder: Path, tmp_path: Path) -> None:
    """Both arms answer the same questions; what is kept is enough to score each answer again; the null loses none."""
    study = load_study(str(folder))
    freeze(study)
    selection = select(study, arm="candidate", length=1024, cache_bytes=None)
    run_dir = tmp_path / "run"
    campaign = Campaign(selection, run_dir=run_dir, gsm8k=tmp_path / "test.jsonl")
    campaign.prepare(["gsm8k", "recall"])
    try:
        gsm8k, recall = campaign.verdict("gsm8k"), campaign.verdict("recall")
    finally:
        campaign.close()
    assert recall.null is not None
    assert recall.null.passed, recall.null
    assert recall.faults_caught == recall.faults_seeded == 1, recall.poison
    assert recall.outcome in (Outcome.PASS, Outcome.FAIL), recall.findings
    answers: Any = recall.details["answers"]
    assert answers["native"]["right"] >= 0.6 * QUESTIONS
    assert gsm8k.null is not None
    assert gsm8k.null.passed, gsm8k.findings
    (own,) = (run_dir / "evidence").glob("candidate-*/attempt-1")
    (control,) = (run_dir / "evidence").glob("native-*/attempt-1")
    assert (own / "gsm8k-panel.json").read_bytes() == (control / "gsm8k-panel.json").read_bytes()
    panel = json.loads((own / "gsm8k-panel.json").read_bytes())
    assert [item["expected"] for item in panel["items"]] == ["5", "7", "9", "11", "13", "15"]
    prompts = {item["id"]: item["prompt"] for item in panel["items"]}
    for name in ("gsm8k.jsonl", "gsm8k-again.jsonl"):
        records = [json.loads(line) for line in (control / name).read_text().splitlines()]
        assert {record["id"] for record in records} == set(prompts)
        for record in records:
            body = json.loads(record["body"])
            (choice,) = body["choices"]
            assert choice["prompt_token_ids"] == prompts[record["id"]]
            assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) <= 96
            assert choice["finish_reason"] in ("stop", "length")
            assert "Question:" not in choice["text"]
            # An answer that ended by itself keeps the token that ended it.
            if choice["finish_reason"] == "stop" and choice["stop_reason"] is None:
                assert choice["token_ids"][-1] in (0, 2)
    ids = [
        json.loads(json.loads(line)["body"])["id"]
        for name in ("gsm8k.jsonl", "gsm8k-again.jsonl")
        for line in (control / name).read_text().splitlines()
    ]
    assert len(set(ids)) == len(ids)


def test_another_test_set_is_refused_before_anything_boots(folder: Path, tmp_path: Path) -> None:
    """A file with another digest than the study's is refused with both digests."""
    study = load_study(str(folder))
    freeze(study)
    other = tmp_path / "other.jsonl"
    other.write_bytes((tmp_path / "test.jsonl").read_bytes().replace(b"Ann", b"Eve"))
    selection = select(study, arm="candidate", length=1024, cache_bytes=None)
    campaign = Campaign(selection, run_dir=tmp_path / "run", progress=print, gsm8k=other)
    with pytest.raises(StudyError, match=digest(other.read_bytes())):
        campaign.prepare(["gsm8k"])
    assert not (tmp_path / "run" / "evidence").exists()
