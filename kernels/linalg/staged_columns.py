"""Packing of a right operand B that is no constant, by the kernel of a product, into panels in its workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ...runtime.symbolic.sizes import least_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder
from ..formats.multiply_add import joined
from ..movement.strided_copy import transposed

Number = Callable[[Expr, Expr, Expr], Expr]  # of (matrix, column, k)


@dataclass(frozen=True)
class Columns:
    """The columns of B: `matrices` of `lines` columns of `depth` elements, in panels of `tile` columns."""

    matrices: int
    lines: int
    depth: int
    tile: int

    @property
    def panels(self) -> int:
        return ceil(self.lines / self.tile)

    def has_squares(self, builder: KernelBuilder, dtype: str) -> bool:
        """Whether squares as large as a vector of the type fit along k, and may be transposed in registers."""
        return not builder.is_grid and 1 < builder.lanes(dtype) <= least_of(self.depth)


class OwnPanel:
    """One panel of a B that lies along k, of which each thread makes its own and multiplies it by all rows before the next.

    Squares are transposed in registers. All panels at once would go to memory and back.
    """

    def __init__(self, builder: KernelBuilder, columns: Columns, dtype: str, number: Number) -> None:
        self.builder, self.columns, self.dtype, self.number = builder, columns, dtype, number

    def stage(self, thread: Expr, threads: int, matrix: Expr, panel: Expr) -> None:
        """Make a panel; `element` is of it from here on. Columns beyond the last repeat it."""
        builder, side, tile, depth = self.builder, self.builder.lanes(self.dtype), self.columns.tile, self.columns.depth
        assert tile % side == 0, f"panels of {tile} columns are no vectors of {side}"
        self.buffer, self.base = builder.workspace(threads * depth * tile, self.dtype), builder.bind(thread * (depth * tile))
        with builder.loop(tile // side, name="square") as square:
            first = builder.bind(square * side)
            lines = [builder.bind(tirx.min(panel * tile + first + r, self.columns.lines - 1)) for r in range(side)]
            with builder.loop(ceil(depth / side), name="k") as block:  # the last ones are moved back to end with B
                k = builder.bind(tirx.min(block * side, depth - side))
                self._turn(matrix, lines, k, builder.bind(self.base + k * tile + first))

    def _turn(self, matrix: Expr, lines: list[Expr], k: Expr, target: Expr) -> None:
        """Store elements [k, k + side) of as many columns, the first ones from element `target` of the scratch on."""
        builder, side = self.builder, len(lines)
        rows = builder.local(side * side, self.dtype, "square")
        for r, line in enumerate(lines):
            with builder.loop(side, "vectorized", "lane") as lane:
                builder.store(rows, r * side + lane, self.number(matrix, line, k + lane))
        turned = transposed(builder, rows, side)
        for r in range(side):
            with builder.loop(side, "vectorized", "lane") as lane:
                builder.store(self.buffer, target + r * self.columns.tile + lane, turned[r * side + lane])

    def element(self, matrix: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
        """The element of a column of the panel that was made last."""
        return self.buffer[self.base + ks[0] * self.columns.tile + line]


def stage_elements(builder: KernelBuilder, columns: Columns, dtype: str, number: Number) -> Buffer:
    """Panels of any B, element by element. Columns beyond the last are zero."""
    tile, panels, depth = columns.tile, columns.panels, columns.depth
    size, zero = columns.matrices * panels * depth * tile, tirx.const(0, dtype)
    staged = builder.workspace(size, dtype)
    with builder.chunks(columns.matrices * panels, size) as chunk:
        matrix, panel = builder.bind(tirx.floordiv(chunk, panels)), builder.bind(tirx.floormod(chunk, panels))
        with builder.loop(depth, name="k") as k, builder.loop(tile, name="line") as i:
            line = panel * tile + i
            value = number(matrix, tirx.min(line, columns.lines - 1), k)
            builder.store(staged, (chunk * depth + k) * tile + i, builder.masked(line < columns.lines, value, zero))
    return staged


def stage_words(builder: KernelBuilder, columns: Columns, bits: Buffer, k_pack: int, width: int) -> Buffer:
    """Panels of a B that lies along columns as words of `k_pack` neighbours along k of `width` bits. Columns beyond the last are
    undefined."""
    steps, tile, lines, depth, panels = ceil(columns.depth / k_pack), columns.tile, columns.lines, columns.depth, columns.panels
    staged = builder.workspace(columns.matrices * panels * steps * tile, "int32")
    with builder.chunks(columns.matrices * panels, columns.matrices * panels * depth * tile) as chunk:
        matrix, panel = builder.bind(tirx.floordiv(chunk, panels)), builder.bind(tirx.floormod(chunk, panels))
        count = builder.bind(tirx.min(lines - panel * tile, tile))
        with builder.loop(steps, name="k") as k:
            source = builder.bind((matrix * depth + k * k_pack) * lines + panel * tile)
            target = builder.bind((chunk * steps + k) * tile)

            def word(i: Expr, source: Expr = source, target: Expr = target) -> None:
                neighbours = [bits[source + lines * number + i if number else source + i] for number in range(k_pack)]
                builder.store(staged, target + i, joined(neighbours, width))

            builder.dynamic_vector_loop(0, count, builder.lanes("int32"), word)
    return staged
