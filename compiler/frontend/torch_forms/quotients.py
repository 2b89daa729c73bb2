"""Whole quotients and what they leave, exactly: torch's exporter rounds the quotient first, that of integers to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Translation = Callable[..., Any]


def quotients() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.floor_divide.default: _floor_quotient,
        aten.div.Tensor_mode: _quotient,
        aten.div.Scalar_mode: _quotient,
        aten.remainder.Tensor: _remainder,
        aten.remainder.Scalar: _remainder,
        aten.remainder.Scalar_Tensor: _remainder,
    }


def _quotient(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if rounding_mode == "floor":
        return _floor_quotient(self, other)
    a, b, result = _operands(self, other)
    if _is_integer(a) and rounding_mode == "trunc":
        return op.Div(a, b)  # towards zero
    if _is_integer(a):
        return op.Div(*(op.Cast(one, to=ir.DataType.FLOAT) for one in (a, b)))  # torch's default type
    ratio = op.Div(a, b)
    return _in_type(ratio if rounding_mode is None else op.Mul(op.Floor(op.Abs(ratio)), op.Sign(ratio)), result)


def _floor_quotient(self: Any, other: Any) -> Any:
    """The largest whole number that is no more than the quotient, from what fmod leaves, as torch's `div_floor_floating`."""
    from onnxscript.onnx_opset import opset18 as op

    a, b, result = _operands(self, other)
    left = op.Mod(a, b, fmod=1)
    zero, one = op.CastLike(0, a), op.CastLike(1, a)
    if _is_integer(a):
        return op.Sub(op.Div(a, b), op.CastLike(_is_beyond(left, b, zero), a))
    quotient = op.Div(op.Sub(a, left), b)
    quotient = op.Where(_is_beyond(left, b, zero), op.Sub(quotient, one), quotient)
    whole = op.Floor(quotient)
    whole = op.Where(op.Greater(op.Sub(quotient, whole), op.CastLike(0.5, a)), op.Add(whole, one), whole)
    return _in_type(op.Where(op.Equal(b, zero), op.Div(a, b), whole), result)


def _remainder(self: Any, other: Any) -> Any:
    """What fmod leaves, with the sign of the divisor."""
    from onnxscript.onnx_opset import opset18 as op

    a, b, result = _operands(self, other)
    left = op.Mod(a, b, fmod=1)
    return _in_type(op.Where(_is_beyond(left, b, op.CastLike(0, a)), op.Add(left, b), left), result)


def _is_beyond(left: Any, divisor: Any, zero: Any) -> Any:
    """Whether the quotient towards zero is above that towards minus infinity."""
    from onnxscript.onnx_opset import opset18 as op

    is_off = op.Not(op.Equal(left, zero))
    return op.And(is_off, op.Xor(op.Less(divisor, zero), op.Less(left, zero)))


def _operands(self: Any, other: Any) -> tuple[Any, Any, Any]:
    """Both in one type, in which is computed: float32 in place of numbers of 16 bits; and that of the result."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    tensor = other if isinstance(self, int | float) else self
    kind = tensor.dtype
    if kind.is_integer() and any(isinstance(one, float) for one in (self, other)):
        kind = ir.DataType.FLOAT
    computed = ir.DataType.FLOAT if kind in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else kind
    found = []
    for one in (self, other):
        if isinstance(one, int | float):
            constant = op.Constant(value=ir.tensor([one], ir.DataType.DOUBLE if isinstance(one, float) else ir.DataType.INT64))
            one = op.Squeeze(constant, [0])
        found.append(op.Cast(one, to=computed))
        found[-1].dtype = computed
    return found[0], found[1], kind


def _in_type(value: Any, kind: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    return op.Cast(value, to=kind)


def _is_integer(value: Any) -> bool:
    return bool(value.dtype.is_integer())
