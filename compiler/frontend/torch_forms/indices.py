"""Elements by their places: by truths beside indices, of diagonals, drawn by chance, and of axes that are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Translation = Callable[..., Any]


def indices() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.index.Tensor: _indexed,
        aten.index_put.default: _with_values_put,
        aten.diagonal.default: _diagonal,
        aten.diagonal_copy.default: _diagonal,
        aten.multinomial.default: _drawn,
        aten.squeeze.dim: _squeezed,
    }


def _indexed(self: Any, indices: Sequence[Any]) -> Any:
    from onnxscript.function_libs.torch_lib.ops import core

    return core.aten_index(self, _without_truths(indices))


def _with_values_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    from onnxscript.function_libs.torch_lib.ops import core

    return core.aten_index_put(self, _without_truths(indices), values, accumulate)


def _without_truths(indices: Sequence[Any]) -> list[Any]:
    """Indices with the places of truths in their stead, a row for each axis of these; one that stands alone stays."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    given = [one for one in indices if one is not None]
    if len(given) < 2 or not any(len(one.shape) and one.dtype == ir.DataType.BOOL for one in given):
        return list(indices)
    found: list[Any] = []
    for one in indices:
        if one is None or one.dtype != ir.DataType.BOOL or not len(one.shape):
            found.append(one)
            continue
        places = op.NonZero(one)
        for axis in range(len(one.shape)):
            row = op.Gather(places, op.Constant(value_int=axis), axis=0)
            row.dtype, row.shape = ir.DataType.INT64, ir.Shape([None])  # which the exporter's form asks for
            found.append(row)
    return found


def _diagonal(self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Elements [..., n] along the diagonal of two axes. The exporter sums products of all elements with 0 and 1."""
    from onnxscript.onnx_opset import opset18 as op

    rank = len(self.shape)
    axes = dim1 % rank, dim2 % rank
    outer = [one for one in range(rank) if one not in axes]
    turned = op.Transpose(self, perm=[*outer, *axes])
    rows, columns = (op.Shape(self, start=axis, end=axis + 1) for axis in axes)
    down, right = (op.Constant(value_ints=[max(amount, 0)]) for amount in (-offset, offset))
    length = op.Max(op.Min(op.Sub(rows, down), op.Sub(columns, right)), op.Constant(value_ints=[0]))
    steps = op.Range(op.Constant(value_int=0), op.Squeeze(length, [0]), op.Constant(value_int=1))
    places = op.Add(op.Mul(op.Add(steps, down), columns), op.Add(steps, right))
    lead = [op.Shape(self, start=axis, end=axis + 1) for axis in outer]
    return op.Gather(op.Reshape(turned, op.Concat(*lead, op.Mul(rows, columns), axis=0)), places, axis=len(outer))


def _drawn(self: Any, num_samples: int, replacement: bool = False, generator: Any = None) -> Any:
    """Places in each row of shares [..., n], drawn by chance; each once without replacement: of the greatest logarithms, with
    noise of Gumbel's distribution (T. Vieira, "Gumbel-max trick and weighted reservoir sampling", 2014)."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    is_row = len(self.shape) == 1
    shares = op.Cast(op.Unsqueeze(self, [0]) if is_row else self, to=ir.DataType.FLOAT)
    logarithms = op.Log(shares)
    if replacement or num_samples == 1:
        places = op.Multinomial(logarithms, dtype=ir.DataType.INT64, sample_size=num_samples)
    else:
        noise = op.Neg(op.Log(op.Neg(op.Log(op.RandomUniformLike(shares)))))
        _, places = op.TopK(op.Add(logarithms, noise), op.Constant(value_ints=[num_samples]), axis=-1, sorted=1)
    return op.Squeeze(places, [0]) if is_row else places


def _squeezed(self: Any, dim: int) -> Any:
    """Without an axis of one element; any other stays."""
    from onnxscript.onnx_opset import opset18 as op

    return op.Squeeze(self, [dim]) if len(self.shape) and self.shape[dim] == 1 else op.Identity(self)
