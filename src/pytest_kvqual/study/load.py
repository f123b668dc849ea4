"""Read a study's declaration: TOML in, frozen records out. Nothing is filled in that a study must say itself.

History of the format:
    1: arms, lengths, panels, and the rules of identity, the oracle gates, dispatch, determinism, parity, nll, the
       scored tasks, fidelity and the timing plans.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast

from pytest_kvqual import _places
from pytest_kvqual._decode import Table, nearest, one_line, parse_json
from pytest_kvqual.errors import StudyError
from pytest_kvqual.study import keys
from pytest_kvqual.study.model import (
    Arm,
    Cell,
    Comparison,
    Determinism,
    Engine,
    FidelityRules,
    GatePlan,
    GateState,
    Gsm8kSource,
    Length,
    Model,
    NllRules,
    OracleRules,
    ParityRules,
    PreservationRules,
    Role,
    Schedule,
    Selection,
    Study,
    TimingRules,
    Waiver,
)

__all__ = [
    "CONDITIONS",
    "GATES",
    "ORACLE_GATES",
    "PASSES",
    "SCORED_TASKS",
    "TIMING_GATES",
    "Selection",
    "argument",
    "find_study",
    "is_shipped",
    "load_study",
    "require_own",
    "require_prepared",
    "select",
    "studies_folder",
]

SCHEMA: Final = 1
STUDY_FILE: Final = "study.toml"

#: Every gate that a study may list, in the only order in which it may list them.
GATES: Final = (
    "identity", "dispatch", "stale-maps", "routing", "shifted-outputs", "placement", "replay", "determinism", "parity",
    "nll", "retrieval", "gsm8k", "recall", "fidelity", "trial", "superiority",
)  # fmt: skip
#: The gates that read the oracle's records, and whose findings have kinds that a control's waiver can name.
ORACLE_GATES: Final = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")
#: The passes of the oracle panel that a study may ask for.
PASSES: Final = tuple(keys.PASSES)
ROTATED: Final = "rotated"
#: The conditions of the workload that the oracle counts, and that a study may insist on.
CONDITIONS: Final = tuple(keys.CONDITIONS)
#: Bounds of a timing plan: what nobody can run in a lifetime is a slip of the pen.
_MOST_BLOCKS, _MOST_REQUESTS, _LONGEST_S, _MOST_TTFT_MS = 1_000, 1_000_000, 86_400.0, 60_000.0
_WARM_UP = "warm-up"
#: The gates that time; each must say ``timing = true``.
TIMING_GATES: Final = ("fidelity", "trial", "superiority")
#: The timing gate of a run with --block, and that of a run without: each rests on the other's work, never on its own.
WITH_BLOCK, WITHOUT_BLOCK = "trial", "superiority"
#: The gates whose questions have a right answer each, under the preservation rule.
SCORED_TASKS: Final = ("retrieval", "gsm8k", "recall")
#: A study that times lists one of these, or both: one question-answering task that its model can do.
PRESERVATION_TASKS: Final = ("gsm8k", "recall")

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_NAME_FORM = "a name of letters, digits, '_', '.' and '-' that begins with a letter or digit"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
_DTYPE = r"torch\.[a-z][a-z0-9_]*"
_KIND = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
_TOP = keys.names_of("")
_MODEL = keys.names_of("[model]")
_FORMAT = keys.names_of("[model.formats.NAME]")
_DTYPES = ("float16", "bfloat16")
_COMMIT = r"[0-9a-f]{40}"
_ENGINE = keys.names_of("[engine]")
_ARM = keys.names_of("[arms.NAME]")
_LENGTH = keys.names_of("[lengths.TOKENS]")
_PANELS = keys.names_of("[lengths.TOKENS.panels]")
#: gsm8k has none: its panel is built from the test set when it is asked for.
_NEEDS_PANEL = {**dict.fromkeys(ORACLE_GATES, "oracle"), **{name: name for name in ("nll", "retrieval", "recall")}}
_SOURCE = keys.names_of("[gsm8k.source]")
_ORACLE = keys.names_of("[oracle]")
_PARITY = keys.names_of("[parity]")
_NLL = keys.names_of("[nll]")
_FIDELITY = keys.names_of("[fidelity]")
_TIMING = keys.names_of("[timing.LENGTH]")
_CELL = keys.names_of("[[timing.LENGTH.cells]]")
_COMPARISON = keys.names_of("[[timing.LENGTH.comparisons]]")
_GATE = keys.names_of("[gates.NAME]")
_WAIVER = keys.names_of("[[waivers]]")


def studies_folder() -> Path:
    """The folder of the named studies: in the installed package, or at the root of the checkout that it runs from."""
    return _places.folder(_places.STUDIES)


def find_study(name_or_path: str) -> Path:
    """The ``study.toml`` of a study.

    Args:
        name_or_path: A name (no separator in it) is looked up in :func:`studies_folder` first. Anything else, and a
            name that is not there, is a path to a study's folder or to its ``study.toml``.

    Raises:
        StudyError: No study is there; names the studies that are.
    """
    if not name_or_path:
        raise StudyError("found an empty study name, expected a name or a path", advice=_names_advice())
    bare = (
        name_or_path not in (".", "..")
        and not name_or_path.endswith(".toml")
        and not re.search(r"[/\\]|^~", name_or_path)
    )
    named = studies_folder() / name_or_path / STUDY_FILE
    if bare and named.is_file():
        return named
    path = Path(os.path.expanduser(name_or_path))  # noqa: PTH111 (as in _absolute)
    if path.is_dir():
        path /= STUDY_FILE
    if not path.is_file():
        looked = f"{named} or {path.absolute()}" if bare else str(path.absolute())
        advice = nearest(name_or_path, _names()) if bare else ""
        raise StudyError(
            one_line(f"found no study '{name_or_path}', expected {looked}"), advice=advice or _names_advice()
        )
    return Path(os.path.normpath(path.absolute()))


def load_study(name_or_path: str, format: str | None = None) -> Study:
    """The study of that name or path, decoded strictly, for one format of its model.

    Panels and scales must exist; :mod:`pytest_kvqual.study.panels` reads them. Of a study whose model names a
    repository, or a file of its digests, they may be missing (``Study.missing``), for :func:`require_prepared` to
    refuse.

    Args:
        name_or_path: As :func:`find_study` takes it.
        format: One of ``[model.formats]``; None for the first of them, or for the only format of a model without such
            a table.

    Raises:
        StudyError: No such study; TOML that does not parse (with its line); a key that is unknown or missing; a value
            of the wrong type, out of range, or in contradiction to another (with its path); a file that is not there;
            a format that the model does not have.
    """
    path = find_study(name_or_path)
    document, chosen, formats = _of_the_format(_toml(path), str(path), format)
    study = _study(Table(document, origin=str(path), error=StudyError, known=_TOP), path.parent)
    return replace(study, model=replace(study.model, format=chosen, formats=formats))


def require_prepared(study: Study) -> None:
    """Refuse a study of which files are missing that are made from its model.

    Raises:
        StudyError: One is; names them all, and the command that makes them.
    """
    if not study.missing:
        return
    names = ", ".join(path.relative_to(study.directory).as_posix() for path in study.missing)
    first = f"`kvqual copy {study.directory.name} FOLDER`, then " if is_shipped(study) else ""
    mine = _of_format(study, "FOLDER") if first else argument(study)
    scales = {arm.scales for arm in study.arms.values()}
    more = " --calibrate" if all(path in scales for path in study.missing) else ""
    raise StudyError(
        f"study {study.name} is not prepared: found no {names}, expected {'it' if len(study.missing) == 1 else 'them'}",
        advice=f"run {first}`kvqual prepare {mine} --model DIR{more}` with the folder of "
        + (f"{study.model.repository} at {study.model.revision}" if study.model.repository else study.model.name),
    )


def is_shipped(study: Study) -> bool:
    """Whether the study lies in an installed package: what is written there is lost with the next upgrade."""
    return _places.installed() and study.directory.is_relative_to(studies_folder())


def require_own(study: Study) -> None:
    """Refuse to write into a study of an installed package.

    Raises:
        StudyError: It is one; names the command that copies it.
    """
    if is_shipped(study):
        raise StudyError(
            f"study {study.name}: found it in the installed package at {study.directory}, expected a study of your own "
            "to write to",
            advice=f"run `kvqual copy {study.directory.name} FOLDER` and give FOLDER for the study",
        )


def argument(study: Study) -> str:
    """What to type for this study: its folder's name where that finds it, its path otherwise; and its format."""
    return _of_format(
        study, study.directory.name if study.directory.parent == studies_folder() else str(study.directory)
    )


def _of_format(study: Study, name: str) -> str:
    return name if study.model.format is None else f"{name} --format {study.model.format}"


def select(study: Study, *, arm: str, length: int, cache_bytes: int | None) -> Selection:
    """One arm of the study at one length, with the study's pool or the given one.

    Args:
        study: The study.
        arm: The name of any of its arms, a control too.
        length: A context length of the study, in tokens.
        cache_bytes: The KV pool's size in bytes; None for the size that the study declares at this length.

    Raises:
        StudyError: An arm or a length that the study lacks (names those it has), or a pool that is no positive size.
    """
    if arm not in study.arms:
        raise StudyError(
            one_line(f"found no arm '{arm}' in study {study.name}, expected one of {', '.join(study.arms)}"),
            advice=nearest(arm, study.arms) or f"choose one, or declare [arms.{arm}] in {study.directory / STUDY_FILE}",
        )
    if type(length) is not int or length not in study.lengths:
        raise StudyError(
            f"found no length {length} in study {study.name}, expected one of {', '.join(map(str, study.lengths))}",
            advice=f"choose one, or declare [lengths.{length}] with panels of its own",
        )
    declared = study.lengths[length]
    size = declared.cache_bytes if cache_bytes is None else cache_bytes
    if type(size) is not int or size < 1:
        raise StudyError(
            f"found {size!r} cache bytes, expected a positive number of bytes",
            advice=f"study {study.name} declares {declared.cache_bytes} at length {length}",
        )
    return Selection(study=study, arm=study.arms[arm], length=replace(declared, cache_bytes=size), cache_bytes=size)


def _of_the_format(
    document: dict[str, object], origin: str, wanted: str | None
) -> tuple[dict[str, object], str | None, tuple[str, ...]]:
    """The declaration for one format of the model: what ``[model.formats.NAME]`` says, where it belongs.

    ``{format}`` and ``{dtype}`` in any text stand for the format's name and its dtype.
    """
    model = document.get("model")
    if not isinstance(model, dict) or "formats" not in model:
        if wanted is not None:
            raise StudyError(
                one_line(f"{origin}: found --format {wanted}, expected none: its model has one format"),
            )
        return document, None, ()
    top = Table(document, origin=origin, error=StudyError, known=_TOP)
    outer = top.table("model", known=_MODEL)
    tables = outer.named_tables("formats", known=_FORMAT)
    if not tables:
        outer.fail("formats", "no format", "at least one, or no such table")
    for key in ("repository", "revision", "files"):
        if outer.has(key):
            outer.fail(key, "one for every format", "one in each of [model.formats]")
    name = next(iter(tables)) if wanted is None else wanted
    if name not in tables:
        raise StudyError(
            one_line(f"{origin}: found --format {name}, expected one of {', '.join(tables)}"),
            advice=nearest(name, tables),
        )
    for other, table in tables.items():
        if not re.fullmatch(_NAME, other):
            outer.fail("formats", f"the format '{other}'", _NAME_FORM)
        table.string("repository")
        table.string("files")
    table = tables[name]
    words = {"{format}": name, "{dtype}": table.choice("dtype", _DTYPES)}
    flags = table.strings("flags", ())
    engine = document.get("engine")
    merged = {
        **document,
        "model": {
            **{key: value for key, value in model.items() if key != "formats"},
            **{key: table.raw(key) for key in ("repository", "revision", "files")},
        },
    }
    if isinstance(engine, dict) and flags:
        merged["engine"] = {**engine, "flags": [*top.table("engine", known=_ENGINE).strings("flags", ()), *flags]}
    return {key: _substituted(value, words) for key, value in merged.items()}, name, tuple(tables)


def _substituted(value: object, words: Mapping[str, str]) -> object:
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if isinstance(value, dict):
        return {key: _substituted(item, words) for key, item in value.items()}
    return [_substituted(item, words) for item in value] if isinstance(value, list) else value


def _names() -> list[str]:
    return sorted(path.parent.name for path in studies_folder().glob(f"*/{STUDY_FILE}"))


def _names_advice() -> str:
    names = _names()
    return f"the studies in {studies_folder()} are: {', '.join(names)}" if names else f"give the path of a {STUDY_FILE}"


def _toml(path: Path) -> dict[str, object]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror}", advice="check the file's permissions") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise StudyError(
            f"{path}, line {line}: found the byte 0x{data[error.start]:02x}, expected UTF-8", advice="save it as UTF-8"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found, place = _reason(str(error), text)
        raise StudyError(
            one_line(f"{path}, line {place}: found {found}, expected TOML"), advice="mend this line"
        ) from None
    except RecursionError:
        raise StudyError(f"{path}: found nesting beyond the parser's limit, expected a study") from None


def _reason(message: str, text: str) -> tuple[str, str]:
    """The parser's reason and the line it gives, as ``LINE, column COLUMN``."""
    match = re.fullmatch(r"(?s)(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    if match is None:
        return f"'{message}'", "unknown"
    reason = f"'{match[1]}'"
    if match[2] is None:
        return reason, f"{len(text.splitlines()) or 1} (the end)"
    line = f"{match[2]}, column {match[3]}"
    # The parser reports a table that is declared twice by its path; the header's own line says more to a reader.
    if "twice" in match[1]:
        reason += f" in '{text.splitlines()[int(match[2]) - 1].strip()}'"
    return reason, line


def _study(top: Table, directory: Path) -> Study:
    schema = top.integer("schema")
    if schema != SCHEMA:
        top.fail("schema", str(schema), str(SCHEMA), advice="use the version of pytest-kvqual that the study is for")
    engine = _engine(top.table("engine", known=_ENGINE))
    model_table = top.table("model", known=_MODEL)
    missing: list[Path] = []
    prepared = model_table.has("repository") or (model_table.has("files") and isinstance(model_table.raw("files"), str))
    place = _Folder(path=directory, missing=missing if prepared else None)
    model = _model(model_table, place)
    arms_table = top.named_tables("arms", known=_ARM)
    arms = {name: _arm(top, table, name, place) for name, table in arms_table.items()}
    if not any(arm.role == "control" for arm in arms.values()):
        top.fail("arms", 'no arm with role = "control"', "at least one: it is each gate's null")
    gates = _gates(top)
    nll = _nll(top.table("nll", known=_NLL))
    lengths = _lengths(top, place, engine, nll, gates)
    sections = _sections(top, gates)
    determinism = cast(Determinism, top.choice("determinism", ("order-invariant", "rotation-diagnostic")))
    oracle = _oracle(top.table("oracle", known=_ORACLE))
    if determinism == "rotation-diagnostic" and ROTATED not in oracle.passes:
        # Under this policy answers may follow the order, so the oracles must have seen every order.
        top.fail("oracle.passes", f"no pass '{ROTATED}'", f'one, with determinism = "{determinism}"')
    return Study(
        name=top.string("name", pattern=_NAME, form=_NAME_FORM),
        directory=directory,
        platform="cpu" if top.choice("platform", ("cpu", "gpu")) == "cpu" else "gpu",
        model=model,
        engine=engine,
        arms=arms,
        lengths=lengths,
        schedule=cast(Schedule, top.choice("schedule", ("serial", "waves", "natural"))),
        determinism=determinism,
        gates=gates,
        oracle=oracle,
        parity=_parity(top.table("parity", known=_PARITY), place),
        nll=nll,
        preservation={name: _preservation(table, name, lengths) for name, table in sections.items()},
        gsm8k_source=_gsm8k_source(sections["gsm8k"], directory) if "gsm8k" in sections else None,
        fidelity=_fidelity(top, gates),
        timing=_timing(top, gates, arms, lengths, place),
        waivers=_waivers(top, arms),
        missing=tuple(dict.fromkeys(missing)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Folder:
    """The study's folder; ``missing`` takes the files that may be made later, and is None where none may be."""

    path: Path
    missing: list[Path] | None


def _model(table: Table, directory: _Folder) -> Model:
    query_heads = table.integer("query_heads", minimum=1)
    kv_heads = table.integer("kv_heads", minimum=1)
    if query_heads % kv_heads:
        table.fail("query_heads", f"{query_heads} query heads", f"a multiple of the {kv_heads} KV heads")
    files, files_path = _model_files(table, directory)
    if table.has("repository") is not table.has("revision"):
        table.fail("repository", "a repository or a revision alone", "both, or neither")
    return Model(
        name=table.string("name", pattern=_NAME, form=_NAME_FORM),
        source=table.string("source"),
        files=files,
        layers=table.integer("layers", minimum=1),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=table.integer("head_size", minimum=1),
        vocabulary=table.integer("vocabulary", minimum=1),
        repository=table.optional_string("repository"),
        revision=(
            table.string("revision", pattern=_COMMIT, form="a commit of 40 hexadecimal digits")
            if table.has("revision")
            else None
        ),
        files_path=files_path,
    )


def _model_files(table: Table, directory: _Folder) -> tuple[dict[str, str], Path | None]:
    """The digests of the model's files, and the file that they come from where it is not the declaration."""
    path = None
    if isinstance(table.raw("files"), str):
        path = _file(table, "files", table.string("files"), directory, "the digests of the model's files")
        if not path.is_file():
            return {}, path
        origin = str(path)
        value = parse_json(path.read_bytes(), origin=origin, error=StudyError)
        table = Table(value, origin=origin, error=StudyError, known=("schema", "files"))
        if table.integer("schema") != SCHEMA:
            table.fail("schema", str(table.integer("schema")), str(SCHEMA))
    files = table.sha256_map("files")
    if not files:
        table.fail("files", "no files", "the SHA-256 of each file of the model's folder", advice="run `kvqual model`")
    for name in files:
        if name in (".", "..") or "/" in name or "\\" in name:
            table.fail(f"files.{name}", f"the file name '{name}'", "a name without a folder")
    return files, path


def _engine(table: Table) -> Engine:
    environment = _environment(table)
    unset = table.strings("unset", (), pattern=_VARIABLE, form="the name of an environment variable")
    for index, name in enumerate(unset):
        if name in environment:
            table.fail(f"unset[{index}]", f"'{name}'", "a variable that 'environment' does not set")
    boot = table.number("boot_timeout_s")
    request = table.number("request_timeout_s")
    for key, limit in (("boot_timeout_s", boot), ("request_timeout_s", request)):
        if not limit > 0:
            table.fail(key, f"{limit}", "a time above 0 seconds")
    return Engine(
        distribution=table.string("distribution"),
        version=table.string("version"),
        block_size=table.integer("block_size", minimum=1),
        max_num_seqs=table.integer("max_num_seqs", minimum=1),
        max_num_batched_tokens=table.integer("max_num_batched_tokens", minimum=1),
        tensor_parallel_size=(
            table.integer("tensor_parallel_size", minimum=1) if table.has("tensor_parallel_size") else 1
        ),
        flags=table.strings("flags", ()),
        environment=environment,
        unset=unset,
        boot_timeout_s=boot,
        request_timeout_s=request,
    )


def _environment(table: Table) -> dict[str, str]:
    if not table.has("environment"):
        return {}
    inner = table.table("environment", known=None)
    for name in inner.names():
        if not re.fullmatch(_VARIABLE, name):
            table.fail("environment", f"the variable name '{name}'", "letters, digits and '_'")
    return {name: inner.text(name) for name in inner.names()}


def _arm(top: Table, table: Table, name: str, directory: _Folder) -> Arm:
    if not re.fullmatch(_NAME, name):
        top.fail("arms", f"the arm name '{name}'", _NAME_FORM)
    scales = table.optional_string("scales")
    return Arm(
        name=name,
        role=cast(Role, table.choice("role", ("candidate", "control"))),
        attention_backend=table.string("attention_backend"),
        kv_format=table.string("kv_format", pattern=_NAME, form=_NAME_FORM),
        interpreter=_interpreter(table, directory.path),
        pythonpath=_pythonpath(table, directory.path),
        flags=table.strings("flags", ()),
        environment=_environment(table),
        before_load=table.strings("before_load", (), pattern=_FUNCTION, form="module:function"),
        after_init=table.strings("after_init", (), pattern=_FUNCTION, form="module:function"),
        scales=None if scales is None else _file(table, "scales", scales, directory, "the scales file"),
        kernels=table.strings("kernels", ()),
        kernels_absent=table.strings("kernels_absent", ()),
        cache_dtype=(
            table.string("cache_dtype", pattern=_DTYPE, form="a torch dtype, such as torch.uint8")
            if table.has("cache_dtype")
            else None
        ),
        installed=table.boolean("installed", False),
    )


def _interpreter(table: Table, directory: Path) -> Path | None:
    name = table.optional_string("interpreter")
    if name is None:
        return None
    path = _absolute(name, directory)
    if not path.is_file() or not os.access(path, os.X_OK):
        table.fail("interpreter", f"no program {path}", "a Python interpreter", advice="create the arm's environment")
    return path


def _pythonpath(table: Table, directory: Path) -> tuple[Path, ...]:
    paths = []
    for index, name in enumerate(table.strings("pythonpath", ())):
        path = _absolute(name, directory)
        if not path.is_dir():
            table.fail(f"pythonpath[{index}]", f"no folder {path}", "a folder to import from")
        paths.append(path)
    return tuple(paths)


def _absolute(name: str, directory: Path) -> Path:
    # Path.expanduser raises where nobody has that name.
    return Path(os.path.normpath(directory / os.path.expanduser(name)))  # noqa: PTH111


def _file(table: Table, key: str, name: str, directory: _Folder, what: str) -> Path:
    """A file of the study's own folder, so that the folder is whole wherever it is copied to."""
    path = _absolute(name, directory.path)
    if not path.is_relative_to(directory.path):
        table.fail(key, f"'{name}'", f"a path inside {directory.path}", advice="copy the file into the study's folder")
    if not path.is_file():
        if directory.missing is not None and not path.exists():
            directory.missing.append(path)
            return path
        table.fail(key, f"no file {path}", what, advice="restore or generate it")
    return path


def _lengths(
    top: Table, directory: _Folder, engine: Engine, nll: NllRules, gates: tuple[GatePlan, ...]
) -> dict[int, Length]:
    tables = top.named_tables("lengths", known=_LENGTH)
    if not tables:
        top.fail("lengths", "no length", "at least one")
    needed = {_NEEDS_PANEL[plan.name] for plan in gates if plan.state == "required" and plan.name in _NEEDS_PANEL}
    lengths = {}
    for name, table in tables.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", name) or int(name) < 2:
            top.fail("lengths", f"the length '{name}'", "a number of tokens of at least 2, such as [lengths.1024]")
        tokens = int(name)
        max_model_len = table.integer("max_model_len", minimum=tokens)
        if max_model_len < tokens + nll.decode_steps:
            table.fail(
                "max_model_len", str(max_model_len),
                f"at least {tokens + nll.decode_steps}: {tokens} tokens and {nll.decode_steps} decode steps",
            )  # fmt: skip
        panels_table = table.table("panels", known=_PANELS)
        for task in sorted(needed):
            panels_table.string(task)
        scored = [plan.name for plan in gates if plan.state == "required" and plan.name in SCORED_TASKS]
        questions = table.table("questions", known=scored) if scored or table.has("questions") else None
        lengths[tokens] = Length(
            tokens=tokens,
            cache_bytes=table.integer("cache_bytes", minimum=1),
            max_model_len=max_model_len,
            wave_size=table.integer("wave_size", minimum=1, maximum=engine.max_num_seqs),
            panels={
                task: _file(panels_table, task, panels_table.string(task), directory, f"the {task} panel")
                for task in panels_table.names()
            },
            questions={task: questions.integer(task, minimum=1) for task in scored} if questions is not None else {},
        )
    return lengths


def _sections(top: Table, gates: tuple[GatePlan, ...]) -> dict[str, Table]:
    """The section of each scored task that is required; one of a gate that is not decides nothing, and is refused."""
    required = [plan.name for plan in gates if plan.state == "required" and plan.name in SCORED_TASKS]
    for name in SCORED_TASKS:
        if top.has(name) and name not in required:
            top.fail(name, "rules of a gate that is not required", "none", advice=f"list [gates.{name}] as required")
    return {name: top.table(name, known=keys.names_of(f"[{name}]")) for name in required}


def _preservation(table: Table, name: str, lengths: dict[int, Length]) -> PreservationRules:
    limit = table.number("limit")
    if not 0 < limit < 1:
        table.fail("limit", f"{limit}", "a loss probability between 0 and 1", advice="5 % is 0.05")
    confidence = table.number("confidence")
    if not 0.5 < confidence < 1:
        table.fail("confidence", f"{confidence}", "a one-sided confidence between 0.5 and 1", advice="95 % is 0.95")
    fewest = min(length.questions[name] for length in lengths.values())
    reasoning = table.strings("reasoning")
    if len(reasoning) not in (0, 2) or "" in reasoning:
        table.fail("reasoning", f"{len(reasoning)} markers", "none, or the one that begins it and the one that ends it")
    if reasoning and (reasoning[0] in reasoning[1] or reasoning[1] in reasoning[0]):
        # Where one is found the other is too, so a text could be read in two ways.
        table.fail(
            "reasoning", f"the markers '{reasoning[0]}' and '{reasoning[1]}'", "two of which none is in the other"
        )
    return PreservationRules(
        limit=limit,
        confidence=confidence,
        floor=table.number("floor", minimum=0.0, maximum=1.0),
        max_tokens=table.integer("max_tokens", minimum=1),
        stop=_markers(table, "stop"),
        run_on=_markers(table, "run_on"),
        reasoning=(reasoning[0], reasoning[1]) if reasoning else None,
        empty_share=table.number("empty_share", minimum=0.0, maximum=1.0),
        truncated_share=table.number("truncated_share", minimum=0.0, maximum=1.0),
        error_share=table.number("error_share", minimum=0.0, maximum=1.0),
        poison_questions=table.integer("poison_questions", minimum=1, maximum=fewest),
    )


def _markers(table: Table, key: str) -> tuple[str, ...]:
    markers = table.strings(key)
    for index, marker in enumerate(markers):
        if not marker:
            table.fail(f"{key}[{index}]", "an empty text", "the text at which an answer ends")
    return markers


def _gsm8k_source(table: Table, directory: Path) -> Gsm8kSource:
    source = table.table("source", known=_SOURCE)
    return Gsm8kSource(
        sha256=source.sha256("sha256"),
        repository=source.string("repository"),
        revision=source.string("revision", pattern=r"[0-9a-f]{40}", form="a commit of 40 hexadecimal digits"),
        file=source.string("file"),
        shots=_file(
            table, "shots", table.string("shots"), _Folder(path=directory, missing=None), "the worked questions"
        ),
    )


def _gates(top: Table) -> tuple[GatePlan, ...]:
    outer = top.table("gates", known=None)
    names = outer.names()
    for name in names:
        if name not in GATES:
            top.fail("gates", f"the unknown gate '{name}'", f"one of {', '.join(GATES)}", advice=nearest(name, GATES))
    ordered = tuple(sorted(names, key=GATES.index))
    for found, expected in zip(names, ordered, strict=True):
        if found != expected:
            top.fail(
                "gates", f"the gate '{found}' where '{expected}' belongs", f"the order {', '.join(ordered)}",
                advice="each gate rests on those above it: move the tables into this order",
            )  # fmt: skip
    if not names:
        top.fail("gates", "no gate", "at least one")
    plans = []
    for name in names:
        table = outer.table(name, known=_GATE)
        timing = table.boolean("timing", False)
        if timing is not (name in TIMING_GATES):
            table.fail("timing", str(timing).lower(), f"{str(not timing).lower()} for the gate '{name}'")
        plans.append(
            GatePlan(name=name, state=cast(GateState, table.choice("state", ("required", "planned"))), timing=timing)
        )
    if any(plan.timing for plan in plans):
        # A gate that is left out would open the way to timing without a trace of it in the study's order.
        left_out = ("trial", "superiority", *PRESERVATION_TASKS)
        missing = [gate for gate in GATES if gate not in names and gate not in left_out]
        if not any(task in names for task in PRESERVATION_TASKS):
            missing.append(" or ".join(PRESERVATION_TASKS))
        if missing:
            top.fail(
                "gates", f"a timing gate without {', '.join(missing)} above it", "every gate before timing",
                advice='list each, with state = "planned" where it is not there yet',
            )  # fmt: skip
    return tuple(plans)


def _oracle(table: Table) -> OracleRules:
    return OracleRules(
        passes=_words(table, "passes", PASSES),
        conditions=_words(table, "conditions", CONDITIONS),
        minimum_cells=table.integer("minimum_cells", minimum=1),
        minimum_rows=table.integer("minimum_rows", minimum=1),
        ambiguous_rows=table.number("ambiguous_rows", minimum=0.0, maximum=1.0),
        short_prompt_tokens=table.integer("short_prompt_tokens", minimum=1),
        poison_prompt_tokens=table.integer("poison_prompt_tokens", minimum=1),
        free_blocks=table.integer("free_blocks", minimum=1),
        rotation=table.integer("rotation", minimum=1),
    )


def _words(table: Table, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """A list of known words, at least one and each once."""
    words = table.strings(key)
    if not words:
        table.fail(key, "an empty list", f"at least one of {', '.join(known)}")
    for index, word in enumerate(words):
        place = f"{key}[{index}]"
        if word not in known:
            table.fail(place, f"'{word}'", f"one of {', '.join(known)}", advice=nearest(word, known))
        if word in words[:index]:
            table.fail(place, f"'{word}' a second time", "each once", advice="remove it")
    return words


def _fidelity(top: Table, gates: tuple[GatePlan, ...]) -> FidelityRules | None:
    required = any(plan.name == "fidelity" and plan.state == "required" for plan in gates)
    if top.has("fidelity") and not required:
        top.fail("fidelity", "rules of a gate that is not required", "none", advice="list [gates.fidelity] as required")
    if not required:
        return None
    table = top.table("fidelity", known=_FIDELITY)
    return FidelityRules(
        rate=_above_zero(table, "rate", "requests/s"),
        concurrency=table.integer("concurrency", minimum=1),
        requests=table.integer("requests", minimum=2),
        tokens=table.integer("tokens", minimum=2),
        lateness_p99_ms=_above_zero(table, "lateness_p99_ms", "ms"),
        ttft_error_p50_ms=_above_zero(table, "ttft_error_p50_ms", "ms"),
        ttft_error_p99_ms=_above_zero(table, "ttft_error_p99_ms", "ms"),
        tpot_error_p99_ms=_above_zero(table, "tpot_error_p99_ms", "ms"),
    )


def _above_zero(table: Table, key: str, unit: str) -> float:
    value = table.number(key)
    if not value > 0:
        table.fail(key, f"{value}", f"a number above 0 {unit}")
    return value


def _timing(
    top: Table, gates: tuple[GatePlan, ...], arms: dict[str, Arm], lengths: dict[int, Length], directory: _Folder
) -> dict[int, TimingRules]:
    timed = [plan.name for plan in gates if plan.name in ("trial", "superiority") and plan.state == "required"]
    if top.has("timing") and not timed:
        top.fail("timing", "a timing plan without a gate that times", "none", advice="list [gates.trial] as required")
    tables = top.named_tables("timing", known=_TIMING) if timed else {}
    if timed and not tables:
        top.fail("timing", "no length", f"at least one: the gate {timed[0]} is required")
    plans = {}
    for name, table in tables.items():
        if not name.isdecimal() or int(name) not in lengths:
            top.fail("timing", f"the length '{name}'", f"one of {', '.join(map(str, lengths))}")
        plans[int(name)] = _plan(table, arms, directory)
    return plans


def _plan(table: Table, arms: dict[str, Arm], directory: _Folder) -> TimingRules:
    timed = table.strings("arms")
    for index, name in enumerate(timed):
        if name not in arms or name in timed[:index]:
            table.fail(f"arms[{index}]", f"'{name}'", f"each once, of {', '.join(arms)}", advice=nearest(name, arms))
    cells = tuple(_cell(cell, directory.path) for cell in table.tables("cells", known=_CELL))
    if not cells:
        table.fail("cells", "no cell", "at least one")
    for index, cell in enumerate(cells):
        if any(cell.name == other.name or cell.trace == other.trace for other in cells[:index]):
            table.fail(f"cells[{index}]", f"the name or trace of another cell in '{cell.name}'", "its own")
    if not any(cell.canaries for cell in cells):
        # A trial without one cannot show that its answers are right, and would not pass.
        table.fail("cells", "no canary in any cell", "at least one", advice="set canaries of a cell")
    comparisons = table.tables("comparisons", known=_COMPARISON)
    if not comparisons:
        table.fail("comparisons", "no comparison", "at least one")
    return TimingRules(
        arms=timed,
        blocks=table.integer("blocks", minimum=1, maximum=_MOST_BLOCKS),
        null_arm=table.choice("null_arm", timed),
        null_pairs=table.integer("null_pairs", minimum=1, maximum=_MOST_BLOCKS),
        warm_up=table.integer("warm_up", minimum=1, maximum=_MOST_REQUESTS),
        settle_s=table.number("settle_s", minimum=0.0, maximum=_LONGEST_S),
        cells=cells,
        comparisons=tuple(_comparison(it, timed, cells) for it in comparisons),
        alpha=_share(table, "alpha"),
        confidence=_share(table, "confidence"),
        practical=_share(table, "practical"),
        lateness_fraction=_share(table, "lateness_fraction"),
        server_ttft_ms=_server_ttft(table),
        failed_share=table.number("failed_share", minimum=0.0, maximum=1.0),
        cold=table.boolean("cold"),
        panel=_file(table, "panel", table.string("panel"), directory, "the timing panel"),
        plan=_made(table, "plan", directory.path),
    )


def _server_ttft(table: Table) -> float:
    """A limit that the seeded slow client exceeds."""
    value = _above_zero(table, "server_ttft_ms", "ms")
    if value > _MOST_TTFT_MS:
        table.fail("server_ttft_ms", f"{value:g}", f"at most {_MOST_TTFT_MS:g} ms")
    return value


def _share(table: Table, key: str) -> float:
    value = table.number(key)
    if not 0 < value < 1:
        table.fail(key, f"{value}", "a number between 0 and 1", advice="5 % is 0.05")
    return value


def _made(table: Table, key: str, directory: Path) -> Path:
    """A file of the study's folder that a command writes: it need not be there yet, and `kvqual freeze` asks for it."""
    name = table.string(key)
    path = _absolute(name, directory)
    if not path.is_relative_to(directory) or path == directory or "\0" in name:
        table.fail(key, f"'{name}'", f"a path inside {directory}")
    return path


def _cell(table: Table, directory: Path) -> Cell:
    mode = table.choice("mode", ("open", "closed"))
    for key in ("arrivals", "rate", "seed") if mode == "closed" else ("concurrency",):
        if table.has(key):
            table.fail(key, f"a value in a cell of mode {mode}", "none")
    arrivals = table.choice("arrivals", ("constant", "poisson", "file")) if mode == "open" else None
    if table.has("seed") and arrivals != "poisson":
        table.fail("seed", f"a seed of {arrivals} arrivals", "none: nothing is drawn")
    if table.has("rate") and arrivals == "file":
        table.fail("rate", "a rate of arrivals from a file", "none: the file says when")
    # Of a closed loop the first N are the burst: without one more there is no figure of the steady state.
    requests = table.integer("requests", minimum=2 if mode == "closed" else 1, maximum=_MOST_REQUESTS)
    name = table.string("name", pattern=r"[a-z][a-z0-9-]*", form="lower-case letters, digits and '-'")
    if name == _WARM_UP:
        table.fail("name", f"'{name}'", "another name: so is the load before the cells called")
    return Cell(
        name=name,
        mode="open" if mode == "open" else "closed",
        arrivals=cast('Literal["constant", "poisson", "file"] | None', arrivals),
        rate=_above_zero(table, "rate", "requests/s") if arrivals in ("constant", "poisson") else None,
        seed=table.string("seed") if arrivals == "poisson" else None,
        concurrency=table.integer("concurrency", minimum=1, maximum=requests - 1) if mode == "closed" else None,
        requests=requests,
        canaries=table.integer("canaries", minimum=0, maximum=requests - 1),
        max_tokens=table.integer("max_tokens", minimum=2, maximum=_MOST_REQUESTS),
        trace=_made(table, "trace", directory),
    )


def _comparison(table: Table, arms: tuple[str, ...], cells: tuple[Cell, ...]) -> Comparison:
    candidate, control = table.choice("candidate", arms), table.choice("control", arms)
    if candidate == control:
        table.fail("control", f"'{control}' against itself", "another arm")
    return Comparison(
        candidate=candidate,
        control=control,
        cell=table.choice("cell", [cell.name for cell in cells]),
        metric=table.string("metric", pattern=r"[a-z0-9_]+", form="the name of a figure, such as ttft_intended_p50"),
        better="lower" if table.choice("better", ("lower", "higher")) == "lower" else "higher",
    )


def _waivers(top: Table, arms: dict[str, Arm]) -> tuple[Waiver, ...]:
    found: list[Waiver] = []
    for table in top.tables("waivers", known=_WAIVER) if top.has("waivers") else ():
        name = table.string("arm")
        if name not in arms:
            table.fail("arm", f"the unknown arm '{name}'", f"one of {', '.join(arms)}", advice=nearest(name, arms))
        if arms[name].role != "control":
            table.fail(
                "arm",
                f"the candidate '{name}'",
                "a control",
                advice="a candidate gets no waiver: mend it, not the study",
            )
        waiver = Waiver(
            arm=name,
            gate=table.choice("gate", ORACLE_GATES),
            finding=table.string("finding", pattern=_KIND, form="a kind of finding, such as nan-fill"),
            reproducer=table.string("reproducer", pattern=r".*\S.*", form="where the finding is shown on its own"),
            reason=table.string("reason", pattern=r".*\S.*", form="a reason in one line"),
        )
        if any((waiver.arm, waiver.gate, waiver.finding) == (one.arm, one.gate, one.finding) for one in found):
            table.fail("finding", f"'{waiver.finding}' of gate {waiver.gate} waived for '{name}' twice", "each once")
        found.append(waiver)
    return tuple(found)


def _parity(table: Table, directory: _Folder) -> ParityRules:
    return ParityRules(
        panel=_file(table, "panel", table.string("panel"), directory, "the parity panel"),
        prompts=table.integer("prompts", minimum=1),
        max_tokens=table.integer("max_tokens", minimum=1),
    )


def _nll(table: Table) -> NllRules:
    documents = table.integer("documents", minimum=2)
    margin = table.number("margin_nats")
    if not margin > 0:
        table.fail("margin_nats", f"{margin}", "a margin above 0 nats")
    confidence = table.number("confidence")
    if not 0.5 < confidence < 1:
        table.fail("confidence", f"{confidence}", "a one-sided confidence between 0.5 and 1")
    return NllRules(
        documents=documents,
        decode_steps=table.integer("decode_steps", minimum=1),
        margin_nats=margin,
        confidence=confidence,
        poison_documents=table.integer("poison_documents", minimum=1, maximum=documents),
    )
