"""Cycles of a register tile: the one formula behind every product that a core's vectors make.

A tile keeps `rows` x `vectors` sums in registers. A step of its loop over k broadcasts `rows` scalars of A, loads `vectors`
vectors of B, and makes rows * vectors multiply-adds (the micro-kernel of Goto, van de Geijn: Anatomy of High-Performance Matrix
Multiplication, TOMS 34/3, 2008). It can take no less than any of its parts: the multiply-adds, the loads, the vectors of B from
the cache in which their panel lies, and the latency of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...runtime.machine import Machine

MAX_ROWS = 14  # of a tile: more scalars of A than that leave no registers for two vectors of B
_STORE_CYCLES = 3.0  # of a vector of sums: to a buffer in L1, from there through the epilogue
_START_CYCLES = 20.0  # of a tile: addresses, the loop's beginning and its end
_UNHIDDEN = 0.15  # of the time in which a panel comes from L2, what multiply-adds do not hide
_L1_SHARE = 1.0  # of L1 that a panel may take: what is read once beside it goes through


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
    if panel_bytes <= _L1_SHARE * machine.l1.size_bytes:
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
