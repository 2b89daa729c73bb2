"""Packing of AMX operands: 1 KiB tiles in the order in which the micro-kernel loads them.

A "line" here is a row of A or a column of B. A panel is 32 lines by all of k, a step of it 32 lines by 64 bytes of k (32 values
of bfloat16, 64 of 8 bits): two tiles of 16 lines for each term. Edges are padded with zeros. A row of an A tile is a line; a row
of a B tile is a word of neighbours along k for each of 16 lines (`words`, the VNNI layout of Intel's manual).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import Size, SizeLike
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..movement.strided_copy import transposed
from .amx_unit import BF16_TILES, DEPTH, ROWS, TILE_WORDS, WORDS, TileDot
from .bf16_split import split, split_array

LINES = 2 * ROWS  # rows of A or columns of B in a panel
TERM_WORDS = 2 * TILE_WORDS  # of one term of a step
TERM_ELEMENTS = 2 * TERM_WORDS  # bfloat16 numbers of one term of a step


class PanelLayout(Protocol):
    """Lays a constant out as [matrices, panels, k, 32 rows of A or columns of B]."""

    def packed_type(self, source: TensorType) -> TensorType:
        """Shape and type of the result for a constant of this type."""

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The panels, C-contiguous."""


@dataclass(frozen=True)
class PackTiles:
    """Pack a constant operand into AMX tiles: [matrices, panels, steps, terms, 2, 16, numbers of 64 bytes], as bits.

    `panels` makes [matrices, panels, k, 32] of it. A float32 constant becomes `terms` bfloat16 terms; others are one term. k is
    cut into stretches of `run` values (0: one stretch), each of which is padded with zeros to whole steps.
    """

    panels: PanelLayout
    terms: int
    words: bool
    run: int = 0
    product: TileDot = BF16_TILES

    def packed_type(self, source: TensorType) -> TensorType:
        matrices, panels, depth, _ = self.panels.packed_type(source).shape
        run, of_step = self.run or depth, self.product.depth
        shape = matrices, panels, depth // run * ceil(run / of_step), self.terms, 2, ROWS, of_step
        return TensorType(shape, self.product.numbers)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        packed = self.panels(array)
        matrices, panels, depth, _ = packed.shape
        run, of_step, k_pack = self.run or depth, self.product.depth, self.product.k_pack
        filled = np.zeros((matrices, panels, depth // run, ceil(run / of_step) * of_step, LINES), packed.dtype)
        filled[:, :, :, :run] = packed.reshape(matrices, panels, -1, run, LINES)
        is_split = filled.dtype == np.float32
        bits = split_array(filled, self.terms) if is_split else filled.view(self.product.numbers)[np.newaxis]
        assert len(bits) == self.terms, f"{array.dtype} has {len(bits)} terms, not {self.terms}"
        cut = bits.reshape(self.terms, matrices, panels, -1, of_step // k_pack, k_pack, 2, ROWS)  # ..., word, number, tile, line
        order = (1, 2, 3, 0, 6, 4, 7, 5) if self.words else (1, 2, 3, 0, 6, 7, 4, 5)
        return np.ascontiguousarray(cut.transpose(order)).reshape(self.packed_type(TensorType(array.shape, "")).shape)

    def __str__(self) -> str:
        kind = f",{self.product.instruction}" * (self.product is not BF16_TILES)
        return f"tiles({self.panels},{self.terms}{',words' * self.words}{f',{self.run}' if self.run else ''}{kind})"


@dataclass(frozen=True)
class StepPacker:
    """Packs an operand that is not constant, in the kernel, step by step.

    `element(matrix, line, k)` is an element of the operand, float32 or bits; `lines` and `depth` its extents. An operand that is
    not packed in words is contiguous along k; of one that is, its vectors are loaded along lines; with `lies_along_depth`
    (float32, contiguous along k) squares are loaded along k and transposed in registers.
    """

    builder: KernelBuilder
    element: Callable[[Expr, Expr, Expr], Expr]
    lines: Expr
    depth: int
    terms: int
    words: bool
    lies_along_depth: bool = False
    product: TileDot = BF16_TILES

    @property
    def panels(self) -> SizeLike:
        """Panels of 32 lines, where the number of lines is a constant or a size."""
        assert isinstance(self.lines, (int, Size))
        return ceil(self.lines / LINES)

    @property
    def steps(self) -> int:
        return ceil(self.depth / self.product.depth)

    @property
    def panel_words(self) -> int:
        return self.steps * self.terms * TERM_WORDS

    @property
    def panel_elements(self) -> int:
        """Elements of a panel as it is stored: words, or else numbers."""
        return self.panel_words * (1 if self.words else self.product.k_pack)

    def pack(self, to: Buffer, base: Expr, matrix: Expr, panel: Expr, step: Expr) -> None:
        """Write a step of a panel, from element `base` of a buffer on."""
        builder, of_step = self.builder, self.product.depth
        first, k = builder.bind(panel * LINES), builder.bind(step * of_step)
        write = self._write_rows
        if self.words:
            write = self._write_squares if self.lies_along_depth else self._write_words
        if isinstance(self.lines, int) and self.lines % LINES == self.depth % of_step == 0:
            write(to, base, matrix, first, k, False)
            return
        lines, depth = builder.bind(self.lines), builder.bind(self.depth)
        is_whole = builder.bind(tirx.And(first + LINES <= lines, k + of_step <= depth))
        for guarded, condition in ((False, is_whole), (True, tirx.Not(is_whole))):
            with builder.when(condition):
                write(to, base, matrix, first, k, guarded)

    def _write_rows(self, to: Buffer, base: Expr, matrix: Expr, first: Expr, start: Expr, guarded: bool) -> None:
        of_step, per_term = self.product.depth, TERM_WORDS * self.product.k_pack
        lanes = min(self.builder.lanes("float32") if self.product is BF16_TILES else of_step, of_step)
        with self.builder.loop(LINES, name="line") as line, self.builder.loop(of_step // lanes, name="v") as v:
            at = self.builder.bind(base + line * of_step + v * lanes)
            with self.builder.loop(lanes, "vectorized", "lane") as lane:
                parts = self._parts(matrix, first + line, start + v * lanes + lane, guarded)
                for term, part in enumerate(parts):
                    self.builder.store(to, at + term * per_term + lane, part)

    def _write_words(self, to: Buffer, base: Expr, matrix: Expr, first: Expr, start: Expr, guarded: bool) -> None:
        k_pack = self.product.k_pack
        with self.builder.loop(2, name="tile") as tile, self.builder.loop(WORDS, name="word") as word:
            at = self.builder.bind(base + (tile * WORDS + word) * ROWS)
            with self.builder.loop(ROWS, "vectorized", "lane") as lane:
                line, k = first + tile * ROWS + lane, start + word * k_pack
                self._store_words(to, at + lane, [self._parts(matrix, line, k + i, guarded) for i in range(k_pack)])

    def _write_squares(self, to: Buffer, base: Expr, matrix: Expr, first: Expr, start: Expr, guarded: bool) -> None:
        builder = self.builder
        with builder.loop(2, name="tile") as tile, builder.loop(DEPTH // ROWS, name="square") as square:
            k = builder.bind(start + square * ROWS)
            rows = builder.local(ROWS * ROWS, "float32", "square")
            for r in range(ROWS):
                line = builder.bind(first + tile * ROWS + r)
                with builder.loop(ROWS, "vectorized", "lane") as lane:
                    builder.store(rows, r * ROWS + lane, self._value(matrix, line, k + lane, guarded))
            columns = transposed(builder, rows, ROWS)
            at = builder.bind(base + (tile * (DEPTH // 2) + square * (ROWS // 2)) * ROWS)
            for pair in range(ROWS // 2):
                with builder.loop(ROWS, "vectorized", "lane") as lane:
                    pairs = [split(builder, columns[(2 * pair + i) * ROWS + lane], self.terms) for i in range(2)]
                    self._store_words(to, at + pair * ROWS + lane, pairs)

    def _store_words(self, to: Buffer, at: Expr, neighbours: list[list[Expr]]) -> None:
        """Store the word of each term, of what neighbours along k have of it."""
        for term, numbers in enumerate(zip(*neighbours, strict=True)):
            word = tirx.Cast("uint32", numbers[0])
            for i, number in enumerate(numbers[1:], 1):
                word = word | (tirx.Cast("uint32", number) << tirx.const(i * self.product.bits, "uint32"))
            self.builder.store(to, at + term * TERM_WORDS, word)

    def _parts(self, matrix: Expr, line: Expr, k: Expr, guarded: bool) -> list[Expr]:
        """The terms of an element, as bits."""
        value = self._value(matrix, line, k, guarded)
        return split(self.builder, value, self.terms) if str(value.ty) == "float32" else [value]

    def _value(self, matrix: Expr, line: Expr, k: Expr, guarded: bool) -> Expr:
        """An element; with `guarded` zero beyond the edges."""
        if guarded:
            value = self.element(matrix, tirx.min(line, self.lines - 1), tirx.min(k, self.depth - 1))
            exists = tirx.And(line < self.lines, k < self.depth)
            return self.builder.masked(exists, value, tirx.const(0, str(value.ty)))
        return self.element(matrix, line, k)
