"""Linear systems, inverses, Cholesky factors and determinants of small matrices, step by step: ONNX has the determinant alone.

A step eliminates a row; all matrices [..., n, n] of a batch do it together. Where torch raises an error, of a matrix that is
singular or has no such factor, results are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....runtime.errors import UnsupportedModelError

Translation = Callable[..., Any]
_MOST_ROWS = 64  # of a matrix: each is a dozen nodes
_LAST = 2**62  # a place behind all others


def linear_algebra() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.linalg_inv.default: _inverse,
        aten.inverse.default: _inverse,
        aten.linalg_inv_ex.default: lambda a, check_errors=False: _solved(a, _identity(a)).pair,
        aten.linalg_solve.default: lambda a, b, left=True: _solve(a, b, left)[0],
        aten.linalg_solve_ex.default: lambda a, b, left=True, check_errors=False: _solve(a, b, left),
        aten.linalg_cholesky.default: lambda a, upper=False: _cholesky(a, upper).result,
        aten.cholesky.default: lambda a, upper=False: _cholesky(a, upper).result,
        aten.linalg_cholesky_ex.default: lambda a, upper=False, check_errors=False: _cholesky(a, upper).pair,
        aten.linalg_solve_triangular.default: _solve_triangular,
        aten.cholesky_solve.default: _solve_by_factor,
        aten.cholesky_inverse.default: lambda factor, upper=False: _solve_by_factor(_identity(factor), factor, upper),
        aten.linalg_slogdet.default: lambda a: _solved(a, None).determinant,
        aten.slogdet.default: lambda a: _solved(a, None).determinant,
        aten.logdet.default: _log_of_determinant,
    }


@dataclass(frozen=True)
class _Steps:
    """What an elimination leaves: the result, its pivots [..., 1, 1], and for each whether rows were exchanged for it."""

    result: Any
    pivots: Sequence[Any]
    exchanged: Sequence[Any] = ()
    is_positive: bool = False  # what its pivots have to be

    @property
    def info(self) -> Any:
        """The number of the first pivot that is none, from 1 on; 0 where all are."""
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        pivots = op.Squeeze(op.Concat(*self.pivots, axis=-1), [-2])
        zero = op.CastLike(0.0, pivots)
        is_none = op.Not(op.Greater(pivots, zero)) if self.is_positive else op.Equal(pivots, zero)
        flags = op.Cast(is_none, to=ir.DataType.INT32)
        first = op.Add(op.ArgMax(flags, axis=-1, keepdims=0), op.Constant(value_int=1))
        return op.Mul(op.Cast(first, to=ir.DataType.INT32), op.ReduceMax(flags, [-1], keepdims=0))

    @property
    def pair(self) -> tuple[Any, Any]:
        return self.result, self.info

    @property
    def determinant(self) -> tuple[Any, Any]:
        """Its sign, and the logarithm of its size."""
        from onnxscript.onnx_opset import opset18 as op

        pivots = op.Squeeze(op.Concat(*self.pivots, axis=-1), [-2])
        sign = op.ReduceProd(op.Sign(pivots), [-1], keepdims=0)
        for turned in self.exchanged:
            flag = op.CastLike(op.Squeeze(turned, [-2, -1]), sign)
            sign = op.Mul(sign, op.Sub(op.CastLike(1.0, sign), op.Mul(flag, op.CastLike(2.0, sign))))
        return sign, op.ReduceSum(op.Log(op.Abs(pivots)), [-1], keepdims=0)


def _solved(a: Any, b: Any | None) -> _Steps:
    """The solution of a x = b, [..., n, m], by Gauss and Jordan's elimination with partial pivoting (N. Higham, "Accuracy
    and Stability of Numerical Algorithms", 2002, 14.4): each step eliminates the first column that is left, and takes it off."""
    from onnxscript.onnx_opset import opset18 as op

    n = _rows_of(a)
    left = a if b is None else op.Concat(a, b, axis=-1)
    pivots, exchanged = [], []
    for k in range(n):
        here = op.Constant(value=_tensor(np.arange(n)[:, None] == k))
        row = _part(left, -2, k, k + 1)
        if k < n - 1:
            sizes = op.Abs(_part(_part(left, -1, 0, 1), -2, k, _LAST))
            place = op.Add(op.ArgMax(sizes, axis=-2, keepdims=1), op.Constant(value_int=k))
            there = op.Equal(op.Constant(value=_tensor(np.arange(n)[:, None])), place)
            best = op.ReduceSum(op.Where(there, left, op.CastLike(0.0, left)), [-2], keepdims=1)
            left = op.Where(here, best, op.Where(there, row, left))
            exchanged.append(op.Not(op.Equal(place, op.Constant(value_int=k))))
            row = best
        pivots.append(_part(row, -1, 0, 1))
        unit = op.Div(row, pivots[-1])
        left = op.Where(here, unit, op.Sub(left, op.Mul(_part(left, -1, 0, 1), unit)))
        left = _part(left, -1, 1, _LAST)
    return _Steps(left, pivots, exchanged)


def _inverse(a: Any) -> Any:
    return _solved(a, _identity(a)).result


def _solve(a: Any, b: Any, left: bool = True) -> tuple[Any, Any]:
    """x of a x = b, or of x a = b, and its info; b is of vectors [..., n] as torch.linalg.solve tells them from matrices."""
    from onnxscript.onnx_opset import opset18 as op

    if not left:
        result, info = _solve(_turned(a), _turned(b))
        return _turned(result, len(b.shape)), info
    is_vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and list(b.shape) == list(a.shape)[:-1])
    columns = _with_shape(op.Unsqueeze(b, [-1]), [*b.shape, 1], b) if is_vector else b
    result, info = _solved(*_broadcast(a, columns)).pair
    return (op.Squeeze(result, [-1]) if is_vector else result), info


def _cholesky(a: Any, upper: bool = False) -> _Steps:
    """The lower factor of a = l l^T, column by column, of the lower triangle; or the upper one, of the upper."""
    from onnxscript.onnx_opset import opset18 as op

    if upper:
        found = _cholesky(_turned(a))
        return _Steps(_turned(found.result, len(a.shape)), found.pivots, is_positive=True)
    n, rank = _rows_of(a), len(a.shape)
    left, columns, pivots = a, [], []
    for k in range(n):
        pivots.append(_part(_part(left, -2, 0, 1), -1, 0, 1))
        column = op.Div(_part(left, -1, 0, 1), op.Sqrt(pivots[-1]))
        above = [0] * (rank - 2) + [k, 0] + [0] * rank
        columns.append(op.Pad(column, op.Constant(value_ints=above)))
        below = _part(column, -2, 1, _LAST)
        left = op.Sub(_part(_part(left, -2, 1, _LAST), -1, 1, _LAST), op.Mul(below, _turned(below, rank)))
    return _Steps(op.Concat(*columns, axis=-1), pivots, is_positive=True)


def _solve_triangular(a: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """x of a x = b, or of x a = b, row by row from the one that has one unknown."""
    from onnxscript.onnx_opset import opset18 as op

    if not left:
        return _turned(_solve_triangular(_turned(a), _turned(b), not upper, True, unitriangular), len(b.shape))
    n = _rows_of(a)
    a, b = _broadcast(a, b) if unitriangular else (a, b)  # else quotients have all dimensions of the batch
    rest, found = b, []
    for step in range(n):
        k = n - 1 - step if upper else step
        row = _part(rest, -2, -1, _LAST) if upper else _part(rest, -2, 0, 1)
        column = _part(a, -1, k, k + 1)
        row = row if unitriangular else op.Div(row, _part(column, -2, k, k + 1))
        found.append(row)
        others = _part(rest, -2, 0, -1) if upper else _part(rest, -2, 1, _LAST)
        rest = op.Sub(others, op.Mul(_part(column, -2, *((0, k) if upper else (k + 1, _LAST))), row))
    return op.Concat(*(reversed(found) if upper else found), axis=-2)


def _solve_by_factor(b: Any, factor: Any, upper: bool = False) -> Any:
    """x of l l^T x = b, or of u^T u x = b."""
    turned = _turned(factor)
    lower, other = (turned, factor) if upper else (factor, turned)
    halfway = _with_shape(_solve_triangular(lower, b, False), b.shape, b)
    return _solve_triangular(other, halfway, True)


def _log_of_determinant(a: Any) -> Any:
    """NaN of what is negative."""
    from onnxscript.onnx_opset import opset18 as op

    sign, size = _solved(a, None).determinant
    return op.Where(op.Less(sign, op.CastLike(0.0, sign)), op.CastLike(float("nan"), size), size)


def _rows_of(a: Any) -> int:
    rows = a.shape[-1]
    if not isinstance(rows, int) or rows > _MOST_ROWS:
        what = f"linear algebra with a matrix of {rows} rows, of at most {_MOST_ROWS}"
        raise UnsupportedModelError("linalg", what, "solve such systems outside of the module")
    return rows


def _identity(a: Any) -> Any:
    """The identity for each matrix of a batch."""
    from onnxscript.onnx_opset import opset18 as op

    one = op.CastLike(op.Constant(value=_tensor(np.eye(_rows_of(a), dtype=np.float32))), a)
    return _with_shape(op.Expand(one, op.Shape(a)), a.shape, a)


def _broadcast(a: Any, b: Any) -> tuple[Any, Any]:
    """Both with all dimensions of the batch."""
    from onnxscript.onnx_opset import opset18 as op

    batches = list(a.shape)[:-2], list(b.shape)[:-2]
    if batches[0] == batches[1]:
        return a, b
    if not all(isinstance(dim, int) for batch in batches for dim in batch):
        raise UnsupportedModelError("linalg", f"batches of {batches[0]} and {batches[1]} matrices", "give both one batch")
    batch = list(np.broadcast_shapes(*map(tuple, batches)))
    shapes = [[*batch, *list(one.shape)[-2:]] for one in (a, b)]
    wide = [op.Expand(one, op.Constant(value_ints=shape)) for one, shape in zip((a, b), shapes, strict=True)]
    return _with_shape(wide[0], shapes[0], a), _with_shape(wide[1], shapes[1], b)


def _turned(a: Any, rank: int | None = None) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    rank = len(a.shape) if rank is None else rank
    turned = op.Transpose(a, perm=[*range(rank - 2), rank - 1, rank - 2])
    return turned if a.shape is None else _with_shape(turned, [*list(a.shape)[:-2], a.shape[-1], a.shape[-2]], a)


def _with_shape(value: Any, shape: Sequence[Any], like: Any) -> Any:
    """A value that translations may ask for its shape and type, as those that the program has."""
    import onnx_ir as ir

    value.shape, value.dtype = ir.Shape(shape), like.dtype
    return value


def _part(value: Any, axis: int, begin: int, end: int) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    return op.Slice(value, *(op.Constant(value_ints=[place]) for place in (begin, end, axis)))


def _tensor(array: np.ndarray) -> Any:
    import onnx_ir as ir

    return ir.tensor(array)
