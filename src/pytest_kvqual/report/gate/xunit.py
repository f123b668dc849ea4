"""The gate report as JUnit: one suite for each arm and length, one case for each gate, valid against xunit2.

The schema of ``xunit2`` (``junit-10.xsd`` of the Jenkins xUnit plugin, by which pytest tests its own file) knows
properties of suites alone. So the digest of each case's receipt is a property of its suite, ``GATE.receipt.sha256``,
and stands again in the case's own ``system-out``.

A receipt that says FAIL is a ``failure``; INCONCLUSIVE, REFUSED, a damaged receipt and a required gate without one are
an ``error``: nothing was shown. A gate of timing that was not asked for is ``skipped``.
"""

from __future__ import annotations

from xml.etree import ElementTree

from pytest_kvqual.report.gate.run import GateState, RunState, ScopeState, passes
from pytest_kvqual.report.gate.words import one_line, visible

_ERRORS = ("INCONCLUSIVE", "REFUSED", "DAMAGED", "NO RECEIPT")


def render(run: RunState) -> bytes:
    """The file: UTF-8, with an XML declaration."""
    root = ElementTree.Element("testsuites", {"name": "kvqual"})
    totals = {"tests": 0, "failures": 0, "errors": 0}
    for scope in run.scopes:
        suite = _suite(scope)
        root.append(suite)
        for name in totals:
            totals[name] += int(suite.attrib[name])
    for name, value in totals.items():
        root.set(name, str(value))
    ElementTree.indent(root)
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _suite(scope: ScopeState) -> ElementTree.Element:
    found = scope.scope
    name = f"kvqual.{scope.prefix}{found.arm}.{found.length}"
    if len({it.name for it in scope.gates}) != len(scope.gates):
        raise ValueError(f"{name}: found a gate twice, expected each once")
    suite = ElementTree.Element("testsuite", {"name": f"{name}.{found.cache_bytes}"})
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "arm": found.arm, "length": str(found.length), "cache_bytes": str(found.cache_bytes), "lock": found.lock,
        "engine": found.engine, "study": scope.study.name, "model": scope.study.model, "role": scope.role,
    }  # fmt: skip
    for key, value in facts.items():
        _property(properties, key, value)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for gate in scope.gates:
        kind = _kind(gate)
        counts["tests"] += 1
        if kind:
            counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[kind]] += 1
        for key, value in _facts(gate).items():
            _property(properties, f"{gate.name}.{key}", value)
        suite.append(_case(gate, name, kind))
    for key, number in counts.items():
        suite.set(key, str(number))
    return suite


def _kind(gate: GateState) -> str:
    """The element of a case's outcome; empty where it passed."""
    if passes(gate):
        return ""
    return "failure" if gate.said == "FAIL" else "error" if gate.said in _ERRORS else "skipped"


def _case(gate: GateState, suite: str, kind: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", {"name": visible(gate.name), "classname": suite})
    receipt = gate.receipt if gate.said != "DAMAGED" else None
    if kind:
        outcome = ElementTree.SubElement(case, kind, {"type": gate.said, "message": one_line(gate.figure)})
        if receipt is not None and receipt.verdict.findings:
            outcome.text = "\n".join(one_line(it) for it in receipt.verdict.findings)
    lines = [f"verdict: {gate.said}", *(f"{key}: {value}" for key, value in _facts(gate).items() if key != "verdict")]
    ElementTree.SubElement(case, "system-out").text = "\n".join(one_line(line) for line in lines)
    return case


def _facts(gate: GateState) -> dict[str, str]:
    """What is said of a gate: verdict, figure, null, faults, its receipt and its digest."""
    facts: dict[str, str] = {"verdict": gate.said, "figure": gate.figure}
    if gate.receipt is None or gate.said == "DAMAGED":
        return facts
    verdict = gate.receipt.verdict
    if verdict.null is not None:
        facts["null"] = f"{'passed' if verdict.null.passed else 'failed'}: {verdict.null.figure}"
    if verdict.poison:
        facts["faults"] = f"{verdict.faults_caught}/{verdict.faults_seeded}"
    facts["receipt"] = gate.receipt.name
    facts["receipt.sha256"] = gate.receipt.sha256
    return facts


def _property(parent: ElementTree.Element, name: str, value: str) -> None:
    ElementTree.SubElement(parent, "property", {"name": one_line(name), "value": one_line(value)})
