"""Weights in panels that kernels for any number of rows read, by register tiles of several panels: few rows want wide tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..microkernels.packing import SHARED_VECTORS, Panel
from ..microkernels.register_tile import Tile


def tiles_over_panels(tiles: dict[str, Tile], few_rows: int) -> dict[str, Tile]:
    """The register tiles as wide as a panel; of at most `few_rows`, whose few sums wait for each other, also of several."""
    return {
        name: tile
        for name, tile in tiles.items()
        if tile.vectors == SHARED_VECTORS or (tile.rows <= few_rows and tile.vectors % SHARED_VECTORS == 0)
    }


@dataclass(frozen=True)
class SharedPanels:
    """B in a buffer: `count` panels of `steps` rows of `width` elements for each matrix, read by tiles of `columns`. Behind the
    last panel a tile reads that one again, for columns that are not stored.

    Each panel is a stream of its own, which is prefetched as a single one is."""

    buffer: Buffer
    count: int
    steps: int
    width: int
    columns: int

    def element(self, matrix: Expr, tile: Expr, column: Expr, step: Expr) -> Expr:
        """What a multiply-add takes of a column of a tile."""
        panel = tirx.min(tile * (self.columns // self.width) + tirx.floordiv(column, self.width), self.count - 1)
        place = (matrix * self.count + panel) * (self.steps * self.width)
        return self.buffer[place + step * self.width + tirx.floormod(column, self.width)]

    def panel(self, builder: KernelBuilder, matrix: Expr, tile: Expr) -> Panel:
        """The panels that a tile reads."""
        streams, apart = self.columns // self.width, self.steps * self.width
        return Panel(self.buffer, builder.bind((matrix * self.count + tile * streams) * apart), self.columns, streams, apart)
