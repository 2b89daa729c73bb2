"""Estimated cycles of reductions and of running sums.

Vectors run along the elements of a result, in independent sums that are brought together (row-wise), or along neighbours of it
(column-wise). Either takes what its instructions take, or the latency of a sum over the number of independent ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from ...runtime.hardware.machine import LINE_BYTES, Machine
from ...runtime.symbolic.sizes import estimating
from .pointwise import LoopBody, vector_steps
from .register_tile import share_sets
from .rows import RowPass, row_cycles

_COLUMN_CYCLES = 1.0  # of a block of columns: its sums begin and end
_PART_CYCLES = 2.0  # of a vector of sums of a part, which is stored and combined with those before it
_SLOT_CYCLES = 7.0  # of comparing the best of two slots, and a branch that is not foreseen
_AHEAD = 48  # elements of a running sum that a core looks ahead, so that short ones overlap
_SCALAR_STEP = 1.1  # cycles of an element of one, where nothing waits


@dataclass(frozen=True, slots=True)
class Reduction:
    """`results` results of `elements` each, or blocks of `slots` neighbouring ones; `run` elements of a result lie side by side.

    `is_rowwise`: vectors of `lanes` run along them. Else they lie `stride_bytes` apart. Of blocks that take turns, each is done
    in `parts`, which are dealt to the threads.
    """

    results: int
    elements: int
    run: int
    lanes: int
    slots: int
    is_rowwise: bool
    stride_bytes: int = 0
    parts: int = 1

    @property
    def steps(self) -> int:
        """Vectors of a result, or of a block of them."""
        if self.is_rowwise:
            return self.elements // max(self.run, 1) * vector_steps(self.run, self.lanes)
        return self.elements * self.slots // self.lanes

    @property
    def blocks(self) -> int:
        """What is accumulated together."""
        return self.results if self.is_rowwise else ceil(self.results / self.slots)

    @property
    def has_tasks(self) -> bool:
        """Whether there is more than one for threads to take."""
        return self.blocks > 1 or self.parts > 1

    def far_cycles(self, machine: Machine) -> float:
        """What columns take longer whose lines share sets of L1, and so arrive one by one, without being asked for ahead."""
        lines = self.elements * self.blocks * ceil(self.slots * machine.item_bytes / LINE_BYTES)
        is_far = not self.is_rowwise and self.elements > machine.l1.ways and share_sets(self.stride_bytes, machine)
        return lines * LINE_BYTES / machine.l3.bytes_per_cycle if is_far else 0.0


def part_cycles(parts: int, vectors: float, machine: Machine) -> float:
    """What a trip over the elements of a block of so many vectors of sums takes longer in parts: the sums of each are stored, and
    wait for those before them."""
    return parts * (max(_PART_CYCLES * vectors, machine.sum_latency) + _COLUMN_CYCLES) if parts > 1 else 0.0


@estimating
def reduction_cycles(one: Reduction, passes: Sequence[LoopBody], result: LoopBody, machine: Machine) -> float:
    """Of all results, after so many trips over their elements; `result` is done for a vector of them, or for each row."""
    trips = [RowPass(body, 1) for body in passes]
    block = row_cycles(trips, one.steps, one.slots, machine, is_across=not one.is_rowwise)
    finished = result.cycles(machine) * (1 if one.is_rowwise else one.slots / one.lanes)
    started = 0.0 if one.is_rowwise else _COLUMN_CYCLES
    combined = len(passes) * part_cycles(one.parts, one.slots / one.lanes, machine)
    return one.blocks * (block + finished + started + combined) + one.far_cycles(machine)


@estimating
def search_cycles(one: Reduction, body: LoopBody, machine: Machine) -> float:
    """Of the places of the greatest elements: the slots of a row are compared one after the other."""
    compared = (one.slots - 1) * _SLOT_CYCLES if one.is_rowwise else _COLUMN_CYCLES
    return one.blocks * (one.steps * body.cycles(machine) + compared) + one.far_cycles(machine)


@estimating
def scan_cycles(shape: Sequence[int], axis: int, columns: int, body: LoopBody, machine: Machine) -> float:
    """Of running sums along an axis, `columns` neighbours at once: each waits for the one before it, unless it is short."""
    length, inner = shape[axis], prod(shape[axis + 1 :])
    steps = prod(shape[:axis]) * ceil(inner / columns) * length
    vectors = max(columns // machine.lanes, 1)
    waited = machine.sum_latency * length / (length + _AHEAD)
    computed = vectors * body.cycles(machine) if columns > 1 else _SCALAR_STEP
    return steps * max(waited, computed)
