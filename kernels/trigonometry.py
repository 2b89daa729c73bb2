"""Trigonometric functions of float32 as plain arithmetic, like the functions of kernels/math.py.

Greatest errors against float64 in ulp, measured by tests/kernels/test_math.py over all of float32: atan 1.5.
"""

from __future__ import annotations

from math import pi

from tvm import tirx

from . import math
from .builder import Expr
from .math import Steps, f32, polynomial, stepwise

_HALF_PI = 1.57079637050628662109375  # rounded to float32


@stepwise
def atan(x: Expr) -> Steps:
    """A polynomial of t = |x| up to 1, pi / 2 less that of 1 / |x| above. Source of the polynomial: SLEEF (N. Shibata)."""
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


def with_sign_of(x: Expr, size: Expr) -> Expr:
    """The number of that size, at least 0 or NaN, with the sign of x."""
    sign = tirx.reinterpret("int32", x) & tirx.const(-(2**31), "int32")
    return tirx.reinterpret("float32", tirx.reinterpret("int32", size) ^ sign)
