"""The gate report as one HTML page: self-contained, without a script, readable in any order of light and of paper.

Nothing is loaded from anywhere: style and plots stand in the page, and its content security policy forbids the rest.
Equal run directories give equal bytes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Final

from markupsafe import Markup, escape

from pytest_kvqual._places import gates_argument
from pytest_kvqual.judge.verdict import Outcome
from pytest_kvqual.report.gate import answers
from pytest_kvqual.report.gate.answers import TASKS, Changed
from pytest_kvqual.report.gate.evidence import EvidenceFile
from pytest_kvqual.report.gate.figures import figures
from pytest_kvqual.report.gate.plots import Figure
from pytest_kvqual.report.gate.run import GateState, RunState, ScopeState, passes
from pytest_kvqual.report.gate.words import bytes_of, count, number, one_line, visible
from pytest_kvqual.report.terminal import null_word

if TYPE_CHECKING:
    from jinja2 import Environment

FINDINGS: Final = 60
"""How many findings of one gate are shown; the receipt holds all."""

DETAILS: Final = 24_000
"""How many characters of a receipt's details are shown."""

CUT: Final = 600
"""How many characters of a finding are shown."""

TONES: Final[Mapping[str, str]] = {
    "PASS": "pass", "FAIL": "fail", "INCONCLUSIVE": "unsure", "REFUSED": "refused", "DAMAGED": "fail",
    "NO RECEIPT": "unsure", "NOT ASKED": "none", "PLANNED": "none",
}  # fmt: skip
SIGNS: Final[Mapping[str, str]] = {"pass": "✓", "fail": "✕", "unsure": "?", "refused": "⊘", "none": "–"}

ESTABLISHES: Final[Mapping[str, str]] = {
    "identity": "source, weights, cache layout, bytes per element and scales are those of the lock",
    "dispatch": "each layer runs the declared backend and kernels, and still does after each capture",
    "stale-maps": "block table, lengths and row starts of each step are those of this step",
    "routing": "each K and V lies in the cell that the scheduler dictates, in the declared encoding; no other changes",
    "shifted-outputs": "no output row is the attention of another row",
    "placement": "each output row is within a derived tolerance of its own attention over the ledger",
    "replay": "outputs do not change by a bit when cells that nobody wrote hold NaN, 1e4 or another request's K and V",
    "determinism": "the same requests in another order, and again, give the tokens that the study's policy asks for",
    "parity": "serial answers over HTTP are those of the same engine in process, token for token",
    "nll": "the upper bound of the mean loss difference against each control is below the margin",
    "retrieval": "of what each control finds in a long text, the arm loses less than the limit, with confidence",
    "gsm8k": "of the questions that each control answers right, the arm loses less than the limit, with confidence",
    "recall": "of the questions that each control answers right, the arm loses less than the limit, with confidence",
    "fidelity": "the recorder measures a server of known delays as it is, failures and all",
    "trial": "one arm of one frozen block, timed once on a fresh server, was what the plan says and nothing else",
    "superiority": "over complete blocks the arm is faster than its control, in every comparison that was declared",
}

_ORACLES: Final = ("stale-maps", "routing", "shifted-outputs", "placement", "replay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """What the receipts of a scope say together: a word with its tone, and one sentence."""

    word: str
    tone: str
    sentence: str
    more: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GatePart:
    """One gate's section."""

    gate: GateState
    key: str
    tone: str
    sign: str
    figure: str
    limit: str
    establishes: str
    null: str
    null_tone: str
    faults: str
    faults_tone: str
    findings: tuple[str, ...]
    more_findings: int
    figures: tuple[Figure, ...]
    drawn: str
    changed: tuple[Changed, ...]
    evidence: tuple[EvidenceFile, ...]
    missing: tuple[EvidenceFile, ...]
    rests: tuple[str, ...]
    details: str
    details_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopePart:
    """One scope's part of the page."""

    scope: ScopeState
    key: str
    headline: Headline
    parts: tuple[GatePart, ...]
    claims: tuple[str, ...]
    disclaims: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str], ...]
    implementations: tuple[str, ...]


def render(run: RunState) -> str:
    """The page."""
    parts = [_scope_part(run, scope, f"s{place}") for place, scope in enumerate(run.scopes, start=1)]
    main = [part for part in parts if part.scope.role == "candidate"] or parts
    rest = [part for part in parts if part not in main]
    named = [file for part in parts for gate in part.parts for file in gate.evidence]
    broken = {file.name: file for file in named if file.state != "intact"}
    problems = [f"evidence/{file.name}: {file.why}" for file in broken.values()]
    problems += [f"{it.name}: {it.reason}" for part in parts for gate in part.parts for it in gate.gate.damaged]
    problems += [f"{it.name}: {it.reason}" for it in run.astray]
    problems += [part.scope.study.why for part in parts if part.scope.study.why]
    problems += [f"{gate.gate.receipt.name}: {line}" for part in parts for gate in part.parts if gate.gate.receipt
                 for line in gate.rests]  # fmt: skip
    template = _environment().get_template("page.html")
    return template.render(
        run=run,
        main=main,
        rest=rest,
        title=("As written: " if problems else "") + _title(main),
        tone=_tone(main, problems),
        problems=list(dict.fromkeys(problems)),
        files=len({file.name for file in named}),
        intact=len({file.name for file in named}) - len(broken),
        style=Markup(_text("style.css")),  # ours, and no markup of anybody else goes into it
        signs=SIGNS,
        tones=TONES,
        audit_tone=""
        if run.audit is None
        else "pass"
        if run.audit.result == "PASSED" and not run.audit.other and not problems
        else "unsure"
        if run.audit.why or run.audit.other or run.audit.result == "PASSED"
        else "fail",
        shown=answers.SHOWN,
    )


def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True, lstrip_blocks=True,
        loader=DictLoader({"page.html": _text("page.html")}),
    )  # fmt: skip
    filters: dict[str, Callable[..., object]] = {"line": one_line, "count": count, "together": _together}
    environment.filters.update(filters)
    return environment


def _finalize(value: object) -> object:
    """What stands in the page: markup of ours as it is, text with nothing unseen in it."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _together(text: str) -> Markup:
    """A sentence of the page in which no line ends between a number and its sign."""
    return Markup(str(escape(visible(text))).replace(" %", "&nbsp;%"))  # escaped here


def _text(name: str) -> str:
    return resources.files("pytest_kvqual.report.gate").joinpath("templates", name).read_text("utf-8")


# -- the headline ------------------------------------------------------------------------------------------------------


def headline(scope: ScopeState) -> Headline:
    """What the receipts say together. The first gate that is no PASS is named: those below it rest on it."""
    arm, length = scope.scope.arm, count(scope.scope.length)
    asked = scope.asked
    before = [it for it in asked if not it.timing]
    first = next((it for it in before if not passes(it)), None)
    if first is None and not before:
        return Headline(
            word="NO GATES", tone="unsure", sentence=f"{arm}: no gate has a receipt at length {length}.", more=""
        )
    if first is not None:
        return Headline(
            word=first.said if first.said != "NO RECEIPT" else "INCOMPLETE",
            tone=TONES[first.said],
            sentence=_objection(first, arm, length),
            more=first.figure,
        )
    timing = [it for it in scope.gates if it.timing]
    broken = next((it for it in asked if it.timing and not passes(it)), None)
    superior = next((it for it in timing if it.name == "superiority" and passes(it)), None)
    sentence = f"{arm} passes all {len(before)} gates before timing at length {length}"
    if broken is not None and broken.name == "superiority" and broken.said in ("FAIL", "INCONCLUSIVE"):
        sentence += f", and is not shown to be faster: superiority {_WORDS[broken.said]}."
        return Headline(word=broken.said, tone=TONES[broken.said], sentence=sentence, more=broken.figure)
    if broken is not None:
        sentence += f"; of the timing gates, {broken.name} {_WORDS[broken.said]}."
        return Headline(word=broken.said, tone=TONES[broken.said], sentence=sentence, more=broken.figure)
    if superior is not None:
        sentence += ", and is faster than its controls in every comparison that was declared."
        return Headline(word="PASS", tone="pass", sentence=sentence, more=superior.figure)
    return Headline(word="PASS", tone="pass", sentence=f"{sentence}. Its speed is not judged.", more="")


_WORDS: Final[Mapping[str, str]] = {
    "FAIL": "fails", "INCONCLUSIVE": "is inconclusive", "REFUSED": "was refused", "DAMAGED": "has a damaged receipt",
    "NO RECEIPT": "has no receipt", "PASS": "passes", "NOT ASKED": "was not asked for", "PLANNED": "is not built yet",
}  # fmt: skip


def _objection(gate: GateState, arm: str, length: str) -> str:
    where = f"at length {length}"
    if gate.said == "FAIL":
        return f"{arm} does not qualify {where}: gate {gate.order}, {gate.name}, fails."
    if gate.said == "INCONCLUSIVE":
        return f"Nothing is shown about {arm} {where}: gate {gate.order}, {gate.name}, is inconclusive."
    return f"{arm} is not qualified {where}: gate {gate.order}, {gate.name}, {_WORDS[gate.said]}."


def _tone(main: Sequence[ScopePart], problems: Sequence[str]) -> str:
    """The tone of the first box: a pass only where every scope says so and all that they name is there."""
    tones = {part.headline.tone for part in main}
    if tones == {"pass"}:
        return "unsure" if problems else "pass"
    return next(iter(tones)) if len(tones) == 1 else "fail"


def _title(main: Sequence[ScopePart]) -> str:
    if len(main) == 1:
        return main[0].headline.sentence
    good = sum(part.headline.tone == "pass" for part in main)
    return f"{good} of {len(main)} scopes pass: each is an arm at one length."


# -- one scope ---------------------------------------------------------------------------------------------------------


def _scope_part(run: RunState, scope: ScopeState, key: str) -> ScopePart:
    parts = tuple(_gate_part(run, scope, gate, f"{key}-{place}") for place, gate in enumerate(scope.gates, start=1))
    implementations = {it.gate.receipt.implementation for it in parts if it.gate.receipt is not None}
    return ScopePart(
        scope=scope,
        key=key,
        headline=headline(scope),
        parts=parts,
        claims=_claims(scope),
        disclaims=_disclaims(scope),
        facts=_facts(scope),
        commands=_commands(scope),
        implementations=tuple(sorted(implementations)),
    )


def _facts(scope: ScopeState) -> tuple[tuple[str, str], ...]:
    study, found = scope.study, scope.scope
    controls = [name for name, role in study.roles.items() if role == "control" and name != found.arm]
    facts = [
        ("Arm", found.arm + (f" ({scope.role})" if scope.role not in ("unknown", found.arm) else "")),
        ("Against", ", ".join(controls)),
        ("Model", study.model),
        ("Length", f"{count(found.length)} tokens"),
        ("KV pool", bytes_of(found.cache_bytes)),
        ("Engine", study.engine),
        ("Study", f"{study.name} ({study.platform})" if study.name else ""),
        ("Prefix", scope.prefix),
    ]
    return tuple((name, value) for name, value in facts if value)


def _claims(scope: ScopeState) -> tuple[str, ...]:
    """What the gates that say PASS establish, in plain words."""
    said = {it.name for it in scope.gates if passes(it)}
    claims = []
    if {"identity", "dispatch"} <= said:
        claims.append("What ran is what the lock declares, and each layer ran the declared kernels.")
    oracles = [name for name in _ORACLES if scope.gate(name) is not None]
    if oracles and set(oracles) <= said:
        claims.append(
            "Every K and V that the oracle panel wrote lay in its cell, and each output was the attention of its row."
        )
    if {"determinism", "parity"} <= said:
        claims.append(
            "Reordered and repeated requests gave the tokens that the policy asks for, over HTTP as in process."
        )
    nll = scope.gate("nll")
    if nll is not None and nll.receipt is not None and "nll" in said:
        details = nll.receipt.verdict.details
        margin, confidence = number(details.get("margin")), number(details.get("confidence"))
        if margin is not None and confidence is not None:
            claims.append(
                f"The mean loss on held-out text rose by less than {margin:g} nats per token ({100 * confidence:g} % "
                "confidence)."
            )
    for task in TASKS:
        gate = scope.gate(task)
        if gate is None or gate.receipt is None or task not in said:
            continue
        details = gate.receipt.verdict.details
        limit, confidence = number(details.get("limit")), number(details.get("confidence"))
        total = details.get("questions")
        if limit is not None and confidence is not None and isinstance(total, int):
            claims.append(
                f"Of questions like the {count(total)} of {task}, fewer than {100 * limit:g} % are lost against each "
                f"control ({100 * confidence:g} % confidence)."
            )
    if "superiority" in said:
        claims.append("In every declared comparison it was faster, over complete blocks of a frozen plan.")
    return tuple(claims) or ("Nothing: no gate that says so passed.",)


def _disclaims(scope: ScopeState) -> tuple[str, ...]:
    found = ["Another model, length, pool size, engine, flag or machine than this scope."]
    if any(scope.gate(task) is not None for task in TASKS):
        found.append("That no answer changed: the bounds are on harm to right answers, and some harm passes.")
    superior = scope.gate("superiority")
    if superior is None or not passes(superior):
        found.append("Anything about speed: no superiority gate passed.")
    found.append("Who wrote the files: digests notice accidents, and are no signature.")
    found.append("A check by this page: it shows what receipts say. An audit derives it again.")
    return tuple(found)


def _commands(scope: ScopeState) -> tuple[tuple[str, str], ...]:
    study, found = scope.study, scope.scope
    # They are there to be copied: what a study calls itself is one word of a shell.
    platform = study.platform if study.platform in ("cpu", "gpu") else "cpu"
    name = shlex.quote(study.name or "STUDY")
    name += f" --format {shlex.quote(study.format)}" if study.format else ""
    options = f"--study {name} --arm {found.arm} --length {found.length}"
    declared = study.table("lengths", str(found.length)).get("cache_bytes")
    if declared != found.cache_bytes:
        options += f" --cache-bytes {found.cache_bytes}"
    if scope.prefix:
        options += f" --prefix {scope.prefix}"
    prefix = f" --prefix {scope.prefix}" if scope.prefix else ""
    gates = gates_argument()
    commands = [
        ("the study is the one that was frozen", f"kvqual freeze {name} --check"),
        ("the gates, on the engine", f"pytest {gates} -m {platform} {options}"),
    ]
    if any(it.timing and it.receipt for it in scope.gates):
        commands += [
            ("the trials of the frozen plan, in order", f"kvqual plan {name} --trials {found.length}"),
            ("one of them", f'pytest {gates} -m "{platform} and timing" {options} --block 1'),
            ("the statistics", f'pytest {gates} -m "{platform} and timing" {options}'),
        ]
    commands += [
        ("the verdicts, from the raw records, without an engine",
         f"kvqual audit RUN_DIR --arm {found.arm} --length {found.length}{prefix}"),
        ("this page", f"kvqual report RUN_DIR{prefix} --html report.html --junit report.xml"),
    ]  # fmt: skip
    return tuple(commands)


# -- one gate ----------------------------------------------------------------------------------------------------------


def _gate_part(run: RunState, scope: ScopeState, gate: GateState, key: str) -> GatePart:
    receipt = gate.receipt if gate.said != "DAMAGED" else None
    verdict = receipt.verdict if receipt is not None else None
    null = verdict.null if verdict is not None else None
    drawn = _drawn(run, scope) if gate.name == "trial" else ""
    plots = () if drawn else figures(run, scope, gate, key)
    changed = answers.changed(run, scope, gate) if receipt is not None and gate.name in TASKS else ()
    receipts = gate.receipts if gate.name == "trial" else (receipt,)
    named = {name: sha256 for it in receipts if it is not None for name, sha256 in it.evidence.items()}
    evidence = tuple(run.evidence.state(name, sha256) for name, sha256 in sorted(named.items()))
    text = "" if verdict is None or not verdict.details else json.dumps(
        verdict.details, indent=1, ensure_ascii=False, sort_keys=True
    )  # fmt: skip
    seeded = verdict is not None and verdict.poison
    tone = TONES[gate.said]
    return GatePart(
        gate=gate,
        key=key,
        tone=tone,
        sign=SIGNS[tone],
        figure=_figure(gate),
        limit=_limit(scope, gate),
        establishes=ESTABLISHES.get(gate.name, ""),
        null="–" if null is None or verdict is None else null_word(verdict) if null.passed else "failed",
        null_tone="none" if null is None else "pass" if null.passed else "fail",
        faults=f"{verdict.faults_caught} of {verdict.faults_seeded}" if verdict is not None and seeded else "–",
        faults_tone="none"
        if verdict is None or not seeded
        else "pass"
        if verdict.faults_caught == verdict.faults_seeded
        else "fail",
        findings=tuple(one_line(it, CUT) for it in verdict.findings[:FINDINGS]) if verdict is not None else (),
        more_findings=max(0, len(verdict.findings) - FINDINGS) if verdict is not None else 0,
        figures=plots,
        drawn=drawn,
        changed=changed,
        evidence=evidence,
        missing=tuple(it for it in evidence if it.state != "intact"),
        rests=_rests(scope, gate),
        details=text[:DETAILS],
        details_cut=len(text) > DETAILS,
    )


def _drawn(run: RunState, scope: ScopeState) -> str:
    """The scope whose section has the plots of every arm's trials, by its key; empty where that is this one."""
    for place, other in enumerate(run.scopes, start=1):
        gate = other.gate("trial")
        same = (other.scope.lock, other.scope.length, other.scope.cache_bytes) == (
            scope.scope.lock, scope.scope.length, scope.scope.cache_bytes,
        )  # fmt: skip
        if same and gate is not None and gate.receipts:
            return "" if other is scope else f"s{place}"
    return ""


def _figure(gate: GateState) -> str:
    """The line that decided; of the trials of several blocks, how many of them passed too."""
    if gate.name != "trial" or len(gate.receipts) < 2 or gate.said == "DAMAGED":
        return gate.figure
    passed = sum(receipt.outcome is Outcome.PASS for receipt in gate.receipts)
    return f"{passed} of {len(gate.receipts)} trials PASS; the newest: {gate.figure}"


def _rests(scope: ScopeState, gate: GateState) -> tuple[str, ...]:
    """What of the receipts that this one rests on is not as it says."""
    if gate.receipt is None or gate.receipt.outcome is not Outcome.PASS:
        return ()
    lines = []
    for name, sha256 in gate.receipt.requires.items():
        other = scope.gate(name)
        there = {it.sha256 for it in other.receipts} if other is not None else set()
        if sha256 not in there:
            lines.append(f"rests on a receipt of {name} with sha256 {sha256[:12]}…, which is not in this run directory")
        elif other is not None and other.receipt is not None and other.receipt.sha256 != sha256:
            lines.append(f"rests on an earlier receipt of {name} than the newest, {other.receipt.name}")
    return tuple(lines)


def _limit(scope: ScopeState, gate: GateState) -> str:
    """What the figure is held against, from the receipt's details and the frozen study."""
    details: Mapping[str, object] = gate.receipt.verdict.details if gate.receipt is not None else {}
    make = _LIMITS.get(gate.name)
    if make is not None:
        return make
    study = scope.study
    if gate.name == "determinism":
        return f"policy {study.tables.get('determinism', details.get('policy', ''))}: equal tokens"
    if gate.name == "nll":
        margin, unit = number(details.get("margin")), details.get("unit", "nats per token")
        margin = number(study.table("nll").get("margin_nats")) if margin is None else margin
        return "" if margin is None else f"bound < {margin:g} {unit}"
    if gate.name in TASKS:
        limit = number(details.get("limit"))
        limit = number(study.table(gate.name).get("limit")) if limit is None else limit
        return "" if limit is None else f"bound < {100 * limit:g} %"
    if gate.name == "fidelity":
        table = details.get("limits")
        limits = table if isinstance(table, Mapping) else {}
        names = (("ttft_error_p50", "TTFT p50"), ("ttft_error_p99", "p99"), ("tpot_error_p99", "TPOT p99"),
                 ("lateness_p99", "lateness p99"))  # fmt: skip
        found = [(text, number(limits.get(name))) for name, text in names]
        return ", ".join(f"{text} < {value:g} ms" for text, value in found if value is not None)
    if gate.name == "superiority":
        alpha, practical = number(details.get("alpha")), number(details.get("practical"))
        if alpha is not None and practical is not None:
            return f"Holm p ≤ {alpha:g}, median {100 * practical:g} % better"
    return ""


_LIMITS: Final[Mapping[str, str]] = {
    "identity": "every rule of the lock",
    "dispatch": "every layer as declared",
    "stale-maps": "0 findings",
    "routing": "0 findings",
    "shifted-outputs": "0 rows",
    "placement": "1 × derived tolerance",
    "replay": "0 bits",
    "parity": "0 prompts",
    "trial": "every rule of the plan",
}
