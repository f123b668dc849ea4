"""A process that was forked ahead takes the place of the first spawned one, against small programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from pytest_kvqual.server.command import PACKAGE_ROOT
from pytest_kvqual.server.launcher import _named

PRELUDE = """
    import json, multiprocessing, os, sys, time
    from pytest_kvqual.server import launcher
    import work

    def say(**values):
        print(json.dumps(values), flush=True)

    if __name__ == "__main__":
        os.environ["BEFORE"] = "1"
        standby = launcher.StandbyPopen.standby = launcher.Standby(("colorsys",))
        multiprocessing.context.SpawnProcess._Popen = staticmethod(launcher.StandbyPopen)
        spawn = multiprocessing.get_context("spawn")
"""

WORK = """
    import json, os, sys, time

    def tell(path, pipe=None):
        if pipe is not None:
            pipe.send("through the pipe")
        found = {
            "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "preloaded": "colorsys" in sys.modules,
            "after": os.environ.get("AFTER"), "before": os.environ.get("BEFORE"),
        }
        with open(path, "w") as file:
            json.dump(found, file)
        sys.exit(7)

    def wait(path):
        open(path, "w").close()
        time.sleep(60)

    def again(path):
        import multiprocessing
        child = multiprocessing.get_context("spawn").Process(target=tell, args=(path,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


def run(folder: Path, body: str) -> list[dict[str, Any]]:
    """Run a program that has a standby; returns what it said."""
    (folder / "work.py").write_text(textwrap.dedent(WORK))
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PRELUDE) + textwrap.indent(textwrap.dedent(body), "    "))
    done = subprocess.run(
        [sys.executable, "-S", str(program), "--flag"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{PACKAGE_ROOT}:{folder}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_first_process_is_the_one_that_waited(tmp_path: Path) -> None:
    """It has the parent's environment and arguments of the moment of its start, and its exit code comes back."""
    (said,) = run(
        tmp_path,
        """
        os.environ["AFTER"] = "2"
        sys.argv.append("late")
        process = spawn.Process(target=work.tell, args=("found.json",), name="Core")
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
        process.start()
        process.join(20)
        say(pid=process.pid, standby=standby.pid, code=process.exitcode, me=os.getpid())
        """,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert said["pid"] == said["standby"] == found["pid"]
    assert said["code"] == 7
    assert found["parent"] == said["me"]
    assert found["argv"][1:] == ["--flag", "late"]
    assert (found["before"], found["after"], found["preloaded"]) == ("1", "2", True)


def test_the_next_process_is_spawned(tmp_path: Path) -> None:
    """A second process is a fresh interpreter, as without a standby."""
    path = tmp_path / "found.json"
    (said,) = run(
        tmp_path,
        f"""
        for _ in range(2):
            process = spawn.Process(target=work.tell, args=({str(path)!r},))
            process.start()
            process.join(20)
        say(code=process.exitcode, same=process.pid == standby.pid)
        """,
    )
    assert said == {"code": 7, "same": False}
    assert json.loads(path.read_text())["preloaded"] is False


def test_a_process_that_needs_descriptors_is_spawned(tmp_path: Path) -> None:
    """A process object with a pipe cannot follow into a running process; it works all the same."""
    (said,) = run(
        tmp_path,
        f"""
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work.tell, args=({str(tmp_path / "found.json")!r}, theirs))
        process.start()
        text = ours.recv()
        process.join(20)
        left = os.path.exists(f"/proc/{{standby.pid}}")
        say(text=text, code=process.exitcode, same=process.pid == standby.pid, left=left)
        """,
    )
    assert said == {"text": "through the pipe", "code": 7, "same": False, "left": False}


def test_the_process_can_be_terminated_and_watched(tmp_path: Path) -> None:
    """terminate(), join() and the sentinel work on it as on a spawned one."""
    (said,) = run(
        tmp_path,
        f"""
        from multiprocessing.connection import wait
        started = {str(tmp_path / "started")!r}
        process = spawn.Process(target=work.wait, args=(started,))
        process.start()
        while not os.path.exists(started):
            time.sleep(0.01)
        early = wait([process.sentinel], 0)
        process.terminate()
        ended = wait([process.sentinel], 10)
        process.join(10)
        say(early=len(early), ended=len(ended), code=process.exitcode)
        """,
    )
    assert said == {"early": 0, "ended": 1, "code": -15}


def test_the_process_spawns_its_own_children_as_usual(tmp_path: Path) -> None:
    """Inside it the start method is the ordinary one again."""
    path = tmp_path / "found.json"
    (said,) = run(
        tmp_path,
        f"""
        process = spawn.Process(target=work.again, args=({str(path)!r},))
        process.start()
        process.join(20)
        say(code=process.exitcode)
        """,
    )
    assert said == {"code": 7}
    assert json.loads(path.read_text())["preloaded"] is False


def test_a_standby_ends_with_its_parent(tmp_path: Path) -> None:
    """When the parent exits before it starts a process, the waiting one reads the end of file and exits."""
    (said,) = run(tmp_path, "say(standby=standby.pid)")
    pid = cast(int, said["standby"])
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            pytest.fail("the standby outlived its parent")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "modules"),
    [
        (["--worker-cls", "a.b.C"], ["a.b"]),
        (["--worker-cls=a.b.C"], ["a.b"]),
        (["--logits-processors", "a.b:C", "--other", "x"], []),
        (["--worker-cls"], []),
        ([], []),
    ],
)
def test_the_workers_module_is_known_from_the_arguments(arguments: list[str], modules: list[str]) -> None:
    """A class named as ``pkg.mod.Class`` after the flag, or after ``=``, gives its module."""
    assert _named(arguments, "--worker-cls") == modules
