"""studies/smollm2-cpu-fp8: the controls, panels and limits of smollm2-cpu, and arms of plain flags."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from pytest_kvqual.kv.declarations import DECLARED
from pytest_kvqual.study.load import TIMING_GATES, load_study
from pytest_kvqual.study.model import Study

FP8, EMBEDDED = load_study("smollm2-cpu-fp8"), load_study("smollm2-cpu")
FLAG = "--kv-cache-dtype="


def _panels(study: Study) -> dict[str, Path]:
    return {**study.lengths[1024].panels, "parity": study.parity.panel}


def test_controls_panels_and_limits_are_those_of_the_embedded_study() -> None:
    """Both controls, every panel's bytes and every limit are the same; nothing is timed."""
    assert FP8.controls() == EMBEDDED.controls()
    for task, path in _panels(FP8).items():
        assert path.read_bytes() == _panels(EMBEDDED)[task].read_bytes()
    for name in ("model", "oracle", "nll", "preservation", "waivers", "schedule", "determinism"):
        assert name in {field.name for field in fields(Study)}
        assert getattr(FP8, name) == getattr(EMBEDDED, name)
    assert [plan.name for plan in FP8.gates] == [it.name for it in EMBEDDED.gates if it.name not in TIMING_GATES]
    assert not FP8.timing


def test_each_candidate_is_one_flag_and_a_declaration_of_what_it_stores() -> None:
    """A candidate brings no code, its flag is one under which the engine stores the declared format, and no waiver."""
    candidates = [arm for arm in FP8.arms.values() if arm.role == "candidate"]
    assert [arm.name for arm in candidates] == [
        "fp8-e4m3", "fp8-e5m2", "fp8-e4m3-toward-zero", "fp8-e5m2-toward-zero",
    ]  # fmt: skip
    for arm in candidates:
        assert arm.kv_format == f"cpu-attn-{arm.name}"
        (flag,) = arm.flags
        assert flag.removeprefix(FLAG) in DECLARED[arm.kv_format].flags
        assert (arm.before_load, arm.after_init, arm.pythonpath, arm.scales) == ((), (), (), None)
        assert not any(waiver.arm == arm.name for waiver in FP8.waivers)
