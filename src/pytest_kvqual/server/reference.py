"""Generate in process, one prompt at a time, with the arm's own engine arguments: what serial HTTP output must equal.

Run as ``python -m pytest_kvqual.server.reference CONFIG.json OUT.jsonl`` by the arm's interpreter. No server and no
scheduler with other requests stands between a prompt and its tokens. Each order runs over all prompts in one engine::

    {"order": "forward" | "reverse", "index": int, "id": str, "token_ids": [int], "finish_reason": str}

one line per generation, flushed as it is made.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvqual.errors import CaptureError

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Selection
    from pytest_kvqual.study.panels import Panel

ORDERS = ("forward", "reverse")


def run_reference(
    selection: Selection,
    *,
    model: Path,
    panel: Panel,
    worker_config: Mapping[str, object],
    python: Path,
    inherited: Mapping[str, str],
    log: Path,
    out: Path,
    timeout_s: float,
    orders: Sequence[str] = ORDERS,
    worker_class: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Run this module in the arm's interpreter, under the same guard as a server; returns the number of records.

    Args:
        selection: The arm at one length.
        model: The model folder.
        panel: Prompts with an output limit each.
        worker_config: As for the server.
        python: The arm's interpreter.
        inherited: The caller's environment.
        log: Receives what the engine prints.
        out: Receives the records, one JSON document a line. Must not exist. What was asked for is kept beside it, as
            ``STEM-config.json``.
        timeout_s: Bound of the whole run in seconds.
        orders: ``forward`` and ``reverse``, in the order in which to run them.
        worker_class: The worker's class; None for this project's.
        progress: Called with (done, total).

    Raises:
        CaptureError: It failed, or wrote another number of records than asked for.
        ServerError: It could not be started, or did not end in time.
    """
    from pytest_kvqual.server.command import WORKER_CLASS, Command, engine_arguments, environment
    from pytest_kvqual.server.process import ProcessTree

    document = {
        "engine": engine_arguments(
            selection, model=model, worker_config=worker_config, worker_class=worker_class or WORKER_CLASS
        ),
        "orders": list(orders),
        "items": [
            {"id": item.id, "index": index, "prompt": list(item.prompt), "max_tokens": item.max_tokens}
            for index, item in enumerate(panel.items)
        ],
    }
    total = len(orders) * len(panel.items)
    config = out.with_name(f"{out.stem}-config.json")
    config.write_text(json.dumps(document))
    command = Command(
        argv=(str(python), "-m", "pytest_kvqual.server.reference", str(config), str(out)),
        # In process: the engine's core runs in this interpreter.
        env=environment(selection, inherited=inherited) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    tree = ProcessTree(command, log=log, stop_s=5.0)

    def told() -> None:
        if progress is not None:
            progress(_lines(out), total)

    try:
        status = tree.wait(timeout_s, each_s=2.0, on_wait=told)
    finally:
        tree.stop()
    found = _lines(out)
    if status != 0 or found != total:
        raise CaptureError(
            f"in-process reference: found exit status {status} and {found} records, expected 0 and {total}; "
            f"{tree.describe_log()}"
        )
    if progress is not None:
        progress(total, total)
    return total


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def generate(config: Mapping[str, object], write: Callable[[dict[str, object]], None]) -> None:
    """Build the engine, generate each item in each order, hand each record to ``write``."""
    # Imports make objects by the million and no garbage: the collector would walk them over and over.
    gc.disable()
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    gc.enable()
    arguments, orders, items = config["engine"], config["orders"], config["items"]
    if not isinstance(arguments, list) or not isinstance(orders, list) or not isinstance(items, list):
        raise TypeError("engine, orders and items must be lists")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(arguments)))
    for order in orders:
        for item in _ordered(items, order):
            # As the server does: the model's own defaults, then the request's values.
            sampling = llm.get_default_sampling_params()
            sampling.temperature = 0.0
            sampling.max_tokens = item["max_tokens"]
            (output,) = llm.generate([{"prompt_token_ids": item["prompt"]}], sampling, use_tqdm=False)
            (chosen,) = output.outputs
            write(
                {
                    "order": order,
                    "index": item["index"],
                    "id": item["id"],
                    "token_ids": list(chosen.token_ids),
                    "finish_reason": chosen.finish_reason,
                }
            )


def _ordered(items: Sequence[dict[str, object]], order: object) -> Iterable[dict[str, object]]:
    if order not in ORDERS:
        raise ValueError(f"found order {order!r}, expected one of {ORDERS}")
    return items if order == "forward" else reversed(items)


def main(arguments: Sequence[str]) -> int:
    """``CONFIG.json OUT.jsonl``; the output file must not exist."""
    source, out = arguments
    config = json.loads(Path(source).read_bytes())
    with Path(out).open("xb") as file:

        def write(record: dict[str, object]) -> None:
            file.write(json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        generate(config, write)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
