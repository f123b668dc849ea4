"""The audit of a run whose study has formats of its model, and whose candidate came from an install."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from full_run import CANDIDATE, FORMATS, FullRun, build_run

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
