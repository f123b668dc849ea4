"""Build the panels and the V scales of this study. The same sources give the same bytes.

    python studies/smollm2-cpu/build.py --model FOLDER [--bible FILE] [--only panels|scales]

``FOLDER`` is the model folder that ``kvqual model`` leaves. ``FILE`` is the King James text as Debian's ``bible-kjv``
prints it, one verse a line (``bible -f 'gen1:1-rev22:21' > FILE``); without ``--bible`` that program is run.

How panels are cut is in ``pytest_kvqual.study.build``; what is cut for this study is :data:`RECIPE`. No two items
overlap, within a panel or across panels, and the calibration text of the scales overlaps none of them.

A source whose digest is not the declared one is refused: its panels would be another study.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_kvqual._canonical import sha256_bytes
from pytest_kvqual.errors import KvqualError
from pytest_kvqual.prepare import read_bible, read_topics, tokenizer_of
from pytest_kvqual.study.build import Recipe, build, encode_rows, v_scale

HERE = Path(__file__).resolve().parent
DEPTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)

RECIPE = Recipe(
    # Longest first: a long window without a shared run is the harder one to find. 113,108 CPython tokens are too few
    # for thirty-two documents of 8,320.
    documents={8192: (("cpython", 6), ("kjv", 26)), 1024: (("cpython", 16), ("kjv", 16))},
    decode_steps=128,
    # One token, and each side of a multiple of the block size 128. 127, 255 and 383 fill a block with their first
    # decode step, 128 and 256 open one; finishing steps differ, so that the batch shrinks between.
    oracle=((1, 5), (17, 9), (127, 7), (128, 4), (129, 11), (200, 3), (255, 12), (256, 6), (257, 14), (383, 8)),
    oracle_long={1024: (1000, 10), 8192: (8000, 10)},
    parity_excerpts=(20, 24, 33, 40, 52, 64, 80, 100, 127, 128, 160, 200),
    parity_tokens=24,
    # One sentence gives a name's secret word, at such a share of the text; further sentences give the words of other
    # names. The rest of the text is the King James text.
    retrieval={
        1024: (896, tuple((others, depth) for others in (0, 0, 0, 1) for depth in DEPTHS) * 4),
        8192: (7936, tuple((others, depth) for others in (0, 0, 0, 0, 1) for depth in DEPTHS) * 2),
    },
    # A list of so many names with a word each; three of its lines are repeated, then the beginning of a fourth.
    recall=((4, 8, 12, 16), 320),
    answer_tokens={"retrieval": 8, "recall": 8},
    # Each its own text; and of the parity panel those prompts that each arm answers alike one at a time and in waves of
    # 32: their answers do not hang on the batch.
    timing={1024: (1000, 32, 6)},
    timing_tokens=24,
    canaries=("p05", "p20", "p29", "p30"),
    echo=False,
    calibration=(("cpython", 1024), ("kjv", 1024), ("cpython", 1024), ("kjv", 1024)),
    anew=False,
)


def write(path: Path, data: bytes) -> None:
    """Write a file, and print its digest."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    print(f"{sha256_bytes(data)}  {path.relative_to(HERE)}")


def build_scales(model: Path, windows: Sequence[Sequence[int]]) -> None:
    """Write the candidate's V scales: per layer, amax of |V| over ``windows``, times headroom, over 448.

    V is what ``v_proj`` returns, in float32 arithmetic on the model's bfloat16 weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    layers = network.model.layers
    amax = [0.0] * len(layers)

    def watch(index: int) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: torch.Tensor) -> None:
            amax[index] = max(amax[index], float(output.abs().max()))

        return hook

    for index, layer in enumerate(layers):
        layer.self_attn.v_proj.register_forward_hook(watch(index))
    with torch.inference_mode():
        for window in windows:
            network.model(torch.tensor([list(window)]))
    write(HERE / "scales/candidate-v.json", encode_rows({"schema": 1}, "v_scale", v_scale(amax)))


def main() -> None:
    """Read the sources, then write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model folder")
    parser.add_argument("--bible", type=Path, help="the King James text; default: run `bible`")
    parser.add_argument("--only", choices=("panels", "scales"), help="write only these")
    options = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        tokenizer = tokenizer_of(options.model)
        calibration, panels = build(
            RECIPE,
            {"cpython": read_topics(None), "kjv": read_bible(options.bible)},
            encode=tokenizer.encode,
            chat=tokenizer.chat,
            tokenizer_sha256=tokenizer.sha256,
        )
        if options.only != "scales":
            for panel in panels:
                name = panel.task if panel.length is None else f"{panel.task}-{panel.length}"
                write(HERE / f"panels/{name}.json", panel.data)
        if options.only != "panels":
            build_scales(options.model, calibration)
    except KvqualError as error:
        sys.exit(f"build.py: {error.line()}")


if __name__ == "__main__":
    main()
