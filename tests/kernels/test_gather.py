"""Gathers at run-time places."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import LEVELS, Case, check, followed, operator, target_of

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
        operator("Gather", x(9, 6), at(9), variables=(1,)),
        operator("Gather", x(7), at(7), variables=(1,)),
        operator("Gather", x(7, 0), at(7, 3), variables=(1,)),
        operator("Gather", x(3, 9, 4, dtype="int64"), at(9, 2), variables=(1,), axis=1),
        operator("GatherElements", x(6, 7), at(6, 4, 7), variables=(1,)),
        operator("GatherElements", x(6, 7, 3), at(7, 6, 20, 3), variables=(1,), axis=1),
        operator("GatherND", x(4, 5, 6), at(4, 3, 2), variables=(1,)),
        operator("GatherND", x(4, 5, 6), at(4, 2, 3, 3), variables=(1,)),
        operator("GatherND", x(4, 5, 20), at(5, 4, 3, 1), variables=(1,), batch_dims=1),
    ]
    return [*cases, *(followed(case) for case in cases if case.arrays["x0"].dtype == np.float32)]


def test_an_index_out_of_range_reads_inside_the_tensor() -> None:
    data = x(4, 3)
    case = operator("Gather", data, np.array([99, -99], np.int64), variables=(1,), expected=[data[[3, 0]]])
    check([case], target_of("avx2"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [gathers])
def test_gathers(cases: object, level: str) -> None:
    assert callable(cases)
    check(cases(), target_of(level))
