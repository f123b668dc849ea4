"""Start the stock server with one import of the engine instead of two.

``python -m pytest_kvqual.server.launcher vllm.entrypoints.openai.api_server ARGS`` is ``python -m
vllm.entrypoints.openai.api_server ARGS``: it runs that module as the main program with those arguments. What it changes
is when processes start, and nothing after that.

On a CPU the engine's core is a second process, started by the ``spawn`` method of :mod:`multiprocessing`: a fresh
interpreter, which imports torch and vLLM once more while the API server waits. (On CUDA vLLM forks instead, and there
is nothing to gain.) Here the process for the core is forked off as soon as the imports are done, before the main
program runs and before anything starts a thread or an OpenMP pool. It imports what only the core needs while the API
server makes its configuration, and then waits for the process object that ``spawn`` would have sent to a fresh
interpreter. That object, the environment and the arguments are the API server's at that moment; the core's process is
the API server's child, with the same pipes, as under ``spawn``.

A process object that cannot be handed over this way, and every process after the first, is spawned as usual.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing.context
import multiprocessing.process
import os
import pickle
import runpy
import sys
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from typing import Any

# What the API server's main program imports.
SHARED = "vllm.entrypoints.launchers.api_server.entry"
# What only the engine's core needs; some of it changes torch's functions for a process without a GPU.
CORE = ("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor")


class Standby:
    """A forked process that waits to become the first process to be spawned.

    Attributes:
        pid: The waiting process.
        sentinel: Readable once that process has ended.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        # Both processes must talk to one tracker, as parent and child do under every start method.
        resource_tracker.ensure_running()
        self.sentinel, child_end = os.pipe()
        child_source, self.sink = os.pipe()
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.sentinel)
            os.close(self.sink)
            # child_end stays open for as long as this process lives: the parent's sentinel.
            _become(child_source, modules)
        os.close(child_end)
        os.close(child_source)

    def discard(self) -> None:
        """Let the process end: it reads the end of file."""
        os.close(self.sink)
        os.close(self.sentinel)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _become(source: int, modules: tuple[str, ...]) -> None:
    """In the forked process: prepare, wait, run the process object, exit. Never returns."""
    code = 1
    try:
        multiprocessing.context.SpawnProcess._Popen = staticmethod(SpawnPopen)  # type: ignore[method-assign]
        for name in modules:
            importlib.import_module(name)
        gc.enable()
        # As multiprocessing.spawn.spawn_main does: the pipe's other end closes when the parent is gone.
        parent_sentinel = os.dup(source)
        with os.fdopen(source, "rb") as pipe:
            try:
                environment, preparation = pickle.load(pipe)
            except EOFError:
                os._exit(0)
            _adopt(environment)
            current: Any = multiprocessing.process.current_process()
            current._inheriting = True
            try:
                spawn.prepare(preparation)
                process: Any = pickle.load(pipe)
            finally:
                del current._inheriting
        code = process._bootstrap(parent_sentinel)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _adopt(environment: dict[str, str]) -> None:
    """Take over the parent's variables, and act on the one that a fresh interpreter would have read on import."""
    # Only differences: setproctitle finds the memory of the process's title by the first variable.
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    threads = environment.get("OMP_NUM_THREADS", "")
    torch: Any = sys.modules.get("torch")
    if torch is not None and threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))


class StandbyPopen(SpawnPopen):
    """As ``spawn``, with a process that is already there."""

    standby: Standby | None = None
    # The base class's own, unknown to the type stubs: descriptors that a process object needs in the child.
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        standby, StandbyPopen.standby = StandbyPopen.standby, None
        if standby is None:
            super()._launch(process_obj)  # type: ignore[misc]
            return
        preparation = spawn.get_preparation_data(process_obj._name)
        # The main module is imported already, under its own name.
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
        document = io.BytesIO()
        multiprocessing.context.set_spawning_popen(self)
        try:
            pickle.dump((dict(os.environ), preparation), document)
            reduction.dump(process_obj, document)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        if self._fds:
            # Descriptors cannot follow into a process that runs already.
            self._fds.clear()
            standby.discard()
            super()._launch(process_obj)  # type: ignore[misc]
            return
        self.pid = standby.pid
        self.sentinel = standby.sentinel
        self.finalizer = util.Finalize(self, _close, (standby.sentinel, standby.sink))
        with open(standby.sink, "wb", closefd=False) as pipe:
            pipe.write(document.getbuffer())


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _named(arguments: list[str], flag: str) -> list[str]:
    """The modules of the classes that a flag names (``pkg.mod.Class`` or ``pkg.mod:Class``)."""
    found = []
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == flag:
            value = value or (arguments[position + 1] if position + 1 < len(arguments) else "")
            module = value.partition(":")[0] if ":" in value else value.rpartition(".")[0]
            if module:
                found.append(module)
    return found


def main() -> None:
    """Import, fork the core's process, run the named module as the main program."""
    module, *arguments = sys.argv[1:]
    # Imports make objects by the million and no garbage: the collector would walk them over and over, for a fifth of
    # the time.
    gc.disable()
    importlib.import_module(SHARED)
    modules = (*CORE, *_named(arguments, "--worker-cls"), *_named(arguments, "--logits-processors"))
    StandbyPopen.standby = Standby(modules)
    multiprocessing.context.SpawnProcess._Popen = staticmethod(StandbyPopen)  # type: ignore[method-assign]
    gc.enable()
    sys.argv = [module, *arguments]
    # Also sets sys.argv[0], as `python -m` does.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
