"""The tiny study with a timing plan at length 16: its panel, two cells, one comparison. No trace or plan is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tiny_study import PARITY_TOKENS, TOKENIZER, TinyStudy

LENGTH: Final = 16
PANEL: Final = "panels/timing-16.json"
PLAN: Final = "plans/16.json"
PLANNED: Final = '[gates.trial]\nstate = "planned"'
RULES: Final = """\
[timing.16]
panel = "panels/timing-16.json"
plan = "plans/16.json"
arms = ["native", "reference", "candidate"]
blocks = 6
null_arm = "native"
null_pairs = 1
warm_up = 2
settle_s = 0.5
alpha = 0.05
confidence = 0.95
practical = 0.05
lateness_fraction = 0.1
server_ttft_ms = 5.0
failed_share = 0.0
cold = true

[[timing.16.cells]]
name = "open"
mode = "open"
arrivals = "constant"
rate = 20.0
requests = 5
canaries = 1
max_tokens = 5
trace = "traces/16-open.jsonl"

[[timing.16.cells]]
name = "closed"
mode = "closed"
concurrency = 2
requests = 5
canaries = 1
max_tokens = 5
trace = "traces/16-closed.jsonl"

[[timing.16.comparisons]]
candidate = "candidate"
control = "native"
cell = "open"
metric = "ttft_intended_p50"
better = "lower"

"""


def timed_study(folder: Path) -> TinyStudy:
    """Write the study; trial is required, and everything that ``kvqual trace`` needs is there."""
    tiny = TinyStudy.write(folder)
    tiny.replace(PLANNED, PLANNED.replace("planned", "required"))
    add_length(tiny, LENGTH)
    return tiny


def add_length(tiny: TinyStudy, length: int) -> None:
    """Time a length by the same rules: its tables, and a panel of its own."""
    tiny.replace("[gates.identity]", RULES.replace(str(LENGTH), str(length)) + "[gates.identity]")
    folder = tiny.folder
    parity = json.loads((folder / "panels/parity.json").read_text(encoding="utf-8"))["items"]
    tokens = len(parity[0]["prompt"])

    def item(name: str, prompt: list[int], grade: str) -> dict[str, object]:
        return {"id": name, "prompt": prompt, "max_tokens": PARITY_TOKENS, "grade": grade}

    items = [item(f"m{place}", [100 + length + place] * tokens, "measured") for place in range(8)]
    items += [item(f"w{place}", [200 + length + place] * tokens, "warm-up") for place in range(2)]
    items += [{**item(f"canary-{one['id']}", one["prompt"], "canary"), "expected": one["id"]} for one in parity[1:3]]
    tiny.write_json(
        PANEL.replace(str(LENGTH), str(length)),
        {"schema": 1, "task": "timing", "length": length, "tokenizer_sha256": TOKENIZER, "sources": [], "items": items},
    )
