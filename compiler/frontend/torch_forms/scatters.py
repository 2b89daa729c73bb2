"""The ONNX forms of torch's scatters with a reduction, and of sums of overlapping windows.

torch's exporter has no means, and stores the last element instead; windows it adds one by one, by indices of a wrong type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def scatters() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translation of each operator, for torch.onnx.export."""
    import torch

    aten = torch.ops.aten
    return {
        aten.scatter.src: _scattered(),
        aten.scatter_add.default: _scattered(reduction="add"),
        aten.scatter_reduce.two: _scatter_reduce,
        aten.index_reduce.default: _index_reduce,
        aten.unfold_backward.default: _overlapped,
    }


def _overlapped(grad_in: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """Windows of `size` elements, each `step` after the one before it along `dim`, added up where they overlap.

    [..., windows, ..., size] -> input_sizes, of which `dim` is what the windows cover. Inverse transforms of short times have it.
    """
    from onnxscript.onnx_opset import opset18 as op

    rank = len(grad_in.shape) - 1
    axis = dim % rank
    rest = [one for one in range(rank) if one != axis]
    sizes = [op.Constant(value_ints=[one]) if isinstance(one, int) else op.Reshape(one, [1]) for one in input_sizes]
    windows = op.Concat(op.Constant(value_ints=[-1, size]), op.Shape(grad_in, start=axis, end=axis + 1), axis=0)
    added = op.Col2Im(op.Reshape(op.Transpose(grad_in, perm=[*rest, rank, axis]), windows), sizes[axis], [size], strides=[step])
    outer = [op.Shape(grad_in, start=one, end=one + 1) for one in rest]
    in_order = op.Reshape(added, op.Concat(*outer, sizes[axis], axis=0))
    placed = op.Transpose(in_order, perm=[*range(axis), rank - 1, *range(axis, rank - 1)])
    return op.Expand(placed, op.Concat(*sizes, axis=0))  # torch adds one window's squares for all sequences of istft


def _scattered(**how: str) -> Callable[..., Any]:
    """Elements of `src` stored or added where the indices say; it may be larger than them, and all without dimensions."""

    def translated(self: Any, dim: int, index: Any, src: Any) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        if len(self.shape) == 0:
            row = [op.Reshape(one, [1]) for one in (self, index, src)]
            return op.Squeeze(op.ScatterElements(*row, axis=0, **how), [0])
        if len(index.shape) == 0:
            index, src = (op.Reshape(one, [1]) for one in (index, src))
            return op.ScatterElements(self, index, src, axis=0, **how)
        return op.ScatterElements(self, index, _used(src, index), axis=dim % len(self.shape), **how)

    return translated


def _used(src: Any, index: Any) -> Any:
    """The first elements of `src` along each axis, as many as there are indices."""
    from onnxscript.onnx_opset import opset18 as op

    if tuple(src.shape) == tuple(index.shape):
        return src
    axes = list(range(len(src.shape)))
    return op.Slice(src, [0] * len(axes), op.Shape(index), axes)


def _scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """The elements of `src` reduced at those of `self` whose places along `dim` the indices name, with what is there, too, or
    without. `src` may be larger than `index`: the rest of it is not used."""
    from onnxscript.onnx_opset import opset18 as op

    if len(self.shape) == 0:
        row = [op.Reshape(one, [1]) for one in (self, index, src)]
        return op.Squeeze(_reduced(row, 0, reduce, include_self, self.dtype), [0])
    axis = dim % len(self.shape)
    return _reduced((self, index, _used(src, index)), axis, reduce, include_self, self.dtype)


def _reduced(operands: Sequence[Any], axis: int, reduce: str, include_self: bool, dtype: Any) -> Any:
    """The same of (self, index, src), of which the last have as many elements; the numbers are of type `dtype`."""
    from onnxscript.onnx_opset import opset18 as op

    self, index, src = operands
    base = self if include_self else op.ScatterElements(self, index, _like(src, _neutral(dtype, reduce)), axis=axis)
    result = op.ScatterElements(base, index, src, axis=axis, reduction=_REDUCTIONS[reduce])
    if reduce != "mean":
        return result
    ones = _like(src, 1)
    counts = _like(self, 1) if include_self else op.ScatterElements(_like(self, 1), index, _like(src, 0), axis=axis)
    counts = op.ScatterElements(counts, index, ones, axis=axis, reduction="add")
    if dtype.is_floating_point():
        return op.Div(result, counts)
    return op.Div(op.Sub(result, op.Mod(result, counts)), counts)  # the next lower number


def _index_reduce(self: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    """As `_scatter_reduce`, of whole slices along `dim`."""
    from onnxscript.onnx_opset import opset18 as op

    rank = len(source.shape)
    if rank == 0:
        return _scatter_reduce(self, 0, index, source, reduce, include_self)
    axis = dim % rank
    places = op.Reshape(op.Cast(index, to=7), [-1 if one == axis else 1 for one in range(rank)])
    return _reduced((self, op.Expand(places, op.Shape(source)), source), axis, reduce, include_self, self.dtype)


def _like(tensor: Any, number: float) -> Any:
    """A tensor of its shape and type, of one number."""
    from onnxscript.onnx_opset import opset18 as op

    constant = op.Constant(value_int=number) if isinstance(number, int) else op.Constant(value_float=number)
    return op.Expand(op.CastLike(constant, tensor), op.Shape(tensor))


def _neutral(dtype: Any, reduce: str) -> float:
    """The number that changes nothing in a reduction of its type."""
    import numpy as np

    if reduce in ("sum", "mean", "prod"):
        return int(reduce == "prod")
    if dtype.is_floating_point():
        return float("-inf") if reduce == "amax" else float("inf")
    bounds = np.iinfo(dtype.numpy())
    return int(bounds.min if reduce == "amax" else bounds.max)
