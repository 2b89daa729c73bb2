"""Points on the plane: their distance and angle, and the signs of numbers, zeros included."""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any

from .numbers import number

Translation = Callable[..., Any]


def of_plane() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        aten.atan2.default: _angle,
        aten.sign.default: _sign,
        aten.sgn.default: _sign,
        aten.signbit.default: _has_sign,
        prims.signbit.default: _has_sign,
        prims.hypot.default: _hypotenuse,
    }


def _hypotenuse(self: Any, other: Any) -> Any:
    """The root of the sum of two squares, without overflow of the squares; infinite where a side is."""
    from onnxscript.onnx_opset import opset18 as op

    a, b = op.Abs(self), op.Abs(other)
    longer, shorter = op.Max(a, b), op.Min(a, b)
    zero, one = op.CastLike(0.0, self), op.CastLike(1.0, self)
    ratio = op.Div(shorter, op.Where(op.Equal(longer, zero), one, longer))
    finite = op.Mul(longer, op.Sqrt(op.Add(one, op.Mul(ratio, ratio))))
    return op.Where(op.Or(op.IsInf(a), op.IsInf(b)), op.CastLike(float("inf"), self), finite)


def _angle(self: Any, other: Any) -> Any:
    """Of points (other, self) on the plane, from -pi to pi: that of the nearer axis and what is between; signs of zeros count."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    kinds = [one.dtype for one in (self, other)]
    kind = next((one for one in kinds if one.is_floating_point()), ir.DataType.FLOAT)
    wide = ir.DataType.DOUBLE if kind == ir.DataType.DOUBLE else ir.DataType.FLOAT
    y, x = op.Cast(self, to=wide), op.Cast(other, to=wide)
    y.dtype = x.dtype = wide
    up, right = op.Abs(y), op.Abs(x)
    quarter, half = number(pi / 2, y), number(pi, y)
    ratio = op.Div(op.Min(up, right), op.Max(up, right))
    ratio = op.Where(op.Equal(up, right), op.CastLike(1.0, y), ratio)  # infinite ones, too
    ratio = op.Where(op.And(op.Equal(up, right), op.Equal(up, op.CastLike(0.0, y))), op.CastLike(0.0, y), ratio)
    angle = op.Atan(ratio)
    angle = op.Where(op.Greater(up, right), op.Sub(quarter, angle), angle)
    angle = op.Where(_has_sign(x), op.Sub(half, angle), angle)
    return op.Cast(op.Where(_has_sign(y), op.Neg(angle), angle), to=kind)


def _sign(self: Any) -> Any:
    """1, 0 or -1; of NaN 0, where ONNX has NaN."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if self.dtype == ir.DataType.BOOL:
        return op.Identity(self)
    return op.Where(op.IsNaN(self), op.CastLike(0.0, self), op.Sign(self)) if self.dtype.is_floating_point() else op.Sign(self)


def _has_sign(self: Any) -> Any:
    """Whether a number is negative, minus zero included."""
    from onnxscript.onnx_opset import opset18 as op

    zero = op.CastLike(0, self)
    if not self.dtype.is_floating_point():
        return op.Less(self, zero)
    return op.Or(op.Less(self, zero), op.And(op.Equal(self, zero), op.Less(op.Reciprocal(self), zero)))
