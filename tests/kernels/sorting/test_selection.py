"""NonZero and Compress at their largest sizes, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from prefuse.kernels.registry import build_kernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, check, check_in_turn, operator, run, target_of
from .bounded import BoundedCase, bounded, padded

rng = np.random.default_rng(11)


def sparse(*shape: int, dtype: npt.DTypeLike = np.float32, chance: float = 0.3) -> np.ndarray:
    return np.asarray(np.where(rng.random(shape) < chance, rng.integers(1, 100, shape), 0), dtype)


def non_zero(x: np.ndarray) -> BoundedCase:
    found = np.array(np.nonzero(x), np.int64) if x.ndim else np.empty((0, np.count_nonzero(x)), np.int64)
    return bounded("NonZero", [x], [((x.ndim, x.size), 1)], [found])


def compress(x: np.ndarray, condition: np.ndarray, axis: int | None) -> BoundedCase:
    size = x.size if axis is None else x.shape[axis]
    found = np.compress(condition[:size], x, axis)
    place = 0 if axis is None else axis % x.ndim
    largest = (*found.shape[:place], min(condition.size, size), *found.shape[place + 1 :])
    return bounded("Compress", [x, condition], [(largest, place)], [found], attributes={} if axis is None else {"axis": axis})


def non_zeros() -> list[BoundedCase]:
    special = np.array([0.0, -0.0, np.nan, np.inf, -1e-45, 0.0], np.float32)
    types = [np.float64, np.float16, ml_dtypes.bfloat16, np.bool_, np.int8, np.uint64, np.int32]
    return [
        non_zero(sparse(7)),
        non_zero(sparse(3, 5, 7)),
        non_zero(sparse(2, 1, 3, 1, 5)),
        non_zero(np.zeros((4, 9), np.float32)),
        non_zero(np.ones((4, 9), np.float32)),
        non_zero(np.array(3, np.float32)),
        non_zero(np.array(0, np.float32)),
        non_zero(special),
        non_zero(special.astype(ml_dtypes.bfloat16)),
        non_zero(np.stack([special, special[::-1]], axis=1).view(np.complex64)),
        non_zero(sparse(3, 41, 173)),  # dealt to threads
        *(non_zero(sparse(3, 7, dtype=dtype)) for dtype in types),
    ]


def compressions() -> list[BoundedCase]:
    def chosen(size: int, chance: float = 0.5) -> np.ndarray:
        return rng.random(size) < chance

    types = [np.float64, np.float16, ml_dtypes.bfloat16, np.bool_, np.int8, np.uint64, np.complex64]
    return [
        compress(sparse(9), chosen(9), None),
        compress(sparse(3, 5), chosen(15), None),
        compress(sparse(3, 5), chosen(4), None),  # a condition may be short
        compress(sparse(3, 5), chosen(40), None),  # what is behind the end selects nothing
        compress(sparse(3, 5), chosen(3), 0),
        compress(sparse(3, 5), chosen(9), 1),
        compress(sparse(3, 5, 17), chosen(5), -2),
        compress(sparse(3, 5, 17), chosen(3, 0.0), 0),
        compress(sparse(3, 5, 17), chosen(3, 1.0), 0),
        compress(sparse(4, 0), chosen(4), 0),
        compress(sparse(70_001), chosen(70_001), None),  # dealt to threads
        compress(sparse(1, 900, 77), chosen(900), 1),
        compress(sparse(40, 900, 3), chosen(900), 1),
        *(compress(sparse(3, 11, dtype=dtype), chosen(11), 1) for dtype in types),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [non_zeros, compressions])
def test_selection(cases: Callable[[], list[BoundedCase]], level: str) -> None:
    check_in_turn(cases(), level)


def test_zeros_behind_what_is_found() -> None:
    nothing = np.zeros((5, 17), np.float32)
    rows = [
        compress(sparse(3, 5, 17), rng.random(5) < 0.5, 1),
        compress(sparse(9, dtype=np.complex64), rng.random(9) < 0.5, None),
    ]
    cases = [
        non_zero(sparse(3, 5, 7)),
        non_zero(nothing),
        non_zero(nothing + 1),
        *rows,
        compress(nothing > 0, np.zeros(5, bool), 0),
    ]
    check([padded(case) for case in cases], target_of("avx2"))


def test_results_are_the_same_in_every_run() -> None:
    x = sparse(3, 41, 173)
    one, other = non_zero(x), non_zero(x)
    run([one, other], target_of("avx2"))
    assert [got.tobytes() for got in one.got] == [got.tobytes() for got in other.got]


def test_what_is_not_bounded_is_refused() -> None:
    """A declared shape is no promise that so much is found."""
    case = operator("NonZero", np.ones((3, 4), np.float32))
    assert case.group.types["y0"] == TensorType((2, 12), "int64")
    assert build_kernel(case.group, target_of("avx2")) == (
        ("selection", "the size of its result depends on data and is needed while compiling"),
    )


@pytest.mark.parametrize(
    ("level", "elements", "reason"),
    [
        ("cpu:avx2", 2**30, "1073741824 elements are more than 32-bit indices reach the parts of"),
        ("cuda:sm_90", 2**20, "it counts on the CPU only"),
    ],
)
def test_what_cannot_be_counted_is_refused(level: str, elements: int, reason: str) -> None:
    case = compress(sparse(9), np.ones(9, bool), None)
    types = dict(case.group.types) | {"x0": TensorType((elements,), "int8")}
    assert build_kernel(replace(case.group, types=types), Target.parse(level)) == (("selection", reason),)
