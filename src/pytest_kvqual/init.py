"""What ``kvqual init`` does: a study of a model in a folder, from its declaration to its lock."""

from __future__ import annotations

import importlib.util
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_kvqual.errors import KvqualError, RefusedError, StudyError
from pytest_kvqual.model_config import refuse_other_attention, sizes_of
from pytest_kvqual.own_study import CANDIDATES, Platform, explained, open_gates, own_study, plain
from pytest_kvqual.prepare import Texts, read_text, tokenizer_of, write_panels, write_scales
from pytest_kvqual.study.freeze import freeze_command
from pytest_kvqual.study.load import STUDY_FILE, load_study
from pytest_kvqual.study.model import Study

__all__ = ["init"]

#: Other words for a candidate, as the engine's --kv-cache-dtype has them.
_ALIASES: Final = {"fp8": "fp8_e4m3"}


def init(
    model: Path,
    *,
    output: Path | None = None,
    candidate: str = "k16v8",
    platform: Platform = "cpu",
    length: int = 1024,
    text: Path | None = None,
    without: Sequence[str] = (),
    calibrate: bool = True,
) -> Iterator[str]:
    """Write the study of the model in a folder, and freeze it; yields what was done, and last the command to run.

    The study's folder gets its name when declaration, panels and digests are all there. Scales are made in it
    afterwards, for they boot an engine, which can fail: ``kvqual prepare --calibrate`` then makes them.

    Args:
        model: The folder with ``config.json``, ``tokenizer.json`` and safetensors.
        output: The study's folder, which must not be there; None for one beside here, named by model and candidate.
        candidate: One of :data:`pytest_kvqual.own_study.CANDIDATES`, or ``fp8`` for ``fp8_e4m3``.
        platform: ``cpu`` or ``gpu``.
        length: The context length in tokens.
        text: As :func:`pytest_kvqual.prepare.read_text` takes it.
        without: Gates to leave out, of :data:`pytest_kvqual.own_study.LEAVABLE`.
        calibrate: Make the V scales that a candidate needs, by a boot of the stock cache; on a host without the GPU
            that the study is for it is said how.

    Raises:
        ModelError: The folder holds no model that can be read, or one whose attention no oracle declares.
        StudyError: The folder of the study is there; the text is too short; an unknown candidate.
        ServerError: The engine in which they are made did not start or did not answer.
    """
    candidate = _ALIASES.get(candidate, candidate)
    if candidate not in CANDIDATES:
        raise StudyError(f"--candidate: found '{candidate}', expected one of {', '.join(CANDIDATES)}")
    model = model.expanduser().absolute()
    refuse_other_attention(model)
    sizes = sizes_of(model)
    tokenizer_of(model)
    name = plain(model.name)
    folder = (Path(f"{name}-{candidate}".lower()) if output is None else output.expanduser()).absolute()
    # A link to nothing counts, and a name too long for the disk is told where it is written.
    if os.path.lexists(folder):
        raise StudyError(f"found {folder}, expected no such folder: a study is not overwritten", advice="--output DIR")
    texts = read_text(text)
    study = own_study(
        directory=folder, model=name, sizes=sizes, platform=platform, candidate=candidate, length=length,
        without=without,
    )  # fmt: skip
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            place = Path(scratch, folder.name)
            place.mkdir()
            (place / STUDY_FILE).write_text(explained(study), encoding="utf-8")
            yield f"{folder}, from {texts.sources[0].line()}"
            yield f"  {STUDY_FILE}: written, each line explained"
            yield from (f"  {line}" for line in write_panels(load_study(str(place)), model, texts))
            place.rename(folder)
    except OSError as error:
        raise StudyError(f"cannot write {folder}: {error.strerror or error}") from error
    yield from _finish(load_study(str(folder)), model, texts, text, calibrate=calibrate)


def _finish(study: Study, model: Path, texts: Texts, text: Path | None, *, calibrate: bool) -> Iterator[str]:
    """Scales and lock; or what is to be typed for them, then the command to run."""
    place = shlex.quote(str(study.directory))
    again = f"kvqual prepare {place} --model {shlex.quote(str(model))}"
    again += "" if text is None else f" --text {shlex.quote(str(text.absolute()))}"
    if study.missing and calibrate:
        try:
            yield from (f"  {line}" for line in write_scales(study, model, texts))
        except RefusedError as error:
            # A study of a GPU may be begun on any machine.
            yield f"  no scales yet: {error}"
        except KvqualError as error:
            error.advice = f"{error.advice + '; ' if error.advice else ''}the study is there: {again} --calibrate"
            raise
        study = load_study(str(study.directory))
    if study.missing:
        yield f"next, where arm native boots: {again} --calibrate"
        yield f"then: kvqual freeze {place}"
    else:
        yield freeze_command(str(study.directory), check=False)
    if missing := open_gates(study.arms["candidate"]):
        yield (
            f"left out: {', '.join(missing)}: what a cell of {study.arms['candidate'].kv_format} holds is not declared"
        )
    tasks = [task for task in ("nll", *study.preservation) if any(gate.name == task for gate in study.gates)]
    if tasks:
        floors = [f"{task} under {rules.floor:.0%} right" for task, rules in study.preservation.items()]
        yield (
            f"a model that cannot take {', '.join(tasks)} (untrained, say) makes them INCONCLUSIVE"
            f"{': ' + ', '.join(floors) if floors else ''}; leave them out with --without"
        )
    yield "run:"
    arm = f"--arm candidate --length {next(iter(study.lengths))}"
    yield f"  KVQUAL_MODEL_DIR={shlex.quote(str(model))} {_pytest()} -m {study.platform} --study {place} {arm}"


def _pytest() -> str:
    """How the gates are named from here: the folder of a clone, else those in the installed package."""
    if Path("qualification", "test_01_identity.py").is_file():
        return "pytest qualification/"
    if importlib.util.find_spec("pytest_kvqual.qualification") is not None:
        return "pytest --pyargs pytest_kvqual.qualification"
    gates = Path(__file__).resolve().parents[2] / "qualification"
    return f"pytest {shlex.quote(str(gates))}"
