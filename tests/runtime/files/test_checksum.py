"""The checksum of weights: the same however the bytes come, another for any other bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.runtime.files.checksum import Checksum

_BYTES = np.random.default_rng(0).integers(0, 256, 200_001, np.uint8).tobytes()
_PAGE = 4096


def checksum(*pieces: bytes | memoryview) -> str:
    found = Checksum()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


@given(st.lists(st.integers(0, len(_BYTES)), max_size=8))
@settings(max_examples=50, deadline=None)
def test_it_does_not_depend_on_the_pieces(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(_BYTES)]
    assert checksum(*(_BYTES[begin:end] for begin, end in pairwise(places))) == checksum(_BYTES)


@given(st.integers(0, len(_BYTES) - 1), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_any_other_byte_is_another_checksum(place: int, change: int) -> None:
    other = bytearray(_BYTES)
    other[place] ^= change
    assert checksum(bytes(other)) != checksum(_BYTES)


@pytest.mark.parametrize(
    "other",
    [
        _BYTES[:-1],
        _BYTES + b"\0",
        b"",
        _BYTES[: 3 * _PAGE] + bytes(_PAGE) + _BYTES[4 * _PAGE :],
        _BYTES[: 16 * _PAGE][::-1] + _BYTES[16 * _PAGE :],
        _BYTES[16 * _PAGE : 32 * _PAGE] + _BYTES[: 16 * _PAGE] + _BYTES[32 * _PAGE :],
    ],
    ids=["cut", "longer", "empty", "a page of zeros", "backwards", "blocks exchanged"],
)
def test_what_disks_do_is_another_checksum(other: bytes) -> None:
    assert checksum(other) != checksum(_BYTES)


def test_empty_pieces_are_nothing() -> None:
    assert checksum(b"", memoryview(_BYTES), b"") == checksum(_BYTES)
    assert checksum() == checksum(b"")
