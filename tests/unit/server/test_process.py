"""The life of a server's process tree, against small programs in place of the engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pytest_kvqual.errors import ServerError
from pytest_kvqual.server.command import PACKAGE_ROOT, Command
from pytest_kvqual.server.process import Listener, ProcessTree, Server, Timeouts, free_port, tail

FAST = Timeouts(boot_s=15.0, stop_s=1.0)

ANSWERING = """
    import http.server, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(int(sys.argv[2]))
            self.end_headers()
        def log_message(self, *arguments):
            pass
    http.server.HTTPServer((sys.argv[3], int(sys.argv[1])), Handler).serve_forever()
"""

Program = Callable[..., Command]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Turns source text into a command that runs it with the given arguments."""

    def make(source: str, *arguments: object) -> Command:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source))
        return Command(argv=(sys.executable, "-S", str(path), *map(str, arguments)), env={"PATH": os.environ["PATH"]})

    return make


def gone(pid: int) -> bool:
    """True when no process of this id runs (a zombie does not run)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fail unless the condition holds within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"condition not met within {seconds} s")
        time.sleep(0.02)


def test_a_server_that_answers_is_ready_and_leaves_nothing(program: Program, tmp_path: Path) -> None:
    """A started server answers on its port; after the block its process is gone."""
    port = free_port()
    command = program(ANSWERING, port, 200, "127.0.0.1")
    with Server.start(command, port=port, log=tmp_path / "log", timeouts=FAST) as server:
        assert server.alive()
        assert 0 < server.boot_s < 15
        assert [(it.address, it.port) for it in server.sockets()] == [("127.0.0.1", port)]
        pid = server.pid
    assert gone(pid)
    assert not server.alive()
    server.stop()


def test_a_busy_port_is_refused_before_anything_starts(program: Program, tmp_path: Path) -> None:
    """A port in use is named in the error, and no log is made."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 in use"):
            Server.start(program(ANSWERING, port, 200, "127.0.0.1"), port=port, log=tmp_path / "log", timeouts=FAST)
    assert not (tmp_path / "log").exists()


def test_a_server_that_dies_is_told_with_its_first_exception(program: Program, tmp_path: Path) -> None:
    """The error holds the exit status, the first exception of the log, its last line and the path, in one line."""
    source = """
        import sys
        print("(EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1] ValueError: no room for the pool", file=sys.stderr)
        print("\\n".join(f"noise {n}" for n in range(50)), file=sys.stderr)
        sys.exit("RuntimeError: engine failed, see root cause above")
    """
    with pytest.raises(ServerError) as caught:
        Server.start(program(source), port=free_port(), log=tmp_path / "log", timeouts=FAST)
    message = str(caught.value)
    assert "exit status 1" in message
    assert "ValueError: no room for the pool" in message
    assert "see root cause above" in message
    assert str(tmp_path / "log") in message
    assert "\n" not in message
    assert len(message) < 2000


def test_an_old_log_does_not_explain_a_new_failure(program: Program, tmp_path: Path) -> None:
    """Only what this start appended to the log is quoted."""
    (tmp_path / "log").write_text("ValueError: from the attempt before\n")
    with pytest.raises(ServerError) as caught:
        Server.start(program("raise SystemExit(3)"), port=free_port(), log=tmp_path / "log", timeouts=FAST)
    assert "exit status 3" in str(caught.value)
    assert "attempt before" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "found"),
    [("import time; time.sleep(60)", "ConnectionRefusedError"), (ANSWERING, "503")],
    ids=["silent", "answers 503"],
)
def test_a_server_that_is_never_ready_ends_at_the_deadline(
    program: Program, tmp_path: Path, source: str, found: str
) -> None:
    """Readiness has a monotonic deadline, whatever is answered meanwhile, and the process is gone after it."""
    port = free_port()
    begun = time.monotonic()
    with pytest.raises(ServerError, match=rf"found {found} .* after 1 s, expected 200"):
        Server.start(
            program(source, port, 503, "127.0.0.1"),
            port=port,
            log=tmp_path / "log",
            timeouts=Timeouts(boot_s=1.0, stop_s=0.5),
        )
    assert time.monotonic() - begun < 6
    assert free_of(port)


def free_of(port: int) -> bool:
    """True when nobody answers on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_ignores_sigterm_is_killed(program: Program, tmp_path: Path) -> None:
    """After the grace period SIGKILL ends what SIGTERM did not."""
    port = free_port()
    source = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{textwrap.dedent(ANSWERING)}"
    server = Server.start(
        program(source, port, 200, "127.0.0.1"),
        port=port,
        log=tmp_path / "log",
        timeouts=Timeouts(boot_s=15, stop_s=0.3),
    )
    begun = time.monotonic()
    server.stop()
    assert 0.25 < time.monotonic() - begun < 5
    assert gone(server.pid)


def test_a_program_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    """A missing interpreter is named, with what to check."""
    command = Command(argv=(str(tmp_path / "no-python"),), env={})
    with pytest.raises(ServerError, match=r"could not execute .*no-python.*FileNotFoundError") as caught:
        Server.start(command, port=free_port(), log=tmp_path / "log", timeouts=FAST)
    assert "interpreter" in caught.value.advice


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_socket_that_other_hosts_can_reach_is_refused(program: Program, tmp_path: Path, address: str) -> None:
    """A server bound to every address does not start, and the socket is named."""
    port = free_port()
    source = ANSWERING
    if ":" in address:
        if not socket.has_dualstack_ipv6():
            pytest.skip("this host has no IPv6")
        source = f"""
            import http.server, socket
            http.server.HTTPServer.address_family = socket.AF_INET6
            {textwrap.indent(textwrap.dedent(ANSWERING), " " * 12).lstrip()}
        """
    with pytest.raises(ServerError, match=rf"other hosts can reach: tcp {address}:{port}"):
        Server.start(program(source, port, 200, address), port=port, log=tmp_path / "log", timeouts=FAST)


def test_a_socket_of_a_grandchild_is_seen(program: Program, tmp_path: Path) -> None:
    """The sockets of the whole tree count, orphans in a session of their own included."""
    port, other = free_port(), free_port()
    source = f"""
        import os, socket, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                hidden = socket.create_server(("0.0.0.0", {other}))
                time.sleep(60)
            os._exit(0)
        os.wait()
        time.sleep(0.5)
        {textwrap.indent(textwrap.dedent(ANSWERING), " " * 8).lstrip()}
    """
    with pytest.raises(ServerError, match=f"0.0.0.0:{other}"):
        Server.start(program(source, port, 200, "127.0.0.1"), port=port, log=tmp_path / "log", timeouts=FAST)
    assert free_of(other)


def test_another_program_on_the_port_is_not_taken_for_the_server(program: Program, tmp_path: Path) -> None:
    """A 200 from a process outside the tree does not make the server ready."""
    port = free_port()
    late = """
        import time
        time.sleep(60)
    """
    stranger = tmp_path / "stranger.py"
    stranger.write_text(textwrap.dedent(ANSWERING))
    delayed = f"import time, runpy, sys; time.sleep(0.7); runpy.run_path({str(stranger)!r}, run_name='__main__')"
    other = subprocess.Popen([sys.executable, "-S", "-c", delayed, str(port), "200", "127.0.0.1"])
    try:
        with pytest.raises(ServerError, match="another program answers there"):
            Server.start(program(late), port=port, log=tmp_path / "log", timeouts=FAST)
    finally:
        other.kill()
        other.wait()


def test_a_server_that_dies_later_is_noticed(program: Program, tmp_path: Path) -> None:
    """check() names the signal that ended the server, and its other processes are gone with it."""
    port = free_port()
    source = f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
        {textwrap.indent(textwrap.dedent(ANSWERING), " " * 8).lstrip()}
    """
    with Server.start(
        program(source, port, 200, "127.0.0.1"), port=port, log=tmp_path / "log", timeouts=FAST
    ) as server:
        server.check()
        pids = [process.pid for process in server.tree.processes()]
        assert len(pids) == 2
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.alive())
        with pytest.raises(ServerError, match="ended with signal 9"):
            server.check()
        wait_until(lambda: all(gone(pid) for pid in pids))


# Two sessions, one of them orphaned: what a group's id alone would not find.
TREE = "import os, time; os.fork() or (os.setsid(), os.fork()); time.sleep(60)"

STARTER = f"""
    import sys
    from pathlib import Path
    from pytest_kvqual.server.command import Command
    from pytest_kvqual.server.process import ProcessTree
    command = Command(argv=(sys.executable, "-S", "-c", {TREE!r}), env={{}})
    tree = ProcessTree(command, log=Path(sys.argv[1]), stop_s=0.5)
    while len(tree.processes()) < 3:
        pass
    print(*[process.pid for process in tree.processes()], tree._supervisor.pid, flush=True)
    sys.stdin.read()
"""


def test_sigkill_of_the_starter_leaves_no_process(tmp_path: Path) -> None:
    """Children, orphans in sessions of their own and the supervisor end when the starter is killed."""
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        text=True,
    )
    assert starter.stdout is not None
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == 4
    assert not any(gone(pid) for pid in pids)
    starter.kill()
    starter.communicate()
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_sigkill_of_the_supervisor_ends_the_first_process(program: Program, tmp_path: Path) -> None:
    """The first process does not outlive a killed supervisor, and the tree reads as ended."""
    tree = ProcessTree(program("import time; time.sleep(60)"), log=tmp_path / "log", stop_s=0.5)
    os.kill(tree._supervisor.pid, signal.SIGKILL)
    wait_until(lambda: gone(tree.pid))
    wait_until(lambda: not tree.alive())
    assert tree.exit_status() == -signal.SIGKILL
    tree.stop()


def test_a_log_that_cannot_be_written_is_one_clear_error(program: Program, tmp_path: Path) -> None:
    """A log below a file is refused with its path, and nothing starts."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match=r"cannot write the log .*file/log: "):
        ProcessTree(program("raise SystemExit(0)"), log=tmp_path / "file" / "log", stop_s=0.5)


def test_a_batch_program_is_waited_for(program: Program, tmp_path: Path) -> None:
    """wait() gives the exit status, and refuses to wait longer than its limit."""
    tree = ProcessTree(program("raise SystemExit(5)"), log=tmp_path / "log", stop_s=0.5)
    assert tree.wait(10) == 5
    tree.stop()
    slow = ProcessTree(program("import time; time.sleep(60)"), log=tmp_path / "log", stop_s=0.5)
    with pytest.raises(ServerError, match=r"no end within 0.3 s"):
        slow.wait(0.3)
    assert gone(slow.pid)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.2", False),
        ("::ffff:192.0.2.2", False),
        ("fe80::1%eth0", False),
        ("", False),
    ],
)
def test_what_counts_as_loopback(address: str, loopback: bool) -> None:
    """127.0.0.0/8 and ::1 count, mapped addresses by what they map, and nothing else."""
    assert Listener(address=address, port=1, kind="tcp", pid=1, process="x").loopback is loopback


def test_the_tail_is_one_bounded_line(tmp_path: Path) -> None:
    """However long the log's lines are, the quotation is one line of bounded length."""
    log = tmp_path / "log"
    log.write_text("\n".join("x" * 5000 for _ in range(20)))
    assert len(tail(log)) < 1300
    log.write_text("")
    assert tail(log) == "(nothing)"
    assert "unreadable" in tail(tmp_path / "none")
