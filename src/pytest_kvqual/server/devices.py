"""Which devices of the host a run uses: an assignment for each worker of ``-n``, and locks that keep other runs off.

Everything but :func:`hold` and :func:`devices_of_host` is pure: environment and counts in, names out.

The locks are ``flock`` on files that all sessions of a host know, not filelock's: they may be shared (many runs, or one
that times), another user's file is enough to lock, and the engine's processes inherit them. So a device is free when
the last process on it is gone, even where pytest was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pytest_kvqual.errors import RefusedError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
CPUS: Final = "KVQUAL_CPUS"
"""The CPUs of a worker of ``-n`` on a CPU study, as ``0,1``: what stands for a device there."""

LOCKS: Final = "KVQUAL_LOCK_DIR"
"""The folder of the locks, where it is not ``kvqual-locks`` in the folder of temporary files."""

_held: set[int] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU as the driver lists it: its place in the list, its UUID (``GPU-…``), its name."""

    index: int
    uuid: str
    name: str


def devices_of_host() -> tuple[Device, ...]:
    """What the driver lists, whatever ``CUDA_VISIBLE_DEVICES`` says; none where no driver answers."""
    from pytest_kvqual.worker.device import read

    # Not vLLM's copy of the module: this process does not import the engine.
    found = read(modules=("pynvml",))["devices"]
    listed = found if isinstance(found, list) else []
    return tuple(Device(index=int(it["index"]), uuid=str(it["uuid"]), name=str(it["name"])) for it in listed)


def visible(environ: Mapping[str, str], host: Sequence[Device]) -> tuple[str, ...]:
    """The names of the devices that CUDA shows in this environment, as they stand there, in its order.

    Without ``CUDA_VISIBLE_DEVICES`` they are the places 0, 1, … of the driver's list. As in CUDA, an empty list shows
    none, and ``-1`` hides itself and what comes after it.

    Raises:
        RefusedError: A device is named twice: CUDA then shows none.
    """
    text = environ.get(VISIBLE)
    names = [str(device.index) for device in host] if text is None else [name.strip() for name in text.split(",")]
    end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    seen: dict[str, str] = {}
    for name in names[:end]:
        device = lock_name(name, host)
        if device in seen:
            raise RefusedError(
                f"{VISIBLE}={text}: found {name} and {seen[device]}, which are one device, expected each once"
            )
        seen[device] = name
    return tuple(seen.values())


def lock_name(name: str, host: Sequence[Device]) -> str:
    """One name for a device however it is called: its UUID, where the driver lists it; a MIG instance keeps its name.

    A UUID may be cut short, as CUDA allows, where one device alone begins so.
    """
    if name.isdecimal():
        found = [device.uuid for device in host if device.index == int(name)]
    else:
        found = [device.uuid for device in host if name.startswith("GPU-") and device.uuid.startswith(name)]
    return found[0] if len(found) == 1 and found[0] else name


def assign(
    environ: Mapping[str, str],
    *,
    platform: Literal["cpu", "gpu"],
    workers: int,
    each: int,
    host: Sequence[Device] = (),
    cpus: Sequence[int] = (),
) -> tuple[dict[str, str], ...]:
    """What each worker of ``-n`` adds to its environment, the first worker first.

    On a GPU study: ``CUDA_VISIBLE_DEVICES`` with ``each`` names, in the order of the caller's list and spelt as there.
    On a CPU study: ``KVQUAL_CPUS``, an equal share of the CPUs. No two workers share a device.

    Args:
        environ: The caller's environment.
        platform: Of the study.
        workers: How many, at least 1.
        each: How many devices one server takes, at least 1.
        host: What :func:`devices_of_host` returned.
        cpus: The CPUs that this process may run on.

    Raises:
        RefusedError: There are fewer devices than the workers need, or the driver's order is not CUDA's.
    """
    if platform == "cpu":
        names = tuple(str(cpu) for cpu in sorted(cpus))
        where, key, share = "CPUs that this process may run on", CPUS, len(names) // workers
    else:
        names = visible(environ, host)
        listed = environ.get(VISIBLE)
        where = "visible devices" if listed is None else f"devices in {VISIBLE}={listed}"
        key, share = VISIBLE, each
        mixed = len({device.name for device in host}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        if mixed and any(name.isdecimal() for name in names):
            raise RefusedError(
                "found GPUs of different kinds and no CUDA_DEVICE_ORDER=PCI_BUS_ID, expected it: CUDA counts them in "
                "an order of its own",
                advice="set it, or name UUIDs in CUDA_VISIBLE_DEVICES",
            )
    if workers * each > len(names):
        raise RefusedError(
            f"-n {workers}: found {len(names)} {where}, expected at least {workers * each}, {each} for each worker",
            advice=f"give -n {len(names) // each}" if len(names) >= each else "run on a host that has them",
        )
    return tuple({key: ",".join(names[share * place : share * (place + 1)])} for place in range(workers))


def in_use(
    environ: Mapping[str, str], *, platform: Literal["cpu", "gpu"], each: int, host: Sequence[Device] = ()
) -> tuple[str, ...]:
    """The names to lock of the devices that a server in this environment takes.

    A server on a CPU study takes none by itself, and the CPUs of its worker under ``-n``.

    Raises:
        RefusedError: As :func:`visible`.
    """
    if platform == "cpu":
        return tuple(f"cpu-{cpu}" for cpu in environ.get(CPUS, "").split(",") if cpu)
    names = visible(environ, host)[:each]
    if not names and VISIBLE not in environ:
        names = tuple(str(place) for place in range(each))
    return tuple(f"gpu-{lock_name(name, host)}" for name in names)


def recorded(identity: Mapping[str, object]) -> frozenset[str]:
    """The UUIDs of the devices that the ranks of an identity record say they ran on; none where they do not."""
    ranks = identity.get("ranks")
    records = [rank.get("device") for rank in ranks if isinstance(rank, Mapping)] if isinstance(ranks, list) else []
    listed = [record.get("devices") for record in records if isinstance(record, Mapping)]
    devices = [device for found in listed if isinstance(found, list) for device in found if isinstance(device, Mapping)]
    return frozenset(str(device["uuid"]) for device in devices if device.get("uuid"))


def take(assignment: Mapping[str, str]) -> None:
    """Make what :func:`assign` gave to this worker the environment of this process, and of all that it starts."""
    os.environ.update(assignment)
    if cpus := assignment.get(CPUS):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def held() -> tuple[int, ...]:
    """The descriptors of the locks that this process holds: a server's processes are to inherit them."""
    return tuple(sorted(_held))


@contextmanager
def hold(name: str, taken: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock of this host inside the block, and in every process that inherits it.

    Args:
        name: Of the lock; any text.
        taken: What to say where another process holds it: what was found, and what was expected.
        shared: Whether others may hold it too, shared like this.

    Raises:
        RefusedError: It is taken, or the folder of locks cannot be used.
    """
    path = _folder() / ("".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name) + ".lock")
    try:
        descriptor = _opened(path)
    except OSError as error:
        raise RefusedError(
            f"cannot use the lock {path}: {error.strerror or error}", advice=f"name another folder in {LOCKS}"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise RefusedError(f"cannot use the lock {path}: {error.strerror or error}") from error
            raise RefusedError(f"{taken} [{path}]", advice="wait for it") from None
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        # Closed, not unlocked: a process that inherited it, and still runs, goes on holding it.
        os.close(descriptor)


@contextmanager
def beside_others(environ: Mapping[str, str], *, platform: Literal["cpu", "gpu"], each: int) -> Iterator[None]:
    """Inside the block the host is used with others, and the devices of a server in this environment by nobody else.

    Args:
        environ: The server's environment.
        platform: Of the study.
        each: How many devices the server takes, at least 1.

    Raises:
        RefusedError: An arm is timed on this host, or another run has one of the devices.
    """
    host = devices_of_host() if platform == "gpu" else ()
    with ExitStack() as locks:
        locks.enter_context(hold("host", "found a run on this host that times an arm, expected none", shared=True))
        for name in dict.fromkeys(in_use(environ, platform=platform, each=each, host=host)):
            locks.enter_context(hold(name, f"{name}: found another run that uses this device, expected none"))
        yield


def _folder() -> Path:
    named = os.environ.get(LOCKS)
    folder = Path(named) if named else Path(tempfile.gettempdir()) / "kvqual-locks"
    try:
        folder.mkdir(parents=True)
        # Other users' runs lock the same devices.
        folder.chmod(0o1777)
    except OSError:
        # It is there, or opening a file in it says why it cannot be.
        pass
    return folder


def _opened(path: Path) -> int:
    """The file, for reading: that is enough to lock it, also where it is another user's."""
    while True:
        try:
            # A pipe of that name is opened, not waited for.
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            try:
                made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                # Whatever the umask is.
                os.fchmod(made, 0o644)
                os.close(made)
            except FileExistsError:
                continue
