"""Estimated cycles of Strassen's products and of plain ones, on one core: what `strassen_matmul` and fuse-rows weigh."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...runtime.machine import Machine
from .product import product_cycles, product_tile

STRASSEN_LEVELS = (1, 2)
_GAIN = 0.98  # of the cycles of plain products that it may take
_ADDED_CYCLES = 3.5  # of a vector of a sum of blocks that is multiplied, or of such a product that is added up,
_NEAR_ROWS, _FAR_ADDED_CYCLES = 512, 6.0  # and where rows are more than these, so that sums leave the second cache
_UNHIDDEN = 0.15  # of that time, what multiply-adds do not hide
_WEIGHT_BYTES = 4
_MOST_SUMS = 64 << 20  # elements of sums of rows, in scratch: 256 MiB beside the activations
_MOST_WEIGHTS = 1 << 30  # elements of sums of weights, and with them what 32-bit indices reach
_MOST_ROWS = 52  # of a block of two levels, whose products with a panel the second cache still holds


@dataclass(frozen=True, slots=True)
class StrassenChoice:
    """Strassen's algorithm, so often within itself, and its cycles."""

    levels: int
    cycles: float


def strassen_choices(m: int, n: int, k: int, machine: Machine) -> list[StrassenChoice]:
    """All levels that cut such a product into blocks, each with an element, those with the fewest cycles first.

    None whose sums of rows or of weights would be too many.

    Two, which multiply rows that are many part by part and so read a panel again for each, are thought worse there.
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
            choice = StrassenChoice(levels, added + _with_weights(cycles, products * depth * columns, machine))
            found.append((levels > 1 and rows > _MOST_ROWS, choice.cycles, choice))
    return [choice for _, _, choice in sorted(found, key=lambda one: one[:2])]


def strassen_drawback(m: int, n: int, k: int, machine: Machine) -> str:
    """Why the plain product is to be preferred; empty if Strassen's is."""
    choices = strassen_choices(m, n, k, machine)
    if not choices:
        return "is too small to be cut into blocks, or so large that their sums would take too much memory"
    fewest, plain = choices[0].cycles, matmul_cycles(m, n, k, machine)
    return "" if fewest <= _GAIN * plain else f"would take {fewest:.0f} cycles, and plain products {plain:.0f}"


def matmul_cycles(m: int, n: int, k: int, machine: Machine) -> float:
    """Of the plain product by constant float32 weights."""
    return _with_weights(product_cycles(product_tile(m, n, k, machine), m, n, k, machine), n * k, machine)


def _with_weights(cycles: float, weights: int, machine: Machine) -> float:
    """The cycles of a product whose float32 weights come from memory, which is not quite hidden."""
    fetched = weights * _WEIGHT_BYTES / machine.memory_bytes
    return max(cycles, fetched) + _UNHIDDEN * fetched
