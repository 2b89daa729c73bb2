"""Products of float32 rows by weights of few bits through dot products of bytes (VPDPBUSD), as exact as those of float32.

A section of a row is written as integers of one scale, the largest element of the section by 2^23, and each integer as three
signed digits of base 256. A digit by weights of 8 or fewer bits is bytes by bytes, whose sums in 32 bits are exact, so that
the only error is the rounding of the row, at most 2^-24 of the section's largest element: that of float32 itself. (Block floating
point: Wilkinson, Rounding Errors in Algebraic Processes, 1963; slices of integers for exact products: Ozaki et al., Error-free
transformations of matrix multiplication, Numer. Algorithms 59, 2012.) Three dot products take 64 numbers, of which float32
takes twelve instructions: conversions and multiply-adds. Fewer digits are faster: two have 16 bits, one is a row of int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..formats import int8
from .register_tile import Tile
from .weight_packing import Sections

LANES = 16  # of a dot product's vectors
_BASE_BITS = 8  # of a digit
_LARGEST = {1: 127, 2: 32639, 3: 8355000}  # of signed digits; three have some room for the rounding of the scale
_LEAST = 2.0**-102  # of a section's largest element: below, scales would be subnormal
_INFINITY = 0x7F800000  # the bits of the least float32 that is not finite
_CHUNK = 64  # elements that are made into words at a time
_AHEAD_BYTES = 4096  # prefetch distance in a panel: hardware prefetches no further than the page it reads
_UNROLLED = 96  # dot products of an unrolled loop over words


def longest_section(bits: int, digits: int) -> int:
    """Elements of a section, at most: sums of two digits stay in 32 bits."""
    return 256 if digits == 1 or bits < 8 else 128


@dataclass(frozen=True)
class FixedRows:
    """Rows of A as integers by sections.

    `words` are the digits, four neighbours along k a word: [rows, sections, digits, words of a section]. `scales`
    [rows, sections] are the units of the lowest digit, NaN where a section has an element that is not finite. `starts`
    [rows, sections, 2] are what the sums of the lower digits, and of the third, begin with: what the usual zero point, which is
    too much in each weight, adds to them, negated. `sums` [rows, sections] are those of the integers, as float32.
    """

    digits: int
    sections: Sections
    words: Buffer
    scales: Buffer
    starts: Buffer
    sums: Buffer

    @property
    def section_words(self) -> int:
        """Words of one digit of a section."""
        return self.sections.words * self.sections.fields

    def word(self, row: Expr, section: Expr, digit: int, word: Expr) -> Expr:
        return self.words[((row * self.sections.count + section) * self.digits + digit) * self.section_words + word]


def fix_rows(builder: KernelBuilder, source: Buffer, rows: int, sections: Sections, digits: int, middle: int) -> FixedRows:
    """Emit what makes integers of `rows` rows of float32, which lie one behind the other in `source`."""
    count, padded = sections.count, sections.words * sections.numbers
    fixed = FixedRows(
        digits,
        sections,
        builder.workspace(rows * count * digits * padded // 4, "int32"),
        builder.workspace(rows * count, "float32"),
        builder.workspace(rows * count * 2, "int32"),
        builder.workspace(rows * count, "float32"),
    )
    pitch = sections.depth
    if count * padded != pitch:
        source, pitch = _padded(builder, source, rows, sections), count * padded
    with builder.chunks(rows * count, rows * sections.depth) as place:
        row, section = builder.bind(tirx.floordiv(place, count)), builder.bind(tirx.floormod(place, count))
        _fix_section(builder, fixed, source, builder.bind(row * pitch + section * padded), place, middle)
    return fixed


def _padded(builder: KernelBuilder, source: Buffer, rows: int, sections: Sections) -> Buffer:
    """A copy of rows whose sections are padded with zeros to whole words."""
    count, length, padded = sections.count, sections.length, sections.words * sections.numbers
    copy, lanes = builder.workspace(rows * count * padded, "float32"), builder.lanes("float32")
    zero = tirx.const(0, "float32")
    with builder.chunks(rows * count, rows * sections.depth) as place:
        row, section = builder.bind(tirx.floordiv(place, count)), builder.bind(tirx.floormod(place, count))
        origin, target = builder.bind(row * sections.depth + section * length), builder.bind(place * padded)
        size = builder.bind(tirx.min(sections.depth - section * length, length))
        builder.dynamic_vector_loop(0, size, lanes, lambda i: builder.store(copy, target + i, source[origin + i]))
        with builder.loop(padded - size, name="i") as i:
            builder.store(copy, target + size + i, zero)
    return copy


def _fix_section(builder: KernelBuilder, fixed: FixedRows, source: Buffer, origin: Expr, place: Expr, middle: int) -> None:
    """One section of a row, from element `origin` of the source on."""
    padded = fixed.sections.words * fixed.sections.numbers
    largest = _largest(builder, source, origin, padded)
    limit = tirx.const(_LARGEST[fixed.digits], "float32")
    is_finite = largest < tirx.const(_INFINITY, "int32")
    unit = builder.name(tirx.max(tirx.reinterpret("float32", largest), tirx.const(_LEAST, "float32")) / limit)
    factor = builder.name(tirx.const(1.0, "float32") / unit)
    builder.store(fixed.scales, place, tirx.Select(is_finite, unit, tirx.const(float("nan"), "float32")))
    numbers = builder.local(padded, "int32", "numbers")
    for begin, lanes in _chunks(padded, LANES):
        with builder.loop(lanes, "vectorized", "lane") as lane:
            scaled = tirx.nearbyint(source[origin + begin + lane] * factor)
            builder.store(numbers, begin + lane, tirx.Cast("int32", scaled))
    for digit in range(fixed.digits):
        below = sum(1 << (_BASE_BITS * (one + 1) - 1) for one in range(digit))  # what the digits below may carry
        for begin, lanes in _chunks(padded, _CHUNK):
            vector = numbers[tirx.Ramp(begin, 1, lanes)]
            if digit:
                vector = (vector + tirx.Broadcast(tirx.const(below, "int32"), lanes)) >> tirx.Broadcast(
                    tirx.const(_BASE_BITS * digit, "int32"), lanes
                )
            at = builder.bind((place * fixed.digits + digit) * fixed.section_words + begin // 4)
            _store_words(builder, fixed.words, at, tirx.Cast(f"int8x{lanes}", vector), lanes)
    _store_starts(builder, fixed, numbers, padded, place, middle)


def _store_words(builder: KernelBuilder, to: Buffer, at: Expr, vector: Expr, lanes: int) -> None:
    """Store neighbouring bytes as words."""
    if lanes == 4:
        builder.store(to, at, tirx.reinterpret("int32", vector))
        return
    builder.store(to, tirx.Ramp(at, 1, lanes // 4), tirx.reinterpret(f"int32x{lanes // 4}", vector))


def _store_starts(builder: KernelBuilder, fixed: FixedRows, numbers: Buffer, padded: int, place: Expr, middle: int) -> None:
    total = _added_up(builder, numbers, padded, lambda vector, lanes: vector)
    builder.store(fixed.sums, place, tirx.Cast("float32", total))
    minus, high = tirx.const(-middle, "int32"), tirx.const(0, "int32")
    if fixed.digits == 3:
        carry, shift = tirx.const(0x8080, "int32"), tirx.const(2 * _BASE_BITS, "int32")
        high = _added_up(
            builder, numbers, padded, lambda v, lanes: (v + tirx.Broadcast(carry, lanes)) >> tirx.Broadcast(shift, lanes)
        )
        builder.store(fixed.starts, place * 2 + 1, high * minus)
        total = total - (high << shift)
    builder.store(fixed.starts, place * 2, total * minus)


def _largest(builder: KernelBuilder, source: Buffer, origin: Expr, padded: int) -> Expr:
    """The bits of the largest magnitude of a section, which order as the magnitudes do, and NaN above all of them."""
    sign = tirx.const(0x7FFFFFFF, "int32")

    def magnitude(begin: int, lanes: int) -> Expr:
        return tirx.reinterpret(f"int32x{lanes}", source[tirx.Ramp(origin + begin, 1, lanes)]) & tirx.Broadcast(sign, lanes)

    return _folded(builder, padded, magnitude, tirx.max)


def _added_up(builder: KernelBuilder, numbers: Buffer, padded: int, element: Callable[[Expr, int], Expr]) -> Expr:
    return _folded(builder, padded, lambda at, lanes: element(numbers[tirx.Ramp(at, 1, lanes)], lanes), lambda a, b: a + b)


def _folded(builder: KernelBuilder, extent: int, vector: Callable[[int, int], Expr], join: Callable[[Expr, Expr], Expr]) -> Expr:
    """All int32 elements, given as vectors, joined into one."""
    lanes = next(lanes for lanes in (16, 8, 4) if extent % lanes == 0)
    parts = builder.local(lanes, "int32", "parts")
    total = vector(0, lanes)
    for begin in range(lanes, extent, lanes):
        total = join(total, vector(begin, lanes))
    builder.store(parts, tirx.Ramp(0, 1, lanes), total)
    while lanes > 2:
        lanes //= 2
        builder.store(parts, tirx.Ramp(0, 1, lanes), join(parts[tirx.Ramp(0, 1, lanes)], parts[tirx.Ramp(lanes, 1, lanes)]))
    return builder.name(join(parts[0], parts[1]))


def _chunks(extent: int, widest: int) -> list[tuple[int, int]]:
    """Runs (begin, lanes) of powers of two that cover a multiple of four."""
    found, begin, lanes = [], 0, widest
    while begin < extent:
        while lanes > extent - begin:
            lanes //= 2
        found.append((begin, lanes))
        begin += lanes
    return found


@dataclass(frozen=True)
class BlockScales:
    """What a section's sums are multiplied by, and how much its zero point is above `middle`, as functions of (section, column of
    the panel); None: 1, and 0."""

    scale: Callable[[Expr, Expr], Expr] | None
    zero: Callable[[Expr, Expr], Expr] | None


def multiply_sections(
    builder: KernelBuilder, tile: Tile, fixed: FixedRows, rows: list[Expr], panel: tuple[Buffer, Expr], blocks: BlockScales
) -> Buffer:
    """The micro-kernel: float32 sums [rows, columns] of a register tile of these rows by a panel (buffer, first word)."""
    sections, cells = fixed.sections, [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]
    totals = builder.local(tile.rows * tile.columns, "float32", "totals")
    for r, v in cells:
        with builder.loop(LANES, "vectorized", "lane") as lane:
            builder.store(totals, r * tile.columns + v * LANES + lane, tirx.const(0, "float32"))
    with builder.loop(sections.count, name="section") as section:
        sums = _section_sums(builder, tile, fixed, rows, panel, section)
        for r, v in cells:
            place = builder.bind(rows[r] * sections.count + section)
            with builder.loop(LANES, "vectorized", "lane") as lane:
                at, first = r * tile.columns + v * LANES + lane, (r * tile.vectors + v) * fixed.digits * LANES + lane
                value = _joined(fixed.digits, [sums[first + d * LANES] for d in range(fixed.digits)])
                column = v * LANES + lane
                if blocks.zero is not None:
                    value = value - fixed.sums[place] * blocks.zero(section, column)
                value = value * fixed.scales[place]
                if blocks.scale is not None:
                    value = value * blocks.scale(section, column)
                builder.store(totals, at, totals[at] + value)
    return totals


def _section_sums(
    builder: KernelBuilder, tile: Tile, fixed: FixedRows, rows: list[Expr], panel: tuple[Buffer, Expr], section: Expr
) -> Buffer:
    """The exact sums of a section's digits: [rows, vectors, digits] of vectors."""
    s, digits = fixed.sections, fixed.digits
    sums = builder.local(tile.rows * tile.vectors * digits * LANES, "int32", "acc")
    for r in range(tile.rows):
        place = builder.bind((rows[r] * s.count + section) * 2)
        for v in range(tile.vectors):
            for d in range(digits):
                start = fixed.starts[place + (d == 2)] if d in (0, 2) else tirx.const(0, "int32")
                with builder.loop(LANES, "vectorized", "lane") as lane:
                    builder.store(sums, ((r * tile.vectors + v) * digits + d) * LANES + lane, start)
    buffer, base = panel
    dots = s.words * s.fields * tile.rows * tile.vectors * digits
    with builder.loop(s.words, "unrolled" if dots <= _UNROLLED else "serial", name="word") as word:
        origin = builder.bind(base + (section * s.words + word) * s.tile)
        for line in range(0, tile.columns, LINE_BYTES // 4):
            builder.prefetch(buffer[origin + (_AHEAD_BYTES // 4 + line)])
        for v in range(tile.vectors):
            with builder.loop(LANES, "vectorized", "lane") as lane:
                packed = builder.name(buffer[origin + v * LANES + lane])
                for field in range(s.fields):
                    four = builder.name(_field(packed, s.bits, field))
                    for r in range(tile.rows):
                        for d in range(digits):
                            at = ((r * tile.vectors + v) * digits + d) * LANES + lane
                            factor = fixed.word(rows[r], section, d, word * s.fields + field)
                            builder.store(sums, at, int8.dot(sums[at], four, factor))
    return sums


def _field(word: Expr, bits: int, field: int) -> Expr:
    """Four numbers of a word, one in each byte."""
    if bits == _BASE_BITS:
        return word
    mask = tirx.const(((1 << bits) - 1) * 0x01010101, "int32")
    return ((word >> tirx.const(bits * field, "int32")) if field else word) & mask


def _joined(digits: int, sums: list[Expr]) -> Expr:
    """The sum of the integers, as float32, of those of their digits."""
    low = sums[0] if digits == 1 else (sums[1] << tirx.const(_BASE_BITS, "int32")) + sums[0]
    value = tirx.Cast("float32", low)
    if digits < 3:
        return value
    return value + tirx.Cast("float32", sums[2]) * tirx.const(float(1 << 2 * _BASE_BITS), "float32")
