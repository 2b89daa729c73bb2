"""Places of values in sorted rows: torch's searchsorted and bucketize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .numbers import number, of_common_type

_BISECTED = 256  # elements of a row: fewer are compared with each value


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
        value = number(self, row)
    else:
        row, value = of_common_type((row, sorted_sequence.dtype), (self, self.dtype))
    is_after = op.Greater if right or side == "right" else op.GreaterOrEqual
    extent, rank = sorted_sequence.shape[-1], len(sorted_sequence.shape)
    if isinstance(extent, int) and extent >= _BISECTED:
        count = _bisected(row, value, extent, rank, is_after)
        return op.Cast(count, to=ir.DataType.INT32) if out_int32 else count
    value = op.Unsqueeze(value, [-1])
    if rank > 1:
        row = op.Unsqueeze(row, [-2])
    count = op.ReduceSum(op.Cast(op.Not(is_after(row, value)), to=ir.DataType.INT32), [-1], keepdims=0)
    return count if out_int32 else op.Cast(count, to=ir.DataType.INT64)


def _bisected(row: Any, value: Any, extent: int, rank: int, is_after: Callable[..., Any]) -> Any:
    """The same by steps of half the length each, all values at once: those that are taken do not reach an element behind."""
    from onnxscript.onnx_opset import opset18 as op

    count = op.Expand(op.Constant(value_int=0), op.Shape(value))
    for power in reversed(range(extent.bit_length())):
        reached = op.Add(count, op.Constant(value_int=1 << power))
        last = op.Min(op.Sub(reached, op.Constant(value_int=1)), op.Constant(value_int=extent - 1))
        element = op.Gather(row, last, axis=0) if rank == 1 else op.GatherElements(row, last, axis=-1)
        is_taken = op.Not(op.Or(is_after(element, value), op.Greater(reached, op.Constant(value_int=extent))))
        count = op.Where(is_taken, reached, count)
    return count


def _bucketize(self: float, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, self, out_int32, right)
