"""Scalar meaning of every pointwise operator: from the inputs' elements to the output's element.

Floats narrower than float32 are computed in float32 and rounded once, at the operator's output, as ONNX specifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import copysign
from operator import add, mul, sub

import numpy as np
from tvm import tirx

from ..codegen.builder import Expr
from ..formats import minifloat
from ..formats.bfloat16 import rounded
from ..groups.group import Op
from . import math, trigonometry
from .power import integer_power, power

Inputs = list[Expr]  # None for an absent optional input, which only Clip has
Scalar = Callable[["Element", Inputs], Expr]

_NARROW_FLOATS = ("float16", "bfloat16")
_OF_CODES = ("Cast", "DequantizeLinear", "IsInf", "IsNaN")  # operators on elements that are stored as a code (minifloats)
_FLOATS = ("float32", "float64", *_NARROW_FLOATS)
_GAMMA, _ALPHA = 1.05070102214813232421875, 1.67326319217681884765625  # of Selu, as ONNX rounds them to float32


@dataclass(frozen=True)
class Element:
    """An element of an operator's output being expressed, and how."""

    op: Op
    dtype: str  # of the arithmetic
    name: math.Name  # names an intermediate, so that it is computed once
    widest: int = 128  # bits of the widest integers that the target's compiler supports
    is_rough: bool = False  # the result is rounded to bfloat16: cheaper functions with errors far below its own will do
    is_grid: bool = False  # for a thread of a GPU, where functions of its library are called

    def const(self, value: float) -> Expr:
        return tirx.const(value, self.dtype)


def apply(
    op: Op,
    inputs: list[Expr | None],
    input_dtypes: list[str],
    output_dtype: str,
    name: math.Name,
    widest: int = 128,
    *,
    has_bfloat16: bool = False,
    is_rough: bool = False,
    is_grid: bool = False,
) -> Expr:
    """The element of `op` whose inputs' elements are given; None stands for an absent optional input.

    `has_bfloat16`: the target has an instruction that rounds to that type. `is_rough`, `is_grid`: see Element.
    """
    dtype = input_dtypes[0] if op.op_type != "Where" else input_dtypes[1]
    element = Element(op, working_type(dtype), name, widest, is_rough, is_grid)
    operands = [None if x is None else name(widened(x, kind, name)) for x, kind in zip(inputs, input_dtypes, strict=True)]
    return narrowed(POINTWISE[op.op_type](element, operands), output_dtype, op, name, has_bfloat16=has_bfloat16)


def working_type(dtype: str) -> str:
    """The type in which elements of `dtype` are computed."""
    if minifloat.is_coded(dtype):
        return minifloat.decoded_type(dtype)
    return "float32" if dtype in _NARROW_FLOATS else dtype


def widened(x: Expr, dtype: str, name: math.Name) -> Expr:
    """An operand's element in its `working_type`."""
    if minifloat.is_coded(dtype):
        return minifloat.decode(x, dtype, name)
    return _cast(x, "float32", dtype) if dtype in _NARROW_FLOATS else x


def narrowed(result: Expr, dtype: str, op: Op, name: math.Name, *, has_bfloat16: bool = False) -> Expr:
    """A result of `op` rounded to its output's type; to minifloats as the attributes of Cast say."""
    if dtype == "bfloat16" and str(result.ty) in ("float32", "float64"):
        return rounded(_cast(result, "float32", str(result.ty)), name, has_instruction=has_bfloat16)
    if not minifloat.is_coded(dtype):
        return _cast(result, dtype, str(result.ty))
    number = _cast(result, minifloat.decoded_type(dtype), str(result.ty))
    saturates = bool(op.attribute("saturate", 1))
    if dtype == minifloat.SCALE:
        return minifloat.encode_scale(number, name, saturate=saturates, round_mode=op.attribute("round_mode", "up"))
    return minifloat.encode(number, dtype, name, saturate=saturates)


def supports(op: Op, input_dtypes: list[str], output_dtype: str) -> str:
    """Empty if `apply` can express the operator on these types, else the reason why not."""
    if op.op_type not in POINTWISE:
        return f"{op.op_type} has no scalar form"
    for dtype in (*input_dtypes, output_dtype):
        if minifloat.is_coded(dtype):
            if op.op_type not in _OF_CODES:
                return f"no arithmetic on {dtype}"
        elif dtype not in _FLOATS and dtype != "bool" and np.dtype(dtype).kind not in "iu":
            return f"no arithmetic on {dtype}"
    return ""


def _cast(value: Expr, dtype: str, source: str) -> Expr:
    if source == dtype:
        return value
    if dtype == "bool":
        nonzero = tirx.NE(value, tirx.const(0, source))  # false for NaN, in LLVM's ordered comparison
        return tirx.Or(nonzero, tirx.isnan(value)) if source in _FLOATS else nonzero
    if source in _FLOATS and dtype.startswith("uint"):  # negative floats wrap, as in C on x86 and in NumPy
        # Vectors of float32 have an instruction to int32 alone; what that cannot hold is some number for 8 and 16 bits anyway.
        wrapped = tirx.Cast(dtype, tirx.Cast("int32" if dtype in ("uint8", "uint16") else "int64", value))
        if dtype != "uint64":
            return wrapped
        return tirx.Select(value >= tirx.const(2.0**63, source), tirx.Cast(dtype, value), wrapped)
    return tirx.Cast(dtype, value)


def _binary(function: Callable[[Expr, Expr], Expr]) -> Scalar:
    return lambda e, x: function(x[0], x[1])


def _wrapping(function: Callable[..., Expr]) -> Scalar:
    return lambda e, x: reduce(lambda a, b: math.wrapping(function, a, b, widest=e.widest), x)


def _variadic(function: Callable[[Expr, Expr], Expr]) -> Scalar:
    return lambda e, x: reduce(function, x)


def _libm(name: str, *x: Expr) -> Expr:
    """A function of the C library that TVM's LLVM generator has no name for."""
    dtype = str(x[0].ty)
    return tirx.call_pure_extern(dtype, name if dtype == "float64" else f"{name}f", *x)


def _equal(e: Element, x: Inputs) -> Expr:
    if e.dtype == "bool":  # i1 in registers, i8 in memory: LLVM refuses to compare the two
        return tirx.EQ(*(tirx.Cast("int32", flag) for flag in x))
    return tirx.EQ(*x)


def _float(fast: Callable[[math.Name, Expr], Expr], exact: Callable[[Expr], Expr]) -> Scalar:
    """A transcendental function: our own in float32, libm's in float64."""
    return lambda e, x: fast(e.name, x[0]) if e.dtype == "float32" else exact(x[0])


def _lanes(fast: Callable[[math.Name, Expr], Expr], exact: Callable[[Expr], Expr]) -> Scalar:
    """The same on a CPU; on a GPU, where nothing is vectorised, the functions of its library."""
    return lambda e, x: fast(e.name, x[0]) if e.dtype == "float32" and not e.is_grid else exact(x[0])


def _divisor(e: Element, x: Expr) -> Expr:
    """An integer divisor that cannot trap: 1 in place of 0 (undefined), and of -1, by which the least integer overflows."""
    traps = tirx.EQ(x, e.const(0))
    if not e.dtype.startswith("u"):
        traps = tirx.Or(traps, tirx.EQ(x, e.const(-1)))
    return tirx.Select(traps, e.const(1), x)


def _divide(e: Element, x: Inputs) -> Expr:
    if e.dtype not in _FLOATS:
        quotient = _quotient(e, *x)
        if e.dtype.startswith("u"):
            return quotient
        return tirx.Select(tirx.EQ(x[1], e.const(-1)), _negative(e, x[0]), quotient)
    if isinstance(x[1], tirx.FloatImm) and x[1].value == 0:  # TVM refuses to divide by 0; x * infinity is the same, NaN too
        return x[0] * e.const(copysign(float("inf"), x[1].value))
    if isinstance(x[1], tirx.FloatImm) and e.dtype == "float32" and not e.is_grid and math.has_reciprocal(x[1].value):
        return math.divided(e.name, x[0], x[1].value)
    return x[0] / x[1]


def _quotient(e: Element, dividend: Expr, divisor: Expr) -> Expr:
    """An integer quotient, rounded towards 0. CPUs have no vector instruction for it: for 32 bits a float64 quotient is exact, as
    it is at least a relative 2**-32 below the next integer and rounded to 2**-53."""
    safe = _divisor(e, divisor)
    if e.dtype != "int32" or e.is_grid or isinstance(divisor, tirx.IntImm):
        return tirx.truncdiv(dividend, safe)
    return tirx.Cast("int32", tirx.Cast("float64", dividend) / tirx.Cast("float64", safe))


def _mod(e: Element, x: Inputs) -> Expr:
    if e.op.attribute("fmod", 0):
        return _libm("fmod", *x) if e.dtype in _FLOATS else tirx.truncmod(x[0], _divisor(e, x[1]))
    if e.dtype not in _FLOATS:
        return tirx.floormod(x[0], _divisor(e, x[1]))
    rest = _libm("fmod", *x)  # has the sign of the dividend; ONNX's Mod, as Python's, that of the divisor
    zero = e.const(0)
    other_sign = tirx.Or(tirx.And(rest < zero, x[1] > zero), tirx.And(rest > zero, x[1] < zero))
    return tirx.Select(other_sign, rest + x[1], rest)


_TIMES = _wrapping(mul)


def _difference(e: Element, x: Inputs) -> Expr:
    """A difference; of unsigned integers by complements, as TVM marks one as never below 0, in any number of bits."""
    if not e.dtype.startswith("uint"):
        return _wrapping(sub)(e, x)
    return ~math.wrapping(add, ~x[0], x[1], widest=e.widest)


def _pow(e: Element, x: Inputs) -> Expr:
    base, exponent = x
    if "int" in e.dtype and "int" in str(exponent.ty):
        return integer_power(e.name, base, exponent, e.widest)
    if isinstance(exponent, tirx.FloatImm | tirx.IntImm):  # exporters write norms and GELU with squares and cubes
        value = float(exponent.value)
        if value in (2.0, 3.0):
            return _TIMES(e, [base] * int(value))
        if value == 0.5 and e.dtype in _FLOATS:
            return tirx.sqrt(base)
        if value == 1.0:
            return base
    if e.dtype in _FLOATS:
        raised = tirx.Cast(e.dtype, exponent)
        is_ours = e.dtype == "float32" and not e.is_grid
        return power(e.name, base, e.name(raised)) if is_ours else tirx.pow(base, raised)
    raised = tirx.pow(tirx.Cast("float64", base), tirx.Cast("float64", exponent))
    if e.is_grid:  # the library of a GPU may miss a whole number by its last bits
        raised = e.name(raised)
        whole = e.name(tirx.nearbyint(raised))
        is_whole = tirx.abs(raised - whole) <= tirx.abs(whole) * tirx.const(2.0**-51, "float64")
        raised = tirx.Select(is_whole, whole, raised)
    return tirx.Cast(e.dtype, raised)


def _clip(e: Element, x: Inputs) -> Expr:
    low = e.op.attribute("min") if len(x) < 2 else x[1]
    high = e.op.attribute("max") if len(x) < 3 else x[2]
    value = x[0]
    if low is not None:
        value = math.maximum(value, e.const(low) if isinstance(low, float) else low)
    if high is not None:
        value = math.minimum(value, e.const(high) if isinstance(high, float) else high)
    return value


def _times_sigmoid(e: Element, x: Expr, argument: Expr) -> Expr:
    if e.is_rough and e.dtype == "float32":
        return x / math.rough_exp_and_one(e.name, -argument)
    return x * _SIGMOID(e, [e.name(argument)])


def _gelu(e: Element, x: Inputs) -> Expr:
    v = x[0]
    if e.op.attribute("approximate", "none") == "tanh":
        linear, cubic = (e.const(2 * 0.7978845608028654 * factor) for factor in (1, 0.044715))
        twice = v * (linear + cubic * e.name(v * v))
        return _times_sigmoid(e, v, twice)  # (1 + tanh(u)) / 2 is the sigmoid of 2 u, which loses no digits below 0
    argument = e.name(v * e.const(0.7071067811865476))
    erf = math.rough_erf(e.name, argument) if e.is_rough and e.dtype == "float32" else _ERF(e, [argument])
    return e.const(0.5) * v * (e.const(1) + erf)


def _hard_sigmoid(e: Element, x: Expr, alpha: float, beta: float) -> Expr:
    return math.maximum(e.const(0), math.minimum(e.const(1), e.const(alpha) * x + e.const(beta)))


def _elu(e: Element, x: Expr, alpha: float) -> Expr:
    grown = math.expm1_nonpositive(e.name, x) if e.dtype == "float32" else _libm("expm1", x)
    return tirx.Select(x < e.const(0), e.const(alpha) * grown, x)


def _celu(e: Element, x: Inputs) -> Expr:
    alpha = e.op.attribute("alpha", 1.0)
    return tirx.Select(x[0] < e.const(0), _elu(e, e.name(x[0] / e.const(alpha)), alpha), x[0])


def _shrink(e: Element, x: Inputs) -> Expr:
    """Shrink; integers are computed in float64 and truncated."""
    working = e.dtype if e.dtype in _FLOATS else "float64"
    bias, bound = (tirx.const(e.op.attribute(key, default), working) for key, default in (("bias", 0.0), ("lambd", 0.5)))
    value = e.name(_cast(x[0], working, e.dtype))
    middle = tirx.Select(value > bound, value - bias, tirx.const(0, working))
    return tirx.Select(value < -bound, value + bias, middle)


def _sign(e: Element, x: Inputs) -> Expr:
    zero = e.const(0)
    return tirx.Select(x[0] > zero, e.const(1), tirx.Select(x[0] < zero, e.const(-1 if e.dtype[0] != "u" else 0), x[0]))


def _is_inf(e: Element, x: Inputs) -> Expr:
    up, down = (tirx.EQ(x[0], e.const(sign * float("inf"))) for sign in (1, -1))
    if not e.op.attribute("detect_negative", 1):
        return up if e.op.attribute("detect_positive", 1) else tirx.const(False, "bool")
    return tirx.Or(up, down) if e.op.attribute("detect_positive", 1) else down


def _bit_shift(e: Element, x: Inputs) -> Expr:
    """A shift; by the width or more, or less than 0 (undefined in C), it gives 0, or the sign bit in every place."""
    bits = np.dtype(e.dtype).itemsize * 8
    amount = tirx.max(tirx.min(x[1], e.const(bits - 1)), e.const(0))
    left = e.op.attribute("direction") == "LEFT"
    shifted = x[0] << amount if left else x[0] >> amount
    filled = e.const(0) if left or e.dtype.startswith("uint") else x[0] >> e.const(bits - 1)
    return tirx.Select(tirx.Or(x[1] >= e.const(bits), x[1] < e.const(0)), filled, shifted)


def _negative(e: Element, x: Expr) -> Expr:
    return math.wrapping(lambda a: -a, x, widest=e.widest)


def _abs(e: Element, x: Inputs) -> Expr:
    if e.dtype in _FLOATS:
        return tirx.abs(x[0])
    return x[0] if e.dtype.startswith("uint") else tirx.Select(x[0] < e.const(0), _negative(e, x[0]), x[0])


def _tanh64(x: Expr) -> Expr:
    return _libm("tanh", x)  # tirx.tanh is a quotient of sums of 1 and a power, in which the digits of a small x cancel


_TANH = _float(math.tanh, _tanh64)
_ERF = _float(math.erf, tirx.erf)
_SIGMOID = _float(math.sigmoid, lambda x: tirx.const(1, "float64") / (tirx.const(1, "float64") + tirx.exp(-x)))


def _softplus64(x: Expr) -> Expr:
    return tirx.max(x, tirx.const(0, "float64")) + tirx.log1p(tirx.exp(-tirx.abs(x)))


_SOFTPLUS = _float(math.softplus, _softplus64)

POINTWISE: dict[str, Scalar] = {
    "Abs": _abs,
    "Acos": _float(trigonometry.acos, tirx.acos),
    "Acosh": lambda e, x: tirx.acosh(x[0]),
    "Add": _wrapping(add),
    "And": _binary(tirx.And),
    "Asin": _float(trigonometry.asin, tirx.asin),
    "Asinh": lambda e, x: tirx.asinh(x[0]),
    "Atan": _float(trigonometry.atan, tirx.atan),
    "Atanh": _float(math.atanh, lambda x: tirx.const(0.5, "float64") * (tirx.log1p(x) - tirx.log1p(-x))),
    "BitShift": _bit_shift,
    "BitwiseAnd": _binary(lambda a, b: a & b),
    "BitwiseNot": lambda e, x: ~x[0],
    "BitwiseOr": _binary(lambda a, b: a | b),
    "BitwiseXor": _binary(lambda a, b: a ^ b),
    "Cast": lambda e, x: x[0],
    "Ceil": lambda e, x: tirx.ceil(x[0]),
    "Celu": _celu,
    "Clip": _clip,
    "Cos": _lanes(trigonometry.cos, tirx.cos),
    "Cosh": lambda e, x: _libm("cosh", x[0]),
    "DequantizeLinear": lambda e, x: (
        (tirx.Cast("float32", x[0]) - (tirx.Cast("float32", x[2]) if len(x) > 2 else tirx.const(0, "float32"))) * x[1]
    ),
    "Div": _divide,
    "Elu": lambda e, x: _elu(e, x[0], e.op.attribute("alpha", 1.0)),
    "Equal": _equal,
    "Erf": _ERF,
    "Exp": _float(math.exp, tirx.exp),
    "Floor": lambda e, x: tirx.floor(x[0]),
    "Gelu": _gelu,
    "Greater": _binary(lambda a, b: a > b),
    "GreaterOrEqual": _binary(lambda a, b: a >= b),
    "HardSigmoid": lambda e, x: _hard_sigmoid(e, x[0], e.op.attribute("alpha", 0.2), e.op.attribute("beta", 0.5)),
    "HardSwish": lambda e, x: x[0] * _hard_sigmoid(e, x[0], 1 / 6, 0.5),
    "Identity": lambda e, x: x[0],
    "IsInf": _is_inf,
    "IsNaN": lambda e, x: tirx.isnan(x[0]),
    "LeakyRelu": lambda e, x: tirx.Select(x[0] < e.const(0), x[0] * e.const(e.op.attribute("alpha", 0.01)), x[0]),
    "Less": _binary(lambda a, b: a < b),
    "LessOrEqual": _binary(lambda a, b: a <= b),
    "Log": _float(math.log, tirx.log),
    "Max": _variadic(math.maximum),
    "Mean": lambda e, x: reduce(lambda a, b: a + b, x) / e.const(len(x)),
    "Min": _variadic(math.minimum),
    "Mish": _float(math.mish, lambda x: x * _tanh64(_softplus64(x))),
    "Mod": _mod,
    "Mul": _TIMES,
    "Neg": lambda e, x: _negative(e, x[0]),
    "Not": lambda e, x: tirx.Not(x[0]),
    "Or": _binary(tirx.Or),
    "PRelu": lambda e, x: tirx.Select(x[0] < e.const(0), x[0] * x[1], x[0]),
    "Pow": _pow,
    "Reciprocal": lambda e, x: e.const(1) / x[0],
    "Relu": lambda e, x: math.maximum(x[0], e.const(0)),
    "Round": lambda e, x: tirx.nearbyint(x[0]),
    "Selu": lambda e, x: e.const(e.op.attribute("gamma", _GAMMA)) * _elu(e, x[0], e.op.attribute("alpha", _ALPHA)),
    "Shrink": _shrink,
    "Sigmoid": _SIGMOID,
    "Sign": _sign,
    "Sin": _lanes(trigonometry.sin, tirx.sin),
    "Sinh": lambda e, x: _libm("sinh", x[0]),
    "Softplus": _SOFTPLUS,
    "Softsign": lambda e, x: x[0] / (e.const(1) + tirx.abs(x[0])),
    "Sqrt": lambda e, x: tirx.sqrt(x[0]),
    "Sub": _difference,
    "Sum": _wrapping(add),
    "Swish": lambda e, x: _times_sigmoid(e, x[0], e.const(e.op.attribute("alpha", 1.0)) * x[0]),
    "Tan": _lanes(trigonometry.tan, tirx.tan),
    "Tanh": _TANH,
    "ThresholdedRelu": lambda e, x: tirx.Select(x[0] > e.const(e.op.attribute("alpha", 1.0)), x[0], e.const(0)),
    "Where": lambda e, x: tirx.Select(x[0], x[1], x[2]),
    "Xor": lambda e, x: tirx.Not(_equal(e, x)),
}
