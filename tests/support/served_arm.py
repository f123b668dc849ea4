"""The server of one arm, for tests and benchmarks on the real engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_kvqual.models import model_folder, verify_model
from pytest_kvqual.server.command import WORKER_CLASS, serve_command, worker_config
from pytest_kvqual.server.process import Server, Timeouts, free_port
from pytest_kvqual.study.model import Selection
from pytest_kvqual.study.panels import selected_scales


def serving(selection: Selection, log: Path, *, boot_s: float = 300.0, worker_class: str = WORKER_CLASS) -> Server:
    """The selection's server, started; it stops where its context ends.

    Args:
        selection: The arm at one length.
        log: Receives what the server prints.
        boot_s: Bound of the boot in seconds.
        worker_class: Dotted path of the worker's class.
    """
    model = model_folder(selection.study.model)
    verify_model(model, selection.study.model.files)
    port = free_port()
    command = serve_command(
        selection,
        model=model,
        port=port,
        worker_config=worker_config(selection, model=model, v_scales=selected_scales(selection)),
        python=Path(sys.executable),
        inherited=os.environ,
        worker_class=worker_class,
    )
    return Server.start(command, port=port, log=log, timeouts=Timeouts(boot_s=boot_s))
