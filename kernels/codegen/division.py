"""Division of small numbers by constants: what nvcc makes of it for numbers whose range it finds is slower."""

from __future__ import annotations

from functools import cache

import numpy as np
from tvm import tirx

from .builder import Expr


def divided(number: Expr, divisor: int, limit: int) -> Expr:
    """number // divisor for int32 numbers in [0, limit), by a multiplication and a shift where 31 bits suffice for these."""
    if divisor == 1:
        return number
    found = _factor(divisor, limit)
    return tirx.floordiv(number, divisor) if found is None else (number * found[0]) >> tirx.const(found[1], "int32")


def remainder(number: Expr, divisor: int, limit: int) -> Expr:
    """number % divisor, likewise."""
    if divisor & (divisor - 1) == 0:
        return tirx.floormod(number, divisor)
    return number - divided(number, divisor, limit) * divisor


@cache
def _factor(divisor: int, limit: int) -> tuple[int, int] | None:
    """A factor and a shift that divide exactly (Granlund, Montgomery: Division by Invariant Integers, PLDI 1994)."""
    numbers = np.arange(max(limit, 1), dtype=np.int64)
    for shift in range(31):
        factor = -(-(1 << shift) // divisor)
        if factor * int(numbers[-1]) >= 1 << 31:
            break
        if ((numbers * factor >> shift) == numbers // divisor).all():
            return factor, shift
    return None
