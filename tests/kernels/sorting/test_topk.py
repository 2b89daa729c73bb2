"""TopK against a stable sort by NumPy: every type, ties, NaN, strides, and all ways in which room for candidates runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ..harness import LEVELS, Case, check, check_in_turn, operator, target_of

rng = np.random.default_rng(11)
TYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", ml_dtypes.bfloat16),
)


def topk(x: np.ndarray, k: int, axis: int = -1, largest: int = 1, **attributes: Any) -> Case:
    """Expected by a stable sort; of the greatest first: the stable order of the reversed row, reversed."""
    wide = x.astype(np.float64) if x.dtype.kind not in "iu" else x
    if largest:
        last = x.shape[axis] - 1
        places = last - np.flip(np.argsort(np.flip(wide, axis), axis, kind="stable"), axis)
    else:
        places = np.argsort(wide, axis, kind="stable")
    places = np.take(places, range(k), axis).astype(np.int64)
    expected = [np.take_along_axis(x, places, axis), places]
    return operator("TopK", x, np.array([k], np.int64), outputs=2, expected=expected, axis=axis, largest=largest, **attributes)


def of_all_types() -> Iterator[Case]:
    for number, dtype in enumerate(TYPES):
        x = rng.integers(0, 40, (3, 117)).astype(dtype)  # many ties
        yield topk(x, (7, 117)[number // 2 % 2], largest=number % 2)


def of_all_sizes() -> Iterator[Case]:
    for length, k in ((1, 1), (5, 2), (8, 8), (33, 17), (200, 9), (1000, 999)):
        yield topk(rng.standard_normal((2, length)).astype(np.float32), k)
    yield from (topk(rng.standard_normal((2, length)), k, largest=0) for length, k in ((33, 1), (1000, 3), (3000, 65)))
    for length in (20, 64, 65, 300):  # one run that is ranked, digits or merged runs, by the type
        x = rng.integers(-(2**31), 2**31, (2, length)).astype(np.int32)
        yield from (topk(row, length, largest=way) for row in (x, x // 2**27, x * 1e-9) for way in (0, 1))
    rising = np.arange(700, dtype=np.float32)
    yield topk(np.stack([rising, -rising, 0 * rising]), 20)  # room runs out as often as it can
    yield topk(rng.standard_normal((2, 3, 50, 5)).astype(np.float32), 6, axis=2)
    yield topk(rng.standard_normal((150, 7)).astype(np.float32), 4, axis=0, largest=0, sorted=0)
    yield topk(rng.standard_normal((300, 40, 3)), 11, axis=1)  # dealt to the threads


def of_thresholds(level: str) -> Iterator[Case]:
    """Few of many: ranked and bisected thresholds, rows that whole groups do not fill, and rows that all pass.

    Each type is for one of the levels.
    """
    half = LEVELS.index(level)
    for length, k in ((97, 8), (1000, 1), (1003, 5), (1031, 100), (3100, 500)):
        x = rng.standard_normal((3, length)).astype(np.float32)
        yield topk(np.concatenate([x, np.round(x), 0 * x[:1], np.full_like(x[:1], np.nan), np.sort(x[:1])]), k)
        yield topk(np.where(x > 0.5, np.nan, x), k, largest=0)
        yield topk(np.where(x > -1, np.inf, x), k, largest=0)
    for number, dtype in [*enumerate(TYPES)][half::2]:
        low, high = (0, 200) if np.dtype(dtype) in (np.int8, np.uint8) else (-1000, 1000)
        yield topk(rng.integers(low, high, (2, 1501)).astype(dtype), (5, 130)[number // 2 % 2], largest=number // 4 % 2)
    least, most = -(2**63), 2**63 - 1
    wide = (topk(np.full((1, 900), x, np.int64), 3, largest=way) for x in (least, most, least + 1) for way in (0, 1))
    words = (topk(np.full((1, 900), x, np.int32), 140, largest=way) for x in (-(2**31), 2**31 - 1) for way in (0, 1))
    yield from (wide, words)[half]


def of_special_values() -> Iterator[Case]:
    extremes = np.array([0, 2**63 - 1, -(2**63), -1, 2**63 - 1, -(2**63)], np.int64)
    yield from (topk(x, 6, largest=largest) for x in (extremes, extremes.view(np.uint64)) for largest in (0, 1))
    x = np.array([0.0, -0.0, np.inf, np.nan, -np.inf, 1e-45, -1e-45, np.nan, 0.0, -np.nan] * 9)
    ways = (("float32", 4, 1), ("float32", 90, 0), ("float64", 4, 0), ("float64", 90, 1))
    yield from (topk(x.astype(dtype), k, largest=way) for dtype, k, way in ways)
    yield topk(np.zeros((0, 4), np.float32), 2)
    yield topk(np.zeros((3, 0), np.float32), 0)
    yield topk(np.ones((3, 4), np.float32), 0)


@pytest.mark.parametrize("level", LEVELS)
def test_sizes(level: str) -> None:
    check_in_turn(list(of_all_sizes()), level)


@pytest.mark.parametrize("level", LEVELS)
def test_thresholds(level: str) -> None:
    check_in_turn(list(of_thresholds(level)), level)


@pytest.mark.parametrize("cases", [of_all_types, of_special_values])
def test_elements(cases: Callable[[], Iterator[Case]]) -> None:
    check(list(cases()), target_of("avx2"))
