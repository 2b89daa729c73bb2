"""Operators on sequences between programs."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.runtime.errors import InputError
from prefuse.runtime.staged.host_operators import HostOperator, Value

_ABC: Value = [np.array(letter) for letter in (1, 2, 3)]
_NEW = np.array(9)


@pytest.mark.parametrize(
    ("place", "expected"),
    [(-3, [9, 1, 2, 3]), (-1, [1, 2, 9, 3]), (0, [9, 1, 2, 3]), (2, [1, 2, 9, 3]), (3, [1, 2, 3, 9]), (None, [1, 2, 3, 9])],
)
def test_a_negative_place_of_an_insertion_counts_from_the_last_element(place: int | None, expected: list[int]) -> None:
    insert = HostOperator("SequenceInsert", {}, "SequenceInsert")
    (found,) = insert(_ABC, _NEW, None if place is None else np.array(place))
    assert isinstance(found, list)
    assert [int(np.asarray(item)) for item in found] == expected


@pytest.mark.parametrize("place", [-4, 4])
def test_a_place_beyond_the_sequence_is_an_error(place: int) -> None:
    with pytest.raises(InputError, match="position"):
        HostOperator("SequenceInsert", {}, "SequenceInsert")(_ABC, _NEW, np.array(place))


@pytest.mark.parametrize("split", [None, np.array(2), np.array([], np.int64)])
def test_nothing_is_split_into_no_parts(split: np.ndarray | None) -> None:
    for keepdims in (0, 1):
        assert HostOperator("SplitToSequence", {"keepdims": keepdims}, "split")(np.zeros((0, 3)), split) == [[]]


@pytest.mark.parametrize("sizes", [[2, 1], [2, 4], [6, -1], []])
def test_parts_that_are_not_all_of_it_are_an_error(sizes: list[int]) -> None:
    for name in ("Split", "SplitToSequence"):
        with pytest.raises(InputError, match="elements of 5"):
            HostOperator(name, {}, name)(np.zeros(5), np.array(sizes, np.int64))
    with pytest.raises(InputError, match="parts of 0 elements"):
        HostOperator("SplitToSequence", {}, "split")(np.zeros(5), np.array(0))


def test_parts_of_a_split_by_their_number() -> None:
    """The last ones are smaller, or empty."""
    for length, expected in ((7, [3, 3, 1]), (6, [2, 2, 2]), (1, [1, 0, 0])):
        found = HostOperator("Split", {"num_outputs": 3}, "split")(np.zeros(length))
        assert [np.asarray(part).size for part in found] == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [["a", "b", "c"], [1, 0, 3], [1, 0, 1, 2, 1, 0], [2, 3, 1]]),
        ({"sorted": 0}, [["b", "a", "c"], [0, 1, 3], [0, 1, 0, 2, 0, 1], [3, 2, 1]]),
        ({"axis": 0}, [[["b", "a"], ["b", "c"]], [0, 1], [0, 1, 0], [2, 1]]),
        ({"axis": -1, "sorted": 0}, [[["b", "a"], ["b", "c"], ["b", "a"]], [0, 1], [0, 1], [1, 1]]),
    ],
)
def test_distinct_strings(how: dict[str, int], expected: list[object]) -> None:
    """The distinct ones, their first places, the place of each among them, and their counts."""
    rows = np.array([["b", "a"], ["b", "c"], ["b", "a"]], object)
    found = HostOperator("Unique", {**how, "outputs": 4}, "Unique")(rows)
    for array, values in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, np.array(values))
    assert len(HostOperator("Unique", {**how, "outputs": 1}, "Unique")(rows)) == 1


def test_rows_by_index() -> None:
    (found,) = HostOperator("Gather", {"axis": 1}, "Gather")(np.array([["b", "a"], ["b", "c"]], object), np.array([[-1, 0]]))
    np.testing.assert_array_equal(found, [[["a", "b"]], [["c", "b"]]])


@pytest.mark.parametrize(
    ("start", "end", "step", "expected"),
    [
        (2**53, 2**53 + 1, 1, [2**53]),
        (1764547415123456789, 1764547415123456889, 25, [1764547415123456789 + 25 * number for number in range(4)]),
        (2**53 + 3, 2**53, -2, [2**53 + 3, 2**53 + 1]),
        (-(2**63), 2**63 - 1, 2**62, [-(2**63), -(2**62), 0, 2**62]),
        (7, 7, 1, []),
        (7, 9, -1, []),
    ],
)
def test_a_range_of_large_integers(start: int, end: int, step: int, expected: list[int]) -> None:
    """Whose differences a float rounds."""
    (found,) = HostOperator("Range", {}, "Range")(*(np.array(number) for number in (start, end, step)))
    np.testing.assert_array_equal(found, np.array(expected, np.int64), strict=True)


def test_a_range_of_unsigned_integers_and_floats() -> None:
    make = HostOperator("Range", {}, "Range")
    (found,) = make(*(np.array(number, np.uint8) for number in (3, 8, 2)))
    np.testing.assert_array_equal(found, np.array([3, 5, 7], np.uint8), strict=True)
    (found,) = make(*(np.array(number, np.float32) for number in (1, 0, -0.25)))
    np.testing.assert_array_equal(found, np.array([1, 0.75, 0.5, 0.25], np.float32), strict=True)
