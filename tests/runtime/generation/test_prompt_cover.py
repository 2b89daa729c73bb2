"""Covers of prompts by programs, against all that there are."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefuse.runtime.generation.prompt_cover import first_piece

DEFAULT = (1, 16, 64, 256)


def pieces(counts: tuple[int, ...], length: int, room: int, fixed: float) -> list[int]:
    """All pieces, one after the other, as a session asks for them."""
    found = []
    while length > 0:
        found.append(first_piece(counts, length, room, fixed))
        length, room = length - found[-1], room - found[-1]
    return found


def least_time(counts: tuple[int, ...], length: int, room: int, fixed: float) -> float:
    """Of all pieces in any order that end inside the room."""

    @lru_cache(None)
    def least(left: int, place: int) -> float:
        if left <= 0:
            return 0.0
        times = (count + fixed + least(left - count, place + count) for count in counts if place + count <= room)
        return min(times, default=float("inf"))

    return least(length, 0)


@given(
    st.sets(st.integers(2, 12), max_size=3),
    st.integers(1, 30),
    st.integers(0, 15),
    st.integers(0, 40),
)
def test_no_pieces_take_less(more: set[int], length: int, slack: int, fixed: int) -> None:
    counts = (1, *sorted(more))
    found = pieces(counts, length, length + slack, fixed)
    assert length <= sum(found) <= length + slack
    assert sum(found) - found[-1] < length
    assert sum(count + fixed for count in found) == least_time(counts, length, length + slack, fixed)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(5, [16]), (1, [1]), (17, [16, 1]), (65, [64, 1]), (70, [64, 16]), (130, [64, 64, 1, 1]), (300, [256, 64])],
)
def test_covers_on_a_cpu(length: int, expected: list[int]) -> None:
    """By the times of GPT-2: reading weights is worth 12 tokens."""
    assert pieces(DEFAULT, length, 1024, 12) == expected


@pytest.mark.parametrize(("length", "expected"), [(17, [64]), (65, [256]), (300, [256, 64])])
def test_the_fewest_pieces_where_each_costs_much(length: int, expected: list[int]) -> None:
    assert pieces(DEFAULT, length, 1024, 1 << 20) == expected


@pytest.mark.parametrize(("length", "room", "expected"), [(17, 31, [16, 1]), (15, 15, [1]), (50, 28, [16]), (3, 0, [1])])
def test_nothing_is_filled_up_beyond_the_room(length: int, room: int, expected: list[int]) -> None:
    """Which may be less than a text, where another one of the batch is longer."""
    assert first_piece(DEFAULT, length, room, 12) == expected[0]
    if room >= length and len(expected) > 1:
        assert pieces(DEFAULT, length, room, 12) == expected
