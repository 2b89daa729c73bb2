"""Places of values in sorted rows: torch's searchsorted and bucketize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .numbers import of_common_type


def searches() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.searchsorted.Scalar: _searchsorted,
        aten.searchsorted.Tensor: _searchsorted,
        aten.bucketize.Scalar: _bucketize,
    }


def _searchsorted(
    sorted_sequence: Any, self: Any, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    """How many elements of a sorted row [..., N] or [N] stand before each value [..., M]; equal ones do if `right`.

    `sorter` [..., N] are the places of a row's elements in order, where the row is not sorted. All elements stand before NaN.
    Values and rows are compared in the type that torch promotes them to.
    """
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    row = sorted_sequence if sorter is None else op.GatherElements(sorted_sequence, sorter, axis=-1)
    if isinstance(self, (int, float)):
        if isinstance(self, float) and not sorted_sequence.dtype.is_floating_point():
            row = op.Cast(row, to=ir.DataType.FLOAT)
        value = op.CastLike(self, row)
    else:
        row, value = of_common_type((row, sorted_sequence.dtype), (self, self.dtype))
    value = op.Unsqueeze(value, [-1])
    if len(sorted_sequence.shape) > 1:
        row = op.Unsqueeze(row, [-2])
    is_after = op.Greater(row, value) if right or side == "right" else op.GreaterOrEqual(row, value)
    count = op.ReduceSum(op.Cast(op.Not(is_after), to=ir.DataType.INT32), [-1], keepdims=0)
    return count if out_int32 else op.Cast(count, to=ir.DataType.INT64)


def _bucketize(self: float, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, self, out_int32, right)
