"""OneHot against NumPy: axes, types, negative and wrong indices, more classes than anybody would write down."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from ..harness import LEVELS, Case, check_in_turn, followed, operator

rng = np.random.default_rng(2)


def one_hot(indices: np.ndarray, depth: int, pair: np.ndarray, axis: int = -1) -> Case:
    number = indices.astype(np.int64)
    number = np.where(number < 0, number + depth, number)
    hits = np.expand_dims(number, axis) == np.arange(depth).reshape([-1] + [1] * (-axis - 1))
    expected = np.where(hits, pair[1], pair[0])
    return operator("OneHot", indices, np.array(depth, np.int64), pair, variables=(0, 2), expected=[expected], axis=axis)


def cases() -> Iterator[Case]:
    floats = np.array([-1.5, 2.5], np.float32)
    wrong = np.array([[0, 6, -7, 7], [-8, 2**40, -(2**63), 2**63 - 1]])
    yield from (one_hot(wrong, 7, floats, axis) for axis in (-1, -2, -3))
    yield one_hot(rng.integers(0, 50257, (3, 5)).astype(np.int32), 50257, floats)
    yield one_hot(np.array([2.0, -1.0, 2.9], np.float32), 5, np.array([0, 1], np.int64))
    yield one_hot(np.array(3, np.uint8), 5, np.array([0, 1], ml_dtypes.bfloat16))
    yield one_hot(rng.integers(0, 70, 40), 70, np.array([False, True]))
    yield one_hot(np.zeros((0, 3), np.int64), 4, floats)
    yield one_hot(np.zeros(3, np.int64), 0, floats)
    yield followed(one_hot(wrong, 37, floats))


@pytest.mark.parametrize("level", LEVELS)
def test_one_hot(level: str) -> None:
    check_in_turn(list(cases()), level)
