"""Logarithms and exponentials near 0, and tails, whose digits the sums that torch's exporter writes would lose."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

from ....runtime.errors import UnsupportedModelError
from .numbers import number

Translation = Callable[..., Any]


def logarithms() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.log1p.default: _of_float(log_of_sum),
        aten.expm1.default: _of_float(_less_one),
        aten.logcumsumexp.default: _logs_of_sums,
        aten.logit.default: _logit,
        aten.logaddexp.default: _of_float(_log_of_powers),
        aten.logaddexp2.default: _of_float(_log_of_powers_of_two),
        aten.log_sigmoid.default: _of_float(_log_of_share),
        aten.erfc.default: _of_float(_tail),
        aten.special_erfc.default: _of_float(_tail),
        aten.special_expm1.default: _of_float(_less_one),
        aten.special_log1p.default: _of_float(log_of_sum),
    }


def log_of_sum(y: Any) -> Any:
    """log(1 + y): what is lost in 1 + y is lost in its logarithm, too (W. Kahan; N. Higham, "Accuracy and Stability of Numerical
    Algorithms", 2002, 1.14.1)."""
    from onnxscript.onnx_opset import opset18 as op

    one = op.CastLike(1.0, y)
    total = op.Add(y, one)
    scale = op.Where(op.Equal(total, y), one, op.Div(y, op.Sub(total, one)))
    return op.Where(op.Equal(total, one), y, op.Mul(op.Log(total), scale))


def _less_one(x: Any) -> Any:
    """exp(x) - 1, by the same idea."""
    from onnxscript.onnx_opset import opset18 as op

    one = op.CastLike(1.0, x)
    power = op.Exp(x)
    less = op.Sub(power, one)
    is_far = op.Greater(op.Abs(x), one)  # where nothing is lost, and the logarithm may not be finite
    exact = op.Mul(less, op.Div(x, op.Log(power)))
    return op.Where(is_far, less, op.Where(op.Equal(power, one), x, exact))


def _log_of_powers(a: Any, b: Any) -> Any:
    """log(exp(a) + exp(b)), of which neither need be finite; equal ones, infinite perhaps, have no difference."""
    from onnxscript.onnx_opset import opset18 as op

    apart = op.Neg(op.Abs(op.Sub(a, b)))
    more = op.Where(op.Equal(a, b), number(log(2), a), log_of_sum(op.Exp(apart)))
    return op.Add(op.Max(a, b), more)


def _log_of_powers_of_two(a: Any, b: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    apart = op.Neg(op.Abs(op.Sub(a, b)))
    more = op.Div(log_of_sum(op.Exp(op.Mul(apart, number(log(2), a)))), number(log(2), a))
    return op.Add(op.Max(a, b), op.Where(op.Equal(a, b), op.CastLike(1.0, a), more))


def _logs_of_sums(self: Any, dim: int) -> Any:
    """log(exp(x[0]) + ... + exp(x[i])) along an axis: after step s of a sum of prefixes (D. Hillis and G. Steele, "Data Parallel
    Algorithms", 1986) each place has the last 2^s terms. Over the largest of all the others could be nothing."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    rank = len(self.shape)
    if rank == 0:
        return op.Identity(self)
    axis, extent = dim % rank, self.shape[dim]
    if not isinstance(extent, int):
        raise UnsupportedModelError("logcumsumexp", f"{extent} terms", "fix their number")
    wide = ir.DataType.DOUBLE if self.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    total, apart = op.Cast(self, to=wide), 1
    none = op.Cast(op.Constant(value_float=float("-inf")), to=wide)
    while apart < extent:
        begins, ends = [0] * rank, [0] * rank
        begins[axis], ends[axis] = apart, -apart
        total = _log_of_powers(total, op.Pad(total, op.Constant(value_ints=[*begins, *ends]), none))
        apart *= 2
    return op.Cast(total, to=self.dtype)


def _logit(self: Any, eps: float | None = None) -> Any:
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if not self.dtype.is_floating_point():
        self = op.Cast(self, to=ir.DataType.FLOAT)
        self.dtype = ir.DataType.FLOAT
    wide = ir.DataType.DOUBLE if self.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    x = op.Cast(self, to=wide)
    if eps is not None:
        x = op.Min(op.Max(x, number(eps, x)), number(1 - eps, x))
    return op.Cast(op.Log(op.Div(x, op.Sub(op.CastLike(1.0, x), x))), to=self.dtype)


def _log_of_share(x: Any) -> Any:
    """log(1 / (1 + exp(-x)))."""
    from onnxscript.onnx_opset import opset18 as op

    return op.Sub(op.Min(x, op.CastLike(0.0, x)), log_of_sum(op.Exp(op.Neg(op.Abs(x)))))


# W. Press et al., "Numerical Recipes", 1992, 6.2: erfc(x) exp(x^2) = t exp(P(t)), t = 1 / (1 + x / 2), to 1.2e-7; P from the
# highest power down.
_TAIL = (
    0.17087277,
    -0.82215223,
    1.48851587,
    -1.13520398,
    0.27886807,
    -0.18628806,
    0.09678418,
    0.37409196,
    1.00002368,
    -1.26551223,
)


# The third edition, 2007, 6.2.2: the same to 1.2e-16, P a sum of Chebyshev's polynomials in 4 t - 2, from the lowest up.
_TAIL_OF_DOUBLES = (
    -1.3026537197817094,
    0.6419697923564902,
    0.019476473204185836,
    -0.00956151478680863,
    -0.000946595344482036,
    0.000366839497852761,
    4.2523324806907e-05,
    -2.0278578112534e-05,
    -1.624290004647e-06,
    1.30365583558e-06,
    1.5626441722e-08,
    -8.5238095915e-08,
    6.529054439e-09,
    5.059343495e-09,
    -9.91364156e-10,
    -2.27365122e-10,
    9.6467911e-11,
    2.394038e-12,
    -6.886027e-12,
    8.94487e-13,
    3.13092e-13,
    -1.12708e-13,
    3.81e-16,
    7.106e-15,
    -1.523e-15,
    -9.4e-17,
    1.21e-16,
    -2.8e-17,
)


def scaled_tail(x: Any, is_double: bool) -> Any:
    """erfc(x) exp(x^2) of numbers that are not negative."""
    from onnxscript.onnx_opset import opset18 as op

    if is_double:
        return _scaled_tail_of_doubles(x)
    t = op.Reciprocal(op.Add(op.Mul(x, op.CastLike(0.5, x)), op.CastLike(1.0, x)))
    value = op.CastLike(_TAIL[0], x)
    for coefficient in _TAIL[1:]:
        value = op.Add(op.Mul(value, t), op.CastLike(coefficient, x))
    return op.Mul(t, op.Exp(value))


def _scaled_tail_of_doubles(x: Any) -> Any:
    """By Clenshaw's recurrence."""
    from onnxscript.onnx_opset import opset18 as op

    t = op.Div(number(2.0, x), op.Add(x, number(2.0, x)))
    place = op.Sub(op.Mul(t, number(4.0, x)), number(2.0, x))
    value, before = number(_TAIL_OF_DOUBLES[-1], x), number(0.0, x)
    for coefficient in _TAIL_OF_DOUBLES[-2:0:-1]:
        value, before = op.Add(op.Sub(op.Mul(place, value), before), number(coefficient, x)), value
    constant = number(_TAIL_OF_DOUBLES[0], x)
    half = op.Mul(op.Add(op.Mul(place, value), constant), number(0.5, x))
    return op.Mul(t, op.Exp(op.Sub(half, before)))


def _tail(x: Any) -> Any:
    """erfc(x) = 1 - erf(x), which leaves nothing from 4 on."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    far = op.Mul(scaled_tail(op.Abs(x), x.dtype == ir.DataType.DOUBLE), op.Exp(op.Neg(op.Mul(x, x))))
    return op.Where(op.Greater(x, op.CastLike(0.5, x)), far, op.Sub(op.CastLike(1.0, x), op.Erf(x)))


def _of_float(translate: Translation) -> Translation:
    """In float32, or in double precision; results of integers are torch's default type."""

    def translated(*operands: Any) -> Any:
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        kinds = {operand.dtype for operand in operands}
        computed = ir.DataType.DOUBLE if ir.DataType.DOUBLE in kinds else ir.DataType.FLOAT
        result = next((kind for kind in kinds if kind.is_floating_point()), ir.DataType.FLOAT)
        taken = [op.Cast(operand, to=computed) for operand in operands]
        for one in taken:
            one.dtype = computed
        return op.Cast(translate(*taken), to=result)

    return translated
