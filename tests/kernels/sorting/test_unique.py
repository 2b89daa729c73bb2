"""Unique at its largest size, against numpy.unique."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from prefuse.kernels.registry import build_kernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, check, check_in_turn, run, target_of
from .bounded import BoundedCase, Largest, bounded, padded

rng = np.random.default_rng(12)
Y, INDICES, INVERSE, COUNTS = range(4)


def unique(
    x: np.ndarray, axis: int | None = None, *, is_sorted: bool = True, asked: tuple[int, ...] = (0, 1, 2, 3)
) -> BoundedCase:
    y, indices, inverse, counts = np.unique(x, True, True, True, axis)
    inverse = inverse.reshape(-1)
    place, size = (0, x.size) if axis is None else (axis % x.ndim, x.shape[axis])
    if not is_sorted:
        order = np.argsort(indices)
        y, indices, counts = np.take(y, order, place), indices[order], counts[order]
        inverse = np.argsort(order)[inverse]
    largest = (size,) if axis is None else x.shape
    shapes: list[Largest] = [(largest, place), ((size,), 0), ((size,), None), ((size,), 0)]
    return bounded(
        "Unique",
        [x],
        [shape if number in asked else None for number, shape in enumerate(shapes)],
        [found for number, found in enumerate((y, indices, inverse, counts)) if number in asked],
        attributes={"sorted": int(is_sorted)} | ({} if axis is None else {"axis": axis}),
    )


def few(*shape: int, dtype: npt.DTypeLike = np.float32, kinds: int = 3) -> np.ndarray:
    return np.asarray(rng.integers(0, kinds, shape), dtype)


def elements() -> list[BoundedCase]:
    special = np.array([np.nan, 1, -np.inf, np.nan, -0.0, 0.0, np.inf, 1, -1e-45, np.inf], np.float32)
    wide = np.array([2**64 - 1, 0, 2**63, 2**63 - 1, 2**63, 0], np.uint64)
    types = [np.float64, np.float16, np.bool_, np.int8, np.uint8, np.int16, np.uint32, np.int64]
    cases: list[np.ndarray] = [
        few(1),
        few(9),
        few(3, 5),
        few(2, 3, 4, kinds=50),
        np.array(3, np.float32),
        np.arange(40)[::-1] - 7,
    ]
    cases += [special, special.astype(np.float64), special.astype(np.float16), wide, wide.astype(np.int64), few(5000, kinds=900)]
    cases += [few(29, dtype=dtype, kinds=2) for dtype in types]
    in_turn = [unique(x, is_sorted=number % 3 > 0) for number, x in enumerate(cases)]
    return [*in_turn, unique(special, is_sorted=False), unique(special, 0), unique(few(9, dtype=np.int64), -1, is_sorted=False)]


def slices() -> list[BoundedCase]:
    holes = np.where(rng.random((40, 3)) < 0.2, np.float32(np.nan), few(40, 3)).astype(np.float32)
    ends = np.array([[2**64 - 1, 1], [0, 1], [2**64 - 1, 1], [2**63, 0]], np.uint64)
    cases = [(few(9, 2), 0), (few(2, 9), 1), (few(2, 15, 2), 1), (few(2, 15, 2), -2), (few(7, 1), 0), (few(1, 9), 0), (holes, 0)]
    cases += [(holes.T, 1), (few(11, 2, dtype=np.bool_, kinds=2), 0), (few(11, 2, dtype=np.float16), 0), (ends, 0)]
    cases += [(few(9000, 2, kinds=40), 0), (few(3, 700, 5, kinds=2), 1), (np.tile(few(1, 70), (50, 1)), 0)]
    return [unique(x, axis, is_sorted=number % 3 > 0) for number, (x, axis) in enumerate(cases)]


def absent_outputs() -> list[BoundedCase]:
    x = few(13, 3)
    return [
        unique(x, 0, asked=asked, is_sorted=False) for asked in [(Y,), (INVERSE,), (COUNTS,), (Y, COUNTS), (INDICES, INVERSE)]
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [elements, slices, absent_outputs])
def test_unique(cases: object, level: str) -> None:
    assert callable(cases)
    check_in_turn(cases(), level)


def test_bfloat16_and_empty_slices() -> None:
    """What NumPy cannot say."""
    x = np.array([2, 1, np.nan, 2, np.nan], ml_dtypes.bfloat16)
    full, one = ((5,), 0), np.array([3], np.int64)
    found = np.array([1, 2, np.nan], ml_dtypes.bfloat16)
    indices, inverse, counts = (np.array(row, np.int64) for row in ([1, 0, 2], [1, 0, 2, 1, 2], [1, 2, 2]))
    case = bounded("Unique", [x], [full, full, ((5,), None), full], [found, indices, inverse, counts])
    nothing = np.zeros((3, 0), np.float32)
    shapes = [((3, 0), 0), ((3,), 0), ((3,), None), ((3,), 0)]
    equal: list[np.ndarray] = [nothing[:1], np.zeros(1, np.int64), np.zeros(3, np.int64), one]
    check([case, bounded("Unique", [nothing], shapes, equal, attributes={"axis": 0})], target_of("avx2"))


def test_zeros_behind_what_is_found() -> None:
    x = few(13, 3)
    cases = [unique(x), unique(x, 0, is_sorted=False), unique(x.T.copy(), 1, asked=(Y, COUNTS)), unique(x, 0, asked=(INVERSE,))]
    check([padded(case) for case in cases], target_of("avx2"))


def test_results_are_the_same_in_every_run() -> None:
    x = few(9000, 2, kinds=40)
    one, other = unique(x, 0), unique(x, 0)
    run([one, other], target_of("avx2"))
    assert [got.tobytes() for got in one.got] == [got.tobytes() for got in other.got]


def test_what_cannot_be_sorted_is_refused() -> None:
    case = unique(few(9))
    large = replace(case.group, types=dict(case.group.types) | {"x0": TensorType((2**29 + 1,), "float32")})
    why = "536870913 elements are more than 32-bit places can be sorted of"
    assert build_kernel(large, target_of("avx2")) == (("unique", why),)
    assert build_kernel(case.group, Target.parse("cuda:sm_90")) == (("unique", "it sorts on the CPU only"),)
    complex_numbers = unique(few(4, dtype=np.complex64))
    assert build_kernel(complex_numbers.group, target_of("avx2")) == (("unique", "complex64 has no order"),)
