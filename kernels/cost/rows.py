"""Estimated cycles of what goes over rows again and again: softmax, normalizations, reductions with pointwise operators around.

A pass reads a row in order and keeps independent sums, so that it takes what its instructions take, or the latency of a sum for
as many vectors as there are sums. Then its sums are brought together, pair by pair, and the next pass waits for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from ...runtime.hardware.machine import Machine
from .pointwise import LoopBody

_TOGETHER_CYCLES = 0.6  # of each halving of the sums, beside what the next row begins with
_WAITED_CYCLES = 12.0  # by a pass for the result of the one before
_ROW_CYCLES = 1.0  # of addresses and loops
_AHEAD = 16  # vectors that a core looks ahead, so that short rows overlap
MAX_INSTRUCTIONS = 2  # of the greatest of two vectors, NaN if either is


@dataclass(frozen=True, slots=True)
class RowPass:
    """One trip over a row: what it does for each vector, with how many chains of sums."""

    body: LoopBody
    folds: int = 0


def row_cycles(passes: Sequence[RowPass], steps: float, slots: int, machine: Machine, *, is_across: bool = False) -> float:
    """Of one row of `steps` vectors, in `slots` partial sums. `is_across`: slots are rows of their own."""
    independent = max(slots / machine.lanes, _AHEAD / max(steps, 1.0), 1.0)
    total = _ROW_CYCLES
    for number, one in enumerate(passes):
        chain = machine.sum_latency / independent if one.folds else 0.0
        total += steps * max(one.body.cycles(machine), chain)
        if not is_across:
            total += one.folds * ceil(log2(max(slots, 1))) * _TOGETHER_CYCLES + (_WAITED_CYCLES if number else 0.0)
    return total


def softmax_passes(before: LoopBody, after: LoopBody, exponential: LoopBody, *, is_logarithm: bool) -> tuple[RowPass, ...]:
    """The greatest element, the sum of the powers, which are stored, and their scaling; a logarithm stores none and subtracts.

    `before` is what reading an element takes, `after` what follows the result.
    """
    top = RowPass(LoopBody(MAX_INSTRUCTIONS) + before, 1)
    total = RowPass(LoopBody(2, stores=0 if is_logarithm else 1) + exponential + before, 1)
    return top, total, RowPass((LoopBody(2) + before if is_logarithm else LoopBody(1, loads=1)) + after)


def normalization_passes(before: LoopBody, after: LoopBody, parameters: int, *, has_mean: bool) -> tuple[RowPass, ...]:
    """The mean, the squares of what deviates from it, and the result with as many parameters of each element."""
    mean = (RowPass(LoopBody(1) + before, 1),) if has_mean else ()
    squares = RowPass(LoopBody(1 + has_mean) + before, 1)
    return *mean, squares, RowPass(LoopBody(1 + has_mean + parameters, loads=parameters) + before + after)
