"""MatMul and Gemm by stored weights through multiply-adds of integers: rows of A as integers of one to three bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tvm import tirx

from ...runtime.symbolic.sizes import estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.work_stealing import Shares
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.stored_weights import fixed_point_cycles, fixed_point_tiles
from ..formats.digits import DigitUnit, digit_unit
from ..groups.group import Group
from ..microkernels.fixed_point import BlockScales, FixedRows, fix_rows, longest_section, multiply_sections
from ..microkernels.register_tile import WORK_PER_OPERATION, Tile
from ..microkernels.weight_packing import Sections
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.values import anchor_of
from .stored_weights import BlockReader, WeightsKernel, scaled, stored_weights

ROW_BITS = "prefuse.row_bits"  # attribute of a product: 8 where its rows may be rounded to int8 by blocks
# Others: two, whose error is 2.3e-5 for normal numbers in sections of 128, and more in longer ones.
BYTES_OF_PRECISION = {"float32": 3, "float32-fast": 3}
OTHER_BYTES = 2


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a product of float32 rows by constant integers with scales, with an epilogue of pointwise operators."""
    weights = stored_weights(group, target)
    if isinstance(weights, Refusal):
        return weights
    kernel = _FixedPointKernel(group, anchor_of(group), target, weights)
    if kernel.a.depth == 0 or kernel.a.lines == 0 or kernel.b.lines == 0:
        return Refusal("is empty")
    return Candidate(kernel.estimate(), kernel.build, stored_runs=(kernel.b.lines,))


class _FixedPointKernel(WeightsKernel):
    template = "fixed_point_matmul"

    @property
    def row_bytes(self) -> int:
        """Of the integers of a row."""
        if self.anchor.attribute(ROW_BITS, 0) == 8:
            return 1
        return BYTES_OF_PRECISION.get(self.group.precision, OTHER_BYTES)

    @property
    def unit(self) -> DigitUnit:
        return digit_unit(self.target, self.weights.bits)

    def _sections(self, tile: int) -> Sections:
        return self.sections(longest_section(self.weights.bits, self.row_bytes), tile)

    def _tiles(self) -> dict[str, Tile]:
        """Register tiles, those with the fewest cycles first."""
        lanes = self.unit.lanes
        found = fixed_point_tiles(self.a.lines, self._sections(lanes), self.unit, self.row_bytes, self.target.machine)
        tiles = {str(tile): tile for tile in (Tile(rows, vectors, lanes) for rows, vectors in found)}
        return {name: tile for name, tile in tiles.items() if self._sections(tile.columns).tile % tile.columns == 0}

    @estimating
    def estimate(self) -> Estimate:
        machine, tile = self.target.machine, next(iter(self._tiles().values()))
        sections = self._sections(tile.columns)
        cycles = fixed_point_cycles((tile.rows, tile.vectors), self.a.lines, sections, self.unit, self.row_bytes, machine)
        streamed = 4 * self.a.lines * (self.a.depth + self.b.lines)
        operations = 2 * self.a.lines * self.b.lines * self.a.depth
        overlap = min(tile.rows / hint_of(self.a.lines), 1.0)
        alone = Estimate(cycles, operations, 0, streamed, unit="dot", overlap=overlap)
        whole = replace(with_bytes(alone, self.group), constant_bytes=self.constant_bytes)
        return with_epilogue(whole, self.group, machine, self.anchor)

    def build(self) -> BuiltKernel:
        builder, tile = self.builder, self.builder.choose("tile", self._tiles())
        sections = self._sections(tile.columns)
        words, rows = self.words(sections), self.a.lines
        fixed = fix_rows(builder, self.rows_of_a(), rows, sections, self.unit, self.row_bytes, self.weights.usual_zero)
        store = self.store()
        flops = 2 * rows * self.b.lines * self.a.depth
        threads = min(builder.threads_for(flops // WORK_PER_OPERATION), sections.panels)
        shares = Shares(builder, threads, sections.panels, flops // WORK_PER_OPERATION)
        with (
            builder.loop(threads, "parallel", "thread") as thread,
            shares.of(thread) as (begin, end),
            builder.loop(end - begin, name="panel") as number,
        ):
            panel = builder.bind(begin + number)
            base = builder.bind(panel * (sections.count * sections.words * sections.tile))
            with builder.loop(-(-rows // tile.rows), name="tile") as i:
                first = builder.bind(i * tile.rows)
                places = [builder.bind(tirx.min(first + r, rows - 1)) for r in range(tile.rows)]
                with builder.loop(sections.tile // tile.columns, name="part") as part:
                    left = builder.bind(part * tile.columns)
                    blocks, column_scale = self._scales(sections, panel, left)
                    totals = multiply_sections(builder, tile, fixed, places, (words, builder.bind(base + left)), blocks)
                    self._store_tile(tile, builder.bind(panel * sections.tile + left), first, totals, column_scale, store)
        return self.finish(flops)

    def _scales(self, sections: Sections, panel: Expr, left: Expr) -> tuple[BlockScales, Callable[[Expr], Expr] | None]:
        """What multiplies sections, and what multiplies columns at the end, of columns from `left` of the panel on."""
        weights = self.weights

        def reader(name: str) -> BlockReader:
            whole = self.reader(name, sections, panel)
            return lambda section, column: whole(section, left + column)

        zero = reader(weights.zero) if weights.zero else None
        above = None
        if zero is not None:
            middle = tirx.const(float(weights.usual_zero), "float32")

            def above(section: Expr, column: Expr) -> Expr:
                return tirx.Cast("float32", zero(section, column)) - middle

        scale = reader(weights.scale)
        if weights.block:
            return BlockScales(scale, above), None
        return BlockScales(None, above), partial(scale, 0)

    def _store_tile(
        self,
        tile: Tile,
        begin: Expr,
        first: Expr,
        totals: Buffer,
        column_scale: Callable[[Expr], Expr] | None,
        store: Callable[[Expr, Expr, Expr, Expr, Expr], None],
    ) -> None:
        """The rows of a tile from `first` on, columns from `begin` on: totals, times the scales of their columns, through the
        epilogue."""
        builder = self.builder
        end = builder.bind(tirx.min(begin + tile.columns, self.b.lines))
        with builder.loop(builder.bind(tirx.min(self.a.lines - first, tile.rows)), name="row") as row:
            line = builder.bind(row * tile.columns)

            def element(column: Expr) -> None:
                value = totals[line + column - begin]
                if column_scale is not None:
                    value = scaled(value, column_scale(column - begin))
                store(0, first + row, 0, column, value)

            builder.dynamic_vector_loop(begin, end, tile.lanes, element)


__all__ = ["ROW_BITS", "FixedRows", "plan"]
