"""The figures of one request, and what makes a stream no complete answer."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from recorded import DONE, MS, answer, event, never_sent, request, token, usage

from pytest_kvqual._canonical import canonical_bytes
from pytest_kvqual.errors import EvidenceError
from pytest_kvqual.metrics.requests import content_failure, figures

STOP = event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]})
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})


def chat(**delta: object) -> bytes:
    """A chat event of one token."""
    return event({"choices": [{"index": 0, "delta": delta, "token_ids": [7], "finish_reason": None}]})


def test_the_first_token_is_not_the_role_event() -> None:
    """An event without output tokens is no first token."""
    found = figures(request([(5 * MS, ROLE), (214 * MS, chat(content="A")), (215 * MS, STOP)]))
    assert found.ttft_intended_ns == found.ttft_send_ns == 214 * MS


def test_the_rest_of_a_chunked_prefill_is_no_gap() -> None:
    """The first gap lies between the first two tokens, not between a dummy event and the first."""
    found = figures(request([(900 * MS, ROLE), (2200 * MS, chat(content="A")), (2220 * MS, chat(content="B"))]))
    assert (found.ttft_intended_ns, found.gaps_ns) == (2200 * MS, (20 * MS,))


def test_usage_and_done_are_no_tokens() -> None:
    """Role, usage and [DONE] have times and count in no figure."""
    found = figures(
        request([(10 * MS, ROLE), (100 * MS, token(1)), (150 * MS, token(2, finish="stop")), (160 * MS, usage(2)),
                 (160 * MS, DONE)])
    )  # fmt: skip
    assert (found.ttft_intended_ns, found.tpot_ns, found.tokens) == (100 * MS, Fraction(50 * MS), 2)


def test_reasoning_is_output() -> None:
    """The first token of the reasoning is the first token."""
    found = figures(request([(200 * MS, chat(reasoning="x")), (3000 * MS, chat(content="y"))]))
    assert (found.ttft_intended_ns, found.tokens) == (200 * MS, 2)


def test_the_end_is_the_last_token_and_reasoning_is_counted_once() -> None:
    """Latency ends at the last event with tokens; details of the usage are part of its total."""
    last = event(
        {"choices": [], "usage": {"completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 10}}}
    )
    events = [(2000 * MS, token(*range(30), finish="stop")), (2300 * MS, last), (2300 * MS, DONE)]
    found = figures(request(events))
    assert (found.tokens, found.e2e_ns) == (30, 2000 * MS)
    assert content_failure([raw for _, raw in events], 128) is None


def test_the_usage_of_an_event_without_text_counts() -> None:
    """The output length is what came, not the limit that was sent."""
    assert content_failure(answer([1, 2, 3]), 128) is None
    assert figures(request([(1, raw) for raw in answer([1, 2, 3])])).tokens == 3


def test_an_event_of_several_tokens_has_no_gap() -> None:
    """12 tokens in 4 events of 3: the counts are told, no gap is, and the time per token divides by 11."""
    found = figures(request([(100 * MS * place, token(1, 2, 3)) for place in range(1, 5)]))
    assert found.per_event == (3, 3, 3, 3)
    assert found.gaps_ns == ()
    assert found.tpot_ns == Fraction(300 * MS, 11)


def test_one_token_events_are_one_token_each() -> None:
    """Nothing is tokenised again: ten events of one id are ten tokens."""
    assert figures(request([(1, token(5)) for _ in range(10)])).tokens == 10


def test_counts_that_disagree_are_a_failure() -> None:
    """Ids and usage are both kept; where they differ the request failed."""
    found = content_failure([token(1, finish="stop"), usage(15), DONE], 128)
    assert found == ("count", "found 1 token ids, expected 15 as the usage says")


def test_the_time_per_token_divides_by_the_tokens_after_the_first() -> None:
    """TTFT 0.5 s, end 2.5 s, 21 tokens: 100 ms, not 119."""
    events = [(500 * MS + 100 * MS * place, token(place)) for place in range(21)]
    assert figures(request(events)).tpot_ns == Fraction(100 * MS)


def test_one_token_has_no_time_per_token() -> None:
    """There is nothing to divide."""
    assert figures(request([(1, token(1))])).tpot_ns is None


def test_waiting_before_the_send_is_part_of_the_latency() -> None:
    """Three arrivals at zero, one at a time, one second each: 1, 2 and 3 s from the arrival, 1 s from the send."""
    second = 1000 * MS
    found = [
        figures(request([(second * (place + 1), token(1))], dispatch_ns=place * second, send_start_ns=place * second))
        for place in range(3)
    ]
    assert [it.ttft_intended_ns for it in found] == [second, 2 * second, 3 * second]
    assert [it.ttft_send_ns for it in found] == [second] * 3
    assert [it.lateness_ns for it in found] == [0, second, 2 * second]


ERROR = event({"error": {"message": "boom", "code": 500}})


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([token(1), token(2), ERROR, DONE], "error-object"),
        ([*answer([1, 2]), ERROR], "error-object"),
        ([event({"error": "x", "choices": [{"index": 0, "token_ids": [1]}]}), *answer([1])], "error-object"),
        ([b"event: error\ndata: boom\n\n", *answer([1])], "error-object"),
        ([b"event:  error  \ndata: {}\n\n", *answer([1])], "error-object"),
        ([event({"object": "error", "message": "boom"}), DONE], "error-object"),
        ([token(1, finish="error"), usage(1), DONE], "error-object"),
        ([token(1, finish="abort"), usage(1), DONE], "incomplete"),
        ([b"data: {\n\n", *answer([1])], "malformed"),
        ([b"data: [1]\n\n", *answer([1])], "malformed"),
        ([b'data: {"error":{"code":500},"error":null}\n\n', *answer([1])], "malformed"),
        ([*answer([1, 1]), event({"choices": [{"index": 0, "token_ids": [7]}]})], "malformed"),
        ([b'data: {"x":NaN}\n\n', *answer([1])], "malformed"),
        ([b'data: {"x":"\xff"}\n\n', *answer([1])], "malformed"),
        ([b"data: " + b"[" * 100_000 + b"\n\n", *answer([1])], "malformed"),
        ([b'data: {"x":' + b"[" * 100 + b"]" * 100 + b"}\n\n", *answer([1])], "malformed"),
        ([b'data: {"error":' + b'{"a":' * 100 + b"0" + b"}" * 101 + b"\n\n", *answer([1])], "malformed"),
        ([event({"choices": [{"index": 0, "token_ids": [True]}]}), *answer([1])], "malformed"),
        ([event({"choices": [{"index": 0, "token_ids": [10**40]}]}), *answer([1])], "malformed"),
        ([event({"choices": [{"index": 0, "token_ids": "12"}]}), *answer([1])], "malformed"),
        (answer([1])[:-1], "incomplete"),
        ([token(1), usage(1), DONE], "incomplete"),
        ([token(1, finish=""), usage(1), DONE], "incomplete"),
        ([], "incomplete"),
        ([DONE], "no-tokens"),
        (answer([]), "no-tokens"),
        ([token(1, finish="stop"), DONE], "count"),
        ([token(1, finish="stop"), usage(None), DONE], "count"),
        ([token(1, finish="stop"), usage(True), DONE], "count"),
        ([token(1, finish="stop"), usage(2), DONE], "count"),
        (answer(list(range(129))), "count"),
        ([event({"choices": [{"index": 1, "token_ids": [9]}]}), token(1, finish="stop"), usage(2), DONE], "count"),
    ],
    ids=str,
)
def test_a_stream_that_is_no_complete_answer(events: list[bytes], kind: str) -> None:
    """Status 200 is no success: each kind of broken answer is named, in one line."""
    found = content_failure(events, 128)
    assert found is not None
    assert found[0] == kind
    assert found[1]
    assert found[1].isprintable()


@pytest.mark.parametrize(
    "before",
    [
        event({"error": None, "choices": []}),
        b": ping\n\n",
        b"event: ping\n\n",
        b"data:\n\n",
        event({"choices": [], "usage": None}),
        usage(0),
        event({"choices": [None]}),
        b"\xef\xbb\xbf\n\n",
    ],
    ids=str,
)
def test_what_is_no_failure(before: bytes) -> None:
    """A null error, comments, empty data and a running usage leave an answer complete."""
    assert content_failure([before, *answer([1, 2])], 128) is None


def test_ids_within_a_delta_count() -> None:
    """A chat event may have its ids beside the delta or within it."""
    raw = event({"choices": [{"index": 0, "delta": {"content": "a", "token_ids": [4]}}]})
    assert figures(request([(1, raw)])).token_ids == (4,)


def test_an_error_text_can_be_written() -> None:
    """An error with a lone surrogate has a text that canonical JSON can hold."""
    found = content_failure([b'data: {"error":"\\ud83d"}\n\n'], 1)
    assert found is not None
    assert json.loads(canonical_bytes(found[1]))


def test_a_request_that_was_not_sent_has_no_figures() -> None:
    """Cancelled before its dispatch, it is late by nothing."""
    found = figures(never_sent("a"))
    assert (found.lateness_ns, found.ttft_intended_ns, found.completed) == (None, None, False)


@pytest.mark.parametrize("events", [None, [1], [[1]], [[True, ""]], [[1, "?"]], [[1, 2]], [[10**30, ""]]], ids=str)
def test_events_that_cannot_be_decoded_are_one_line(events: object) -> None:
    """Events are pairs of nanoseconds and base64."""
    with pytest.raises(EvidenceError, match=r"^open-0000: events: found [^\n]*, expected"):
        figures(request([]) | {"events": events})
