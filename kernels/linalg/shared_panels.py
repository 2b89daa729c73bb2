"""Weights in panels that kernels for any number of rows read, by register tiles of several panels: few rows want wide tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..microkernels.packing import SHARED_VECTORS
from ..microkernels.register_tile import Panel, Tile


def tiles_over_panels(tiles: dict[str, Tile], few_rows: int) -> dict[str, Tile]:
    """The register tiles as wide as a panel; of at most `few_rows`, whose few sums wait for each other, also of several."""
    return {
        name: tile
        for name, tile in tiles.items()
        if tile.vectors == SHARED_VECTORS or (tile.rows <= few_rows and tile.vectors % SHARED_VECTORS == 0)
    }


@dataclass(frozen=True)
class PanelRow(Panel):
    """The first of the panels that a register tile reads side by side, and the others."""

    others: tuple[Panel, ...] = ()

    def prefetch(self, builder: KernelBuilder, row: Expr, ahead_bytes: int = 0) -> None:
        """Prefetch the row so many bytes after `row` in each panel."""
        for panel in (Panel(self.buffer, self.base, self.columns), *self.others):
            panel.prefetch(builder, row, ahead_bytes)


@dataclass(frozen=True)
class SharedPanels:
    """B in a buffer: `count` panels of `steps` rows of `width` elements for each matrix, read by tiles of `columns`. Behind the
    last panel a tile reads that one again, for columns that are not stored."""

    builder: KernelBuilder
    buffer: Buffer
    count: int
    steps: int
    width: int
    columns: int

    def element(self, matrix: Expr, tile: Expr, column: Expr, step: Expr) -> Expr:
        """What a multiply-add takes of a column of a tile."""
        place = self._base(matrix, tile * (self.columns // self.width) + tirx.floordiv(column, self.width))
        return self.buffer[place + step * self.width + tirx.floormod(column, self.width)]

    def row(self, matrix: Expr, tile: Expr) -> PanelRow:
        """The panels of a tile, for prefetching."""
        per_tile = self.columns // self.width
        bases = [self.builder.bind(self._base(matrix, tile * per_tile + number)) for number in range(per_tile)]
        first, *others = (Panel(self.buffer, base, self.width) for base in bases)
        return PanelRow(first.buffer, first.base, first.columns, tuple(others))

    def _base(self, matrix: Expr, panel: Expr) -> Expr:
        return (matrix * self.count + tirx.min(panel, self.count - 1)) * (self.steps * self.width)
