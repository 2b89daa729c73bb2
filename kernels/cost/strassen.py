"""Estimated cycles of products by Strassen's algorithm, on one core."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...runtime.hardware.machine import Machine
from .estimate import Estimate
from .product import product_cycles, product_tile

STRASSEN_LEVELS = (1, 2)
_GAIN = 0.98  # Strassen's cycles must be fewer than this part of the plain product's
_ADDED_CYCLES = 3.5  # of a vector of a sum of blocks, before or after the products,
_NEAR_ROWS, _FAR_ADDED_CYCLES = 512, 6.0  # and with more rows than these, whose sums exceed L2
_WEIGHT_BYTES = 4
_MOST_SUMS = 64 << 20  # elements of sums of blocks of A, in scratch: 256 MiB besides the activations
_MOST_WEIGHTS = 1 << 30  # elements of sums of blocks of B: offsets are 32-bit integers
_MOST_ROWS = 52  # of a block at two levels, whose products with a panel fit L2


@dataclass(frozen=True, slots=True)
class StrassenChoice:
    """Strassen's algorithm applied recursively `levels` times, and its estimate."""

    levels: int
    estimate: Estimate


def strassen_choices(m: int, n: int, k: int, machine: Machine) -> list[StrassenChoice]:
    """All legal levels of Strassen's algorithm for m x k by k x n, those with the fewest cycles first.

    Legal: no block lies wholly beyond the edges, and the sums of blocks of A and of B are not too large. Two levels of blocks of
    more than `_MOST_ROWS` rows come last: their rows are multiplied in parts, each of which reads all panels again.
    """
    found = []
    for levels in STRASSEN_LEVELS:
        blocks, products = 2**levels, 7**levels
        rows, depth, columns = (ceil(extent / blocks) for extent in (m, k, n))
        lanes = machine.lanes
        columns = ceil(columns / lanes) * lanes
        is_small = products * rows * depth <= _MOST_SUMS and products * depth * columns <= _MOST_WEIGHTS
        if is_small and min(m - (blocks - 1) * rows, k - (blocks - 1) * depth, n - (blocks - 1) * columns) > 0:
            vectors = products * rows * (ceil(depth / lanes) + columns // lanes)
            added = vectors * (_ADDED_CYCLES if m <= _NEAR_ROWS else _FAR_ADDED_CYCLES)
            cycles = products * product_cycles(product_tile(rows, columns, depth, machine), rows, columns, depth, machine)
            weights = products * depth * columns * _WEIGHT_BYTES
            operations = 2 * products * rows * depth * columns
            choice = StrassenChoice(levels, Estimate((added + cycles) / _GAIN, operations, weights, _WEIGHT_BYTES * m * (n + k)))
            found.append((levels > 1 and rows > _MOST_ROWS, choice.estimate.wall_cycles(machine), choice))
    return [choice for _, _, choice in sorted(found, key=lambda one: one[:2])]
