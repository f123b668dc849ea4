"""Writes ``argv/STUDY.json``: command line and environment of every arm of every study, by format, length and arm.

    python tests/golden/make_argv.py

What depends on the machine is replaced: the folder of this package's sources by ``SRC``, the study's by ``STUDY``, the
interpreter by ``python``, the model's folder by ``/model``. The scales of a study that is prepared from its model stand
as 1.0 per layer. An arm whose code is no part of its study comes from the install in :func:`stand_in`.
"""

from __future__ import annotations

import json
from pathlib import Path

from pytest_kvqual.attempt import INSTALL, python_of
from pytest_kvqual.server.checkout import NAMES, Checkout, Install, InstalledArm, apply
from pytest_kvqual.server.command import PACKAGE_ROOT, serve_command, worker_config
from pytest_kvqual.study.load import load_study, select, studies_folder
from pytest_kvqual.study.model import Selection, Study
from pytest_kvqual.study.panels import load_scales

FOLDER = Path(__file__).resolve().parent / "argv"
MODEL = Path("/model")
ATTEMPT = Path("/attempt")
PORT = 8000
# Of a shell: what is passed on, and what must not be.
INHERITED = {
    "PATH": "/usr/bin",
    "CUDA_VISIBLE_DEVICES": "0",
    "VLLM_ATTENTION_BACKEND": "XFORMERS",
    "FLASHINFER_CUBIN_DIR": "/cubins",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "3",
}


def studies() -> list[str]:
    """The names of all studies."""
    return sorted(path.parent.name for path in studies_folder().glob("*/study.toml"))


def stand_in(study: Study) -> Install:
    """An install of every arm that needs one."""
    arms = {}
    for name, arm in study.arms.items():
        if arm.installed:
            checkouts = tuple(
                Checkout(name=it, path=Path("/install", name, it), commit="0" * 40, tree="0" * 64, built={})
                for it in NAMES
            )
            arms[name] = InstalledArm(interpreter=Path("/install", name, "bin/python"), checkouts=checkouts)
    return Install(path=Path("/install/kvqual-install.toml"), arms=arms)


def selections(name: str) -> dict[str, Selection]:
    """Every arm of a study, by format, length and arm."""
    formats = load_study(name).model.formats or (None,)
    found = {}
    for form in formats:
        study = load_study(name, form)
        study = apply(study, stand_in(study))
        for length in study.lengths:
            for arm in study.arms:
                words = [str(word) for word in (form, length, arm) if word is not None]
                found["/".join(words)] = select(study, arm=arm, length=length, cache_bytes=None)
    return found


def told(selection: Selection) -> dict[str, object]:
    """What the arm's worker is told."""
    path, model = selection.arm.scales, selection.study.model
    # Those of a study that is prepared from its model are not committed: here they are stand-ins, there or not.
    made = [1.0] * model.layers if model.repository is not None else None
    scales = None if path is None else made or load_scales(path, model.layers)
    checkouts = ATTEMPT / INSTALL if selection.arm.checkouts else None
    return worker_config(selection, model=MODEL, v_scales=scales, checkouts=checkouts)


def command(selection: Selection) -> dict[str, object]:
    """Command line and environment of one arm, without what depends on the machine."""
    made = serve_command(
        selection,
        model=MODEL,
        port=PORT,
        worker_config=told(selection),
        python=python_of(selection.arm) if selection.arm.interpreter is not None else Path("python"),
        inherited=INHERITED,
    )
    places = {str(PACKAGE_ROOT): "SRC", str(selection.study.directory): "STUDY"}

    def plain(text: str) -> str:
        for place, word in places.items():
            text = text.replace(place, word)
        return text

    return {"argv": [plain(word) for word in made.argv], "env": {key: plain(text) for key, text in made.env.items()}}


def document(name: str) -> bytes:
    """The bytes of a study's golden file."""
    found = {key: command(selection) for key, selection in selections(name).items()}
    return (json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def main() -> None:
    """Write the file of every study."""
    FOLDER.mkdir(exist_ok=True)
    for name in studies():
        (FOLDER / f"{name}.json").write_bytes(document(name))


if __name__ == "__main__":
    main()
