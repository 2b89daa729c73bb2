"""The multiply-add of each number format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tvm import tirx

from . import bfloat16, int8
from .format import BF16_DOT, BF16_PAIRS, F32_BF16_PAIRS, S8_DOT, S8_MADD, S8_PAIRS, U8_DOT, U8_MADD, U8_PAIRS, Format

Expr: TypeAlias = Any  # as in builder
MultiplyAdd = Callable[[Expr, Any, Expr], Expr]  # of a sum and two factors: the new sum

# By the names of formats. A factor is a word (32-bit pair); of float32 operands, a tuple of the neighbours along k.
MULTIPLY_ADDS: dict[str, MultiplyAdd] = {
    BF16_DOT.name: bfloat16.dot,
    BF16_PAIRS.name: bfloat16.multiply_add_words,
    F32_BF16_PAIRS.name: bfloat16.multiply_add_halves,
    U8_DOT.name: int8.dot,
    U8_PAIRS.name: int8.pairs,
    U8_MADD.name: int8.madd,
    S8_DOT.name: int8.signed_dot,
    S8_PAIRS.name: int8.signed_pairs,
    S8_MADD.name: int8.signed_madd,
}


def multiply_add(total: Expr, a: Expr, b: Expr) -> Expr:
    """total + a * b."""
    return total + a * b


def multiply_add_of(number_format: Format) -> MultiplyAdd:
    return MULTIPLY_ADDS.get(number_format.name, multiply_add)


def factor(number_format: Format, element: Expr) -> Expr:
    """The factor of a multiply-add for an element in memory: a word as it is, a number converted to the type of the sums."""
    return element if number_format.k_pack > 1 else tirx.Cast(number_format.sums, element)


def joined(neighbours: Sequence[Expr], bits: int) -> Expr:
    """The word (int32) of neighbours of so many bits each, given as unsigned integers; those that are missing are zero."""
    word = tirx.Cast("int32", neighbours[0])
    for number, one in enumerate(neighbours[1:], 1):
        word = word | (tirx.Cast("int32", one) << tirx.const(number * bits, "int32"))
    return word
