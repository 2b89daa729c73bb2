"""Packing of AMX operands: 1 KiB tiles in the order in which the micro-kernel loads them.

A "line" here is a row of A or a column of B. A panel is 32 lines by all of k, a step of it 32 lines by 32 values of k: two tiles
of 16 lines for each bfloat16 term. Edges are padded with zeros. A row of an A tile is a line; a row of a B tile is two
neighbours along k for each of 16 lines (`pairs`, the VNNI layout of Intel's manual).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..movement.strided_copy import transposed
from .amx_unit import DEPTH, ROWS, TILE_ELEMENTS
from .bf16_split import split, split_array

LINES = 2 * ROWS  # rows of A or columns of B in a panel
TERM_ELEMENTS = 2 * TILE_ELEMENTS  # bfloat16 numbers of one term of a step


class PanelLayout(Protocol):
    """Lays a constant out as [matrices, panels, k, 32 rows of A or columns of B]."""

    def packed_type(self, source: TensorType) -> TensorType:
        """Shape and type of the result for a constant of this type."""

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The panels, C-contiguous."""


@dataclass(frozen=True)
class PackTiles:
    """Pack a constant operand into AMX tiles: uint16[matrices, panels, steps, terms, 2, 16, 32], bits of bfloat16.

    `panels` makes [matrices, panels, k, 32] of it. A float32 constant becomes `terms` bfloat16 terms, a bfloat16 one is one term.
    k is cut into stretches of `run` values (0: one stretch), each of which is padded with zeros to whole steps of 32.
    """

    panels: PanelLayout
    terms: int
    pairs: bool
    run: int = 0

    def packed_type(self, source: TensorType) -> TensorType:
        matrices, panels, depth, _ = self.panels.packed_type(source).shape
        run = self.run or depth
        return TensorType((matrices, panels, depth // run * ceil(run / DEPTH), self.terms, 2, ROWS, DEPTH), "uint16")

    def __call__(self, array: np.ndarray) -> np.ndarray:
        packed = self.panels(array)
        matrices, panels, depth, _ = packed.shape
        run = self.run or depth
        filled = np.zeros((matrices, panels, depth // run, ceil(run / DEPTH) * DEPTH, LINES), packed.dtype)
        filled[:, :, :, :run] = packed.reshape(matrices, panels, -1, run, LINES)
        bits = split_array(filled, self.terms) if filled.dtype == np.float32 else filled.view(np.uint16)[np.newaxis]
        assert len(bits) == self.terms, f"{array.dtype} has {len(bits)} terms, not {self.terms}"
        cut = bits.reshape(self.terms, matrices, panels, -1, DEPTH // 2, 2, 2, ROWS)  # ..., pair, value of it, tile, line
        order = (1, 2, 3, 0, 6, 4, 7, 5) if self.pairs else (1, 2, 3, 0, 6, 7, 4, 5)
        return np.ascontiguousarray(cut.transpose(order)).reshape(self.packed_type(TensorType(array.shape, "")).shape)

    def __str__(self) -> str:
        return f"tiles({self.panels},{self.terms}{',pairs' if self.pairs else ''}{f',{self.run}' if self.run else ''})"


@dataclass(frozen=True)
class StepPacker:
    """Packs an operand that is not constant, in the kernel, step by step.

    `element(matrix, line, k)` is a number of it: float32, or with one term the bits of a bfloat16; a line is a row of A or a
    column of B. Where B is packed in pairs, its vectors are loaded along lines; with `lies_along_depth` (float32, contiguous
    along k) squares are loaded along k and transposed in registers.
    """

    builder: KernelBuilder
    element: Callable[[Expr, Expr, Expr], Expr]
    lines: Expr
    depth: int
    terms: int
    pairs: bool
    lies_along_depth: bool = False

    @property
    def panels(self) -> int:
        """Panels of 32 lines, where the number of lines is a constant."""
        assert isinstance(self.lines, int)
        return ceil(self.lines / LINES)

    @property
    def steps(self) -> int:
        return ceil(self.depth / DEPTH)

    @property
    def panel_elements(self) -> int:
        return self.steps * self.terms * TERM_ELEMENTS

    def pack(self, to: Buffer, base: Expr, matrix: Expr, panel: Expr, step: Expr) -> None:
        """Write a step of a panel, from element `base` of a buffer on: elements are 32-bit pairs if `pairs`, else 16 bits."""
        builder = self.builder
        first, k = builder.bind(panel * LINES), builder.bind(step * DEPTH)
        write = self._write_rows
        if self.pairs:
            write = self._write_squares if self.lies_along_depth else self._write_pairs
        if isinstance(self.lines, int) and self.lines % LINES == self.depth % DEPTH == 0:
            write(to, base, matrix, first, k, False)
            return
        is_whole = builder.bind(tirx.And(first + LINES <= self.lines, k + DEPTH <= self.depth))
        for guarded, condition in ((False, is_whole), (True, tirx.Not(is_whole))):
            with builder.when(condition):
                write(to, base, matrix, first, k, guarded)

    def _write_rows(self, to: Buffer, base: Expr, matrix: Expr, first: Expr, start: Expr, guarded: bool) -> None:
        lanes = min(self.builder.lanes("float32"), DEPTH)
        with self.builder.loop(LINES, name="line") as line, self.builder.loop(DEPTH // lanes, name="v") as v:
            at = self.builder.bind(base + line * DEPTH + v * lanes)
            with self.builder.loop(lanes, "vectorized", "lane") as lane:
                parts = self._parts(matrix, first + line, start + v * lanes + lane, guarded)
                for term, part in enumerate(parts):
                    self.builder.store(to, at + term * TERM_ELEMENTS + lane, part)

    def _write_pairs(self, to: Buffer, base: Expr, matrix: Expr, first: Expr, start: Expr, guarded: bool) -> None:
        with self.builder.loop(2, name="tile") as tile, self.builder.loop(DEPTH // 2, name="pair") as pair:
            at = self.builder.bind(base + (tile * (DEPTH // 2) + pair) * ROWS)
            with self.builder.loop(ROWS, "vectorized", "lane") as lane:
                line = first + tile * ROWS + lane
                low, high = (self._parts(matrix, line, start + pair * 2 + i, guarded) for i in range(2))
                self._store_words(to, at + lane, low, high)

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
                    low, high = (split(builder, columns[(2 * pair + i) * ROWS + lane], self.terms) for i in range(2))
                    self._store_words(to, at + pair * ROWS + lane, low, high)

    def _store_words(self, to: Buffer, at: Expr, low: list[Expr], high: list[Expr]) -> None:
        """Store the 32-bit pairs along k of each term."""
        for term, (x, y) in enumerate(zip(low, high, strict=True)):
            word = tirx.Cast("uint32", x) | (tirx.Cast("uint32", y) << tirx.const(16, "uint32"))
            self.builder.store(to, at + term * (TERM_ELEMENTS // 2), word)

    def _parts(self, matrix: Expr, line: Expr, k: Expr, guarded: bool) -> list[Expr]:
        """The bfloat16 terms of an element, as bits."""
        value = self._value(matrix, line, k, guarded)
        return split(self.builder, value, self.terms) if str(value.ty) == "float32" else [value]

    def _value(self, matrix: Expr, line: Expr, k: Expr, guarded: bool) -> Expr:
        """An element; with `guarded` zero beyond the edges."""
        if guarded:
            value = self.element(matrix, tirx.min(line, self.lines - 1), tirx.min(k, self.depth - 1))
            exists = tirx.And(line < self.lines, k < self.depth)
            return self.builder.masked(exists, value, tirx.const(0, str(value.ty)))
        return self.element(matrix, line, k)
