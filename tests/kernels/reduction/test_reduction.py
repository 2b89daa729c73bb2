"""Reductions over any dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import prefuse
import pytest

from ..harness import LEVELS, Case, build, check_in_turn, followed, operator, run, target_of

rng = np.random.default_rng(2)
FLOAT = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
SHAPES = [
    ((3, 5, 70), (2,)), ((3, 5, 70), (1,)), ((3, 5, 70), (0, 2)), ((70, 33), (0,)), ((2, 3, 4, 5, 6), (1, 3)),
    ((4, 1, 19), (1,)), ((200,), (0,)), ((2, 64, 7, 7), (2, 3)), ((6, 3), (1,)), ((2, 3, 4, 37), (0, 1, 2)), ((1, 1), (1,)),
]  # fmt: skip


def reduction(name: str, shape: tuple[int, ...], axes: tuple[int, ...] | None, dtype: str = "float32", **attributes: Any) -> Case:
    data = rng.uniform(0.5, 1.5, shape) * (1 if name.startswith("Log") or dtype.startswith("u") else rng.choice([-1, 1], shape))
    data = (data * (1 if "float" in dtype else 9)).astype(dtype)
    wide = data.astype(np.float64)
    over = axes if axes is not None else tuple(range(len(shape)))
    keep = bool(attributes.get("keepdims", 1))
    fold: Callable[[], np.ndarray] = {
        "L1": lambda: np.abs(wide).sum(over, keepdims=keep),
        "L2": lambda: np.sqrt((wide**2).sum(over, keepdims=keep)),
        "LogSum": lambda: np.log(wide.sum(over, keepdims=keep)),
        "LogSumExp": lambda: np.log(np.exp(wide).sum(over, keepdims=keep)),
        "Max": lambda: wide.max(over, keepdims=keep),
        "Mean": lambda: np.trunc(wide.mean(over, keepdims=keep)) if "int" in dtype else wide.mean(over, keepdims=keep),
        "Min": lambda: wide.min(over, keepdims=keep),
        "Prod": lambda: wide.prod(over, keepdims=keep),
        "Sum": lambda: wide.sum(over, keepdims=keep),
        "SumSquare": lambda: (wide**2).sum(over, keepdims=keep),
    }[name]
    operand = None if axes is None else np.array(axes, np.int64)
    unit = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-2}.get(dtype, 0.0)
    expected = [np.asarray(fold()).astype(dtype)]
    return operator(
        f"Reduce{name}", data, operand, expected=expected, rtol=unit, atol=unit * 20, template="reduction", **attributes
    )


def shapes() -> list[Case]:
    cases = [reduction(name, shape, axes) for name in ("Sum", "Max", "LogSumExp") for shape, axes in SHAPES]
    return cases + [reduction("Sum", shape, axes, keepdims=0) for shape, axes in SHAPES]


def operators() -> list[Case]:
    cases = [reduction(name, shape, axes) for name in FLOAT for shape, axes in (((7, 37), (1,)), ((7, 37), (0,)), ((9, 5), None))]
    cases += [
        reduction(name, (7, 37), (-1,), dtype) for name in ("Sum", "Mean", "Max") for dtype in ("float64", "float16", "int64")
    ]
    cases += [reduction(name, (7, 37), (0,), "int32") for name in ("Sum", "Mean", "Max", "Min", "Prod", "SumSquare", "L1")]
    return cases


def corners() -> list[Case]:
    x = rng.standard_normal((4, 40)).astype(np.float32)
    x[1, 3], x[2, 5], x[3] = np.nan, np.inf, -np.inf
    flags = rng.integers(0, 2, (5, 33)).astype(bool)
    flags[0], flags[1] = True, False
    cases = [operator(f"Reduce{name}", x, np.array([1])) for name in ("Max", "Min")]
    cases += [operator("ReduceSum", x, np.array([1]), rtol=1e-5, atol=1e-5)]
    cases += [
        operator("ReduceLogSumExp", x[2:], np.array([axis]), expected=[np.array(want, np.float32)])
        for axis, want in ((1, [[np.inf], [-np.inf]]),)
    ]
    cases += [operator(f"Reduce{name}", flags, np.array([1]), opset=20) for name in ("Max", "Min")]
    cases += [operator("ReduceSum", x[:1], np.array([], np.int64), noop_with_empty_axes=1)]
    cases += [
        operator("ReduceSum", np.zeros((3, 0), np.float32), np.array([1])),
        operator("ReduceMax", x[:1], opset=11, axes=(-1,)),
    ]
    cases += [
        operator(f"Global{name}Pool", rng.standard_normal((2, 5, 7, 9)).astype(np.float32), rtol=1e-5, atol=1e-6)
        for name in ("Average", "Max")
    ]
    return cases


def places() -> list[Case]:
    ties = rng.integers(0, 4, (3, 5, 70))
    spoilt = rng.standard_normal((4, 50)).astype(np.float32)
    spoilt[0, 7], spoilt[0, 9], spoilt[1] = np.nan, np.nan, -np.inf
    cases = [
        operator(name, ties.astype(dtype), axis=axis, select_last_index=last)
        for name in ("ArgMax", "ArgMin")
        for axis in (0, 1, -1)
        for last in (0, 1)
        for dtype in ("float32", "int32")
    ]
    cases += [operator("ArgMax", spoilt, axis=1), operator("ArgMin", spoilt, axis=1, keepdims=0)]
    cases += [operator("ArgMax", ties.astype(dtype), axis=2, keepdims=0) for dtype in ("int8", "float64", "float16")]
    return [
        *cases,
        operator("ArgMax", rng.standard_normal((1, 5893)).astype(np.float32), axis=1),
        operator("ArgMin", ties[:, :1], axis=1),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [shapes, operators, corners, places], ids=lambda make: make.__name__)
def test_alone(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


def test_of_a_number_alone() -> None:
    """A tensor without dimensions has one element, which is the result."""
    check_in_turn([reduction("LogSum", (), None), reduction("Max", (), None, keepdims=0)], LEVELS[0])


@pytest.mark.parametrize("level", LEVELS)
def test_with_followers(level: str) -> None:
    cases = [
        reduction(name, shape, axes, keepdims=keep) for name in ("Mean", "LogSumExp") for shape, axes in SHAPES for keep in (0, 1)
    ]
    check_in_turn([followed(case) for case in cases], level)


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ("s = ReduceSumSquare<keepdims=0>(x, axes)", (46341, 0)),
        ("s = ReduceL1<keepdims=0>(x, axes)", (-(2**31), 0)),
        ("m = Mul(x, x) s = ReduceSum<keepdims=0>(m, axes)", (46341, 1)),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_too_large_wraps_around(body: str, numbers: tuple[int, int], axis: int) -> None:
    """LLVM took sums of squares for positive, and what is compared with them for known."""
    shape = (2, 1) if axis == 0 else (1, 2)
    text = f"""<ir_version: 10, opset_import: ["": 21]> main (int32[{shape[0]},{shape[1]}] x) => (bool[1] y)
        <int64[1] axes = {{{axis}}}, int32 zero = {{0}}> {{ {body} y = Less(s, zero) }}"""
    net = prefuse.compile(ir.from_onnx_text(text), cache=False, threads=1)
    assert np.asarray(net(np.array(numbers, np.int32).reshape(shape))).tolist() == [True]


MANY = [((613, 1027), None), ((150001, 3), (0,)), ((37, 9011), (0, 1)), ((3, 2, 70001), (0, 2)), ((30011, 40), (0,))]


@pytest.mark.parametrize("level", LEVELS)
def test_many_elements_of_few_results_are_added_up_in_parts(level: str) -> None:
    cases = [reduction(name, shape, axes) for name in ("Mean", "LogSumExp") for shape, axes in MANY]
    cases += [reduction(name, *MANY[0]) for name in ("L1", "L2", "Max", "Min", "SumSquare")] + [reduction("Min", *MANY[1])]
    cases += [reduction(name, *MANY[0], "int32") for name in ("Sum", "Max")]
    check_in_turn([*cases, followed(reduction("Mean", *MANY[1]))], level)


@pytest.mark.parametrize(("shape", "axes"), [MANY[0], MANY[1], MANY[3]])
def test_parts_are_work_for_threads_and_one_kernel_for_any_number(shape: tuple[int, ...], axes: tuple[int, ...] | None) -> None:
    """What is added up together depends on sizes alone, so that the sum does not depend on the threads."""
    case = reduction("Sum", shape, axes)
    assert "T.parallel" in str(build(case, target_of("avx2")).function)
    results = []
    for threads in (1, 5):
        run([case], target_of("avx2", threads))
        np.testing.assert_allclose(case.got[0], case.expected[0], rtol=0, atol=1e-3)
        results.append(case.got[0].tobytes())
    assert results[0] == results[1]


def test_a_long_sum_of_one_column_keeps_its_digits() -> None:
    """In one chain, 0.3 is rounded to ever fewer digits as the sum grows."""
    x = np.full((200_000, 8), 0.3, np.float32)
    check_in_turn([operator("ReduceMean", x, np.array([0]), expected=[np.full((1, 8), 0.3, np.float32)], rtol=2e-5)], "avx2")
