"""Vector instructions of pointwise operators, and the cycles of loops that compute them.

Counts are of the loops that LLVM makes of `kernels/expressions/math.py`, `power.py` and `trigonometry.py` for float32 and AVX2,
where numbers are scaled by powers of two in several steps; loads and the store excluded. Chains of different vectors overlap, so
that what is counted is what a core issues: as many vector instructions in a cycle as multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import numpy as np

from ...runtime.hardware.machine import Machine
from ..groups.group import Group, Op

_COUNTED = {
    2: "Abs Neg Not",
    3: "Clip LeakyRelu Max Min PRelu Sign Softsign ThresholdedRelu",
    5: "HardSigmoid HardSwish Shrink",
    22: "ExpNonpositive",
    28: "Asin Celu Elu",
    33: "Atan Selu",
    32: "Tanh",
    35: "Acos Exp Sigmoid",
    37: "Swish",
    45: "Mish",
    63: "Log",
    66: "Erf",
    72: "Gelu",
    107: "Softplus",
    130: "Atanh",
    146: "Cos Sin Tan",
    162: "Pow",
}
_INSTRUCTIONS = {name: count for count, names in _COUNTED.items() for name in names.split()}
_ROUGH = {"Gelu": 26, "Swish": 22}  # where errors far below those of bfloat16 are no matter
_FREE = frozenset(["Identity"])
_DIVIDING = frozenset(["Div", "Mod", "Reciprocal", "Softsign", "Sqrt"])  # what else divides does much beside
_CALLED = frozenset(["Acosh", "Asinh", "Cosh", "Mod", "Sinh"])  # functions of the C library, of one number at a time
_CALL_CYCLES = 35.0
_DIVISION_CYCLES = 0.5  # of each number of a vector, beside which nothing else divides
_WIDENING, _NARROWING = 2, 5  # instructions from and to floats of 16 bits
_ROUNDED = 1  # of the same with an instruction that rounds
_SCALAR_CONVERSION = 1.5  # cycles of a number that no vector instruction converts
_SMALL_POWERS = (0.5, 1.0, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class LoopBody:
    """What a loop does for one vector. `divisions` are vectors of quotients and roots, `scalar_cycles` goes number by number."""

    instructions: float = 0.0
    loads: float = 0.0
    stores: float = 0.0
    divisions: float = 0.0
    scalar_cycles: float = 0.0

    def __add__(self, other: LoopBody) -> LoopBody:
        return LoopBody(
            self.instructions + other.instructions,
            self.loads + other.loads,
            self.stores + other.stores,
            self.divisions + other.divisions,
            self.scalar_cycles + other.scalar_cycles,
        )

    def times(self, count: float) -> LoopBody:
        """The same so many times."""
        return LoopBody(
            self.instructions * count,
            self.loads * count,
            self.stores * count,
            self.divisions * count,
            self.scalar_cycles * count,
        )

    def cycles(self, machine: Machine) -> float:
        """Of one vector of `machine.lanes` numbers, when one follows the other: no less than any of the units takes."""
        issued = (self.instructions + self.stores + self.loads / 2) / machine.issued  # half of the loads are operands
        divided = self.divisions * _DIVISION_CYCLES * machine.lanes
        ports = max(self.loads / machine.loads, self.stores / machine.stores)
        return max(issued, divided, ports) + self.scalar_cycles * machine.lanes


def operator_body(group: Group, op: Op, machine: Machine) -> LoopBody:
    """One pointwise operator on values that are in registers, with conversions of narrow numbers around it."""
    dtypes = [group.types[name].dtype for name in op.inputs if name]
    result = group.types[op.outputs[0]].dtype
    instructions = _instructions_of(group, op) + sum(map(widening, dtypes)) + narrowing(result, machine)
    scalar = _CALL_CYCLES if op.op_type in _CALLED and "float" in result else 0.0
    if op.op_type == "Cast" and len({dtypes[0], result} & {"int64", "uint64"}) == 1 and "float" in dtypes[0] + result:
        scalar += _SCALAR_CONVERSION
    return LoopBody(instructions, divisions=float(op.op_type in _DIVIDING), scalar_cycles=scalar)


def widening(dtype: str) -> int:
    """Instructions from a stored vector to float32."""
    return _WIDENING if dtype in ("bfloat16", "float16") else 0


def narrowing(dtype: str, machine: Machine) -> int:
    """Instructions from float32 to a vector as it is stored."""
    return (_ROUNDED if machine.dots else _NARROWING) if widening(dtype) else 0


def pointwise_body(group: Group, ops: Iterable[Op], machine: Machine) -> LoopBody:
    """Several of them, one after the other."""
    return sum((operator_body(group, op, machine) for op in ops), LoopBody())


def vector_steps(extent: int, lanes: int) -> int:
    """Vectors of a run of elements whose rest goes in ever shorter ones."""
    return extent // lanes + (extent % lanes).bit_count()


def scalar_steps(extent: int, lanes: int) -> int:
    """The same where the rest goes one by one."""
    return extent // lanes + extent % lanes


def covering_steps(extent: int, lanes: int) -> int:
    """The same where the last vector overlaps the one before it, and short runs have shorter ones."""
    return ceil(extent / min(lanes, 1 << max(extent.bit_length() - 1, 0))) if extent else 0


def instructions_of(op_type: str) -> float:
    """Vector instructions of a pointwise operator of float32, loads and stores excluded."""
    return 0.0 if op_type in _FREE else float(_INSTRUCTIONS.get(op_type, 1))


def _instructions_of(group: Group, op: Op) -> float:
    if op.op_type == "Pow" and (exponent := group.literal(op.inputs[1])) is not None and exponent.size == 1:
        return 2.0 if float(np.ravel(exponent)[0]) in _SMALL_POWERS else float(_INSTRUCTIONS["Pow"])
    if group.tolerance.may_round and op.op_type in _ROUGH:
        return float(_ROUGH[op.op_type])
    return instructions_of(op.op_type)
