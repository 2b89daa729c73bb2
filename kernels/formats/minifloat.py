"""Numbers narrower than a byte or coded in one: 8-, 6- and 4-bit floats, powers of two, 4- and 2-bit integers.

They lie one a byte in memory, as ml_dtypes has them, in the low bits. Arithmetic is on float32 or int32: `decode` and `encode`
translate, rounding to nearest even. Float formats: OCP 8-bit Floating Point Specification and MX; the "fnuz" ones: Noune et al.,
arXiv 2206.02915.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import tirx

Expr: TypeAlias = Any  # as in builder
Name = Callable[[Expr], Expr]


@dataclass(frozen=True)
class MiniFloat:
    """A float format of a sign bit, exponent bits, mantissa bits. `largest` is the code of the greatest finite number.

    `infinity` and `nan` are codes, None where the format has none. Without `nan`, NaN becomes the code of negative zero, which
    means NaN in the "fnuz" formats; formats of six or four bits have no NaN, and overflow saturates.
    """

    mantissa: int
    bias: int
    largest: int
    infinity: int | None
    nan: int | None
    sign: int = 0x80
    has_negative_zero: bool = True


FLOATS = {
    "float8_e4m3fn": MiniFloat(3, 7, 0x7E, None, 0x7F),
    "float8_e4m3fnuz": MiniFloat(3, 8, 0x7F, None, None, has_negative_zero=False),
    "float8_e5m2": MiniFloat(2, 15, 0x7B, 0x7C, 0x7F),
    "float8_e5m2fnuz": MiniFloat(2, 16, 0x7F, None, None, has_negative_zero=False),
    "float6_e2m3fn": MiniFloat(3, 1, 0x1F, None, None, sign=0x20),
    "float6_e3m2fn": MiniFloat(2, 3, 0x1F, None, None, sign=0x20),
    "float4_e2m1fn": MiniFloat(1, 1, 0x7, None, None, sign=0x8),
}
SCALE = "float8_e8m0fnu"  # 2**(code - 127), the scales of MX blocks: no sign, no zero, no infinity; 0xFF is NaN
INTEGERS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}  # bits


def is_coded(dtype: str) -> bool:
    """Whether elements of this type are stored as a code that must be decoded."""
    return dtype in FLOATS or dtype in INTEGERS or dtype == SCALE


def decoded_type(dtype: str) -> str:
    """The type in which elements of a coded type are computed."""
    return "int32" if dtype in INTEGERS else "float32"


def decode(code: Expr, dtype: str, name: Name) -> Expr:
    """The number that a byte encodes, as float32 or int32."""
    code = name(tirx.Cast("int32", code))
    if dtype in INTEGERS:
        bits = INTEGERS[dtype]
        low = code & _i32((1 << bits) - 1)
        half = _i32(1 << (bits - 1))
        return low if dtype[0] == "u" else (low ^ half) - half
    if dtype == SCALE:
        power = tirx.Select(tirx.EQ(code, _i32(0)), _i32(1 << 22), code << _i32(23))  # 2**-127 is subnormal
        return tirx.Select(tirx.EQ(code, _i32(0xFF)), _f32(float("nan")), tirx.reinterpret("float32", name(power)))
    form = FLOATS[dtype]
    size = name(code & _i32(form.sign - 1))
    normal = tirx.reinterpret("float32", (size << _i32(23 - form.mantissa)) + _i32((127 - form.bias) << 23))
    value = tirx.Select(size < _i32(1 << form.mantissa), tirx.Cast("float32", size) * _f32(_step(form)), normal)
    if form.infinity is not None:
        value = tirx.Select(tirx.EQ(size, _i32(form.infinity)), _f32(float("inf")), value)
        value = tirx.Select(size > _i32(form.infinity), _f32(float("nan")), value)
    elif form.nan is not None:
        value = tirx.Select(tirx.EQ(size, _i32(form.nan)), _f32(float("nan")), value)
    value = name(value)
    value = tirx.Select(tirx.NE(code & _i32(form.sign), _i32(0)), -value, value)
    if form.has_negative_zero:
        return value
    return tirx.Select(tirx.EQ(code & _i32(0xFF), _i32(form.sign)), _f32(float("nan")), value)


def encode(value: Expr, dtype: str, name: Name, *, saturate: bool) -> Expr:
    """The code nearest to a float32, or the low bits of an int32. Without `saturate` overflow gives infinity, or NaN."""
    if dtype in INTEGERS:
        return tirx.Cast("uint8", value & _i32((1 << INTEGERS[dtype]) - 1))
    form = FLOATS[dtype]
    value = name(value)
    bits = name(tirx.reinterpret("int32", value))
    size = name(bits & _i32(0x7FFFFFFF))
    shift = 23 - form.mantissa
    rounded = size + ((size >> _i32(shift)) & _i32(1)) + _i32((1 << (shift - 1)) - 1)
    normal = (rounded >> _i32(shift)) - _i32((127 - form.bias) << form.mantissa)
    scaled = tirx.min(tirx.reinterpret("float32", size), _f32(1.0)) * _f32(1 / _step(form))
    tiny = tirx.Cast("int32", tirx.nearbyint(scaled))
    code = name(tirx.Select(size < _i32((128 - form.bias) << 23), tiny, normal))
    nan = form.sign if form.nan is None else form.nan
    has_nan = form.nan is not None or not form.has_negative_zero
    beyond = form.largest if saturate or not has_nan else nan if form.infinity is None else form.infinity
    code = name(tirx.Select(code > _i32(form.largest), _i32(beyond), code))
    sign = tirx.Select(bits < _i32(0), _i32(form.sign), _i32(0))
    if not form.has_negative_zero:
        sign = tirx.Select(tirx.Or(tirx.EQ(code, _i32(0)), tirx.EQ(code, _i32(nan))), _i32(0), sign)
    code = tirx.Select(tirx.isnan(value), _i32(nan), code | sign)
    return tirx.Cast("uint8", code)


def encode_scale(value: Expr, name: Name, *, saturate: bool, round_mode: str) -> Expr:
    """The byte of the power of two that a float32 without its sign rounds to, by ONNX's Cast.

    `round_mode` is "up", "down" or "nearest" (the mean of two powers goes up). What lies beyond the least or the greatest
    becomes that one with `saturate`, else NaN. The sign, of which the format knows nothing, is dropped, as in onnx.reference.
    """
    value = name(value)
    size = name(tirx.reinterpret("int32", value) & _i32(0x7FFFFFFF))
    exponent = size >> _i32(23)
    fraction = name(size & _i32((1 << 23) - 1))
    least = _i32(1 << 22)  # the fraction of 2**-127, the one power whose float is subnormal
    middle = tirx.Select(exponent > _i32(0), least, _i32(3 << 21))
    match round_mode:
        case "up":
            is_up = fraction > tirx.Select(exponent > _i32(0), _i32(0), least)
        case "nearest":
            is_up = fraction >= middle
        case _:
            is_up = tirx.const(False, "bool")
    code = name(exponent + tirx.Cast("int32", is_up))
    code = tirx.Select(code > _i32(0xFE), _i32(0xFE if saturate else 0xFF), code)
    if not saturate:
        code = tirx.Select(size < least, _i32(0xFF), code)
    return tirx.Cast("uint8", tirx.Select(tirx.isnan(value), _i32(0xFF), code))


def _step(form: MiniFloat) -> float:
    """The smallest number above zero."""
    return float(2.0 ** (1 - form.bias - form.mantissa))


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
