"""Write the reference of the documentation from the code: ``docs/reference/*.md``.

    python scripts/make_reference.py            # writes the files
    python scripts/make_reference.py --check    # writes nothing; ends with 1 where a file is not what would be written

Options are read from the plugin's own declaration, commands and exit statuses from the argument parser of ``kvqual``,
study keys from ``study/keys.py`` (which is also the loader's list), figures from ``metrics/formulas.py``, and the
fields of a receipt from one that ``receipt/statement.py`` writes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_kvqual import cli, plugin
from pytest_kvqual.errors import StudyError
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.verdict import Check, Outcome, Poison, Verdict
from pytest_kvqual.metrics.formulas import FORMULAS, QUANTILES, QUANTITIES, unit_of
from pytest_kvqual.receipt import statement
from pytest_kvqual.study import keys, plan
from pytest_kvqual.study.model import Cell

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
_PYTEST_STATUS: Final = tuple(
    line.partition(" ")[::2]
    for line in """\
0 every gate that the run had to decide is PASS, in this run or by a receipt that still stands
1 a gate is FAIL, INCONCLUSIVE or REFUSED, or was skipped, deselected or not reached; or a file was not written
2 interrupted; what was not decided by then has receipts that say so
3 a defect of pytest or of a plugin
4 refused before any engine was booted, in one line: usage, study, lock, model, engine or disk that does not fit
""".splitlines()
)
MARK: Final = "<!-- Written by scripts/make_reference.py from the code. Change the code, and run it again. -->"


class _Options:
    """Takes the place of pytest's parser and of its group, and keeps what is declared."""

    def __init__(self) -> None:
        self.declared: list[tuple[str, dict[str, Any]]] = []

    def getgroup(self, name: str, description: str = "") -> _Options:
        return self

    def addoption(self, *names: str, **attributes: Any) -> None:
        self.declared.append((names[0], attributes))


def options() -> str:
    """The options that the plugin adds to pytest, its markers, and what a run of gates refuses."""
    from pytest_kvqual import session

    found = _Options()
    plugin.pytest_addoption(found)  # type: ignore[arg-type]  # only these two methods of the parser are called
    rows = []
    for name, attributes in found.declared:
        text, default = _without_default(str(attributes["help"]))
        typed = attributes.get("metavar") or "|".join(attributes["choices"])
        rows.append((f"`{name} {typed}`", text, default))
    markers = [line.partition(": ") for line in plugin.MARKERS]
    refused = [(f"`{typed}`", why) for _, typed, why in session._HIDING_OPTIONS]
    return _page(
        "Options of pytest",
        "What the plugin adds. A run of gates names its platform: `-m cpu` or `-m gpu`.",
        *_table(("option", "meaning", "default"), rows),
        "## Markers",
        *_table(("marker", "meaning"), [(f"`{name}`", text) for name, _, text in markers]),
        "## Refused with gates",
        "Each is a usage error of one line. So are `-p` of a plugin that repeats tests, its marks and its settings.",
        *_table(("option", "why"), refused),
    )


def _without_default(text: str) -> tuple[str, str]:
    """A help text, and the default that stands in brackets at its end."""
    match = re.fullmatch(r"(.*?) \(default: (.*)\)", text)
    return (text, "none") if match is None else (match[1], match[2])


def commands() -> str:
    """Every command of ``kvqual`` with its arguments, as its parser has them."""
    parts: list[str] = []
    for name, parser in _parsers():
        described = str(parser.description)
        parts += [f"## kvqual {name}", described]
        rows = [_argument(parser, action) for action in parser._actions if action.dest != "help"]
        parts += _table(("argument", "meaning", "default"), rows)
    return _page(
        "Commands",
        "`kvqual --version` prints the version, `kvqual COMMAND --help` what stands here. "
        "[exit-status.md](exit-status.md) says how each ends.",
        *parts,
    )


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in cli._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {action.metavar or _values(action)}"
        name = f"{action.option_strings[0]}{value}"
    else:
        name = str(action.metavar or action.dest)
        name = f"{name} …" if action.nargs == "+" else name
    help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
    text, default = _without_default(help_text)
    # A choice's help may say its default alone.
    said = re.fullmatch(r"default: (.*)", text)
    if said is not None:
        text, default = "", said[1]
    must = action.required if action.option_strings else action.nargs != "?"
    if action.nargs == 0:
        default = "off"
    if action.choices is not None and action.metavar is not None:
        text = f"{text} ({', '.join(map(str, action.choices))})".strip()
    return f"`{name}`", text, "must be given" if must else default


def _values(action: argparse.Action) -> str:
    return action.dest.upper() if action.choices is None else "|".join(map(str, action.choices))


def exit_status() -> str:
    """How each command, and a run of pytest with gates, ends."""
    rows, twos = [], set()
    for name, parser in _parsers():
        stated = re.fullmatch(r"Exit status: 0 (.*?)(?:; 1 (.*))?; 2 (.*)\.", str(parser.epilog))
        if stated is None:
            raise SystemExit(f"kvqual {name}: found the epilog {parser.epilog!r}, expected its exit statuses")
        rows.append((f"`kvqual {name}`", stated[1], stated[2] or "-"))
        twos.add(stated[3])
    return _page(
        "Exit status",
        "`python -m pytest_kvqual.audit` and `python -m pytest_kvqual.audit.verify` end as `kvqual audit` and "
        "`kvqual verify` do. A command whose output is cut off by its reader (`| head`) ends with 1.",
        f"Every command ends with 2 at {' or '.join(twos)}.",
        *_table(("command", "0", "1"), rows),
        "## pytest with gates",
        "pytest's own statuses, which the plugin sets from the verdicts:",
        *_table(
            ("status", "when"),
            _PYTEST_STATUS,
        ),
        "A transfer test alone, or a test of this project, ends as any test of pytest does.",
    )


def study() -> str:
    """Every key of a study."""
    parts: list[str] = []
    for section in keys.SECTIONS:
        parts += [f"## {f'`{section.header}`' if section.header else 'Top'}", section.about]
        rows = [
            (f"`{key.name}`", key.type, key.unit, key.default or f"must be there {key.when}".rstrip(), key.meaning)
            for key in section.keys
        ]
        parts += _table(("key", "type", "unit, bounds", "default", "meaning"), rows)
        if section.header == "[oracle]":
            parts += ["### Passes", "What each word of `oracle.passes` runs:"]
            parts += _table(("pass", "what is different"), [(f"`{it}`", text) for it, text in keys.PASSES.items()])
            parts += ["### Conditions", "What meets each word of `oracle.conditions`:"]
            parts += _table(("condition", "met by"), [(f"`{it}`", text) for it, text in keys.CONDITIONS.items()])
    return _page(
        "Keys of a study",
        "Every key of `study.toml`. Each is checked: an unknown one, a missing one, or one of another type or out of "
        "bounds is an error of one line that names its path. Paths are relative to the study's folder and, but for "
        "`interpreter` and `pythonpath`, inside it. [writing-a-study.md](../writing-a-study.md) says how to choose.",
        *parts,
    )


def metrics() -> str:
    """Every figure of a recording: unit, direction, where a plan may compare it, definition."""
    rows = []
    for name, formula in _figures():
        better = plan.better_of(name.replace("QUANTILE", "p50")) or "-"
        rows.append(
            (f"`{name}`", unit_of(name), better, _compared(name, "open"), _compared(name, "closed"), f"`{formula}`")
        )
    return _page(
        "Figures of a recording",
        "`kvqual metrics RECORD` prints them. *open* and *closed* say whether a timing plan may compare the figure in "
        "cells of that mode ([timing-plan.md](../timing-plan.md#family) says why). QUANTILE is one of "
        f"{', '.join(QUANTILES)}, n the number of requests of the population, N the concurrency of a closed loop. "
        "[metrics.md](../metrics.md) defines events, tokens and failures.",
        *_table(("figure", "unit", "better", "open", "closed", "definition"), rows),
    )


def _figures() -> Iterator[tuple[str, str]]:
    """Each figure with its formula; those of a quantity that differ by their quantile alone as one.

    Raises:
        SystemExit: They differ by more.
    """
    seen: dict[str, str] = {}
    for name, formula in FORMULAS.items():
        base, _, quantile = name.rpartition("_")
        if quantile in QUANTILES and base.removeprefix("burst_") in QUANTITIES:
            name, formula = f"{base}_QUANTILE", formula.replace(f"{quantile} by", "QUANTILE by", 1)
        if seen.setdefault(name, formula) != formula:
            raise SystemExit(f"{name}: found formulas that differ by more than the quantile")
    yield from seen.items()


def _compared(name: str, mode: str) -> str:
    name = name.replace("QUANTILE", "p50")
    cell = Cell(
        name="cell", mode="open" if mode == "open" else "closed", arrivals="constant" if mode == "open" else None,
        rate=1.0, seed=None, concurrency=None if mode == "open" else 2, requests=10, canaries=0, max_tokens=2,
        trace=Path("trace.jsonl"),
    )  # fmt: skip
    try:
        plan._primary(cell, name, "")
        plan._population(None, cell, name, "")  # type: ignore[arg-type]  # the rules are not looked at
    except StudyError:
        return "no"
    return "no" if plan.better_of(name) is None else "yes"


def receipt() -> str:
    """Every field of a receipt, as the writer writes it."""
    words = {
        "_type": f"`{statement.STATEMENT_TYPE}`",
        "predicateType": f"`{statement.PREDICATE_TYPE}`",
        "predicate.result": "`PASSED` or `FAILED`",
        "predicate.verdict.outcome": ", ".join(f"`{outcome.value}`" for outcome in Outcome),
        "predicate.null.state": "`passed`, `failed` or `absent`",
        "predicate.details": "the gate's own keys",
        "predicate.requires": "gate = SHA-256 of its receipt",
    }
    rows = [(f"`{path}`", kind, words.get(path, form)) for path, kind, form in _fields(_document(), "")]
    return _page(
        "Fields of a receipt",
        "Every field that a receipt has, and there are no others. [receipts.md](../receipts.md) says what each means, "
        "which must agree, and when a receipt counts.",
        *_table(("field", "type", "form"), rows),
    )


def _document() -> Mapping[str, object]:
    verdict = Verdict(
        gate="nll",
        outcome=Outcome.PASS,
        figure="figure",
        null=Check(passed=True, figure="figure"),
        poison=(Poison(fault="fault", caught=True, figure="figure"),),
    )
    digest = "0" * 64
    scope = Scope(lock=digest, arm="candidate", length=1024, cache_bytes=4096, engine=digest)
    built = statement.build(
        verdict, scope, order=1, evidence={"file": digest}, requires={}, implementation=digest
    )  # fmt: skip
    document: Mapping[str, object] = json.loads(statement.encode(built, attempt=1))
    return document


def _fields(value: Mapping[str, object], path: str) -> Iterator[tuple[str, str, str]]:
    for name, inner in value.items():
        place = f"{path}.{name}" if path else name
        if isinstance(inner, Mapping):
            if inner:
                yield from _fields(inner, place)
            else:
                yield place, "table", ""
        elif isinstance(inner, list):
            tables = [item for item in inner if isinstance(item, Mapping)]
            if tables:
                yield from _fields(tables[0], f"{place}[]")
            else:
                yield place, "list of strings", ""
        elif isinstance(inner, bool):
            yield place, "boolean", ""
        elif isinstance(inner, int):
            yield place, "integer", ""
        else:
            yield place, "string", "SHA-256" if re.fullmatch("[0-9a-f]{64}", str(inner)) else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return ["\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])] if rows else []


def _cell(text: str) -> str:
    """A cell's text: a bar would end it."""
    return text.replace("|", "\\|")


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MARK, *parts]) + "\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "options.md": options,
    "commands.md": commands,
    "exit-status.md": exit_status,
    "study.md": study,
    "receipt.md": receipt,
    "metrics.md": metrics,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or compare them; the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is another")
    check = parser.parse_args(argv).check
    FOLDER.mkdir(exist_ok=True)
    status = 0
    for name, make in PAGES.items():
        path = FOLDER / name
        text = make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"docs/reference/{name}: is not what the code gives, run python scripts/make_reference.py")
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"docs/reference/{name}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
