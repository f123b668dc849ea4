"""The frozen study of a run directory: lock, declaration, panels (checks 1, 3 and 4)."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Tree, canonical, is_digest, parse, pretty, sha256
from pytest_kvqual.audit.shapes import digest, digests, get, integer, items, shown, table, text

FOLDER: Final = "study"
LOCK: Final = "lock.json"
STUDY: Final = "study.toml"
SCORED: Final = ("retrieval", "recall", "gsm8k")
GSM8K: Final = "gsm8k"
SCHEDULES: Final = ("serial", "waves", "natural")
_LOCK_KEYS = ("schema", "study", "files", "weights", "implementation")
#: There as well where the study has several formats of its model.
_FORMAT = "format"
#: Keys of the declaration of one format that stand in the model's table once it is chosen.
_OF_THE_FORMAT = ("repository", "revision", "files")
_PANEL_KEYS = ("schema", "task", "length", "tokenizer_sha256", "sources", "items")
#: Tasks whose panel serves every length.
_ANY_LENGTH: Final = ("parity", "recall", GSM8K)
_CODE = re.compile(r"arms/[A-Za-z0-9][A-Za-z0-9_.-]*/pythonpath\[\d+\]/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate of the study's order."""

    name: str
    state: str
    timing: bool


@dataclass(kw_only=True, slots=True)
class Frozen:
    """A study as it was frozen: ``study`` is the declaration, ``lock`` the lock, ``sha256`` the lock's digest.

    ``panels`` holds the panel of each task at the length of the audit, ``scales`` the document of each arm that has
    one.
    """

    sha256: str
    lock: dict[str, object]
    study: dict[str, object]
    gates: tuple[Gate, ...]
    arms: Mapping[str, dict[str, object]]
    length: Mapping[str, object]
    panels: dict[str, dict[str, object]] = field(default_factory=dict)
    scales: dict[str, list[object]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The study's name."""
        return text(self.study, "name", STUDY)

    @property
    def controls(self) -> list[str]:
        """The control arms, in the order of the study."""
        return [name for name, arm in self.arms.items() if arm.get("role") == "control"]

    @property
    def waves(self) -> bool:
        """Whether captures are sent in waves."""
        return self.study.get("schedule") == "waves"

    @property
    def implementation(self) -> str:
        """The digest of the implementation that the lock names."""
        return sha256(canonical(self.lock.get("implementation")))

    def part(self, *keys: str) -> dict[str, object]:
        """A table of the declaration; empty where it has none."""
        found: object = self.study
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def waived(self, arm: str, gate: str) -> set[str]:
        """The kinds of finding of a gate that are waived for an arm; of a candidate none."""
        waivers = self.study.get("waivers") if arm in self.controls else None
        return {
            str(waiver.get("finding"))
            for waiver in (waivers if isinstance(waivers, list) else [])
            if isinstance(waiver, dict) and (waiver.get("arm"), waiver.get("gate")) == (arm, gate)
        }


def read(tree: Tree, lock_sha256: str, length: int, report: Report) -> Frozen | None:
    """The study of a lock at a length; None, and findings, where there is none that can be read."""
    _others(tree, lock_sha256, report)
    root = (FOLDER, lock_sha256)
    where = "/".join(root)
    frozen: Frozen | None = None
    with report.reading(4, f"{where}/{LOCK}"):
        lock, files = _lock(tree, lock_sha256, report)
        contents = _files(tree, lock_sha256, files, report)
        if STUDY not in contents:
            raise DamagedError(f"found no {STUDY} as the lock has it, expected the declaration")
        frozen = _declared(contents, lock, lock_sha256, length, f"{where}/{STUDY}", report)
        for task, path in _panel_paths(frozen).items():
            with report.reading(4, f"{where}/{path}"):
                if path not in contents:
                    raise DamagedError(f"found no such file as the lock has it, expected the {task} panel")
                frozen.panels[task] = panel(parse(contents[path]), task, frozen, length, f"{where}/{path}", report)
        for arm, declared in frozen.arms.items():
            scales = declared.get("scales")
            if isinstance(scales, str):
                with report.reading(4, f"{where}/{scales}"):
                    frozen.scales[arm] = _scales(contents.get(_plain(scales)), frozen, f"{where}/{scales}", report)
    return frozen


def _others(tree: Tree, lock_sha256: str, report: Report) -> None:
    if tree.kind(FOLDER) == "none":
        report.find(4, FOLDER, f"found no such folder, expected {FOLDER}/{lock_sha256} with the lock and its files")
        return
    with report.reading(1, FOLDER):
        for entry in tree.names(FOLDER):
            kind = tree.kind(FOLDER, entry)
            if kind != "folder" or not is_digest(entry):
                report.find(1, f"{FOLDER}/{entry}", f"found a stray {kind}, expected folders named by a lock's digest")
            elif entry != lock_sha256:
                report.note(f"{FOLDER}/{entry}: the study of another lock; not audited")


def _lock(tree: Tree, expected: str, report: Report) -> tuple[dict[str, object], dict[str, str]]:
    where = f"{FOLDER}/{expected}/{LOCK}"
    data = tree.read(FOLDER, expected, LOCK)
    report.look(4)
    if sha256(data) != expected:
        report.find(4, where, f"found sha256 {sha256(data)}, expected {expected}, the lock of the receipts")
    document = parse(data)
    several = isinstance(document, dict) and _FORMAT in document
    lock = table(document, "lock", (*_LOCK_KEYS, _FORMAT) if several else _LOCK_KEYS)
    if pretty(document) != data:
        report.find(1, where, "found bytes in another form than a lock is written in")
    report.look(3)
    if lock["schema"] != 1:
        report.find(3, where, f"schema: found {shown(lock['schema'])}, expected 1")
    for key in ("weights", "implementation"):
        digests(lock[key], f"lock.{key}")
    return lock, digests(lock["files"], "lock.files")


def _files(tree: Tree, lock_sha256: str, files: Mapping[str, str], report: Report) -> dict[str, bytes]:
    """The bytes of each study file that has the digest that the lock names."""
    contents: dict[str, bytes] = {}
    root = (FOLDER, lock_sha256)
    for name, expected in files.items():
        where = "/".join((*root, name))
        report.look(4)
        with report.reading(4, where):
            try:
                data = tree.read(*root, *name.split("/"))
            except FileNotFoundError:
                raise DamagedError(f"found no such file, expected sha256 {expected}, as the lock says") from None
            if sha256(data) != expected:
                raise DamagedError(f"found sha256 {sha256(data)}, expected {expected}, as the lock says")
            # Code is held against its digest and never used.
            if not _CODE.match(name) and not name.endswith((".py", ".so")):
                contents[name] = data
    _strays(tree, root, (), set(files) | {LOCK}, report)
    return contents


def _strays(tree: Tree, root: tuple[str, ...], inner: tuple[str, ...], known: set[str], report: Report) -> None:
    with report.reading(1, "/".join((*root, *inner))):
        for entry in tree.names(*root, *inner):
            path = (*inner, entry)
            kind, name = tree.kind(*root, *path), "/".join(path)
            if kind == "folder" and any(other.startswith(f"{name}/") for other in known):
                _strays(tree, root, path, known, report)
            elif kind != "file" or name not in known:
                report.find(1, "/".join((*root, name)), f"found a stray {kind}, expected only what the lock names")


def _declared(
    contents: Mapping[str, bytes],
    lock: dict[str, object],
    lock_sha256: str,
    length: int,
    where: str,
    report: Report,
) -> Frozen:
    try:
        study: dict[str, object] = tomllib.loads(contents[STUDY].decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise DamagedError(f"{STUDY}: found no TOML: {error}") from None
    report.look(3)
    if study.get("schema") != 1:
        report.find(3, where, f"schema: found {shown(study.get('schema'))}, expected 1")
    if lock["study"] != study.get("name"):
        report.find(4, where, f"name: found {shown(study.get('name'))}, expected {shown(lock['study'])}, the lock's")
    study = _of_the_format(study, lock.get(_FORMAT), contents)
    gates = []
    for name, value in table(get(study, "gates", STUDY), "gates").items():
        gate = table(value, f"gates.{name}")
        gates.append(Gate(name=name, state=text(gate, "state", name), timing=gate.get("timing") is True))
    arms = table(get(study, "arms", STUDY), "arms")
    lengths = table(get(study, "lengths", STUDY), "lengths")
    if str(length) not in lengths:
        raise DamagedError(f"{STUDY}: found the lengths {', '.join(lengths)}, expected {length} among them")
    waivers = study.get("waivers")
    for waiver in waivers if isinstance(waivers, list) else []:
        whose = waiver.get("arm") if isinstance(waiver, dict) else None
        declared = arms.get(whose) if isinstance(whose, str) else None
        role = declared.get("role") if isinstance(declared, dict) else None
        if role != "control":
            report.find(4, where, f"waivers: found one for {shown(whose)}, expected waivers for controls alone")
    _ranges(study, where, report)
    weights = table(get(table(get(study, "model", STUDY), "model"), "files", "model"), "model.files")
    if weights != lock["weights"]:
        report.find(4, where, "model.files: found others than the lock's weights, expected the same")
    return Frozen(
        sha256=lock_sha256,
        lock=lock,
        study=study,
        gates=tuple(gates),
        arms={name: table(value, f"arms.{name}") for name, value in arms.items()},
        length=table(lengths[str(length)], f"lengths.{length}"),
    )


def _of_the_format(study: dict[str, object], name: object, contents: Mapping[str, bytes]) -> dict[str, object]:
    """The declaration with what the lock's format says in its place, and the digests of the model's files read.

    Raises:
        DamagedError: The study has formats and the lock names none of them, or the other way round; the file of the
            digests is not there as the lock has it.
    """
    model = table(get(study, "model", STUDY), "model")
    if "formats" in model or name is not None:
        formats = table(get(model, "formats", "model"), "model.formats")
        if not isinstance(name, str) or name not in formats:
            raise DamagedError(f"lock.format: found {shown(name)}, expected one of {', '.join(formats)}")
        chosen = table(formats[name], f"model.formats.{name}")
        flags = chosen.get("flags", [])
        engine = table(get(study, "engine", STUDY), "engine")
        own = engine.get("flags", [])
        study = {
            **study,
            "model": {
                **{key: value for key, value in model.items() if key != "formats"},
                **{key: get(chosen, key, f"model.formats.{name}") for key in _OF_THE_FORMAT},
            },
            "engine": {
                **engine,
                "flags": [*(own if isinstance(own, list) else []), *(flags if isinstance(flags, list) else [])],
            },
        }
        words = {"{format}": name, "{dtype}": text(chosen, "dtype", f"model.formats.{name}")}
        study = table(_substituted(study, words), STUDY)
        model = table(study["model"], "model")
    files = model.get("files")
    if isinstance(files, str):
        if _plain(files) not in contents:
            raise DamagedError(f"model.files: found no {files} as the lock has it, expected the model's digests")
        document = table(parse(contents[_plain(files)]), files, ("schema", "files"))
        study = {**study, "model": {**model, "files": document["files"]}}
    return study


def _substituted(value: object, words: Mapping[str, str]) -> object:
    if isinstance(value, str):
        for word, written in words.items():
            value = value.replace(word, written)
        return value
    if isinstance(value, dict):
        return {key: _substituted(item, words) for key, item in value.items()}
    return [_substituted(item, words) for item in value] if isinstance(value, list) else value


def _ranges(study: Mapping[str, object], where: str, report: Report) -> None:
    """Thresholds beyond which a gate could not fail: each must be a finite number in the range that it is meant for."""
    shares = dict.fromkeys(("floor", "empty_share", "truncated_share", "error_share"), (0.0, 1.0))
    for name in ("nll", *SCORED):
        rules = study.get(name)
        if not isinstance(rules, dict):
            continue
        for key, (least, most) in {**shares, "confidence": (0.5, 1.0), "limit": (0.0, 1.0)}.items():
            if key in rules and not _within(rules[key], least, most, inclusive=key in shares):
                report.find(4, where, f"{name}.{key}: found {shown(rules[key])}, expected {least:g} to {most:g}")
        margin = rules.get("margin_nats", 1.0)
        if not _within(margin, 0.0, math.inf, inclusive=False):
            report.find(4, where, f"{name}.margin_nats: found {shown(margin)}, expected a finite margin above 0")
    if study.get("schedule") not in SCHEDULES:
        report.find(4, where, f"schedule: found {shown(study.get('schedule'))}, expected one of {', '.join(SCHEDULES)}")


def _within(value: object, least: float, most: float, *, inclusive: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= most if inclusive else least < value < most


def _plain(path: str) -> str:
    """A path in the declaration, as the lock names it."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _panel_paths(frozen: Frozen) -> dict[str, str]:
    named = dict(table(frozen.length.get("panels", {}), "panels"))
    named["parity"] = frozen.part("parity").get("panel")
    return {task: _plain(path) for task, path in named.items() if isinstance(path, str)}


def panel(value: object, task: str, frozen: Frozen, length: int, where: str, report: Report) -> dict[str, object]:
    """A panel, held against what the study declares of it (checks 3, 4 and, of gsm8k's, 14).

    Raises:
        DamagedError: It has another form.
    """
    check = 14 if task == GSM8K else 4
    outer = table(value, "panel", _PANEL_KEYS)
    report.look(3)
    report.look(check)
    if outer["schema"] != 1:
        report.find(3, where, f"schema: found {shown(outer['schema'])}, expected 1")
    expected_length = None if task in _ANY_LENGTH else length
    tokenizer = frozen.part("model", "files").get("tokenizer.json")
    for key, expected in (("task", task), ("length", expected_length)):
        if outer[key] != expected:
            report.find(check, where, f"{key}: found {shown(outer[key])}, expected {shown(expected)}")
    found = digest(outer, "tokenizer_sha256", "panel")
    if tokenizer is not None and found != tokenizer:
        report.find(check, where, f"tokenizer_sha256: found {found}, expected {shown(tokenizer)}, the model's")
    seen: set[str] = set()
    asked: dict[tuple[int, ...], str] = {}
    for place, item in enumerate(items(outer, "items", "panel")):
        name = _item(item, task, length, f"items[{place}]", frozen, report, where, check)
        if name in seen:
            report.find(check, where, f"items[{place}].id: found {name!r} again, expected each id once")
        seen.add(name)
        # One answer that is counted as several makes a bound of fewer questions than it says.
        first = asked.setdefault(tuple(tokens(table(item, "panel"), "prompt", "panel")), name)
        if task in SCORED and task != GSM8K and first != name:
            report.find(check, where, f"items[{place}].prompt: found that of {first!r}, expected each question once")
    expected_items = _items_of(task, frozen)
    if expected_items is not None and len(seen) != expected_items:
        report.find(check, where, f"items: found {len(seen)}, expected {shown(expected_items)}, the study's number")
    return outer


def _items_of(task: str, frozen: Frozen) -> object:
    """How many items the study declares; None where it does not say."""
    if task in SCORED:
        questions = frozen.length.get("questions")
        return questions.get(task) if isinstance(questions, dict) else None
    key = {"nll": "documents", "parity": "prompts"}.get(task)
    return None if key is None else frozen.part(task).get(key)


def _item(
    value: object, task: str, length: int, at: str, frozen: Frozen, report: Report, where: str, check: int
) -> str:
    item = table(value, at)
    name = text(item, "id", at)
    prompt = tokens(item, "prompt", at)
    rules = frozen.part(task)
    if task == "nll":
        targets, steps = tokens(item, "targets", at), rules.get("decode_steps")
        if len(prompt) != length - 1:
            report.find(check, where, f"{at}.prompt: found {len(prompt)} tokens, expected {length - 1}")
        if type(steps) is int and len(targets) != steps + 1:
            report.find(check, where, f"{at}.targets: found {len(targets)} tokens, expected {steps + 1}")
        return name
    limit, declared = integer(item, "max_tokens", at, minimum=1), rules.get("max_tokens")
    if task != "oracle" and limit != declared:
        report.find(check, where, f"{at}.max_tokens: found {limit}, expected {shown(declared)}, the study's")
    if task in SCORED:
        text(item, "expected", at)
        text(item, "grade", at)
    return name


def tokens(outer: Mapping[str, object], key: str, where: str) -> list[int]:
    """A list of token ids, at least one.

    Raises:
        DamagedError: There is none.
    """
    values = items(outer, key, where)
    found = [value for value in values if type(value) is int and value >= 0]
    if not values or len(found) != len(values):
        raise DamagedError(f"{where}.{key}: found something else than token ids, expected at least one of them")
    return found


def _scales(data: bytes | None, frozen: Frozen, where: str, report: Report) -> list[object]:
    if data is None:
        raise DamagedError("found no such file as the lock has it, expected the scales")
    document = table(parse(data), "scales", ("schema", "v_scale"))
    report.look(3)
    if document["schema"] != 1:
        report.find(3, where, f"schema: found {shown(document['schema'])}, expected 1")
    scales = items(document, "v_scale", "scales")
    if len(scales) != frozen.part("model").get("layers"):
        report.find(4, where, f"v_scale: found {len(scales)} scales, expected one per layer")
    return scales
