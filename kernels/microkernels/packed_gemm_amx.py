"""Products in scratch of one thread on the tile unit: the form of `Panels`, whose second operand is laid out in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder
from .amx_blocks import BlockProduct, packed_lines
from .amx_packing import LINES, TERM_ELEMENTS, StepPacker
from .amx_unit import DEPTH, ROWS, TileUnit
from .packed_gemm import WHOLE, Bounds, Element, Lines, Scratch, Store


@dataclass(frozen=True)
class TileScratch:
    """Of a thread that uses the unit: tiles of 32 rows of the first operand (16 bits an element), and the sums of a block."""

    unit: TileUnit
    rows: Scratch
    sums: Scratch


@dataclass(frozen=True)
class TiledPanels:
    """The second operand of products, `depth` by `columns`, in panels of 32 columns; float32 as sums of bfloat16 terms."""

    builder: KernelBuilder
    depth: int
    columns: int
    terms: int
    scratch: TileScratch

    def pack_columns(self, to: Scratch, element: Element) -> None:
        """Fill the panels (of words) with elements that lie side by side along columns."""
        self._pack(to, element, lies_along_depth=False)

    def pack_rows(self, to: Scratch, element: Element) -> None:
        """Fill the panels with elements that lie side by side along k."""
        self._pack(to, element, lies_along_depth=True)

    def _pack(self, to: Scratch, element: Element, *, lies_along_depth: bool) -> None:
        builder, terms = self.builder, self.terms
        packer = StepPacker(builder, lambda _, line, k: element(k, line), self.columns, self.depth, terms, True, lies_along_depth)
        step_words = terms * TERM_ELEMENTS // 2
        with builder.loop(packer.panels, name="panel") as panel, builder.loop(packer.steps, name="step") as step:
            at = builder.bind(to.base + (panel * packer.steps + step) * step_words)
            packer.pack(to.buffer, at, 0, panel, step)

    def multiply(self, a: Lines, b: Scratch, rows: Expr, store: Store, _: Bounds = WHOLE) -> None:
        """`store(row, column, value)` for each element of the product of `rows` rows of A with panels."""
        builder, near, terms = self.builder, self.scratch.rows, self.terms
        packer = StepPacker(builder, lambda _, line, k: a[line * a.pitch + k], rows, self.depth, terms, False)
        with builder.loop(builder.bind(tirx.floordiv(rows + (LINES - 1), LINES)), name="rows") as panel:
            with builder.loop(packer.steps, name="step") as step:
                packer.pack(near.buffer, builder.bind(near.base + step * (terms * TERM_ELEMENTS)), 0, panel, step)
            first = builder.bind(panel * LINES)
            for begin, count, width in self._runs():
                with builder.loop(count, name="columns") as number:
                    column = builder.bind(begin + number * LINES)
                    self._multiply_block(b, column, width)
                    self._store_block(first, rows, column, width, store)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Runs of blocks of equally many columns: first column, blocks, columns of each."""
        whole, rest = divmod(self.columns, LINES)
        if whole:
            yield 0, whole, LINES
        if rest:
            yield whole * LINES, 1, rest

    def _multiply_block(self, b: Scratch, column: Expr, width: int) -> None:
        """The rows in tiles by the panel that begins with a column."""
        scratch, steps = self.scratch, ceil(self.depth / DEPTH)
        product = BlockProduct(self.builder, scratch.unit, (steps,), self.terms, (2, 1 if width <= ROWS else 2))
        panel = self.builder.bind(b.base + tirx.floordiv(column, LINES) * (steps * self.terms * TERM_ELEMENTS // 2))
        rows = packed_lines(scratch.rows.buffer, scratch.rows.base, self.terms, words=False)
        product.multiply(rows, packed_lines(b.buffer, panel, self.terms, words=True), scratch.sums)

    def _store_block(self, first: Expr, rows: Expr, column: Expr, width: int, store: Callable[[Expr, Expr, Expr], None]) -> None:
        builder, sums = self.builder, self.scratch.sums
        with builder.loop(builder.bind(tirx.min(rows - first, LINES)), name="row") as row:
            base = builder.bind(row * LINES)
            lanes = builder.lanes("float32")
            builder.vector_loop(width, lanes, lambda i: store(first + row, column + i, sums[base + i]))


def panel_words(depth: int, columns: int, terms: int) -> int:
    """Words of 32 bits that the panels of an operand take."""
    return ceil(columns / LINES) * ceil(depth / DEPTH) * terms * TERM_ELEMENTS // 2
