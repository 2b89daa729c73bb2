"""MatMul and Gemm of few rows by stored weights on multiply-adds of float32: words become float32 in registers and meet all rows.

A number of a word is moved to its upper end and back, by shifts that keep its sign, and converted: three operations a vector,
beside a multiply-add for each row. Nothing is written but results, and scales meet sums. Where there are no dot products of
bytes, that is less from some six rows on than digits of these take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ...runtime.symbolic.sizes import estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.stored_weights import unpacked_cycles, unpacked_tiles
from ..groups.group import Group
from ..microkernels.fixed_point import BlockScales, padded_rows
from ..microkernels.register_tile import Tile
from ..microkernels.weight_packing import Sections
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import machine_of
from .stored_weights import WeightsKernel, planned

_LONGEST_SECTION = 128  # elements of k that are added to one sum before it meets the total
_AHEAD_BYTES = 4096  # of words that are prefetched: the hardware does it within a page only
_WORD_BITS, _BYTE_BITS, _BYTES = 32, 8, 4


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a product of float32 rows by constant integers with scales, with an epilogue of pointwise operators."""
    return planned(_RowsKernel, group, target)


class _RowsKernel(WeightsKernel):
    template = "dequantized_rows"

    def _tiles(self) -> dict[str, Tile]:
        """Register tiles, those with the fewest cycles first."""
        machine = machine_of(self.target, "float32")
        found = unpacked_tiles(self.a.lines, self.sections(_LONGEST_SECTION, machine.lanes), machine)
        tiles = {str(tile): tile for tile in (Tile(*shape, machine.lanes) for shape in found)}
        wide = {name: self.sections(_LONGEST_SECTION, tile.columns).tile for name, tile in tiles.items()}
        return {name: tile for name, tile in tiles.items() if wide[name] % tile.columns == 0}

    @estimating
    def estimate(self) -> Estimate:
        machine, tile = machine_of(self.target, "float32"), next(iter(self._tiles().values()))
        sections = self.sections(_LONGEST_SECTION, tile.columns)
        cycles = unpacked_cycles((tile.rows, tile.vectors), self.a.lines, sections, machine)
        streamed = 4 * self.a.lines * (self.a.depth + self.b.lines)
        operations = 2 * self.a.lines * self.b.lines * self.a.depth
        alone = Estimate(cycles, operations, 0, streamed, overlap=min(tile.rows / hint_of(self.a.lines), 1.0))
        whole = replace(with_bytes(alone, self.group), constant_bytes=self.constant_bytes)
        return with_epilogue(whole, self.group, machine, self.anchor)

    def build(self) -> BuiltKernel:
        builder, tile = self.builder, self.builder.choose("tile", self._tiles())
        sections, rows = self.sections(_LONGEST_SECTION, tile.columns), self.a.lines
        words, a = self.words(sections), self.rows_of_a()
        padded = sections.words * sections.numbers
        if sections.count * padded != sections.depth:
            a = padded_rows(builder, a, rows, sections.depth, sections.length, padded)
        half = 1 << (self.weights.bits - 1)
        has_zeros = bool(self.weights.zero) or self.weights.middle != half
        product = _Product(builder, tile, sections, a, self._row_sums(sections, a) if has_zeros else None)
        self.each_tile(tile, sections, words, product.totals)
        return self.finish(2 * rows * self.b.lines * self.a.depth)

    def _row_sums(self, sections: Sections, a: Buffer) -> Buffer:
        """The sums of the sections of all rows: what zero points are multiplied by."""
        builder, rows, padded = self.builder, self.a.lines, sections.words * sections.numbers
        sums, lanes = builder.workspace(rows * sections.count, "float32"), builder.lanes("float32")
        while padded % lanes:
            lanes //= 2
        with builder.chunks(rows * sections.count, rows * sections.depth) as place:
            origin, parts = builder.bind(place * padded), builder.local(lanes, "float32", "parts")
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(parts, lane, a[origin + lane])
            with builder.loop(padded // lanes - 1, name="run") as run, builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(parts, lane, parts[lane] + a[origin + (run + 1) * lanes + lane])
            total = parts[0]
            for one in range(1, lanes):
                total = total + parts[one]
            builder.store(sums, place, total)
        return sums


@dataclass(frozen=True)
class _Product:
    """Register tiles of rows, which lie in `a` by padded sections, by words. `row_sums` are those of the rows' sections, where
    zero points are not the middle of the weights' range."""

    builder: KernelBuilder
    tile: Tile
    sections: Sections
    a: Buffer
    row_sums: Buffer | None

    def totals(self, rows: list[Expr], panel: tuple[Buffer, Expr], blocks: BlockScales) -> Buffer:
        """The micro-kernel: float32 sums [rows, columns] of these rows by a panel (buffer, first word)."""
        builder, tile, s = self.builder, self.tile, self.sections
        totals = self._zeros("totals")
        lines = [builder.bind(row * (s.count * s.words * s.numbers)) for row in rows]
        with builder.loop(s.count, name="section") as section:
            sums = self._zeros("acc")
            with builder.loop(s.words, name="word") as number:
                word = builder.bind(section * s.words + number)
                self._add_word(sums, [builder.bind(line + word * s.numbers) for line in lines], panel, word)
            for r, row in enumerate(rows):
                of_row = None if self.row_sums is None else builder.name(self.row_sums[row * s.count + section])
                for v in range(tile.vectors):
                    with builder.loop(tile.lanes, "vectorized", "lane") as lane:
                        column, at = v * tile.lanes + lane, (r * tile.vectors + v) * tile.lanes + lane
                        value = sums[at] if of_row is None else sums[at] - of_row * self._above(blocks, section, column)
                        value = value if blocks.scale is None else value * blocks.scale(section, column)
                        builder.store(totals, at, totals[at] + value)
        return totals

    def _zeros(self, name: str) -> Buffer:
        builder, tile = self.builder, self.tile
        sums = builder.local(tile.rows * tile.columns, "float32", name)
        for cell in range(tile.rows * tile.vectors):
            with builder.loop(tile.lanes, "vectorized", "lane") as lane:
                builder.store(sums, cell * tile.lanes + lane, tirx.const(0, "float32"))
        return sums

    def _above(self, blocks: BlockScales, section: Expr, column: Expr) -> Expr:
        """By how much a zero point is above the middle of the weights' range."""
        if blocks.zero is not None:
            return blocks.zero(section, column)
        return tirx.const(-float(1 << (self.sections.bits - 1)), "float32")  # of unsigned weights without one

    def _add_word(self, sums: Buffer, rows: list[Expr], panel: tuple[Buffer, Expr], word: Expr) -> None:
        """Add the products of the tile's vectors of words by the numbers of rows from these places on."""
        builder, tile, s, (buffer, base) = self.builder, self.tile, self.sections, panel
        origin = builder.bind(base + word * s.tile)
        for line in range(0, tile.columns, LINE_BYTES // _BYTES):
            builder.prefetch(buffer[origin + (_AHEAD_BYTES // _BYTES + line)])
        for v in range(tile.vectors):
            with builder.loop(tile.lanes, "vectorized", "lane") as lane:
                packed = builder.name(buffer[origin + v * tile.lanes + lane] ^ _signs(s.bits))
                for k in range(s.numbers):
                    weight = builder.name(_signed(packed, k, s.bits))
                    for r, row in enumerate(rows):
                        at = (r * tile.vectors + v) * tile.lanes + lane
                        builder.store(sums, at, sums[at] + self.a[row + k] * weight)


def _signs(bits: int) -> Expr:
    """The upper bit of each number of a word: without it, unsigned numbers are those that are half their range less, in two's
    complement."""
    return tirx.const(sum(1 << one for one in range(bits - 1, _WORD_BITS, bits)) - (1 << _WORD_BITS), "int32")


def _signed(word: Expr, number: int, bits: int) -> Expr:
    """A number of a word of signed ones, as float32."""
    field, byte = divmod(number, _BYTES)
    above = _WORD_BITS - bits - (byte * _BYTE_BITS + field * bits)
    moved = word << tirx.const(above, "int32") if above else word
    return tirx.Cast("float32", moved >> tirx.const(_WORD_BITS - bits, "int32"))
