"""Reading a study's declaration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_study import TinyStudy

from pytest_kvqual.errors import StudyError
from pytest_kvqual.study import load
from pytest_kvqual.study.load import GATES, find_study, load_study, select, studies_folder
from pytest_kvqual.study.model import Waiver


def _refusal(tiny: TinyStudy) -> StudyError:
    with pytest.raises(StudyError) as caught:
        load_study(str(tiny.folder))
    assert "\n" not in caught.value.line()
    assert str(tiny.toml) in str(caught.value)
    return caught.value


def test_a_study_is_read_into_records(tiny_study: TinyStudy) -> None:
    """Every declared value arrives in its record, paths absolute, orders kept."""
    study = load_study(str(tiny_study.folder))
    assert (study.name, study.directory, study.platform) == ("tiny", tiny_study.folder, "cpu")
    assert (study.schedule, study.determinism) == ("waves", "order-invariant")
    assert (study.model.layers, study.model.kv_heads, study.model.files["tokenizer.json"]) == (2, 2, "5" * 64)
    assert study.engine.boot_timeout_s == 60.0
    assert study.engine.environment == {"HF_HUB_OFFLINE": "1"}
    assert list(study.arms) == ["native", "reference", "candidate"]
    assert [arm.name for arm in study.controls()] == ["native", "reference"]
    candidate = study.arms["candidate"]
    assert candidate.flags == ("--a-flag=1", "--another")
    assert candidate.scales == tiny_study.folder / "scales" / "candidate-v.json"
    assert (candidate.interpreter, candidate.pythonpath, candidate.after_init) == (None, (), ())
    assert study.lengths[16].panels["nll"] == tiny_study.folder / "panels" / "nll-16.json"
    assert study.before("routing") == ("identity", "dispatch", "stale-maps")
    assert [gate.name for gate in study.gates if gate.timing] == ["fidelity", "trial", "superiority"]
    assert (study.nll.margin_nats, study.oracle.minimum_cells, study.parity.prompts) == (0.01, 10, 3)
    assert (study.oracle.passes, study.oracle.conditions) == (("model", "probe"), ("mixed", "chunked"))
    assert study.engine.tensor_parallel_size == 1
    native = study.arms["native"]
    assert (native.kernels, native.kernels_absent, native.cache_dtype) == (("*cpu_attention*",), (), "torch.bfloat16")
    assert (candidate.kernels, candidate.cache_dtype) == ((), None)
    assert study.waivers == (
        Waiver(arm="native", gate="replay", finding="nan-fill", reproducer="docs/findings.md#nan", reason="Known."),
    )


def test_a_waiver_is_of_one_arm_and_one_gate(tiny_study: TinyStudy) -> None:
    """Only the arm and the gate that a waiver names find it."""
    study = load_study(str(tiny_study.folder))
    assert study.waived("native", "replay") == ("nan-fill",)
    assert study.waived("reference", "replay") == study.waived("native", "routing") == ()


def test_ranks_and_kernels_are_declared(tiny_study: TinyStudy) -> None:
    """The number of ranks and the kernels that must not run arrive in their records."""
    tiny_study.replace("block_size = 16", "block_size = 16\ntensor_parallel_size = 2")
    tiny_study.replace("kernels = [", 'kernels_absent = ["*flash*"]\nkernels = [')
    study = load_study(str(tiny_study.folder))
    assert study.engine.tensor_parallel_size == 2
    assert study.arms["native"].kernels_absent == ("*flash*",)


def test_an_arms_own_code_and_interpreter_are_found_from_the_study(tiny_study: TinyStudy) -> None:
    """Relative interpreters and import paths start at the study's folder."""
    (tiny_study.folder / "code").mkdir()
    program = tiny_study.folder / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    tiny_study.replace(
        'kv_format = "k16v8"', 'kv_format = "k16v8"\ninterpreter = "python"\npythonpath = ["code", "../.."]'
    )
    arm = load_study(str(tiny_study.folder)).arms["candidate"]
    assert arm.interpreter == program
    assert arm.pythonpath == (tiny_study.folder / "code", tiny_study.folder.parent.parent)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("wave_size = 4", "wave_size = = 4", "line 58, column 13: found 'Invalid value', expected TOML"),
        ("[arms.reference]", "[arms.native]", "found 'Cannot declare ('arms', 'native') twice' in '[arms.native]'"),
        ("[gates.dispatch]", "[gates.identity]", "found 'Cannot declare ('gates', 'identity') twice'"),
        ('name = "tiny"', 'name = "tiny', "line 2, column 13: found"),
        ("wave_size = 4", "wave_sise = 4", "in 'lengths.16': found the unknown key 'wave_sise'"),
        ('platform = "cpu"', 'platform = "tpu"', "in 'platform': found \"tpu\" (a string), expected one of cpu, gpu"),
        ('schedule = "waves"', 'schedule = "wave"', "in 'schedule': found \"wave\""),
        ('determinism = "order-invariant"', "", "found no key 'determinism', expected one of order-invariant"),
        ("schema = 1", "schema = 2", "in 'schema': found 2, expected 1"),
        ("schema = 1", "schema = true", "in 'schema': found true (a boolean), expected an integer"),
        ('name = "tiny"', 'name = "../tiny"', "in 'name': found \"../tiny\" (a string), expected a name of letters"),
        (
            'kv_format = "k16v8"',
            'kv_format = "k16\\nv8"',
            'kv_format\': found "k16\\nv8" (a string), expected a name of',
        ),
        (
            'panel = "panels/parity.json"',
            'panel = "~no-such-user/p"',
            "/~no-such-user/p, expected the parity panel",
        ),
        ("layers = 2", "layers = 0", "in 'model.layers': found 0 (an integer), expected an integer of at least 1"),
        ("kv_heads = 2", "kv_heads = 3", "in 'model.query_heads': found 4 query heads, expected a multiple of the 3"),
        ('"tokenizer.json" = "5', '"tokenizer.json" = "X', "in 'model.files.tokenizer.json'"),
        ('"tokenizer.json"', '"../tokenizer.json"', "found the file name '../tokenizer.json'"),
        ('flags = ["--enforce-eager"]', 'flags = ["--x", 3]', "in 'engine.flags[1]': found 3 (an integer), expected a"),
        (
            'flags = ["--enforce-eager"]',
            'flags = "--x"',
            "in 'engine.flags': found \"--x\" (a string), expected a list",
        ),
        ("boot_timeout_s = 60", "boot_timeout_s = 0", "in 'engine.boot_timeout_s': found 0.0, expected a time above 0"),
        ("boot_timeout_s = 60", "boot_timeout_s = nan", "in 'engine.boot_timeout_s': found nan (a number), expected a"),
        ('HF_HUB_OFFLINE = "1"', "HF_HUB_OFFLINE = 1", "in 'engine.environment.HF_HUB_OFFLINE': found 1 (an integer)"),
        ('HF_HUB_OFFLINE = "1"', '"A B" = "1"', "in 'engine.environment': found the variable name 'A B'"),
        ('unset = ["VLLM_CPU_KVCACHE_SPACE"]', 'unset = ["HF_HUB_OFFLINE"]', "in 'engine.unset[0]': found 'HF_HUB_OFF"),
        ("[arms.native]", '[arms."../x"]', "in 'arms': found the arm name '../x'"),
        ('role = "candidate"', 'role = "test"', "in 'arms.candidate.role': found \"test\""),
        (
            'flags = ["--a-flag=1", "--another"]',
            "flags = [true]",
            "in 'arms.candidate.flags[0]': found true (a boolean)",
        ),
        ('"package.module:register"', '"package.module.register"', "in 'arms.reference.before_load[0]': found"),
        (
            'scales = "scales/candidate-v.json"',
            'scales = "scales/gone.json"',
            "in 'arms.candidate.scales': found no file",
        ),
        (
            'scales = "scales/candidate-v.json"',
            'scales = "/etc/hostname"',
            "in 'arms.candidate.scales': found '/etc/host",
        ),
        (
            'kv_format = "k16v8"',
            'kv_format = "k"\npythonpath = ["gone"]',
            "in 'arms.candidate.pythonpath[0]': found no fo",
        ),
        (
            'kv_format = "k16v8"',
            'kv_format = "k"\ninterpreter = "gone"',
            "in 'arms.candidate.interpreter': found no prog",
        ),
        ("panels/nll-16.json", "panels/nll-64.json", "in 'lengths.16.panels.nll': found no file"),
        (
            "panels/nll-16.json",
            "../nll-16.json",
            "in 'lengths.16.panels.nll': found '../nll-16.json', expected a path in",
        ),
        ('nll = "panels/nll-16.json", ', "", "in 'lengths.16.panels': found no key 'nll'"),
        ("{ nll =", "{ gsm8k =", "in 'lengths.16.panels': found the unknown key 'gsm8k'"),
        ("[lengths.16]", "[lengths.016]", "in 'lengths': found the length '016'"),
        ("[lengths.16]", "[lengths.1K]", "in 'lengths': found the length '1K'"),
        ("max_model_len = 48", "max_model_len = 19", "in 'lengths.16.max_model_len': found 19, expected at least 20"),
        (
            "wave_size = 4",
            "wave_size = 5",
            "in 'lengths.16.wave_size': found 5 (an integer), expected an integer from 1",
        ),
        ("cache_bytes = 65536", "cache_bytes = 65536.0", "in 'lengths.16.cache_bytes': found 65536.0 (a number)"),
        ('panel = "panels/parity.json"', 'panel = "panels/p.json"', "in 'parity.panel': found no file"),
        ("margin_nats = 0.01", "margin_nats = inf", "in 'nll.margin_nats': found inf (a number), expected a finite"),
        ("margin_nats = 0.01", "margin_nats = -0.01", "in 'nll.margin_nats': found -0.01, expected a margin above 0"),
        ("confidence = 0.95", "confidence = 95", "in 'nll.confidence': found 95.0, expected a one-sided confidence"),
        (
            "poison_documents = 2",
            "poison_documents = 5",
            "in 'nll.poison_documents': found 5 (an integer), expected an in",
        ),
        (
            "ambiguous_rows = 0.01",
            "ambiguous_rows = 1.5",
            "in 'oracle.ambiguous_rows': found 1.5 (a number), expected a",
        ),
        ("minimum_cells = 10", "minimum_cells = 0", "in 'oracle.minimum_cells': found 0"),
        (
            'passes = ["model", "probe"]',
            "passes = []",
            "in 'oracle.passes': found an empty list, expected at least one of",
        ),
        ('passes = ["model", "probe"]', "", "in 'oracle': found no key 'passes'"),
        (
            '["model", "probe"]',
            '["model", "prob"]',
            "in 'oracle.passes[1]': found 'prob', expected one of model, probe",
        ),
        ('["model", "probe"]', '["model", "model"]', "in 'oracle.passes[1]': found 'model' a second time"),
        ('["mixed", "chunked"]', "[]", "in 'oracle.conditions': found an empty list, expected at least one of mixed"),
        ('["mixed", "chunked"]', '["mixt"]', "in 'oracle.conditions[0]': found 'mixt', expected one of mixed, chunked"),
        ('["mixed", "chunked"]', '["mixed", "mixed"]', "in 'oracle.conditions[1]': found 'mixed' a second time"),
        ("block_size = 16", "block_size = 16\ntensor_parallel_size = 0", "in 'engine.tensor_parallel_size': found 0"),
        (
            '"torch.bfloat16"',
            '"bfloat16"',
            "in 'arms.native.cache_dtype': found \"bfloat16\" (a string), expected a torch",
        ),
        ('kernels = ["*cpu_attention*"]', 'kernels = [""]', "in 'arms.native.kernels[0]': found \"\""),
        ('kernels = ["*cpu_attention*"]', "kernels_absent = [1]", "in 'arms.native.kernels_absent[0]': found 1"),
        (
            'arm = "native"',
            'arm = "candidate"',
            "in 'waivers[0].arm': found the candidate 'candidate', expected a control",
        ),
        (
            'arm = "native"',
            'arm = "nativ"',
            "in 'waivers[0].arm': found the unknown arm 'nativ', expected one of native",
        ),
        ('gate = "replay"', 'gate = "replays"', "in 'waivers[0].gate': found \"replays\" (a string), expected one of"),
        (
            'gate = "replay"',
            'gate = "nll"',
            "in 'waivers[0].gate': found \"nll\" (a string), expected one of stale-maps",
        ),
        ('finding = "nan-fill"', 'finding = "NaN fill"', "in 'waivers[0].finding': found \"NaN fill\" (a string)"),
        (
            'reason = "Known."',
            'reason = ""',
            "in 'waivers[0].reason': found \"\" (a string), expected a reason in one line",
        ),
        ('reason = "Known."', 'reason = "  "', "in 'waivers[0].reason': found \"  \" (a string), expected a reason"),
        ('reason = "Known."', 'reason = "Known."\nmore = 1', "in 'waivers[0]': found the unknown key 'more'"),
        ('reproducer = "docs/findings.md#nan"', "", "in 'waivers[0]': found no key 'reproducer'"),
        (
            "[gates.routing]",
            "[gates.rooting]",
            "in 'gates': found the unknown gate 'rooting', expected one of identity,",
        ),
        ('state = "planned"', 'state = "skipped"', "in 'gates.dispatch.state': found \"skipped\""),
        (
            "timing = true",
            "timing = false",
            "in 'gates.fidelity.timing': found false, expected true for the gate 'fidelity'",
        ),
        ("[gates.nll]", "[gates.nll]\ntiming = true", "in 'gates.nll.timing': found true, expected false"),
        ('[gates.dispatch]\nstate = "planned"\n', "", "in 'gates': found a timing gate without dispatch above it"),
        ('[gates.recall]\nstate = "planned"\n', "", "found a timing gate without gsm8k or recall above it"),
    ],
)
def test_a_malformed_study_is_one_line(tiny_study: TinyStudy, old: str, new: str, words: str) -> None:
    """Each malformed declaration is refused with the file, the place in it, what was found and what was expected."""
    tiny_study.replace(old, new)
    assert words in str(_refusal(tiny_study))


def test_a_misspelt_gate_or_key_gets_the_name_that_was_meant(tiny_study: TinyStudy) -> None:
    """The advice of an unknown name is the nearest known one."""
    tiny_study.replace("[gates.routing]", "[gates.rooting]")
    assert _refusal(tiny_study).advice == "did you mean 'routing'?"
    tiny_study.replace("[gates.rooting]", "[gates.routing]")
    tiny_study.replace("kv_format", "kv_fromat")
    assert _refusal(tiny_study).advice == "did you mean 'kv_format'?"


def test_a_rotation_that_may_differ_is_seen_by_the_oracles(tiny_study: TinyStudy) -> None:
    """The diagnostic policy needs the oracles to pass the rotated order too."""
    tiny_study.replace('determinism = "order-invariant"', 'determinism = "rotation-diagnostic"')
    assert "in 'oracle.passes': found no pass 'rotated', expected one" in str(_refusal(tiny_study))
    tiny_study.replace('["model", "probe"]', '["model", "rotated"]')
    assert load_study(str(tiny_study.folder)).determinism == "rotation-diagnostic"


def test_a_finding_is_waived_once(tiny_study: TinyStudy) -> None:
    """A second waiver of the same arm, gate and kind is refused; of another kind it is not."""
    text = tiny_study.toml.read_text()
    again = text[text.index("[[waivers]]") :]
    tiny_study.toml.write_text(text + again.replace("nan-fill", "large-fill"))
    assert load_study(str(tiny_study.folder)).waived("native", "replay") == ("nan-fill", "large-fill")
    tiny_study.toml.write_text(text + again)
    assert "found 'nan-fill' of gate replay waived for 'native' twice" in str(_refusal(tiny_study))


def test_gates_out_of_order_are_refused(tiny_study: TinyStudy) -> None:
    """A study may not put a gate above one that it rests on."""
    tiny_study.replace("[gates.routing]", "[gates.X]")
    tiny_study.replace("[gates.placement]", "[gates.routing]")
    tiny_study.replace("[gates.X]", "[gates.placement]")
    assert "found the gate 'placement' where 'routing' belongs" in str(_refusal(tiny_study))


def test_a_study_without_a_control_is_refused(tiny_study: TinyStudy) -> None:
    """The control is each gate's null: a study cannot do without one."""
    text = tiny_study.toml.read_text().replace('role = "control"', 'role = "candidate"')
    tiny_study.toml.write_text(text)
    assert "in 'arms': found no arm with role = \"control\"" in str(_refusal(tiny_study))


@pytest.mark.parametrize("section", ["arms", "lengths", "gates", "model", "engine", "oracle", "parity", "nll"])
def test_a_missing_section_is_named(tiny_study: TinyStudy, section: str) -> None:
    """No section has a default."""
    lines = tiny_study.toml.read_text().split("\n")
    kept, skipping = [], False
    for line in lines:
        if line.startswith("["):
            skipping = line.strip("[]").split(".")[0] == section
        if not skipping:
            kept.append(line)
    tiny_study.toml.write_text("\n".join(kept))
    assert f"found no key '{section}', expected a table" in str(_refusal(tiny_study))


def test_a_study_that_is_no_utf_8_names_the_line(tiny_study: TinyStudy) -> None:
    """Bytes that are not UTF-8 are refused with their line."""
    tiny_study.toml.write_bytes(b'schema = 1\nname = "\xff"\n')
    assert "line 2: found the byte 0xff, expected UTF-8" in str(_refusal(tiny_study))


def test_an_end_that_comes_too_early_names_the_last_line(tiny_study: TinyStudy) -> None:
    """A document that is cut off names its end."""
    tiny_study.toml.write_text("schema = 1\nname = [")
    assert "line 2 (the end): found 'Invalid value'" in str(_refusal(tiny_study))


def test_a_gates_table_without_timing_may_leave_gates_out(tiny_study: TinyStudy) -> None:
    """Only a study that times must list every gate."""
    text = tiny_study.toml.read_text()
    tiny_study.toml.write_text(text[: text.index("[gates.dispatch]")])
    assert [gate.name for gate in load_study(str(tiny_study.folder)).gates] == ["identity"]


def test_a_selection_holds_the_pool_that_was_asked_for(tiny_study: TinyStudy) -> None:
    """The study's pool at that length is the default; a given one replaces it in both places."""
    study = load_study(str(tiny_study.folder))
    default = select(study, arm="candidate", length=16, cache_bytes=None)
    assert (default.cache_bytes, default.length.cache_bytes, default.arm.name) == (65536, 65536, "candidate")
    given = select(study, arm="native", length=32, cache_bytes=4096)
    assert (given.cache_bytes, given.length.cache_bytes, given.length.tokens) == (4096, 4096, 32)
    assert study.lengths[32].cache_bytes == 131072


@pytest.mark.parametrize(
    ("arm", "length", "cache_bytes", "words", "advice"),
    [
        ("candidat", 16, None, "found no arm 'candidat' in study tiny, expected one of native, reference, candidate",
         "did you mean 'candidate'?"),
        ("zzz", 16, None, "found no arm 'zzz'", "choose one, or declare [arms.zzz] in"),
        ("native", 64, None, "found no length 64 in study tiny, expected one of 16, 32", "panels of its own"),
        ("native", True, None, "found no length True", ""),
        ("native", 16, 0, "found 0 cache bytes, expected a positive number of bytes", "declares 65536 at length 16"),
        ("native", 16, -1, "found -1 cache bytes", ""),
        ("native", 16, True, "found True cache bytes", ""),
    ],
)  # fmt: skip
def test_what_a_study_lacks_is_named_with_what_it_has(
    tiny_study: TinyStudy, arm: str, length: int, cache_bytes: int | None, words: str, advice: str
) -> None:
    """An unknown arm or length names those of the study; a pool must be a positive size."""
    study = load_study(str(tiny_study.folder))
    with pytest.raises(StudyError) as caught:
        select(study, arm=arm, length=length, cache_bytes=cache_bytes)
    assert words in str(caught.value)
    assert advice in caught.value.advice


def test_a_study_is_found_by_name_folder_and_file(
    tiny_study: TinyStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name means the named studies first; a folder and its file mean the same study, from any working directory."""
    assert find_study(str(tiny_study.folder)) == find_study(str(tiny_study.toml)) == tiny_study.toml
    monkeypatch.chdir(tiny_study.folder.parent)
    assert find_study("tiny") == find_study("./tiny") == find_study("tiny/study.toml") == tiny_study.toml
    monkeypatch.chdir(tiny_study.folder)
    assert find_study(".") == find_study("study.toml") == find_study("../tiny") == tiny_study.toml
    named = tmp_path / "named"
    shutil.copytree(tiny_study.folder, named / "tiny")
    monkeypatch.setattr(load, "studies_folder", lambda: named)
    monkeypatch.chdir(tiny_study.folder.parent)
    assert find_study("tiny") == named / "tiny" / "study.toml"
    assert load_study("./tiny").directory == tiny_study.folder


def test_a_study_that_is_nowhere_names_the_places_and_the_nearest(
    tiny_study: TinyStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that finds nothing says where it was looked for, and which studies there are."""
    monkeypatch.setattr(load, "studies_folder", lambda: tiny_study.folder.parent)
    for name, advice in (
        ("tini", "did you mean 'tiny'?"),
        ("zzz", "are: tiny"),
        ("", "are: tiny"),
        ("x/y", "are: tiny"),
    ):
        with pytest.raises(StudyError) as caught:
            find_study(name)
        assert advice in caught.value.advice
        assert "\n" not in caught.value.line()


def test_the_embedded_study_is_whole() -> None:
    """The committed study lists its gates in order, times, and names files that are there."""
    study = load_study("smollm2-cpu")
    assert study.directory == studies_folder() / "smollm2-cpu"
    assert list(study.lengths) == [1024, 8192]
    assert [gate.name for gate in study.gates] == [gate for gate in GATES if gate != "gsm8k"]
    assert all(gate.state == "required" for gate in study.gates)
    assert list(study.timing) == [1024]
    assert study.fidelity is not None
    assert all(arm.kernels and arm.cache_dtype for arm in study.arms.values())
    assert study.waived("native", "replay") == ("nan-fill",)
