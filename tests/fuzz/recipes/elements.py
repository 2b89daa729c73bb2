"""Operators on single elements, reductions, and normalizations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draft import BOOL, FLOAT, TENSOR_OF, Draft, kind_of

_UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BitwiseNot",
    "Ceil",
    "Cos",
    "Cosh",
    "Erf",
    "Exp",
    "Floor",
    "HardSwish",
    "Identity",
    "IsNaN",
    "Log",
    "Mish",
    "Neg",
    "Not",
    "Reciprocal",
    "Relu",
    "Round",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Tan",
    "Tanh",
    "Gelu",
    "Abs",
    "Neg",
    "Sign",
    "Round",
    "Relu",
    "Floor",
    "Ceil",
]
_ALPHA = ["Celu", "Elu", "LeakyRelu", "ThresholdedRelu", "Selu", "HardSigmoid", "Shrink", "Swish"]
_BINARY = [
    "Add",
    "Sub",
    "Mul",
    "Max",
    "Min",
    "Mean",
    "Sum",
    "Equal",
    "Less",
    "Greater",
    "LessOrEqual",
    "GreaterOrEqual",
    "And",
    "Or",
    "Xor",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Add",
    "Mul",
    "PRelu",
]
_REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]


def unary(b: Draft) -> None:
    op_type = b.pick(_UNARY)
    b.op(op_type, b.tensor(b.dtype(op_type)), approximate=b.pick(["none", "tanh"]) if op_type == "Gelu" else None)


def with_number(b: Draft) -> None:
    op_type = b.pick(_ALPHA)
    b.schema(op_type)
    names = {"Selu": ("alpha", "gamma"), "HardSigmoid": ("alpha", "beta"), "Shrink": ("bias", "lambd")}.get(op_type, ("alpha",))
    attributes: dict[str, Any] = {name: round(float(b.rng.uniform(0.1, 2)), 2) for name in names if b.chance(0.7)}
    b.op(op_type, b.tensor(b.dtype(op_type, kinds="f")), **attributes)


def binary(b: Draft) -> None:
    op_type = b.pick(_BINARY)
    x = b.tensor(b.dtype(op_type))
    others = [b.like(x)]
    if op_type in ("Max", "Min", "Mean", "Sum"):
        others = [b.like(x) for _ in range(b.integer(0, 3))]
    operands = [x, *others]
    if op_type != "PRelu" and b.chance(0.4):
        operands.reverse()
    b.op(op_type, *operands)


def division(b: Draft) -> None:
    """Integers are never divided by zero or minus one, which are traps elsewhere."""
    op_type = b.pick(["Div", "Mod"])
    x = b.tensor(b.dtype(op_type))
    dtype, shape = b.types[x]
    if kind_of(dtype) == "f":
        b.op(op_type, x, b.like(x), fmod=1 if op_type == "Mod" else None)
        return
    by = b.rng.integers(2, 9, shape[b.integer(0, len(shape)) :]).astype(dtype)
    if kind_of(dtype) == "i":
        by = by * b.rng.choice(np.array([-1, 1], dtype), by.shape)
    b.op(op_type, x, b.value(by.astype(dtype)), fmod=b.integer(0, 1) if op_type == "Mod" else None)


def power(b: Draft) -> None:
    dtype = b.dtype("Pow")
    if kind_of(dtype) != "f":
        x = b.value(b.rng.integers(-4, 5, b.shape()).astype(dtype))
        b.op("Pow", x, b.value(b.rng.integers(0, 4, ()).astype(dtype)))
        return
    x = b.tensor(dtype)
    y = b.like(x) if b.chance(0.5) else b.value(np.array(b.pick([2, 3, 0.5, -1, 0, -2, 1.5]), dtype))
    b.op("Pow", x, y)


def shift(b: Draft) -> None:
    dtype = b.dtype("BitShift")
    x = b.tensor(dtype)
    by = b.rng.integers(0, dtype.itemsize * 8, b.shape_of(x)).astype(dtype)
    b.op("BitShift", x, b.value(by), direction=b.pick(["LEFT", "RIGHT"]))


def cast(b: Draft) -> None:
    """To what holds all that the type has; the numbers that an integer is made of are small ones."""
    targets = [dtype for dtype in TENSOR_OF if not (b.opset < 13 and kind_of(dtype) == "u")]
    to, of = b.pick(targets), b.dtype("Cast")
    if kind_of(of) == "f" and kind_of(to) in "iu":
        x = b.value((b.rng.random(b.shape()) * 90).astype(of))
    elif kind_of(of) == "i" and kind_of(to) == "f":
        x = b.value(b.rng.integers(-100, 100, b.shape()).astype(of))
    else:
        x = b.tensor(of)
    b.op("Cast", x, to=TENSOR_OF[to])


def where(b: Draft) -> None:
    x = b.tensor(b.dtype("Where", 1))
    shape = b.shape_of(x)
    condition = b.fresh(BOOL, tuple(1 if b.chance(0.3) else size for size in shape))
    b.op("Where", condition, *([x, b.like(x)] if b.chance(0.5) else [b.like(x), x]))


def clip(b: Draft) -> None:
    dtype = b.dtype("Clip")
    x = b.tensor(dtype)
    low, high = sorted(b.rng.integers(0, 9, 2))
    bounds = [b.value(np.array(low, dtype)) if b.chance(0.7) else "", b.value(np.array(high, dtype)) if b.chance(0.7) else ""]
    b.op("Clip", x, *(bounds if bounds[1] else bounds[:1] if bounds[0] else []))


def is_inf(b: Draft) -> None:
    b.op("IsInf", b.tensor(b.dtype("IsInf")), detect_negative=b.integer(0, 1), detect_positive=b.integer(0, 1))


def reduce(b: Draft) -> None:
    op_type = b.pick(_REDUCTIONS)
    # Of integers, ONNX's bodies round the logarithm at the end, ONNX Runtime at the steps before.
    dtype = b.dtype(op_type, kinds="f") if "Log" in op_type else b.dtype(op_type)
    x = b.tensor(dtype)
    axes = b.axes(len(b.shape_of(x)))
    keepdims = b.pick([None, 0, 1])
    if b.since(18) or op_type == "ReduceSum":
        given = [b.ints(*axes)] if axes or b.chance(0.5) else []
        b.op(op_type, x, *given, keepdims=keepdims, noop_with_empty_axes=b.pick([None, 0, 1]))
    else:
        b.op(op_type, x, axes=axes or None, keepdims=keepdims)


def extreme_index(b: Draft) -> None:
    op_type = b.pick(["ArgMax", "ArgMin"])
    x = b.fresh(b.dtype(op_type), b.shape(1, nonempty=True), 0.1)  # of computed numbers, rounding would choose
    axis, last = b.axis(len(b.shape_of(x))), b.pick([None, 0, 1])
    b.op(op_type, x, axis=axis, keepdims=b.pick([None, 0, 1]), select_last_index=last)


def softmax(b: Draft) -> None:
    op_type = b.pick(["Softmax", "LogSoftmax", "Hardmax", "Softmax"])
    x = b.tensor(b.dtype(op_type), 1)
    b.op(op_type, x, axis=b.axis(len(b.shape_of(x))) if b.chance(0.8) else None)


def layer_norm(b: Draft) -> None:
    op_type = b.pick(["LayerNormalization", "RMSNormalization"])
    x = b.tensor(b.dtype(op_type), 1, 4, nonempty=True)
    dtype, shape = b.types[x]
    axis = b.axis(len(shape))
    size = shape[axis:]
    epsilon = b.pick([None, 1e-3])
    if op_type == "RMSNormalization":
        b.op(op_type, x, b.fresh(dtype, size), axis=axis, epsilon=epsilon)
        return
    bias = [b.fresh(dtype, size)] if b.chance(0.6) else []
    b.op(op_type, x, b.fresh(dtype, size), *bias, axis=axis, epsilon=epsilon, outputs=b.integer(1, 3))


def image_norm(b: Draft) -> None:
    op_type = b.pick(["BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN", "LpNormalization"])
    x = b.tensor(b.dtype(op_type), 3, 5, nonempty=True)
    dtype, shape = b.types[x]
    channels = (shape[1],)
    if op_type == "BatchNormalization":
        variance = b.value(b.rng.random(channels).astype(dtype) + dtype.type(0.5))
        b.op(op_type, x, *(b.fresh(dtype, channels) for _ in range(3)), variance)
    elif op_type == "InstanceNormalization":
        b.op(op_type, x, b.fresh(dtype, channels), b.fresh(dtype, channels), epsilon=1e-3)
    elif op_type == "GroupNormalization" and b.since(21):
        groups = b.pick([group for group in range(1, shape[1] + 1) if shape[1] % group == 0])
        b.op(op_type, x, b.fresh(dtype, channels), b.fresh(dtype, channels), num_groups=groups)
    elif op_type == "LRN":
        b.op(op_type, b.finite(dtype, shape, 0.1), size=b.pick([1, 3, 5]), alpha=0.5, beta=0.75, bias=1.5)
    else:
        b.op("LpNormalization", x, axis=b.axis(len(shape)), p=b.integer(1, 2))


def standardize(b: Draft) -> None:
    x = b.finite(FLOAT, tuple(b.integer(2, 5) for _ in range(b.integer(2, 4))))  # of one element the variance is rounding
    axes = sorted(int(axis) for axis in b.rng.permutation(len(b.shape_of(x)))[: b.integer(1, 2)])
    b.op("MeanVarianceNormalization", x, axes=axes)


def running(b: Draft) -> None:
    x = b.tensor(b.dtype("CumSum"), 1)
    axis = np.array(b.axis(len(b.shape_of(x))), b.pick([np.int32, np.int64]))
    b.op("CumSum", x, b.value(axis, 0.7), exclusive=b.integer(0, 1), reverse=b.integer(0, 1))


RECIPES = [
    unary, unary, unary, with_number, binary, binary, binary, division, power, shift, cast, where, clip, is_inf, reduce, reduce,
    extreme_index, softmax, layer_norm, image_norm, standardize, running,
]  # fmt: skip
