"""Matrix products on the matrix unit of a GPU: C[m, n] = sum over k of A[m, k] B[k, n], a tile a block.

The software pipeline of a block: parts of A and B along k pass through `stages` places in shared memory. While warps load
fragments of one part and multiply them, copies of the parts behind it are under way; a barrier a part says that it has arrived
everywhere, and that the place which is filled next has been read by all. Sums stay in registers to the end, where the template's
epilogue gets them, a few neighbours of a row at a time. As in CUTLASS's multistage kernels for Ampere.

The order of additions is fixed, so results are bitwise reproducible, also where k is split among blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as nest
from math import ceil

from tvm import tirx

from ..codegen.builder import Buffer, Expr
from ..codegen.division import remainder
from ..codegen.gpu_builder import GpuBuilder
from ..cost.gpu_product import TiledProduct
from .bf16_split import PRODUCTS
from .gpu_matrix_unit import MatrixUnit
from .gpu_operand_tiles import Source

_BAND = 8  # rows of tiles that run side by side, so that they share columns of B in L2
Store = Callable[[Expr, Expr, Expr, Expr], None]  # of batch, m, n, and the sum
MatrixOf = Callable[[Expr], Expr]  # of an operand, by that of the batch


@dataclass(frozen=True)
class PipelinedProduct:
    """A batch of products of m x k by k x n and their epilogue.

    `a` and `b` bring parts to stages; `matrix_of_a` and `matrix_of_b` tell an operand's matrix by that of the batch. `store` gets
    every sum once; with `stores_neighbours` it stores elements of 2 or 4 bytes at the place of (m, n) in rows whose length is a
    multiple of the unit's neighbours.
    """

    batch: int
    m: int
    n: int
    k: int
    unit: MatrixUnit
    way: TiledProduct
    a: Source
    b: Source
    matrix_of_a: MatrixOf
    matrix_of_b: MatrixOf
    store: Store
    stores_neighbours: bool

    @property
    def down(self) -> int:
        return ceil(self.m / self.way.tile.rows)

    @property
    def across(self) -> int:
        return ceil(self.n / self.way.tile.columns)

    @property
    def parts(self) -> int:
        """Parts of k that a block multiplies; the last of several pieces of k may have fewer."""
        return ceil(ceil(self.k / self.way.tile.depth) / self.way.splits)


def emit_pipelined_product(builder: GpuBuilder, product: PipelinedProduct) -> None:
    """Write the grid of all tiles; where k is split, one that leaves sums in the workspace, and one that adds and stores them."""
    blocks = product.batch * product.down * product.across * product.way.splits
    if product.way.splits == 1:
        with builder.blocks(blocks, product.way.tile.threads) as (block, thread):
            _Block(builder, product, thread).emit(block)
        return
    results = product.batch * product.m * product.n
    sums = builder.workspace(product.way.splits * results, product.unit.sum_type)
    with builder.blocks(blocks, product.way.tile.threads) as (block, thread):
        _Block(builder, product, thread, sums).emit(block)
    emit_sums_of_splits(builder, (product.batch, product.m, product.n), product.way.splits, sums, product.store)


def emit_sums_of_splits(builder: GpuBuilder, shape: tuple[int, int, int], splits: int, sums: Buffer, store: Store) -> None:
    """Write the grid that adds the sums of each piece of k, [splits, batch, m, n], in order, and stores them."""
    batch, m, n = shape
    results = batch * m * n
    with builder.chunks(results, splits * results) as i:
        total = builder.name(sums[i])
        for split in range(1, splits):
            total = builder.name(total + sums[i + split * results])
        line, column = builder.bind(tirx.floordiv(i, n)), builder.bind(tirx.floormod(i, n))
        store(builder.bind(tirx.floordiv(line, m)), builder.bind(tirx.floormod(line, m)), column, total)


def place_of_tile(builder: GpuBuilder, number: Expr, down: int, across: int) -> tuple[Expr, Expr]:
    """Row and column of a tile by its number: down a band of rows of tiles before across."""
    band, inside = tirx.floordiv(number, _BAND * across), tirx.floormod(number, _BAND * across)
    height = builder.bind(tirx.min(_BAND, down - band * _BAND))
    return band * _BAND + tirx.floormod(inside, height), tirx.floordiv(inside, height)


class _Block:
    """The code of one block."""

    def __init__(self, builder: GpuBuilder, product: PipelinedProduct, thread: Expr, sums: Buffer | None = None) -> None:
        self.builder, self.product, self.thread, self.tile = builder, product, thread, product.way.tile
        self.unit = unit = product.unit
        self.partial_sums = sums  # where they go if k is split
        self.row_blocks, self.column_blocks = self.tile.warp_rows // unit.rows, self.tile.warp_columns // unit.columns
        self.terms = product.a.layout.terms, product.b.layout.terms
        self.stage_chunks = product.a.layout.chunks + product.b.layout.chunks

    def emit(self, block: Expr) -> None:
        builder, product, tile, unit = self.builder, self.product, self.tile, self.unit
        self.base = builder.bind(unit.allocate(tile.stages * self.stage_chunks), "base")
        self._place(block)
        self.lane = builder.bind(tirx.floormod(self.thread, unit.lanes))
        warp, warps_down = builder.bind(tirx.floordiv(self.thread, unit.lanes)), tile.rows // tile.warp_rows
        self.warp_row = builder.bind(tirx.floormod(warp, warps_down) * tile.warp_rows)
        self.warp_column = builder.bind(tirx.floordiv(warp, warps_down) * tile.warp_columns)
        self.a = unit.fragments(product.a.layout, self.warp_row, tile.warp_rows, self.lane, is_a=True)
        self.b = unit.fragments(product.b.layout, self.warp_column, tile.warp_columns, self.lane, is_a=False)
        cells = self.row_blocks * self.column_blocks * unit.sums
        self.sums = builder.local(cells, unit.register_type, "sums")
        for cell in range(cells):
            builder.store(self.sums, cell, tirx.const(0, unit.register_type))
        product.a.prepare(product.matrix_of_a(self.batch), self.top, self.thread)
        product.b.prepare(product.matrix_of_b(self.batch), self.left, self.thread)
        self._multiply_parts()
        self._store()

    def _place(self, block: Expr) -> None:
        """The block's matrix of the batch, its piece of k, and its tile."""
        builder, product = self.builder, self.product
        tiles = product.down * product.across
        number = builder.bind(tirx.floormod(block, tiles))
        outer = builder.bind(tirx.floordiv(block, tiles))
        self.batch = builder.bind(tirx.floordiv(outer, product.way.splits))
        self.split = builder.bind(tirx.floormod(outer, product.way.splits))
        row, column = place_of_tile(builder, number, product.down, product.across)
        self.top, self.left = builder.bind(row * self.tile.rows), builder.bind(column * self.tile.columns)
        whole = ceil(product.k / self.tile.depth)
        self.first = builder.bind(self.split * product.parts)
        self.parts = (
            product.parts
            if whole == product.parts * product.way.splits
            else builder.bind(tirx.min(product.parts, whole - self.first))
        )

    def _stage(self, number: Expr) -> Expr:
        """The shared address of the stage that holds a part, by the part's number in the block."""
        turn = remainder(number, self.tile.stages, self.product.parts + self.tile.stages)
        return self.builder.bind(self.base + self.unit.offset(turn * self.stage_chunks))

    def _fetch(self, number: Expr) -> None:
        """Begin to bring a part of both operands."""
        stage, part = self._stage(number), self.builder.bind(self.first + number)
        self.product.a.fetch(part, stage)
        self.product.b.fetch(part, stage + self._b_offset)

    def _finish(self, number: Expr) -> None:
        stage = self._stage(number)
        self.product.a.finish(stage)
        self.product.b.finish(stage + self._b_offset)

    @property
    def ahead(self) -> int:
        """Parts that are under way while one is multiplied."""
        return self.tile.stages - 1

    @property
    def _b_offset(self) -> Expr:
        return self.unit.offset(self.product.a.layout.chunks)

    def _multiply_parts(self) -> None:
        builder, unit, ahead = self.builder, self.unit, self.ahead
        for number in range(ahead):
            with builder.when(tirx.const(number, "int32") < self.parts):
                self._fetch(tirx.const(number, "int32"))
                self._finish(tirx.const(number, "int32"))
            unit.commit()
        with builder.loop(self.parts, name="part") as part:
            unit.wait(ahead - 1)
            builder.barrier()
            coming = builder.bind(part + ahead)
            with builder.when(coming < self.parts):
                self._fetch(coming)
            unit.commit()
            unit.pin()
            self._multiply_part(self._stage(part))
            unit.pin()
            with builder.when(coming < self.parts):
                self._finish(coming)

    def _multiply_part(self, stage: Expr) -> None:
        """The products of one stage; fragments of the next step of k are loaded before those of this one are multiplied."""
        steps = self.tile.depth // self.unit.depth
        self._load_fragments(stage, 0)
        for step in range(steps):
            if step + 1 < steps:
                self._load_fragments(stage, step + 1)
            for one, other in PRODUCTS[max(self.terms)]:
                if one < self.terms[0] and other < self.terms[1]:
                    self.unit.multiply(self.sums, self.a, self.b, step % 2, (one, other))

    def _load_fragments(self, stage: Expr, step: int) -> None:
        for fragments, terms, address in (
            (self.a, self.terms[0], stage),
            (self.b, self.terms[1], stage + self._b_offset),
        ):
            for term in range(terms):
                fragments.load(step % 2, address, step, term)

    def _store(self) -> None:
        """The epilogue of the thread's sums: neighbours of a row of each of a block's groups."""
        builder, product, unit = self.builder, self.product, self.unit
        of_row, of_column = unit.place(self.lane)
        row = builder.bind(self.top + self.warp_row + of_row)
        column = builder.bind(self.left + self.warp_column + of_column)
        for j, i, number in nest(range(self.column_blocks), range(self.row_blocks), range(len(unit.groups))):
            down, across = unit.groups[number]
            m = builder.bind(row + (i * unit.rows + down))
            n = builder.bind(column + (j * unit.columns + across))
            cell = (i * self.column_blocks + j) * unit.sums + number * unit.neighbours
            if product.stores_neighbours:
                with builder.when(tirx.And(m < product.m, n < product.n)):
                    self._store_neighbours(m, n, cell)
                continue
            for e in range(unit.neighbours):
                with builder.when(tirx.And(m < product.m, n + e < product.n)):
                    self._store_one(m, n + e, self.sums[_i32(cell + e)])

    def _store_neighbours(self, m: Expr, n: Expr, cell: int) -> None:
        """Neighbours of a row, computed one by one and stored at once."""
        self.builder.store_neighbours(
            self.unit.neighbours,
            lambda e: self._store_one(m, self.builder.bind(n + e) if e else n, self.sums[_i32(cell + e)]),
        )

    def _store_one(self, m: Expr, n: Expr, value: Expr) -> None:
        product = self.product
        if self.unit.register_type != self.unit.sum_type:
            value = tirx.Cast(self.unit.sum_type, value)
        if self.partial_sums is None:
            product.store(self.batch, m, n, value)
            return
        line = (self.split * product.batch + self.batch) * product.m + m
        self.builder.store(self.partial_sums, line * product.n + n, value)


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")
