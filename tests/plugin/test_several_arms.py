"""Several arms at once: ``-n N --dist loadgroup --arm A --arm B``, on the fake study."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Runner

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two CPUs")

TWO = ("-p", "xdist", "-n", "2", "--dist", "loadgroup", "--arm", "native", "--arm", "candidate")
GATES = ("identity", "routing", "parity")


def run(gates: Runner, *args: str) -> pytest.RunResult:
    return gates.run("qualification", "-m", "cpu", *args, subprocess=True)


def receipts(gates: Runner, arm: str) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted((gates.run_dir / "receipts").glob("*.json"))]
    return [receipt for receipt in found if receipt["arm"] == arm]


def test_two_arms_at_once(gates: Runner) -> None:
    """Two arms are decided at the same time, each by one worker on CPUs of its own, each gate once and in order."""
    gates.verdicts(meet="native,candidate")
    result = run(gates, *TWO, "--junitxml=out.xml")
    assert result.ret == 0
    result.assert_outcomes(passed=6)
    workers, cpus = set(), set()
    for arm in ("native", "candidate"):
        found = receipts(gates, arm)
        assert [(it["gate"], it["outcome"]) for it in found] == [(name, "PASS") for name in GATES]
        assert len({it["worker"] for it in found}) == len({it["cpus"] for it in found}) == 1
        workers.add(found[0]["worker"])
        cpus |= set(found[0]["cpus"].split(","))
    assert workers == {"gw0", "gw1"}
    assert len(cpus) == 2 * (len(os.sched_getaffinity(0)) // 2)
    result.stdout.fnmatch_lines(
        [
            "*qualification of native at length 1024*",
            "identity *PASS *",
            "parity *PASS *",
            "*qualification of candidate at length 1024*",
            "identity *PASS *",
            "parity *PASS *",
        ]
    )
    text = (gates.pytester.path / "out.xml").read_text()
    for arm in ("native", "candidate"):
        assert f'name="kvqual.{arm}.parity.verdict" value="PASS"' in text
