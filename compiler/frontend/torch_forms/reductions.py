"""ONNX forms of torch's greatest and least elements, norms and sorts where torch's own exporter has none, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....runtime.errors import UnsupportedModelError
from .numbers import number


def reductions() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translation of each operator, for torch.onnx.export."""
    import torch

    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        aten.amax.default: _extreme("ReduceMax"),
        aten.amin.default: _extreme("ReduceMin"),
        aten.aminmax.default: _extremes,
        aten.any.default: _any,
        aten.any.dim: _any,
        aten.any.dims: _any,
        aten.argmax.default: _place("ArgMax"),
        aten.argmin.default: _place("ArgMin"),
        aten.linalg_vector_norm.default: _norm,
        aten.mean.dim: _mean,
        aten.sort.default: lambda self, dim=-1, descending=False: _sorted(self, dim=dim, descending=descending),
        aten.sort.stable: _sorted,
        aten.cummax.default: _running(">="),
        aten.cummin.default: _running("<="),
        prims.fmax.default: _number_of_two("Max"),
        prims.fmin.default: _number_of_two("Min"),
        aten.fmax.default: _number_of_two("Max"),
        aten.fmin.default: _number_of_two("Min"),
    }


def _extreme(operator: str) -> Callable[..., Any]:
    """The greatest or least element along some axes; along all if none is named."""

    def translated(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        if len(self.shape) == 0:
            return op.Identity(self)
        axes = [dim] if isinstance(dim, int) else list(dim) or list(range(len(self.shape)))
        return getattr(op, operator)(self, op.Constant(value_ints=axes), keepdims=int(keepdim))

    return translated


def _extremes(self: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """The least and the greatest element along an axis, or of all."""
    axes = () if dim is None else (dim,)
    is_kept = keepdim and dim is not None
    least, greatest = (_extreme(operator)(self, axes, is_kept) for operator in ("ReduceMin", "ReduceMax"))
    if dim is None and keepdim:
        from onnxscript.onnx_opset import opset18 as op

        ones = op.Constant(value_ints=[1] * len(self.shape))
        return (op.Reshape(least, ones), op.Reshape(greatest, ones)) if len(self.shape) else (least, greatest)
    return least, greatest


def _mean(self: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: int = -1) -> Any:
    """The mean along some axes, or of all elements, in `dtype`: torch's exporter casts the result, of integers a whole number."""
    from onnxscript.onnx_opset import opset18 as op

    x = self if dtype in (-1, None) else op.Cast(self, to=dtype)
    if len(self.shape) == 0:
        return op.Identity(x)
    axes = [dim] if isinstance(dim, int) else list(dim or range(len(self.shape)))
    return op.ReduceMean(x, op.Constant(value_ints=axes), keepdims=int(keepdim))


def _any(self: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Whether one element along some axes, or of all, is not 0. The greatest of none is the least integer, not 0."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    truths = op.Cast(self, to=ir.DataType.BOOL)
    if len(self.shape) == 0:
        return truths
    axes = [dim] if isinstance(dim, int) else list(dim or range(len(self.shape)))
    most = op.ReduceMax(op.Cast(truths, to=ir.DataType.INT32), op.Constant(value_ints=axes), keepdims=int(keepdim))
    return op.Greater(most, op.CastLike(0, most))


def _place(operator: str) -> Callable[..., Any]:
    """The first place of the greatest or least element along an axis, or in a row of all: with as many axes, if they are kept."""

    def translated(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        rank = len(self.shape)
        if dim is not None and rank:
            return getattr(op, operator)(self, axis=dim, keepdims=int(keepdim))
        place = getattr(op, operator)(op.Reshape(self, [-1]), axis=0, keepdims=0)
        return op.Reshape(place, [1] * rank) if keepdim and rank else place

    return translated


def _norm(self: Any, ord: float = 2.0, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: int = -1) -> Any:
    """The norm of that order of the elements along some axes, or of all; each element's own of a tensor without dimensions."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    kind = self.dtype if dtype == -1 else ir.DataType(dtype)
    x, rank = (self if dtype == -1 else op.Cast(self, to=dtype)), len(self.shape)
    if ord == 0.0:
        x = op.CastLike(op.Cast(x, to=9), x)
    if rank == 0:
        return x if ord == 0.0 else op.Abs(x)
    axes = [dim] if isinstance(dim, int) else list(dim or range(rank))
    operators = {0.0: op.ReduceSum, 1.0: op.ReduceL1, 2.0: op.ReduceL2}
    if ord in operators:
        return operators[ord](x, axes, keepdims=int(keepdim))
    if abs(ord) == float("inf"):
        return (op.ReduceMax if ord > 0 else op.ReduceMin)(op.Abs(x), axes, keepdims=int(keepdim))
    wide = op.Cast(x, to=ir.DataType.DOUBLE if kind == ir.DataType.DOUBLE else ir.DataType.FLOAT)  # powers of 16 bits overflow
    powers = op.ReduceSum(op.Pow(op.Abs(wide), number(float(ord), wide)), axes, keepdims=int(keepdim))
    return op.Cast(op.Pow(powers, number(1.0 / ord, wide)), to=kind)


def _sorted(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """All elements along an axis in order, and their places; equal ones stay in theirs, as TopK of all does it."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if len(self.shape) == 0:
        return op.Identity(self), op.Constant(value_int=0)
    axis, is_boolean = dim % len(self.shape), self.dtype == ir.DataType.BOOL
    x = op.Cast(self, to=ir.DataType.UINT8) if is_boolean else self
    values, places = op.TopK(x, op.Shape(self, start=axis, end=axis + 1), axis=axis, largest=int(descending), sorted=1)
    return (op.Cast(values, to=ir.DataType.BOOL) if is_boolean else values), places


def _running(sign: str) -> Callable[..., Any]:
    """The greatest or least element so far along an axis, and the last place where it stood; a NaN stays.

    In log2(n) steps, each with what lies twice as far back (Hillis and Steele, CACM 29/12, 1986).
    """

    def translated(self: Any, dim: int) -> tuple[Any, Any]:
        import numpy as np
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        rank = len(self.shape)
        if rank == 0:
            return op.Identity(self), op.Constant(value_int=0)
        axis = dim % rank
        extent = self.shape[axis]
        if not isinstance(extent, int):
            raise UnsupportedModelError("cummax", f"an axis of {extent} elements", "fix its size")
        places = np.arange(extent).reshape([-1 if one == axis else 1 for one in range(rank)])
        value, place, back = self, op.Expand(op.Constant(value=ir.tensor(places)), op.Shape(self)), 1
        while back < extent:
            head, tail, earlier = [0], [extent], [-back]
            new, at = (op.Slice(one, [back], tail, [axis]) for one in (value, place))
            old, old_at = (op.Slice(one, head, earlier, [axis]) for one in (value, place))
            is_new = op.GreaterOrEqual(new, old) if sign == ">=" else op.LessOrEqual(new, old)
            if self.dtype.is_floating_point():
                is_new = op.Or(is_new, op.IsNaN(new))
            kept, kept_at = (op.Slice(one, head, [back], [axis]) for one in (value, place))
            value = op.Concat(kept, op.Where(is_new, new, old), axis=axis)
            place = op.Concat(kept_at, op.Where(is_new, at, old_at), axis=axis)
            back *= 2
        return value, place

    return translated


def _number_of_two(operator: str) -> Callable[..., Any]:
    """The greater or lesser of two elements; the other one where one is NaN."""

    def translated(self: Any, other: Any) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        best = getattr(op, operator)(self, other)
        if not self.dtype.is_floating_point():
            return best
        return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, best))

    return translated
