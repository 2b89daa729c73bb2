"""Estimated cycles of products by weights that lie as integers of few bits with scales."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any, Protocol

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating
from .product import product_estimate
from .register_tile import RankedTile, ranked_tiles

_ROW_OPERATIONS = 14.0  # vector operations that make integers of a vector of a row, for three bytes
_SECTION_OPERATIONS = {1: 3.0, 2: 5.0, 3: 7.0}  # that add a vector of a section's sums to the totals, by bytes of a row
_PANEL = 32  # columns of a panel that AMX reads
_TILE_LINES, _TILE_BYTES = 16, 1024
# Cycles on AMX, as measured on an Emerald Rapids: of a vector of results that is made of tiles' sums, by digits; of a line of a
# tile that is made of words; of two tiles of sums of a tile of A, made zero and stored; of 16 numbers of a row that become three
# digits.
_JOIN_CYCLES = {1: 4.0, 2: 6.0, 3: 8.0}
_UNPACK_CYCLES, _TILE_STORE_CYCLES, _CUT_CYCLES = 3.0, 64.0, 16.0
_DIGITS_JOIN, _DIGIT_CYCLES = 1.6, 9.0  # of weights with digits: a vector of results, times; a line, a digit and one more
_FORWARD_CYCLES = 330.0  # until tiles that were just stored as vectors, and sums the other way, can be loaded
_PIPES = 1.5  # for integers, beside each that multiplies
_LOSS = 1.3  # of the time of words, as measured: spilled sums, broadcasts that are no operands of dot products
_STORE_CYCLES, _START_CYCLES = 3.0, 20.0  # as of float32's register tiles
_SPILL_CYCLES = 2.0  # of a total that is read and written
_KEPT_REGISTERS = 2  # that are not for sums and unpacked words
# Vector operations that make a vector of float32 weights, by bits, and its store. Of 8 bits as measured on Granite Rapids, where
# 768x3072 takes 4 to 128 rows 1.28 to 2.5 times the time of digits.
_UNPACKED = {8: 9.0, 4: 4.5, 2: 4.5}
_UNPACKING_REGISTERS = 8  # for words, numbers of them and of rows, which LLVM loads ahead: with fewer, sums lie on the stack
_UNPACKED_LOSS = 1.35  # of the time of words, as measured on Zen 3 beside digits of 4 and 8 rows
_UNPACKED_BY_EIGHT = 10.0  # the same of vectors of eight, of 4 bits as measured on Zen 3 (8 rows of 768x50257)


class Unit(Protocol):
    """What `digits.DigitUnit` tells."""

    @property
    def lanes(self) -> int: ...
    @property
    def planes(self) -> int: ...
    @property
    def chain(self) -> int: ...
    @property
    def multiplies(self) -> float: ...
    @property
    def operations(self) -> float: ...
    @property
    def unpacking(self) -> int: ...
    def digits(self, row_bytes: int) -> int: ...


class Cut(Protocol):
    """What `weight_packing.Sections` tells."""

    @property
    def depth(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def fields(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def words(self) -> int: ...


@estimating
def fixed_point_tiles(rows: int, sections: Cut, unit: Unit, row_bytes: int, machine: Machine) -> list[tuple[int, int]]:
    """Register tiles (rows, vectors) for rows of integers of so many bytes, those that take the least time first: what comes
    from memory arrives while the first tile of rows is multiplied. A word of a row that several vectors meet has a register."""
    digits, left = unit.digits(row_bytes), _registers(machine, sections, unit)
    fitting = [
        (r, v)
        for r, v in product(range(1, min(rows, 12) + 1), (1, 2, 3, 4, 6, 8))
        if r * v * digits + (r * digits if v > 1 and unit.chain == unit.planes else 0) <= left
    ]
    arriving = sections.depth * sections.columns * sections.bits / 8 / machine.memory_bytes

    def time(tile: tuple[int, int]) -> tuple[float, float]:
        """What is seen of a tile's cycles and of memory; and the cycles, which decide where memory is all that is seen."""
        cycles = fixed_point_cycles(tile, rows, sections, unit, row_bytes, machine)
        return cycles + max(arriving - cycles * min(tile[0] / rows, 1.0), 0.0), cycles

    return sorted(fitting, key=lambda tile: (*time(tile), tile))


def _registers(machine: Machine, sections: Cut, unit: Unit) -> int:
    """What words that are being multiplied, and the mask that takes them apart, leave for sums."""
    words = max(sections.fields, unit.chain) if sections.fields > 1 else unit.planes - 1
    return machine.registers - _KEPT_REGISTERS - 2 - words


def _spilled(cells: int, digits: int, left: int) -> int:
    """Totals that have no registers, and are read and written once a section."""
    return min(max(cells * (digits + 1) - left, 0), cells)


@estimating
def fixed_point_cycles(tile: tuple[int, int], rows: int, sections: Cut, unit: Unit, row_bytes: int, machine: Machine) -> float:
    """Cycles of one core for `rows` rows: making integers of them, then all register tiles.

    A vector of words takes a product for each row, digit and field, and a shift and a mask for each field of several; dot
    products and multiply-adds have the same rate. Few sums wait for one another.
    """
    height, vectors = tile
    rate, digits = machine.multiply_adds, unit.digits(row_bytes)
    fields, cells = sections.fields, height * vectors
    unpacking = ((2 * fields - 1 if fields > 1 else 0) + unit.unpacking) * vectors
    products = fields * cells * digits
    issued = rate if unit.operations == 1 else max(machine.issued, _PIPES * rate)
    factors = height * digits * fields * unit.planes * (1 if unit.chain == 1 else vectors)
    word = max(
        (products * unit.operations + unpacking) / issued,
        products * unit.multiplies / rate,
        fields * (machine.sum_latency if unit.operations == 1 else 1.0),
        (vectors + factors) / machine.loads,
    )
    totals = _SPILL_CYCLES * _spilled(cells, digits, _registers(machine, sections, unit))
    section = _LOSS * word * sections.words + _SECTION_OPERATIONS[row_bytes] * cells / rate + totals
    one = section * sections.count + _STORE_CYCLES * cells + _START_CYCLES
    tiles = ceil(rows / height) * ceil(sections.columns / (vectors * unit.lanes))
    prepared = _ROW_OPERATIONS * (row_bytes + 1) / 4 * rows * sections.depth / unit.lanes / rate
    return tiles * one + prepared


@dataclass(frozen=True)
class DigitWork:
    """Products of digits on AMX for 32 columns of weights, in each of `stretches` stretches of k: `pairs` of tiles of A by two of
    B, tiles `alone` by two, `steps` of each; digits of rows and of weights."""

    pairs: int
    alone: int
    digits: int
    b_digits: int
    steps: int
    stretches: int


@estimating
def digit_tile_cycles(size: tuple[int, int, int], work: DigitWork, machine: Machine, *, is_unpacked: bool) -> float:
    """Cycles of one core for `size` (rows, columns, depth); with `is_unpacked` tiles of B are made of words."""
    rows, columns, depth = size
    tiles = 2 * work.pairs + work.alone
    is_near = tiles * work.steps * work.stretches * _TILE_BYTES <= machine.l1.size_bytes
    is_b_near = 2 * work.b_digits * work.steps * _TILE_BYTES <= machine.l1.size_bytes
    of_a, of_b = (machine.tile_l1_cycles if near else machine.tile_l2_cycles for near in (is_near, is_b_near))
    step = (work.pairs * 2 + work.alone) * (of_a + of_b)
    joined = 2 * rows * _JOIN_CYCLES[work.digits] * (1.0 if work.b_digits == 1 else _DIGITS_JOIN)
    of_line = (_UNPACK_CYCLES if work.b_digits == 1 else _DIGIT_CYCLES * (1 + work.b_digits)) if is_unpacked else 0.0
    unpacked = work.steps * 2 * _TILE_LINES * of_line + _FORWARD_CYCLES * is_unpacked
    prepared = _CUT_CYCLES * (work.digits + 1) / 4 * rows * depth / _TILE_LINES
    stretch = work.steps * step + tiles * _TILE_STORE_CYCLES + joined + unpacked
    return ceil(columns / _PANEL) * work.stretches * stretch + prepared


@estimating
def dequantized_tiles(rows: int, columns: int, depth: int, bits: int, machine: Machine, **how: Any) -> list[tuple[int, int]]:
    """Register tiles (rows, vectors) for panels that become float32 first, the last with its padding, those that take the fewest
    cycles first; `how`: keywords of `ranked_tiles`."""

    def cycles(one: RankedTile) -> float:
        vectors = ceil(columns / (one.vectors * machine.lanes)) * one.vectors
        return one.cycles + _unpacking(bits, machine) * vectors * depth / machine.multiply_adds

    ranked = ranked_tiles(rows, columns, depth, machine, **how)
    return [(one.rows, one.vectors) for one in sorted(ranked, key=lambda one: (cycles(one), one.rows, one.vectors))]


@estimating
def unpacked_tiles(rows: int, sections: Cut, machine: Machine) -> list[tuple[int, int]]:
    """Register tiles (rows, vectors) that words meet as float32 in registers, those that take the fewest cycles first."""
    left = machine.registers - _UNPACKING_REGISTERS
    shapes = product(range(1, min(rows, left) + 1), (1, 2, 3, 4))
    fitting = [(r, v) for r, v in shapes if r * v <= left]
    return sorted(fitting, key=lambda tile: (unpacked_cycles(tile, rows, sections, machine), tile))


@estimating
def unpacked_cycles(tile: tuple[int, int], rows: int, sections: Cut, machine: Machine) -> float:
    """Cycles of one core for `rows` rows by register tiles: a number of a word takes two shifts and a conversion, and a
    multiply-add for each row; sums wait for one another where tiles have few."""
    height, vectors = tile
    numbers, rate, cells = 4 * sections.fields, machine.multiply_adds, height * vectors
    word = max(
        (numbers * cells + (3 * numbers + 1) * vectors) / max(machine.issued, _PIPES * rate),
        numbers * cells / rate,
        numbers * machine.sum_latency,
        (numbers * height + vectors) / machine.loads,
    )
    section = _UNPACKED_LOSS * word * sections.words + (_SECTION_OPERATIONS[1] / rate + _SPILL_CYCLES) * cells
    one = section * sections.count + _STORE_CYCLES * cells + _START_CYCLES
    return ceil(rows / height) * ceil(sections.columns / (vectors * machine.lanes)) * one


@estimating
def dequantized_cycles(rows: int, columns: int, depth: int, bits: int, machine: Machine) -> float:
    """Cycles of one core where panels become float32 in a thread's scratch, and float32 products read them there."""
    unpacked = _unpacking(bits, machine) * columns * depth / machine.lanes / machine.multiply_adds
    return unpacked + product_estimate(rows, columns, depth, machine).cycles


def _unpacking(bits: int, machine: Machine) -> float:
    """Vector operations that make a vector of float32 weights."""
    return _UNPACKED[bits] if machine.lanes > 8 else _UNPACKED_BY_EIGHT
