"""Rounding and powers of integers, which ONNX has for real numbers, or for two of the integer types, alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Translation = Callable[..., Any]


def integers() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.ceil.default: _whole("Ceil"),
        aten.floor.default: _whole("Floor"),
        aten.round.default: _whole("Round"),
        aten.trunc.default: _truncated,
        aten.bitwise_left_shift.Tensor: _shifted("LEFT"),
        aten.bitwise_left_shift.Tensor_Scalar: _shifted("LEFT"),
        aten.__lshift__.Scalar: _shifted("LEFT"),
        aten.bitwise_right_shift.Tensor: _shifted("RIGHT"),
        aten.bitwise_right_shift.Tensor_Scalar: _shifted("RIGHT"),
        aten.__rshift__.Scalar: _shifted("RIGHT"),
        aten.pow.Tensor_Tensor: _power,
        aten.pow.Tensor_Scalar: _power_of_number,
        aten.pow.Scalar: _number_to_power,
    }


def _whole(operator: str) -> Translation:
    """A rounding of real numbers, which leaves integers as they are."""

    def rounded(self: Any) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        return op.Identity(self) if _is_integer(self) else getattr(op, operator)(self)

    return rounded


def _truncated(self: Any) -> Any:
    """Towards zero, which keeps its sign."""
    from onnxscript.onnx_opset import opset18 as op

    return op.Identity(self) if _is_integer(self) else op.Mul(op.Floor(op.Abs(self)), op.Sign(self))


def _shifted(direction: str) -> Translation:
    """Bits moved; of numbers without a sign, of which torch's exporter makes some with one, by ONNX's own operator."""

    def translated(self: Any, other: Any) -> Any:
        import onnx_ir as ir
        from onnxscript.function_libs.torch_lib.ops import core
        from onnxscript.onnx_opset import opset18 as op

        amount = op.Constant(value=ir.tensor(other, self.dtype)) if isinstance(other, int) else other
        if self.dtype.name.startswith("UINT"):
            return op.BitShift(self, amount, direction=direction)
        return (core.aten_bitwise_left_shift if direction == "LEFT" else core.aten_bitwise_right_shift)(self, amount)

    return translated


def _power(self: Any, exponent: Any) -> Any:
    """Powers of narrow integers are those of wide ones, cut off: both wrap around."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if exponent.dtype == ir.DataType.BOOL:
        exponent = op.CastLike(exponent, self)
    elif self.dtype == ir.DataType.BOOL:
        return _power(op.Cast(self, to=exponent.dtype), exponent)
    if not _is_integer(self) or self.dtype in (ir.DataType.INT32, ir.DataType.INT64):
        return op.Pow(self, exponent)
    return op.Cast(op.Pow(op.Cast(self, to=ir.DataType.INT32), op.Cast(exponent, to=ir.DataType.INT32)), to=self.dtype)


def _power_of_number(self: Any, exponent: int | float) -> Any:
    """Of a Python number: a fraction makes a result of integers float32, torch's default type, and truths are integers."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if isinstance(exponent, float) and not self.dtype.is_floating_point():
        return op.Pow(op.Cast(self, to=ir.DataType.FLOAT), op.Constant(value=ir.tensor(exponent, ir.DataType.FLOAT)))
    if self.dtype == ir.DataType.BOOL:
        return op.Pow(op.Cast(self, to=ir.DataType.INT64), op.Constant(value=ir.tensor(exponent, ir.DataType.INT64)))
    return _power(self, op.Constant(value=ir.tensor(exponent, self.dtype)))


def _number_to_power(self: int | float, exponent: Any) -> Any:
    """A Python number to powers, in their type; a fraction, or truths, make it torch's default one."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if not exponent.dtype.is_floating_point() and (isinstance(self, float) or exponent.dtype == ir.DataType.BOOL):
        kind = ir.DataType.FLOAT if isinstance(self, float) else ir.DataType.INT64
        return op.Pow(op.Constant(value=ir.tensor(self, kind)), op.Cast(exponent, to=kind))
    if exponent.dtype in (ir.DataType.INT32, ir.DataType.INT64) or exponent.dtype.is_floating_point():
        return op.Pow(op.Constant(value=ir.tensor(self, exponent.dtype)), exponent)
    base = op.Constant(value=ir.tensor(self, ir.DataType.INT32))
    return op.Cast(op.Pow(base, op.Cast(exponent, to=ir.DataType.INT32)), to=exponent.dtype)


def _is_integer(value: Any) -> bool:
    """Whether it is known to be: what a translation made itself has no type yet."""
    return value.dtype is not None and value.dtype.is_integer()
