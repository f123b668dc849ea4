"""Faults of which row an output belongs to, and of what an output depends on."""

from __future__ import annotations

from typing import Any

import torch

from pytest_kvqual.faults.planting import Call, Step, override, replace, wrap_attention


def outputs_rolled_by_one_row(worker: Any) -> None:
    """Each row gets the output of the row before it."""

    def change(call: Call) -> None:
        call.run()
        rows = int(call.starts[-1])
        call.output[:rows] = call.output[:rows].roll(1, 0)

    wrap_attention(worker, change)


def outputs_of_previous_step(worker: Any) -> None:
    """A row gets what the same row of the previous step got, as far as that step had it."""
    held: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
    step = Step(worker)

    def change(call: Call) -> None:
        call.run()
        number, old, now = held.get(id(call.layer), (-1, call.output, call.output))
        if number != step.number:
            old, now = now, call.output.clone()
            held[id(call.layer)] = (step.number, old, now)
        rows = min(int(call.starts[-1]), len(old))
        call.output[:rows] = old[:rows]

    wrap_attention(worker, change)


def outputs_in_arrival_order(worker: Any) -> None:
    """Rows are handed out in the order in which their requests arrived, not in that of the batch."""
    arrived: dict[int, int] = {}

    def change(call: Call) -> None:
        call.run()
        spans = list(call.spans())
        rank = [arrived.setdefault(int(call.table[request, 0]), len(arrived)) for request, *_ in spans]
        order = [spans[place] for place in sorted(range(len(spans)), key=lambda place: rank[place])]
        rows = torch.cat([torch.arange(first, last) for _, first, last, _ in order])
        call.output[: len(rows)] = call.output[rows]

    wrap_attention(worker, change)


def rows_of_two_requests_exchanged(worker: Any) -> None:
    """The last rows of the first two requests get each other's output."""

    def change(call: Call) -> None:
        call.run()
        spans = list(call.spans())
        if len(spans) > 1:
            left, right = spans[0][2] - 1, spans[1][2] - 1
            call.output[[left, right]] = call.output[[right, left]]

    wrap_attention(worker, change)


def rows_mapped_before_reorder(worker: Any) -> None:
    """The probe maps rows to requests before the runner reorders them."""
    original = worker.row_order

    def row_order(schedule: Any) -> Any:
        rows = {name: (name, start, count) for name, start, count in original(schedule)}
        return [rows[name] for name in schedule]

    replace(worker, worker, "row_order", row_order)


def _one_more(values: torch.Tensor) -> torch.Tensor:
    """16-bit floats that are one unit in the last place further from zero."""
    return (values.contiguous().view(torch.int16) + 1).view(values.dtype)


def output_depends_on_batch_index(worker: Any) -> None:
    """Every second request of a batch is rounded the other way."""

    def change(call: Call) -> None:
        call.run()
        for request, first, last, _ in call.spans():
            if request % 2:
                call.output[first:last] = _one_more(call.output[first:last])

    wrap_attention(worker, change)


def output_depends_on_step_number(worker: Any) -> None:
    """About every second step, by its number since the start, is rounded the other way."""
    step = Step(worker)

    def change(call: Call) -> None:
        call.run()
        if step.number * 2654435761 >> 13 & 1:
            rows = int(call.starts[-1])
            call.output[:rows] = _one_more(call.output[:rows])

    wrap_attention(worker, change)


def splits_depend_on_batch_size(worker: Any) -> None:
    """The number of parts that a request's positions are cut into depends on how many requests the batch has."""

    def change(kernel: Any, original: Any, *args: Any) -> object:
        found = original(*args)
        kernel.splits = 1 + len(found) % 3
        return found

    for layer in worker.kvqual_layers().values():
        replace(worker, layer.impl.backend, "splits", layer.impl.backend.splits)
    override(worker, "row_ranges", change)


def parts_added_in_another_order(worker: Any) -> None:
    """Parts are added from the last to the first where the batch has an odd number of requests."""
    odd = [False]

    def ranges(kernel: Any, original: Any, *args: Any) -> object:
        found = original(*args)
        odd[0] = len(found) % 2 == 1
        return found

    def merge(kernel: Any, original: Any, outputs: Any, lses: Any) -> object:
        return original(outputs[::-1], lses[::-1]) if odd[0] else original(outputs, lses)

    override(worker, "row_ranges", ranges)
    override(worker, "merge", merge)
