"""Cycles of a register tile: the one formula behind every product that a core's vectors make.

A tile keeps `rows` x `vectors` sums in registers. A step of its loop over k broadcasts `rows` scalars of A, loads `vectors`
vectors of B, and makes rows * vectors multiply-adds (the micro-kernel of Goto, van de Geijn: Anatomy of High-Performance Matrix
Multiplication, TOMS 34/3, 2008). It can take no less than any of its parts: the multiply-adds, the loads, the vectors of B from
the cache in which their panel lies, and the latency of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as nest
from math import ceil

from ...runtime.hardware.machine import LINE_BYTES, Machine

MAX_ROWS = 14  # of a tile: more scalars of A than that leave no registers for two vectors of B
_STORE_CYCLES = 3.0  # of a vector of sums: to a buffer in L1, from there through the epilogue
_START_CYCLES = 20.0  # of a tile: addresses, the loop's beginning and its end
_UNHIDDEN = 0.15  # of the time in which a panel comes from L2, what multiply-adds do not hide
_SET_ROWS = 13  # of a tile that share a set of L1, which has 8 to 12 ways, at most
_LEAST_SAVED = 100  # one part in so many of a product pays for a shorter last tile


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration over k of a tile needs beside multiply-adds.

    `panel_bytes` is what B's panel takes while a tile reads it, so that it comes from the cache that holds it. A `shifted` load
    of B crosses cache lines and counts twice. `is_dot`: multiply-adds are dot products of neighbours along k.
    """

    panel_bytes: float = 0.0
    shifted: bool = False
    is_dot: bool = False

    def cycles(self, machine: Machine, rows: int, vectors: int) -> float:
        """Of one iteration over k."""
        rate = (machine.dots if self.is_dot else 0.0) or machine.multiply_adds
        latency = machine.dot_latency if self.is_dot else machine.sum_latency
        loads = (rows + vectors * (2 if self.shifted else 1)) / machine.loads
        far = vectors * stream_cycles(machine, self.panel_bytes)
        from_l2 = vectors * machine.vector_bytes / machine.l2.bytes_per_cycle if far else 0.0
        return max(rows * vectors / rate, loads, far, latency) + _UNHIDDEN * from_l2


def stream_cycles(machine: Machine, panel_bytes: float) -> float:
    """Cycles in which a vector of a panel of so many bytes arrives from the cache beyond L1 that holds it; 0 for one in L1."""
    if panel_bytes <= machine.l1.size_bytes:
        return 0.0
    level = machine.level_of(panel_bytes)
    return machine.vector_bytes / (machine.memory_bytes if level is None else level.bytes_per_cycle)


def tile_cycles(machine: Machine, rows: int, vectors: int, depth: float, step: Step) -> float:
    """Of one tile: `depth` iterations over k, then its sums through the epilogue."""
    return step.cycles(machine, rows, vectors) * depth + _STORE_CYCLES * rows * vectors + _START_CYCLES


def grid_cycles(machine: Machine, rows: int, vectors: int, size: tuple[int, int, float], step: Step, lanes: int = 0) -> float:
    """Of all tiles of a product of `size` (m, n, k), edges filled up to whole tiles."""
    m, n, k = size
    return ceil(m / rows) * ceil(n / (vectors * (lanes or machine.lanes))) * tile_cycles(machine, rows, vectors, k, step)


@dataclass(frozen=True, slots=True)
class RankedTile:
    """A register tile for a product, and the cycles that all of its tiles take."""

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
) -> list[RankedTile]:
    """All tiles for a product, those with the fewest estimated cycles first; wasted edges count.

    Args:
        machine: counts numbers of the accumulators' size.
        shifted_loads: loads of B that cross cache lines, and so count twice.
        b_padded: columns beyond the end may be read; else the tile has no more columns than there are.
        vector_step: the tile has a multiple of so many vectors.
        streams_b: panels of B that L1 does not hold come from L2.
        row_bytes: from row to row of A, where it is read in place; 0 where nothing is known of it.
        cuts_last: the last tile of rows has `last_rows`.
    """
    most_rows = _SET_ROWS if row_bytes and share_sets(row_bytes, machine) else MAX_ROWS
    step = Step(panel_bytes(depth, machine) if streams_b else 0.0, shifted=shifted_loads)

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
    """What a panel of B of four vectors takes, or L2 if that is less: more come from there too, asked for ahead."""
    return min(4.0 * depth * machine.vector_bytes, machine.l2.size_bytes)


def last_rows(m: int, rows: int) -> int:
    """Rows of the last of the tiles of `m` rows: what is left, if that saves more than code of its own is worth."""
    rest = m % rows
    return rest if rest and (rows - rest) * _LEAST_SAVED >= m else rows


def share_sets(row_bytes: int, machine: Machine) -> bool:
    """Whether neighbouring elements of the rows of a tile, so far apart, fall into one set of L1, or two."""
    stride = machine.l1.set_stride_bytes
    apart = min(row_bytes % stride, -row_bytes % stride)
    return row_bytes >= stride - apart and apart * MAX_ROWS < LINE_BYTES
