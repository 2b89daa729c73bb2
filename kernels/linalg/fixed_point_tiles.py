"""MatMul and Gemm by stored weights on AMX: digits of rows, as lines of A, by tiles of unsigned bytes (TDPBSUD).

A thread takes panels of 32 columns, stretch by stretch, and multiplies each by the digits of all rows. Weights of 8 bits are read
where they lie, as their words are those of tiles; others, and sections that fill no whole tiles, become bytes in tiles first, or
digits of a common unit (weight_tiles.py). Three digits, which are as exact as float32, are 1.5 times the products of bfloat16,
and a quarter of those of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from math import ceil
from operator import add

from tvm import tirx

from ...runtime.symbolic.sizes import Size
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.work_stealing import Shares
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.stored_weights import DigitWork, digit_tile_cycles
from ..groups.group import Group, Op
from ..microkernels.amx_blocks import tile_threads
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import COLUMNS, ROWS, S8U8_TILES, TILE_WORDS, WORDS, tile_unit
from ..microkernels.packed_gemm import Scratch
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.values import anchor_of
from .digit_tiles import LONGEST, LONGEST_ROUGH, DigitTiles, Stretches, cut_into_digits, stretches_of, tiles_of
from .fixed_point_matmul import BYTES_OF_PRECISION, OTHER_BYTES, ROW_BITS
from .stored_weights import BlockReader, Weights, WeightsKernel, scaled, stored_weights
from .weight_tiles import (
    DIGIT_MIDDLE,
    ColumnDigits,
    WeightTiles,
    kept_products,
    tile_blocks,
    tiles_in_place,
    tiles_in_scratch,
    unpack_bytes,
)

SCALES, BLOCKS, COLUMN_UNITS = "scales", "blocks", "columns"  # the choice of what is scaled: sums of blocks, or weights
_LONGEST_SECTION = 1024  # of weights that this kernel alone reads
_LONGEST_DIGITS = 512  # values of k whose digits are near: three of a panel are 48 KiB
_A, _B = (4, 5), (6, 7)  # tile registers of the operands; the accumulators are 0 to 3
_MEMORY_SHARE = 0.9  # of the rate at which vectors read words in order


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a product of float32 rows by constant integers with scales, with an epilogue of pointwise operators."""
    weights = stored_weights(group, target)
    if isinstance(weights, Refusal):
        return weights
    anchor = anchor_of(group)
    if any(isinstance(dim, Size) for dim in group.types[anchor.inputs[0]].shape):
        return Refusal("the number of rows is known only when it is called")
    kernel = _DigitTilesKernel(group, anchor, target, weights)
    if kernel.a.depth == 0 or kernel.a.lines == 0 or kernel.b.lines == 0:
        return Refusal("is empty")
    return Candidate(kernel.estimate(), kernel.build, stored_runs=(kernel.b.lines,))


class _DigitTilesKernel(WeightsKernel):
    template = "fixed_point_tiles"

    def __init__(self, group: Group, anchor: Op, target: Target, weights: Weights) -> None:
        super().__init__(group, anchor, target, weights)
        is_rough = anchor.attribute(ROW_BITS, 0) == 8
        self.digits = 1 if is_rough else BYTES_OF_PRECISION.get(group.precision, OTHER_BYTES)
        self.panel_sections = self.sections(_LONGEST_SECTION, LINES)
        ranked = sorted((False, True) if weights.block else (False,), key=self._cycles)
        self.has_units = self.builder.choose(SCALES, {COLUMN_UNITS if form else BLOCKS: form for form in ranked})
        self.stretches = self._stretches(self.has_units)
        self.b_digits = self._b_digits(self.has_units)
        self.unit = tile_unit(self.builder, target, S8U8_TILES)

    def _stretches(self, has_units: bool) -> Stretches:
        longest = LONGEST_ROUGH if self.digits == 1 else _LONGEST_DIGITS if has_units else LONGEST
        return stretches_of(self.panel_sections, 0 if has_units else self.weights.block, longest)

    def _b_digits(self, has_units: bool) -> int:
        """Digits of weights; 1: as they are."""
        return max(self.digits, 2) if has_units else 1

    def _reads_words(self, has_units: bool) -> bool:
        """Whether tiles of B are loaded from the packed words."""
        return self.weights.bits == 8 and self.panel_sections.words % ROWS == 0 and not has_units

    def _cycles(self, has_units: bool) -> float:
        rows, stretches, b_digits = self.a.lines, self._stretches(has_units), self._b_digits(has_units)
        pairs = alone = 0
        for _, size, count in _chunks(rows):
            tiles = ceil(self.digits * size / ROWS)
            for _, first in tile_blocks(tiles, size, self.digits, b_digits):
                pairs, alone = pairs + count * ((tiles - first) // 2), alone + count * ((tiles - first) % 2)
        work = DigitWork(pairs, alone, self.digits, b_digits, stretches.steps, stretches.count)
        extents = rows, self.b.lines, self.a.depth
        return digit_tile_cycles(extents, work, self.target.machine, is_unpacked=not self._reads_words(has_units))

    def estimate(self) -> Estimate:
        rows, tiles = self.a.lines, tiles_of(self.a.lines, self.digits)
        streamed, operations = 4 * rows * (self.a.depth + self.b.lines), 2 * rows * self.b.lines * self.a.depth
        overlap = 1.0 / (ceil(tiles / 2) + (not self._reads_words(self.has_units)))
        cycles = self._cycles(self.has_units)
        alone = Estimate(cycles, operations, 0, streamed, unit="tile", overlap=overlap, memory_share=_MEMORY_SHARE)
        whole = replace(with_bytes(alone, self.group), constant_bytes=self.constant_bytes)
        return with_epilogue(whole, self.group, self.target.machine, self.anchor)

    def build(self) -> BuiltKernel:
        builder, stretches, rows, s = self.builder, self.stretches, self.a.lines, self.panel_sections
        words, middle = self.words(s), DIGIT_MIDDLE if self.has_units else self.weights.usual_zero
        fixed = cut_into_digits(builder, self.rows_of_a(), rows, stretches, self.digits, middle)
        store, flops = self.store(), 2 * rows * self.b.lines * self.a.depth
        threads = min(builder.threads_for(self.work), s.panels)
        tile_words = 0 if self._reads_words(self.has_units) else self.b_digits * stretches.steps * 2 * TILE_WORDS
        scratch = builder.workspace(threads * tile_words, "int32")
        units = builder.workspace(threads * LINES, "float32")
        totals = builder.workspace(threads * rows * LINES, "float32")
        shares = Shares(builder, threads, s.panels, self.work)
        with tile_threads(builder, self.unit, threads, self.digits * self.b_digits) as (thread, sums):
            own, unit, result = (
                Scratch(buffer, builder.bind(thread * size))
                for buffer, size in ((scratch, tile_words), (units, LINES), (totals, rows * LINES))
            )
            with shares.of(thread) as (begin, end), builder.loop(end - begin, name="panel") as number:
                panel = builder.bind(begin + number)
                scales = self._scales(panel)
                with builder.loop(stretches.count, name="stretch") as stretch:
                    b, steps = self._tiles(panel, stretch, words, own, unit, scales)
                    of_sums = (scales[0] if self.weights.block else None, scales[1])
                    if self.has_units:
                        of_sums = (lambda _, column: unit[column]), None
                    join = self._joiner(fixed, stretch, sums, result, of_sums)
                    for first, size, count in _chunks(rows):
                        with builder.loop(count, name="chunk") as chunk:
                            row = builder.bind(first + chunk * LINES)
                            tile = builder.bind(fixed.tile_at(stretch, tirx.floordiv(row, LINES) * fixed.chunk_tiles))
                            self._multiply(fixed, tile, size, b, sums, steps)
                            join(row, size)
                self._store_panel(panel, result, None if self.weights.block else scales[0], store)
        return self.finish(flops)

    def _scales(self, panel: Expr) -> tuple[BlockReader, BlockReader | None]:
        """Scales, and how much zero points are above the usual one, as functions of (section, column of the panel)."""
        weights = self.weights
        scale = self.reader(weights.scale, self.panel_sections, panel)
        if not weights.zero:
            return scale, None
        zero, usual = self.reader(weights.zero, self.panel_sections, panel), tirx.const(float(weights.usual_zero), "float32")
        return scale, lambda section, column: tirx.Cast("float32", zero(section, column)) - usual

    def _tiles(
        self,
        panel: Expr,
        stretch: Expr,
        words: Buffer,
        scratch: Scratch,
        units: Scratch,
        scales: tuple[BlockReader, BlockReader | None],
    ) -> tuple[WeightTiles, Expr]:
        """Tiles of B of a stretch of a panel, and how many steps they have."""
        builder, stretches, s = self.builder, self.stretches, self.panel_sections
        section, sections = builder.bind(stretch * stretches.joined), stretches.joined
        if s.count % stretches.joined:
            sections = builder.bind(tirx.min(s.count - section, stretches.joined))
        source = Scratch(words, builder.bind((panel * s.count + section) * (s.words * LINES)))
        steps = self._steps(sections * s.words)
        if self._reads_words(self.has_units):
            return tiles_in_place(words, source.base), steps
        tiles = tiles_in_scratch(scratch, stretches)
        if self.has_units:
            digits = ColumnDigits(builder, s, self.b_digits, self.weights.usual_zero, *scales)
            digits.cut(section, sections, source, tiles, units)
        else:
            unpack_bytes(builder, s, source, sections * s.words, tiles)
        return tiles, steps

    def _steps(self, words: Expr) -> Expr:
        """Steps that so many words of a column are."""
        lines = words * self.panel_sections.fields + ROWS - 1
        return lines // ROWS if isinstance(lines, int) else self.builder.bind(tirx.floordiv(lines, ROWS))

    def _multiply(self, fixed: DigitTiles, tile: Expr, size: int, b: WeightTiles, sums: Scratch, steps: Expr) -> None:
        """The sums [digits of B, lines of A, 32 columns] of a chunk, two tiles of A at a time."""
        builder, tiles = self.builder, ceil(fixed.digits * size / ROWS)
        pitch = self.stretches.steps * TILE_WORDS
        for digit, first in tile_blocks(tiles, size, fixed.digits, self.b_digits):
            pairs, is_odd = divmod(tiles - first, 2)
            place = (digit * tiles + first) * ROWS
            with builder.loop(pairs, name="pair") as pair:
                a = builder.bind(tile + (first + pair * 2) * pitch)
                self._multiply_tiles(fixed, (a, 2), (b, digit), sums, place + pair * (2 * ROWS), steps)
            if is_odd:
                a, line = builder.bind(tile + (tiles - 1) * pitch), (digit * tiles + tiles - 1) * ROWS
                self._multiply_tiles(fixed, (a, 1), (b, digit), sums, line, steps)

    def _multiply_tiles(
        self, fixed: DigitTiles, a: tuple[Expr, int], b: tuple[WeightTiles, int], sums: Scratch, line: Expr, steps: Expr
    ) -> None:
        """`a`: the first tile, and how many; `b`: tiles, and the digit of them. Sums are stored from a line on."""
        unit, (base, halves), (tiles, digit), pitch = self.unit, a, b, self.stretches.steps * TILE_WORDS
        cells = [(i, j) for i in range(halves) for j in range(2)]
        for i, j in cells:
            unit.zero(2 * i + j)
        with self.builder.loop(steps, name="step") as step:
            for i, j in cells:
                if j == 0:
                    unit.load(_A[i], fixed.words, base + i * pitch + step * TILE_WORDS, WORDS, is_streamed=True)
                if i == 0:
                    at = tiles.tile(step, j, digit)
                    for row in range(ROWS if tiles.ahead else 0):
                        self.builder.prefetch(tiles.words.buffer[at + row * tiles.pitch + tiles.ahead])
                    unit.load(_B[j], tiles.words.buffer, at, tiles.pitch)
                unit.dot(2 * i + j, _A[i], _B[j])
        for i, j in cells:
            unit.store(2 * i + j, sums.buffer, sums.base + (line + i * ROWS) * LINES + j * COLUMNS, LINES)

    def _joiner(
        self,
        fixed: DigitTiles,
        stretch: Expr,
        sums: Scratch,
        result: Scratch,
        of_sums: tuple[BlockReader | None, BlockReader | None],
    ) -> Callable[[Expr, int], None]:
        """What adds the sums of a chunk of rows (first row, rows) to the results. `of_sums`: what they are multiplied by, and how
        much zero points are above the usual one."""
        builder, digits = self.builder, fixed.digits
        (scale, above), section = of_sums, stretch * self.stretches.joined
        kept = kept_products(digits, self.b_digits)
        least = float(1 << (8 * sum(kept[0][0])))

        def join(first: Expr, size: int) -> None:
            lines = ceil(digits * size / ROWS) * ROWS
            with builder.loop(size, name="row") as r:
                place = builder.bind(stretch * fixed.rows + first + r)
                starts = [builder.bind(fixed.starts[place * digits + digit]) for digit in range(digits)]
                unit = builder.bind(fixed.scales[place] * tirx.const(least, "float32"))
                for half in range(2):
                    with builder.loop(WORDS, "vectorized", "lane") as lane:
                        column, value = half * COLUMNS + lane, None
                        for pairs in reversed(kept):
                            parts = [sums[(j * lines + i * size + r) * LINES + column] - starts[i] for i, j in pairs]
                            own = tirx.Cast("float32", reduce(add, parts))
                            value = own if value is None else value * tirx.const(256.0, "float32") + own
                        if above is not None:
                            value = value - fixed.sums[place] * above(section, column)
                        value = value * unit
                        if scale is not None:
                            value = value * scale(section, column)
                        at = (first + r) * LINES + column
                        if self.stretches.count > 1:
                            value = tirx.Select(stretch > 0, result[at], tirx.const(0, "float32")) + value
                        builder.store(result.buffer, result.base + at, value)

        return join

    def _store_panel(
        self, panel: Expr, result: Scratch, scale: BlockReader | None, store: Callable[[Expr, Expr, Expr, Expr, Expr], None]
    ) -> None:
        """All rows of a panel: results, times the scales of their columns, through the epilogue."""
        builder = self.builder
        begin = builder.bind(panel * LINES)
        end = builder.bind(tirx.min(begin + LINES, self.b.lines))
        with builder.loop(self.a.lines, name="row") as row:
            line = builder.bind(row * LINES)

            def element(column: Expr) -> None:
                value = result[line + column - begin]
                if scale is not None:
                    value = scaled(value, scale(0, column - begin))
                store(0, row, 0, column, value)

            builder.dynamic_vector_loop(begin, end, WORDS, element)


def _chunks(rows: int) -> list[tuple[int, int, int]]:
    """Chunks of rows of one size: (first row, rows of a chunk, how many)."""
    whole, rest = divmod(rows, LINES)
    return [(0, LINES, whole)] * (whole > 0) + [(whole * LINES, rest, 1)] * (rest > 0)


__all__ = ["plan"]
