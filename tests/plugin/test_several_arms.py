"""Several arms at once: ``-n N --dist loadgroup --arm A --arm B``, on the fake study."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

# Before pytester remembers what is imported: what it forgets after a test could not be replaced in the next.
from pytest_kvqual import distributed
from pytest_kvqual.server import devices

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


def test_a_killed_worker(gates: Runner) -> None:
    """The other arm goes on to its end; of the killed one each gate fails by name, and none is decided again."""
    gates.verdicts(**{"meet": "native,candidate", "native routing": "die"})
    result = run(gates, *TWO)
    assert result.ret == 1
    result.assert_outcomes(passed=4, failed=2)
    assert [(it["gate"], it["outcome"]) for it in receipts(gates, "candidate")] == [(name, "PASS") for name in GATES]
    assert [it["gate"] for it in receipts(gates, "native")] == ["identity"]
    result.stdout.fnmatch_lines(
        [
            "*worker 'gw?' crashed while running 'qualification/test_01_routing.py::test_routing[[]native[]]'",
            "native: no verdict: worker gw? ended: *",
            "*qualification of native*",
            "no verdict: worker gw? ended: *",
            "*qualification of candidate at length 1024*",
            "parity *PASS *",
        ]
    )


def test_more_arms_than_workers(gates: Runner) -> None:
    """A worker takes one arm after the other; each answers for a FAIL, a gate left out, and a start refused."""
    gates.verdicts(**{"candidate routing": "FAIL", "prepare other": "refused"})
    arms = [part for name in ("native", "candidate", "other") for part in ("--arm", name)]
    result = run(gates, "-p", "xdist", "-n", "1", "--dist", "loadgroup", *arms, "-k", "not parity")
    assert result.ret == 1
    result.assert_outcomes(passed=3, failed=5)
    assert [(it["gate"], it["outcome"]) for it in receipts(gates, "native")] == [
        ("identity", "PASS"),
        ("routing", "PASS"),
        ("parity", "REFUSED"),
    ]
    assert [it["outcome"] for it in receipts(gates, "candidate")] == ["PASS", "FAIL", "REFUSED"]
    assert receipts(gates, "candidate")[-1]["figure"] == "deselected in this run"
    assert receipts(gates, "other") == []
    text = result.stdout.str()
    for line in (
        "native: parity: REFUSED: deselected in this run",
        "candidate: parity: REFUSED: deselected in this run",
    ):
        assert line in text
    result.stdout.fnmatch_lines(["routing: FAIL: 3 of 10 wrong: cell 0 *"])
    assert text.count("lock.json: found digest aa, expected bb (run kvqual freeze)\n") >= 3


def test_timing_is_not_distributed(gates: Runner) -> None:
    """-n with timing is a usage error of one line, and no worker has started."""
    result = gates.run("qualification", "-m", "cpu and timing", *TWO)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: found -n with timing in -m, expected one process: *"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert not gates.run_dir.exists()


def refusal(gates: Runner, *args: str, workers: int = 2) -> str:
    """What stops a run with these options before a worker starts."""
    config = gates.pytester.parseconfig("-p", "pytest_kvqual.plugin", "-p", "xdist", "qualification", *args)
    with pytest.raises(pytest.UsageError) as refused:
        distributed.Controller.register(config, [f"gw{number}" for number in range(workers)])
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("-m", "cpu and pilot", *TWO), "found -n with pilot in -m, expected one process: "),
        (("-m", "cpu", *TWO, "--arm", "native"), "--arm: found native twice, expected each arm once"),
        (("-m", "cpu", *TWO, "--arm", "nobody"), "--arm: found 'nobody', expected one of native, candidate"),
        (("-m", "cpu", *TWO, "--dist", "load"), "found --dist load with gates, expected --dist loadgroup: "),
        (("-m", "cpu", *TWO, "--max-worker-restart", "2"), "found --max-worker-restart with gates, expected none: "),
        (("-m", "cpu or gpu", *TWO), "-n with --arm: found -m 'cpu or gpu', expected -m cpu or -m gpu"),
        (("-m", "cpu", *TWO, "--lf"), "found --lf with gates, expected none: "),
        (("-m", "gpu", *TWO), "-m gpu: found no GPU, expected one for each worker: "),
    ],
)
def test_refused_before_a_worker_starts(
    gates: Runner, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], line: str
) -> None:
    """What cannot be distributed is a usage error of one line."""
    monkeypatch.setattr(distributed, "gpu_found", lambda: False)
    assert refusal(gates, *args).startswith(line)


def test_more_workers_than_devices(gates: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker too many is a usage error that says how many there may be, on CPUs as on GPUs."""
    assert "CPUs that this process may run on, expected at least 999" in refusal(gates, "-m", "cpu", *TWO, workers=999)
    monkeypatch.setattr(distributed, "gpu_found", lambda: True)
    monkeypatch.setattr(devices, "devices_of_host", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    conftest = gates.pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace('platform="cpu"', 'platform="gpu"', 1))
    assert refusal(gates, "-m", "gpu", *TWO) == (
        "-n 2: found 1 devices in CUDA_VISIBLE_DEVICES=MIG-7, expected at least 2, 1 for each worker (give -n 1)"
    )


def test_an_environment_that_names_devices_is_refused(gates: Runner) -> None:
    """A study that chooses devices itself would put two workers on one."""
    conftest = gates.pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("environment={}", 'environment={"CUDA_VISIBLE_DEVICES": "0"}', 1))
    assert refusal(gates, "-m", "cpu", *TWO).startswith(
        "study fake: found CUDA_VISIBLE_DEVICES in the environment of the engine, expected none: "
    )


def test_several_arms_need_workers(gates: Runner) -> None:
    """Without -n a run has one arm."""
    result = gates.run("qualification", "-m", "cpu", "--arm", "native", "--arm", "candidate")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: found 2 arms in one process, expected one: *-n 2 --dist loadgroup"])
