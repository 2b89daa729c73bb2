"""Estimated cycles of products and convolutions by AMX, and of the same products on vectors (AVX-512).

Products and tile loads of weights from memory overlap; packing and the epilogue come on top.
"""

from __future__ import annotations

from math import ceil, prod

from ...runtime.hardware.machine import Machine
from .convolution import Convolution

_SPLIT_ELEMENTS = 4.0  # bfloat16 terms that a core packs in a cycle; bytes twice as many
_BLOCK_LINES = 32  # rows of A and columns of B of a step of the micro-kernel (2x2 tiles)
_WORDS = 16  # of a row of a tile; a word has two values of k, or four where they are bytes
_MOST_LINE = 8192  # elements of an image row on the stack
_TILE_LINES = 16
_TERM_PRODUCTS = {1: (1, 1, 1), 2: (3, 2, 2), 3: (6, 3, 4)}  # by terms: their products, loads of a term of A and of B for them


def tile_product_cycles(
    m: int, n: int, k: int, terms: int, machine: Machine, *, packs_a: bool, packs_b: bool, k_pack: int = 2
) -> float:
    """Cycles of m x k by k x n by AMX, of operands as sums of `terms` bfloat16 terms, or of bytes (`k_pack` 4); with `packs_a`
    (`packs_b`) the kernel packs A (B)."""
    rows, columns = (_whole(extent, _BLOCK_LINES) for extent in (m, n))
    blocks = _blocks_cycles(m, n, k, terms, machine, k_pack)
    packed = (rows * packs_a + columns * packs_b) * _whole(k, _WORDS * k_pack) * terms / (_SPLIT_ELEMENTS * k_pack / 2)
    finished = rows * columns / 4
    return blocks + packed + finished


def _whole(extent: int, step: int) -> int:
    """The extent, filled up to whole steps."""
    return ceil(extent / step) * step


def tile_step_cycles(rows: int, columns: int, depth: int, terms: int, machine: Machine, k_pack: int = 2) -> float:
    """Cycles of a recurrence's product of one step by AMX: weights come from L2 or L3, and A is packed at each step."""
    packed = rows * depth * terms / _SPLIT_ELEMENTS
    return _blocks_cycles(rows, columns, depth, terms, machine, k_pack) + packed + rows * columns / 4


def vector_step_cycles(rows: int, columns: int, depth: int, machine: Machine) -> float:
    """Cycles of the same by float32 FMAs, also where weights are bfloat16."""
    return rows * ceil(columns / machine.lanes) * max(depth / machine.multiply_adds, machine.sum_latency) + rows * columns / 4


def _blocks_cycles(rows: int, columns: int, depth: int, terms: int, machine: Machine, k_pack: int = 2) -> float:
    """Cycles of all blocks of 32 rows (the last may be of 16) by 32 columns, or 16 where there are no more."""
    tiles, b_tiles = ceil(rows / _TILE_LINES), 1 if columns <= _TILE_LINES else 2
    step = tiles // 2 * _block_cycles(terms, 2, b_tiles, machine) + tiles % 2 * _block_cycles(terms, 1, b_tiles, machine)
    return ceil(columns / _BLOCK_LINES) * ceil(depth / (_WORDS * k_pack)) * step


def _block_cycles(terms: int, a_tiles: int, b_tiles: int, machine: Machine) -> float:
    """Cycles of a step of 16 words of k."""
    products, a_loads, b_loads = _TERM_PRODUCTS[terms]
    dots, loads = a_tiles * b_tiles * products, a_tiles * a_loads + b_tiles * b_loads
    return max(dots * machine.tile_dot_cycles, loads * machine.tile_l2_cycles)


def joined_columns(one: Convolution, k_pack: int = 2) -> int:
    """Kernel columns whose channels are packed side by side along k, where those of one column fill few of a tile's 16 words."""
    columns, inputs, of_step = one.kernel[1], one.inputs, _WORDS * k_pack
    is_plain = one.groups == one.dilations[1] == one.phases == 1 and one.height > 1
    are_few = inputs < of_step and ceil(columns * inputs / of_step) < columns
    line = ((one.columns - 1) * one.strides[1] + columns) * inputs
    return columns if is_plain and are_few and line <= _MOST_LINE else 1


def tile_convolution_cycles(one: Convolution, terms: int, machine: Machine, *, copies: bool = True, k_pack: int = 2) -> float:
    """Cycles of an NHWC convolution by AMX, of bfloat16 terms or bytes (`k_pack` 4); with `copies` the kernel packs its input
    first."""
    joined = joined_columns(one, k_pack)
    pitch = one.columns if joined > 1 else one.columns + (one.kernel[1] - 1) * one.dilations[1] // one.strides[1]
    channels = _whole(one.inputs * joined, _WORDS * k_pack)
    positions, depth = (one.rows // one.planes - 1) * pitch + one.columns, prod(one.kernel) // joined * channels
    outputs, matrices, planes = one.outputs // one.phases, one.groups * one.phases, one.images * one.planes
    blocks = planes * matrices * _blocks_cycles(positions, outputs, depth, terms, machine, k_pack)
    rows, columns = (_whole(extent, _BLOCK_LINES) for extent in (positions, outputs))
    finished = planes * matrices * rows * columns / 4
    width = one.columns if joined > 1 else one.width
    copied = one.images * one.groups * one.height * width * channels * terms / (_SPLIT_ELEMENTS * k_pack / 2)
    return blocks + finished + copied * copies


def vector_product_cycles(m: int, n: int, k: int, machine: Machine, *, is_narrow: bool) -> float:
    """Cycles of m x k by k x n by float32 FMAs or, if `is_narrow` (bfloat16 operands), by dot products of bfloat16 pairs, which
    CPUs with AMX issue at half the rate of FMAs (LLVM's model of Sapphire Rapids)."""
    step, weight_bytes = (k / 2 / (machine.dots or machine.multiply_adds), 2) if is_narrow else (k / machine.multiply_adds, 4)
    computed = m * ceil(n / machine.lanes) * max(step, machine.sum_latency)
    return max(computed, n * k * weight_bytes / machine.memory_bytes) + m * n / 4
