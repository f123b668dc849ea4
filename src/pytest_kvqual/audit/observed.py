"""The gates identity and dispatch: what was observed of each arm, held again against the study (check 12).

Both are chained: what they observed was observed inside the engine. Of identity this looks at weights, scales, layers,
sockets, and, in a study of platform ``gpu``, the device; of dispatch at backends, cache dtypes and kernels. The cache's
layout in memory and the digests of the installed files are not looked at again.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.frozen import Frozen
from pytest_kvqual.audit.receipts import Receipt
from pytest_kvqual.audit.shapes import items, shown, strings, table, text

_MOMENTS: Final = ("before_warmup", "before_capture", "now")
_INDEX: Final = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def identity(
    receipt: Receipt, frozen: Frozen, own: object, null: object, poison: object, null_arm: str, report: Report
) -> None:
    """Hold a receipt of identity against ``identity.json`` of the arm and of the control."""
    report.look(12)
    faults = {}
    for value in items(table(poison, "identity-poison"), "poison", "identity-poison") if poison is not None else []:
        entry = table(value, "identity-poison")
        fault = text(entry, "fault", "identity-poison")
        faults[fault] = _identity_breaks(frozen, receipt.scope.arm, entry.get("identity"))
    healthy = {
        receipt.scope.arm: "" if own is None else _identity_breaks(frozen, receipt.scope.arm, own),
        f"control {null_arm}": "" if null is None else _identity_breaks(frozen, null_arm, null),
    }
    if frozen.study.get("platform") == "gpu":
        seen = [None if document is None else _devices(document) for document in (own, null)]
        for (whose, line), devices in zip(healthy.items(), seen, strict=True):
            if isinstance(devices, str):
                healthy[whose] = line or devices
        if all(isinstance(devices, list) for devices in seen) and seen[0] != seen[1]:
            whose = f"control {null_arm}"
            healthy[whose] = healthy[whose] or f"another device or setting than that of {receipt.scope.arm}"
    _hold(receipt, "identity.json", healthy, faults, report)


def _devices(document: object) -> list[object] | str:
    """What each rank ran on, without the state of the moment; what is missing, where a rank does not say."""
    found: list[object] = []
    for place, value in enumerate(items(table(document, "identity"), "ranks", "identity")):
        record = table(table(value, f"ranks[{place}]").get("device"), f"ranks[{place}].device")
        listed = record.get("devices")
        device = listed[0] if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], dict) else {}
        settings = device.get("settings")
        if not all(isinstance(it, str) and it for it in (device.get("uuid"), device.get("name"), record.get("driver"))):
            return f"ranks[{place}]: no one device with its name, UUID and driver"
        if not isinstance(settings, dict) or all(it is None for it in settings.values()):
            return f"ranks[{place}]: no settings of the device"
        sizes = (device.get("memory_bytes"), device.get("compute_capability"))
        found.append([device["uuid"], device["name"], record["driver"], record.get("cuda"), *sizes, settings])
    return found


def _identity_breaks(frozen: Frozen, arm: str, value: object) -> str:
    """The first thing in an identity document that is not as the study declares it; empty where nothing is."""
    outer = table(value, "identity")
    ranks = items(outer, "ranks", "identity")
    if not ranks:
        return "no rank"
    for place, record in enumerate(ranks):
        at = f"ranks[{place}]"
        rank = table(record, at)
        weights = table(rank.get("parameters"), f"{at}.parameters")
        if not weights.get("expected") or not weights["expected"] == weights.get("loaded") == weights.get("now"):
            return f"{at}: parameters that are not those of the weight files"
        scales = _scales_break(frozen, arm, table(rank.get("scales"), f"{at}.scales"))
        if scales:
            return f"{at}: {scales}"
    addresses = [table({"it": pair}, "sockets")["it"] for pair in items(outer, "sockets", "identity")]
    for pair in addresses:
        host = pair[0] if isinstance(pair, list) and pair else None
        if not isinstance(host, str) or not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return f"a socket on {shown(host)}, expected the loopback address"
    return "" if addresses else "no socket"


def _scales_break(frozen: Frozen, arm: str, scales: Mapping[str, object]) -> str:
    layers = frozen.part("model").get("layers")
    declared = frozen.scales.get(arm)
    for moment in _MOMENTS:
        entries = items(scales, moment, "scales")
        if len(entries) != layers:
            return f"scales of {len(entries)} layers {moment}, expected {shown(layers)}"
        for value in entries:
            entry = table(value, f"scales.{moment}")
            match = _INDEX.search(text(entry, "layer", "scales"))
            index = int(match[1]) if match is not None else -1
            expected = {"k": 1.0, "v": 1.0 if declared is None else declared[index] if index < len(declared) else None}
            for which, wanted in expected.items():
                copies = table(entry.get(which), "scales")
                for copy, stored in copies.items():
                    for number in stored if isinstance(stored, list) else [stored]:
                        found = float.fromhex(number) if isinstance(number, str) else number
                        if found != wanted:
                            return f"scale {copy} of {entry['layer']} is {shown(found)} {moment}, expected {wanted}"
                if not copies:
                    return f"no copy of a scale of {entry['layer']}"
    return ""


def dispatch(receipt: Receipt, frozen: Frozen, own: object, null: object, null_arm: str, report: Report) -> None:
    """Hold a receipt of dispatch against ``dispatch.json`` of the arm and of the control."""
    report.look(12)
    arm = receipt.scope.arm
    faults = {}
    for value in items(table(own, "dispatch"), "poison", "dispatch") if own is not None else []:
        entry = table(value, "dispatch.poison")
        faults[text(entry, "fault", "dispatch.poison")] = _reading_breaks(frozen, arm, entry)
    _hold(
        receipt,
        "dispatch.json",
        {
            arm: "" if own is None else _dispatch_breaks(frozen, arm, own),
            f"control {null_arm}": "" if null is None else _dispatch_breaks(frozen, null_arm, null),
        },
        faults,
        report,
    )


def _dispatch_breaks(frozen: Frozen, arm: str, value: object) -> str:
    outer = table(value, "dispatch")
    readings = [table(one, "readings") for one in items(outer, "readings", "dispatch")]
    if not readings:
        return "no reading"
    if outer.get("arm") != arm:
        return f"the arm {shown(outer.get('arm'))}, expected {arm!r}"
    for reading in readings:
        line = _reading_breaks(frozen, arm, reading)
        if line:
            return line
        if reading.get("ranks") != readings[0].get("ranks"):
            return f"other kernels after {shown(reading.get('after'))} than at the start"
    return ""


def _reading_breaks(frozen: Frozen, arm: str, reading: Mapping[str, object]) -> str:
    declared = frozen.arms.get(arm, {})
    patterns = {key: strings({key: declared.get(key, [])}, key, arm) for key in ("kernels", "kernels_absent")}
    ranks = items(reading, "ranks", "readings")
    if len(ranks) != frozen.part("engine").get("tensor_parallel_size", 1):
        return f"{len(ranks)} ranks"
    implementations: set[str] = set()
    for value in ranks:
        layers = table(table(value, "ranks").get("layers"), "layers")
        if len(layers) != frozen.part("model").get("layers"):
            return f"{len(layers)} layers"
        for name, entry in layers.items():
            layer = table(entry, name)
            ran = strings(layer, "kernels", name)
            implementations.add(text(layer, "impl", name))
            if layer.get("backend") != declared.get("attention_backend"):
                return f"{name} on {shown(layer.get('backend'))}"
            if "cache_dtype" in declared and layer.get("cache_dtype") != declared["cache_dtype"]:
                return f"{name} with a cache of {shown(layer.get('cache_dtype'))}"
            missing = [it for it in patterns["kernels"] if not any(fnmatchcase(one, it) for one in ran)]
            present = [it for it in patterns["kernels_absent"] if any(fnmatchcase(one, it) for one in ran)]
            if missing or present or not ran:
                return f"{name} without {missing or 'a kernel'}" if not present else f"{name} with {present}"
    return "" if len(implementations) == 1 else f"{len(implementations)} implementations, expected one"


def _hold(receipt: Receipt, file: str, healthy: Mapping[str, str], faults: Mapping[str, str], report: Report) -> None:
    """Under PASS nothing breaks in a healthy document; a fault is caught exactly where its document breaks."""
    if receipt.outcome == "PASS":
        for whose, line in healthy.items():
            if line:
                report.find(12, receipt.name, f"{file} of {whose}: found {line}, expected nothing under PASS")
    said = {fault: caught for fault, caught, _ in receipt.poison}
    for fault in sorted(set(said) | set(faults)):
        if fault not in faults:
            report.find(12, receipt.name, f"poison {fault!r}: found it in the receipt alone, expected its record")
        elif fault not in said:
            report.find(12, receipt.name, f"poison {fault!r}: found its record alone, expected it in the receipt")
        elif said[fault] and not faults[fault]:
            # What this reader does not look at may have been what objected; a miss alone is no contradiction.
            report.find(12, receipt.name, f"poison {fault!r}: found it caught, expected its record to show it")
