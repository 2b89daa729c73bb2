"""Rows of float32 as signed bytes in tiles of AMX, and the stretches of k that they are scaled by.

As `fixed_point` says, but that each digit of a row is a line of A of its own: tiles of 16 lines by 64 values of k. Digits of up
to 32 rows are a chunk, digit by digit; a tile may have lines of two digits, so that 8 rows of three digits fill one and a half.
Sums of a digit by bytes stay within 32 bits for any stretch here, so that one scale serves up to 1,024 values of k: sums of tiles
are joined once for all of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import ROWS, S8U8_TILES, TILE_WORDS, WORDS
from ..microkernels.fixed_point import carry_of, fold, magnitudes, padded_rows, store_unit, store_words
from ..microkernels.weight_packing import Sections

LONGEST = 1024  # values of k by one scale, whose sums stay below 2^8 * 2^7 * 2^10; without their zero point float32 holds them
LONGEST_ROUGH = 256  # of rows of a byte, whose error is that of the scale
_DEPTH = S8U8_TILES.depth
_LANES = 16
_BITS = 8  # of a digit


@dataclass(frozen=True)
class Stretches:
    """k in stretches of `joined` neighbouring sections of the weights, each within a block of their scales; the last may be
    shorter. Within each tiles have `steps` steps of 64 values."""

    sections: Sections
    joined: int

    @property
    def length(self) -> int:
        """Values of k of a stretch."""
        return self.joined * self.sections.length

    @property
    def count(self) -> int:
        return ceil(self.sections.count / self.joined)

    @property
    def lines(self) -> int:
        """Lines of B, four values of k each, of a stretch."""
        return self.joined * self.sections.words * self.sections.fields

    @property
    def steps(self) -> int:
        return ceil(self.lines / WORDS)

    @property
    def padded(self) -> int:
        """Values of k of a stretch as tiles have them."""
        return self.steps * _DEPTH


def stretches_of(sections: Sections, block: int, longest: int) -> Stretches:
    """The longest stretches of at most `longest` values of k, as equal as can be: of weights with blocks of scales, 0: without
    any, all of a block's are equally long. A section is a stretch, at least."""
    has_gaps = sections.words * sections.numbers != sections.length
    most = 1 if has_gaps else max(longest // sections.length, 1)
    if block:
        of_block = block // sections.length
        return Stretches(sections, next(one for one in range(min(most, of_block), 0, -1) if of_block % one == 0))
    return Stretches(sections, ceil(sections.count / ceil(sections.count / most)))


@dataclass(frozen=True)
class DigitTiles:
    """Rows as digits in tiles: `words` [stretches, tiles, steps, 16 lines, 16 words]; the lines of a chunk of 32 rows, or of
    fewer at the end, are those of the first digit, then of the next. What fills up the last tile is undefined.

    `scales` [stretches, rows] are the units of the lowest digit, NaN where a number is not finite. `starts` [stretches, rows,
    digits] are what zero points of `middle` add to each digit's sums. `sums` [stretches, rows] are the sums of the numbers in
    these units.
    """

    stretches: Stretches
    rows: int
    digits: int
    words: Buffer
    scales: Buffer
    starts: Buffer
    sums: Buffer

    @property
    def chunk_tiles(self) -> int:
        """Of a whole chunk."""
        return self.digits * LINES // ROWS

    @property
    def tiles(self) -> int:
        """Of all rows."""
        return tiles_of(self.rows, self.digits)

    def tile_at(self, stretch: Expr, tile: Expr) -> Expr:
        """The first word of a tile of A at its first step."""
        return (stretch * self.tiles + tile) * (self.stretches.steps * TILE_WORDS)


def tiles_of(rows: int, digits: int) -> int:
    """Tiles of A that digits of so many rows fill."""
    return rows // LINES * (digits * LINES // ROWS) + ceil(digits * (rows % LINES) / ROWS)


def cut_into_digits(
    builder: KernelBuilder, source: Buffer, rows: int, stretches: Stretches, digits: int, middle: int
) -> DigitTiles:
    """Emit what makes digits of `rows` rows of float32, which lie one behind the other in `source`."""
    count, depth = stretches.count, stretches.sections.depth
    fixed = DigitTiles(
        stretches,
        rows,
        digits,
        builder.workspace(count * tiles_of(rows, digits) * stretches.steps * TILE_WORDS, "int32"),
        builder.workspace(count * rows, "float32"),
        builder.workspace(count * rows * digits, "int32"),
        builder.workspace(count * rows, "float32"),
    )
    pitch = depth
    if count * stretches.padded != depth:
        source = padded_rows(builder, source, rows, depth, stretches.length, stretches.padded)
        pitch = count * stretches.padded
    with builder.chunks(rows * count, rows * depth) as place:
        row, stretch = builder.bind(tirx.floordiv(place, count)), builder.bind(tirx.floormod(place, count))
        _cut_stretch(builder, fixed, source, builder.bind(row * pitch + stretch * stretches.padded), (row, stretch), middle)
    return fixed


def _cut_stretch(
    builder: KernelBuilder, fixed: DigitTiles, source: Buffer, origin: Expr, at: tuple[Expr, Expr], middle: int
) -> None:
    """One stretch of a row, from element `origin` of the source on; `at`: row, stretch."""
    (row, stretch), digits, steps = at, fixed.digits, fixed.stretches.steps
    place = builder.bind(stretch * fixed.rows + row)
    largest = builder.local(_LANES, "int32", "largest")
    every = tirx.Ramp(0, 1, _LANES)
    builder.store(largest, every, tirx.Broadcast(tirx.const(0, "int32"), _LANES))
    with builder.loop(fixed.stretches.padded // _LANES, name="v") as v:
        builder.store(largest, every, tirx.max(largest[every], magnitudes(source, origin + v * _LANES, _LANES)))
    factor = store_unit(builder, fold(builder, largest, _LANES, tirx.max), digits, (fixed.scales, place))
    bases = [builder.bind(_line_at(fixed, row, stretch, digit)) for digit in range(digits)]
    totals = [builder.local(_LANES, "int32", "totals") for _ in range(digits)]
    for total in totals:
        builder.store(total, every, tirx.Broadcast(tirx.const(0, "int32"), _LANES))
    with builder.loop(steps, name="step") as step:
        numbers = builder.local(_DEPTH, "int32", "numbers")
        for begin in range(0, _DEPTH, _LANES):
            with builder.loop(_LANES, "vectorized", "lane") as lane:
                scaled = tirx.nearbyint(source[origin + step * _DEPTH + begin + lane] * factor)
                builder.store(numbers, begin + lane, tirx.Cast("int32", scaled))
        for digit, (base, total) in enumerate(zip(bases, totals, strict=True)):
            whole = _from(numbers[tirx.Ramp(0, 1, _DEPTH)], digit, _DEPTH)
            store_words(builder, fixed.words, base + step * TILE_WORDS, tirx.Cast(f"int8x{_DEPTH}", whole), _BITS)
            for begin in range(0, _DEPTH, _LANES):
                builder.store(total, every, total[every] + _from(numbers[tirx.Ramp(begin, 1, _LANES)], digit, _LANES))
    _store_sums(builder, fixed, totals, place, middle)


def _from(numbers: Expr, digit: int, lanes: int) -> Expr:
    """A vector of numbers without the digits below one, these being signed."""
    if not digit:
        return numbers
    carry, shift = (tirx.Broadcast(tirx.const(one, "int32"), lanes) for one in (carry_of(_BITS, digit), _BITS * digit))
    return (numbers + carry) >> shift


def _line_at(fixed: DigitTiles, row: Expr, stretch: Expr, digit: int) -> Expr:
    """The first word of a row's line of a digit."""
    first = tirx.floordiv(row, LINES) * LINES
    line = digit * tirx.min(fixed.rows - first, LINES) + row - first
    tile = tirx.floordiv(row, LINES) * fixed.chunk_tiles + tirx.floordiv(line, ROWS)
    return fixed.tile_at(stretch, tile) + tirx.floormod(line, ROWS) * WORDS


def _store_sums(builder: KernelBuilder, fixed: DigitTiles, totals: list[Buffer], place: Expr, middle: int) -> None:
    """The sums of each digit, which are what is left of those from it on without those from the next on, modulo 2^32."""
    wholes = [fold(builder, total, _LANES, lambda a, b: a + b) for total in totals]
    value = tirx.const(0, "float32")
    for digit, whole in enumerate(wholes):
        higher = wholes[digit + 1] * tirx.const(1 << _BITS, "int32") if digit + 1 < fixed.digits else tirx.const(0, "int32")
        own = builder.name(whole - higher)
        builder.store(fixed.starts, place * fixed.digits + digit, own * tirx.const(middle, "int32"))
        value = value + tirx.Cast("float32", own) * tirx.const(float(1 << (_BITS * digit)), "float32")
    builder.store(fixed.sums, place, value)
