"""The gates of this checkout with a GPU study: what is listed, what is chosen by default, and what a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_repository import Repository

# Before pytester remembers what is imported: what it forgets after a test could not be replaced in the next.
from pytest_kvqual import session
from pytest_kvqual.study.load import load_study

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
# Not the folder: its controls import what takes seconds, and no listing here is about them.
QUALIFICATION = sorted(str(path) for path in (ROOT / "qualification").glob("test_*.py"))
GATES = [plan.name for plan in load_study("qwen3-8b-awq").gates]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs pytest on this checkout's own gates from an empty folder, on a host that shows no GPU."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(session, "gpu_found", lambda: False)
    (pytester.path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    return Runner(pytester, monkeypatch)


class Runner:
    """A way to run the gates."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self._monkeypatch = monkeypatch

    def show_a_gpu(self) -> None:
        self._monkeypatch.setattr(session, "gpu_found", lambda: True)

    def __call__(self, *args: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(
            "-p", "pytest_kvqual.plugin", "--rootdir", str(self.pytester.path), *QUALIFICATION, *args
        )

    def listed(self, *args: str) -> list[str]:
        """The gates that a listing names, in its order."""
        result = self(*args, "--collect-only", "-q")
        assert result.ret == 0
        found = [line.rpartition("::test_")[2].replace("_", "-") for line in result.outlines if "::test_" in line]
        return [name for name in found if name]

    def refused(self, text: str, *args: str) -> None:
        """The run is refused in one line with ``text`` in it, and nothing is left behind."""
        result = self(*args)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        errors = [line for line in result.errlines if line.startswith("ERROR")]
        assert len(errors) == 1
        assert text in errors[0]
        assert not (self.pytester.path / ".kvqual").exists()


@pytest.mark.parametrize("study", [[], ["--study", "qwen3-8b-awq"], ["--study", "phi-4"]])
@pytest.mark.parametrize("length", ["8192", "1024"])
def test_every_gate_is_listed_in_order(run: Runner, study: list[str], length: str) -> None:
    """Without a GPU, panels or weights, each gate of the study is listed in its order, and no other study's."""
    assert run.listed("-m", "gpu", "--arm", "candidate", "--length", length, *study) == GATES


def test_the_platform_chooses_the_study(run: Runner) -> None:
    """-m cpu is the embedded study, which has recall and not gsm8k; -m gpu is the one that has gsm8k."""
    cpu, gpu = run.listed("-m", "cpu"), run.listed("-m", "gpu")
    assert ("recall" in cpu, "gsm8k" in cpu) == (True, False)
    assert ("recall" in gpu, "gsm8k" in gpu) == (False, True)


@pytest.mark.parametrize("form", ["awq", "bf16"])
def test_a_format_is_listed(run: Runner, form: str) -> None:
    """Each format has the same gates."""
    assert run.listed("-m", "gpu", "--format", form, "--arm", "native-fa3") == GATES


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--arm", "candidat"], "found no arm 'candidat' in study qwen3-8b-awq"),
        (["--length", "4096"], "found no length 4096 in study qwen3-8b-awq, expected one of 8192, 1024"),
        (["--format", "int4"], "found --format int4, expected one of awq, bf16"),
        (["--study", "smollm2-cpu"], "-m gpu: found the study 'smollm2-cpu' of platform cpu"),
        (["--study", "none"], "found no study 'none'"),
        (["--study", " "], "--study: found an empty text"),
        (["--install", "."], "--install: cannot read"),
    ],
)
def test_a_listing_refuses_what_does_not_fit(run: Runner, args: list[str], text: str) -> None:
    """What was typed wrong is named before anything is listed."""
    run.refused(text, "-m", "gpu", "--collect-only", *args)


def test_without_a_gpu_a_run_fails_in_one_line(run: Runner) -> None:
    """The first thing that is missing is the device."""
    run.refused("-m gpu: found no GPU", "-m", "gpu", "--arm", "candidate", "--length", "8192")


def test_an_unprepared_study_runs_no_gate(run: Runner) -> None:
    """With a GPU, what is missing is named in one line with the command that makes it."""
    run.show_a_gpu()
    line = "kvqual prepare qwen3-8b-awq --format bf16 --model DIR"
    run.refused(line, "-m", "gpu", "--arm", "candidate", "--length", "8192", "--format", "bf16")


def test_a_folder_without_an_install(run: Runner) -> None:
    """--install takes a folder that is there."""
    run.refused("--install: found no folder 'nowhere'", "-m", "gpu", "--install", "nowhere")


def test_checkout_prints_what_an_install_declares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``kvqual checkout`` prints the tables of a repository as it is."""
    from pytest_kvqual.cli import main

    repository = Repository(tmp_path / "vllm").write()
    assert main(["checkout", str(repository.root)]) == 0
    printed = capsys.readouterr().out
    assert "[arms.candidate.checkouts.vllm]" in printed
    assert f'commit = "{repository.head()}"' in printed
    assert main(["checkout", str(tmp_path)]) == 2
