"""Packed GEMM in scratch of one thread by AMX: the interface of `packed_gemm.PackedPanels`, with B packed in AMX tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ...runtime.symbolic.sizes import Size
from ..codegen.builder import Expr, KernelBuilder
from .amx_blocks import AmxMicroKernel, packed_operand
from .amx_packing import LINES, TERM_ELEMENTS, TERM_WORDS, StepPacker
from .amx_unit import DEPTH, ROWS, TileUnit
from .packed_gemm import WHOLE, Bounds, Element, Scratch, ScratchMatrix, Store


@dataclass(frozen=True)
class TileScratch:
    """Scratch of a thread: 32 rows of A packed in AMX tiles (16 bits an element), and a float32 block of C."""

    unit: TileUnit
    rows: Scratch
    sums: Scratch


@dataclass(frozen=True)
class AmxPanels:
    """B of `depth` by `columns`, packed in panels of 32 columns; float32 numbers as sums of `terms` bfloat16 terms."""

    builder: KernelBuilder
    depth: int
    columns: int
    terms: int
    scratch: TileScratch

    def pack_columns(self, to: Scratch, element: Element, _: Bounds = WHOLE) -> None:
        """Pack B whose elements are contiguous along columns, to 32-bit pairs."""
        self._pack(to, element, lies_along_depth=False)

    def pack_rows(self, to: Scratch, element: Element, _: Bounds = WHOLE) -> None:
        """Pack B whose elements are contiguous along k, to 32-bit pairs."""
        self._pack(to, element, lies_along_depth=True)

    def _pack(self, to: Scratch, element: Element, *, lies_along_depth: bool) -> None:
        builder, terms = self.builder, self.terms
        packer = StepPacker(builder, lambda _, line, k: element(k, line), self.columns, self.depth, terms, True, lies_along_depth)
        step_words = terms * TERM_WORDS
        with builder.loop(packer.panels, name="panel") as panel, builder.loop(packer.steps, name="step") as step:
            at = builder.bind(to.base + (panel * packer.steps + step) * step_words)
            packer.pack(to.buffer, at, 0, panel, step)

    def multiply(self, a: ScratchMatrix, b: Scratch, rows: Expr, store: Store, _: Bounds = WHOLE) -> None:
        """C = A B for `rows` rows of A: `store(row, column, value)` gets each element."""
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
        """Runs of blocks of equally many columns: (first column, blocks, columns of a block)."""
        if isinstance(self.columns, Size):  # columns of the last block beyond the last are not stored
            yield 0, ceil(self.columns / LINES), LINES
            return
        whole, rest = divmod(self.columns, LINES)
        if whole:
            yield 0, whole, LINES
        if rest:
            yield whole * LINES, 1, rest

    def _multiply_block(self, b: Scratch, column: Expr, width: int) -> None:
        """The packed rows of A by `width` columns from `column` on, to the block of C in scratch."""
        scratch, steps = self.scratch, ceil(self.depth / DEPTH)
        product = AmxMicroKernel(self.builder, scratch.unit, (steps,), self.terms, (2, 1 if width <= ROWS else 2))
        panel = self.builder.bind(b.base + tirx.floordiv(column, LINES) * (steps * self.terms * TERM_WORDS))
        rows = packed_operand(scratch.rows.buffer, scratch.rows.base, self.terms, words=False)
        product.multiply(rows, packed_operand(b.buffer, panel, self.terms, words=True), scratch.sums)

    def _store_block(self, first: Expr, rows: Expr, column: Expr, width: int, store: Callable[[Expr, Expr, Expr], None]) -> None:
        builder, sums = self.builder, self.scratch.sums
        with builder.loop(builder.bind(tirx.min(rows - first, LINES)), name="row") as row:
            base = builder.bind(row * LINES)
            lanes = builder.lanes("float32")
            stored = tirx.min(self.columns - column, width) if isinstance(self.columns, Size) else width
            builder.dynamic_vector_loop(0, stored, lanes, lambda i: store(first + row, column + i, sums[base + i]))


def panel_words(depth: int, columns: int, terms: int) -> int:
    """32-bit pairs that the panels of a `depth` x `columns` operand take."""
    return ceil(columns / LINES) * ceil(depth / DEPTH) * terms * TERM_WORDS
