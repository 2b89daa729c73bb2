"""Gathers at run-time places."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ..harness import LEVELS, Case, check, check_in_turn, followed, operator, target_of

rng = np.random.default_rng(3)


def x(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (rng.standard_normal(shape) * 50).astype(dtype)


def at(extent: int, *shape: int, dtype: str = "int64") -> np.ndarray:
    return rng.integers(-extent, extent, shape).astype(dtype)


def gathers() -> list[Case]:
    cases = [
        operator("Gather", x(9, 37), at(9, 5), variables=(1,)),
        operator("Gather", x(9, 37), at(9, 2, 3, dtype="int32"), variables=(1,)),
        operator("Gather", x(3, 9, 4, 5), at(9, 2, 3), variables=(1,), axis=1),
        operator("Gather", x(3, 9), at(9, 20), variables=(1,), axis=-1),
        operator("Gather", x(40, 9), at(9, 2, 33), variables=(1,), axis=1),
        operator("Gather", x(4, 70, 9), at(9), variables=(1,), axis=-1),
        operator("Gather", x(4, 70, 9), np.array(-2, np.int64), axis=-1),
        operator("Gather", x(4, 70, 9), at(9, 3), variables=(1,), axis=2),
        operator("Gather", x(300), at(300, 5000), variables=(1,)),
        operator("Gather", x(9, 6), at(9), variables=(1,)),
        operator("Gather", x(7), at(7), variables=(1,)),
        operator("Gather", x(7, 0), at(7, 3), variables=(1,)),
        operator("Gather", x(3, 9, 4, dtype="int64"), at(9, 2), variables=(1,), axis=1),
        operator("GatherElements", x(6, 7), at(6, 4, 7), variables=(1,)),
        operator("GatherElements", x(6, 7, 3), at(7, 6, 20, 3), variables=(1,), axis=1),
        operator("GatherND", x(4, 5, 6), at(4, 3, 2), variables=(1,)),
        operator("GatherND", x(4, 5, 6), at(4, 3, 41, 3), variables=(1,)),
        operator("GatherND", x(4, 5, 6), at(4, 2, 3, 3), variables=(1,)),
        operator("GatherND", x(4, 5, 20), at(5, 4, 3, 1), variables=(1,), batch_dims=1),
    ]
    return [*cases, *(followed(case) for case in cases if case.arrays["x0"].dtype == np.float32)]


def of_all_types() -> list[Case]:
    cases = []
    for dtype in ("bool", "int8", "uint16", "float16", "complex64", "int64", ml_dtypes.bfloat16, "float8_e4m3fn", "uint4"):
        data, rows, columns = x(9, 35).astype(dtype), at(9, 5), at(35, 9, 40)
        cases.append(operator("Gather", data, rows, variables=(1,), expected=[data[rows]]))
        expected = np.take_along_axis(data, columns, 1)
        cases.append(operator("GatherElements", data, columns, variables=(1,), expected=[expected], axis=1))
    return cases


WRONG = np.array([99, -99, 2**63 - 1, -(2**63), 2**32, -(2**32) + 1], np.int64)


def test_an_index_out_of_range_reads_inside_the_tensor() -> None:
    """The nearest one there is, whether the index is known while compiling or not."""
    data = x(4, 3)
    nearest = np.clip(WRONG, 0, 3).astype(int)
    cases = [operator("Gather", data, WRONG, variables=(1,), expected=[data[nearest]])]
    one = np.array(99, np.int64)
    cases += [operator("Gather", data, one, variables=v, expected=[data[:, 2]], axis=1) for v in ((), (1,))]
    cases.append(operator("GatherElements", data, WRONG[:4, None], variables=(1,), expected=[data[nearest[:4], :1]]))
    cases.append(operator("GatherND", data, WRONG[:, None], variables=(1,), expected=[data[nearest]]))
    pairs = np.stack([WRONG, WRONG[::-1]], -1)
    expected = data[nearest, np.clip(WRONG[::-1], 0, 2).astype(int)]
    cases.append(operator("GatherND", data, pairs, variables=(1,), expected=[expected]))
    check(cases, target_of("avx2"))


def test_nothing_is_read_from_a_tensor_without_elements() -> None:
    for op_type, indices in (("Gather", at(1, 4)), ("GatherElements", at(1, 4, 3)), ("GatherND", at(1, 4, 1))):
        case = operator(op_type, x(0, 3), indices, variables=(1,), expected=[np.zeros((4, 3), np.float32)])
        check([case], target_of("avx2"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [gathers, of_all_types])
def test_gathers(cases: object, level: str) -> None:
    assert callable(cases)
    check_in_turn(cases(), level)
