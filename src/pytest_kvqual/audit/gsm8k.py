"""The GSM8K panel and the test set that it is made of (check 14).

The panel holds token ids, which nobody can read back without the tokenizer: of a question itself the file says only
where it stands. Its expected answer and its number are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pytest_kvqual.audit import answers
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, parse, sha256
from pytest_kvqual.audit.frozen import GSM8K
from pytest_kvqual.audit.receipts import Receipt
from pytest_kvqual.audit.rederive import GSM8K_PANEL, Records
from pytest_kvqual.audit.shapes import items, shown, table, text

MARK: Final = "####"
_DIGEST: Final = re.compile(r"\b[0-9a-f]{64}\b")


def check(records: Records, newest: Mapping[str, Receipt], data_set: Path | None, report: Report) -> None:
    """One panel in all arms, made of the set that the study names; with ``data_set`` also of what is in that file."""
    receipt = newest.get(GSM8K)
    if receipt is None or receipt.outcome == "REFUSED":
        if data_set is not None:
            report.find(
                14, "--gsm8k", "found no gsm8k receipt that measured something, expected one to hold it against"
            )
        return
    panels: dict[str, str] = {}
    for name, digest in receipt.evidence.items():
        if name.endswith(f"/{GSM8K_PANEL}"):
            panels[name.removesuffix(f"/{GSM8K_PANEL}")] = digest
    report.look(14, len(panels))
    if not panels and receipt.outcome == "PASS":
        raise DamagedError(f"{receipt.name}: found no {GSM8K_PANEL} among the evidence, expected one of each arm")
    first = next(iter(panels.items()), None)
    for name, digest in panels.items():
        if first is not None and digest != first[1]:
            report.find(
                14, f"evidence/{name}/{GSM8K_PANEL}", f"found sha256 {digest}, expected {first[1]}, that of "
                f"{first[0]}: the arms were asked different questions",
            )  # fmt: skip
    if first is None or first[0] not in records.attempts:
        return
    where = f"evidence/{first[0]}/{GSM8K_PANEL}"
    panel = table(records.attempts[first[0]].kept.get(GSM8K_PANEL), "panel")
    expected = records.frozen.part(GSM8K, "source").get("sha256")
    said = [word for source in items(panel, "sources", "panel") for word in _DIGEST.findall(str(source))]
    if not said:
        report.note(f"{where}: says no digest of its test set")
    else:
        if expected not in said:
            report.find(14, where, f"sources: found the digest {said[0]}, expected {shown(expected)}, the study's")
        shots = table(records.frozen.lock["files"], "lock.files").get(str(records.frozen.part(GSM8K).get("shots")))
        if shots not in said:
            report.find(
                14, where, f"sources: found no digest {shown(shots)}, expected that of the study's worked questions"
            )
    if data_set is not None:
        _against(panel, data_set, expected, where, report)


def _against(panel: Mapping[str, object], data_set: Path, expected: object, where: str, report: Report) -> None:
    data = data_set.read_bytes()
    if sha256(data) != expected:
        raise DamagedError(f"--gsm8k: found sha256 {sha256(data)}, expected {shown(expected)}, the study's")
    lines = [line for line in data.split(b"\n") if line.strip()]
    asked = items(panel, "items", "panel")
    if len(asked) > len(lines):
        report.find(14, where, f"items: found {len(asked)}, expected at most {len(lines)}, the questions of the set")
    if len(asked) < len(lines):
        report.note(f"{where}: the first {len(asked)} of the set's {len(lines)} questions")
    for place, (value, line) in enumerate(zip(asked, lines, strict=False)):
        item, problem = table(value, f"items[{place}]"), table(parse(line), f"line {place + 1}")
        text(problem, "question", f"line {place + 1}")
        _, mark, rest = text(problem, "answer", f"line {place + 1}").rpartition(MARK)
        wanted = answers.number(rest.strip().replace(",", "")) if mark else None
        found = answers.number(text(item, "expected", f"items[{place}]"))
        report.look(14)
        if wanted is None or found != wanted:
            report.find(
                14, where, f"items[{place}].expected: found {shown(item['expected'])}, expected {rest.strip()[:40]!r}, "
                "as the test set says",
            )  # fmt: skip
