"""Teacher forcing under the second model runner: the same class, that runner's own context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402 - the engine may be absent
from vllm.config import VllmConfig  # noqa: E402
from vllm.v1.sample import logits_processor as first  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import loader as second  # noqa: E402

from pytest_kvqual.worker.teacher import Teacher, activity  # noqa: E402

pytestmark = pytest.mark.engine

VOCABULARY = 10
NAME = "pytest_kvqual.worker.teacher:Teacher"


@pytest.fixture
def lengths() -> dict[str, Any]:
    """Prompt and fill lengths of four slots, as the runner keeps them."""
    return {name: SimpleNamespace(np=np.array([5, 3, 4, 1], dtype=np.int32)) for name in ("prompt_len", "prefill_len")}


@pytest.fixture
def teacher(lengths: dict[str, Any]) -> Teacher:
    """A processor that the second runner made."""
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
    states = LogitsProcRequestState(
        device=torch.device("cpu"),
        max_num_reqs=4,
        vocab_size=VOCABULARY,
        all_token_ids=cast(Any, None),
        total_len=cast(Any, None),
        **lengths,
    )
    return Teacher(cast(VllmConfig, config), states)


def _parameters(targets: object = None) -> SamplingParams:
    extra = None if targets is None else {"kvqual_targets": targets}
    return SamplingParams(temperature=0.0, max_tokens=2, extra_args=extra)


def _chosen(teacher: Teacher, slots: list[int], lengths: list[int]) -> list[int]:
    """The greedy tokens of a step over these slots, whose requests are so long with it; the model prefers token 9."""
    logits = torch.zeros(len(slots), VOCABULARY)
    logits[:, 9] = 5.0
    mapping = torch.tensor(slots)
    context = LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32),
        input_ids=torch.zeros(len(slots), dtype=torch.int32),
        pos=torch.tensor(lengths) - 1,
        # Padded, as the runner's buffer is.
        seq_lens_upper_bound_np=np.array([*lengths, 0]),
    )
    return cast(list[int], teacher.apply(logits, context).argmax(-1).tolist())


def test_both_runners_load_the_class_by_its_name() -> None:
    """Each runner's own loader takes the class, and each refuses one that has the other's interface alone."""
    assert second._load_v2_logitsprocs_by_fqcns([NAME]) == [Teacher]
    assert first._load_logitsprocs_by_fqcns([NAME]) == [Teacher]
    with pytest.raises(ValueError, match="is not a subclass of"):
        second._load_v2_logitsprocs_by_fqcns(["vllm.v1.sample.logits_processor:MinPLogitsProcessor"])


def test_each_slot_gets_its_own_target(teacher: Teacher) -> None:
    """Rows follow the slots of the step in whatever order, by how long each request is; others are untouched."""
    assert teacher.add_request(0, _parameters([3, 4]))
    assert teacher.add_request(2, _parameters([7, 8]))
    assert not teacher.add_request(1, _parameters())
    assert _chosen(teacher, [2, 1, 0], [4, 9, 5]) == [7, 9, 3]
    assert _chosen(teacher, [0, 2], [6, 5]) == [4, 8]
    assert _chosen(teacher, [0, 2], [7, 6]) == [9, 9]
    assert (teacher.registered, teacher.forced, teacher.slots) == (2, 4, {})


def test_chunks_of_a_prompt_are_not_forced(teacher: Teacher) -> None:
    """Rows of a prompt that is not complete yet are left alone, and count as no output."""
    teacher.add_request(0, _parameters([3, 4]))
    assert _chosen(teacher, [0], [2]) == [9]
    assert _chosen(teacher, [0], [5]) == [3]


def test_a_resumed_request_goes_on_where_it_was(teacher: Teacher, lengths: dict[str, Any]) -> None:
    """A preempted request comes back in another slot with its output: its next target follows, and it counts once."""
    teacher.add_request(0, _parameters([3, 4]))
    assert _chosen(teacher, [0], [5]) == [3]
    lengths["prompt_len"].np[3], lengths["prefill_len"].np[3] = 5, 6
    teacher.add_request(3, _parameters([3, 4]))
    assert _chosen(teacher, [3], [6]) == [4]
    assert teacher.registered == 1


def test_a_slots_next_request_has_nothing_of_the_last(teacher: Teacher) -> None:
    """A slot that is used again forgets the targets of whoever had it."""
    teacher.add_request(0, _parameters([3, 4]))
    teacher.add_request(0, _parameters())
    assert _chosen(teacher, [0], [5]) == [9]


def test_a_target_beyond_the_vocabulary_is_counted_and_not_forced(teacher: Teacher) -> None:
    """As under the first runner, such a request is refused and served without targets."""
    assert not teacher.add_request(0, _parameters([3, VOCABULARY]))
    assert (teacher.refused, _chosen(teacher, [0], [5])) == (1, [9])
    assert activity()["refused"] >= 1


def test_a_step_of_several_rows_a_request_is_left_alone(teacher: Teacher) -> None:
    """With drafts there are more rows than requests, and none is forced."""
    teacher.add_request(0, _parameters([3, 4]))
    logits = torch.zeros(2, VOCABULARY)
    context = SimpleNamespace(
        expanded_idx_mapping=torch.tensor([0, 0]), idx_mapping_np=np.array([0]), seq_lens_upper_bound_np=np.array([5])
    )
    assert teacher.apply(logits, cast(LogitsContext, context)).count_nonzero() == 0


def test_a_processor_of_the_first_runner_refuses_the_seconds_context() -> None:
    """Made by one runner and called by the other is an error, not silence."""
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
    teacher = Teacher(cast(VllmConfig, config), torch.device("cpu"), False)
    with pytest.raises(TypeError, match="first model runner"):
        _chosen(teacher, [0], [5])
