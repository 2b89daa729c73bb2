"""Transcendental functions of float32 as plain arithmetic, so that vectorised loops stay vectorised.

LLVM would otherwise call libm for each lane. Sources: Cephes (S. Moshier) for exp, log and tanh; N. Juffa's minimax fit for erf.
Greatest errors against float64 in ulp, measured by tests/kernels/expressions over all of float32: log 0.8, exp and erf 1.0,
expm1 1.2, tanh 2.6, sigmoid 2.3, softplus 3.0, mish 3.7, rough_erf 6. Denormal results are right but for sigmoid's, which are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps

import numpy as np
from tvm import tirx

from ..codegen.builder import Expr
from .ldexp import scaled, scaled_normal

INF = float("inf")
_LEAST = -87.3365447  # logarithm of the least normal number
LOG2_E = 1.44269504088896341
ROUNDING = 12582912.0  # 1.5 * 2**23: adding it to x, |x| < 2**22, rounds x to an integer
# e**r for |r| <= ln2 / 2, a minimax fit of our own with a relative error of 2e-9.
OF_EXP = (1.384364441037178e-3, 8.374163880944252e-3, 4.166800156235695e-2, 1.6666431725025177e-1, 4.999999403953552e-1, 1.0, 1.0)
Name = Callable[[Expr], Expr]  # names an intermediate, so that it is computed once
Steps = Generator[Expr, Expr, Expr]


def stepwise(function: Callable[[Expr], Steps]) -> Callable[[Name, Expr], Expr]:
    """Turn a generator into a function of `name` and x: each expression that it yields is named (computed once) and sent back.

    Without names an argument used six times is six copies of its tree, exponentially many when nested. (TIR's Let does not help:
    TVM's simplifier inlines it.)
    """

    @wraps(function)
    def expression(name: Name, x: Expr) -> Expr:
        steps = function(name(x))
        try:
            step = next(steps)
            while True:
                # A step that is a function of its own comes as a pair (function, argument).
                step = steps.send(name(step[0](name, step[1]) if isinstance(step, tuple) else step))
        except StopIteration as end:
            return end.value

    return expression


def f32(value: float) -> Expr:
    return tirx.const(value, "float32")


def polynomial(x: Expr, *coefficients: float) -> Expr:
    """Horner's rule, highest power first."""
    result = f32(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + f32(coefficient)
    return result


def has_reciprocal(divisor: float) -> bool:
    """Whether `divided` is right for a divisor: neither it nor its reciprocal is near the ends of float32's range."""
    return 2.0**-100 < abs(divisor) < 2.0**100


def divided(name: Name, x: Expr, divisor: float) -> Expr:
    """x / divisor, rounded to the nearest as VDIVPS rounds (16 cycles a vector of 16), by multiplications: a quotient, and what
    it leaves of x, which a fused multiply-add finds exactly (Markstein, Computation of elementary functions on the IBM RISC
    System/6000, IBM J. Res. Dev. 34/1, 1990). Where x is below 2^-100, off by 1 ulp at most. Zeros keep their sign; infinities
    and what overflows, which leave NaN, are as the quotient says."""
    reciprocal = float(np.float32(1) / np.float32(divisor))
    quotient = name(x * f32(reciprocal))
    rest = name(x - quotient * f32(divisor))
    size = tirx.reinterpret("uint32", rest) & tirx.const(0x7FFFFFFF, "uint32")
    is_inexact = size - tirx.const(1, "uint32") < tirx.const(0x7F7FFFFF, "uint32")  # neither zero, nor infinite, nor NaN
    return tirx.Select(is_inexact, quotient + rest * f32(reciprocal), quotient)


def maximum(a: Expr, b: Expr) -> Expr:
    """The greater number; NaN if either is, unlike VMAXPS."""
    return _ordered(a, b, tirx.max, lambda x, y: x > y)


def minimum(a: Expr, b: Expr) -> Expr:
    """The lesser number; NaN if either is, unlike VMINPS."""
    return _ordered(a, b, tirx.min, lambda x, y: x < y)


def _ordered(a: Expr, b: Expr, of_integers: Callable[[Expr, Expr], Expr], wins: Callable[[Expr, Expr], Expr]) -> Expr:
    if "float" not in str(a.ty):
        return of_integers(a, b)
    if isinstance(b, tirx.FloatImm):  # one instruction: it gives its second operand, a, where that is NaN
        return tirx.Select(wins(b, a), b, a) if b.value == b.value else b
    # b where either is NaN, and then a where that is. (With isnan, LLVM takes the accumulators of a reduction apart.)
    return tirx.Select(a <= tirx.const(INF, str(a.ty)), tirx.Select(wins(a, b), a, b), a)


def wrapping(function: Callable[..., Expr], *operands: Expr, widest: int = 128) -> Expr:
    """A sum, difference or product of integers of up to `widest` / 2 bits that wraps around; of other types as it is.

    TVM marks 32- and 64-bit arithmetic as nsw (no signed wrap), so LLVM miscompiles overflows. With twice the bits nothing
    overflows, and LLVM finds that the upper half is dead.
    """
    dtype = str(operands[0].ty)
    bits = int(dtype.lstrip("uint")) if dtype.lstrip("u").startswith("int") else 0
    if bits < 32 or 2 * bits > widest or all(isinstance(x, tirx.IntImm) for x in operands):
        return function(*operands)
    wide = dtype.replace(str(bits), str(2 * bits))
    return tirx.Cast(dtype, function(*(tirx.Cast(wide, x) for x in operands)))


@stepwise
def exp(x: Expr) -> Steps:
    """e**x: x = n ln2 + r with |r| <= ln2 / 2."""
    bounded = yield maximum(minimum(x, f32(89.0)), f32(-104.0))  # e**x of these is infinity and 0
    n, r = yield from _reduced(bounded)
    p = yield polynomial(r, *OF_EXP)
    return scaled(p, n)


@stepwise
def exp_within(x: Expr) -> Steps:
    """e**x in fewer steps, of x from -87.3 to 88.3 (not NaN), where results are normal numbers."""
    n, r = yield from _reduced(x)
    p = yield polynomial(r, *OF_EXP)
    return scaled_normal(p, n)


def _reduced(x: Expr) -> Generator[Expr, Expr, tuple[Expr, Expr]]:
    """x = n ln2 + r with a whole n and |r| <= ln2 / 2."""
    shifted = yield x * f32(LOG2_E) + f32(ROUNDING)
    n = yield shifted - f32(ROUNDING)
    r = yield x - n * f32(0.693359375) + n * f32(2.12194440e-4)
    return n, r


@stepwise
def exp_nonpositive(x: Expr) -> Steps:
    """e**x of x <= 0, for softmax: results too small for a normal number are 0."""
    value = yield exp_within, x
    return tirx.Select(x < f32(_LEAST), f32(0.0), value)


@stepwise
def rough_exp_nonpositive(x: Expr) -> Steps:
    """The same with a relative error of 8e-5, for results that are rounded to bfloat16."""
    p, n = yield from _rough_power(x)
    return tirx.Select(x < f32(_LEAST), f32(0.0), scaled_normal(p, n))


@stepwise
def rough_exp_and_one(x: Expr) -> Steps:
    """1 + e**x with the same error; infinity from 88.9 on."""
    p, n = yield from _rough_power(minimum(maximum(x, f32(_LEAST)), f32(88.9)))
    return f32(1.0) + scaled(p, n)


def _rough_power(x: Expr) -> Generator[Expr, Expr, tuple[Expr, Expr]]:
    """e**x = p 2**n with a whole n, p by a minimax fit of our own of 2**r, |r| <= 1/2."""
    x = yield x
    shifted = yield x * f32(LOG2_E) + f32(ROUNDING)
    n = yield shifted - f32(ROUNDING)
    r = yield x * f32(LOG2_E) - n
    p = yield polynomial(r, 5.51716685295105e-2, 0.2426111400127411, 0.6932609677314758, 0.9999280571937561)
    return p, n


def exponential(name: Name, x: Expr) -> Expr:
    """e**x: ours in float32, libm's in float64."""
    return exp(name, x) if str(x.ty) == "float32" else tirx.exp(x)


def logarithm(name: Name, x: Expr) -> Expr:
    """ln(x): ours in float32, libm's in float64."""
    return log(name, x) if str(x.ty) == "float32" else tirx.log(x)


@stepwise
def expm1_within(x: Expr) -> Steps:
    """e**x - 1 of x from -87.3 to 87.3, without cancellation: 2**n (e**r - 1) + (2**n - 1)."""
    n, r = yield from _reduced(x)
    square = yield r * r
    grown = yield polynomial(r, *OF_EXP[:-2]) * square + r
    return scaled_normal(grown, n) + (scaled_normal(f32(1.0), n) - f32(1.0))


@stepwise
def expm1_nonpositive(x: Expr) -> Steps:
    """The same of x <= 0; in float32 it is -1 from -17.4 on."""
    return (yield expm1_within, maximum(x, f32(-17.5)))


@stepwise
def log(x: Expr) -> Steps:
    """Natural logarithm: x = 2**e m with m in [sqrt(1/2), sqrt(2))."""
    tiny = yield x < f32(1.17549435e-38)
    bits = yield tirx.reinterpret("int32", tirx.Select(tiny, x * f32(8388608.0), x))
    exponent = ((bits >> tirx.const(23, "int32")) & tirx.const(255, "int32")) - tirx.const(126, "int32")
    mantissa = yield tirx.reinterpret("float32", (bits & tirx.const(0x007FFFFF, "int32")) | tirx.const(0x3F000000, "int32"))
    low = yield mantissa < f32(0.707106781186547524)
    whole = tirx.Cast("float32", exponent - tirx.Select(low, tirx.const(1, "int32"), tirx.const(0, "int32")))
    e = yield whole - tirx.Select(tiny, f32(23.0), f32(0.0))
    m = yield tirx.Select(low, mantissa + mantissa, mantissa) - f32(1.0)
    z = yield m * m
    p = polynomial(
        m, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    value = m + (p * m * z - e * f32(2.12194440e-4) - f32(0.5) * z) + e * f32(0.693359375)
    value = tirx.Select(tirx.EQ(x, f32(0.0)), f32(-INF), tirx.Select(tirx.EQ(x, f32(INF)), x, value))
    return tirx.Select(tirx.Or(x < f32(0.0), tirx.isnan(x)), f32(float("nan")), value)


@stepwise
def tanh(x: Expr) -> Steps:
    """u / (u + 2) with u = e**2|x| - 1, which is 1 in float32 from |x| = 9.02 on."""
    size = yield minimum(tirx.abs(x), f32(9.02))
    u = yield expm1_within, size + size
    size = yield u / (u + f32(2.0))
    sign = tirx.reinterpret("int32", x) & tirx.const(-(2**31), "int32")
    bits = yield tirx.reinterpret("int32", size) | sign
    return tirx.reinterpret("float32", bits)


@stepwise
def sigmoid(x: Expr) -> Steps:
    """1 / (1 + e**-x); 0 where that is no normal number."""
    shrunk = yield exp_within, tirx.max(tirx.min(-x, f32(-_LEAST)), f32(_LEAST))
    value = tirx.Select(x < f32(_LEAST), f32(0.0), f32(1.0) / (f32(1.0) + shrunk))
    return tirx.Select(tirx.isnan(x), x, value)


@stepwise
def rough_tanh(x: Expr) -> Steps:
    """A rational fit of our own with an error of 2e-5, for results that multiply numbers rounded to bfloat16."""
    bounded = yield minimum(maximum(x, f32(-6.0)), f32(6.0))
    s = yield bounded * bounded
    above = yield bounded * polynomial(s, 1.5145957e-3, 0.114831276, 0.99999273)
    return above / polynomial(s, 5.6272623e-5, 1.7611314e-2, 0.44811463, 1.0)


@stepwise
def rough_sigmoid(x: Expr) -> Steps:
    """1 / (1 + e**-x) as 1/2 + rough_tanh(x / 2) / 2, with an error of 1e-5."""
    half = yield rough_tanh, x * f32(0.5)
    return half * f32(0.5) + f32(0.5)


@stepwise
def softplus(x: Expr) -> Steps:
    """log(1 + e**x) as max(x, 0) + log(1 + e**-|x|)."""
    u = yield exp, -tirx.abs(x)
    rest = yield log1p, u
    return tirx.max(x, f32(0.0)) + rest


@stepwise
def log1p(u: Expr) -> Steps:
    """log(1 + u) of a finite u as u log(w) / (w - 1) with w = 1 + u (Kahan)."""
    w = yield f32(1.0) + u
    none = yield tirx.EQ(w, f32(1.0))
    logarithm = yield log, w
    return tirx.Select(none, u, logarithm * u / tirx.Select(none, f32(1.0), w - f32(1.0)))


@stepwise
def atanh(x: Expr) -> Steps:
    """log((1 + x) / (1 - x)) / 2 by log1p, as the quotient would lose the digits of a small x."""
    above = yield log1p, x
    below = yield log1p, -x
    return f32(0.5) * (above - below)


@stepwise
def mish(x: Expr) -> Steps:
    """x tanh(log(1 + u)) of u = e**x, which is x n / (n + 2) with n = u (u + 2); from 20 on it is x in float32.

    Below -87.3, where u is denormal, results have an error of up to 1.5e-43.
    """
    u = yield exp, tirx.min(x, f32(20.0))
    n = yield u * (u + f32(2.0))
    return x * (n / (n + f32(2.0)))


@stepwise
def erf(x: Expr) -> Steps:
    """A polynomial below 0.93, 1 - e**q(|x|) above; beyond 4 it is 1 in float32."""
    t = yield tirx.min(tirx.abs(x), f32(4.0))
    s = yield t * t
    r = f32(-1.72853470e-5) * t + f32(3.83197126e-4)
    r = r * s + (f32(-3.88396438e-3) * t + f32(2.42546219e-2))
    r = ((r * t + f32(-1.06777877e-1)) * t + f32(-6.34846687e-1)) * t + f32(-1.28717512e-1)
    shrunk = yield exp_within, r * t - t
    large = yield f32(1.0) - shrunk
    small = polynomial(s, -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1) * x + x
    value = tirx.Select(t > f32(0.927734375), tirx.Select(x < f32(0.0), -large, large), small)
    return tirx.Select(tirx.isnan(x), x, value)


@stepwise
def rough_erf(x: Expr) -> Steps:
    """A rational fit of our own in x**2: half the operations of erf, an error of 3.6e-7 (6 ulp).

    From 4.05 on it is clamped to 1: Gelu multiplies 1 + erf by very negative numbers, so it must be exactly 0 there.
    """
    bounded = yield minimum(maximum(x, f32(-4.05)), f32(4.05))
    s = yield bounded * bounded
    above = polynomial(
        s, 2.05009292e-06, 2.84882903e-04, 3.76561005e-03, 5.27487025e-02, 1.90406263e-01, 1.12837911,
    )  # fmt: skip
    below = polynomial(s, 3.80917845e-05, 1.16253458e-03, 1.49692018e-02, 1.14109032e-01, 5.02075911e-01, 1.0)
    value = yield bounded * above / below
    return minimum(maximum(value, f32(-1.0)), f32(1.0))
