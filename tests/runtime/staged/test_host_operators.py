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
