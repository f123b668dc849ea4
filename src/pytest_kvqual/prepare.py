"""What ``kvqual prepare`` does: the files of a study that are made from its model's own tokenizer and weights.

A study whose model names a repository is committed without them, since neither the weights nor the tokenizer are this
project's to ship; that of somebody's own model (``kvqual init``) is written without them. ``prepare`` reads the model's
folder and writes the panels and the digests of the model's files; with ``--calibrate`` it boots the study's first
control, and writes the V scales from what that engine hands to its cache.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_kvqual._canonical import pretty_bytes, sha256_bytes, sha256_file
from pytest_kvqual._decode import one_line
from pytest_kvqual.errors import CaptureError, ModelError, RefusedError, StudyError
from pytest_kvqual.model_config import CONFIG_FILE, sizes_of
from pytest_kvqual.study.build import CPYTHON, KJV, SHIPPED, Built, Source, build, encode_rows, recipe_of, v_scale
from pytest_kvqual.study.freeze import lock_path
from pytest_kvqual.study.load import STUDY_FILE, argument, load_study, require_own
from pytest_kvqual.study.model import Selection, Study
from pytest_kvqual.study.panels import check_panels, has_length

WATCH = "pytest_kvqual.worker.calibration:watch"
_LIMIT_S = 120.0
#: A study's key of ``[model]``, and where the model's ``config.json`` has it.
_GEOMETRY = {
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "vocabulary": "vocab_size",
}
_BIBLE = ("bible", "-f", "gen1:1-rev22:21")
_TOPICS = re.compile(r"\A(?:#[^\n]*\n|\s)*topics = ")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A model's tokenizer. ``sha256`` is that of its ``tokenizer.json``."""

    sha256: str
    plain: Any
    folder: Path

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return list(self.plain.encode(text, add_special_tokens=False).ids)

    def chat(self, question: str) -> list[int]:
        """The token ids of a user's message under the model's chat template, up to where the answer begins.

        A model without a template is asked the bare question.

        Raises:
            ModelError: The tokenizer or its template cannot be used.
        """
        message = [{"role": "user", "content": question}]
        try:
            template = _chat_template(self.folder)
            if template.chat_template is None:
                return self.encode(question)
            return self.encode(template.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
        except ModelError:
            raise
        except Exception as error:  # the template is a program of the model's
            raise ModelError(
                one_line(f"{self.folder}: found no chat template that can be used: {error}"),
                advice="give the folder of an instruction model, whole",
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """What panels are cut from: each source, and its text by its name."""

    sources: tuple[Source, ...]
    texts: Mapping[str, str]


def prepare(
    name_or_path: str,
    *,
    format: str | None,
    model: Path,
    bible: Path | None = None,
    topics: Path | None = None,
    text: Path | None = None,
    calibrate: bool = False,
) -> Iterator[str]:
    """Write the panels of a study and the digests of its model's files; yields one line about each file.

    The digests come last: a study that was interrupted stays unprepared. Whether the folder is the declared revision is
    not seen here: ``config.json`` is held against the study's geometry, and the digests then fix every file.

    Args:
        name_or_path: As :func:`pytest_kvqual.study.load.find_study` takes it.
        format: As :func:`pytest_kvqual.study.load.load_study` takes it.
        model: The model's folder, with no other file in it than the model's.
        bible: As :func:`read_bible` takes it; not for a study whose model names no repository.
        topics: As :func:`read_topics` takes it; not for a study whose model names no repository.
        text: As :func:`read_text` takes it, for a study whose model names no repository.
        calibrate: Write the V scales too: :func:`largest_v`.

    Raises:
        StudyError: The study is not one that is prepared, or lies in the installed package; a text is missing, another
            one, or of another kind of study; a panel does not fit.
        ModelError: The folder holds no model that can be read, or one of another geometry.
        RefusedError: ``calibrate`` on a host without the device that the study is for.
        ServerError: The control that is calibrated in did not start or did not answer.
    """
    study = load_study(name_or_path, format)
    if study.model.files_path is None:
        raise StudyError(
            f"study {study.name}: found no file of digests in [model], expected one: its files are committed with it",
            advice="`kvqual model` builds the embedded study's model",
        )
    require_own(study)
    own = study.model.repository is None
    if own and (bible is not None or topics is not None):
        raise StudyError(f"study {study.name}: found --bible or --topics, expected --text FILE or none of them")
    if not own and text is not None:
        raise StudyError(f"study {study.name}: found --text, expected none: it is cut from the shipped texts")
    if calibrate:
        # Before the minutes that the rest takes.
        _device(study)
    texts = (
        read_text(text)
        if own
        else Texts(sources=SHIPPED, texts={CPYTHON.name: read_topics(topics), KJV.name: read_bible(bible)})
    )
    yield from write_panels(study, model, texts)
    prepared = load_study(name_or_path, format)
    if calibrate:
        yield from write_scales(prepared, model, texts)
        prepared = load_study(name_or_path, format)
    yield f"gates of it need KVQUAL_MODEL_DIR={model}"
    if prepared.missing:
        names = ", ".join(path.relative_to(study.directory).as_posix() for path in prepared.missing)
        again = "" if text is None else f" --text {text}"
        yield (
            f"not there yet: {names}; run `kvqual prepare {argument(study)} --model {model}{again} --calibrate` where "
            f"arm {study.controls()[0].name} boots, or put scales of your own there"
        )
    elif study.timing:
        yield f"next: kvqual trace, kvqual plan and kvqual freeze {argument(study)}"
    else:
        yield f"next: kvqual freeze {argument(study)}"


def write_panels(study: Study, model: Path, texts: Texts) -> Iterator[str]:
    """Write the panels of a study, and last the digests of its model's files; yields one line about each file.

    Raises:
        StudyError: A text is used up; a panel does not fit, or lies where another file is; of a study whose model names
            no repository, panels that are there were cut from another text.
        ModelError: As :func:`prepare`.
    """
    if study.model.files_path is None:
        raise StudyError(f"study {study.name}: found no file of digests in [model], expected one")
    _check_places(study, study.model.files_path)
    files = model_files(model)
    _fits(study, model)
    for panel in _build(study, model, texts)[1]:
        for path in _places(study, panel):
            if study.model.repository is None:
                _same_text(path, panel.data)
            yield _write(study, path, panel.data)
    yield _write(study, study.model.files_path, pretty_bytes({"schema": 1, "files": files}))
    check_panels(load_study(str(study.directory), study.model.format))


def write_scales(study: Study, model: Path, texts: Texts) -> Iterator[str]:
    """Boot the first control, and write the V scales of every arm that has some; yields one line about each file.

    Raises:
        RefusedError: There is no device that the study is for.
        ServerError: The control did not start or did not answer.
        CaptureError: It told of other layers than the model has.
        StudyError: The largest |V| of a layer makes no scale of its own.
    """
    _device(study)
    windows = _build(study, model, texts)[0]
    control = study.controls()[0].name
    yield f"calibrating: arm {control}, {sum(map(len, windows))} tokens that are in no panel's document"
    scales = encode_rows({"schema": 1}, "v_scale", v_scale(largest_v(study, model, windows)))
    for path in dict.fromkeys(arm.scales for arm in study.arms.values() if arm.scales is not None):
        yield _write(study, path, scales)


def _build(study: Study, model: Path, texts: Texts) -> tuple[list[list[int]], Iterator[Built]]:
    tokenizer = tokenizer_of(model)
    return build(
        recipe_of(study, texts.sources),
        texts.texts,
        encode=tokenizer.encode,
        chat=tokenizer.chat,
        tokenizer_sha256=tokenizer.sha256,
        sources=texts.sources,
    )


def _same_text(path: Path, data: bytes) -> None:
    """Refuse to write a panel of one text over that of another: it would be another study."""
    if not path.is_file():
        return
    try:
        before = json.loads(path.read_bytes())["sources"]
    except (ValueError, KeyError, TypeError):
        return  # no panel: it is written anew
    now = json.loads(data)["sources"]
    if before != now:
        raise StudyError(
            f"{path}: found a panel cut from {one_line(str(before[:1]))}, expected {one_line(str(now[:1]))}",
            advice="give the same --text FILE as before, or begin a new study with `kvqual init`",
        )


def _device(study: Study) -> None:
    from pytest_kvqual.session import gpu_found

    if study.platform == "gpu" and not gpu_found():
        raise RefusedError(
            f"--calibrate: found no GPU, expected one: it boots arm {study.controls()[0].name} of study {study.name}",
            advice="run it on a GPU host; without --calibrate panels and digests are written anywhere",
        )


def largest_v(study: Study, model: Path, windows: Sequence[Sequence[int]]) -> list[float]:
    """The largest |V| of each layer over ``windows`` of token ids, as the study's first control hands it to its cache.

    The control is booted in eager mode, with nothing in it but a note of what its cache is given, and is sent each
    window once, one after the other.

    Raises:
        RefusedError: An arm is timed on this host, or another run has the device.
        ServerError: It did not start, or did not answer.
        CaptureError: It told of other layers than the model has.
    """
    from pytest_kvqual.attempt import python_of
    from pytest_kvqual.server import devices, rpc
    from pytest_kvqual.server.command import serve_command, worker_config
    from pytest_kvqual.server.process import Server, Timeouts, free_port

    arm, engine = study.controls()[0], study.engine
    longest = max(map(len, windows))
    length = next((it for it in study.lengths.values() if it.max_model_len > longest), None)
    if length is None:
        raise StudyError(f"study {study.name}: found no length of more than {longest} tokens, expected one")
    eager = replace(arm, flags=(*arm.flags, "--enforce-eager"))
    selection = Selection(study=study, arm=eager, length=length, cache_bytes=length.cache_bytes)
    port = free_port()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvqual-calibrate-"))
        command = serve_command(
            selection,
            model=model,
            port=port,
            worker_config=worker_config(selection, model=model, after_init=(WATCH,)),
            python=python_of(arm),
            inherited=os.environ,
        )
        stack.enter_context(
            devices.beside_others(command.env, platform=study.platform, each=engine.tensor_parallel_size)
        )
        server = Server.start(
            command, port=port, log=Path(scratch, "server.log"), timeouts=Timeouts(boot_s=engine.boot_timeout_s)
        )
        try:
            # What the warm-up wrote was no text.
            rpc.call(server.base_url, "kvqual_largest_v", True, timeout_s=engine.request_timeout_s)
            for window in windows:
                body = {"model": study.model.name, "prompt": list(window), "max_tokens": 1, "temperature": 0}
                rpc.post(
                    server.base_url, "/v1/completions", body, timeout_s=engine.request_timeout_s, what="calibration"
                )
            ranks = rpc.call(server.base_url, "kvqual_largest_v", timeout_s=engine.request_timeout_s)
        finally:
            server.stop()
    return largest_of(ranks, study.model.layers)


def largest_of(ranks: Sequence[object], layers: int) -> list[float]:
    """The largest |V| of each layer over all ranks, from what ``kvqual_largest_v`` answered.

    Raises:
        CaptureError: A rank told of other layers than the first, of another number of them, or of no number.
    """
    told: list[list[tuple[str, float]]] = []
    for rank in ranks:
        try:
            told.append([(str(it["layer"]), float(it["largest"])) for it in rank])  # type: ignore[attr-defined]
        except (TypeError, KeyError, ValueError) as error:
            raise CaptureError(f"calibration: found {rank!r:.80} from a rank, expected its layers: {error}") from None
    names = [name for name, _ in told[0]] if told else []
    if len(names) != layers or any([name for name, _ in rank] != names for rank in told):
        raise CaptureError(f"calibration: found {len(names)} layers, expected {layers}, the same on every rank")
    # NaN wins, and is refused by who makes a scale of it.
    return [max(values, key=lambda value: (math.isnan(value), value)) for values in
            zip(*([value for _, value in rank] for rank in told), strict=True)]  # fmt: skip


def model_files(model: Path) -> dict[str, str]:
    """The SHA-256 of each file of a model's folder, by name.

    Raises:
        ModelError: No folder, none of the files that a model has, a folder inside it, or a file that cannot be read.
    """
    if not model.is_dir():
        raise ModelError(f"found no folder {model}, expected the model's", advice="give it with --model DIR")
    found = sorted(model.iterdir())
    for path in found:
        if path.is_dir():
            raise ModelError(
                f"{path}: found a folder, expected the model's files alone",
                advice="remove it (a hub's cache folder holds no part of the model), or name a folder without it",
            )
    names = [path.name for path in found]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{model}: found {', '.join(names[:5]) or 'no file'}, expected config.json and safetensors")
    try:
        return {path.name: sha256_file(path) for path in found}
    except OSError as error:
        raise ModelError(f"{error.filename or model}: cannot be read: {error.strerror or error}") from error


def _fits(study: Study, model: Path) -> None:
    """Hold the model's own configuration against the study's geometry."""
    sizes = sizes_of(model)
    advice = (
        f"give the folder of {study.model.repository} at {study.model.revision}"
        if study.model.repository is not None
        else "give the folder that the study was written for"
    )
    for ours, key in _GEOMETRY.items():
        found, expected = getattr(sizes, ours), getattr(study.model, ours)
        if found != expected:
            raise ModelError(
                f"{model / CONFIG_FILE}: found {key} {found}, expected {expected}, as study {study.name} declares",
                advice=advice,
            )
    # All formats of a model have its geometry. The engine's names of kernels begin with that of the quantisation.
    method, wanted = sizes.quantisation, _quantisation(study.engine.flags)
    if study.model.repository is not None and (bool(method) is not bool(wanted) or not wanted.startswith(method)):
        raise ModelError(
            f"{model / CONFIG_FILE}: found {f'the quantisation {method}' if method else 'no quantisation'}, expected "
            f"{wanted or 'none'}, as the flags of study {argument(study)} say",
            advice=advice,
        )


def _quantisation(flags: Sequence[str]) -> str:
    """What ``--quantization`` (``-q``) is given in the engine's flags; empty without it."""
    for flag, following in zip(flags, (*flags[1:], ""), strict=True):
        name, equals, value = flag.partition("=")
        if name in ("--quantization", "-q"):
            return value if equals else following
    return ""


def _check_places(study: Study, digests: Path) -> None:
    """No file that is written here lies where another one of the study is.

    Raises:
        StudyError: One does; names both.
    """
    taken = {study.directory / STUDY_FILE: "the study itself", lock_path(study): "its lock"}
    taken |= {rules.plan: "a plan" for rules in study.timing.values()}
    taken |= {cell.trace: "a trace" for rules in study.timing.values() for cell in rules.cells}
    if study.gsm8k_source is not None:
        taken[study.gsm8k_source.shots] = "the worked questions"
    written = [(digests, "the digests"), (study.parity.panel, "the parity panel")]
    for length in study.lengths.values():
        # One panel serves every length where the task has the same questions at all.
        written += [
            (path, f"the {task} panel" + (f" of {length.tokens}" if has_length(task) else ""))
            for task, path in length.panels.items()
        ]
    written += [(rules.panel, f"the timing panel of {length}") for length, rules in study.timing.items()]
    written += [(arm.scales, "the scales") for arm in study.arms.values() if arm.scales is not None]
    for path, what in written:
        if taken.setdefault(path, what) != what:
            raise StudyError(
                f"study {study.name}: found {what} at {path.relative_to(study.directory).as_posix()}, where "
                f"{taken[path]} is, expected a place of its own",
                advice=f"change its path in {STUDY_FILE}",
            )


def _places(study: Study, panel: Built) -> list[Path]:
    """Where the study has this panel: once, or at every length where the task has the same questions at all."""
    if panel.task == "parity":
        return [study.parity.panel]
    if panel.task == "timing":
        return [rules.panel for length, rules in study.timing.items() if length == panel.length]
    lengths = [it for it in study.lengths.values() if panel.length in (None, it.tokens)]
    return list(dict.fromkeys(it.panels[panel.task] for it in lengths if panel.task in it.panels))


def _write(study: Study, path: Path, data: bytes) -> str:
    before = path.read_bytes() if path.is_file() else None
    said = "unchanged" if before == data else "written" if before is None else "written anew"
    if before != data:
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(data)
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink()
            raise StudyError(f"cannot write {path}: {error.strerror or error}") from error
    return f"{path.relative_to(study.directory).as_posix()}: {said}; sha256 {sha256_bytes(data)}"


@functools.cache
def _chat_template(folder: Path) -> Any:
    # Said, or a model with code of its own makes it ask on the terminal.
    return _package("transformers").AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def tokenizer_of(model: Path) -> Tokenizer:
    """The tokenizer in a model's folder.

    Raises:
        ModelError: There is none that can be read, or the package for it is missing.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"found no file {path}, expected the model's tokenizer", advice="give the model's folder")
    tokenizers = _package("tokenizers")
    try:
        plain = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises this class itself
        raise ModelError(f"{path}: found no tokenizer that can be read: {one_line(str(error))}") from None
    return Tokenizer(sha256=sha256_file(path), plain=plain, folder=model)


def read_topics(path: Path | None) -> str:
    """The topics of ``pydoc_data`` in the order of their names.

    Args:
        path: CPython 3.11.7's ``Lib/pydoc_data/topics.py``; None for that of the running Python.

    Raises:
        StudyError: There is none, or it is another one.
    """
    data = _read(_topics_file() if path is None else path)
    data = _checked(CPYTHON, data, advice="give CPython 3.11.7's Lib/pydoc_data/topics.py with --topics FILE")
    return _joined(_literal(data.decode("utf-8")))


def _topics_file() -> Path:
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise StudyError("found no pydoc_data.topics in this Python, expected it", advice="give a file of the text")
    return Path(spec.origin)


def _joined(topics: Mapping[str, str]) -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_bible(path: Path | None) -> str:
    """The King James text, one verse a line, without the verse numbers.

    Args:
        path: The text as Debian's ``bible-kjv`` prints it; None runs that program.

    Raises:
        StudyError: There is neither, or it is another text.
    """
    advice = "give it with --bible FILE: apt-get install bible-kjv; bible -f gen1:1-rev22:21 > FILE"
    if path is not None:
        data = _read(path)
    else:
        try:
            data = subprocess.run(_BIBLE, check=True, capture_output=True, timeout=_LIMIT_S).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise StudyError(f"cannot run {_BIBLE[0]}: {one_line(str(error))}", advice=advice) from None
    text = _checked(KJV, data, advice=advice).decode("ascii")
    return "\n".join(re.sub(r"^\S+ ", "", line) for line in text.splitlines())


def read_text(path: Path | None) -> Texts:
    """The one text that the panels of somebody's own model are cut from.

    Args:
        path: A file of text; None for the topics of the running Python's ``pydoc_data``, whatever its version.

    Raises:
        StudyError: It cannot be read, is no UTF-8, or holds no text.
    """
    if path is None:
        topics = _topics_file()
        data = _read(topics)
        label = f"CPython {sys.version.split()[0]}, Lib/pydoc_data/topics.py (PSF-2.0)"
        found = _joined(_literal(data.decode("utf-8", "replace")))
        path = topics
    else:
        data, label = _read(path), path.name
        try:
            found = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise StudyError(f"{path}: found the byte 0x{data[error.start]:02x}, expected a text in UTF-8") from None
    if not found.strip():
        raise StudyError(f"{path}: found no text, expected some to cut panels from", advice="give --text FILE")
    source = Source(name="text", label=label, sha256=sha256_bytes(data))
    return Texts(sources=(source,), texts={source.name: found})


def _literal(text: str) -> dict[str, str]:
    """The one assignment of the topics module, read without running it."""
    import ast

    start = _TOPICS.match(text)
    return dict(ast.literal_eval(text[start.end() :] if start else "{}"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror or error}") from None


def _checked(source: Source, data: bytes, *, advice: str) -> bytes:
    found = sha256_bytes(data)
    if found != source.sha256:
        raise StudyError(f"{source.label}: found sha256 {found}, expected {source.sha256}", advice=advice)
    return data


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModelError(
            f"found no package {name}, expected it to build panels", advice=f"pip install {name}"
        ) from None
