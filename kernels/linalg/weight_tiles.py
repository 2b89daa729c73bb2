"""Stored weights as tiles of AMX: read where they lie, as bytes in scratch, or as digits of one unit for a column's blocks.

Weights with scales of small blocks make sums of each block, which are scaled and added one by one. Where rows are many it is less
to scale the weights: those of a column become integers of one unit, as rows do (fixed_point.py), and their digits tiles of their
own. Products of digits i and j count 256^(i + j); those of the least i + j, which are below the rounding of the operands, are
left out: six of nine with three digits, three of four with two (Ozaki et al., Numer. Algorithms 59, 2012).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import COLUMNS, ROWS, TILE_WORDS, WORDS
from ..microkernels.fixed_point import LARGEST, field_of
from ..microkernels.packed_gemm import Scratch
from ..microkernels.weight_packing import Sections
from .digit_tiles import Stretches
from .stored_weights import BlockReader

DIGIT_MIDDLE = 128  # what is added to a signed digit of a weight: tiles of B are unsigned
_AHEAD_BYTES = 4096  # prefetch distance in a panel
_LEAST = 2.0**-100  # of a column's largest number: below, units would be subnormal


@dataclass(frozen=True)
class WeightTiles:
    """Tiles of B of a stretch of a panel, in words: their lines are `pitch` apart, those of the second 16 columns `half` behind
    the first, those of the next digit `plane`; what is `ahead` of a line is prefetched with it, where that is not 0."""

    words: Scratch
    pitch: int
    half: int
    plane: int
    ahead: int

    def tile(self, step: Expr, half: int, digit: int) -> Expr:
        """The first word of a tile."""
        return self.words.base + digit * self.plane + step * (2 * TILE_WORDS) + half * self.half


def tiles_in_place(words: Buffer, base: Expr) -> WeightTiles:
    """Words of bytes in panels of 32 columns, which are tiles side by side."""
    return WeightTiles(Scratch(words, base), LINES, COLUMNS, 0, _AHEAD_BYTES // 4)


def tiles_in_scratch(scratch: Scratch, stretches: Stretches) -> WeightTiles:
    """[digits, steps, columns' halves, 16 lines, 16 words]."""
    return WeightTiles(scratch, WORDS, TILE_WORDS, stretches.steps * 2 * TILE_WORDS, 0)


def unpack_bytes(builder: KernelBuilder, sections: Sections, source: Scratch, words: Expr, to: WeightTiles) -> None:
    """Make bytes of `words` words of each column of a panel."""
    with builder.loop(words, name="word") as word:
        for half, origin in _halves(builder, source, word):
            for field in range(sections.fields):
                at = _line(builder, to, word * sections.fields + field, half)
                with builder.loop(WORDS, "vectorized", "lane") as lane:
                    builder.store(to.words.buffer, at + lane, field_of(source.buffer[origin + lane], sections.bits, field))


@dataclass(frozen=True)
class ColumnDigits:
    """Weights of a stretch of a panel as `digits` digits of one unit a column: the units, then what makes them."""

    builder: KernelBuilder
    sections: Sections
    digits: int
    usual_zero: int
    scale: BlockReader
    above: BlockReader | None

    def cut(self, section: Expr, count: Expr, source: Scratch, to: WeightTiles, units: Scratch) -> None:
        """Make digits of `count` sections from `section` on, and store the 32 columns' units."""
        builder = self.builder
        factors = builder.local(LINES, "float32", "factors")
        self._store_units(section, count, units, factors)
        with builder.loop(count, name="section") as number:
            of_block, zeros = builder.local(LINES, "float32", "scales"), builder.local(LINES, "float32", "zeros")
            for half in range(2):
                with builder.loop(WORDS, "vectorized", "lane") as lane:
                    column = half * COLUMNS + lane
                    builder.store(of_block, column, self.scale(section + number, column) * factors[column])
                    builder.store(zeros, column, self._zero(section + number, column))
            with builder.loop(self.sections.words, name="word") as at:
                word = builder.bind(number * self.sections.words + at)
                for half, origin in _halves(builder, source, word):
                    for field in range(self.sections.fields):
                        line = _line(builder, to, word * self.sections.fields + field, half)
                        with builder.loop(WORDS, "vectorized", "lane") as lane:
                            column = half * COLUMNS + lane
                            four = builder.name(field_of(source.buffer[origin + lane], self.sections.bits, field))
                            numbers = [self._number(four, i, zeros[column], of_block[column]) for i in range(4)]
                            for digit in range(self.digits):
                                builder.store(to.words.buffer, line + digit * to.plane + lane, _word(numbers, digit))

    def _store_units(self, section: Expr, count: Expr, units: Scratch, factors: Buffer) -> None:
        builder, largest = self.builder, self.builder.local(LINES, "float32", "largest")
        for half in range(2):
            with builder.loop(WORDS, "vectorized", "lane") as lane:
                builder.store(largest, half * COLUMNS + lane, tirx.const(0, "float32"))
        with builder.loop(count, name="section") as number:
            for half in range(2):
                with builder.loop(WORDS, "vectorized", "lane") as lane:
                    column = half * COLUMNS + lane
                    size = tirx.max(self.scale(section + number, column), -self.scale(section + number, column))
                    builder.store(largest, column, tirx.max(largest[column], size))
        most = (1 << self.sections.bits) - 1  # a zero point may be any number
        farthest = most if self.above is not None else max(self.usual_zero, most - self.usual_zero)
        for half in range(2):
            with builder.loop(WORDS, "vectorized", "lane") as lane:
                column = half * COLUMNS + lane
                unit = tirx.max(largest[column], tirx.const(_LEAST, "float32")) * tirx.const(
                    farthest / LARGEST[self.digits], "float32"
                )
                builder.store(units.buffer, units.base + column, unit)
                builder.store(factors, column, tirx.const(1.0, "float32") / units[column])

    def _zero(self, section: Expr, column: Expr) -> Expr:
        usual = tirx.const(float(self.usual_zero), "float32")
        return usual if self.above is None else usual + self.above(section, column)

    def _number(self, four: Expr, place: int, zero: Expr, scale: Expr) -> Expr:
        """One of four neighbours along k as an integer whose digits are all unsigned."""
        byte = (four >> tirx.const(8 * place, "int32") if place else four) & tirx.const(255, "int32")
        whole = tirx.nearbyint((tirx.Cast("float32", byte) - zero) * scale)
        middles = sum(DIGIT_MIDDLE << (8 * digit) for digit in range(self.digits))
        return self.builder.name(tirx.Cast("int32", whole) + tirx.const(middles, "int32"))


def _word(numbers: list[Expr], digit: int) -> Expr:
    """A digit of four numbers, one in each byte."""
    mask = tirx.const(255 << (8 * digit), "int32")
    total = None
    for place, number in enumerate(numbers):
        byte, distance = number & mask, 8 * (place - digit)
        if distance:
            shift = tirx.const(abs(distance), "int32")
            byte = byte << shift if distance > 0 else byte >> shift
        total = byte if total is None else total | byte
    return total


def _halves(builder: KernelBuilder, source: Scratch, word: Expr) -> Iterator[tuple[int, Expr]]:
    """The two halves of a panel's columns: the first word of each of a line, the lines ahead of which are prefetched."""
    origin = builder.bind(source.base + word * LINES)
    for half in range(2):
        builder.prefetch(source.buffer[origin + half * COLUMNS + _AHEAD_BYTES // 4])
    for half in range(2):
        yield half, origin + half * COLUMNS


def _line(builder: KernelBuilder, to: WeightTiles, line: Expr, half: int) -> Expr:
    """The first word of a line of B in tiles."""
    step, row = tirx.floordiv(line, ROWS), tirx.floormod(line, ROWS)
    return builder.bind(to.tile(step, half, 0) + row * WORDS)


def tile_blocks(tiles: int, size: int, a_digits: int, b_digits: int) -> list[tuple[int, int]]:
    """Which tiles of A of a chunk of `size` rows meet the tiles of each digit of B: (digit of B, the first of them).

    Of lines of several digits a tile is left out where all its products are.
    """
    least = a_digits + b_digits - 1 - max(a_digits, b_digits)
    highest = [min((ROWS * tile + ROWS - 1) // size, a_digits - 1) for tile in range(tiles)]
    return [(j, next(tile for tile, digit in enumerate(highest) if digit + j >= least)) for j in range(b_digits)]


def kept_products(a_digits: int, b_digits: int) -> list[list[tuple[int, int]]]:
    """The products (digit of A, digit of B) that are not left out, by what they count, the least first."""
    least, most = a_digits + b_digits - 1 - max(a_digits, b_digits), a_digits + b_digits - 2
    pairs = list(product(range(a_digits), range(b_digits)))
    return [[pair for pair in pairs if sum(pair) == total] for total in range(least, most + 1)]
