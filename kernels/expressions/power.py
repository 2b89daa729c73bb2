"""Powers of float32 as plain arithmetic: x**y is 2**(y log2 x), with the exponent in float64; and of integers, exactly.

Greatest error against float64, measured by tests/kernels/expressions over bases and exponents of every size: 1.0 ulp.
"""

from __future__ import annotations

from math import log
from operator import mul

from tvm import tirx

from ..codegen.builder import Expr
from .ldexp import scaled
from .math import INF, OF_EXP, Name, f32, polynomial, wrapping

_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2) in float64
_LOG2_TERMS = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


def power(name: Name, x: Expr, y: Expr) -> Expr:
    """x**y with the special cases of C's pow (ISO C99, F.9.4.4)."""
    size = name(tirx.abs(x))
    logarithm = name(_log2(name, size))
    # 1**y is 1 for every y, infinities and NaN, too.
    product = tirx.Select(tirx.EQ(size, f32(1.0)), _f64(0.0), tirx.Cast("float64", y) * logarithm)
    value = name(_exp2(name, name(product)))
    is_whole = tirx.EQ(tirx.floor(y), y)
    half = name(y * f32(0.5))
    is_odd = name(tirx.And(is_whole, tirx.NE(tirx.floor(half), half)))
    is_negative = name(tirx.reinterpret("int32", x) < tirx.const(0, "int32"))
    signed = name(tirx.Select(tirx.And(is_negative, is_odd), -value, value))
    is_real = tirx.Or(tirx.Or(x >= f32(0.0), is_whole), tirx.EQ(x, f32(-INF)))
    number = name(tirx.Select(is_real, signed, f32(float("nan"))))
    is_nan = tirx.Or(tirx.isnan(x), tirx.isnan(y))
    is_one = tirx.Or(tirx.EQ(x, f32(1.0)), tirx.EQ(y, f32(0.0)))
    return tirx.Select(is_one, f32(1.0), tirx.Select(is_nan, f32(float("nan")), number))


def integer_power(name: Name, x: Expr, y: Expr, widest: int = 128) -> Expr:
    """x**y of integers, which wraps around as products do. Negative powers of 1 and -1 are whole, all others 0, as torch has
    them: also of 0, of which ONNX says nothing.

    By squares (Knuth, TAOCP 2, 4.6.3), by `wrapping` products, as TVM marks others, unsigned ones too, as never wrapping around.
    """
    dtype, kind = str(x.ty), str(y.ty)
    bits = int(kind.lstrip("uint")) - (not kind.startswith("u"))
    unsigned = dtype if dtype.startswith("u") else f"u{dtype}"
    one, square = tirx.const(1, unsigned), name(tirx.Cast(unsigned, x))
    if isinstance(y, tirx.IntImm):
        bits = max(int(y.value).bit_length(), 1)
    value = one
    for bit in range(bits):
        is_factor = tirx.NE((y >> tirx.const(bit, kind)) & tirx.const(1, kind), tirx.const(0, kind))
        value = name(wrapping(mul, value, tirx.Select(is_factor, square, one), widest=widest))
        square = name(wrapping(mul, square, square, widest=widest)) if bit < bits - 1 else square
    value = tirx.Cast(dtype, value)
    if kind.startswith("u"):
        return value
    is_unit = tirx.EQ(x, tirx.const(1, dtype))
    if not dtype.startswith("u"):
        is_unit = tirx.Or(is_unit, tirx.EQ(x, tirx.const(-1, dtype)))
    return tirx.Select(tirx.Or(y >= tirx.const(0, kind), is_unit), value, tirx.const(0, dtype))


def _log2(name: Name, size: Expr) -> Expr:
    """log2 of a float32 >= 0, in float64 to 2**-39: size = 2**e m with m in [sqrt(1/2), sqrt(2)), by the series of artanh."""
    bits = name(tirx.reinterpret("int64", tirx.Cast("float64", size)))
    e = name((bits - _i64(_SQRT_HALF)) >> _i64(52))
    m = name(tirx.reinterpret("float64", bits - (e << _i64(52))))
    s = name((m - _f64(1.0)) / (m + _f64(1.0)))
    z = name(s * s)
    series = _f64(_LOG2_TERMS[0])
    for term in _LOG2_TERMS[1:]:
        series = series * z + _f64(term)
    whole = tirx.Cast("float64", tirx.Cast("int32", e))
    value = series * s * _f64(2 / log(2)) + whole
    value = tirx.Select(tirx.EQ(size, f32(0.0)), _f64(-INF), value)
    return tirx.Select(tirx.EQ(size, f32(INF)), _f64(INF), value)


def _exp2(name: Name, exponent: Expr) -> Expr:
    """2**exponent as float32."""
    bounded = name(tirx.max(tirx.min(exponent, _f64(128.0)), _f64(-150.0)))
    whole = name(tirx.nearbyint(bounded))
    p = polynomial(name(tirx.Cast("float32", (bounded - whole) * _f64(log(2)))), *OF_EXP)
    return scaled(name(p), name(tirx.Cast("float32", whole)))


def _f64(value: float) -> Expr:
    return tirx.const(value, "float64")


def _i64(value: int) -> Expr:
    return tirx.const(value, "int64")
