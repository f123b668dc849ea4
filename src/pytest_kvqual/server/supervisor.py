"""Keep one engine's process tree, and end it when told to or when the process that started it is gone.

Run by an isolated interpreter (``-I -S``) with the standard library and this project's clock only, so that it starts in
milliseconds and depends on nothing that an arm may change. It is a process of its own because only a process that
outlives pytest can clean up after a SIGKILL of pytest.

Protocol, one JSON document a line:

- standard input, first line: ``{"argv": [...], "env": {...}, "log": path, "grace_s": seconds}``; later
  ``{"stop": true}``. End of file, or a changed parent, means that the starter is gone.
- standard output: ``{"started": pid}`` or ``{"refused": reason}``; at the end ``{"exit": code, "left": [pids]}``, the
  code negative for a signal. ``left`` is empty unless a process outlived SIGKILL for five seconds.

How nothing escapes. On Linux the supervisor is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): a process whose
parent died becomes the supervisor's child, so the tree below the supervisor is all that the engine ever started,
whatever sessions or groups it made. At the end each process found there gets SIGKILL until none is left. The first
process also has PR_SET_PDEATHSIG, so that it dies should the supervisor itself be killed. Elsewhere the process group
of the first process stands for the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys

from pytest_kvqual._clock import monotonic_ns

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
REAP_LIMIT_S = 5.0


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


def _prctl(option: int, value: int) -> bool:
    """Call prctl(2) where there is one; False where there is none or it refused."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _say(document: dict[str, object]) -> None:
    """Write one line; a reader that is gone is no reason to stop cleaning up."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(document).encode() + b"\n")


def _tree(root: int) -> list[int]:
    """All processes below ``root``, by ``/proc``; empty where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - pathlib would triple the start-up time
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - as above
                # The second field is the command in parentheses and may hold anything: split after the last one.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.extend(below)
        frontier.extend(below)
    return found


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class _Child:
    """The first process of the tree, and its exit status once it has one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def exited(self) -> bool:
        """True once it has been collected."""
        return self.status is not None

    def reap(self) -> bool:
        """Collect every exited child, adopted ones included; True while any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.status = status


def _spawn(order: dict[str, object]) -> int:
    """Start the engine in a session of its own, its output in the log."""
    argv, env, log = order["argv"], order["env"], order["log"]
    if not isinstance(argv, list) or not isinstance(env, dict) or not isinstance(log, str):
        raise TypeError("argv must be a list, env a mapping, log a path")
    parent = os.getpid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(127)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.execvpe(argv[0], argv, env)
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
                os._exit(127)
        os.close(writer)
        # Both ends close on exec: end of file without a text means that the program runs.
        with os.fdopen(reader, "rb") as pipe:
            refusal = pipe.read()
        if refusal:
            os.waitpid(pid, 0)
            raise OSError(refusal.decode(errors="replace"))
        return pid
    finally:
        os.close(output)


def _end(child: _Child, grace_s: float) -> list[int]:
    """SIGTERM to the first process, then SIGKILL to all that is left; returns who outlived even that."""
    me = os.getpid()
    if not child.exited():
        _kill(child.pid, signal.SIGTERM)
        deadline = monotonic_ns() + int(grace_s * 1e9)
        while child.reap() and not child.exited() and monotonic_ns() < deadline:
            _sleep(0.02)
    deadline = monotonic_ns() + int(REAP_LIMIT_S * 1e9)
    while True:
        _kill_group(child.pid, signal.SIGKILL)
        for pid in _tree(me):
            _kill(pid, signal.SIGKILL)
        if not child.reap():
            return []
        if monotonic_ns() > deadline:
            return _tree(me) or [child.pid]
        _sleep(0.02)


def main() -> int:
    """Run the protocol above; the exit status is 0 when the tree is empty at the end."""
    starter = os.getppid()
    # A terminal's Ctrl-C reaches pytest, which then says what to do here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    buffer = b""
    while b"\n" not in buffer:
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return 0
        buffer += chunk
    line, _, buffer = buffer.partition(b"\n")
    try:
        order = json.loads(line)
        grace_s = float(order["grace_s"])
        child = _Child(_spawn(order))
    except Exception as error:
        _say({"refused": f"{type(error).__name__}: {error}"})
        return 1
    _say({"started": child.pid})
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S)
        child.reap()
        if child.exited():
            break
        if ready:
            # Whatever arrives, a stop or the end of file, ends the tree.
            os.read(0, 1 << 16)
            break
        if os.getppid() != starter:
            break
    left = _end(child, grace_s)
    status = child.status
    code = os.waitstatus_to_exitcode(status) if status is not None else None
    _say({"exit": code, "left": left})
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
