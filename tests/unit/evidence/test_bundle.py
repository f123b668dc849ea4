"""Writing evidence: numbering, sealing, crashes, full disks."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from attempt import RECORDS, SCOPE, write_attempt

from pytest_kvqual._canonical import sha256_file
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.reader import Reader, attempts

FOLDER = "candidate-1024-4096"

WRITER = """
import sys
from pathlib import Path
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.records import Scope
scope = Scope(lock="a" * 64, arm="candidate", length=1024, cache_bytes=4096, engine="b" * 64)
"""


def _run(source: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + source, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_attempts_are_numbered_and_named(tmp_path: Path) -> None:
    """Each creation makes the next folder, and its name says arm, length, pool and number."""
    first, second = Bundle.create(tmp_path, SCOPE), Bundle.create(tmp_path, SCOPE)
    assert (first.number, second.number) == (1, 2)
    assert second.name == f"{FOLDER}/attempt-2"
    assert second.path == tmp_path / "evidence" / FOLDER / "attempt-2"
    assert (second.scope, dict(second.digests)) == (SCOPE, {})
    assert Bundle.create(tmp_path, SCOPE, prefix="one-").name == f"one-{FOLDER}/attempt-1"
    assert attempts(tmp_path, "candidate", 1024, 4096) == (first.path, second.path)
    assert attempts(tmp_path, "candidate", 1024, 4096, "two-") == ()


def test_a_number_that_is_taken_is_never_used_again(tmp_path: Path) -> None:
    """A folder, or a file in the place of one, keeps its number; strange names have none."""
    folder = tmp_path / "evidence" / FOLDER
    folder.mkdir(parents=True)
    (folder / "attempt-7").mkdir()
    (folder / "attempt-8").write_text("")
    for name in ("attempt-x", "attempt-010", "attempt-99-old"):
        (folder / name).mkdir()
    assert Bundle.create(tmp_path, SCOPE).number == 9


def test_a_removed_attempt_shows(tmp_path: Path) -> None:
    """A gap in the numbers is named: failed attempts may not be tidied away."""
    for _ in range(3):
        Bundle.create(tmp_path, SCOPE)
    (tmp_path / "evidence" / FOLDER / "attempt-2").rename(tmp_path / "elsewhere")
    with pytest.raises(EvidenceError, match="found attempt-3, expected attempt-2 before it"):
        attempts(tmp_path, "candidate", 1024, 4096)


@pytest.mark.parametrize("prefix", ["../", "a/b", ".x", " ", "-x"])
def test_a_prefix_is_part_of_a_name(tmp_path: Path, prefix: str) -> None:
    """A prefix with a separator or a hidden beginning is refused."""
    with pytest.raises(EvidenceError, match="found the prefix"):
        Bundle.create(tmp_path, SCOPE, prefix=prefix)


def test_processes_that_create_at_once_never_share_a_folder(tmp_path: Path) -> None:
    """Four processes that create ten attempts each make forty folders, each with its own number in it."""
    source = """
sys.stdin.readline()
for _ in range(10):
    print(Bundle.create(Path(sys.argv[1]), scope).number)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER + source, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    numbers = [
        int(line) for output in [process.communicate("\n")[0] for process in processes] for line in output.split()
    ]
    assert sorted(numbers) == list(range(1, 41))
    assert [Reader.open(path).number for path in attempts(tmp_path, "candidate", 1024, 4096)] == list(range(1, 41))


def test_threads_that_create_at_once_never_share_a_folder(tmp_path: Path) -> None:
    """The folder's creation decides between threads as well."""
    made: list[int] = []
    barrier = threading.Barrier(8)

    def create() -> None:
        barrier.wait()
        made.extend(Bundle.create(tmp_path, SCOPE).number for _ in range(5))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 41))


def test_a_stream_is_sealed_when_its_block_ends(tmp_path: Path) -> None:
    """Records come back in order, and the manifest's digest is that of the file."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with bundle.stream("nll.jsonl") as stream:
        for record in RECORDS:
            stream.append(record)
        assert stream.count == len(RECORDS)
        assert stream.bytes == (bundle.path / "nll.jsonl").stat().st_size
    assert bundle.digests == {"nll.jsonl": sha256_file(bundle.path / "nll.jsonl")}
    assert Reader.open(bundle.path).records("nll.jsonl") == RECORDS


def test_each_record_is_flushed_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When append returns, the whole line is in the file and fsync was called on it after the write."""
    bundle = Bundle.create(tmp_path, SCOPE)
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    with bundle.stream("nll.jsonl") as stream:
        path = bundle.path / "nll.jsonl"
        for record in RECORDS:
            stream.append(record)
            assert synced[-1] == (str(path), path.stat().st_size)
            assert path.read_bytes().endswith(b"\n")


def test_an_exception_keeps_the_stream_unsealed(tmp_path: Path) -> None:
    """A capture that fails keeps its records, seals nothing, and its exception passes through."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with pytest.raises(KeyboardInterrupt), bundle.stream("nll.jsonl") as stream:  # noqa: PT012  # the block is the subject
        stream.append(RECORDS[0])
        raise KeyboardInterrupt
    bundle.fail("interrupted\nby the user")
    reader = Reader.open(bundle.path)
    assert (reader.has("nll.jsonl"), reader.unsealed) == (False, ("nll.jsonl",))
    assert (reader.outcome, reader.reason) == ("failed", "interrupted by the user")
    assert (bundle.path / "nll.jsonl").read_bytes().count(b"\n") == 1
    with pytest.raises(EvidenceError, match=r"found no sealed 'nll\.jsonl'"):
        reader.records("nll.jsonl")


@pytest.mark.parametrize("record", [{"x": float("nan")}, {"x": float("inf")}, {"x": {1}}, {1: "x"}, [1], "x", None])
def test_what_json_cannot_hold_is_refused_and_writes_nothing(tmp_path: Path, record: object) -> None:
    """A refused record leaves the stream whole, and the stream goes on."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with bundle.stream("nll.jsonl") as stream:
        stream.append(RECORDS[0])
        with pytest.raises(EvidenceError):
            stream.append(record)  # type: ignore[arg-type]  # what a caller could get wrong
        stream.append(RECORDS[1])
    with pytest.raises(EvidenceError):
        bundle.write("identity.json", record)  # type: ignore[arg-type]  # what a caller could get wrong
    assert not (bundle.path / "identity.json").exists()
    assert Reader.open(bundle.path).records("nll.jsonl") == RECORDS[:2]


def test_a_document_is_written_whole_and_sealed(tmp_path: Path) -> None:
    """The digest returned is the file's, and no scratch file stays."""
    bundle = Bundle.create(tmp_path, SCOPE)
    digest = bundle.write("identity.json", {"b": 1, "a": [0.5]})
    assert (bundle.path / "identity.json").read_bytes() == b'{"a":[0.5],"b":1}\n'
    assert digest == sha256_file(bundle.path / "identity.json")
    assert Reader.open(bundle.path).document("identity.json") == {"a": [0.5], "b": 1}
    assert Reader.open(bundle.path).unsealed == ()


def test_a_file_of_another_process_is_sealed_as_it_is(tmp_path: Path) -> None:
    """The digest returned is the file's; a second seal, a missing file, a folder and a link are refused."""
    bundle = Bundle.create(tmp_path, SCOPE)
    path = bundle.path / "reference.jsonl"
    path.write_text("{}\n")
    assert bundle.seal("reference.jsonl") == sha256_file(path)
    (bundle.path / "folder").mkdir()
    (bundle.path / "link").symlink_to(path)
    os.mkfifo(bundle.path / "pipe")
    for name, words in (
        ("reference.jsonl", "it is sealed already"),
        ("gone", "No such file or directory"),
        ("folder", "found no regular file"),
        ("link", "Too many levels of symbolic links"),
        ("pipe", "found no regular file"),
    ):
        with pytest.raises(EvidenceError, match=words):
            bundle.seal(name)


@pytest.mark.parametrize(
    "name", ["attempt.json", "manifest.jsonl", "outcome.json", "../x", "a/b", ".hidden", "", "a b", "x\n"]
)
def test_names_that_evidence_may_not_have_are_refused(tmp_path: Path, name: str) -> None:
    """The attempt's own files, separators, hidden names and blanks are refused by every way of writing."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with pytest.raises(EvidenceError, match="found the evidence name"):
        bundle.write(name, {})
    with pytest.raises(EvidenceError, match="found the evidence name"), bundle.stream(name):
        pass
    with pytest.raises(EvidenceError, match="found the evidence name"):
        bundle.seal(name)


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    """A name that is taken, sealed or not, is refused and its file stays as it is."""
    bundle = Bundle.create(tmp_path, SCOPE)
    bundle.write("identity.json", {"a": 1})
    (bundle.path / "other.jsonl").write_text("kept\n")
    for name in ("identity.json", "other.jsonl"):
        with pytest.raises(EvidenceError, match="it is there already"):
            bundle.write(name, {"a": 2})
        with pytest.raises(EvidenceError, match="it is there already"), bundle.stream(name):
            pass
    assert (bundle.path / "other.jsonl").read_text() == "kept\n"
    assert Reader.open(bundle.path).document("identity.json") == {"a": 1}


@pytest.mark.parametrize("close", [lambda bundle: bundle.complete(), lambda bundle: bundle.fail("why")])
def test_a_closed_attempt_takes_nothing_more(tmp_path: Path, close: Callable[[Bundle], None]) -> None:
    """The outcome is written once; after it no file is written or sealed."""
    bundle = Bundle.create(tmp_path, SCOPE)
    close(bundle)
    (bundle.path / "late.json").write_text("{}")
    for late in (bundle.complete, lambda: bundle.fail("x"), lambda: bundle.write("x.json", {}),
                 lambda: bundle.seal("late.json")):  # fmt: skip
        with pytest.raises(EvidenceError, match="the attempt is closed"):
            late()
    with pytest.raises(EvidenceError, match="the attempt is closed"), bundle.stream("x.jsonl"):
        pass
    assert Reader.open(bundle.path).unsealed == ("late.json",)


def test_a_stream_still_open_when_the_attempt_closes_is_not_sealed(tmp_path: Path) -> None:
    """An outcome cannot cover a file that is sealed after it."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with pytest.raises(EvidenceError, match="the attempt is closed"), bundle.stream("nll.jsonl"):
        bundle.complete()
    assert Reader.open(bundle.path).unsealed == ("nll.jsonl",)


def test_a_killed_writer_leaves_its_records_and_its_number(tmp_path: Path) -> None:
    """After SIGKILL in mid-stream what was appended is there, unsealed, never reused; the next attempt is number 2."""
    source = """
bundle = Bundle.create(Path(sys.argv[1]), scope)
bundle.write("identity.json", {"rank": 0})
with bundle.stream("nll.jsonl") as stream:
    for index in range(10**9):
        stream.append({"index": index, "body": "x" * 5000})
        print(index, flush=True)
"""
    process = _run(source, tmp_path)
    if process.stdout is None:
        pytest.fail("no pipe")
    while int(process.stdout.readline()) < 20:
        pass
    process.send_signal(signal.SIGKILL)
    seen = [int(line) for line in process.communicate()[0].split()]
    assert process.returncode == -signal.SIGKILL
    path = tmp_path / "evidence" / FOLDER / "attempt-1"
    lines = (path / "nll.jsonl").read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"}\n")]
    assert len(whole) >= (seen[-1] if seen else 20) + 1
    reader = Reader.open(path)
    assert (reader.outcome, reader.unsealed, list(reader.digests)) == ("unfinished", ("nll.jsonl",), ["identity.json"])
    assert Reader.latest(tmp_path, SCOPE, names=["identity.json"]) is None
    assert Bundle.create(tmp_path, SCOPE).number == 2
    assert attempts(tmp_path, "candidate", 1024, 4096)[0] == path


class _FullDisk:
    """A disk that takes some more bytes, then half of what is written, then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self._write = os.write
        self.room = room
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(descriptor, bytes(data[: self.room]))
        self.room -= taken
        return taken


def test_a_full_disk_in_mid_record_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the file and what to do, the half record is kept unsealed, and the attempt counts."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with (  # noqa: PT012  # the block is the subject
        pytest.raises(EvidenceError, match=r"cannot write .*nll\.jsonl: No space left on device") as caught,
        bundle.stream("nll.jsonl") as stream,
    ):
        stream.append(RECORDS[0])
        _FullDisk(monkeypatch, 10)
        stream.append(RECORDS[1])
    assert "free space" in caught.value.advice
    assert "--run-dir" in caught.value.advice
    assert "\n" not in caught.value.line()
    monkeypatch.undo()
    reader = Reader.open(bundle.path)
    assert (reader.outcome, reader.unsealed, dict(reader.digests)) == ("unfinished", ("nll.jsonl",), {})
    assert Bundle.create(tmp_path, SCOPE).number == 2


def test_a_torn_stream_is_not_sealed_by_a_caller_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swallowing the refusal of one record does not make a stream of the rest."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with pytest.raises(EvidenceError, match="cannot seal"), bundle.stream("nll.jsonl") as stream:  # noqa: PT012  # as above
        disk = _FullDisk(monkeypatch, 10)
        with pytest.raises(EvidenceError, match="No space left"):
            stream.append(RECORDS[0])
        disk.room = 10**9
        with pytest.raises(EvidenceError, match="broken by an earlier error"):
            stream.append(RECORDS[1])
    assert Reader.open(bundle.path).unsealed == ("nll.jsonl",)


def test_a_disk_that_refuses_to_sync_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was written and not synced does not count as written."""
    bundle = Bundle.create(tmp_path, SCOPE)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (  # noqa: PT012  # the block is the subject
        pytest.raises(EvidenceError, match=r"cannot write .*nll\.jsonl: Input/output error"),
        bundle.stream("nll.jsonl") as stream,
    ):
        monkeypatch.setattr(os, "fsync", refuse)
        stream.append(RECORDS[0])
    monkeypatch.undo()
    assert Reader.open(bundle.path).unsealed == ("nll.jsonl",)


@pytest.mark.parametrize("room", [0, 1, 30, 60, 200])
def test_a_full_disk_never_leaves_a_sealed_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Wherever the disk fills up, the document is whole and sealed or it is not sealed, and the attempt can be read."""
    bundle = Bundle.create(tmp_path, SCOPE)
    bundle.write("identity.json", {"rank": 0})
    disk = _FullDisk(monkeypatch, room)
    with pytest.raises(EvidenceError, match="No space left on device"):
        bundle.write("oracle.json", {"findings": ["x" * 50]})
    reader = Reader.open(bundle.path)
    assert list(reader.digests) == ["identity.json"]
    assert not list(bundle.path.glob(".*"))
    disk.room = 10**9
    bundle.fail("no space")
    assert Reader.open(bundle.path).reason == "no space"


def test_a_limit_of_the_operating_system_is_one_line(tmp_path: Path) -> None:
    """A refusal by the kernel itself, in mid-record, is an EvidenceError in a process that has the limit."""
    source = """
import resource, signal
from pytest_kvqual.errors import EvidenceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
bundle = Bundle.create(Path(sys.argv[1]), scope)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    with bundle.stream("nll.jsonl") as stream:
        for index in range(10):
            stream.append({"index": index, "body": "x" * 1000})
except EvidenceError as error:
    print(error.line())
"""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] not in (resource.RLIM_INFINITY,):
        pytest.skip("the limit is set already")
    output = _run(source, tmp_path).communicate()[0]
    assert "nll.jsonl: File too large (" in output
    assert output.count("\n") == 1
    assert Reader.open(tmp_path / "evidence" / FOLDER / "attempt-1").unsealed == ("nll.jsonl",)


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """A file in the place of a folder is named."""
    (tmp_path / "run").write_text("")
    with pytest.raises(EvidenceError, match=r"cannot write .*: Not a directory") as caught:
        Bundle.create(tmp_path / "run", SCOPE)
    assert "--run-dir" in caught.value.advice


def test_a_read_only_place_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be written says to choose another."""

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EvidenceError, match="Permission denied") as caught:
        Bundle.create(tmp_path, SCOPE)
    assert caught.value.advice == "give a --run-dir that you may write to"


def test_a_stream_that_another_process_wrote_into_is_not_sealed(tmp_path: Path) -> None:
    """What is on disk must be what was appended."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with pytest.raises(EvidenceError, match=r"nll\.jsonl: found sha256 \w+, expected \w+ as written"):  # noqa: SIM117, PT012  # as above
        with bundle.stream("nll.jsonl") as stream:
            stream.append(RECORDS[0])
            with (bundle.path / "nll.jsonl").open("ab") as file:
                file.write(b"{}\n")
    assert Reader.open(bundle.path).unsealed == ("nll.jsonl",)


def test_a_manifest_that_another_process_wrote_into_is_refused(tmp_path: Path) -> None:
    """The attempt belongs to one writer: a second one shows at the next seal."""
    bundle = Bundle.create(tmp_path, SCOPE)
    with (bundle.path / "manifest.jsonl").open("ab") as file:
        file.write(b"x")
    with pytest.raises(EvidenceError, match=r"manifest\.jsonl: found 1 bytes, expected the 0 written"):
        bundle.write("identity.json", {})


def test_an_attempt_that_was_written_whole_is_read_whole(tmp_path: Path) -> None:
    """The reader gives back scope, number, outcome, digests in the order of sealing, documents and records."""
    path = write_attempt(tmp_path, outcome="complete")
    reader = Reader.open(path)
    assert (reader.scope, reader.number, reader.name) == (SCOPE, 1, f"{FOLDER}/attempt-1")
    assert (reader.outcome, reader.reason, reader.prefix, reader.unsealed) == ("complete", "", "", ())
    assert list(reader.digests) == ["identity.json", "nll.jsonl", "reference.jsonl", "oracle.json"]
    assert reader.document("identity.json") == {"rank": 0, "scales": [0.5, 0.25]}
    assert reader.records("nll.jsonl") == RECORDS
    assert reader.records("reference.jsonl") == ({"id": "r0", "token_ids": [1, 2]},)
