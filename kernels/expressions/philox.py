"""Counter-based random numbers: Philox4x32-10, and uniform and normal numbers made of its words.

The generator is a function of a key (the seed) and a counter (the element's offset), so that numbers depend neither on threads
nor on the width of vectors. Source: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011. Normal
numbers are by Box-Muller; sine and cosine are Cephes' (S. Moshier).

Sums are of 64 bits or cannot overflow: TVM tells LLVM that sums of uint32 never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

from tvm import tirx

from ..codegen.builder import Expr
from . import math

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the key's increments in each round (a Weyl sequence)
Words = tuple[Expr, Expr, Expr, Expr]


@dataclass(frozen=True)
class Key:
    """Two words of 32 bits, as uint32 expressions."""

    low: Expr
    high: Expr


def seed_key(seed: int) -> Key:
    """The key of a seed of 64 bits; of a negative one, its two's complement."""
    return Key(_u32(seed & 0xFFFFFFFF), _u32(seed >> 32 & 0xFFFFFFFF))


def philox(counter: Expr, key: Key, name: math.Name, others: Sequence[Expr] = (0, 0, 0)) -> Words:
    """Four words for a counter of 32 bits and the `others` of it, above these."""
    words: list[Expr] = [_u32(word) if isinstance(word, int) else tirx.Cast("uint32", word) for word in (counter, *others)]
    low, high = key.low, key.high
    for number in range(_ROUNDS):
        if number:
            low, high = (name(_wrapped_sum(word, step)) for word, step in zip((low, high), _WEYL, strict=True))
        (first_high, first_low), (second_high, second_low) = (
            _wide_product(word, multiplier, name) for word, multiplier in zip(words[::2], _MULTIPLIERS, strict=True)
        )
        words = [name(second_high ^ words[1] ^ low), second_low, name(first_high ^ words[3] ^ high), first_low]
    return words[0], words[1], words[2], words[3]


def uniform(words: Words, dtype: str) -> list[Expr]:
    """Numbers of [0, 1), all multiples of 2**-24 or 2**-53: four of float32, or two of float64."""
    if dtype == "float32":
        return [tirx.Cast("float32", word >> _u32(8)) * math.f32(2.0**-24) for word in words]
    pairs = ((words[0], words[1]), (words[2], words[3]))
    return [
        (tirx.Cast("float64", a >> _u32(5)) * _f64(2.0**26) + tirx.Cast("float64", b >> _u32(6))) * _f64(2.0**-53)
        for a, b in pairs
    ]


def normal(words: Words, dtype: str, name: math.Name) -> list[Expr]:
    """Numbers of the standard normal distribution: four of float32, up to 6.7 in size, or two of float64, up to 8.6."""
    if dtype == "float32":
        return [
            number
            for a, b in ((words[0], words[1]), (words[2], words[3]))
            for number in _turned(name(_radius(a, name)), *_circle(b, name))
        ]
    u, v = (name(number) for number in uniform(words, dtype))
    angle = name(v * _f64(2 * pi))
    radius = name(tirx.sqrt(_f64(-2.0) * tirx.log(_f64(1.0) - u)))
    return _turned(radius, tirx.cos(angle), tirx.sin(angle))


def _radius(word: Expr, name: math.Name) -> Expr:
    """sqrt(-2 ln u) of a u in (0, 1]."""
    u = tirx.Cast("float32", word) * math.f32(2.0**-32) + math.f32(2.0**-33)
    return tirx.sqrt(math.f32(-2.0) * math.log(name, u))


def _circle(word: Expr, name: math.Name) -> tuple[Expr, Expr]:
    """Cosine and sine of 2 pi word / 2**32: the nearest quarter turn, and the rest of at most an eighth."""
    quarter = name(((word >> _u32(29)) + _u32(1)) >> _u32(1))
    rest = tirx.reinterpret("int32", word << _u32(2)) >> tirx.const(2, "int32")
    x = name(tirx.Cast("float32", rest) * math.f32(2 * pi / 2**32))
    z = name(x * x)
    sine = name(math.polynomial(z, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1) * z * x + x)
    even = math.polynomial(z, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
    cosine = name(even * z * z - math.f32(0.5) * z + math.f32(1.0))
    is_odd = tirx.EQ(quarter & _u32(1), _u32(1))
    across, along = name(tirx.Select(is_odd, sine, cosine)), name(tirx.Select(is_odd, cosine, sine))
    is_left = tirx.EQ((quarter + _u32(1)) & _u32(2), _u32(2))
    is_below = tirx.EQ(quarter & _u32(2), _u32(2))
    return tirx.Select(is_left, -across, across), tirx.Select(is_below, -along, along)


def _turned(radius: Expr, cosine: Expr, sine: Expr) -> list[Expr]:
    return [radius * cosine, radius * sine]


def _wide_product(word: Expr, multiplier: int, name: math.Name) -> tuple[Expr, Expr]:
    """The high and low 32 bits of a 64-bit product."""
    product = name(tirx.Cast("uint64", word) * tirx.const(multiplier, "uint64"))
    return name(tirx.Cast("uint32", product >> tirx.const(32, "uint64"))), name(tirx.Cast("uint32", product))


def _wrapped_sum(word: Expr, step: int) -> Expr:
    """The low 32 bits of a sum; a constant if `word` is one."""
    if isinstance(word, tirx.IntImm):
        return _u32((int(word.value) + step) & 0xFFFFFFFF)
    return tirx.Cast("uint32", tirx.Cast("uint64", word) + tirx.const(step, "uint64"))


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _f64(value: float) -> Expr:
    return tirx.const(value, "float64")
