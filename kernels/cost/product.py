"""Estimated cycles of matrix products whose panels come from L2, and of those computed in blocks of whole rows."""

from __future__ import annotations

from itertools import product
from math import ceil

from ...runtime.hardware.machine import Machine
from .estimate import Estimate
from .register_tile import MAX_ROWS, Step, grid_cycles, ranked_tiles

_L2_SHARE = 0.625  # of L2 that the left operand of a block may take beside a panel
_SCORE_CYCLES, _UNIT_CYCLES = 0.6, 0.6  # of a vector operation on scores, and on hidden units
_BLOCK_SHARE = 0.5  # of L2, for rows of a product that wait there for what is computed from them
_MIN_BLOCK_ROWS = 32  # of a thread, that make as much of each vector of weights as it takes to read it


def product_estimate(m: int, n: int, k: int, machine: Machine, *, k_pack: int = 1, batch: int = 1) -> Estimate:
    """Of `batch` products of m x k by k x n that the best register tile makes, `k_pack` neighbours along k at once.

    The operands' bytes are those of float32 products by constant weights; `estimate.with_bytes` counts those of a group.
    """
    how = {"shifted_loads": False, "b_padded": True, "streams_b": True, "cuts_last": True}
    best = ranked_tiles(m, n, ceil(k / k_pack), machine, **how)[0]
    item, emulated = machine.item_bytes, 1 if machine.dots else k_pack  # a multiply-add for each neighbour
    return Estimate(
        batch * best.cycles * emulated,
        2 * batch * m * n * k,
        item * n * k,
        item * batch * m * (n + k),
        unit="fma" if k_pack == 1 else "dot",
        overlap=min(best.rows / max(m, 1), 1.0),
    )


def product_tile(rows: int, columns: int, depth: int, machine: Machine) -> tuple[int, int]:
    """Rows and vectors of the tile with the fewest cycles for the products of Winograd's tiles."""
    return product_tiles(rows, columns, depth, machine)[0]


def product_tiles(rows: int, columns: int, depth: int, machine: Machine) -> list[tuple[int, int]]:
    """All tiles for these products, those with the fewest cycles first."""
    every = product(range(1, min(rows, MAX_ROWS) + 1), (1, 2, 3, 4))
    choices = [(r, v) for r, v in every if r * v + v + 1 <= machine.registers]
    return sorted(choices, key=lambda tile: (product_cycles(tile, rows, columns, depth, machine), tile))


def product_cycles(tile: tuple[int, int], rows: int, columns: int, depth: int, machine: Machine) -> float:
    """Of such a product, each panel of whose weights comes from L2."""
    return grid_cycles(machine, *tile, (rows, columns, depth), Step(machine.l2.size_bytes))


def product_block_bytes(machine: Machine) -> int:
    """Of rows of a product that wait in L2 for what is computed from them."""
    return int(_BLOCK_SHARE * machine.l2.size_bytes)


def product_rows_drawback(rows: int, depth: int, columns: int, threads: int, machine: Machine) -> str:
    """Why a float32 product is not computed in blocks of whole rows by each thread; empty if it is.

    Then each thread reads all of the weights, and not its part of them: once for each of its blocks, whose rows of the left
    operand meet every panel of weights. Measured for 128 and 197 rows on two threads: up to 8 % are gained where those rows stay
    in the second cache, 4 % lost where they do not. With more rows than columns the product alone reads all weights for a tile.
    """
    of_thread = rows // threads
    if of_thread < _MIN_BLOCK_ROWS:
        return f"each of {threads} threads would read all weights for {of_thread} rows, fewer than {_MIN_BLOCK_ROWS}"
    block_bytes = product_block_bytes(machine)
    in_block = min(of_thread, block_bytes // (4 * columns))
    if in_block < _MIN_BLOCK_ROWS:
        return f"{_MIN_BLOCK_ROWS} rows of {columns} columns are more than the {block_bytes // 1024} KiB of a block"
    if rows <= columns and (size := 4 * in_block * depth) > _L2_SHARE * machine.l2.size_bytes:
        return f"{size // 1024} KiB of a block's left operand would be read again for every panel of weights"
    return ""


def attention_cycles(batch: int, size: tuple[int, int, int, int], machine: Machine, *, scores_operations: float) -> float:
    """Of softmax(Q K) V for `batch` heads; `size` are queries, keys, elements of a query, of a value.

    `scores_operations` are the scalar operations for each score, between the two products. Keys and values are laid out in
    panels once a head.
    """
    queries, keys, depth, width = size
    first = product_estimate(queries, keys, depth, machine).cycles
    second = product_estimate(queries, width, keys, machine).cycles
    laid_out = 2 * keys * (depth + width) / machine.lanes
    scores = scores_operations * _SCORE_CYCLES * queries * keys / machine.lanes
    return batch * (first + second + laid_out + scores)


def recurrence_cycles(
    directions: int, steps: int, rows: int, sizes: tuple[int, int, int], machine: Machine, *, unit_operations: float
) -> float:
    """Of a recurrence: the input's share of all steps at once, then a product of each step.

    `sizes` are the elements of an input, hidden units, and gates; `unit_operations` are the scalar operations of one hidden unit.
    """
    inputs, hidden, gates = sizes
    share = product_estimate(steps * rows, gates * hidden, inputs, machine).cycles if inputs else 0.0
    step = product_estimate(rows, gates * hidden, hidden, machine).cycles
    units = unit_operations * _UNIT_CYCLES * rows * hidden / machine.lanes
    return directions * (share + steps * (step + units))
