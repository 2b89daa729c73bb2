"""MatMul and Gemm by stored weights through multiply-adds of integers: rows of A as integers of one to three bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...runtime.symbolic.sizes import estimating, hint_of
from ...runtime.target import Target
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.stored_weights import fixed_point_cycles, fixed_point_tiles
from ..formats.digits import DigitUnit, digit_unit
from ..groups.group import Group
from ..microkernels.fixed_point import FixedRows, fix_rows, longest_section, multiply_sections
from ..microkernels.register_tile import Tile
from ..microkernels.weight_packing import Sections
from ..template.contract import BuiltKernel, Candidate, Refusal
from .stored_weights import WeightsKernel, planned

ROW_BITS = "prefuse.row_bits"  # attribute of a product: 8 where its rows may be rounded to int8 by blocks
# Others: two, whose error is 2.3e-5 for normal numbers in sections of 128, and more in longer ones.
BYTES_OF_PRECISION = {"float32": 3, "float32-fast": 3}
OTHER_BYTES = 2


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a product of float32 rows by constant integers with scales, with an epilogue of pointwise operators."""
    return planned(_FixedPointKernel, group, target)


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
        self.each_tile(tile, sections, words, partial(multiply_sections, builder, tile, fixed))
        return self.finish(2 * rows * self.b.lines * self.a.depth)


__all__ = ["ROW_BITS", "FixedRows", "plan"]
