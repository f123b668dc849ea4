"""Comparing the answers of several runs."""

from __future__ import annotations

from pytest_kvqual.tasks.orders import KEPT, compare, comparison


def test_equal_runs_do_not_differ() -> None:
    """The order in which a run was sent is no difference, and lists and tuples of the same tokens are equal."""
    assert compare({"a": [1, 2], "b": [3]}, {"b": (3,), "a": (1, 2)}) == {"differ": 0, "of": 2, "first": []}


def test_a_difference_names_its_first_token() -> None:
    """Each differing request has the place of its first differing token and both tokens; an end is null."""
    left = {"a": [1, 2, 3], "b": [4, 5], "c": [6], "d": []}
    right = {"a": [1, 9, 9], "b": [4], "c": [6], "d": [7]}
    assert compare(left, right) == {
        "differ": 3,
        "of": 4,
        "first": [
            {"id": "a", "index": 1, "left": 2, "right": 9},
            {"id": "b", "index": 1, "left": 5, "right": None},
            {"id": "d", "index": 0, "left": None, "right": 7},
        ],
    }


def test_a_request_that_one_run_lacks_differs() -> None:
    """A missing answer is a difference, also from an empty one."""
    assert compare({"a": [1]}, {"b": []}) == {
        "differ": 2,
        "of": 2,
        "first": [
            {"id": "a", "index": 0, "left": 1, "right": None},
            {"id": "b", "index": 0, "left": None, "right": None},
        ],
    }


def test_all_differences_are_counted_and_the_first_are_kept() -> None:
    """The count has no limit, the list has."""
    left = {f"r{index}": [index] for index in range(KEPT + 5)}
    pair = compare(left, {name: [-1] for name in left})
    assert (pair["differ"], pair["of"]) == (KEPT + 5, KEPT + 5)
    assert [entry["id"] for entry in pair["first"]] == [f"r{index}" for index in range(KEPT)]  # type: ignore[attr-defined]  # a list


def test_the_comparison_is_of_the_original_with_each_other_run() -> None:
    """The pairs stand in one order whatever the mapping's; a run that is not there has no pair."""
    runs = {"natural": {"a": [2]}, "original-again": {"a": [1]}, "original": {"a": [1]}, "more": {"a": [9]}}
    assert comparison("order-invariant", runs) == {
        "schema": 1,
        "policy": "order-invariant",
        "pairs": [
            {"left": "original", "right": "original-again", "differ": 0, "of": 1, "first": []},
            {
                "left": "original",
                "right": "natural",
                "differ": 1,
                "of": 1,
                "first": [{"id": "a", "index": 0, "left": 1, "right": 2}],
            },
        ],
    }
    assert comparison("order-invariant", {"rotated": {"a": [1]}})["pairs"] == []
