"""What stores 8-bit integers: Round, a zero point, Clip and Cast as the few instructions that they are together.

Adding 1.5 * 2**23 to a number below 2**22 rounds it to an integer, halves to even, which then stands in the lowest bits of the
sum. So the numbers are clipped first, and no instruction rounds or converts: three additions and comparisons, and what narrows
32-bit lanes to bytes, where the operators one by one are ten instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ..codegen.builder import Expr
from ..expressions.math import ROUNDING
from ..groups.group import Group, Op

_FEW = 1 << 16  # what integers of 8 bits and their zero points are far below, and 2**22 far above


@dataclass(frozen=True, slots=True)
class Rounding:
    """round(source), halves to even, plus `zero`, no less than `low` and no more than `high`, which the result's type holds.

    What becomes of NaN is not defined.
    """

    source: str
    zero: int
    low: int
    high: int

    def apply(self, value: Expr, dtype: str) -> Expr:
        """The integer of `dtype` for a float32 value, which is named."""
        low, high = (tirx.const(float(bound - self.zero), "float32") for bound in (self.low, self.high))
        above = tirx.Select(value > low, value, low)
        held = tirx.Select(above < high, above, high)
        # An even zero point moves no half between two integers to a neighbour that is even no more.
        inside = self.zero if self.zero % 2 == 0 else 0
        bits = tirx.reinterpret("int32", held + tirx.const(ROUNDING + inside, "float32"))
        return tirx.Cast(dtype, bits if inside == self.zero else bits + tirx.const(self.zero, "int32"))


def rounding_of(group: Group, op: Op) -> Rounding | None:
    """The rounding that ends with a Cast to 8 bits; None where it is no such Cast, or has no bounds known at compile time."""
    result = group.types[op.outputs[0]]
    if op.op_type != "Cast" or result.dtype not in ("uint8", "int8"):
        return None
    clip = _maker(group, op.inputs[0], "Clip")
    if clip is None or len(clip.inputs) < 3:
        return None
    bounds = [_integer(group, name) for name in clip.inputs[1:3]]
    added = _maker(group, clip.inputs[0], "Add")
    round_name, zero = (clip.inputs[0], 0) if added is None else (added.inputs[0], _integer(group, added.inputs[1]))
    rounded = _maker(group, round_name, "Round")
    if rounded is None or zero is None or None in bounds:
        return None
    limits, (low, high) = np.iinfo(result.dtype), (int(bound or 0) for bound in bounds)
    source = rounded.inputs[0]
    if not limits.min <= low <= high <= limits.max or group.types[source].shape != result.shape:
        return None
    relu = _maker(group, source, "Relu")
    source = relu.inputs[0] if relu is not None and low - zero >= 0 else source  # what is below 0 is clipped anyway
    return Rounding(source, zero, low, high)


def _maker(group: Group, name: str, op_type: str) -> Op | None:
    """The operator of this type that makes a float32 value which nothing else reads."""
    op = group.producers.get(name)
    is_it = op is not None and op.op_type == op_type and group.types[name].dtype == "float32"
    return op if is_it and group.reader_counts[name] == 1 else None


def _integer(group: Group, name: str) -> int | None:
    """A small whole number that is known at compile time."""
    literal = group.literal(name)
    if literal is None or literal.size != 1:
        return None
    number = float(literal.reshape(-1)[0])
    return int(number) if abs(number) < _FEW and number.is_integer() else None
