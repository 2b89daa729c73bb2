"""Softmax and the normalizations, against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest

from ..harness import LEVELS, Case, build, check, check_in_turn, operator, target_of, with_followers

rng = np.random.default_rng(4)
UNIT = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3}


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (rng.standard_normal(shape) * 3 + 1).astype(dtype)


def softmax(shape: tuple[int, ...], axis: int | tuple[int, ...], dtype: str = "float32", log: bool = False, **given: Any) -> Case:
    x = normal(*shape, dtype=dtype)
    wide = x.astype(np.float64)
    wide = wide - wide.max(axis, keepdims=True)
    total = np.exp(wide).sum(axis, keepdims=True)
    expected = [np.asarray(wide - np.log(total) if log else np.exp(wide) / total).astype(dtype)]
    attributes = {"axis": axis, **given} if isinstance(axis, int) else {"axis": axis[0], **given}
    name = "LogSoftmax" if log else "Softmax"
    return operator(name, x, expected=expected, rtol=UNIT[dtype], atol=UNIT[dtype], template="normalization", **attributes)


def standard(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> tuple[np.ndarray, ...]:
    wide = x.astype(np.float64)
    mean = wide.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(axes, keepdims=True) + epsilon)
    return (wide - mean) * inverse, mean, inverse


def layer(shape: tuple[int, ...], axis: int, outputs: int = 1, dtype: str = "float32", bias: bool = True) -> Case:
    x = normal(*shape, dtype=dtype)
    scale, shift = normal(*shape[axis:], dtype=dtype), normal(*shape[axis:], dtype=dtype)
    y, mean, inverse = standard(x, tuple(range(axis % len(shape), len(shape))), 1e-5)
    y = y * scale.astype(np.float64) + (shift.astype(np.float64) if bias else 0)
    expected = [y.astype(dtype), mean.astype(np.float32), inverse.astype(np.float32)][:outputs]
    unit = 10 * UNIT[dtype]
    return operator("LayerNormalization", x, scale, shift if bias else None, outputs=outputs, expected=expected, axis=axis,
                    rtol=unit, atol=unit, template="normalization")  # fmt: skip


def root_mean_square(shape: tuple[int, ...], axis: int) -> Case:
    x, scale = normal(*shape), normal(*shape[axis:])
    wide = x.astype(np.float64)
    over = tuple(range(axis % len(shape), len(shape)))
    y = wide / np.sqrt((wide**2).mean(over, keepdims=True) + 1e-6) * scale
    return operator("RMSNormalization", x, scale, expected=[y.astype(np.float32)], axis=axis, epsilon=1e-6, rtol=1e-5, atol=1e-5)


def group(shape: tuple[int, ...], groups: int, opset: int) -> Case:
    x = normal(*shape)
    y, _, _ = standard(x.reshape(shape[0], groups, -1), (2,), 1e-3)
    parameters = normal(2, groups if opset < 21 else shape[1])
    each = np.repeat(parameters, shape[1] // groups, 1) if opset < 21 else parameters
    scale, bias = each.reshape(2, 1, shape[1], *(1,) * (len(shape) - 2))
    return operator("GroupNormalization", x, *parameters, num_groups=groups, epsilon=1e-3, opset=opset,
                    expected=[(y.reshape(shape) * scale + bias).astype(np.float32)], rtol=3e-5, atol=3e-5)  # fmt: skip


def instance(*shape: int) -> Case:
    x, scale, bias = normal(*shape), normal(shape[1]), normal(shape[1])
    y, _, _ = standard(x, tuple(range(2, len(shape))), 1e-5)
    scale64, bias64 = (v.reshape(-1, *(1,) * (len(shape) - 2)).astype(np.float64) for v in (scale, bias))
    return operator(
        "InstanceNormalization", x, scale, bias, expected=[(y * scale64 + bias64).astype(np.float32)], rtol=3e-5, atol=3e-5
    )


def softmaxes() -> list[Case]:
    cases = [
        softmax(shape, axis, log=log)
        for log in (False, True)
        for shape, axis in (
            ((3, 5, 70), 2),
            ((3, 5, 70), 1),
            ((4, 9, 3), 0),
            ((2, 17), 1),
            ((6, 1), -1),
            ((1, 300), 1),
            ((2, 3, 4, 5), 2),
            ((3, 70, 2), 1),
        )
    ]
    cases += [softmax((2, 3, 4, 5), (2, 3), opset=11), softmax((2, 3, 4, 5), (1, 2, 3), opset=11)]
    return cases + [softmax((5, 33), 1, dtype) for dtype in ("float64", "float16")]


def masked() -> list[Case]:
    x = normal(4, 40)
    x[0, 10:], x[1, :], x[2, 3] = -np.inf, -np.inf, np.nan
    far = normal(1, 40) * 1e4
    logarithms = far.astype(np.float64) - far.max()  # all others vanish beside the greatest
    return [operator("Softmax", x, rtol=1e-5, atol=1e-7), operator("LogSoftmax", x[2:3], rtol=1e-5, atol=1e-7),
            operator("LogSoftmax", far, expected=[logarithms.astype(np.float32)], rtol=1e-6, atol=1e-7)]  # fmt: skip


def layers() -> list[Case]:
    cases = [layer((3, 7, 70), -1), layer((3, 7, 70), 1), layer((5, 768), -1, outputs=3), layer((2, 3, 4, 5), 2, outputs=2)]
    cases += [
        layer((4, 19), 1, bias=False),
        layer((4, 33), 1, dtype="float16", outputs=3),
        layer((4, 33), 1, dtype="float64"),
        layer((6, 1), -1),
    ]
    return [*cases, root_mean_square((3, 7, 70), -1), root_mean_square((3, 4, 5), 1)]


def channels() -> list[Case]:
    cases = [group((2, 6, 5, 7), 3, opset) for opset in (18, 21)] + [
        group((2, 4, 9), 4, 21),
        group((1, 8, 40), 1, 18),
        group((2, 6), 2, 21),
    ]
    return [*cases, instance(2, 3, 5, 9), instance(1, 4, 33)]


def few() -> list[Case]:
    """Rows so long that each is the work of all threads."""
    cases = [softmax((1, 140_003), 1, log=log) for log in (False, True)] + [softmax((2, 301, 901), (1, 2), opset=11)]
    cases += [layer((1, 3, 50_003), 1, outputs=3), root_mean_square((1, 180_000), 1)]
    return [*cases, group((1, 6, 41, 701), 1, 21), group((2, 4, 140_001), 2, 21), instance(1, 2, 267_001)]


ALL = (softmaxes, masked, layers, channels, few)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_alone(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [softmaxes, layers, channels, few], ids=lambda make: make.__name__)
def test_with_followers(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(with_followers(make()), level)


@pytest.mark.parametrize("shape", [(1717, 9), (101, 40), (203, 13)])
def test_threads_do_not_meet_in_columns(shape: tuple[int, int]) -> None:
    """The last vector of rows overlaps the one before it, and both write exponentials to their results while they compute."""
    case = softmax(shape, 0)
    node = onnx.helper.make_node("Softmax", ["x"], ["y"], axis=0)
    source = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    result = onnx.helper.make_empty_tensor_value_info("y")
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "columns", [source], [result]))
    net = prefuse.compile(model, cache=False, threads=2)
    (x,) = case.arrays.values()
    results = [np.array(net(x)) for _ in range(300)]
    np.testing.assert_allclose(results[0], case.expected[0], case.rtol, case.atol)
    assert len({result.tobytes() for result in results}) == 1


def test_one_long_row_is_work_for_threads_and_the_same_for_any_number() -> None:
    """What is added up together depends on sizes alone."""
    case = group((1, 6, 41, 701), 1, 21)
    assert str(build(case, target_of("avx2")).function).count("T.parallel") == 3  # mean, variance, result
    results = []
    for threads in (1, 5):
        check([case], target_of("avx2", threads))
        results.append(case.got[0].tobytes())
    assert results[0] == results[1]
