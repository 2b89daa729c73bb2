"""How far the operands of a program's launches are: between those of a launch that is alone and near, and of one whose operands
are all far.

    time = near + coldness * farness * (far - near)

`farness` is of a launch, by what the program has touched since its operands were: 0 where they still lie where a launch that is
repeated finds them. `coldness` is one number of a machine: how much of what is far in theory a program waits for in its
launches, whose operands were partly written by the other cores, and whose code and pages are partly there. It is fitted on
programs whose launches were also measured alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ...kernels.cost.estimate import Estimate
from ...runtime.hardware.machine import Machine
from ..estimates.launches import Distances

USUAL = 1.0  # where no program was measured: as fitted on an Emerald Rapids
_LEAST_SPREAD = 0.005  # of the near time, below which a program tells nothing


def farness(estimate: Estimate, since: Distances, machine: Machine, threads: int) -> float:
    """From 0 (all that a launch reads is where one that is launched again and again finds it: in the cores' own caches, or in L3
    where it is too large for them) to 1 (constants come from memory, all else from L3)."""
    dealt = threads if estimate.is_parallel else 1
    near = float(max(machine.l2.size_bytes * dealt, estimate.bytes_moved))

    def cycles(constants_from: float, streamed_from: float) -> float:
        constants = machine.read_cycles(estimate.constant_bytes, constants_from, dealt)
        return constants + machine.read_cycles(estimate.streamed_bytes, streamed_from, dealt)

    least, most = cycles(near, near), cycles(inf, max(near, min(near + 1, machine.l3.size_bytes)))
    if most <= least:
        return 0.0
    found = cycles(max(since.constants, near), max(near, min(since.activations, machine.l3.size_bytes)))
    return min(max((found - least) / (most - least), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Witness:
    """A program that was measured whole, and its launches alone: all of them near, and what they take more as far as they are."""

    time_us: float
    near_us: float
    more_us: float


def fitted_coldness(witnesses: Iterable[Witness]) -> float | None:
    """The share with which the sums over all launches are nearest to the programs' times, each relative to that time; None where
    near and far do not differ.

    Least squares in one number, between 0 and 1.
    """
    telling = [one for one in witnesses if one.more_us > _LEAST_SPREAD * one.near_us]
    weight = sum((one.more_us / one.time_us) ** 2 for one in telling)
    if not weight:
        return None
    share = sum((one.time_us - one.near_us) * one.more_us / one.time_us**2 for one in telling) / weight
    return min(max(share, 0.0), 1.0)
