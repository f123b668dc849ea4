"""A campaign whose arm comes from an install: refused before every boot, and named in evidence and scope."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_repository import Repository
from tiny_study import TinyStudy

from pytest_kvqual._canonical import digest
from pytest_kvqual.attempt import INSTALL, Activity, Attempt
from pytest_kvqual.campaign import Campaign, open_campaign
from pytest_kvqual.errors import InstallError, StudyError
from pytest_kvqual.evidence.reader import Reader
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.hooks import Options
from pytest_kvqual.server import checkout
from pytest_kvqual.server.command import Command
from pytest_kvqual.server.install import engine_identity
from pytest_kvqual.study.model import Study


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A committed checkout of vllm."""
    return Repository(tmp_path / "stack" / "vllm").write()


@pytest.fixture
def study(tiny_study: TinyStudy) -> Path:
    """The tiny study, whose candidate comes from an install."""
    path = tiny_study.folder / "study.toml"
    text = path.read_text()
    path.write_text(text.replace("[arms.candidate]\n", "[arms.candidate]\ninstalled = true\n"))
    return tiny_study.folder


Open = Callable[..., Campaign]


@pytest.fixture
def opened(study: Path, repository: Repository, tmp_path: Path) -> Open:
    """Opens a campaign of the study, with the checkout as it is now in the install."""

    def call(*, install: bool = True, arm: str = "candidate") -> Campaign:
        folder = repository.root.parent
        if install:
            lines = checkout.checkout_lines(repository.root, "vllm", "candidate")
            (folder / checkout.INSTALL_FILE).write_text("\n".join(["schema = 1", *lines]) + "\n")
        options = Options(
            study=str(study),
            arm=arm,
            length=16,
            cache_bytes=None,
            prefix="",
            run_dir=tmp_path / "run",
            root=tmp_path,
            platform="cpu",
            timing=False,
            install=folder if install else None,
        )
        return open_campaign(options, lambda line: None)

    return call


def test_an_arm_that_an_install_brings_needs_one(opened: Open, tmp_path: Path) -> None:
    """Without --install the arm is refused by name, before anything is written."""
    with pytest.raises(InstallError, match="arm candidate: found no --install, expected one that names it") as caught:
        opened(install=False).prepare(["identity"])
    assert "\n" not in caught.value.line()
    assert not (tmp_path / "run").exists()


def test_an_install_that_does_not_name_the_arm(opened: Open, repository: Repository, tmp_path: Path) -> None:
    """An install of other arms is none of this one."""
    campaign = opened()
    (repository.root.parent / checkout.INSTALL_FILE).write_text(
        f'schema = 1\n[arms.native]\ninterpreter = "{sys.executable}"\n'
    )
    named = checkout.read_install(repository.root.parent, campaign.study)
    with pytest.raises(
        InstallError, match=r"kvqual-install\.toml without \[arms\.candidate\], expected one that names"
    ):
        Campaign(campaign.selection, run_dir=tmp_path / "run", progress=print, install=named).prepare(["identity"])


def test_a_dirty_checkout_is_refused_before_a_boot(opened: Open, repository: Repository, tmp_path: Path) -> None:
    """What changed since the install was declared is named, and no run directory is made."""
    campaign = opened()
    repository.put("vllm/__init__.py", "changed\n")
    with pytest.raises(InstallError, match=r"arm candidate, checkout vllm .*: found changed or untracked files"):
        campaign.prepare(["identity"])
    assert not (tmp_path / "run").exists()


def test_a_control_of_the_study_is_its_own(opened: Open) -> None:
    """An arm that the install does not name runs as the study declares it."""
    selection = opened(arm="native").selection
    assert selection.arm.checkouts == ()
    assert selection.arm.interpreter is None


def test_an_unprepared_study_is_refused_first(opened: Open, study: Path) -> None:
    """What is missing of the study is named before anything of an install is."""
    path = study / "study.toml"
    text = path.read_text().replace(
        'source = "nowhere"', f'source = "hub"\nrepository = "O/M"\nrevision = "{"a" * 40}"'
    )
    path.write_text(text)
    (study / "panels/nll-16.json").unlink()
    with pytest.raises(StudyError, match=r"is not prepared: found no panels/nll-16\.json"):
        opened()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands of the servers that were started; none runs."""
    commands: list[Command] = []

    def start(command: Command, *, port: int, log: Path, timeouts: object, progress: object) -> object:
        commands.append(command)
        log.write_text("up\n")
        return SimpleNamespace(boot_s=0.0, base_url="http://127.0.0.1:1", stop=lambda: None)

    monkeypatch.setattr("pytest_kvqual.server.rpc.call", lambda *_, **__: [{"busy_ns": 0}])
    monkeypatch.setattr("pytest_kvqual.server.process.Server.start", start)
    return commands


def attempt_of(campaign: Campaign, tmp_path: Path) -> Attempt:
    """An attempt of the campaign's arm."""
    return Attempt(
        campaign.selection,
        Scope(lock="a" * 64, arm="candidate", length=16, cache_bytes=65536, engine="b" * 64),
        run_dir=tmp_path / "run",
        prefix="",
        model=tmp_path,
        progress=lambda line: None,
        activity=Activity(),
        install=campaign.install,
    )


def test_the_checkout_is_looked_at_again_at_each_boot(
    opened: Open, repository: Repository, started: list[Command], tmp_path: Path
) -> None:
    """The first boot records what it found; a change before the next one ends the attempt by name, without a server."""
    attempt = attempt_of(opened(), tmp_path)
    attempt.boot()
    assert str(repository.root) in started[0].env["PYTHONPATH"].split(":")
    assert f'"checkouts":"{attempt.path / INSTALL}"' in " ".join(started[0].argv)
    repository.put("vllm/evil.py", "")
    with pytest.raises(InstallError, match=r"found changed or untracked files: vllm/evil\.py"), attempt.failing():
        attempt.boot()
    assert len(started) == 1
    document: Any = Reader.open(attempt.path).document(INSTALL)
    assert document["arm"] == "candidate"
    assert [(it["name"], it["commit"]) for it in document["checkouts"]] == [("vllm", repository.head())]


def test_the_record_of_the_checkout_is_evidence_of_identity(opened: Open) -> None:
    """A receipt of identity names the record of what the arm brought; of an arm of the study alone there is none."""
    assert INSTALL in opened()._needed(("identity",))
    assert INSTALL not in opened()._needed(("routing",))
    assert INSTALL not in opened(arm="native")._needed(("identity",))


def test_another_commit_is_another_engine(repository: Repository) -> None:
    """The scope's engine has the checkout's commit and contents in it, and not its place."""
    study = cast(Study, SimpleNamespace(engine=SimpleNamespace(distribution="pytest", version=version("pytest"))))

    def engine(*roots: Path) -> str:
        found = [checkout.describe(root, "vllm") for root in roots]
        return digest(engine_identity(study, Path(sys.executable), found))

    before = engine(repository.root)
    moved = repository.root.rename(repository.root.with_name("elsewhere"))
    assert engine(moved) == before
    assert engine() != before
    Repository(moved).put("vllm/__init__.py", "x = 1\n")
    Repository(moved).commit()
    assert engine(moved) != before
