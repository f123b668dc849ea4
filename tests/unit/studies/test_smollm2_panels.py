"""The frozen inputs of studies/smollm2-cpu: what they hold, and that nobody changed them."""

from __future__ import annotations

import hashlib
import json
import struct
import tomllib
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).resolve().parents[3] / "studies" / "smollm2-cpu"
PANELS = ("nll-1024", "nll-8192", "oracle-1024", "oracle-8192", "parity")

# Written by `python studies/smollm2-cpu/build.py --model FOLDER`, CPython 3.11.7, tokenizers 0.23.3, torch 2.13.0+cpu.
GOLDEN = {
    "panels/nll-1024.json": "6d66fd730f374e2fa7330d19dd55829e5ab772bd0aee08c7a0a1bc8817aabb08",
    "panels/nll-8192.json": "ff070baa6a01f208aeaec6ba4d4a13070bf209c6930a2012850fad2f8382a96d",
    "panels/oracle-1024.json": "05fc7c9c01b06494031bc17dcdd284728749b88b61d7f6b9ce1bbdeb27d4308c",
    "panels/oracle-8192.json": "1e4f4d8c81a361e8258bf94f8f76dc7d962fb789531c89f73d45c0ed955866ac",
    "panels/parity.json": "5d6063756fa52c84c0d65aa98f009300c65798d9b4ac3722203b660858971712",
    "scales/candidate-v.json": "95f547107e517f0ffc1ca52861c62ca7e4081df77e0bdfa2c28b5d3c9c061a1a",
}

RUN = 64
BLOCK = 128


def study() -> dict[str, Any]:
    return tomllib.loads((STUDY / "study.toml").read_text())


def panel(name: str) -> dict[str, Any]:
    document = json.loads((STUDY / f"panels/{name}.json").read_text())
    assert isinstance(document, dict)
    return document


def whole(item: dict[str, Any]) -> list[int]:
    return [*item["prompt"], *item.get("targets", ())]


@pytest.mark.parametrize(("name", "expected"), GOLDEN.items())
def test_frozen_bytes(name: str, expected: str) -> None:
    """Each frozen input has the bytes that its generator wrote."""
    assert hashlib.sha256((STUDY / name).read_bytes()).hexdigest() == expected


@pytest.mark.parametrize("name", PANELS)
def test_panels_are_for_this_model(name: str) -> None:
    """A panel names the study's tokenizer and its sources, ids are unique, and token ids are in the vocabulary."""
    document = panel(name)
    task, _, length = name.partition("-")
    assert (document["schema"], document["task"]) == (1, task)
    assert document["length"] == (int(length) if length else None)
    assert document["tokenizer_sha256"] == study()["model"]["files"]["tokenizer.json"]
    assert document["sources"]
    ids = [item["id"] for item in document["items"]]
    assert len(set(ids)) == len(ids)
    vocabulary = study()["model"]["vocabulary"]
    tokens = [token for item in document["items"] for token in whole(item)]
    assert all(type(token) is int and 0 <= token < vocabulary for token in tokens)


@pytest.mark.parametrize("length", [1024, 8192])
def test_documents_have_the_declared_shape(length: int) -> None:
    """An NLL panel has 32 documents: length - 1 prompt tokens, then 129 targets of which the first is prefill's."""
    items = panel(f"nll-{length}")["items"]
    rules = study()["nll"]
    assert len(items) == rules["documents"]
    assert {len(item["prompt"]) for item in items} == {length - 1}
    assert {len(item["targets"]) for item in items} == {rules["decode_steps"] + 1}
    assert length + rules["decode_steps"] <= study()["lengths"][str(length)]["max_model_len"]


def test_no_two_items_overlap() -> None:
    """No two items share a run of 64 tokens, within a panel or across panels."""
    owner: dict[bytes, str] = {}
    for name in PANELS:
        for item in panel(name)["items"]:
            label = f"{name}/{item['id']}"
            data = struct.pack(f"<{len(whole(item))}H", *whole(item))
            for start in range(0, len(data) - 2 * RUN + 1, 2):
                assert owner.setdefault(data[start : start + 2 * RUN], label) == label


@pytest.mark.parametrize(("length", "long"), [(1024, 1000), (8192, 8000)])
def test_oracle_requests_are_ragged_around_the_block_size(length: int, long: int) -> None:
    """The oracle's requests lie on each side of block multiples, open blocks while they decode, and end apart."""
    items = panel(f"oracle-{length}")["items"]
    prompts = [len(item["prompt"]) for item in items]
    steps = [item["max_tokens"] for item in items]
    assert prompts == [1, 17, 127, 128, 129, 200, 255, 256, 257, 383, long]
    assert min(steps) == 3
    assert max(steps) == 14
    assert len(set(steps)) >= 8
    # The last token sampled is never written: p prompt tokens and n steps write positions 0 to p + n - 2.
    opens = [any((p + i) % BLOCK == 0 for i in range(n - 1)) for p, n in zip(prompts, steps, strict=True)]
    assert sum(opens) >= 5
    assert study()["engine"]["block_size"] == BLOCK
    assert max(prompts) + max(steps) <= study()["lengths"][str(length)]["max_model_len"]


@pytest.mark.parametrize("length", [1024, 8192])
def test_oracle_requests_differ_from_their_first_token(length: int) -> None:
    """K and V at position 0 depend on the first token alone, so it differs between the requests of a panel."""
    first = [item["prompt"][0] for item in panel(f"oracle-{length}")["items"]]
    assert len(set(first)) == len(first)


def test_oracle_panels_reach_the_studys_minimum() -> None:
    """The oracle panels write enough cells and compute enough rows for the study's minimum of evidence."""
    model, rules = study()["model"], study()["oracle"]
    for length in (1024, 8192):
        items = panel(f"oracle-{length}")["items"]
        rows = sum(len(item["prompt"]) + item["max_tokens"] - 1 for item in items) * model["layers"]
        assert rows >= rules["minimum_rows"]
        assert rows * model["kv_heads"] >= rules["minimum_cells"]


def test_parity_prompts() -> None:
    """The parity panel has 32 different prompts of 20 to 200 tokens and the study's number of answer tokens."""
    items = panel("parity")["items"]
    rules = study()["parity"]
    assert len(items) == rules["prompts"]
    assert len({tuple(item["prompt"]) for item in items}) == len(items)
    assert all(20 <= len(item["prompt"]) <= 200 for item in items)
    assert {item["max_tokens"] for item in items} == {rules["max_tokens"]}


def test_scales() -> None:
    """Each layer has a positive V scale that float32 holds exactly; none is 1 and no two are equal."""
    scales = json.loads((STUDY / "scales/candidate-v.json").read_text())["v_scale"]
    assert len(scales) == study()["model"]["layers"]
    assert all(scale > 0 and struct.unpack("<f", struct.pack("<f", scale))[0] == scale for scale in scales)
    assert len({1.0, *scales}) == len(scales) + 1
