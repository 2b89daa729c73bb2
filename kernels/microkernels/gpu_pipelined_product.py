"""Matrix products on NVIDIA's matrix unit (mma.sync, from sm_80 on): C[m, n] = sum over k of A[m, k] B[k, n], a tile a block.

The software pipeline of a block: parts of A and B along k pass through `stages` places in shared memory. While warps load
fragments of one part (ldmatrix) and multiply them, copies of the parts behind it are under way; a barrier a part says that it has
arrived everywhere, and that the place which is filled next has been read by all. Sums stay in registers to the end, where the
template's epilogue gets them, two neighbours of a row at a time. As in CUTLASS's multistage kernels for Ampere.

The order of additions is fixed, so results are bitwise reproducible, also where k is split among blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as nest
from math import ceil

from tvm import tirx

from ..codegen import ptx
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..cost.gpu_product import TiledProduct
from .bf16_split import PRODUCTS
from .gpu_operand_tiles import FragmentReader, Source

_WARP = 32
_BAND = 8  # rows of tiles that run side by side, so that they share columns of B in L2
_MMA_ROWS, _MMA_COLUMNS, _MMA_DEPTH = 16, 8, 16
Store = Callable[[Expr, Expr, Expr, Expr], None]  # of batch, m, n, and the sum


@dataclass(frozen=True)
class PipelinedProduct:
    """A batch of products of m x k by k x n and their epilogue.

    `a` and `b` bring parts to stages; `matrix_of_a` and `matrix_of_b` tell an operand's matrix by that of the batch. `kind` is
    what the matrix unit multiplies. `store` gets every sum once; with `stores_pairs` it stores elements of 2 or 4 bytes at the
    place of (m, n) in rows of an even length.
    """

    batch: int
    m: int
    n: int
    k: int
    kind: ptx.Half
    way: TiledProduct
    a: Source
    b: Source
    matrix_of_a: Callable[[Expr], Expr]
    matrix_of_b: Callable[[Expr], Expr]
    store: Store
    stores_pairs: bool

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
    sums = builder.workspace(product.way.splits * results, "float32")
    with builder.blocks(blocks, product.way.tile.threads) as (block, thread):
        _Block(builder, product, thread, sums).emit(block)
    with builder.chunks(results, product.way.splits * results) as i:
        total = builder.name(sums[i])
        for split in range(1, product.way.splits):
            total = builder.name(total + sums[i + split * results])
        line, n = builder.bind(tirx.floordiv(i, product.n)), builder.bind(tirx.floormod(i, product.n))
        product.store(builder.bind(tirx.floordiv(line, product.m)), builder.bind(tirx.floormod(line, product.m)), n, total)


class _Block:
    """The code of one block."""

    def __init__(self, builder: GpuBuilder, product: PipelinedProduct, thread: Expr, sums: Buffer | None = None) -> None:
        self.builder, self.product, self.thread, self.tile = builder, product, thread, product.way.tile
        self.partial_sums = sums  # where they go if k is split
        self.row_blocks, self.column_blocks = self.tile.warp_rows // _MMA_ROWS, self.tile.warp_columns // _MMA_COLUMNS
        self.terms = product.a.layout.terms, product.b.layout.terms
        self.stage_bytes = product.a.layout.size_bytes + product.b.layout.size_bytes

    def emit(self, block: Expr) -> None:
        builder, product, tile = self.builder, self.product, self.tile
        shared = builder.dynamic_shared(tile.stages * self.stage_bytes, "uint8")
        self.base = builder.bind(ptx.shared_address(shared), "base")
        self._place(block)
        self.lane = builder.bind(tirx.floormod(self.thread, _WARP))
        warp, warps_down = builder.bind(tirx.floordiv(self.thread, _WARP)), tile.rows // tile.warp_rows
        self.warp_row = builder.bind(tirx.floormod(warp, warps_down) * tile.warp_rows)
        self.warp_column = builder.bind(tirx.floordiv(warp, warps_down) * tile.warp_columns)
        self.read_a = FragmentReader(builder, product.a.layout, True, self.warp_row, tile.warp_rows, self.lane)
        self.read_b = FragmentReader(builder, product.b.layout, False, self.warp_column, tile.warp_columns, self.lane)
        self.sums = builder.local(self.row_blocks * self.column_blocks * 4, "float32", "sums")
        for cell in range(self.row_blocks * self.column_blocks * 4):
            builder.store(self.sums, cell, tirx.const(0, "float32"))
        product.a.prepare(product.matrix_of_a(self.batch), self.top, self.thread)
        product.b.prepare(product.matrix_of_b(self.batch), self.left, self.thread)
        self._multiply_parts()
        self._store()

    def _place(self, block: Expr) -> None:
        """The block's matrix of the batch, its piece of k, and its tile: down a band of rows of tiles before across."""
        builder, product = self.builder, self.product
        tiles = product.down * product.across
        number = builder.bind(tirx.floormod(block, tiles))
        outer = builder.bind(tirx.floordiv(block, tiles))
        self.batch = builder.bind(tirx.floordiv(outer, product.way.splits))
        self.split = builder.bind(tirx.floormod(outer, product.way.splits))
        band, inside = tirx.floordiv(number, _BAND * product.across), tirx.floormod(number, _BAND * product.across)
        height = builder.bind(tirx.min(_BAND, product.down - band * _BAND))
        self.top = builder.bind((band * _BAND + tirx.floormod(inside, height)) * self.tile.rows)
        self.left = builder.bind(tirx.floordiv(inside, height) * self.tile.columns)
        whole = ceil(product.k / self.tile.depth)
        self.first = builder.bind(self.split * product.parts)
        self.parts = (
            product.parts
            if whole == product.parts * product.way.splits
            else builder.bind(tirx.min(product.parts, whole - self.first))
        )

    def _stage(self, number: Expr) -> Expr:
        """The shared address of the stage that holds a part, by the part's number in the block."""
        turn = tirx.floormod(number, self.tile.stages)
        return self.builder.bind(self.base + tirx.Cast("uint32", turn * self.stage_bytes))

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
        return tirx.const(self.product.a.layout.size_bytes, "uint32")

    def _multiply_parts(self) -> None:
        builder, ahead = self.builder, self.ahead
        for number in range(ahead):
            with builder.when(tirx.const(number, "int32") < self.parts):
                self._fetch(tirx.const(number, "int32"))
                self._finish(tirx.const(number, "int32"))
            builder.do(ptx.commit_copies())
        a_words, b_words = 4 * self.row_blocks * self.terms[0], 2 * self.column_blocks * self.terms[1]
        self.fragments = builder.local(2 * a_words, "uint32", "a"), builder.local(2 * b_words, "uint32", "b")
        with builder.loop(self.parts, name="part") as part:
            builder.do(ptx.wait_for_copies(ahead - 1))
            builder.barrier()
            coming = builder.bind(part + ahead)
            with builder.when(coming < self.parts):
                self._fetch(coming)
            builder.do(ptx.commit_copies())
            self._multiply_part(self._stage(part))
            with builder.when(coming < self.parts):
                self._finish(coming)

    def _multiply_part(self, stage: Expr) -> None:
        """The products of one stage; fragments of the next step of k are loaded before those of this one are multiplied."""
        steps = self.tile.depth // _MMA_DEPTH
        self._load_fragments(stage, 0)
        for step in range(steps):
            if step + 1 < steps:
                self._load_fragments(stage, step + 1)
            for one, other in PRODUCTS[max(self.terms)]:
                if one < self.terms[0] and other < self.terms[1]:
                    self._multiply_step(step, one, other)

    def _load_fragments(self, stage: Expr, step: int) -> None:
        for reader, words, terms, address in (
            (self.read_a, self.fragments[0], self.terms[0], stage),
            (self.read_b, self.fragments[1], self.terms[1], stage + self._b_offset),
        ):
            for term in range(terms):
                reader.load(words, (step % 2 * terms + term) * reader.lines // 16 * 4, address, step, term)

    def _multiply_step(self, step: int, a_term: int, b_term: int) -> None:
        """Add the products of 16 k of one term of A by one of B to all sums of the warp."""
        a_words, b_words = self.fragments
        a_first = (step % 2 * self.terms[0] + a_term) * self.row_blocks * 4
        b_first = (step % 2 * self.terms[1] + b_term) * self.column_blocks * 2
        for i, j in nest(range(self.row_blocks), range(self.column_blocks)):
            sums = [self.sums[_i32((i * self.column_blocks + j) * 4 + r)] for r in range(4)]
            a = [a_words[_i32(a_first + i * 4 + r)] for r in range(4)]
            b = [b_words[_i32(b_first + j * 2 + r)] for r in range(2)]
            self.builder.do(ptx.multiply(sums, a, b, self.product.kind))

    def _store(self) -> None:
        """The epilogue of the thread's sums: two neighbours in each of two rows of every 16 x 8."""
        builder, product = self.builder, self.product
        row = builder.bind(self.top + self.warp_row + tirx.floordiv(self.lane, 4))
        column = builder.bind(self.left + self.warp_column + tirx.floormod(self.lane, 4) * 2)
        for j, i, half in nest(range(self.column_blocks), range(self.row_blocks), range(2)):
            m = builder.bind(row + (i * _MMA_ROWS + half * 8))
            n = builder.bind(column + j * _MMA_COLUMNS)
            cell = (i * self.column_blocks + j) * 4 + half * 2
            if product.stores_pairs:
                with builder.when(tirx.And(m < product.m, n < product.n)):
                    self._store_pair(m, n, cell)
                continue
            for e in range(2):
                with builder.when(tirx.And(m < product.m, n + e < product.n)):
                    self._store_one(m, n + e, self.sums[_i32(cell + e)])

    def _store_pair(self, m: Expr, n: Expr, cell: int) -> None:
        """Two neighbours of a row, computed one by one and stored at once."""
        stores = []
        for e in range(2):
            with self.builder.deferred_stores() as one:
                self._store_one(m, self.builder.bind(n + e) if e else n, self.sums[_i32(cell + e)])
            stores.append(one)
        for pair in zip(*stores, strict=True):
            self.builder.store_vector(pair)

    def _store_one(self, m: Expr, n: Expr, value: Expr) -> None:
        product = self.product
        if self.partial_sums is None:
            product.store(self.batch, m, n, value)
            return
        line = (self.split * product.batch + self.batch) * product.m + m
        self.builder.store(self.partial_sums, line * product.n + n, value)


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")
