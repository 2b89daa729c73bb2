"""ONNX forms of torch operators that torch's own exporter has none for, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Operator = Callable[..., Any]  # an overload of torch's
Translation = Callable[..., Any]  # of onnxscript values and Python numbers to an onnxscript value


def translations() -> dict[Operator, Translation]:
    """The translation of each operator, for torch.onnx.export. Operators of libraries that are not imported are left out."""
    import torch

    found: dict[Operator, Translation] = {torch.ops.aten.rsub.Scalar: _rsub, torch.ops.aten._grouped_mm.default: _grouped_mm}
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if fallback is not None:
        found[fallback.default] = _grouped_mm
    return found


def _rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    """`other - alpha * self`; torch's exporter refuses an integer tensor with a fractional number.

    The numbers are Python's: one with a fraction makes a result of integers float32, torch's default type.
    """
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if (isinstance(other, float) or isinstance(alpha, float)) and not self.dtype.is_floating_point():
        self = op.Cast(self, to=ir.DataType.FLOAT)
    scaled = self if alpha == 1 else op.Mul(self, op.CastLike(alpha, self))
    return op.Sub(op.CastLike(other, self), scaled)


def _grouped_mm(rows: Any, weights: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows [S, K], sorted by group, by the matrix of their group: [S, K] x [G, K, N] -> [S, N].

    `offsets` [G] are the ends of the groups, so the group of a row is the number of ends that it is not before. Rows behind the
    last end are in no group; torch leaves them undefined, here they go with the last one.
    """
    from onnxscript.onnx_opset import opset18 as op

    if offsets is None or bias is not None or out_dtype is not None or len(rows.shape) != 2 or len(weights.shape) != 3:
        raise NotImplementedError("a grouped product other than of [S, K] rows by [G, K, N] matrices")
    count = op.Shape(rows, start=0, end=1)
    row = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    is_behind = op.LessOrEqual(op.Cast(op.Unsqueeze(offsets, [0]), to=7), op.Unsqueeze(row, [1]))
    group = op.ReduceSum(op.Cast(is_behind, to=7), [1], keepdims=0)
    last = op.Sub(op.Squeeze(op.Shape(weights, start=0, end=1)), op.Constant(value_int=1))
    matrices = op.Gather(weights, op.Min(group, last), axis=0)
    return op.Squeeze(op.MatMul(op.Unsqueeze(rows, [1]), matrices), [1])
