"""Trigonometric functions of float32 as plain arithmetic, like the functions of kernels/expressions/math.py.

Greatest errors against float64 in ulp, measured by tests/kernels/expressions over all of float32: acos 1.1, sin,
cos and atan 1.5, asin 2.2, tan 3.3.
"""

from __future__ import annotations

from itertools import pairwise
from math import pi

from tvm import tirx

from ..codegen.builder import Expr
from . import math
from .math import Name, Steps, f32, polynomial, stepwise

_HALF_PI = 1.57079637050628662109375  # rounded to float32
_LOW = 0xFFFFFFFF
_TWO_OVER_PI = (
    0x00000028BE60DB93,
    0x91054A7F09D5F47D,
    0x4D377036D8A5664F,
    0x10E4107F9458EAF7,
)  # times 2**230, in words of 64 bits


@stepwise
def atan(x: Expr) -> Steps:
    """arctan: a polynomial of |x| up to 1, pi / 2 less that of 1 / |x| above. Source of the polynomial: SLEEF (N. Shibata)."""
    size = yield tirx.abs(x)
    is_large = yield size > f32(1.0)
    t = yield tirx.Select(is_large, f32(1.0) / size, size)
    z = yield t * t
    p = polynomial(
        z, 0.00282363896258175373, -0.0159569028764963150, 0.0425049886107444763, -0.0748900920152664185,
        0.106347933411598206, -0.142027363181114197, 0.199926957488059998, -0.333331018686294556,
    )  # fmt: skip
    angle = yield p * z * t + t
    above = f32(_HALF_PI) + (f32(pi / 2 - _HALF_PI) - angle)
    return with_sign_of(x, tirx.Select(is_large, above, angle))


def asin(name: Name, x: Expr) -> Expr:
    """Of numbers beyond 1 it is NaN."""
    angle, is_large = _half_arc(name, name(tirx.abs(x)))
    above = f32(_HALF_PI) + (f32(pi / 2 - _HALF_PI) - (angle + angle))
    return with_sign_of(x, tirx.Select(is_large, above, angle))


def acos(name: Name, x: Expr) -> Expr:
    """Of numbers beyond 1 it is NaN."""
    angle, is_large = _half_arc(name, name(tirx.abs(x)))
    is_negative = name(x < f32(0.0))
    twice = name(angle + angle)
    left = f32(2 * _HALF_PI) + (f32(pi - 2 * _HALF_PI) - twice)
    middle = f32(_HALF_PI) + (f32(pi / 2 - _HALF_PI) - tirx.Select(is_negative, -angle, angle))
    return tirx.Select(is_large, tirx.Select(is_negative, left, twice), middle)


def _half_arc(name: Name, size: Expr) -> tuple[Expr, Expr]:
    """asin(size) up to 1/2; above, half of acos(size), and true. Source of the polynomial: Cephes (S. Moshier)."""
    is_large = name(size > f32(0.5))
    t = name(tirx.Select(is_large, tirx.sqrt(f32(0.5) - f32(0.5) * size), size))
    z = name(t * t)
    p = polynomial(z, 4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
    return name(p * z * t + t), is_large


def sin(name: Name, x: Expr) -> Expr:
    sine, cosine, turns = _sine_and_cosine(name, x)
    value = name(tirx.Select(_bit(turns, 0), cosine, sine))
    return with_sign_of(x, tirx.Select(_bit(turns, 1), -value, value))


def cos(name: Name, x: Expr) -> Expr:
    sine, cosine, turns = _sine_and_cosine(name, x)
    value = name(tirx.Select(_bit(turns, 0), sine, cosine))
    return tirx.Select(_bit(name(turns + tirx.const(1, "int32")), 1), -value, value)


def tan(name: Name, x: Expr) -> Expr:
    sine, cosine, turns = _sine_and_cosine(name, x)
    above, below = (name(tirx.Select(_bit(turns, 0), *pair)) for pair in ((-cosine, sine), (sine, cosine)))
    return with_sign_of(x, name(above / below))


def _sine_and_cosine(name: Name, x: Expr) -> tuple[Expr, Expr, Expr]:
    """Sine and cosine of |x| less `turns` quarter turns, |rest| <= pi / 4. Source of the polynomials: Cephes (S. Moshier)."""
    size = name(tirx.abs(x))
    is_reduced = name(size <= f32(pi / 4))
    turns, rest = _quarter_turns(name, size)
    r = name(tirx.Select(is_reduced, size, tirx.Select(size < f32(math.INF), rest, f32(float("nan")))))
    z = name(r * r)
    sine = polynomial(z, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1) * z * r + r
    even = polynomial(z, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
    cosine = even * z * z - f32(0.5) * z + f32(1.0)
    return name(sine), name(cosine), name(tirx.Select(is_reduced, tirx.const(0, "int32"), turns))


def _quarter_turns(name: Name, size: Expr) -> tuple[Expr, Expr]:
    """The nearest whole number (mod 4) of quarter turns in a finite size >= 0.5, and the rest in float32, |rest| <= pi / 4.

    Payne-Hanek reduction ("Radian reduction for trigonometric functions", SIGNUM 18, 1983): size is m 2**E for a whole m of 25
    bits. Bits of 2 / pi whose product with size is a multiple of 4 are dropped; the next 96 are multiplied by m: two bits before
    the point and 62 after, more than float32's worst case (2**-30 of a quarter turn) needs.
    """
    bits = name(tirx.reinterpret("int32", size))
    exponent = name((bits >> _i32(23)) - _i32(127))
    place = name(tirx.max(tirx.min(exponent, _i32(127)), _i32(0)))
    whole = (bits & _i32(0x007FFFFF)) | _i32(0x00800000)
    m = name(tirx.Cast("uint64", tirx.Select(exponent < _i32(0), whole, whole + whole)))
    is_far = name(place >= _i32(64))
    words = [name(tirx.Select(is_far, _u64(far), _u64(near))) for near, far in pairwise(_TWO_OVER_PI)]
    shift = name(tirx.Cast("uint64", place & _i32(63)))
    back = name(_u64(63) - shift)
    first, second = (name((a << shift) | ((b >> _u64(1)) >> back)) for a, b in pairwise(words))
    low = name(m * (first & _u64(_LOW)) + ((m * (second >> _u64(32))) >> _u64(32)))
    high = name(tirx.Cast("int64", (m * (first >> _u64(32)) + (low >> _u64(32))) & _u64(_LOW)))
    turns = name((high + tirx.const(2**29, "int64")) >> tirx.const(30, "int64"))
    above = tirx.Cast("float64", tirx.Cast("int32", high - (turns << tirx.const(30, "int64"))))
    below = tirx.Cast("float64", tirx.Cast("int32", (low & _u64(_LOW)) >> _u64(1)))
    rest = above * tirx.const(pi / 2**31, "float64") + below * tirx.const(pi / 2**62, "float64")
    return name(tirx.Cast("int32", turns)), name(tirx.Cast("float32", rest))


def _bit(number: Expr, position: int) -> Expr:
    return tirx.NE(number & _i32(1 << position), _i32(0))


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _u64(value: int) -> Expr:
    return tirx.const(value, "uint64")


def with_sign_of(x: Expr, size: Expr) -> Expr:
    """The number of that size, at least 0 or NaN, with the sign of x."""
    sign = tirx.reinterpret("int32", x) & _i32(-(2**31))
    return tirx.reinterpret("float32", tirx.reinterpret("int32", size) ^ sign)
