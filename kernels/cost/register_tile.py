"""Cycles of a register tile: the one formula behind every product on vectors.

A tile keeps `rows` x `vectors` accumulators in registers. A step of its loop over k broadcasts `rows` scalars of A, loads
`vectors` vectors of B, and makes rows * vectors multiply-adds (the micro-kernel of Goto, van de Geijn: Anatomy of
High-Performance Matrix Multiplication, TOMS 34/3, 2008; Low et al. choose tiles by such a model, too: Analytical Modeling Is
Enough for High-Performance BLIS, TOMS 43/2, 2016). A step takes the longest of: the multiply-adds, the loads, the vectors of B
from the cache that holds their panel, and the loop-carried latency of an accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as nest
from math import ceil

from ...runtime.hardware.machine import LINE_BYTES, Machine

MAX_ROWS = 14  # of a tile: with two vectors of B, 14 x 2 accumulators fill 32 registers
_STORE_CYCLES = 3.0  # of a vector of sums: to a buffer in L1, from there through the epilogue
_START_CYCLES = 20.0  # overhead of a tile: addresses, entering and leaving the loop over k
_UNHIDDEN = 0.15  # the part of the time of loading a panel from L2 that multiply-adds do not hide
_LOAD_BOUND = 1.07  # of the time of loads where they are more than multiply-adds can hide: 14x1 on Zen 3 takes 8.2 cycles for 7.5
_WIDENED_CYCLES = 0.2  # of making a float32 of a number of a word: products by pairs take 1.2 times float32's on Zen 3
_SET_ROWS = 13  # rows of a tile, at most, whose elements share a set of L1, which has 8 to 12 ways
_LEAST_SAVED = 100  # a shorter last tile must save one part in so many of the product, as it is more code


@dataclass(frozen=True, slots=True)
class Step:
    """What the cycles of one iteration over k of a tile depend on, but for the tile.

    `panel_bytes`: size of the panel of B, which is loaded from the cache that holds it. A `shifted` load of B crosses cache lines
    and counts twice. `is_dot`: multiply-adds are dot products of neighbours along k. `products`: multiply-adds of an iteration,
    one for each neighbour along k in a word of B.
    """

    panel_bytes: float = 0.0
    shifted: bool = False
    is_dot: bool = False
    products: int = 1

    def cycles(self, machine: Machine, rows: int, vectors: int) -> float:
        """Cycles of one iteration over k."""
        rate = (machine.dots if self.is_dot else 0.0) or machine.multiply_adds
        latency = machine.dot_latency if self.is_dot else machine.sum_latency
        multiplied = self.products * rows * vectors / rate
        loads = (self.products * rows + vectors * (2 if self.shifted else 1)) / machine.loads
        loads *= _LOAD_BOUND if loads > multiplied else 1.0
        widened = _WIDENED_CYCLES * self.products * (rows + vectors) if self.products > 1 else 0.0
        far = vectors * stream_cycles(machine, self.panel_bytes)
        from_l2 = vectors * machine.vector_bytes / machine.l2.bytes_per_cycle if far else 0.0
        return max(multiplied + widened, loads, far, self.products * latency) + _UNHIDDEN * from_l2


def stream_cycles(machine: Machine, panel_bytes: float) -> float:
    """Cycles of loading a vector of a panel of so many bytes from L2, L3 or memory, whichever holds it; 0 if L1 does."""
    if panel_bytes <= machine.l1.size_bytes:
        return 0.0
    level = machine.level_of(panel_bytes)
    return machine.vector_bytes / (machine.memory_bytes if level is None else level.bytes_per_cycle)


def tile_cycles(machine: Machine, rows: int, vectors: int, depth: float, step: Step) -> float:
    """Cycles of one tile: `depth` iterations over k, then the epilogue."""
    return step.cycles(machine, rows, vectors) * depth + _STORE_CYCLES * rows * vectors + _START_CYCLES


def grid_cycles(machine: Machine, rows: int, vectors: int, size: tuple[int, int, float], step: Step, lanes: int = 0) -> float:
    """Cycles of all tiles of a product of `size` (m, n, k), edges padded to whole tiles."""
    m, n, k = size
    return ceil(m / rows) * ceil(n / (vectors * (lanes or machine.lanes))) * tile_cycles(machine, rows, vectors, k, step)


@dataclass(frozen=True, slots=True)
class RankedTile:
    """A register tile, and the cycles that the whole product takes by it."""

    rows: int
    vectors: int
    cycles: float


def ranked_tiles(
    m: int,
    columns: int,
    depth: int,
    machine: Machine,
    *,
    shifted_loads: bool,
    b_padded: bool,
    vector_step: int = 1,
    streams_b: bool = False,
    row_bytes: int = 0,
    cuts_last: bool = False,
    products: int = 1,
) -> list[RankedTile]:
    """All legal register tiles for a product of m x depth by depth x columns, those with the fewest estimated cycles first.

    Wasted work at the edges counts.

    Args:
        machine: with lanes of the accumulators' type.
        shifted_loads: loads of B cross cache lines, and so count twice.
        b_padded: columns beyond the end may be read; else the tile has no more columns than there are.
        vector_step: the tile has a multiple of so many vectors.
        streams_b: panels of B that L1 does not hold come from L2.
        row_bytes: from row to row of A, where it is read in place; 0 if unknown.
        cuts_last: the last tile of rows has `last_rows` rows.
        products: multiply-adds of an iteration over k.
    """
    most_rows = _SET_ROWS if row_bytes and share_sets(row_bytes, machine) else MAX_ROWS
    step = Step(panel_bytes(depth, machine) if streams_b else 0.0, shifted=shifted_loads, products=products)

    def cycles(rows: int, vectors: int) -> float:
        last = last_rows(m, rows) if cuts_last else rows
        whole, rest = (tile_cycles(machine, height, vectors, depth, step) for height in (rows, last))
        return ceil(columns / (vectors * machine.lanes)) * ((ceil(m / rows) - 1) * whole + rest)

    tiles = [
        RankedTile(rows, vectors, cycles(rows, vectors))
        for rows, vectors in nest(range(1, max(min(m, most_rows), 1) + 1), range(vector_step, 9, vector_step))
        if rows * vectors + vectors + 1 <= machine.registers and (b_padded or vectors == 1 or vectors * machine.lanes <= columns)
    ]
    return sorted(tiles, key=lambda tile: (tile.cycles, tile.rows, tile.vectors))


def panel_bytes(depth: int, machine: Machine) -> float:
    """Bytes of a panel of B of four vectors, at most L2's size: larger panels, prefetched, count as coming from L2, too."""
    return min(4.0 * depth * machine.vector_bytes, machine.l2.size_bytes)


def last_rows(m: int, rows: int) -> int:
    """Rows of the last tile of `m` rows: the remainder, if a loop of its own for it saves enough; else `rows`."""
    rest = m % rows
    return rest if rest and (rows - rest) * _LEAST_SAVED >= m else rows


def share_sets(row_bytes: int, machine: Machine) -> bool:
    """Whether rows so far apart conflict in L1: an element of each falls into the same set, or one of two neighbouring sets."""
    stride = machine.l1.set_stride_bytes
    apart = min(row_bytes % stride, -row_bytes % stride)
    return row_bytes >= stride - apart and apart * MAX_ROWS < LINE_BYTES
