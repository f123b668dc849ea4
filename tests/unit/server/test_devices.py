"""Which worker gets which devices, and who may lock them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.errors import RefusedError
from pytest_kvqual.server import devices
from pytest_kvqual.server.command import Command
from pytest_kvqual.server.devices import CPUS, VISIBLE, Device, assign, hold, in_use, lock_name, visible
from pytest_kvqual.server.process import ProcessTree

HOST = tuple(Device(index=index, uuid=f"GPU-{index}f3a-{index}0", name="H200") for index in range(4))
MIG = "MIG-GPU-0f3a-00/3/0"


def spelled(chosen: list[int], short: bool) -> list[str]:
    """Places as places and UUIDs in turn, UUIDs whole or cut short."""
    return [
        str(it) if place % 2 else HOST[it].uuid[: 6 if short else None] for place, it in enumerate(chosen)
    ]  # fmt: skip


@given(
    chosen=st.lists(st.integers(0, 3), unique=True, min_size=1),
    workers=st.integers(1, 5),
    each=st.integers(1, 3),
    short=st.booleans(),
)
def test_no_device_goes_to_two_workers(chosen: list[int], workers: int, each: int, short: bool) -> None:
    """Worker k gets devices k·each … of the caller's list as spelt there, none shared; too few of them is a refusal."""
    names = spelled(chosen, short)
    environ = {VISIBLE: ",".join(names)}
    if workers * each > len(names):
        with pytest.raises(RefusedError, match=rf"^-n {workers}: found {len(names)} devices in {VISIBLE}=") as refusal:
            assign(environ, platform="gpu", workers=workers, each=each, host=HOST)
        assert "\n" not in refusal.value.line()
        return
    given_out = assign(environ, platform="gpu", workers=workers, each=each, host=HOST)
    flat = [name for one in given_out for name in one[VISIBLE].split(",")]
    assert flat == names[: workers * each]
    locks = [name for one in given_out for name in in_use(one, platform="gpu", each=each, host=HOST)]
    assert len(set(locks)) == workers * each
    assert locks == [f"gpu-{HOST[it].uuid}" for it in chosen[: workers * each]]


@given(cpus=st.sets(st.integers(0, 63), min_size=1), workers=st.integers(1, 8))
def test_workers_share_the_cpus_equally(cpus: set[int], workers: int) -> None:
    """On a CPU study each worker gets as many CPUs as any other, none of them twice, or there are too few."""
    if workers > len(cpus):
        with pytest.raises(RefusedError, match=rf"^-n {workers}: found {len(cpus)} CPUs"):
            assign({}, platform="cpu", workers=workers, each=1, cpus=sorted(cpus))
        return
    shares = [it[CPUS].split(",") for it in assign({}, platform="cpu", workers=workers, each=1, cpus=sorted(cpus))]
    assert {len(share) for share in shares} == {len(cpus) // workers}
    flat = [int(cpu) for share in shares for cpu in share]
    assert len(set(flat)) == len(flat)
    assert set(flat) <= cpus


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("1,-1,3", ("1",)),
        (f"{MIG}, MIG-77", (MIG, "MIG-77")),
        ("9", ("9",)),
    ],
)
def test_what_cuda_shows(text: str | None, names: tuple[str, ...]) -> None:
    """The caller's list is taken as CUDA reads it, MIG instances and unknown places included."""
    assert visible({} if text is None else {VISIBLE: text}, HOST) == names


@pytest.mark.parametrize("text", ["1,1", "0,GPU-0f3a-00", f"GPU-2f,{HOST[2].uuid}", f"{MIG},{MIG}"])
def test_a_device_named_twice_is_refused(text: str) -> None:
    """One device under two names in the caller's list is a refusal of one line, however it is spelt."""
    with pytest.raises(RefusedError, match="which are one device, expected each once"):
        assign({VISIBLE: text}, platform="gpu", workers=1, each=1, host=HOST)


def test_an_ambiguous_uuid_keeps_its_name() -> None:
    """A UUID that is cut too short is no other device's, and without a driver's list every name is its own."""
    assert lock_name("GPU-", HOST) == "GPU-"
    assert lock_name("1", ()) == "1"


def test_gpus_of_different_kinds_need_an_order() -> None:
    """Where the driver's order may not be CUDA's, places are refused; UUIDs and CUDA_DEVICE_ORDER are not."""
    mixed = (*HOST, Device(index=4, uuid="GPU-4", name="T4"))
    with pytest.raises(RefusedError, match="expected it: CUDA counts them in an order of its own"):
        assign({}, platform="gpu", workers=2, each=1, host=mixed)
    for environ in ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {VISIBLE: f"{HOST[0].uuid},{MIG}"}):
        assert len(assign(environ, platform="gpu", workers=2, each=1, host=mixed)) == 2


@pytest.mark.parametrize(
    ("environ", "each", "host", "names"),
    [
        ({}, 1, HOST, ("gpu-GPU-0f3a-00",)),
        ({}, 2, (), ("gpu-0", "gpu-1")),
        ({VISIBLE: "3"}, 1, HOST, ("gpu-GPU-3f3a-30",)),
        ({VISIBLE: f"{MIG},0"}, 1, HOST, (f"gpu-{MIG}",)),
        ({VISIBLE: ""}, 1, HOST, ()),
    ],
)
def test_what_one_server_takes(
    environ: dict[str, str], each: int, host: tuple[Device, ...], names: tuple[str, ...]
) -> None:
    """A run of one process locks the first visible devices, as many as its server takes."""
    assert in_use(environ, platform="gpu", each=each, host=host) == names


def test_a_cpu_study_locks_nothing_by_itself() -> None:
    """Only a worker of -n has CPUs of its own."""
    assert in_use({VISIBLE: "0"}, platform="cpu", each=1) == ()
    assert in_use({CPUS: "4,5"}, platform="cpu", each=1) == ("cpu-4", "cpu-5")


# -- locks ------------------------------------------------------------------------------------------------------------

HOLDER = """
import subprocess, sys
from pytest_kvqual.server.devices import held, hold
with hold(sys.argv[1], "taken", shared=sys.argv[2] == "shared"):
    child = subprocess.Popen(["sleep", "60"], pass_fds=held(), stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        ({"ranks": [{"device": {"devices": [{"uuid": "GPU-1"}]}}, {"device": {"devices": [{"uuid": "GPU-2"}]}}]},
         {"GPU-1", "GPU-2"}),
        ({"ranks": [{"device": {"devices": []}}]}, set()),
        ({"ranks": [{}, None, {"device": None}, {"device": {"devices": [None, {"uuid": ""}]}}]}, set()),
        ({"ranks": None}, set()),
        ({}, set()),
    ],
)  # fmt: skip
def test_devices_of_a_record(identity: dict[str, object], found: set[str]) -> None:
    """Each rank's device by its UUID; a record that tells none has none."""
    assert devices.recorded(identity) == found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of locks of this test alone."""
    monkeypatch.setenv(devices.LOCKS, str(tmp_path / "locks"))
    return tmp_path / "locks"


def holder(name: str, how: str) -> tuple[subprocess.Popen[str], int]:
    """Another process that holds a lock, and a child of it that inherited it."""
    argv = [sys.executable, "-c", HOLDER, name, how]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_lock_outlives_a_killed_holder_until_its_server_is_gone(folder: Path) -> None:
    """Another process's device is refused in one line, also after that process was killed, until its child is gone."""
    process, child = holder("gpu-0", "alone")
    try:
        for _ in range(2):
            with pytest.raises(RefusedError, match=r"^gpu-0: taken \[.*gpu-0.lock\]$"), hold("gpu-0", "gpu-0: taken"):
                pass
            process.kill()
            process.wait()
    finally:
        os.kill(child, 9)
    for _ in range(200):
        with ExitStack() as stack:
            try:
                stack.enter_context(hold("gpu-0", "taken"))
                break
            except RefusedError:
                select.select([], [], [], 0.01)
    else:
        pytest.fail("the lock of a process that is gone was still held")
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_a_server_holds_the_locks_of_its_run(folder: Path, tmp_path: Path) -> None:
    """What a run leaves behind when it ends keeps the device: the lock is the server's too, until its last process."""
    argv = (sys.executable, "-c", "import time; time.sleep(60)")
    with hold("gpu-0", "taken"):
        tree = ProcessTree(Command(argv=argv, env={}), log=tmp_path / "server.log", stop_s=5.0)
    try:
        with pytest.raises(RefusedError, match="taken"), hold("gpu-0", "taken"):
            pass
    finally:
        tree.stop()
    with hold("gpu-0", "taken"):
        pass


def test_runs_share_a_host_but_with_one_that_times(folder: Path) -> None:
    """A shared lock may be held many times, and then by nobody alone; a lock held alone is shared with nobody."""
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(hold("host", "taken", shared=True))
        with pytest.raises(RefusedError, match="found a run"):
            stack.enter_context(hold("host", "found a run"))
    with hold("host", "taken"), pytest.raises(RefusedError), hold("host", "taken", shared=True):
        pass
    with hold("host", "taken"):
        assert devices.held()
    assert devices.held() == ()


def test_any_name_is_a_file_of_the_folder(folder: Path) -> None:
    """A MIG instance's name has separators; its lock lies in the folder, which every user may write to."""
    with hold(f"gpu-{MIG}", "taken"):
        assert [path.name for path in folder.iterdir()] == ["gpu-MIG-GPU-0f3a-00_3_0.lock"]
    assert folder.stat().st_mode & 0o7777 == 0o1777


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks cannot be kept, nothing runs unlocked."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(devices.LOCKS, str(tmp_path / "file" / "locks"))
    with pytest.raises(RefusedError, match=r"^cannot use the lock .*: Not a directory$"), hold("host", "taken"):
        pass


def test_another_user_can_open_a_lock_whatever_the_umask(folder: Path) -> None:
    """A user whose files are private makes locks that others can open; a pipe in a lock's place is not waited for."""
    before = os.umask(0o077)
    try:
        with hold("gpu-0", "taken"):
            pass
    finally:
        os.umask(before)
    assert (folder / "gpu-0.lock").stat().st_mode & 0o777 == 0o644
    os.mkfifo(folder / "gpu-1.lock")
    with hold("gpu-1", "taken"):
        pass
