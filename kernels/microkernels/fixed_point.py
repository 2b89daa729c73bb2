"""Products of float32 rows by weights of few bits through multiply-adds of integers, as exact as those of float32.

A section of a row is written as integers of one scale, the largest element of the section by 2^23, and each integer as signed
digits: three of base 256, or two of base 65536 (`DigitUnit`). Sums of digits by weights of 8 or fewer bits are exact in 32
bits, so that the only error is the rounding of the row, at most 2^-24 of the section's largest element: that of float32 itself.
(Block floating point: Wilkinson, Rounding Errors in Algebraic Processes, 1963; slices of integers for exact products: Ozaki et
al., Error-free transformations of matrix multiplication, Numer. Algorithms 59, 2012.) By VPDPBUSD three dot products take 64
numbers, of which float32 takes twelve instructions: conversions and multiply-adds. Rows of fewer bytes are faster: two keep 16
bits, one is a row of int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..formats.digits import DigitUnit
from .register_tile import Tile
from .weight_packing import Sections

_BYTE_BITS = 8
LARGEST = {1: 127, 2: 32639, 3: 8355000}  # by bytes, of signed digits; three have some room for the rounding of the scale
_HIGH_BITS = 16  # below the digit that is added as float32: what has more does not fit into 32 bits with its sum
_LEAST = 2.0**-102  # of a section's largest element: below, scales would be subnormal
_INFINITY = 0x7F800000  # the bits of the least float32 that is not finite
_CHUNK = 64  # elements that are made into words at a time
_AHEAD_BYTES = 4096  # prefetch distance in a panel: hardware prefetches no further than the page it reads
_UNROLLED = 96  # products of an unrolled loop over words
_WORD_BITS = 32


def longest_section(bits: int, row_bytes: int) -> int:
    """Elements of a section, at most: sums of 16 bits of rows stay in 32 bits."""
    return 256 if row_bytes == 1 or bits < _BYTE_BITS else 128


@dataclass(frozen=True)
class FixedRows:
    """Rows of A as integers of `row_bytes` bytes by sections.

    `words` are the digits: [rows, sections, digits, planes, words of a section], four neighbours along k a word, or of 16 bits
    those at even places in one plane and the others in the next. `scales` [rows, sections] are the units of the lowest digit,
    NaN where a section has an element that is not finite. `starts` [rows, sections, 2] are what the sums of the lowest digit, and
    of the one from 2^16 on, begin with: what the usual zero point, which is too much in each weight, adds to them, negated.
    `sums` [rows, sections] are those of the integers, as float32.
    """

    unit: DigitUnit
    row_bytes: int
    sections: Sections
    words: Buffer
    scales: Buffer
    starts: Buffer
    sums: Buffer

    @property
    def digits(self) -> int:
        return self.unit.digits(self.row_bytes)

    @property
    def has_high(self) -> bool:
        """Whether the last digit is one from 2^16 on."""
        return self.row_bytes * _BYTE_BITS > _HIGH_BITS

    @property
    def section_words(self) -> int:
        """Words of one plane of a digit of a section."""
        return self.sections.words * self.sections.fields

    def factors(self, row: Expr, section: Expr, digit: int, word: Expr) -> list[Expr]:
        """What a word of weights meets of a digit: one word of each plane."""
        planes = self.unit.planes
        first = ((row * self.sections.count + section) * self.digits + digit) * planes
        return [self.words[(first + plane) * self.section_words + word] for plane in range(planes)]


def fix_rows(
    builder: KernelBuilder, source: Buffer, rows: int, sections: Sections, unit: DigitUnit, row_bytes: int, middle: int
) -> FixedRows:
    """Emit what makes integers of `rows` rows of float32, which lie one behind the other in `source`."""
    count, padded = sections.count, sections.words * sections.numbers
    fixed = FixedRows(
        unit,
        row_bytes,
        sections,
        builder.workspace(rows * count * unit.digits(row_bytes) * unit.planes * padded // 4, "int32"),
        builder.workspace(rows * count, "float32"),
        builder.workspace(rows * count * 2, "int32"),
        builder.workspace(rows * count, "float32"),
    )
    pitch = sections.depth
    if count * padded != pitch:
        source, pitch = padded_rows(builder, source, rows, sections.depth, sections.length, padded), count * padded
    with builder.chunks(rows * count, rows * sections.depth) as place:
        row, section = builder.bind(tirx.floordiv(place, count)), builder.bind(tirx.floormod(place, count))
        _fix_section(builder, fixed, source, builder.bind(row * pitch + section * padded), place, middle)
    return fixed


def padded_rows(builder: KernelBuilder, source: Buffer, rows: int, depth: int, length: int, padded: int) -> Buffer:
    """A copy of rows of `depth` elements whose stretches of `length` are filled up with zeros to `padded`."""
    count, lanes = -(-depth // length), builder.lanes("float32")
    copy, zero = builder.workspace(rows * count * padded, "float32"), tirx.const(0, "float32")
    with builder.chunks(rows * count, rows * depth) as place:
        row, number = builder.bind(tirx.floordiv(place, count)), builder.bind(tirx.floormod(place, count))
        origin, target = builder.bind(row * depth + number * length), builder.bind(place * padded)
        size = builder.bind(tirx.min(depth - number * length, length))
        builder.dynamic_vector_loop(0, size, lanes, lambda i: builder.store(copy, target + i, source[origin + i]))
        with builder.loop(padded - size, name="i") as i:
            builder.store(copy, target + size + i, zero)
    return copy


def _fix_section(builder: KernelBuilder, fixed: FixedRows, source: Buffer, origin: Expr, place: Expr, middle: int) -> None:
    """One section of a row, from element `origin` of the source on."""
    padded = fixed.sections.words * fixed.sections.numbers
    largest = _largest(builder, source, origin, padded)
    factor = store_unit(builder, largest, fixed.row_bytes, (fixed.scales, place))
    numbers = builder.local(padded, "int32", "numbers")
    for begin, lanes in _chunks(padded, fixed.unit.lanes):
        with builder.loop(lanes, "vectorized", "lane") as lane:
            scaled = tirx.nearbyint(source[origin + begin + lane] * factor)
            builder.store(numbers, begin + lane, tirx.Cast("int32", scaled))
    bits, planes = fixed.unit.digit_bits, fixed.unit.planes
    for digit, plane in product(range(fixed.digits), range(planes)):
        base = builder.bind(((place * fixed.digits + digit) * planes + plane) * fixed.section_words)
        for begin, lanes in _chunks(padded // planes, _CHUNK * _BYTE_BITS // bits):
            vector = numbers[tirx.Ramp(begin * planes + plane, planes, lanes)]
            if digit:
                carry, shift = (tirx.const(number, "int32") for number in (carry_of(bits, digit), bits * digit))
                vector = (vector + tirx.Broadcast(carry, lanes)) >> tirx.Broadcast(shift, lanes)
            store_words(builder, fixed.words, base + begin * bits // _WORD_BITS, tirx.Cast(f"int{bits}x{lanes}", vector), bits)
    _store_starts(builder, fixed, numbers, padded, place, middle)


def store_unit(builder: KernelBuilder, largest: Expr, row_bytes: int, to: tuple[Buffer, Expr]) -> Expr:
    """Store the unit of the lowest digit of numbers whose largest magnitude has these bits, NaN where it is not finite; what
    numbers are multiplied by to be integers."""
    limit = tirx.const(LARGEST[row_bytes], "float32")
    is_finite = largest < tirx.const(_INFINITY, "int32")
    unit = builder.name(tirx.max(tirx.reinterpret("float32", largest), tirx.const(_LEAST, "float32")) / limit)
    factor = builder.name(tirx.const(1.0, "float32") / unit)
    builder.store(*to, tirx.Select(is_finite, unit, tirx.const(float("nan"), "float32")))
    return factor


def carry_of(bits: int, digit: int) -> int:
    """What digits of `bits` bits below one may carry to it."""
    return sum(1 << (bits * (one + 1) - 1) for one in range(digit))


def store_words(builder: KernelBuilder, to: Buffer, at: Expr, vector: Expr, bits: int) -> None:
    """Store neighbouring digits of 8 or 16 bits as words."""
    words = vector.ty.dtype.lanes * bits // _WORD_BITS
    if words == 1:
        builder.store(to, at, tirx.reinterpret("int32", vector))
        return
    builder.store(to, tirx.Ramp(at, 1, words), tirx.reinterpret(f"int32x{words}", vector))


def _store_starts(builder: KernelBuilder, fixed: FixedRows, numbers: Buffer, padded: int, place: Expr, middle: int) -> None:
    total = _added_up(builder, numbers, padded, lambda vector, lanes: vector)
    builder.store(fixed.sums, place, tirx.Cast("float32", total))
    minus, high = tirx.const(-middle, "int32"), tirx.const(0, "int32")
    if fixed.has_high:
        bits = fixed.unit.digit_bits
        carry, shift = tirx.const(carry_of(bits, _HIGH_BITS // bits), "int32"), tirx.const(_HIGH_BITS, "int32")
        high = _added_up(
            builder, numbers, padded, lambda v, lanes: (v + tirx.Broadcast(carry, lanes)) >> tirx.Broadcast(shift, lanes)
        )
        builder.store(fixed.starts, place * 2 + 1, high * minus)
        total = total - (high << shift)
    builder.store(fixed.starts, place * 2, total * minus)


def _largest(builder: KernelBuilder, source: Buffer, origin: Expr, padded: int) -> Expr:
    """The bits of the largest magnitude of a section."""
    return _folded(builder, padded, lambda begin, lanes: magnitudes(source, origin + begin, lanes), tirx.max)


def magnitudes(source: Buffer, at: Expr, lanes: int) -> Expr:
    """The bits of the magnitudes of neighbours, which order as the magnitudes do, and NaN above all of them."""
    sign = tirx.Broadcast(tirx.const(0x7FFFFFFF, "int32"), lanes)
    return tirx.reinterpret(f"int32x{lanes}", source[tirx.Ramp(at, 1, lanes)]) & sign


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
    return fold(builder, parts, lanes, join)


def fold(builder: KernelBuilder, parts: Buffer, lanes: int, join: Callable[[Expr, Expr], Expr]) -> Expr:
    """The first `lanes` elements of a local array, joined into one; they are overwritten."""
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
    sections, lanes = fixed.sections, fixed.unit.lanes
    cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]
    totals = builder.local(tile.rows * tile.columns, "float32", "totals")
    for r, v in cells:
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(totals, r * tile.columns + v * lanes + lane, tirx.const(0, "float32"))
    with builder.loop(sections.count, name="section") as section:
        sums = _section_sums(builder, tile, fixed, rows, panel, section)
        for r, v in cells:
            place = builder.bind(rows[r] * sections.count + section)
            with builder.loop(lanes, "vectorized", "lane") as lane:
                at, first = r * tile.columns + v * lanes + lane, (r * tile.vectors + v) * fixed.digits * lanes + lane
                value = _joined(fixed, [sums[first + d * lanes] for d in range(fixed.digits)])
                column = v * lanes + lane
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
    s, digits, lanes = fixed.sections, fixed.digits, fixed.unit.lanes
    sums = builder.local(tile.rows * tile.vectors * digits * lanes, "int32", "acc")
    for r in range(tile.rows):
        place = builder.bind((rows[r] * s.count + section) * 2)
        for v in range(tile.vectors):
            for d in range(digits):
                is_high = fixed.has_high and d == digits - 1
                start = fixed.starts[place + int(is_high)] if d == 0 or is_high else tirx.const(0, "int32")
                with builder.loop(lanes, "vectorized", "lane") as lane:
                    builder.store(sums, ((r * tile.vectors + v) * digits + d) * lanes + lane, start)
    buffer, base = panel
    at_once = _words_at_once(fixed.unit, s)
    products = s.words * s.fields * tile.rows * tile.vectors * digits
    with builder.loop(s.words // at_once, "unrolled" if products <= _UNROLLED else "serial", name="word") as group:
        words = [builder.bind(group * at_once + one) for one in range(at_once)]
        origins = [builder.bind(base + (section * s.words + word) * s.tile) for word in words]
        for origin, line in product(origins, range(0, tile.columns, LINE_BYTES // 4)):
            builder.prefetch(buffer[origin + (_AHEAD_BYTES // 4 + line)])
        for v in range(tile.vectors):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                packed = [builder.name(buffer[origin + v * lanes + lane]) for origin in origins]
                fields = [builder.name(field_of(one, s.bits, field)) for one in packed for field in range(s.fields)]
                numbers = [word * s.fields + field for word in words for field in range(s.fields)]
                for r, d in product(range(tile.rows), range(digits)):
                    at = ((r * tile.vectors + v) * digits + d) * lanes + lane
                    factors = [fixed.factors(rows[r], section, d, number) for number in numbers]
                    builder.store(sums, at, fixed.unit.multiply(sums[at], fields, factors))
    return sums


def _words_at_once(unit: DigitUnit, sections: Sections) -> int:
    """Words whose products are added before they meet the sum, to fill the unit's chain: a divisor of a section's words."""
    most = max(unit.chain // sections.fields, 1)
    return next(count for count in range(most, 0, -1) if sections.words % count == 0)


def field_of(word: Expr, bits: int, field: int) -> Expr:
    """Four numbers of a word, one in each byte."""
    if bits == _BYTE_BITS:
        return word
    mask = tirx.const(((1 << bits) - 1) * 0x01010101, "int32")
    return ((word >> tirx.const(bits * field, "int32")) if field else word) & mask


def _joined(fixed: FixedRows, sums: list[Expr]) -> Expr:
    """The sum of the integers, as float32, of those of their digits."""
    *lower, high = sums if fixed.has_high else [*sums, None]
    low = lower[0]
    for number, one in enumerate(lower[1:], 1):
        low = (one << tirx.const(fixed.unit.digit_bits * number, "int32")) + low
    value = tirx.Cast("float32", low)
    if high is None:
        return value
    return value + tirx.Cast("float32", high) * tirx.const(float(1 << _HIGH_BITS), "float32")
