"""MatMul and Gemm by stored weights on AMX: digits of rows, as lines of A, by tiles of unsigned bytes (TDPBSUD).

A thread takes panels of 32 columns, stretch by stretch, and multiplies each by the digits of all rows. Weights of 8 bits are read
where they lie, as their words are those of tiles; others, and sections that fill no whole tiles, become bytes in tiles in L1
first. Three digits, which are as exact as float32, are 1.5 times the products of bfloat16, and a quarter of those of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from tvm import tirx

from ...runtime.symbolic.sizes import Size
from ...runtime.target import Target
from ..codegen.builder import Expr, share
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.stored_weights import digit_tile_cycles
from ..groups.group import Group, Op
from ..microkernels.amx_blocks import tile_threads
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import COLUMNS, ROWS, S8U8_TILES, TILE_WORDS, WORDS, tile_unit
from ..microkernels.fixed_point import field_of
from ..microkernels.packed_gemm import Scratch
from ..microkernels.register_tile import WORK_PER_OPERATION
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.values import anchor_of
from .digit_tiles import DigitTiles, Stretches, cut_into_digits, stretches_of, tiles_of
from .fixed_point_matmul import BYTES_OF_PRECISION, OTHER_BYTES, ROW_BITS
from .stored_weights import BlockReader, Weights, WeightsKernel, scaled, stored_weights

_LONGEST_SECTION = 1024  # of weights that this kernel alone reads
_A, _B = (4, 5), (6, 7)  # tile registers of the operands; the accumulators are 0 to 3
_MEMORY_SHARE = 0.9  # of the rate at which vectors read words in order
_AHEAD_BYTES = 4096  # prefetch distance in a panel


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a product of float32 rows by constant integers with scales, with an epilogue of pointwise operators."""
    weights = stored_weights(group, target)
    if isinstance(weights, Refusal):
        return weights
    kernel = _DigitTilesKernel(group, anchor_of(group), target, weights)
    if isinstance(kernel.a.lines, Size):
        return Refusal("the number of rows is known only when it is called")
    if kernel.a.depth == 0 or kernel.a.lines == 0 or kernel.b.lines == 0:
        return Refusal("is empty")
    return Candidate(kernel.estimate(), kernel.build, stored_runs=(kernel.b.lines,))


@dataclass(frozen=True)
class _Tiles:
    """Tiles of B of a stretch of a panel, in words: their lines are `pitch` apart, those of the second 16 columns `half` behind
    the first; what is `ahead` of a line is prefetched with it, where that is not 0."""

    words: Scratch
    pitch: int
    half: int
    ahead: int


class _DigitTilesKernel(WeightsKernel):
    template = "fixed_point_tiles"

    def __init__(self, group: Group, anchor: Op, target: Target, weights: Weights) -> None:
        super().__init__(group, anchor, target, weights)
        is_rough = anchor.attribute(ROW_BITS, 0) == 8
        self.digits = 1 if is_rough else BYTES_OF_PRECISION.get(group.precision, OTHER_BYTES)
        self.panel_sections = self.sections(_LONGEST_SECTION, LINES)
        self.stretches: Stretches = stretches_of(self.panel_sections, weights.block, self.digits)
        self.unit = tile_unit(self.builder, target, S8U8_TILES)

    @property
    def reads_words(self) -> bool:
        """Whether tiles of B are loaded from the packed words."""
        s = self.panel_sections
        return self.weights.bits == 8 and s.words % ROWS == 0

    def estimate(self) -> Estimate:
        machine, rows, stretches = self.target.machine, self.a.lines, self.stretches
        tiles, size = tiles_of(rows, self.digits), (rows, self.b.lines, self.a.depth)
        cycles = digit_tile_cycles(
            size, tiles, self.digits, (stretches.steps, stretches.count), machine, is_unpacked=not self.reads_words
        )
        streamed = 4 * rows * (self.a.depth + self.b.lines)
        overlap = 1.0 / (ceil(tiles / 2) + (not self.reads_words))
        alone = Estimate(
            cycles, 2 * rows * self.b.lines * self.a.depth, 0, streamed, unit="tile", overlap=overlap, memory_share=_MEMORY_SHARE
        )
        whole = replace(with_bytes(alone, self.group), constant_bytes=self.constant_bytes)
        return with_epilogue(whole, self.group, machine, self.anchor)

    def build(self) -> BuiltKernel:
        builder, stretches, rows = self.builder, self.stretches, self.a.lines
        words, s = self.words(self.panel_sections), self.panel_sections
        fixed = cut_into_digits(builder, self.rows_of_a(), rows, stretches, self.digits, self.weights.usual_zero)
        store, flops = self.store(), 2 * rows * self.b.lines * self.a.depth
        threads = min(builder.threads_for(flops // WORK_PER_OPERATION), s.panels)
        tile_words = 0 if self.reads_words else stretches.steps * 2 * TILE_WORDS
        tiles = builder.workspace(threads * tile_words, "int32") if tile_words else None
        totals = builder.workspace(threads * rows * LINES, "float32")
        with tile_threads(builder, self.unit, threads, self.digits) as (thread, sums):
            begin, end = share(thread, threads, s.panels)
            result = Scratch(totals, builder.bind(thread * rows * LINES))
            with builder.loop(end - begin, name="panel") as number:
                panel = builder.bind(begin + number)
                scale, above = self._scales(panel)
                with builder.loop(stretches.count, name="stretch") as stretch:
                    count: Expr = stretches.joined * s.words
                    if s.count % stretches.joined:
                        count = builder.bind(tirx.min(s.count - stretch * stretches.joined, stretches.joined) * s.words)
                    source = Scratch(words, builder.bind((panel * s.count + stretch * stretches.joined) * (s.words * LINES)))
                    b = _Tiles(source, LINES, COLUMNS, _AHEAD_BYTES // 4)
                    if tiles is not None:
                        b = _Tiles(Scratch(tiles, builder.bind(thread * tile_words)), WORDS, TILE_WORDS, 0)
                        self._unpack(source, count, b.words)
                    steps = self._steps(count)
                    join = self._joiner(fixed, stretch, sums, result, (scale if self.weights.block else None, above))
                    for first, size, count in _chunks(rows):
                        with builder.loop(count, name="chunk") as chunk:
                            row = builder.bind(first + chunk * LINES)
                            tile = builder.bind(fixed.tile_at(stretch, tirx.floordiv(row, LINES) * fixed.chunk_tiles))
                            self._multiply(fixed, tile, size, b, sums, steps)
                            join(row, size)
                self._store_panel(panel, result, None if self.weights.block else scale, store)
        return self.finish(flops)

    def _scales(self, panel: Expr) -> tuple[BlockReader, BlockReader | None]:
        """Scales, and how much zero points are above the usual one, as functions of (section, column of the panel)."""
        weights = self.weights
        scale = self.reader(weights.scale, self.panel_sections, panel)
        if not weights.zero:
            return scale, None
        zero, usual = self.reader(weights.zero, self.panel_sections, panel), tirx.const(float(weights.usual_zero), "float32")
        return scale, lambda section, column: tirx.Cast("float32", zero(section, column)) - usual

    def _unpack(self, source: Scratch, count: Expr, to: Scratch) -> None:
        """Make tiles of bytes of `count` words of each column: [steps, columns' halves, 16 lines, 16 words]."""
        builder, s = self.builder, self.panel_sections
        with builder.loop(count, name="word") as word:
            origin = builder.bind(source.base + word * LINES)
            for half in range(2):
                builder.prefetch(source.buffer[origin + half * COLUMNS + _AHEAD_BYTES // 4])
            for half, field in product(range(2), range(s.fields)):
                line = builder.bind(word * s.fields + field)
                at = (tirx.floordiv(line, ROWS) * 2 + half) * TILE_WORDS + tirx.floormod(line, ROWS) * WORDS
                at = builder.bind(to.base + at)
                with builder.loop(WORDS, "vectorized", "lane") as lane:
                    builder.store(to.buffer, at + lane, field_of(source.buffer[origin + half * COLUMNS + lane], s.bits, field))

    def _steps(self, words: Expr) -> Expr:
        """Steps that so many words of a column are."""
        lines = words * self.panel_sections.fields + ROWS - 1
        return lines // ROWS if isinstance(lines, int) else self.builder.bind(tirx.floordiv(lines, ROWS))

    def _multiply(self, fixed: DigitTiles, tile: Expr, size: int, b: _Tiles, sums: Scratch, steps: Expr) -> None:
        """The sums of a chunk's digits: lines of 32, those of two tiles of A after another."""
        builder, tiles = self.builder, ceil(fixed.digits * size / ROWS)
        with builder.loop(tiles // 2, name="pair") as pair:
            self._multiply_tiles(fixed, builder.bind(tile + pair * (2 * self._pitch)), 2, b, sums, pair * (2 * ROWS), steps)
        if tiles % 2:
            line = (tiles - 1) * ROWS
            self._multiply_tiles(fixed, builder.bind(tile + (tiles - 1) * self._pitch), 1, b, sums, line, steps)

    @property
    def _pitch(self) -> int:
        """Words of a tile of A with all steps."""
        return self.stretches.steps * TILE_WORDS

    def _multiply_tiles(self, fixed: DigitTiles, a: Expr, halves: int, b: _Tiles, sums: Scratch, line: Expr, steps: Expr) -> None:
        unit, cells = self.unit, [(i, j) for i in range(halves) for j in range(2)]
        for i, j in cells:
            unit.zero(2 * i + j)
        with self.builder.loop(steps, name="step") as step:
            for i, j in cells:
                if j == 0:
                    unit.load(_A[i], fixed.words, a + i * self._pitch + step * TILE_WORDS, WORDS, is_streamed=True)
                if i == 0:
                    at = b.words.base + step * (2 * TILE_WORDS) + j * b.half
                    for row in range(ROWS if b.ahead else 0):
                        self.builder.prefetch(b.words.buffer[at + row * b.pitch + b.ahead])
                    unit.load(_B[j], b.words.buffer, at, b.pitch)
                unit.dot(2 * i + j, _A[i], _B[j])
        for i, j in cells:
            unit.store(2 * i + j, sums.buffer, sums.base + (line + i * ROWS) * LINES + j * COLUMNS, LINES)

    def _joiner(
        self,
        fixed: DigitTiles,
        stretch: Expr,
        sums: Scratch,
        result: Scratch,
        of_blocks: tuple[BlockReader | None, BlockReader | None],
    ) -> Callable[[Expr, int], None]:
        """What adds the sums of a chunk of rows (first row, rows) to the results."""
        builder, digits = self.builder, fixed.digits
        (scale, above), section = of_blocks, stretch * self.stretches.joined

        def join(first: Expr, size: int) -> None:
            with builder.loop(size, name="row") as r:
                place = builder.bind(stretch * fixed.rows + first + r)
                starts = [builder.bind(fixed.starts[place * digits + digit]) for digit in range(digits)]
                unit = builder.bind(fixed.scales[place])
                for half in range(2):
                    with builder.loop(WORDS, "vectorized", "lane") as lane:
                        column = half * COLUMNS + lane
                        value = tirx.const(0, "float32")
                        for digit in reversed(range(digits)):
                            own = tirx.Cast("float32", sums[(digit * size + r) * LINES + column] - starts[digit])
                            value = own if digit == digits - 1 else value * tirx.const(256.0, "float32") + own
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
