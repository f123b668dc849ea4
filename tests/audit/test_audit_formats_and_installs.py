"""The audit of a run whose study has formats of its model, and whose candidate came from an install."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from full_run import CANDIDATE, CONTROLS, FORMATS, FullRun, build_run

from pytest_kvqual.audit import observed
from pytest_kvqual.audit.attempts import Attempt
from pytest_kvqual.audit.auditor import Options, Result, audit
from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError
from pytest_kvqual.audit.frozen import _of_the_format
from pytest_kvqual.audit.rederive import _brought


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """An honest run of the second format, whose candidate brought a checkout."""
    return build_run(tmp_path_factory.mktemp("brought"), installed=True, formats=True)


def audited(run: FullRun) -> Result:
    return audit(Options(run_dir=run.run_dir))


def test_an_honest_run_has_no_finding(whole: FullRun) -> None:
    """The format's digests, scales and dtype are read where they stand, and the checkout's record is evidence."""
    result = audited(whole)
    assert [(it.check, it.where, it.text) for it in result.report.findings] == []
    lock = json.loads((whole.study_copy / "lock.json").read_text())
    assert lock["format"] == FORMATS[1]
    assert f"{FORMATS[1]}.json" in lock["files"]
    names = whole.receipts["identity"].evidence
    assert f"{whole.folder(CANDIDATE)}/attempt-1/install.json" in names


def test_a_record_that_no_receipt_names_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt of identity that leaves out what the arm brought does not stand."""
    monkeypatch.setattr("pytest_kvqual.campaign.INSTALL", "identity.json")
    result = audited(build_run(tmp_path, installed=True))
    assert any(it.check == 7 and "found no install.json" in it.text for it in result.report.findings)


def silent(record: dict[str, Any]) -> None:
    record["devices"] = []


def unsettled(record: dict[str, Any]) -> None:
    record["devices"][0]["settings"] = {"power_limit": None}


def undriven(record: dict[str, Any]) -> None:
    record["driver"] = None


def moved(record: dict[str, Any]) -> None:
    record["devices"][0]["uuid"] = "GPU-1"


def warmed(record: dict[str, Any]) -> None:
    record["devices"][0]["state"] = {"temperature": "80 C"}


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (silent, "no one device"),
        (unsettled, "no settings of the device"),
        (undriven, "no one device"),
        (moved, "another device or setting than that of candidate"),
        (warmed, ""),
    ],
)
def test_the_device_of_a_gpu_study_is_looked_at_again(
    whole: FullRun, damage: Callable[[dict[str, Any]], None], word: str
) -> None:
    """A PASS of identity needs both arms' device, the same one in the same setting; the state of the moment is free."""
    frozen: Any = SimpleNamespace(study={"platform": "gpu"})
    documents = {
        arm: json.loads((whole.attempt(arm) / "identity.json").read_text()) for arm in (CANDIDATE, CONTROLS[0])
    }
    damage(documents[CONTROLS[0]]["ranks"][0]["device"])
    receipt: Any = SimpleNamespace(
        name="r", outcome="PASS", scope=SimpleNamespace(arm=CANDIDATE), poison=(), figure="", findings=()
    )
    for platform in ("gpu", "cpu"):
        report = Report()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(observed, "_identity_breaks", lambda frozen, arm, document: "")
            frozen.study["platform"] = platform
            observed.identity(receipt, frozen, documents[CANDIDATE], documents[CONTROLS[0]], None, CONTROLS[0], report)
        found = [it.text for it in report.findings]
        assert [word in line for line in found] == ([True] if word and platform == "gpu" else [])


def test_another_checkout_than_was_verified_is_found(whole: FullRun) -> None:
    """The workers read the commit that was verified before the boot, on every rank."""
    folder = whole.attempt(CANDIDATE)
    identity, install = (json.loads((folder / name).read_text()) for name in ("identity.json", "install.json"))

    def found(install: object) -> list[str]:

        attempt = Attempt(bundle="a", number=1, kept={"identity.json": identity, "install.json": install})
        report = Report()
        _brought(CANDIDATE, attempt, report)
        return [it.text for it in report.findings]

    assert found(install) == []
    assert any("arm: found" in line for line in found({**install, "arm": "other"}))
    other = {**install, "checkouts": [{**install["checkouts"][0], "commit": "6" * 40}]}
    assert any("checkout vllm: found" in line for line in found(other))


@pytest.mark.parametrize("name", [None, "int4", 3])
def test_a_lock_that_names_no_format_of_the_study(whole: FullRun, name: object) -> None:
    """A study with formats needs the lock to say which, and one that it has."""
    import tomllib

    study = tomllib.loads((whole.study_copy / "study.toml").read_text())
    with pytest.raises(DamagedError, match=r"lock\.format: found"):
        _of_the_format(study, name, {})
    with pytest.raises(DamagedError, match="found no key 'formats'"):
        _of_the_format({"model": {}}, "awq", {})


def test_digests_that_are_not_there(whole: FullRun) -> None:
    """Without the file of the model's digests, as the lock has it, nothing says which weights ran."""
    import tomllib

    study = tomllib.loads((whole.study_copy / "study.toml").read_text())
    with pytest.raises(DamagedError, match=f"found no {FORMATS[1]}.json as the lock has it"):
        _of_the_format(study, FORMATS[1], {})
