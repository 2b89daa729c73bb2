"""Packed GEMM in scratch of one thread: rows of A by packed panels of B, both small enough for its L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TypeAlias

from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import Size, least_of
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..cost.register_tile import MAX_ROWS, Step, tile_cycles
from ..formats.bfloat16 import instruction_word, neighbour_words
from ..formats.format import Format
from ..movement.strided_copy import transposed
from ..template.loops import sweep
from .register_tile import Tile, sum_tile

_L1_SHARE = 0.5  # of L1 that a panel may take; the rest is for A, the sums and the epilogue's operands
_ROW_CYCLES = 12.0  # overhead of each row of a tile in the epilogue
Element = Callable[[Expr, Expr], Expr]  # of (k, column)
Store = Callable[[Expr, Expr, Expr], None]  # of (row, column, value)
Span: TypeAlias = tuple[Expr, Expr]  # [begin, end)


@dataclass(frozen=True)
class Scratch:
    """Memory of one thread: the elements of `buffer` from `base` on."""

    buffer: Buffer
    base: Expr

    def __getitem__(self, offset: Expr) -> Expr:
        return self.buffer[self.base + offset]


@dataclass(frozen=True)
class ScratchMatrix(Scratch):
    """A matrix in scratch, by rows that are `pitch` elements apart."""

    pitch: int


@dataclass(frozen=True)
class Bounds:
    """The part of a product that is computed: panels with some of the `columns`, and of these rows of a `depth`; None: all."""

    columns: Span | None = None
    depth: Span | None = None


WHOLE = Bounds()


@dataclass(frozen=True)
class Part:
    """`count` panels with `columns` columns each, the first from column `begin` on; panels are padded to `tile.columns`."""

    begin: int
    count: int
    columns: int
    tile: Tile


@dataclass(frozen=True)
class PackedPanels:
    """B of `depth` by `columns`, packed: panels as wide as the register tile, then a narrower one of the columns left.

    Panels are contiguous, row-major in (k, column); the last one is padded to whole vectors. Where the format has dot products
    of pairs, float32 elements are rounded to bfloat16 and packed as 32-bit pairs of neighbours along k, in rows of A as in
    columns of B (VNNI layout); an odd depth is padded with zeros.
    """

    builder: KernelBuilder
    depth: int
    columns: int
    tile: Tile
    format: Format

    @property
    def rows(self) -> int:
        """Rows of a panel: `depth`, or the number of pairs along k."""
        return ceil(self.depth / self.format.k_pack)

    @property
    def elements(self) -> int:
        return self.rows * padded_columns(self.columns, self.tile, self.tile.lanes)

    def parts(self) -> Iterator[Part]:
        if isinstance(self.columns, Size):  # of the last panel, columns beyond the last are padding
            yield Part(0, ceil(self.columns / self.tile.columns), self.tile.columns, self.tile)
            return
        whole, rest = divmod(self.columns, self.tile.columns)
        if whole:
            yield Part(0, whole, self.tile.columns, self.tile)
        if rest:
            lanes = self.tile.lanes
            yield Part(whole * self.tile.columns, 1, rest, Tile(self.tile.rows, ceil(rest / lanes), lanes))

    def _panels(self, part: Part, bounds: Bounds) -> tuple[Expr, Expr]:
        """The first column of a part's first panel within bounds, and how many panels are."""
        if bounds.columns is None:
            return part.begin, part.count
        width, (begin, end) = part.tile.columns, bounds.columns
        low = self.builder.bind(tirx.max(tirx.floordiv(begin - part.begin, width), 0))
        high = tirx.min(part.count, tirx.floordiv(end - part.begin + (width - 1), width))
        return self.builder.bind(part.begin + low * width), self.builder.bind(tirx.max(high - low, 0))

    def pack_columns(self, to: Scratch, element: Element, bounds: Bounds = WHOLE) -> None:
        """Pack B, within bounds, whose elements are contiguous along columns. Columns beyond the last are zero."""
        low, high = bounds.depth or (0, self.rows)
        for part in self.parts():
            begin, count = self._panels(part, bounds)
            with self.builder.loop(count, name="panel") as panel, self.builder.loop(high - low, name="k") as k:
                row = k if bounds.depth is None else self.builder.bind(low + k)
                self._pack_line(to, element, part, row, self.builder.bind(begin + panel * part.tile.columns))

    def _pack_line(self, to: Scratch, element: Element, part: Part, k: Expr, first: Expr) -> None:
        """Row k of the panel whose first column is `first`."""
        builder, width, zero = self.builder, part.tile.columns, tirx.const(0, str(to.buffer.dtype))
        base = builder.bind(to.base + first * self.rows + k * width)
        value = self._line(element, k)
        columns = self._columns_from(part, first)
        builder.dynamic_vector_loop(0, columns, part.tile.lanes, lambda i: builder.store(to.buffer, base + i, value(first + i)))
        with builder.loop(width - columns, name="i") as i:
            builder.store(to.buffer, base + columns + i, zero)

    def _columns_from(self, part: Part, first: Expr) -> Expr:
        """The columns of a panel that begins at column `first`."""
        if isinstance(self.columns, Size):
            return self.builder.bind(tirx.min(self.columns - first, part.columns))
        return part.columns

    def _line(self, element: Element, k: Expr) -> Callable[[Expr], Expr]:
        """Row k of the panels as a function of the column."""
        if self.format.k_pack == 1:
            return lambda column: element(k, column)
        first = self.builder.bind(k * 2)
        second = self.builder.bind(tirx.min(first + 1, self.depth - 1))

        def word(column: Expr) -> Expr:
            high = element(second, column)
            if self.depth % 2:
                high = self.builder.masked(second > first, high, tirx.const(0, "float32"))
            return instruction_word(element(first, column), high)

        return word

    def pack_rows(self, to: Scratch, element: Element, bounds: Bounds = WHOLE) -> None:
        """Pack B whose elements are contiguous along k: squares of `lanes` x `lanes` are transposed in registers.

        Only panels within the bounds' columns are. Columns beyond the last repeat it.
        """
        builder, lanes = self.builder, self.tile.lanes
        side = min(lanes, 1 << least_of(self.rows).bit_length() - 1)
        for part in self.parts():
            width, (begin, count) = part.tile.columns, self._panels(part, bounds)
            with builder.loop(count, name="panel") as panel, builder.loop(width // side, name="square") as square:
                first, column = builder.bind(begin + panel * width), builder.bind(square * side)
                with builder.loop(ceil(self.rows / side), name="k") as block:
                    k = builder.bind(tirx.min(block * side, self.rows - side))
                    self._pack_square(to, element, side, k, first, column, width)

    def _pack_square(self, to: Scratch, element: Element, side: int, k: Expr, first: Expr, column: Expr, width: int) -> None:
        """Pack rows [k, k + side) of `width` columns, from `column` of the panel on that begins at column `first`."""
        builder = self.builder
        rows = builder.local(side * side, str(to.buffer.dtype), "square")
        for r in range(side):
            source = builder.bind(tirx.min(first + column + r, self.columns - 1))
            if self.format.k_pack > 1:
                store_words(builder, Scratch(rows, 0), r * side, side, partial(_neighbour, element, k, source))
                continue
            with builder.loop(side, "vectorized", "lane") as lane:
                builder.store(rows, r * side + lane, element(k + lane, source))
        start = builder.bind(to.base + first * self.rows + column)
        self._store_square(to, transposed(builder, rows, side), side, k, start, width)

    def _store_square(self, to: Scratch, square: Buffer, side: int, k: Expr, start: Expr, width: int) -> None:
        """Store the square to rows [k, k + side) of the panel, from element `start` of row 0 on."""
        builder = self.builder
        for row in range(side):
            base = builder.bind(start + (k + row) * width)
            with builder.loop(side, "vectorized", "lane") as lane:
                builder.store(to.buffer, base + lane, square[row * side + lane])

    def multiply(self, a: ScratchMatrix, b: Scratch, rows: Expr, store: Store, bounds: Bounds = WHOLE) -> None:
        """C = A B for `rows` rows of A, within bounds: `store(row, column, value)` gets each element.

        A is read up to the next multiple of the tile's rows.
        """
        builder = self.builder
        for part in self.parts():
            tiles = builder.bind(tirx.floordiv(rows + (part.tile.rows - 1), part.tile.rows))
            begin, count = self._panels(part, bounds)
            with builder.loop(count, name="panel") as panel, builder.loop(tiles, name="tile") as tile:
                first, start = builder.bind(begin + panel * part.tile.columns), builder.bind(tile * part.tile.rows)
                self._multiply_tile(a, b, part, (first, start, rows), store, bounds.depth)

    def _multiply_tile(
        self,
        a: ScratchMatrix,
        b: Scratch,
        part: Part,
        place: tuple[Expr, Expr, Expr],
        store: Store,
        span: Span | None,
    ) -> None:
        """One register tile: the rows from `start` on of `rows` by the panel that begins at column `first`."""
        first, start, rows = place
        builder, depth, width = self.builder, self.rows, part.tile.columns
        above, left = builder.bind(a.base + start * a.pitch), builder.bind(b.base + first * depth)
        is_one_loop = span is None or isinstance(depth, Size)
        sums = sum_tile(
            builder,
            part.tile,
            self.format,
            (depth,) if is_one_loop else (1, depth),
            lambda row, ks: a.buffer[above + row * a.pitch + ks[-1]],
            lambda column, ks: b.buffer[left + ks[-1] * width + column],
            spans=None if span is None else {0 if is_one_loop else 1: span},
        )
        with builder.loop(builder.bind(tirx.min(rows - start, part.tile.rows)), name="row") as row:
            base = builder.bind(row * width)
            columns = self._columns_from(part, first)
            if isinstance(columns, int):
                sweep(builder, columns, part.tile.lanes, lambda i: store(start + row, first + i, sums[base + i]))
            else:
                builder.dynamic_vector_loop(0, columns, part.tile.lanes, lambda i: store(start + row, first + i, sums[base + i]))


def padded_columns(columns: int, tile: Tile | None, lanes: int) -> int:
    """Columns that packed panels have room for."""
    if isinstance(columns, Size):
        assert tile is not None
        return ceil(columns / tile.columns) * tile.columns
    return ceil(columns / lanes) * lanes


def _neighbour(element: Element, k: Expr, column: Expr, i: Expr) -> Expr:
    """Element `i` (0, 1) of pair `k` of a column."""
    return element(k * 2 + i, column)


def store_words(builder: KernelBuilder, to: Scratch, first: Expr, lanes: int, element: Callable[[Expr], Expr]) -> None:
    """Round and store `lanes` 32-bit pairs, from pair `first` on; `element(i)` is the float32 element i of the row."""
    at = to.base + first
    if lanes == 1:
        builder.store(to.buffer, at, instruction_word(element(0), element(1)))
        return
    numbers = builder.local(2 * lanes, "float32", "numbers")
    for half in (0, lanes):
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(numbers, half + lane, element(half + lane))
    halves = (numbers[tirx.Ramp(half, 1, lanes)] for half in (0, lanes))
    builder.store(to.buffer, tirx.Ramp(at, 1, lanes), neighbour_words(*halves))


def store_line(builder: KernelBuilder, to: Scratch, count: int, lanes: int, element: Callable[[Expr], Expr]) -> None:
    """Round and store a row of `count` float32 elements as 32-bit pairs; an odd count is padded with a zero.

    The last vector of pairs may overlap the one before.
    """
    words = count // 2
    lanes = min(lanes, 1 << max(words, 1).bit_length() - 1)
    if words:
        with builder.loop(ceil(words / lanes), name="words") as number:
            first = builder.bind(tirx.min(number * lanes, words - lanes))
            store_words(builder, to, first, lanes, lambda i: element(first * 2 + i))
    if count % 2:
        builder.store(to.buffer, to.base + words, instruction_word(element(2 * words), tirx.const(0, "float32")))


def tiles_options(m: int, sizes: Sequence[tuple[int, int]], machine: Machine, *, even: bool = False) -> dict[str, list[Tile]]:
    """Register tiles for products of one A of `m` rows with several B of `sizes` (depth, columns), by the tiles' rows.

    The tiles of an entry, one a product, have equally many rows and, given those, the fewest cycles; the entry with the fewest
    cycles in all is first. With `even` the first product's tiles have two vectors, if registers allow it.
    """
    registers = machine.registers

    def best(number: int, rows: int, depth: int, columns: int) -> tuple[float, int]:
        widths = (2,) if even and number == 0 else range(1, 9)
        tiles = (Tile(rows, vectors, machine.lanes) for vectors in widths if rows * vectors + vectors + 1 <= registers)
        return min((_cycles(tile, depth, columns, machine) * ceil(m / rows), tile.vectors) for tile in tiles)

    highest = min(m, MAX_ROWS, (registers - 3) // 2 if even else MAX_ROWS)
    choices = [(rows, [best(number, rows, *size) for number, size in enumerate(sizes)]) for rows in range(1, highest + 1)]
    choices.sort(key=lambda choice: sum(cycles for cycles, _ in choice[1]))
    return {str(rows): [Tile(rows, vectors, machine.lanes) for _, vectors in found] for rows, found in choices}


def _cycles(tile: Tile, depth: int, columns: int, machine: Machine) -> float:
    """Estimated cycles of a tile's rows by all panels."""

    def panel(vectors: int) -> float:
        step = Step(depth * vectors * machine.vector_bytes / _L1_SHARE)
        return tile_cycles(machine, tile.rows, vectors, depth, step) + _ROW_CYCLES * tile.rows

    whole, rest = divmod(ceil(columns / tile.lanes), tile.vectors)
    return whole * panel(tile.vectors) + (panel(rest) if rest else 0.0)
