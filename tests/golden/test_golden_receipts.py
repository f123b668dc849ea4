"""The bytes of receipts do not change unnoticed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pytest_kvqual.receipt.statement import parse
from pytest_kvqual.stats.bounds import preservation_upper

HERE = Path(__file__).parent
NAMES = ("pass.json", "fail.json", "refused.json")


def made() -> dict[str, bytes]:
    """What the generator makes now."""
    spec = importlib.util.spec_from_file_location("make_receipts", HERE / "make_receipts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    receipts: dict[str, bytes] = module.receipts()
    return receipts


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes(name: str) -> None:
    """The generator makes exactly the bytes that are stored, and they read back."""
    data = (HERE / "receipts" / name).read_bytes()
    assert made()[name] == data
    assert parse(data, name=name).data == data


def test_the_documented_example_is_the_golden_one() -> None:
    """The example in docs/receipts.md is the golden PASS, byte for byte."""
    text = (HERE.parents[1] / "docs" / "receipts.md").read_text()
    assert (HERE / "receipts" / "pass.json").read_text() in text


def test_every_field_is_documented() -> None:
    """Each field of a predicate has a row in docs/receipts.md."""
    text = (HERE.parents[1] / "docs" / "receipts.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for field in json.loads((HERE / "receipts" / "pass.json").read_text())["predicate"]:
        assert any(f"`{field}`" in row or f"`{field}." in row for row in rows), field


def test_the_documented_bounds_are_computed() -> None:
    """Each row of the table of bounds in docs/statistics.md is what the function gives."""
    text = (HERE.parents[1] / "docs" / "statistics.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) % \|", text, re.MULTILINE)
    assert len(rows) == 5
    for lost, total, percent in rows:
        bound = preservation_upper(int(lost), int(total.replace(",", "")), 0.95)
        assert f"{100 * bound:.3f}" == percent
