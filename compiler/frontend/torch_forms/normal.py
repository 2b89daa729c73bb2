"""The error function's inverse, and shares of the normal distribution near 0: in float32, or in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

from .logarithms import log_of_sum, scaled_tail
from .numbers import number

Translation = Callable[..., Any]


def of_normal() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.erfinv.default: _erfinv,
        aten.special_erfcx.default: _scaled_tail,
        aten.special_log_ndtr.default: _log_of_normal,
    }


# M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2011: the single precision polynomials, from the highest
# power down. The first is for the middle, in w - 2.5, the second for the tails, in sqrt(w) - 3.
_MIDDLE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _erfinv(self: Any) -> Any:
    """The inverse of the error function: infinite at -1 and 1, NaN beyond; to a few units in the last place."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    if self.dtype == ir.DataType.DOUBLE:
        return _erfinv_of_doubles(self)
    x = op.Cast(self, to=ir.DataType.FLOAT)
    w = op.Neg(op.Log(op.Mul(op.Sub(1.0, x), op.Add(1.0, x))))
    middle = _polynomial(_MIDDLE, op.Sub(w, 2.5))
    tail = _polynomial(_TAIL, op.Sub(op.Sqrt(op.Max(w, 5.0)), 3.0))
    scale = op.Where(op.Less(w, 5.0), middle, tail)
    return op.CastLike(_with_ends(op.Mul(scale, x), x), self)


# Rational functions for a first guess, and steps of Newton from there, as torch's `calc_erfinv`; the highest power first.
_GUESS_MIDDLE = (
    (-0.140543331, 0.914624893, -1.645349621, 0.886226899),
    (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0),
)
_GUESS_TAIL = (1.641345311, 3.429567803, -1.624906493, -1.970840454), (1.637067800, 3.543889200, 1.0)


def _erfinv_of_doubles(x: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    size, one = op.Abs(x), number(1.0, x)
    square = op.Mul(x, x)
    far = op.Sqrt(op.Neg(op.Log(op.Mul(op.Sub(one, size), number(0.5, x)))))
    middle = op.Mul(size, op.Div(*(_polynomial(part, square) for part in _GUESS_MIDDLE)))
    tail = op.Div(*(_polynomial(part, far) for part in _GUESS_TAIL))
    guess = op.Where(op.LessOrEqual(size, number(0.7, x)), middle, tail)
    for _ in range(2):
        slope = op.Mul(number(2 / sqrt(pi), x), op.Exp(op.Neg(op.Mul(guess, guess))))
        guess = op.Sub(guess, op.Div(op.Sub(op.Erf(guess), size), slope))
    return _with_ends(op.Where(op.Less(x, number(0.0, x)), op.Neg(guess), guess), x)


def _with_ends(result: Any, x: Any) -> Any:
    """A result, infinite at -1 and 1."""
    from onnxscript.onnx_opset import opset18 as op

    return op.Where(op.Equal(op.Abs(x), number(1.0, x)), op.Mul(x, number(float("inf"), x)), result)


def _polynomial(coefficients: Sequence[float], at: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    value = number(coefficients[0], at)
    for coefficient in coefficients[1:]:
        value = op.Add(op.Mul(value, at), number(coefficient, at))
    return value


def _scaled_tail(self: Any) -> Any:
    """erfc(x) exp(x^2), where the factors alone are 0 and infinite, too."""
    x, is_double = _wide(self)
    return _as_real(_tail_of_all(x, is_double), self)


def _log_of_normal(self: Any) -> Any:
    """The logarithm of the share of a normal distribution below x."""
    from onnxscript.onnx_opset import opset18 as op

    x, is_double = _wide(self)
    half, one = number(0.5, x), number(1.0, x)
    scaled = op.Mul(x, number(-sqrt(0.5), x))
    tail_below = scaled_tail(op.Max(scaled, number(0.0, x)), is_double)
    below = op.Sub(op.Log(op.Mul(tail_below, half)), op.Mul(scaled, scaled))
    place = op.Max(op.Neg(scaled), op.Neg(one))
    tail = op.Mul(op.Mul(_tail_of_all(place, is_double), op.Exp(op.Neg(op.Mul(place, place)))), half)
    return _as_real(op.Where(op.Less(x, op.Neg(one)), below, log_of_sum(op.Neg(tail))), self)


def _tail_of_all(x: Any, is_double: bool) -> Any:
    """erfc(x) exp(x^2) of numbers of any sign."""
    from onnxscript.onnx_opset import opset18 as op

    tail = scaled_tail(op.Abs(x), is_double)
    low = op.Sub(op.Mul(op.Exp(op.Mul(x, x)), number(2.0, x)), tail)
    return op.Where(op.Less(x, number(0.0, x)), low, tail)


def _wide(self: Any) -> tuple[Any, bool]:
    """In the type in which is computed, and whether that is double precision."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    is_double = self.dtype == ir.DataType.DOUBLE
    return op.Cast(self, to=ir.DataType.DOUBLE if is_double else ir.DataType.FLOAT), is_double


def _as_real(value: Any, operand: Any) -> Any:
    """A result in the type of an operand; of integers torch's default type, which it has."""
    from onnxscript.onnx_opset import opset18 as op

    return op.CastLike(value, operand) if operand.dtype.is_floating_point() else op.Identity(value)
