"""CumSum and CumProd against NumPy in float64 and in integers, in every direction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ..harness import LEVELS, Case, check, check_in_turn, operator, target_of

rng = np.random.default_rng(3)
FLOATS = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-3, ml_dtypes.bfloat16: 8e-3}


def scan(op_type: str, x: np.ndarray, axis: int, exclusive: int = 0, reverse: int = 0, rtol: float = 0.0) -> Case:
    ufunc = np.cumsum if op_type == "CumSum" else np.cumprod
    wide = x.astype(np.float64) if x.dtype.kind not in "iu" else x
    wide = np.flip(wide, axis) if reverse else wide
    expected = ufunc(wide, axis, dtype=wide.dtype)
    if exclusive and x.size:
        first = np.full_like(np.take(expected, [0], axis), op_type == "CumProd")
        expected = np.concatenate([first, np.take(expected, range(x.shape[axis] - 1), axis)], axis)
    expected = (np.flip(expected, axis) if reverse else expected).astype(x.dtype)
    attributes: dict[str, Any] = {"exclusive": exclusive, "reverse": reverse}
    place = np.array(axis, np.int64)
    return operator(op_type, x, place, opset=26, expected=[expected], rtol=rtol, atol=rtol, **attributes)


def cases() -> Iterator[Case]:
    for op_type, dtype in product(("CumSum", "CumProd"), FLOATS):
        yield scan(op_type, rng.uniform(0.5, 1.5, (3, 7, 20)).astype(dtype), 1, rtol=FLOATS[dtype])
    for number, dtype in enumerate(("int32", "int64", "uint32", "uint64")):
        x = rng.integers(0, 1000, (2, 50, 3)).astype(dtype)  # products wrap
        yield scan("CumProd", x, 1, exclusive=number % 2, reverse=number // 2)
        yield scan("CumSum", x, -1, exclusive=number % 2, reverse=number // 2)
    for shape, axis in (((9,), 0), ((5, 1), 0), ((40, 333), 0), ((70, 800), 1), ((2, 3, 0), 1), ((2, 0, 3), 1), ((1, 67), 0)):
        yield scan("CumSum", rng.integers(0, 9, shape).astype(np.float32), axis, exclusive=axis, reverse=axis)


@pytest.mark.parametrize("level", LEVELS)
def test_scans(level: str) -> None:
    check_in_turn(list(cases()), level)


def test_what_is_no_number_stays_from_there_on() -> None:
    x = np.array([1.0, np.inf, 2.0, -np.inf, 3.0, np.nan, 0.0], np.float32)
    with np.errstate(all="ignore"):
        check([scan("CumSum", x, 0), scan("CumProd", x, 0), scan("CumSum", x, 0, reverse=1)], target_of("avx2"))
