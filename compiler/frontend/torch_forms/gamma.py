"""The gamma function's logarithm and its derivative, in double precision: near their zeros float32 would leave few digits."""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any

from .numbers import number

Translation = Callable[..., Any]

# C. Lanczos, "A Precision Approximation of the Gamma Function", 1964, with g = 7 and 9 terms: 1e-15.
_G = 7.0
_LANCZOS = (
    0.99999999999980993,
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)
_SHIFTS = 8  # of the argument, from which on the series has all digits
_BERNOULLI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132)  # of the series of the derivative, by powers of 1 / x^2


def gamma_functions() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten, prims = torch.ops.aten, torch.ops.prims
    logarithms = (aten.lgamma.default, prims.lgamma.default, aten.special_gammaln.default)
    derivatives = (aten.digamma.default, prims.digamma.default, aten.special_psi.default, aten.special_digamma.default)
    return dict.fromkeys(logarithms, _wide(_log_of_gamma)) | dict.fromkeys(derivatives, _wide(_digamma))


def _log_of_gamma(x: Any) -> Any:
    """log |gamma(x)|; below 1/2 by reflection: gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    from onnxscript.onnx_opset import opset18 as op

    is_low = op.Less(x, number(0.5, x))
    z = op.Sub(op.Where(is_low, op.Sub(number(1.0, x), x), x), number(1.0, x))
    series = number(_LANCZOS[0], x)
    for place, coefficient in enumerate(_LANCZOS[1:], 1):
        series = op.Add(series, op.Div(number(coefficient, x), op.Add(z, number(float(place), x))))
    base = op.Add(z, number(_G + 0.5, x))
    value = op.Sub(op.Mul(op.Add(z, number(0.5, x)), op.Log(base)), base)
    value = op.Add(op.Add(value, number(0.5 * log(2 * pi), x)), op.Log(series))
    away = op.Mul(op.Sub(x, op.Round(x)), number(pi, x))
    reflected = op.Sub(op.Sub(number(log(pi), x), op.Log(op.Abs(op.Sin(away)))), value)
    result = op.Where(is_low, reflected, value)
    return op.Where(op.IsInf(x), number(float("inf"), x), result)


def _digamma(x: Any) -> Any:
    """The derivative of log gamma(x): NaN at negative whole numbers, infinite at 0."""
    from onnxscript.onnx_opset import opset18 as op

    is_low = op.Less(x, number(0.0, x))
    z = op.Where(is_low, op.Sub(number(1.0, x), x), x)
    below = number(0.0, x)
    for shift in range(_SHIFTS):
        below = op.Add(below, op.Reciprocal(op.Add(z, number(float(shift), x))))
    far = op.Add(z, number(float(_SHIFTS), x))
    square = op.Reciprocal(op.Mul(far, far))
    series = number(0.0, x)
    for coefficient in reversed(_BERNOULLI):
        series = op.Mul(op.Add(series, number(coefficient, x)), square)
    value = op.Sub(op.Sub(op.Sub(op.Log(far), op.Div(number(0.5, x), far)), series), below)
    away = op.Sub(x, op.Round(x))
    angle = op.Mul(away, number(pi, x))
    reflected = op.Sub(value, op.Div(op.Mul(number(pi, x), op.Cos(angle)), op.Sin(angle)))
    reflected = op.Where(op.Equal(away, number(0.0, x)), number(float("nan"), x), reflected)
    return op.Where(is_low, reflected, value)


def _wide(translate: Translation) -> Translation:
    def translated(self: Any) -> Any:
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        kind = self.dtype if self.dtype.is_floating_point() else ir.DataType.FLOAT
        return op.Cast(translate(op.Cast(self, to=ir.DataType.DOUBLE)), to=kind)

    return translated
