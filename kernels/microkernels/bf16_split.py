"""A float32 as the sum of bfloat16 numbers: one term has 8 bits of the significand, two have 16, three all 24.

Each term is the nearest to what the terms before it leave (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence
Datatype For Higher-Precision Computations, arXiv 1904.06376). The first term of a number that rounds to infinity is cut off
instead, so that every finite number is the sum of finite terms. The first term of infinity or NaN is it, the others are zero.

Products of small terms are dropped (`PRODUCTS`): with two terms a product has a relative error of at most 2**-15, and of about
2**-18 as a rule, of either sign; with three of at most 2**-24, as if it were rounded once. AMX takes subnormal numbers for zero:
of numbers below 2**-102 the third term is lost, of those below 2**-110 the second.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder

# Which terms (of A, of B) are multiplied, from 0. Neighbours in this order share a term, so that its tile is loaded once; the
# largest product is last where that costs no load.
PRODUCTS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((0, 0),),
    2: ((1, 0), (0, 0), (0, 1)),
    3: ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)),
}
_TOP = 0xFFFF0000
_SIZE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_ROUNDS_UP_TO_INFINITY = 0x7F7F8000
_QUIET = 0x00400000


def split_array(array: np.ndarray, terms: int) -> np.ndarray:
    """The terms of a float32 array, as bits: uint16[terms, ...]."""
    result = np.empty((terms, *array.shape), np.uint16)
    rest = np.ascontiguousarray(array, np.float32).reshape(array.shape)
    for position in range(terms):
        with np.errstate(all="ignore"):
            top = rest.astype(ml_dtypes.bfloat16)
            size = rest.view(np.uint32) & _SIZE
            edge = (size >= _ROUNDS_UP_TO_INFINITY) & (size <= _INFINITY)
            if edge.any():
                top = np.where(edge, (rest.view(np.uint32) & _TOP).view(np.float32), top.astype(np.float32)).astype(top.dtype)
            result[position] = top.view(np.uint16)
            rest = np.where(size < _INFINITY, rest - top.astype(np.float32), np.float32(0))
    return result


def split(builder: KernelBuilder, value: Expr, terms: int) -> list[Expr]:
    """The same in a kernel: the terms of one float32, each a uint16 of bits."""
    result = []
    for position in range(terms):
        value = builder.name(value)
        bits = builder.name(tirx.reinterpret("uint32", value))
        rounded = (bits + _u32(0x7FFF) + ((bits >> _u32(16)) & _u32(1))) & _u32(_TOP)
        if position:  # what is left of a finite number is small, of others zero
            top = builder.name(rounded)
        else:
            size = builder.name(bits & _u32(_SIZE))
            quiet = tirx.Select(size > _u32(_INFINITY), _u32(_QUIET), _u32(0))
            top = builder.name(tirx.Select(size >= _u32(_ROUNDS_UP_TO_INFINITY), (bits & _u32(_TOP)) | quiet, rounded))
        result.append(tirx.Cast("uint16", top >> _u32(16)))
        if position + 1 < terms:
            value = value - tirx.reinterpret("float32", top)
            if not position:
                value = tirx.Select(size >= _u32(_INFINITY), tirx.const(0, "float32"), value)
    return result


def joined(parts: list[Expr]) -> Expr:
    """The float32 sum of terms given as bits, added from the smallest on."""
    values = [tirx.reinterpret("float32", tirx.Cast("uint32", part) << _u32(16)) for part in reversed(parts)]
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")
