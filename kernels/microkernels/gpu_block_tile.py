"""Matrix products on a GPU: C[m, n] = sum over k of A[m, k] B[k, n], a tile of C a thread block.

For every `_DEPTH` values of k the block copies its tiles of A and B to shared memory. The template says where each element lies:
an operand may be a matrix, a transposed one, or a convolution's input (implicit GEMM, no im2col matrix). Each thread then adds
products to its register tile. The order of additions is fixed, so results are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as nest
from math import ceil

from tvm import tirx

from ...runtime.hardware.gpu import GpuMachine
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.grids import BLOCK_THREADS

_DEPTH = 16
_WARP, _LANES_A_CLOCK = 32, 128
_FIRST_CLOCKS = 1500  # of a block: indices, the first loads' latency, the epilogue
_RESIDENT = 8  # blocks of a multiprocessor
_FEW_BLOCKS = 128  # fewer of them leave multiprocessors of a large GPU idle


@dataclass(frozen=True)
class BlockTile:
    """The tile of C of a thread block, `rows` x `columns`; each thread has a register tile of `row_sums` x `column_sums`."""

    rows: int
    columns: int

    @property
    def row_sums(self) -> int:
        return max(self.rows * self.columns // BLOCK_THREADS, 1) // self.column_sums

    @property
    def column_sums(self) -> int:
        return max(self.columns // 16, 1)


_TILES = (BlockTile(64, 64), BlockTile(32, 64), BlockTile(32, 32), BlockTile(16, 32), BlockTile(16, 16))


@dataclass(frozen=True)
class GpuProduct:
    """A batch of products of m x k by k x n and their epilogue.

    `a(batch, m, k)` and `b(batch, k, n)` give elements of type `dtype` and are called for indices in bounds only; `a_along_k`
    and `b_along_k` say whether the operand is contiguous along k. `store(batch, m, n, value)` gets every result once.
    """

    batch: int
    m: int
    n: int
    depth: int
    dtype: str
    a: Callable[[Expr, Expr, Expr], Expr]
    b: Callable[[Expr, Expr, Expr], Expr]
    store: Callable[[Expr, Expr, Expr, Expr], None]
    a_along_k: bool
    b_along_k: bool

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.depth


def choose_tile(product: GpuProduct) -> BlockTile:
    """The largest tile that still gives every multiprocessor a block and does not lie mostly beyond the edges of C."""

    def fits(tile: BlockTile) -> bool:
        return _tiles(product, tile) >= _FEW_BLOCKS and tile.rows < 2 * product.m and tile.columns < 2 * product.n

    return next((tile for tile in _TILES if fits(tile)), _TILES[-1])


def product_clocks(product: GpuProduct, machine: GpuMachine, operations: int) -> float:
    """Clocks of the whole GPU for a product, each of whose elements takes so many `operations` on its way to shared memory.

    Blocks of one multiprocessor take turns: what one waits for in memory, others hide.
    """
    tile = choose_tile(product)
    turns = ceil(_tiles(product, tile) / machine.multiprocessors)
    warps, sums = BLOCK_THREADS // _WARP, tile.row_sums * tile.column_sums
    loaded = _DEPTH * warps * (tile.row_sums + tile.column_sums)  # from shared memory, a warp's 128 bytes a clock
    added = _DEPTH * warps * sums * 2 * _WARP / machine.fma_flops
    copied = (tile.rows + tile.columns) * _DEPTH * operations / _LANES_A_CLOCK
    part = max(loaded + added + copied, machine.memory_latency / min(turns, _RESIDENT))
    return _FIRST_CLOCKS + turns * ceil(product.depth / _DEPTH) * part


def emit_product(builder: GpuBuilder, product: GpuProduct) -> None:
    """Write one grid: a thread block for each tile of C of each product of the batch."""
    if product.batch * product.m * product.n == 0:
        return
    tile = choose_tile(product)
    with builder.blocks(_tiles(product, tile), BLOCK_THREADS) as (block, thread):
        _Block(builder, product, tile, thread).emit(block)


def _tiles(product: GpuProduct, tile: BlockTile) -> int:
    return product.batch * -(-product.m // tile.rows) * -(-product.n // tile.columns)


@dataclass(frozen=True)
class _Block:
    """The code of one block. Thread t has column t % 16 of every 16 columns, and row t // 16 of every 16 rows."""

    builder: GpuBuilder
    product: GpuProduct
    tile: BlockTile
    thread: Expr

    def emit(self, block: Expr) -> None:
        builder, product, tile = self.builder, self.product, self.tile
        down, across = -(-product.m // tile.rows), -(-product.n // tile.columns)
        batch = builder.bind(tirx.floordiv(block, down * across)) if product.batch > 1 else tirx.const(0, "int32")
        top = builder.bind(tirx.floormod(tirx.floordiv(block, across), down) * tile.rows)
        left = builder.bind(tirx.floormod(block, across) * tile.columns)
        sums = builder.local(tile.row_sums * tile.column_sums, product.dtype)
        for cell in range(tile.row_sums * tile.column_sums):
            builder.store(sums, cell, tirx.const(0, product.dtype))
        rows = builder.shared(_DEPTH * tile.rows, product.dtype, "rows")
        columns = builder.shared(_DEPTH * tile.columns, product.dtype, "columns")
        with builder.loop(-(-product.depth // _DEPTH), name="part") as part:
            first = builder.bind(part * _DEPTH)
            self._copy(rows, tile.rows, top, product.m, first, product.a_along_k, lambda m, k: product.a(batch, m, k))
            self._copy(columns, tile.columns, left, product.n, first, product.b_along_k, lambda n, k: product.b(batch, k, n))
            builder.barrier()
            with builder.loop(_DEPTH, name="k") as k:
                self._multiply(sums, rows, columns, k)
            builder.barrier()
        for i, j in nest(range(tile.row_sums), range(tile.column_sums)):
            m, n = builder.bind(top + self._row(i)), builder.bind(left + self._column(j))
            with builder.when(tirx.And(m < product.m, n < product.n)):
                product.store(batch, m, n, sums[tirx.const(i * tile.column_sums + j, "int32")])

    def _copy(
        self, shared: Buffer, lines: int, begin: Expr, end: int, first: Expr, along_k: bool, load: Callable[[Expr, Expr], Expr]
    ) -> None:
        """shared[k, line] = load(begin + line, first + k), zero out of bounds; a line is a row of A or a column of B.

        Neighbouring threads read neighbouring addresses (coalesced).
        """
        builder = self.builder
        with builder.loop(-(-lines * _DEPTH // BLOCK_THREADS), name="piece") as piece:
            number = builder.bind(piece * BLOCK_THREADS + self.thread)
            if along_k:
                line, k = tirx.floordiv(number, _DEPTH), tirx.floormod(number, _DEPTH)
            else:
                line, k = tirx.floormod(number, lines), tirx.floordiv(number, lines)
            line, k = builder.bind(line), builder.bind(k)
            place, depth = builder.bind(begin + line), builder.bind(first + k)
            inside = tirx.And(place < end, depth < self.product.depth)
            value = tirx.if_then_else(inside, load(place, depth), tirx.const(0, self.product.dtype))
            builder.store(shared, k * lines + line, value)

    def _multiply(self, sums: Buffer, rows: Buffer, columns: Buffer, k: Expr) -> None:
        """Add the products of one k to the thread's sums."""
        builder, tile = self.builder, self.tile
        a = [builder.name(rows[k * tile.rows + self._row(i)]) for i in range(tile.row_sums)]
        b = [builder.name(columns[k * tile.columns + self._column(j)]) for j in range(tile.column_sums)]
        for i, j in nest(range(tile.row_sums), range(tile.column_sums)):
            cell = tirx.const(i * tile.column_sums + j, "int32")
            builder.store(sums, cell, sums[cell] + a[i] * b[j])

    def _row(self, i: int) -> Expr:
        return tirx.floordiv(self.thread, 16) + i * 16

    def _column(self, j: int) -> Expr:
        return tirx.floormod(self.thread, 16) + j * 16
