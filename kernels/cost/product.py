"""Estimated cycles of matrix products, products in blocks of whole rows, and of attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import hint_of
from .estimate import UNHIDDEN, Estimate
from .pointwise import LoopBody, instructions_of
from .register_tile import MAX_ROWS, Step, grid_cycles, ranked_tiles
from .rows import row_cycles, softmax_passes

SEEN_ONCE = 0.05  # of arithmetic by one tile of rows: each load of a weight is its arrival
_L2_SHARE = 0.625  # of L2 that a block's rows of A may take; a panel of B takes the rest
_SCORE_CYCLES = 0.6  # of a vector operation on scores
_TRANSPOSED_CYCLES = 2.0  # of a word of K that is packed
_ROUGH_POWER = 13.0  # instructions of an exponential whose error is that of bfloat16
_IN_PLACE_CYCLES = 5.0, 0.1  # of a key by tiles: its scores are transposed; of a number of it or its value
_READ_ROWS = 3  # rows whose products with a key and its value, by vectors, take as long as reading these, about
_BLOCK_SHARE = 0.5  # of L2 for a block of result rows, which the row part reads from there
_MIN_BLOCK_ROWS = 32  # rows a thread from which on FMAs with a vector of weights take longer than loading it


def product_estimate(m: int, n: int, k: int, machine: Machine, *, k_pack: int = 1, batch: int = 1, unit: str = "fma") -> Estimate:
    """The estimate of `batch` products of m x k by k x n by the best register tile, `k_pack` neighbours along k at once.

    `unit` makes them: multiply-adds as many as there are neighbours, all others one, where the core has them.

    Its bytes are those of float32 products by constant weights; `estimate.with_bytes` counts those of a group.
    """
    item, is_dot = machine.item_bytes, unit != "fma" and machine.dots > 0
    one = replace(machine, multiply_adds=machine.dots, sum_latency=machine.dot_latency) if is_dot else machine
    tiles = partial(
        ranked_tiles,
        m,
        n,
        ceil(k / k_pack),
        one,
        shifted_loads=False,
        b_padded=True,
        cuts_last=True,
        products=1 if is_dot else k_pack,
    )
    best = tiles(streams_b=True)[0]
    is_once = best.rows >= m  # one tile has all rows: no panel is read again, from L2
    if is_once:
        best = tiles(streams_b=False)[0]
    return Estimate(
        batch * best.cycles,
        2 * batch * m * n * k,
        item * n * k,
        item * batch * m * (n + k),
        unit=unit,
        overlap=min(best.rows / max(m, 1), 1.0),
        constants_seen=SEEN_ONCE if is_once else UNHIDDEN,
    )


def product_tile(rows: int, columns: int, depth: int, machine: Machine) -> tuple[int, int]:
    """Rows and vectors of the register tile with the fewest cycles for a product of transformed tiles (Winograd)."""
    return product_tiles(rows, columns, depth, machine)[0]


def product_tiles(rows: int, columns: int, depth: int, machine: Machine) -> list[tuple[int, int]]:
    """All register tiles (rows, vectors) for such a product, those with the fewest cycles first."""
    every = product(range(1, min(rows, MAX_ROWS) + 1), (1, 2, 3, 4))
    choices = [(r, v) for r, v in every if r * v + v + 1 <= machine.registers]
    return sorted(choices, key=lambda tile: (product_cycles(tile, rows, columns, depth, machine), tile))


def product_cycles(tile: tuple[int, int], rows: int, columns: int, depth: int, machine: Machine) -> float:
    """Cycles of such a product, each panel of whose weights comes from L2."""
    return grid_cycles(machine, *tile, (rows, columns, depth), Step(machine.l2.size_bytes))


def product_block_bytes(machine: Machine) -> int:
    """Bytes of a block of result rows that stays in L2 until the row part has read it."""
    return int(_BLOCK_SHARE * machine.l2.size_bytes)


def product_rows_drawback(rows: int, depth: int, columns: int, threads: int, machine: Machine) -> str:
    """Why a float32 product (rows x depth by depth x columns) is not computed in blocks of whole rows; empty if it is.

    In blocks of whole rows each thread reads all of the weights, not its part of them: once for each of its blocks. Measured for
    128 and 197 rows on two threads: up to 8 % are gained where a block's rows of A stay in L2, 4 % lost where they do not. With
    more rows than columns the plain product reads all weights for each tile of rows, too.
    """
    rows = hint_of(rows)
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


def attention_cycles(
    batch: int,
    size: tuple[int, int, int, int],
    machine: Machine,
    among: LoopBody,
    *,
    k_pack: int = 1,
    unit: str = "fma",
    is_packed: bool = True,
    is_rough: bool = False,
    seen: float = 1.0,
) -> float:
    """Cycles of softmax(Q K) V for `batch` heads; `size`: queries, keys, elements of a query, elements of a value.

    `among`: what a vector of scores meets between the two products. `k_pack` and `unit` as of `product_estimate`. K and V are
    packed once a head, unless `is_packed` is not so: K is transposed, word by word. `is_rough`: exponentials have errors of
    bfloat16. `seen`: the part of the scores that is computed, as a mask hides the others.
    """
    queries, keys, depth, width = size
    first = product_estimate(queries, keys, depth, machine, k_pack=k_pack, unit=unit).cycles
    second = product_estimate(queries, width, keys, machine, k_pack=k_pack, unit=unit).cycles
    laid_out = keys * (_TRANSPOSED_CYCLES * depth / k_pack + 2 * width / machine.lanes) if is_packed else 0.0
    scores = queries * _softmax_cycles(keys, machine, among, is_rough=is_rough)
    return batch * (seen * (first + second + scores) + laid_out)


def attention_in_place_cycles(
    batch: int, shared: int, size: tuple[int, int, int, int], machine: Machine, among: LoopBody
) -> float:
    """The same where a tile unit reads K and V of `shared` heads with few queries in place, for all of them at once."""
    queries, keys, depth, width = size
    products = keys * (_IN_PLACE_CYCLES[0] + _IN_PLACE_CYCLES[1] * (depth + width))
    return batch * (products / shared + queries * _softmax_cycles(keys, machine, among, is_rough=True))


def heads_of_task(most: int, heads: int, queries: int, threads: int) -> int:
    """How many of `most` neighbouring heads that share K and V, a divisor, one task takes, so that the last thread ends first:
    each task reads all of K and V, which takes as long as the products of some rows."""

    def rows(count: int) -> int:
        return ceil(heads // count / threads) * (_READ_ROWS + count * queries)

    return min((count for count in range(most, 0, -1) if most % count == 0), key=rows)


def _softmax_cycles(keys: int, machine: Machine, among: LoopBody, *, is_rough: bool) -> float:
    """Of a row of scores, whose results are scaled in the end."""
    power = LoopBody(_ROUGH_POWER if is_rough else instructions_of("ExpNonpositive"))
    top, total, _ = softmax_passes(LoopBody(loads=1), LoopBody(), power, is_logarithm=False)
    return row_cycles((replace(top, body=top.body + among), total), ceil(keys / machine.lanes), machine.lanes, machine)


def tiled_attention_cycles(
    batch: int, size: tuple[int, int, int, int], machine: Machine, scores_operations: float, tile_cycles: float
) -> float:
    """The same where a tile unit makes the products, in `tile_cycles` a head, with packing. `scores_operations`: scalar ones on
    each score between the two products."""
    queries, keys, depth, width = size
    laid_out = 2 * keys * (depth + width) / machine.lanes
    scores = scores_operations * _SCORE_CYCLES * queries * keys / machine.lanes
    exponential, plain = LoopBody(instructions_of("ExpNonpositive")), LoopBody(loads=1)
    passes = softmax_passes(plain, LoopBody(stores=1), exponential, is_logarithm=False)
    scores = max(scores, queries * row_cycles(passes, ceil(keys / machine.lanes), machine.lanes, machine))
    return batch * (tile_cycles + scores + laid_out)
