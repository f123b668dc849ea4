"""The life of one engine: start it, wait until it answers, look at its sockets, end it.

The engine runs under a supervisor (:mod:`pytest_kvqual.server.supervisor`), which ends the whole process tree when it
is told to, when the engine's first process dies, and when the process that started it is gone, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.errors import ServerError
from pytest_kvqual.progress import BootStage
from pytest_kvqual.server import devices
from pytest_kvqual.server.boot_log import BootLog
from pytest_kvqual.server.command import PACKAGE_ROOT, Command

_HOST = "127.0.0.1"
_POLL_S = 0.05
_SUPERVISOR_S = 10.0
_TAIL_LINES = 6
_TAIL_CHARACTERS = 1200
# What the interpreter or vLLM's logger prints for an exception: "… ERROR 01-31 … [core.py:1] ValueError: text".
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt)): \S")
# What nanobind prints when an interpreter ends, whatever the reason: up to forty lines after the one that counts.
_NOISE = re.compile(r"- leaked |- \.\.\. skipped |nanobind: |See https://nanobind")
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); from pytest_kvqual.server.supervisor import main; sys.exit(main())"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Bounds in seconds: ``boot_s`` until the engine answers, ``stop_s`` from SIGTERM to SIGKILL."""

    boot_s: float
    stop_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Listener:
    """One socket on which a process of the tree can be reached from outside it."""

    address: str
    port: int
    kind: str
    pid: int
    process: str

    @property
    def loopback(self) -> bool:
        """True for an address of 127.0.0.0/8 or ::1, IPv4-mapped ones included."""
        try:
            address = ipaddress.ip_address(self.address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


class ProcessTree:
    """A process and all that it starts, under a supervisor. The base of a server and of a batch run.

    Raises:
        ServerError: The program could not be executed, or the supervisor does not answer.
    """

    def __init__(self, command: Command, *, log: Path, stop_s: float) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            self.log_start = log.stat().st_size
        except OSError as error:
            raise ServerError(f"cannot write the log {log}: {error.strerror or error}") from error
        self.log = log
        self._stop_s = stop_s
        self._lock = threading.Lock()
        self._lines: list[dict[str, object]] = []
        self._buffer = b""
        self._ended: dict[str, object] | None = None
        self._seen: dict[int, float] = {}
        self._stopped = False
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(PACKAGE_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Out of pytest's group: the terminal's Ctrl-C must not race with an orderly stop.
            start_new_session=True,
            # The locks of this run: a device is taken for as long as a process of its server is left.
            pass_fds=devices.held(),
        )
        order = {"argv": list(command.argv), "env": dict(command.env), "log": str(log), "grace_s": stop_s}
        try:
            self._tell(order)
            first = self._hear(_SUPERVISOR_S)
            if first is None or "started" not in first:
                reason = "no answer from its supervisor" if first is None else first.get("refused")
                raise ServerError(
                    f"could not execute {command.argv[0]!r}: {reason}", advice="check the arm's interpreter"
                )
        except BaseException:
            self._supervisor.kill()
            self._supervisor.wait()
            self._close_pipes()
            raise
        self.pid = int(str(first["started"]))

    @property
    def pgid(self) -> int:
        """The process group, and session, that the first process leads."""
        return self.pid

    def processes(self) -> list[psutil.Process]:
        """Every live process of the tree, adopted orphans included."""
        try:
            found: list[psutil.Process] = psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        for process in found:
            try:
                self._seen[process.pid] = process.create_time()
            except psutil.Error:
                continue
        return found

    def exit_status(self) -> int | None:
        """The first process's exit status once it has one (negative: the signal that ended it)."""
        ended = self._poll_end()
        if ended is None:
            return None
        code = ended.get("exit")
        # No word from the supervisor: it was killed, and its end is a SIGKILL of the first process.
        return code if isinstance(code, int) else -signal.SIGKILL

    def alive(self) -> bool:
        """True while the first process runs."""
        return self._poll_end() is None

    def wait(self, timeout_s: float, *, each_s: float = 0.5, on_wait: Callable[[], None] | None = None) -> int:
        """Wait for the first process to exit by itself; ``on_wait`` is called about every ``each_s`` meanwhile.

        Raises:
            ServerError: It did not within ``timeout_s``; the tree has been ended then.
        """
        deadline = monotonic_ns() + int(timeout_s * 1e9)
        while True:
            status = self.exit_status()
            if status is not None:
                return status
            left = (deadline - monotonic_ns()) / 1e9
            if left <= 0:
                self.stop()
                raise ServerError(f"found no end within {timeout_s:g} s, {self.describe_log()}")
            self._hear(min(left, each_s))
            if on_wait is not None:
                on_wait()

    def stop(self) -> None:
        """End the tree: SIGTERM to the first process, after ``stop_s`` SIGKILL to all. Idempotent.

        Raises:
            ServerError: A process of the tree is still there.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self.processes()
            self._tell({"stop": True})
            deadline = monotonic_ns() + int((self._stop_s + _SUPERVISOR_S) * 1e9)
            while self._poll_end() is None and monotonic_ns() < deadline:
                select.select([], [], [], 0.01)
            try:
                self._supervisor.wait(max(0.1, (deadline - monotonic_ns()) / 1e9))
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._close_pipes()
            survivors = self._survivors()
            for process in survivors:
                process.kill()
            if survivors:
                names = ", ".join(f"{process.pid}" for process in survivors)
                raise ServerError(f"found processes {names} of the engine after its end, expected none; killed them")

    def _survivors(self) -> list[psutil.Process]:
        found = []
        for pid, created in self._seen.items():
            try:
                process = psutil.Process(pid)
                # A process id may have been reused since; its creation time tells.
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def describe_log(self) -> str:
        """One line: the exception that started the trouble if the log shows one, the last lines, and the path."""
        return f"log says: {tail(self.log, start=self.log_start)} [{self.log}]"

    def _tell(self, document: dict[str, object]) -> None:
        pipe = self._supervisor.stdin
        if pipe is None:
            return
        try:
            pipe.write(json.dumps(document).encode() + b"\n")
            pipe.flush()
        except (BrokenPipeError, ValueError):
            # It is gone already; what it said last tells why.
            return

    def _hear(self, timeout_s: float) -> dict[str, object] | None:
        """The next line of the supervisor, or None after ``timeout_s`` or at its end."""
        pipe = self._supervisor.stdout
        if pipe is None or pipe.closed:
            return None
        deadline = monotonic_ns() + int(timeout_s * 1e9)
        while b"\n" not in self._buffer:
            left = (deadline - monotonic_ns()) / 1e9
            ready, _, _ = select.select([pipe], [], [], max(0.0, left))
            if not ready:
                return None
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        document: dict[str, object] = json.loads(line)
        if "exit" in document:
            self._ended = document
        return document

    def _poll_end(self) -> dict[str, object] | None:
        # Polled before the line is read: a supervisor found gone has said all that it will.
        gone = self._supervisor.poll() is not None
        if self._ended is None and self._hear(0.0) is None and gone:
            self._ended = {"exit": None, "left": []}
        return self._ended

    def _close_pipes(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Server:
    """One arm's server. A context manager; leaving it ends the process tree.

    Attributes:
        base_url: ``http://127.0.0.1:PORT``.
        log: The file with everything that the tree printed.
        boot_s: Seconds from the start to the first 200 of ``/health``.
    """

    def __init__(self, tree: ProcessTree, *, port: int) -> None:
        self._tree = tree
        self.port = port
        self.base_url = f"http://{_HOST}:{port}"
        self.log = tree.log
        self.boot_s = float("nan")

    @classmethod
    def start(
        cls,
        command: Command,
        *,
        port: int,
        log: Path,
        timeouts: Timeouts,
        progress: Callable[[BootStage, float], None] | None = None,
    ) -> Server:
        """Start ``command``, which must listen on ``port``, and return once it answers.

        Args:
            command: What to execute.
            port: The loopback port that the command was given.
            log: Receives the tree's standard output and error; appended to.
            timeouts: The bounds.
            progress: Called with the stage and the seconds since the start: at the start, about once a second, and
                when the server is ready.

        Raises:
            ServerError: The port is taken, the program did not start, died, or did not answer in time, or another
                process answers on the port. No process is left then.
        """
        if not _port_free(port):
            raise ServerError(f"found port {port} of {_HOST} in use, expected it free", advice="end what listens there")
        begun = monotonic_ns()
        tree = ProcessTree(command, log=log, stop_s=timeouts.stop_s)
        server = cls(tree, port=port)
        try:
            server._await_ready(begun, timeouts.boot_s, progress)
            server.check_loopback()
            if progress is not None:
                progress("ready", server.boot_s)
        except BaseException:
            tree.stop()
            raise
        return server

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The first process."""
        return self._tree.pid

    @property
    def pgid(self) -> int:
        """The process group of the first process."""
        return self._tree.pgid

    @property
    def tree(self) -> ProcessTree:
        """The process tree."""
        return self._tree

    def alive(self) -> bool:
        """True while the first process runs."""
        return self._tree.alive()

    def check(self) -> None:
        """Refuse to go on with a server that is gone.

        Raises:
            ServerError: The first process has ended; with its status and the log's tail.
        """
        status = self._tree.exit_status()
        if status is not None:
            raise ServerError(
                f"found the server ended with {_status(status)}, expected it running; {self._tree.describe_log()}"
            )

    def sockets(self) -> list[Listener]:
        """Every listening TCP socket, and every unconnected UDP socket, of the whole tree; sorted.

        Unix sockets are not reachable from another host and are left out.

        Raises:
            ServerError: The sockets of a live process cannot be read: nothing can then be said about them.
        """
        found: set[Listener] = set()
        for process in self._tree.processes():
            try:
                name = process.name()
                # The stubs do not know that an address may be missing.
                connections: list[Any] = process.net_connections(kind="inet")
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied as error:
                raise ServerError(f"cannot read the sockets of process {process.pid}: {error}") from error
            for connection in connections:
                stream = connection.type == socket.SOCK_STREAM
                if connection.raddr or not connection.laddr or (stream and connection.status != psutil.CONN_LISTEN):
                    continue
                found.add(
                    Listener(
                        address=connection.laddr.ip,
                        port=connection.laddr.port,
                        kind="tcp" if stream else "udp",
                        pid=process.pid,
                        process=name,
                    )
                )
        return sorted(found)

    def check_loopback(self) -> list[Listener]:
        """The sockets, all of them on a loopback address and the server's own among them.

        Raises:
            ServerError: One can be reached from another host, or none listens on the server's port.
        """
        listeners = self.sockets()
        if outside := [listener for listener in listeners if not listener.loopback]:
            listed = ", ".join(f"{it.kind} {it.address}:{it.port} of {it.process} ({it.pid})" for it in outside)
            raise ServerError(
                f"found listening sockets that other hosts can reach: {listed}; expected loopback only",
                advice="--host 127.0.0.1 for the server, VLLM_HOST_IP=127.0.0.1 for the engine's own",
            )
        if not any(listener.port == self.port and listener.kind == "tcp" for listener in listeners):
            raise ServerError(
                f"found no process of the server listening on port {self.port}, another program answers there"
            )
        return listeners

    def stop(self) -> None:
        """End the tree. Idempotent.

        Raises:
            ServerError: A process of the tree is still there.
        """
        self._tree.stop()

    def _await_ready(self, begun: int, boot_s: float, progress: Callable[[BootStage, float], None] | None) -> None:
        deadline = begun + int(boot_s * 1e9)
        last = "no answer"
        told, stages = -1, BootLog(self.log, start=self._tree.log_start)
        while True:
            # The death of the process is asked before the answer: a stranger on the port must not hide it.
            status = self._tree.exit_status()
            if status is not None:
                raise ServerError(
                    f"found the server ended with {_status(status)} while starting, expected it to answer; "
                    f"{self._tree.describe_log()}"
                )
            last = _health(self.base_url) or last
            now = monotonic_ns()
            if last == "200":
                self.boot_s = (now - begun) / 1e9
                return
            if now > deadline:
                raise ServerError(
                    f"found {last} from {self.base_url}/health after {boot_s:g} s, expected 200; "
                    f"{self._tree.describe_log()}"
                )
            if progress is not None and (now - begun) // 1_000_000_000 > told:
                told = (now - begun) // 1_000_000_000
                progress(stages.stage(), (now - begun) / 1e9)
            select.select([], [], [], _POLL_S)


def free_port() -> int:
    """A loopback TCP port that is free now, and that no other run of this host is given while this process lives.

    A server binds it only after its imports. Another program may take it before; starting then fails.
    """
    while True:
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = int(probe.getsockname()[1])
        if _reserved(port):
            return port


def _reserved(port: int) -> bool:
    """Whether this process has now reserved a port among the runs of this host.

    By the name of a socket that has no file: like a port it belongs to the network namespace, and it goes with its
    process.
    """
    if not sys.platform.startswith("linux"):
        return True
    guard = socket.socket(socket.AF_UNIX)
    try:
        guard.bind(f"\0kvqual-port-{port}")
    except OSError:
        guard.close()
        return False
    guard.detach()
    return True


def tail(log: Path, *, start: int = 0) -> str:
    """The first exception in the log and its last lines, in one line of at most some 1,200 characters."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(unreadable: {error})"
    lines = [line for line in map(str.strip, text.splitlines()) if line and not _NOISE.match(line)]
    if not lines:
        return "(nothing)"
    last = lines[-_TAIL_LINES:]
    causes = [line for line in lines if _EXCEPTION.search(line)]
    shown = [line for line in causes[:1] if line not in last] + last
    joined = " | ".join(line[: _TAIL_CHARACTERS // 3] for line in shown)
    return (
        joined
        if len(joined) <= _TAIL_CHARACTERS
        else f"{joined[: _TAIL_CHARACTERS // 2]} … {joined[-_TAIL_CHARACTERS // 2 :]}"
    )


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _port_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _health(base_url: str) -> str:
    """The status of one GET of ``/health`` as text, or the error's name; never waits longer than two seconds."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=2.0) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return str(error.code)
    except (OSError, ValueError) as error:
        return type(getattr(error, "reason", error)).__name__
