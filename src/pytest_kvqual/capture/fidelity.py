"""The recorder against the deterministic server: recordings of known loads, and what the server says that it did.

One server, a process of its own (:mod:`pytest_kvqual.testing.server`), for the whole gate. Each case is one replay:

- ``open``, ``closed``: the study's load, ``requests`` of ``tokens`` tokens; ``open-again``: ``open`` once more.
- ``quirks``: a request for each quirk that a stream may have and still be complete.
- ``failures``: at the study's rate, one request in twenty fails, in each way once.
- ``large-prompt``: prompts of 100,000 tokens.
- ``poison-FAULT``: a short load for each of :data:`~pytest_kvqual.faults.recorder.RECORDER_FAULTS`, planted.

The delays differ from request to request, by its number alone. Nothing is judged here.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest_kvqual
from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual._clock import monotonic_ns
from pytest_kvqual.capture.recorder import Load, Offered, replay
from pytest_kvqual.errors import CaptureError, EvidenceError
from pytest_kvqual.faults.recorder import RECORDER_FAULTS
from pytest_kvqual.judge.permit import TimingPermit
from pytest_kvqual.study.model import FidelityRules
from pytest_kvqual.testing.script import COMPLETED, QUIRKS

_SECOND = 1_000_000_000
_START_S = 15.0
_SERVER_SPARE_S = 20.0
_REQUEST_S = 10.0
_FAILURE_S = 0.5
_FAILURE_SHARE = 20
_SHORT_TOKENS = 6
_QUIRK_TOKENS = 12
_QUIRK_RATE = 100.0
_LARGE = 100_000
_LARGE_REQUESTS = 6
_LARGE_RATE = 16.0
_POISON_RATE = 200.0
_POISON_REQUESTS = 28
_POISON_QUIRKS = ("error-object", "tokens-per-event", "dropped", "status-503", "role-first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One replay: its requests, how they are sent, and the fault that is planted in the recorder, if any."""

    name: str
    load: Load
    offered: tuple[Offered, ...]
    timeout_s: float = _REQUEST_S
    fault: str | None = None


def cases(rules: FidelityRules) -> Iterator[Case]:
    """The cases of the gate, in order, made one at a time."""
    loads: tuple[tuple[str, float | None], ...] = (("open", rules.rate), ("closed", None), ("open-again", rules.rate))
    for name, rate in loads:
        yield Case(
            name=name,
            load=Load(mode="open") if rate else Load(mode="closed", concurrency=rules.concurrency),
            offered=_offered(name, [()] * rules.requests, tokens=rules.tokens, rate=rate),
        )
    quirks: list[tuple[str, ...]] = [(name,) for name, (outcome, _) in QUIRKS.items() if outcome == COMPLETED]
    quirks += [("split-anywhere", "crlf"), ("split-anywhere", "tokens-per-event", "ping"), ("no-space", "cr", "fields")]
    yield Case(
        name="quirks",
        load=Load(mode="open"),
        offered=_offered("quirks", quirks, tokens=_QUIRK_TOKENS, rate=_QUIRK_RATE),
    )
    failing = [name for name, (outcome, _) in QUIRKS.items() if outcome != COMPLETED]
    mixed: list[tuple[str, ...]] = [()] * (_FAILURE_SHARE * len(failing))
    for index, name in enumerate(failing):
        mixed[_FAILURE_SHARE * index + _FAILURE_SHARE // 2] = (name,)
    yield Case(
        name="failures",
        load=Load(mode="open"),
        offered=_offered("failures", mixed, tokens=_SHORT_TOKENS, rate=rules.rate),
        timeout_s=_FAILURE_S,
    )
    large = [("huge-prompt",) if index % 2 else () for index in range(_LARGE_REQUESTS)]
    yield Case(
        name="large-prompt",
        load=Load(mode="open"),
        offered=_offered("large-prompt", large, tokens=_SHORT_TOKENS, rate=_LARGE_RATE, prompt_tokens=_LARGE),
    )
    for fault in RECORDER_FAULTS:
        mixed = [()] * _POISON_REQUESTS
        mixed[2 : 2 + 5 * len(_POISON_QUIRKS) : 5] = [(name,) for name in _POISON_QUIRKS]
        name = f"poison-{fault}"
        yield Case(
            name=name,
            load=Load(mode="open"),
            offered=_offered(name, mixed, tokens=_SHORT_TOKENS, rate=_POISON_RATE),
            fault=fault,
        )


def capture_fidelity(
    rules: FidelityRules,
    *,
    permit: TimingPermit,
    folder: Path,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Replay every case; per case ``fidelity-NAME.jsonl`` and ``fidelity-NAME-truth.json``, returned in order.

    Args:
        rules: The study's load.
        permit: Whose judgment goes into each recording.
        folder: An existing folder; a file of one of these names must not be in it.
        timeout_s: The most seconds for all cases together; the server lives no longer.
        progress: Called with (cases done, cases).

    Raises:
        CaptureError: The server did not start or does not answer, or the time is over.
        EvidenceError: A file exists or cannot be written.
    """
    deadline = monotonic_ns() + round(timeout_s * _SECOND)
    total = sum(1 for _ in cases(rules))
    files: list[Path] = []
    with known_server(seconds=timeout_s + _SERVER_SPARE_S) as port:
        for done, case in enumerate(cases(rules)):
            if monotonic_ns() >= deadline:
                raise CaptureError(f"fidelity: {done} of {total} cases within {timeout_s:g} s, expected all of them")
            recording = folder / f"fidelity-{case.name}.jsonl"
            truth = folder / f"fidelity-{case.name}-truth.json"
            ask(port, "POST", "/reset")
            replay(
                f"http://127.0.0.1:{port}",
                case.offered,
                load=case.load,
                header={"cell": case.name, "judgment": permit.judgment, "about": {"fault": case.fault}},
                out=recording,
                timeout_s=case.timeout_s,
                plant=None if case.fault is None else RECORDER_FAULTS[case.fault].plant,
            )
            # The form of every document of evidence.
            document = canonical_bytes({**ask(port, "GET", "/truth"), "case": case.name})
            try:
                truth.write_bytes(document + b"\n")
            except OSError as error:
                raise EvidenceError(f"cannot write {truth}: {error.strerror or error}") from None
            files += [recording, truth]
            if progress is not None:
                progress(done + 1, total)
    return files


@contextmanager
def known_server(*, seconds: float) -> Iterator[int]:
    """A deterministic server for the time of the block; its port. It ends with the block, or with this process.

    Raises:
        CaptureError: It did not start.
    """
    root = str(Path(pytest_kvqual.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_kvqual.testing.server", "--port", "0", "--seconds", str(math.ceil(seconds))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        yield _port(process)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(port: int, method: str, path: str) -> Mapping[str, Any]:
    """One page of the deterministic server, which is JSON.

    Raises:
        CaptureError: It did not answer so.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        document = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CaptureError(f"the deterministic server: {method} {path}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if response.status != 200 or not isinstance(document, dict):
        raise CaptureError(f"the deterministic server: {method} {path}: found status {response.status}, expected 200")
    return document


def body(
    request: str, *, tokens: int, script: Mapping[str, object], prompt_tokens: int = 4, first_token: int = 0
) -> bytes:
    """The body of one request to the deterministic server, whose prompt is ``prompt_tokens`` token IDs."""
    # A long prompt as text: 100,000 numbers through a JSON encoder would be most of this gate's work.
    prompt = ",".join([str(10_000 + (first_token + place) % 80_000) for place in range(prompt_tokens)])
    rest = json.dumps(
        {
            "model": "known",
            "request_id": request,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "kvqual_script": dict(script),
        }
    )
    return b'{"prompt":[%b],%b' % (prompt.encode(), rest[1:].encode())


def _offered(
    case: str, quirks: Sequence[Sequence[str]], *, tokens: int, rate: float | None, prompt_tokens: int = 4
) -> tuple[Offered, ...]:
    return tuple(
        Offered(
            request=f"{case}-{index:04d}",
            prompt=f"known-{index:04d}",
            max_tokens=tokens,
            intended_ns=None if rate is None else round(index * _SECOND / rate),
            body=body(
                f"{case}-{index:04d}",
                tokens=tokens,
                # The first token after 20 to 59 ms, the others 5 to 11 ms apart.
                script={"first_ms": 20 + index * 17 % 40, "gap_ms": 5 + index * 5 % 7, "quirk": list(names)},
                prompt_tokens=prompt_tokens,
                first_token=index,
            ),
        )
        for index, names in enumerate(quirks)
    )


def _port(process: subprocess.Popen[bytes]) -> int:
    if process.stdout is None:
        raise CaptureError("the deterministic server has no output")
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    line = process.stdout.readline() if ready else b""
    try:
        return int(json.loads(line)["port"])
    except (ValueError, KeyError, TypeError):
        found = f"{line[:80]!r}" if ready else f"nothing within {_START_S:g} s"
        raise CaptureError(f"the deterministic server: found {found}, expected its port") from None
