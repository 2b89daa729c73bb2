"""ONNX forms of torch operators that torch's own exporter has none for, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....runtime.errors import UnsupportedModelError
from .attention import attention
from .gamma import gamma_functions
from .images import images
from .indices import indices
from .integers import integers
from .linear_algebra import linear_algebra
from .logarithms import logarithms
from .normal import of_normal
from .numbers import beside_doubles, number
from .plane import of_plane
from .quotients import quotients
from .recurrences import rnn
from .reductions import reductions
from .rounding import rounded_once
from .scatters import scatters
from .searches import searches
from .stacks import stacks

Operator = Callable[..., Any]  # an overload of torch's
Translation = Callable[..., Any]  # of onnxscript values and Python numbers to an onnxscript value


def translations() -> dict[Operator, Translation]:
    """The translation of each operator, for torch.onnx.export. Operators of libraries that are not imported are left out.

    A translation raises UnsupportedModelError where it has no form for its arguments; who exports knows the source line.
    """
    import torch

    aten = torch.ops.aten
    found: dict[Operator, Translation] = {
        aten.roll.default: _roll,
        aten.rsub.Scalar: _rsub,
        aten._cdist_forward.default: _cdist,
        aten.heaviside.default: _heaviside,
        aten._grouped_mm.default: _grouped_mm,
        aten.kthvalue.default: _kthvalue,
        aten.median.dim: _median_of_axis,
        aten.median.default: _median,
        aten.masked_select.default: _masked_select,
        aten._pdist_forward.default: _pdist,
        aten.copy.default: _copy,
        **images(),
        **gamma_functions(),
        **indices(),
        **integers(),
        **linear_algebra(),
        **beside_doubles(),
        **logarithms(),
        **of_normal(),
        **of_plane(),
        **quotients(),
        **reductions(),
        **rounded_once(),
        **scatters(),
        **searches(),
        **stacks(),
        torch.ops.prims.view_of.default: _itself,
        aten.scaled_dot_product_attention.default: attention,
        aten._native_batch_norm_legit_functional.default: _batch_norm,
        aten._native_batch_norm_legit.no_stats: _batch_norm_without_running,
        aten.rnn_tanh.input: rnn("Tanh"),
        aten.rnn_relu.input: rnn("Relu"),
        torch.ops.prims.prod.default: _product,
        torch.ops.prims.scalar_tensor.default: _number,
        aten.rrelu_with_noise_functional.default: _random_leaky_relu,
        aten.softmax.int: _softmax("Softmax"),
        aten.log_softmax.int: _softmax("LogSoftmax"),
        aten.special_softmax.default: _softmax("Softmax"),
        aten.special_log_softmax.default: _softmax("LogSoftmax"),
    }
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
    scaled = self if alpha == 1 else op.Mul(self, number(alpha, self))
    return op.Sub(number(other, self), scaled)


def _softmax(operator: str) -> Translation:
    """Softmax or LogSoftmax of what is first cast to `dtype`; torch's exporter casts the result."""

    def rows(self: Any, dim: int, dtype: int | None = None) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        x = self if dtype is None or dtype == -1 else op.Cast(self, to=dtype)
        if len(self.shape) == 0:
            return op.Squeeze(getattr(op, operator)(op.Unsqueeze(x, [0]), axis=0), [0])
        return getattr(op, operator)(x, axis=dim)

    return rows


def _itself(self: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    return op.Identity(self)


def _number(s: bool | int | float, dtype: int | None = None, **memory: Any) -> Any:
    """A tensor without dimensions."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if dtype == ir.DataType.DOUBLE:
        return op.Constant(value=ir.tensor(float(s), ir.DataType.DOUBLE))
    made = op.Constant(value_float=s) if isinstance(s, float) else op.Constant(value_int=int(s))
    return made if dtype is None or dtype == -1 else op.Cast(made, to=dtype)


def _random_leaky_relu(
    self: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> tuple[Any, Any]:
    """In inference its slope is the mean of those that training draws."""
    from onnxscript.onnx_opset import opset18 as op

    if training:
        raise UnsupportedModelError("rrelu", "slopes drawn by chance", "call eval(), or pass training=False")
    return op.LeakyRelu(self, alpha=(lower + upper) / 2), op.Identity(noise)


def _cdist(x1: Any, x2: Any, p: float, compute_mode: Any = None) -> Any:
    """The p-norms of the differences of all pairs of rows: [..., P, M] and [..., R, M] -> [..., P, R]."""
    from onnxscript.onnx_opset import opset18 as op

    difference = op.Abs(op.Sub(op.Unsqueeze(x1, [-2]), op.Unsqueeze(x2, [-3])))
    if p == 0.0:
        return op.ReduceSum(op.CastLike(op.Greater(difference, op.CastLike(0.0, difference)), difference), [-1], keepdims=0)
    if p == 1.0:
        return op.ReduceSum(difference, [-1], keepdims=0)
    if p == 2.0:
        return op.ReduceL2(difference, [-1], keepdims=0)
    if p == float("inf"):
        return op.ReduceMax(difference, [-1], keepdims=0)
    powers = op.ReduceSum(op.Pow(difference, number(float(p), difference)), [-1], keepdims=0)
    return op.Pow(powers, number(1.0 / p, difference))


def _heaviside(self: Any, values: Any) -> Any:
    """0 below zero, 1 above it, `values` at it; 0 for NaN, as torch has it and its exporter has not."""
    from onnxscript.onnx_opset import opset18 as op

    zero = op.CastLike(op.Constant(value_int=0), self)
    return op.Where(op.Equal(self, zero), values, op.CastLike(op.Greater(self, zero), self))


def _grouped_mm(rows: Any, weights: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows [S, K], sorted by group, by the matrix of their group: [S, K] x [G, K, N] -> [S, N]; or [G, S, K] x [G, K, N].

    `offsets` [G] are the ends of the groups, so the group of a row is the number of ends that it is not before. Rows behind the
    last end are in no group; torch leaves them undefined, here they go with the last one. torch refuses an `out_dtype` that is
    not the type of the rows.
    """
    from onnxscript.onnx_opset import opset18 as op

    ranks = len(rows.shape), len(weights.shape)
    if bias is None and offsets is None and ranks == (3, 3):
        return op.MatMul(rows, weights)
    if bias is not None or offsets is None or ranks != (2, 3):
        what = f"a grouped product of {ranks[0]} by {ranks[1]} dimensions" + (" with a bias" if bias is not None else "")
        raise UnsupportedModelError("grouped_mm", what, "multiply rows [S, K] by matrices [G, K, N], with the ends of the groups")
    count = op.Shape(rows, start=0, end=1)
    row = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    is_behind = op.LessOrEqual(op.Cast(op.Unsqueeze(offsets, [0]), to=7), op.Unsqueeze(row, [1]))
    group = op.ReduceSum(op.Cast(is_behind, to=7), [1], keepdims=0)
    last = op.Sub(op.Squeeze(op.Shape(weights, start=0, end=1)), op.Constant(value_int=1))
    matrices = op.Gather(weights, op.Min(group, last), axis=0)
    return op.Squeeze(op.MatMul(op.Unsqueeze(rows, [1]), matrices), [1])


def _kthvalue(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The k-th smallest element of each row along an axis, and its place; NaN stands behind all numbers."""
    from onnxscript.onnx_opset import opset18 as op

    if len(self.shape) == 0:
        return op.Identity(self), op.Constant(value_int=0)
    return _smallest(self, self, op.Constant(value_ints=[int(k)]), dim, keepdim)  # TopK takes NaN as torch does


def _median_of_axis(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower median of each row along an axis, and its place: a NaN where the row has one."""
    from onnxscript.onnx_opset import opset18 as op

    if len(self.shape) == 0:
        return op.Identity(self), op.Constant(value_int=0)
    extent = op.Gather(op.Shape(self), [dim], axis=0)
    middle = op.Div(op.Add(extent, [1]), [2])
    if not self.dtype.is_floating_point():
        return _smallest(self, self, middle, dim, keepdim)
    value, place = _smallest(self, _without_nan(self), middle, dim, keepdim)
    is_nan = op.Cast(op.IsNaN(self), to=7)
    has_nan = op.Cast(op.ReduceMax(is_nan, [dim], keepdims=int(keepdim)), to=9)
    first_nan = op.ArgMax(is_nan, axis=dim, keepdims=int(keepdim))
    return op.Where(has_nan, op.CastLike(float("nan"), self), value), op.Where(has_nan, first_nan, place)


def _median(self: Any) -> Any:
    """The lower median of all elements: NaN if one is."""
    from onnxscript.onnx_opset import opset18 as op

    flat, count = op.Reshape(self, [-1]), op.Reshape(op.Size(self), [1])
    if not self.dtype.is_floating_point():
        return _smallest(flat, flat, op.Div(op.Add(count, [1]), [2]), 0, False)[0]
    value, _ = _smallest(flat, _without_nan(flat), op.Div(op.Add(count, [1]), [2]), 0, False)
    has_nan = op.Cast(op.ReduceMax(op.Cast(op.IsNaN(flat), to=7), [0], keepdims=0), to=9)
    return op.Where(has_nan, op.CastLike(float("nan"), self), value)


def _smallest(self: Any, key: Any, k: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The element with the k-th smallest key, k being a tensor of one number, of each row along an axis, and its place."""
    from onnxscript.onnx_opset import opset18 as op

    _, places = op.TopK(key, k, axis=dim, largest=0, sorted=1)
    place = op.Gather(places, op.Sub(k, [1]), axis=dim)
    value = op.GatherElements(self, place, axis=dim)
    return (value, place) if keepdim else (op.Squeeze(value, [dim]), op.Squeeze(place, [dim]))


def _without_nan(self: Any) -> Any:
    """Numbers that order as torch orders them: infinity for NaN."""
    from onnxscript.onnx_opset import opset18 as op

    return op.Where(op.IsNaN(self), op.CastLike(float("inf"), self), self)


def _masked_select(self: Any, mask: Any) -> Any:
    """The elements where the mask holds, in a row; the tensor and the mask are broadcast to each other."""
    from onnxscript.onnx_opset import opset18 as op

    chosen = op.Expand(mask, op.Shape(self))
    return op.Compress(op.Reshape(op.Expand(self, op.Shape(mask)), [-1]), op.Reshape(chosen, [-1]))


def _pdist(self: Any, p: float = 2.0) -> Any:
    """The p-norms of the differences of all pairs of rows [N, M], a pair once: [N * (N - 1) / 2]."""
    from onnxscript.onnx_opset import opset18 as op

    count = self.shape[0]
    if not isinstance(count, int):
        raise UnsupportedModelError("pdist", f"{count} rows", "fix the number of rows")
    pairs = [[row, other] for row in range(count) for other in range(row + 1, count)]
    first, second = (op.Constant(value_ints=[pair[side] for pair in pairs]) for side in range(2))
    distances = _cdist(op.Unsqueeze(op.Gather(self, first), [1]), op.Unsqueeze(op.Gather(self, second), [1]), p)
    return op.Reshape(distances, [-1])


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Each channel by its mean and variance in this batch, [N, C, ...] as those of inputs of one channel; those and the running
    ones. torch's exporter takes the running ones, as where nothing is trained: there this operator is another."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    rank, wide = len(input.shape), ir.DataType.DOUBLE if input.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    axes, shape = [axis for axis in range(rank) if axis != 1], [-1] + [1] * (rank - 2)
    x = op.Cast(input, to=wide)
    mean = op.ReduceMean(x, axes, keepdims=1)
    variance = op.ReduceMean(op.Mul(op.Sub(x, mean), op.Sub(x, mean)), axes, keepdims=1)
    of_input = running_mean is not None and running_var is not None and not training
    if of_input:
        mean, variance = (op.Reshape(op.Cast(one, to=wide), shape) for one in (running_mean, running_var))
    deviation = op.Reciprocal(op.Sqrt(op.Add(variance, number(eps, x))))
    result = op.Mul(op.Sub(x, mean), deviation)
    for one, combine in ((weight, op.Mul), (bias, op.Add)):
        result = result if one is None else combine(result, op.Reshape(op.Cast(one, to=wide), shape))
    if running_mean is None or running_var is None or of_input:
        renewed = running_mean, running_var
    else:
        count = op.Cast(op.Div(op.Size(input), op.Squeeze(op.Shape(input, start=1, end=2))), to=wide)
        unbiased = op.Mul(variance, op.Div(count, op.Sub(count, number(1.0, x))))
        pairs = ((running_mean, mean), (running_var, unbiased))
        renewed = tuple(
            op.Add(op.Mul(old, number(1.0 - momentum, old)), op.CastLike(op.Mul(op.Reshape(new, [-1]), number(momentum, x)), old))
            for old, new in pairs
        )
    return op.CastLike(result, input), op.Reshape(mean, [-1]), op.Reshape(deviation, [-1]), *renewed


def _batch_norm_without_running(
    input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """As `_batch_norm`, where there are no running means."""
    return _batch_norm(input, weight, bias, None, None, True, momentum, eps)[:3]


def _copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """Another tensor in the type and, broadcast, in the shape of this one."""
    from onnxscript.onnx_opset import opset18 as op

    return op.CastLike(op.Expand(src, op.Shape(self)), self)


def _roll(self: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """Elements moved along axes, the last ones to the front; by numbers, or by sizes that a call decides."""
    from onnxscript.function_libs.torch_lib.ops import core
    from onnxscript.onnx_opset import opset18 as op

    if all(isinstance(shift, int) for shift in shifts):
        return core.aten_roll(self, shifts, dims)
    rolled = self if dims else op.Reshape(self, [-1])
    for shift, axis in zip(shifts, dims or [0], strict=True):
        amount = op.Constant(value_ints=[shift]) if isinstance(shift, int) else op.Reshape(shift, [1])
        extent = op.Shape(rolled, start=axis, end=None if axis == -1 else axis + 1)
        first = op.Mod(op.Neg(amount), extent)
        parts = op.Slice(rolled, first, [2**62], [axis]), op.Slice(rolled, [0], first, [axis])
        rolled = op.Concat(*parts, axis=axis)
    return rolled if dims else op.Reshape(rolled, op.Shape(self))


def _product(inp: Any, dims: Sequence[int] | None, output_dtype: Any = None) -> Any:
    """The product of all elements along axes, which are left out of the result."""
    from onnxscript.onnx_opset import opset18 as op

    values = inp if output_dtype is None else op.Cast(inp, to=int(output_dtype))
    axes = range(len(inp.shape)) if dims is None else dims
    return op.ReduceProd(values, op.Constant(value_ints=list(axes)), keepdims=0, noop_with_empty_axes=1)
