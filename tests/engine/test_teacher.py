"""Teacher forcing follows the batch and touches no other row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402 - the engine may be absent
from vllm.config import VllmConfig  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate  # noqa: E402
from vllm.v1.sample.logits_processor.interface import MoveDirectionality  # noqa: E402

from pytest_kvqual.worker.teacher import Teacher, activity  # noqa: E402

pytestmark = pytest.mark.engine

VOCABULARY = 10


@pytest.fixture
def teacher() -> Teacher:
    """A processor over a vocabulary of ten."""
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
    return Teacher(cast(VllmConfig, config), torch.device("cpu"), False)


def parameters(targets: object = None, **more: object) -> SamplingParams:
    """Sampling parameters as the server makes them from ``vllm_xargs``."""
    extra = None if targets is None else {"kvqual_targets": targets}
    settings: dict[str, object] = {"temperature": 0.0, "max_tokens": 2, "extra_args": extra} | more
    return SamplingParams(**settings)


def update(
    teacher: Teacher,
    added: tuple[tuple[int, object, list[int]], ...] = (),
    removed: tuple[int, ...] = (),
    moved: tuple[tuple[int, int, MoveDirectionality], ...] = (),
) -> None:
    """Hand over one change of the batch."""
    teacher.update_state(
        BatchUpdate(
            batch_size=4,
            removed=removed,
            added=[(row, parameters(targets), [0], output) for row, targets, output in added],
            moved=moved,
        )
    )


def chosen(teacher: Teacher, rows: int = 3) -> list[int]:
    """The token that greedy sampling takes in each row; the model always prefers token 9."""
    logits = torch.zeros(rows, VOCABULARY)
    logits[:, 9] = 5.0
    return cast(list[int], teacher.apply(logits).argmax(-1).tolist())


def test_each_step_forces_its_own_target(teacher: Teacher) -> None:
    """The i-th output token is the i-th target; after the last one the model is free again."""
    output: list[int] = []
    update(teacher, added=((1, [3, 4], output),))
    assert chosen(teacher) == [9, 3, 9]
    output.append(3)
    assert chosen(teacher) == [9, 4, 9]
    output.append(4)
    assert chosen(teacher) == [9, 9, 9]
    assert (teacher.registered, teacher.forced) == (1, 2)


def test_other_rows_keep_their_logits_bit_for_bit(teacher: Teacher) -> None:
    """Forcing one row changes nothing in its neighbours, NaN included."""
    update(teacher, added=((1, [3], []),))
    logits = torch.randn(3, VOCABULARY)
    logits[0, 2] = float("nan")
    before = logits.clone()
    after = teacher.apply(logits)
    for row in (0, 2):
        assert torch.equal(after[row].view(torch.int32), before[row].view(torch.int32))


def test_a_target_is_chosen_even_where_the_model_gives_it_nothing(teacher: Teacher) -> None:
    """A target whose logit is NaN or minus infinity is forced all the same."""
    update(teacher, added=((0, [3], []), (1, [4], [])))
    logits = torch.full((2, VOCABULARY), float("nan"))
    logits[1] = float("-inf")
    assert teacher.apply(logits).argmax(-1).tolist() == [3, 4]


def test_a_removed_request_is_forgotten(teacher: Teacher) -> None:
    """A row without its request is free, and a later request without targets in it stays free."""
    update(teacher, added=((0, [3, 4], []),))
    update(teacher, removed=(0,))
    assert chosen(teacher)[0] == 9
    update(teacher, added=((0, [3, 4], []),))
    update(teacher, added=((0, None, []),))
    assert chosen(teacher)[0] == 9


def test_targets_move_with_their_request(teacher: Teacher) -> None:
    """A one-way move overwrites its destination; a swap exchanges both rows."""
    update(teacher, added=((0, [3, 3], []), (2, [4, 4], [])))
    update(teacher, moved=((2, 0, MoveDirectionality.UNIDIRECTIONAL),))
    assert chosen(teacher) == [4, 9, 9]
    update(teacher, moved=((0, 1, MoveDirectionality.SWAP),))
    assert chosen(teacher) == [9, 4, 9]
    update(teacher, added=((0, [5, 5], []),))
    update(teacher, moved=((0, 1, MoveDirectionality.SWAP),))
    assert chosen(teacher) == [4, 5, 9]


def test_a_preempted_request_goes_on_where_it_was(teacher: Teacher) -> None:
    """A request that comes back with output is continued, and counted once."""
    update(teacher, added=((0, [3, 4], []),))
    update(teacher, removed=(0,))
    update(teacher, added=((1, [3, 4], [3]),))
    assert chosen(teacher) == [9, 4, 9]
    assert teacher.registered == 1


def test_an_id_outside_the_vocabulary_is_counted_and_not_forced(teacher: Teacher) -> None:
    """Such a request does not end the engine; the count tells that it was refused."""
    update(teacher, added=((0, [3, VOCABULARY], []),))
    assert chosen(teacher)[0] == 9
    assert (teacher.registered, teacher.refused) == (0, 1)


def test_what_the_processors_did_can_be_read(teacher: Teacher) -> None:
    """The process's counts include every live processor."""
    before = activity()
    update(teacher, added=((0, [3, 4], []),))
    chosen(teacher)
    after = activity()
    assert after["registered"] - before["registered"] == 1
    assert after["forced"] - before["forced"] == 1
    assert after["active"] >= 1


def test_greedy_requests_do_not_skip_the_processor(teacher: Teacher) -> None:
    """The engine drops argmax-invariant processors for greedy sampling; this one is not."""
    assert teacher.is_argmax_invariant() is False


@pytest.mark.parametrize(
    ("targets", "more", "message"),
    [
        ([], {}, "non-empty list"),
        ("12", {}, "non-empty list"),
        ([1, -2], {}, r"\[1\]: found -2"),
        ([1, True], {}, r"\[1\]: found True"),
        ([1, 2.0], {}, r"\[1\]: found 2.0"),
        ([1], {}, "max_tokens=2, expected 1"),
        ([1, 2, 3], {}, "max_tokens=2, expected 3"),
        ([1, 2], {"temperature": 0.5}, "temperature 0.5, expected 0"),
    ],
)
def test_targets_that_cannot_be_forced_are_refused(targets: object, more: dict[str, object], message: str) -> None:
    """A request with malformed targets is refused before the engine sees it."""
    with pytest.raises(ValueError, match=message):
        Teacher.validate_params(parameters(targets, **more))


def test_requests_without_targets_pass() -> None:
    """Neither no extra arguments nor others are this processor's business."""
    Teacher.validate_params(parameters())
    Teacher.validate_params(parameters(extra_args={"other": 1}))
    Teacher.validate_params(parameters([1, 2]))
