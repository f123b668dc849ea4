"""Teacher forcing: a vLLM logits processor that makes the sampler choose given token ids.

A request carries ``vllm_xargs = {"kvqual_targets": [ids]}``; its i-th output token is then ``ids[i]``. With
``logprobs = 0`` the answer holds the log-probability of each forced token under the distribution *before* this
processor ran (vLLM's default ``logprobs_mode = "raw_logprobs"``), which is the target's loss.

vLLM's two model runners have two interfaces for this, and each refuses a class of the other's. One class has both: the
arguments that it is made with say which runner made it.

Runs in the engine's worker and, for :meth:`Teacher.validate_params`, in the API server.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELD = "kvqual_targets"

_instances: weakref.WeakSet[Teacher] = weakref.WeakSet()


def activity() -> dict[str, int]:
    """What this process's processors did: requests ``registered``, ``refused`` and ``active``; tokens ``forced``."""
    teachers = list(_instances)
    return {
        "teachers": len(teachers),
        "registered": sum(teacher.registered for teacher in teachers),
        "refused": sum(teacher.refused for teacher in teachers),
        "active": sum(len(teacher.rows) + len(teacher.slots) for teacher in teachers),
        "forced": sum(teacher.forced for teacher in teachers),
    }


class Teacher(LogitsProcessor, LogitsProcessorV2):
    """Forces the targets of the requests that have them; leaves every other row untouched.

    Attributes:
        rows: Batch row -> (targets, the request's output tokens so far; the engine's own list, it grows by itself).
        slots: Under the second model runner: slot of a request -> its targets. A slot is overwritten by its next
            request and never told to be empty.
        registered: Requests with targets seen since the start.
        forced: Tokens forced since the start.
        refused: Requests whose targets lie outside the vocabulary; nothing is forced for them.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose targets cannot all be forced; the server answers 400.

        Raises:
            ValueError: The targets are no non-empty list of non-negative integers, are fewer than ``max_tokens``, or
                the sampling is not greedy.
        """
        targets = (sampling_params.extra_args or {}).get(FIELD)
        if targets is None:
            return
        if not isinstance(targets, list) or not targets:
            raise ValueError(f"{FIELD}: found {type(targets).__name__}, expected a non-empty list of token ids")
        for position, target in enumerate(targets):
            if type(target) is not int or target < 0:
                raise ValueError(f"{FIELD}[{position}]: found {target!r}, expected a token id")
        if sampling_params.max_tokens != len(targets):
            raise ValueError(
                f"{FIELD}: found max_tokens={sampling_params.max_tokens}, expected {len(targets)}, one a target"
            )
        if sampling_params.temperature != 0:
            raise ValueError(f"{FIELD}: found temperature {sampling_params.temperature}, expected 0")

    def __init__(
        self,
        vllm_config: VllmConfig,
        given: torch.device | LogitsProcRequestState,
        is_pin_memory: bool | None = None,
    ) -> None:
        self.vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._states = given if isinstance(given, LogitsProcRequestState) else None
        self.slots: dict[int, list[int]] = {}
        self.rows: dict[int, tuple[list[int], list[int]]] = {}
        self.registered = 0
        self.forced = 0
        self.refused = 0
        _instances.add(self)

    def is_argmax_invariant(self) -> bool:
        """False: the engine must not skip this processor for greedy requests."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: the engine asks for removed, added, moved, in this order."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, _, output in batch_update.added:
            # A new request may take over a row without a removal.
            self.rows.pop(row, None)
            targets = (params.extra_args or {}).get(FIELD)
            if targets is not None:
                # Validation runs where no vocabulary is at hand. To raise here would end the engine for every request:
                # an id beyond the vocabulary is counted and not forced, and the answer then differs from its targets.
                if max(targets) >= self.vocabulary:
                    self.refused += 1
                    continue
                self.rows[row] = (targets, output)
                # A preempted request comes back with its output so far.
                self.registered += not output
        for source, destination, direction in batch_update.moved:
            moved = self.rows.pop(source, None)
            replaced = self.rows.pop(destination, None)
            if moved is not None:
                self.rows[destination] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = replaced

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Follow a slot, under the second model runner; a preempted request comes back with a slot anew."""
        self.slots.pop(req_idx, None)
        targets = (sampling_params.extra_args or {}).get(FIELD)
        if targets is None:
            return False
        if max(targets) >= self.vocabulary:
            self.refused += 1
            return False
        self.slots[req_idx] = targets
        states = self._states
        self.registered += states is None or int(states.prefill_len.np[req_idx]) == int(states.prompt_len.np[req_idx])
        return True

    def _due(self, context: LogitsContext) -> list[tuple[int, int]]:
        """(row, target) of the batch at hand, by what each request has been given so far."""
        if self._states is None:
            raise TypeError("a processor of the first model runner was given the second one's context")
        if len(context.expanded_idx_mapping) != len(context.idx_mapping_np):
            # Several rows of one request: which of them is sampled is not known here.
            return []
        found = []
        for row, (slot, length) in enumerate(
            zip(context.idx_mapping_np.tolist(), context.seq_lens_upper_bound_np.tolist(), strict=False)
        ):
            targets = self.slots.get(slot)
            # Chunks of a prompt have rows too, which nothing is sampled from.
            index = length - int(self._states.prompt_len.np[slot])
            if targets is not None and 0 <= index < len(targets):
                found.append((row, targets[index]))
                if index == len(targets) - 1:
                    del self.slots[slot]
        return found

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Leave one finite logit, the target's, in each row that has a target for this step.

        Args:
            logits: [rows, vocabulary], changed in place and returned.
            ctx: The batch at hand, from the second model runner.
        """
        due = (
            [(row, targets[len(output)]) for row, (targets, output) in self.rows.items() if len(output) < len(targets)]
            if ctx is None
            else self._due(ctx)
        )
        if due:
            rows = torch.tensor([row for row, _ in due], device=logits.device)
            tokens = torch.tensor([token for _, token in due], device=logits.device)
            logits[rows] = float("-inf")
            # Zero, not the model's own value: that may be -inf or NaN, and the token must be chosen all the same.
            logits[rows, tokens] = 0.0
            self.forced += len(due)
        return logits
