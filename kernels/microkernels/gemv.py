"""GEMV and products of few rows: B is read where it lies, as packing it would cost more than the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder
from ..codegen.neighbours import loads_of
from ..formats.format import plain
from ..movement.strided_copy import transposed
from .packed_gemm import Element, ScratchMatrix, Span
from .register_tile import Tile, sum_tile

Store = Callable[[Expr, Expr, Expr], None]  # of (row, column, value)
Blocks: TypeAlias = tuple[int, Expr, Expr]  # of so many: [begin, end)
_VECTORS = 8  # accumulator registers a row of the result, at most
_PANEL_ROWS = 5  # from which B is transposed: 8 queries of 1,000 keys of 64 took 0.72 of the time, 4 of 128 0.95, 2 of 128 1.25
_PANEL_DEPTH = 512  # of a panel in L1
AHEAD_BYTES = 4 * 1024  # prefetch distance in B: keys and values from memory took 0.70 to 0.88 of the time, from L2 0.97 to 1.05
_SUMS = 4  # independent accumulators of a dot product: an addition has a latency of four cycles


@dataclass(frozen=True)
class Gemv:
    """C = A B with A of `rows` rows of `depth` elements in scratch, and B of `columns` columns, given by its elements.

    Vectors have `lanes` elements; `store(row, column, value)` gets each element of C once.
    """

    builder: KernelBuilder
    rows: int
    depth: int
    columns: int
    lanes: int

    def multiply_columns(self, a: ScratchMatrix, element: Element, store: Store, blocks: Blocks | None = None) -> None:
        """C where B's `element(k, column)` is contiguous along columns: axpy form, a register tile of C, B loaded as vectors.

        `blocks` (a size that divides the depth, the first of them, their end) leaves out all k but those of these blocks.
        """
        for begin, count, tile in self._runs():
            with self.builder.loop(count, name="run") as run:
                self._multiply_run(a, element, tile, self.builder.bind(begin + run * tile.columns), store, blocks)

    def _runs(self) -> Iterator[tuple[int, int, Tile]]:
        """Runs of equal register tiles (first column, number of tiles, tile), ever narrower, that cover each column once."""
        begin, vectors, lanes = 0, max(min(self.columns // self.lanes, _VECTORS // self.rows), 1), self.lanes
        while begin < self.columns:
            while vectors * lanes > self.columns - begin:
                vectors, lanes = (vectors - 1, lanes) if vectors > 1 else (1, lanes // 2)
            count = (self.columns - begin) // (vectors * lanes)
            yield begin, count, Tile(self.rows, vectors, lanes)
            begin += count * vectors * lanes

    def _multiply_run(
        self, a: ScratchMatrix, element: Element, tile: Tile, first: Expr, store: Store, blocks: Blocks | None
    ) -> None:
        builder = self.builder
        size, begin, end = blocks or (self.depth, 0, 1)
        last = builder.bind(size * end - 1)
        ahead = _lines_ahead(lambda i: element(tirx.const(0, "int32"), i), self.columns)

        def place(ks: Index) -> Expr:
            return ks[0] if blocks is None else ks[0] * size + ks[1]

        sums = sum_tile(
            builder,
            tile,
            plain(str(a.buffer.dtype)),
            (self.depth,) if blocks is None else (self.depth // size, size),
            lambda row, ks: a[row * a.pitch + place(ks)],
            lambda column, ks: element(place(ks), first + column),
            lambda ks: self._prefetch(lambda i: element(tirx.min(place(ks) + ahead, last), first + i), tile.columns),
            spans=None if blocks is None else {0: (begin, end)},
        )
        with builder.loop(self.rows, name="row") as row:
            base = builder.bind(row * tile.columns)
            builder.vector_loop(tile.columns, tile.lanes, lambda i: store(row, first + i, sums[base + i]))

    def multiply_rows(self, a: ScratchMatrix, element: Element, store: Store, squares: Span | None = None) -> None:
        """C where B's `element(k, column)` is contiguous along k.

        Of few rows a dot product a column: vectors of partial sums of `lanes` columns transposed and added up. Of more, which
        would load and convert B again for each, `lanes` columns of B are transposed once, and meet all rows as a register tile.
        `squares` leaves out all columns but those of some whole vectors of them, the first and the end of which it tells; then
        all columns are whole vectors.
        """
        whole, rest = divmod(self.columns, self.lanes)
        assert squares is None or not rest, f"{self.columns} columns are no vectors of {self.lanes}"
        for (begin, end), extent in ((squares or (0, whole), self.lanes), ((whole, whole + 1), rest)):
            if extent and not (isinstance(end, int) and end == 0):
                with self.builder.loop(end - begin, name="square") as square:
                    first = self.builder.bind((begin + square) * self.lanes)
                    self._prefetch_square(element, first, end * self.lanes if extent == self.lanes else self.columns)
                    if self.rows >= _PANEL_ROWS and self.depth <= _PANEL_DEPTH and self.depth % self.lanes == 0:
                        self._multiply_panel(a, element, first, extent, store)
                    else:
                        with self.builder.loop(self.rows, name="row") as row:
                            self._multiply_square(a, element, row, first, extent, store)

    def _prefetch_square(self, element: Element, first: Expr, end: Expr) -> None:
        """Prefetch as many columns of B as there are lanes, further on than those from `first` on, but before `end`."""
        ahead = _lines_ahead(lambda i: element(i, tirx.const(0, "int32")), self.depth)
        with self.builder.loop(self.lanes, name="ahead") as i:
            column = self.builder.bind(tirx.min(first + i + ahead, end - 1))
            self._prefetch(lambda k: element(k, column), self.depth)

    def _prefetch(self, element: Callable[[Expr], Expr], count: int) -> None:
        """Prefetch `count` neighbours that are loaded from memory; nothing where they are computed of several numbers."""
        begin = 0
        while begin < count and (load := _load_of(element(tirx.const(begin, "int32")))) is not None:
            self.builder.prefetch(load)
            begin += LINE_BYTES // _item_bytes(load)

    def _multiply_panel(self, a: ScratchMatrix, element: Element, first: Expr, extent: int, store: Store) -> None:
        """All rows by `lanes` columns of B from `first` on, of which `extent` are there."""
        builder, side, dtype = self.builder, self.lanes, str(a.buffer.dtype)
        panel = builder.local(self.depth * side, dtype, "panel")
        columns = [builder.bind(tirx.min(first + c, self.columns - 1)) for c in range(side)]
        with builder.loop(self.depth // side, name="k") as block:
            k, square = builder.bind(block * side), builder.local(side * side, dtype, "square")
            for c in range(side):
                with builder.loop(side, "vectorized", "lane") as lane:
                    builder.store(square, c * side + lane, element(k + lane, columns[c]))
            turned = transposed(builder, square, side)
            for r in range(side):
                with builder.loop(side, "vectorized", "lane") as lane:
                    builder.store(panel, (k + r) * side + lane, turned[r * side + lane])
        sums = sum_tile(
            builder,
            Tile(self.rows, 1, side),
            plain(dtype),
            (self.depth,),
            lambda row, ks: a[row * a.pitch + ks[0]],
            lambda column, ks: panel[ks[0] * side + column],
        )
        with builder.loop(self.rows, name="row") as row:
            base = builder.bind(row * side)
            builder.vector_loop(extent, side, lambda i: store(row, first + i, sums[base + i]))

    def _multiply_square(self, a: ScratchMatrix, element: Element, row: Expr, first: Expr, extent: int, store: Store) -> None:
        dots = self._dots(a, element, row, first)
        self.builder.vector_loop(extent, self.lanes, lambda i: store(row, first + i, dots[i]))

    def _dots(self, a: ScratchMatrix, element: Element, row: Expr, first: Expr) -> Buffer:
        """The partial sums (lanes x lanes, a row a column of B) of a row of A with `lanes` columns of B from `first` on.

        Columns beyond the last repeat it.
        """
        builder, side, dtype = self.builder, self.lanes, str(a.buffer.dtype)
        sums = builder.local(side * side, dtype, "sums")
        columns = [builder.bind(tirx.min(first + c, self.columns - 1)) for c in range(side)]
        for c in range(side):
            with builder.loop(side, "vectorized", "lane") as lane:
                builder.store(sums, c * side + lane, tirx.const(0, dtype))

        def add(k: Expr, lanes: int) -> None:
            for c in range(side):
                with builder.loop(lanes, "vectorized", "lane") as lane:
                    place = c * side + lane
                    builder.store(sums, place, sums[place] + a[row * a.pitch + k + lane] * element(k + lane, columns[c]))

        whole, lanes = self.depth // side, side
        with builder.loop(whole, name="k") as k:
            add(builder.bind(k * side), side)
        done = whole * side
        while done < self.depth:
            while lanes > self.depth - done:
                lanes //= 2
            add(tirx.const(done, "int32"), lanes)
            done += lanes
        return self._added_up(transposed(builder, sums, side))

    def _added_up(self, rows: Buffer) -> Buffer:
        """The sum of the rows of a square, one vector."""
        builder, side = self.builder, self.lanes
        total = builder.local(side, str(rows.dtype), "dots")
        with builder.loop(side, "vectorized", "lane") as lane:
            parts = [rows[r * side + lane] for r in range(min(_SUMS, side))]
            for r in range(len(parts), side):
                parts[r % len(parts)] = parts[r % len(parts)] + rows[r * side + lane]
            while len(parts) > 1:
                parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=True)]
            builder.store(total, lane, parts[0])
        return total


def _lines_ahead(element: Callable[[Expr], Expr], count: int) -> int:
    """The prefetch distance in lines of `count` neighbours."""
    load = _load_of(element(tirx.const(0, "int32")))
    return 0 if load is None else ceil(AHEAD_BYTES / (count * _item_bytes(load)))


def _load_of(element: Expr) -> Expr | None:
    """The number in memory that an element is made of, if it is one."""
    loads = loads_of(element)
    return loads[0] if len(loads) == 1 else None


def _item_bytes(load: Expr) -> int:
    return int(np.dtype(str(load.ty)).itemsize)
