"""The reference is what the code gives, and the keys of a study in it are exactly those that the loader takes."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT

from pytest_kvqual import cli
from pytest_kvqual._decode import Table
from pytest_kvqual.errors import StudyError
from pytest_kvqual.receipt.statement import parse
from pytest_kvqual.study import keys, load

BASES = (("smollm2-cpu", None), ("qwen3-8b-awq", "awq"))
"""Studies that between them have every table."""
WRONG = {
    "text": 7,
    "integer": 1.5,
    "number": "x",
    "boolean": "x",
    "list of texts": "x",
    "table": "x",
    "list of tables": "x",
}
"""A value of another type than the one that a key has; of any other type, which is a text, 7."""
RIGHT: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "list of texts": list,
    "table": dict,
    "list of tables": list,
}
"""The types that TOML gives; all others are texts."""


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", script().PAGES)
def test_the_reference_is_what_the_code_gives(name: str) -> None:
    """Each file of docs/reference is byte for byte what scripts/make_reference.py writes."""
    text = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert text == script().PAGES[name](), "run python scripts/make_reference.py"


def test_no_file_of_the_reference_is_of_another_hand() -> None:
    """The folder holds these files and no other."""
    assert {path.name for path in (ROOT / "docs" / "reference").iterdir()} == set(script().PAGES)


def test_check_names_a_file_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --check a missing or changed file is named, nothing is written, and the exit status is 1."""
    monkeypatch.setattr(script(), "FOLDER", tmp_path)
    assert script().main([]) == 0
    assert script().main(["--check"]) == 0
    (tmp_path / "study.md").write_text("changed")
    capsys.readouterr()
    assert script().main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("docs/reference/study.md: is not what the code gives")
    assert (tmp_path / "study.md").read_text() == "changed"


def test_every_command_and_option_is_there() -> None:
    """Each command of kvqual has a heading, and each of its options a row."""
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for name, parser in script()._parsers():
        part = text.partition(f"## kvqual {name}\n")[2].partition("\n## ")[0]
        for action in parser._actions:
            for option in action.option_strings[:1]:
                assert option == "-h" or f"| `{option}" in part, (name, option)


def test_stated_exit_statuses_are_those_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each command that can end with 1 the reference says when; a command that says nothing of 1 is none of them."""
    ends_with_one = {name for name, parser in script()._parsers() if "; 1 " in str(parser.epilog)}
    assert ends_with_one == {"doctor", "report", "audit", "verify", "replay", "bound"}
    assert cli.main(["bound", "--lost", "9", "--total", "9", "--limit", "0.5"]) == 1
    assert cli.main(["power", "--total", "9", "--limit", "0.5", "--loss-rate", "1"]) == 0
    assert cli.main(["report", str(tmp_path)]) == 2
    capsys.readouterr()


# -- keys of a study ---------------------------------------------------------------------------------------------------


def document(study: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "studies" / study / load.STUDY_FILE).read_text(encoding="utf-8"))


def loaded(monkeypatch: pytest.MonkeyPatch, study: str, format: str | None, changed: dict[str, Any]) -> None:
    """Load a study whose declaration is another than its file's."""
    with monkeypatch.context() as patch:
        patch.setattr(load, "_toml", lambda path: changed)
        load.load_study(study, format)


def header(path: str) -> str:
    """The header of a table's path, as the keys have it: names in capitals."""
    path = re.sub(r"\[\d+\]", "", path)
    for pattern, name in (
        (r"^(model\.formats|arms|gates)\.[^.]+", r"\1.NAME"),
        (r"^lengths\.[^.]+", "lengths.TOKENS"),
        (r"^timing\.[^.]+", "timing.LENGTH"),
    ):
        path = re.sub(pattern, name, path)
    if not path:
        return ""
    return f"[[{path}]]" if path in ("waivers", "timing.LENGTH.cells", "timing.LENGTH.comparisons") else f"[{path}]"


def test_the_loader_takes_exactly_the_keys_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table that the loader opens, with the keys that it knows there, is a section of keys.py; none else is."""
    seen: dict[str, set[str]] = {}
    original = Table.__init__

    def noted(self: Table, value: object, **given: Any) -> None:
        if given["known"] is not None:
            given["known"] = tuple(given["known"])
            seen.setdefault(header(given.get("path", "")), set()).update(given["known"])
        original(self, value, **given)

    monkeypatch.setattr(Table, "__init__", noted)
    for study, format in BASES:
        loaded(monkeypatch, study, format, document(study))
    assert seen == {section.header: {key.name for key in section.keys} for section in keys.SECTIONS}


def tables(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table of a declaration with its header, free maps of names left out."""
    yield header(path), value
    for name, inner in value.items():
        place = f"{path}.{name}" if path else name
        if isinstance(inner, dict):
            yield from tables(inner, place)
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            for item in inner:
                yield from tables(item, place)


def instances() -> Iterator[tuple[str, str | None, keys.Section, int]]:
    """Each section with a study that has it, and which of the study's tables is the first of it."""
    for section in keys.SECTIONS:
        for study, format in BASES:
            places = [place for place, (found, _) in enumerate(tables(document(study))) if found == section.header]
            if places:
                yield study, format, section, places[0]
                break
        else:
            raise LookupError(section.header)


SECTIONS = list(instances())


def nth(study: str, place: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A fresh declaration, and one of its tables."""
    whole = copy.deepcopy(document(study))
    return whole, list(tables(whole))[place][1]


@pytest.mark.parametrize(
    ("study", "format", "section", "place"), SECTIONS, ids=[section.header or "top" for _, _, section, _ in SECTIONS]
)
def test_types_and_defaults_are_the_loaders(
    study: str, format: str | None, section: keys.Section, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of another type is refused under the key's name; a key without a default is missed, one with is not."""
    for key in section.keys:
        kind = "table" if key.type.startswith("table") else key.type
        whole, table = nth(study, place)
        if key.name in table:
            value = table[key.name]
            assert isinstance(value, RIGHT.get(kind, str)) or (key.type == "table or path" and isinstance(value, str))
            del table[key.name]
            if not key.default:
                with pytest.raises(StudyError, match=key.name):
                    loaded(monkeypatch, study, format, whole)
            else:
                loaded(monkeypatch, study, format, whole)
        whole, table = nth(study, place)
        table[key.name] = 7 if "path" in key.type else WRONG.get(kind, 7)
        with pytest.raises(StudyError, match=key.name):
            loaded(monkeypatch, study, format, whole)


def test_passes_and_conditions_are_the_loaders() -> None:
    """The words of oracle.passes and oracle.conditions in the reference are those that the loader takes."""
    assert tuple(keys.PASSES) == load.PASSES
    assert tuple(keys.CONDITIONS) == load.CONDITIONS


# -- fields of a receipt -----------------------------------------------------------------------------------------------


def test_the_fields_of_a_receipt_are_those_of_a_stored_one() -> None:
    """The reference lists exactly the fields of the golden PASS, which the reader accepts."""
    data = (ROOT / "tests" / "golden" / "receipts" / "pass.json").read_bytes()
    assert parse(data).outcome == "PASS"
    text = (ROOT / "docs" / "reference" / "receipt.md").read_text(encoding="utf-8")
    stated = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    have = {re.sub(r"\[\d+\]", "[]", path) for path in paths(json.loads(data))}
    assert set(stated) == have


def paths(value: Any, path: str = "") -> Iterator[str]:
    """The leaves of a receipt; the free tables count as leaves."""
    if path in ("predicate.details", "predicate.requires"):
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from paths(item, f"{path}[0]")
    else:
        yield path
