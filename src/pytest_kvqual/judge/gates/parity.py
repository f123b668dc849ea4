"""Gate 7, parity: the served model, asked one prompt at a time, answers token for token as the engine does in process.

The rules:

1. The panel has ``parity.prompts`` items of ``parity.max_tokens`` tokens each.
2. HTTP: one record per prompt, answered under status 200, the prompt come back as sent, sent in the panel's order.
3. Reference: one record per prompt in the order ``forward`` and one in ``reverse``, in that order each.
4. Every prompt's tokens and finish reason over HTTP equal those of the reference, in both orders.
5. Null: the control's own serial capture, forward and reversed, is complete and identical.
6. Poison: tokens captured live under each planted fault differ from the reference. Every fault of ``faults`` was run.
7. Poison: the comparison of rule 4 objects to its own reference with one token altered, with the answers of two prompts
   swapped, and with one record missing, and does not object to the reference itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pytest_kvqual.judge.gates._conclude import Objections, complete_poison, conclude, null_check
from pytest_kvqual.judge.gates._records import Item, Panel, Record, by_item
from pytest_kvqual.judge.verdict import Poison, Verdict
from pytest_kvqual.study.model import Study
from pytest_kvqual.tasks.parity import Output, reference_output, served_output

GATE = "parity"
ORDERS = ("forward", "reverse")


def judge(
    study: Study,
    panel: Panel,
    *,
    http: Sequence[Record] | None,
    reference: Sequence[Record] | None,
    null: tuple[Sequence[Record], Sequence[Record]] | None,
    poison: Mapping[str, Sequence[Record]],
    faults: Sequence[str] = (),
) -> Verdict:
    """Judge the serial parity of one arm.

    Args:
        study: The study; its ``parity`` rules are what is expected.
        panel: The frozen parity panel.
        http: The arm's capture records, sent serially in the panel's order (``forward``).
        reference: The records of the in-process reference of the same arm, both orders.
        null: The control's HTTP captures, forward and reversed.
        poison: HTTP records by planted fault; any number of the panel's prompts, at least one.
        faults: The names of the faults that must be among them.
    """
    own = Objections()
    if len(panel.items) != study.parity.prompts:
        own.gap(1, f"panel: found {len(panel.items)} prompts, expected {study.parity.prompts}")
    for item in panel.items:
        if item.max_tokens != study.parity.max_tokens:
            own.gap(1, f"panel '{item.id}': found {item.max_tokens} tokens, expected {study.parity.max_tokens}")
    served = _served(own, 2, panel, http, origin="http", order="forward")
    references = {order: _reference(own, panel, reference, order) for order in ORDERS}
    differing = {order: compare(own, 4, panel, served, expected, order) for order, expected in references.items()}
    null_objections, check = None, None
    if null is not None:
        null_objections = Objections()
        forward, backward = (
            _served(null_objections, 5, panel, records, origin=f"null {order}", order=order)
            for order, records in zip(ORDERS, null, strict=True)
        )
        changed = compare(null_objections, 5, panel, backward, forward, "the control's forward capture")
        check = null_check(null_objections, f"{len(panel.items)} prompts, {changed} differ")
    seeded = [_live(panel, name, records, references["forward"]) for name, records in poison.items()]
    return conclude(
        GATE,
        figure=f"{len(served)} prompts, 0 differ in both orders",
        objections=own,
        null=check,
        null_objections=null_objections,
        poison=(*complete_poison(seeded, faults), *_damage(panel, references["forward"])),
        details={
            "prompts": len(panel.items),
            "served": len(served),
            "tokens": sum(len(output.token_ids) for output in served.values()),
            "differing": differing,
        },
    )


def compare(
    result: Objections,
    rule: int,
    panel: Panel,
    found: Mapping[str, Output],
    expected: Mapping[str, Output],
    against: str,
) -> int:
    """Object to each prompt whose tokens or finish reason differ; a prompt without both sides is a gap. Counts both."""
    count = 0
    for item in panel.items:
        one, other = found.get(item.id), expected.get(item.id)
        if one is None or other is None:
            count += 1
            result.gap(rule, f"prompt '{item.id}': no answer to compare ({against})")
        elif one.token_ids != other.token_ids:
            count += 1
            result.find(rule, f"prompt '{item.id}': {_difference(one.token_ids, other.token_ids)} ({against})")
        elif one.finish_reason != other.finish_reason:
            count += 1
            result.find(
                rule,
                f"prompt '{item.id}': found finish_reason '{one.finish_reason}', expected '{other.finish_reason}' "
                f"({against})",
            )
    return count


def _difference(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    for position, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"found token {one} at position {position}, expected {other}"
    return f"found {len(found)} tokens, expected {len(expected)}"


def _served(
    result: Objections,
    rule: int,
    panel: Panel,
    records: Sequence[Record] | None,
    *,
    origin: str,
    order: str,
) -> dict[str, Output]:
    def parse(item: Item, record: Record, where: str) -> Output:
        return served_output(record, origin=where, prompt=item.prompt, max_tokens=item.max_tokens)

    return _outputs(result, rule, panel, records, parse, origin=origin, order=order)


def _reference(result: Objections, panel: Panel, records: object, order: str) -> dict[str, Output]:
    def parse(item: Item, record: Record, where: str) -> Output:
        return reference_output(record, origin=where, prompt=item.prompt, max_tokens=item.max_tokens)

    if not isinstance(records, list | tuple):
        result.gap(3, f"reference {order}: {'the records are missing' if records is None else 'found no list'}")
        return {}
    for place, record in enumerate(records):
        if order == ORDERS[0] and (not isinstance(record, Mapping) or record.get("order") not in ORDERS):
            result.gap(3, f"reference[{place}]: found no known order, expected one of {', '.join(ORDERS)}")
    chosen = [record for record in records if isinstance(record, Mapping) and record.get("order") == order]
    return _outputs(result, 3, panel, chosen, parse, origin=f"reference {order}", order=order)


def _outputs(
    result: Objections,
    rule: int,
    panel: Panel,
    records: Sequence[Record] | None,
    parse: Callable[[Item, Record, str], Output],
    *,
    origin: str,
    order: str,
) -> dict[str, Output]:
    outputs: dict[str, Output] = {}
    entries = by_item(result, rule, panel, records, origin=origin)
    sent = [item.id for item, _, _ in entries]
    names = [item.id for item in panel.items]
    if sorted(sent) == sorted(names) and sent != (names if order == ORDERS[0] else names[::-1]):
        result.gap(rule, f"{origin}: found the records in another order than the panel's ({order})")
    for item, record, where in entries:
        with result.reading(rule):
            output = parse(item, record, where)
            if output.order != order:
                result.gap(rule, f"{where}: found the order '{output.order}', expected '{order}'")
            elif output.index != names.index(item.id):
                result.gap(
                    rule, f"{where}: found the index {output.index}, expected {names.index(item.id)}, its panel's"
                )
            else:
                outputs[item.id] = output
    return outputs


def _live(panel: Panel, fault: str, records: Sequence[Record], reference: Mapping[str, Output]) -> Poison:
    """Rule 6: a capture that cannot be read shows nothing; one that can must differ somewhere."""
    scratch = Objections()
    entries = by_item(
        scratch,
        6,
        panel,
        records,
        origin=f"poison '{fault}'",
        only=len(records) if isinstance(records, list | tuple) else 1,
    )
    differing, line = 0, ""
    for item, record, where in entries:
        with scratch.reading(6):
            output = served_output(record, origin=where, prompt=item.prompt, max_tokens=item.max_tokens)
            expected = reference.get(item.id)
            if expected is None:
                scratch.gap(6, f"{where}: no reference for '{item.id}'")
            elif output.token_ids != expected.token_ids:
                differing += 1
                line = line or f"'{item.id}': {_difference(output.token_ids, expected.token_ids)}"
    if scratch or not entries:
        return Poison(fault=fault, caught=False, figure=scratch.first() or "found no record")
    if differing:
        return Poison(fault=fault, caught=True, figure=f"{differing} of {len(entries)} prompts differ; {line}")
    return Poison(fault=fault, caught=False, figure=f"found 0 of {len(entries)} prompts that differ")


def _damage(panel: Panel, reference: Mapping[str, Output]) -> tuple[Poison, ...]:
    """Rule 7, on the reference alone, so that what the arm answered cannot make it pass."""
    untouched = Objections()
    compare(untouched, 7, panel, reference, reference, "itself")
    damaged = {
        "record-one-token-altered": _altered(reference),
        "record-two-prompts-swapped": _swapped(reference),
        "record-missing": dict(list(reference.items())[1:]),
    }
    result = []
    for name, copy in damaged.items():
        scratch = Objections()
        compare(scratch, 7, panel, copy, reference, "damaged")
        if untouched:
            result.append(Poison(fault=name, caught=False, figure=untouched.first()))
        elif scratch:
            result.append(Poison(fault=name, caught=True, figure=scratch.first()))
        else:
            result.append(Poison(fault=name, caught=False, figure="found no difference, expected one"))
    return tuple(result)


def _altered(outputs: Mapping[str, Output]) -> dict[str, Output]:
    copy = dict(outputs)
    for name, output in outputs.items():
        copy[name] = replace(output, token_ids=(*output.token_ids[:-1], output.token_ids[-1] + 1))
        break
    return copy


def _swapped(outputs: Mapping[str, Output]) -> dict[str, Output]:
    """Swap the first two answers that differ; a panel whose prompts all have one answer cannot show a swap."""
    copy = dict(outputs)
    names = list(outputs)
    for name in names[1:]:
        if outputs[name].token_ids != outputs[names[0]].token_ids:
            copy[names[0]], copy[name] = outputs[name], outputs[names[0]]
            break
    return copy
