"""Operators over rows in terms of four folds and pointwise operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import broadcast_shape
from ...runtime.symbolic.sizes import Size, SizeLike
from ..expressions import math
from ..groups.group import Group, Op
from ..template.loops import accumulator_type
from ..template.values import PART
from .reduction import Fold, add, multiply

EXP = "ExpNonpositive"  # e**x of x <= 0
FOLDS: dict[str, Fold] = {
    "FoldMax": Fold(-np.inf, math.maximum),
    "FoldMin": Fold(np.inf, math.minimum),
    "FoldProd": Fold(1, multiply),
    "FoldSum": Fold(0, add),
}
_OPSET = 23


def expanded(group: Group, count: int) -> Group:
    """The group with folds and pointwise operators in the place of each operator over the last `count` dimensions.

    Floats narrower than float32 are folded in float32; each operator's own result is rounded as ONNX has it.
    """
    writer = _Writer(group, count)
    for op in group.ops:
        if op.op_type in COMPOSITES:
            COMPOSITES[op.op_type](writer, op)
        else:
            writer.ops.append(op)
    return replace(group, ops=tuple(writer.ops), types=writer.types, literals=writer.literals)


class _Writer:
    """Collects the operators; a method returns the name of its result, which equal calls share: two normalizations of one value
    have one mean."""

    def __init__(self, group: Group, count: int) -> None:
        self.ops: list[Op] = []
        self.types = dict(group.types)
        self.literals = dict(group.literals)
        self._count = count
        self._made: dict[tuple[object, ...], str] = {}  # results by what computes them

    def operand(self, op: Op) -> str:
        """The first operand in the type that is computed in."""
        name = op.inputs[0]
        dtype = accumulator_type(self.types[name].dtype)
        return name if dtype == self.types[name].dtype else self.cast(name, dtype)

    def length(self, name: str) -> SizeLike:
        shape = self.types[name].shape
        return prod(shape[len(shape) - self._count :])

    def fold(self, kind: str, name: str, *, keepdims: bool = True) -> str:
        shape = self.types[name].shape
        kept = shape[: len(shape) - self._count]
        return self._add(kind, (name,), TensorType((*kept, *(1,) * (self._count * keepdims)), self.types[name].dtype))

    def call(self, op_type: str, *names: str, dtype: str = "", **attributes: Any) -> str:
        """A pointwise operator."""
        shape = broadcast_shape(*(self.types[name].shape for name in names))
        return self._add(op_type, names, TensorType(shape, dtype or self.types[names[-1]].dtype), attributes)

    def cast(self, name: str, dtype: str) -> str:
        return self.call("Cast", name, dtype=dtype)

    def constant(self, number: float | Size, like: str) -> str:
        """A number, or a size that a call decides, in the type of a value."""
        key = ("constant", str(number), self.types[like].dtype)
        if key in self._made:
            return self._made[key]
        name = self._made[key] = f".constant{len(self.literals)}"
        self.types[name] = TensorType((), self.types[like].dtype)
        self.literals[name] = np.array(number, object if isinstance(number, Size) else self.types[like].dtype)
        return name

    def become(self, result: str, value: str) -> None:
        """Let a value be the result, rounded to its type."""
        same = self.types[value].dtype == self.types[result].dtype
        self.ops.append(Op("Identity" if same else "Cast", (value,), (result,), {}, _OPSET))

    def _add(self, op_type: str, inputs: tuple[str, ...], kind: TensorType, attributes: dict[str, Any] | None = None) -> str:
        key = (op_type, inputs, kind, tuple(sorted((attributes or {}).items())))
        if key in self._made:
            return self._made[key]
        name = self._made[key] = f"{PART}{len(self.types)}"
        self.types[name] = kind
        self.ops.append(Op(op_type, inputs, (name,), attributes or {}, _OPSET))
        return name


def _softmax(writer: _Writer, op: Op) -> None:
    x = writer.operand(op)
    shifted = writer.call("Sub", x, writer.fold("FoldMax", x))
    powers = writer.call(EXP, shifted)
    total = writer.fold("FoldSum", powers)
    if op.op_type == "LogSoftmax":
        writer.become(op.outputs[0], writer.call("Sub", shifted, writer.call("Log", total)))
    else:
        writer.become(op.outputs[0], writer.call("Mul", powers, writer.call("Reciprocal", total)))


def _normalization(writer: _Writer, op: Op) -> None:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; without the mean for RMSNormalization."""
    x = writer.operand(op)
    length = writer.length(x)
    is_sized = isinstance(length, Size)
    count = writer.call("Reciprocal", writer.constant(length, x)) if is_sized else writer.constant(1 / max(length, 1), x)
    mean = None
    if op.op_type == "LayerNormalization":
        mean = writer.call("Mul", writer.fold("FoldSum", x), count)
        x = writer.call("Sub", x, mean)
    variance = writer.call("Mul", writer.fold("FoldSum", writer.call("Mul", x, x)), count)
    root = writer.call("Sqrt", writer.call("Add", variance, writer.constant(op.attribute("epsilon", 1e-5), x)))
    inverse = writer.call("Reciprocal", root)
    for result, value in zip(op.outputs[1:], (mean, inverse), strict=False):
        if result and value is not None:
            writer.ops.append(Op("Cast", (value,), (result,), {}, _OPSET))
    y = writer.call("Mul", x, inverse)
    for kind, name in zip(("Mul", "Add"), op.inputs[1:], strict=False):
        if name:
            dtype = writer.types[x].dtype
            y = writer.call(kind, y, name if writer.types[name].dtype == dtype else writer.cast(name, dtype))
    writer.become(op.outputs[0], y)


def _folded(kind: str, before: str = "", after: str = "") -> Callable[[_Writer, Op], None]:
    """A Reduce operator: a fold of each element, or of a function of it, and a function of the result."""

    def write(writer: _Writer, op: Op) -> None:
        x = writer.operand(op)
        if before:
            x = writer.call("Mul", x, x) if before == "square" else writer.call(before, x)
        total = writer.fold(kind, x, keepdims=bool(op.attribute("keepdims", 1)))
        if after == "mean":
            total = writer.call("Div", total, writer.constant(writer.length(x), total))
        elif after:
            total = writer.call(after, total)
        writer.become(op.outputs[0], total)

    return write


def _log_sum_exp(writer: _Writer, op: Op) -> None:
    """m + log(sum(exp(x - m))); an infinite m would make NaN of inf - inf, and is 0 instead."""
    x = writer.operand(op)
    keepdims = bool(op.attribute("keepdims", 1))
    shift = _finite(writer, writer.fold("FoldMax", x))
    flat = shift if keepdims else _finite(writer, writer.fold("FoldMax", x, keepdims=False))
    total = writer.fold("FoldSum", writer.call("Exp", writer.call("Sub", x, shift)), keepdims=keepdims)
    writer.become(op.outputs[0], writer.call("Add", writer.call("Log", total), flat))


def _finite(writer: _Writer, name: str) -> str:
    is_infinite = writer.call("IsInf", name, dtype="bool")
    return writer.call("Where", is_infinite, writer.constant(0.0, name), name)


COMPOSITES: dict[str, Callable[[_Writer, Op], None]] = {
    "LayerNormalization": _normalization,
    "LogSoftmax": _softmax,
    "RMSNormalization": _normalization,
    "ReduceL1": _folded("FoldSum", before="Abs"),
    "ReduceL2": _folded("FoldSum", before="square", after="Sqrt"),
    "ReduceLogSum": _folded("FoldSum", after="Log"),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _folded("FoldMax"),
    "ReduceMean": _folded("FoldSum", after="mean"),
    "ReduceMin": _folded("FoldMin"),
    "ReduceProd": _folded("FoldProd"),
    "ReduceSum": _folded("FoldSum"),
    "ReduceSumSquare": _folded("FoldSum", before="square"),
    "Softmax": _softmax,
}
