"""Matrix products by warpgroups (wgmma, sm_90a): C[m, n] = sum over k of A[m, k] B[k, n], persistent and warp-specialised.

As many blocks as multiprocessors take tile after tile. The first warpgroup of a block has few registers and one thread at work:
it copies parts of A and B along k to the stages of shared memory, as soon as they are free, also those of the next tile. The
others have the registers: each multiplies 64 rows of the tile by all of its columns, in groups of products of one part, and
gives a stage back when the group after it is under way. Two mbarriers a stage say that it is full and that it is free. As in
CUTLASS's warp-specialised kernels for Hopper, one tile for all consumers ("cooperative").

Each warp says for itself that it has read a stage, so that nothing is assumed of how far the warps of a group are apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

from tvm import tirx

from ..codegen import ptx, ptx_hopper
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.ptx_hopper import MBARRIER_BYTES, STEP_DEPTH, u32
from ..cost.gpu_warpgroup_product import DEPTH, GROUP_ROWS, GROUP_THREADS, WarpgroupWay
from .gpu_pipelined_product import MatrixOf, Store, emit_sums_of_splits, place_of_tile
from .gpu_tile_copies import TileCopies

_WARP = 32
_ALIGNMENT = 1024  # of a stage: after so many bytes the exchange of chunks repeats
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of a thread; two warpgroups of consumers


@dataclass(frozen=True)
class WarpgroupProduct:
    """A batch of products of m x k by k x n and their epilogue.

    `a` and `b` bring parts to stages; `matrix_of_a` and `matrix_of_b` tell an operand's matrix by that of the batch. `store` gets
    every sum once; with `stores_neighbours` it stores elements of 2 or 4 bytes at the place of (m, n) in rows of even length.
    """

    batch: int
    m: int
    n: int
    k: int
    kind: ptx.Half
    way: WarpgroupWay
    multiprocessors: int
    a: TileCopies
    b: TileCopies
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
    def items(self) -> int:
        """Tiles of all pieces of k of all matrices."""
        return self.batch * self.way.splits * self.down * self.across

    @property
    def whole(self) -> int:
        """Parts of k."""
        return ceil(self.k / DEPTH)

    @property
    def parts(self) -> int:
        """Parts of k of an item; the last of several pieces of k may have fewer."""
        return ceil(self.whole / self.way.splits)


def emit_warpgroup_product(builder: GpuBuilder, product: WarpgroupProduct) -> None:
    """Write the grid that computes all tiles; where k is split, one that leaves sums in the workspace, and one that adds them."""
    tile, splits = product.way.tile, product.way.splits
    results = product.batch * product.m * product.n
    sums = builder.workspace(splits * results, "float32") if splits > 1 else None
    with builder.blocks(min(product.items, product.multiprocessors), tile.threads) as (block, thread):
        _Block(builder, product, block, thread, sums).emit()
    if sums is not None:
        emit_sums_of_splits(builder, (product.batch, product.m, product.n), splits, sums, product.store)


@dataclass
class _Item:
    """A tile of a piece of k of a matrix of the batch: its first row and column, its first part, and how many it has."""

    batch: Expr
    split: Expr
    top: Expr
    left: Expr
    first: Expr
    parts: Expr


class _Ring:
    """Where a role is in the ring of stages: registers that go on from item to item."""

    def __init__(self, builder: GpuBuilder, stages: int) -> None:
        self._builder, self._stages = builder, stages
        self._stage, self._parity = builder.local(1, "int32", "stage"), builder.local(1, "int32", "parity")
        for register in (self._stage, self._parity):
            builder.store(register, _ZERO, _ZERO)

    @property
    def stage(self) -> Expr:
        return self._stage[_ZERO]

    @property
    def parity(self) -> Expr:
        """Of how often the ring has been gone around."""
        return self._parity[_ZERO]

    def advance(self) -> None:
        builder = self._builder
        builder.store(self._stage, _ZERO, self.stage + 1)
        with builder.when(tirx.EQ(self.stage, self._stages)):
            builder.store(self._stage, _ZERO, _ZERO)
            builder.store(self._parity, _ZERO, self.parity ^ 1)


class _Block:
    """The code of one block."""

    def __init__(self, builder: GpuBuilder, product: WarpgroupProduct, block: Expr, thread: Expr, sums: Buffer | None) -> None:
        self.builder, self.product, self.block, self.thread = builder, product, block, thread
        self.tile = product.way.tile
        self.partial_sums = sums  # where they go if k is split
        self.blocks = min(product.items, product.multiprocessors)

    def emit(self) -> None:
        builder, tile = self.builder, self.tile
        stages_bytes = tile.stages * tile.stage_bytes
        shared = builder.dynamic_shared(stages_bytes + _ALIGNMENT + 2 * tile.stages * MBARRIER_BYTES, "uint8")
        aligned = (ptx.shared_address(shared) + u32(_ALIGNMENT - 1)) & u32(0xFFFFFFFF - (_ALIGNMENT - 1))
        self.base = builder.bind(aligned, "base")
        self.mbarriers = builder.bind(self.base + u32(stages_bytes), "mbarriers")
        with builder.when(tirx.EQ(self.thread, 0)):
            for stage in range(tile.stages):
                builder.do(ptx_hopper.init_mbarrier(self._full(_i32(stage)), 1))
                builder.do(ptx_hopper.init_mbarrier(self._free(_i32(stage)), tile.consumers * GROUP_THREADS // _WARP))
            builder.do(ptx_hopper.fence_mbarriers())
        builder.barrier()
        self.done = builder.local(1, "uint32", "done")
        with builder.when(self.thread < GROUP_THREADS):
            self._change_registers(_PRODUCER_REGISTERS)
            with builder.when(tirx.EQ(self.thread, 0)):
                self._produce()
        with builder.when(self.thread >= GROUP_THREADS):
            self._change_registers(_CONSUMER_REGISTERS)
            self._consume()

    def _change_registers(self, count: int) -> None:
        """With one consumer all have what they need: 255 each."""
        if self.tile.consumers > 1:
            self.builder.do(ptx_hopper.set_registers(count, "dec" if count == _PRODUCER_REGISTERS else "inc"))

    def _full(self, stage: Expr) -> Expr:
        return self.mbarriers + u32(stage * MBARRIER_BYTES)

    def _free(self, stage: Expr) -> Expr:
        return self.mbarriers + u32((stage + self.tile.stages) * MBARRIER_BYTES)

    def _address(self, stage: Expr) -> Expr:
        return self.builder.bind(self.base + u32(stage * self.tile.stage_bytes))

    def _item(self, turn: Expr) -> _Item:
        builder, product = self.builder, self.product
        item = builder.bind(turn * self.blocks + self.block)
        tiles = product.down * product.across
        number, outer = builder.bind(tirx.floormod(item, tiles)), builder.bind(tirx.floordiv(item, tiles))
        split = builder.bind(tirx.floormod(outer, product.way.splits))
        row, column = place_of_tile(builder, number, product.down, product.across)
        first = builder.bind(split * product.parts)
        is_even = product.whole == product.parts * product.way.splits
        parts = product.parts if is_even else builder.bind(tirx.min(product.parts, product.whole - first))
        top, left = builder.bind(row * self.tile.rows), builder.bind(column * self.tile.columns)
        return _Item(builder.bind(tirx.floordiv(outer, product.way.splits)), split, top, left, first, parts)

    def _turns(self) -> tuple[int, bool]:
        """How many items a block takes, and whether some blocks take one fewer."""
        return ceil(self.product.items / self.blocks), self.product.items % self.blocks > 0

    def _produce(self) -> None:
        """One thread: copies of all parts of all items of the block."""
        builder, product, tile = self.builder, self.product, self.tile
        ring = _Ring(builder, tile.stages)
        turns, is_ragged = self._turns()
        with builder.loop(turns, name="turn") as turn, builder.when(_is_item(turn, self, is_ragged)):
            item = self._item(turn)
            product.a.prepare(product.matrix_of_a(item.batch), item.top)
            product.b.prepare(product.matrix_of_b(item.batch), item.left)
            with builder.loop(item.parts, name="part") as part:
                full = builder.bind(self._full(ring.stage))
                ptx_hopper.wait(builder, self.done, self._free(ring.stage), u32(ring.parity ^ 1))
                builder.do(ptx_hopper.arrive_and_expect(full, product.a.tile.size_bytes + product.b.tile.size_bytes))
                number, to = builder.bind(item.first + part), self._address(ring.stage)
                product.a.copy(number, to, full)
                product.b.copy(number, to + u32(product.a.tile.size_bytes), full)
                ring.advance()

    def _consume(self) -> None:
        """A warpgroup: 64 rows of all items of the block."""
        builder, tile = self.builder, self.tile
        ring = _Ring(builder, tile.stages)
        self.lane = builder.bind(tirx.floormod(self.thread, _WARP))
        group = builder.bind(tirx.floordiv(self.thread, GROUP_THREADS) - 1)
        self.a_offset = builder.bind(u32(group * self.product.a.tile.offset(GROUP_ROWS)))
        warp = tirx.floordiv(tirx.floormod(self.thread, GROUP_THREADS), _WARP)
        self.row = builder.bind(group * GROUP_ROWS + warp * 16 + tirx.floordiv(self.lane, 4))
        self.column = builder.bind(tirx.floormod(self.lane, 4) * 2)
        self.sums = builder.local(tile.columns // 2, "float32", "sums")
        self.before = builder.local(1, "int32", "before")  # the stage whose products are under way
        turns, is_ragged = self._turns()
        with builder.loop(turns, name="turn") as turn, builder.when(_is_item(turn, self, is_ragged)):
            item = self._item(turn)
            with builder.loop(item.parts, name="part") as part:
                self._multiply_part(ring, part)
            builder.do(ptx_hopper.wait_for_products(0))
            self._give_back()
            self._store(item)

    def _multiply_part(self, ring: _Ring, part: Expr) -> None:
        builder, product = self.builder, self.product
        ptx_hopper.wait(builder, self.done, self._full(ring.stage), u32(ring.parity))
        stage = self._address(ring.stage)
        a = builder.bind(product.a.tile.described(stage + self.a_offset))
        b = builder.bind(product.b.tile.described(stage + u32(product.a.tile.size_bytes)))
        cells = [self.sums[_i32(i)] for i in range(self.tile.columns // 2)]
        builder.do(ptx_hopper.fence_warpgroup())
        for step in range(DEPTH // STEP_DEPTH):
            keeps = part > 0 if step == 0 else tirx.const(True, "bool")
            operands = a + product.a.tile.step(step), b + product.b.tile.step(step)
            along = {"a_along_k": product.a.tile.along_k, "b_along_k": product.b.tile.along_k}
            builder.do(ptx_hopper.multiply(cells, *operands, product.kind, keeps, **along))
        builder.do(ptx_hopper.commit_products())
        builder.do(ptx_hopper.wait_for_products(1))
        with builder.when(part > 0):
            self._give_back()
        builder.store(self.before, _ZERO, ring.stage)
        ring.advance()

    def _give_back(self) -> None:
        """The warp has read the stage before."""
        with self.builder.when(tirx.EQ(self.lane, 0)):
            self.builder.do(ptx_hopper.arrive(self._free(self.before[_ZERO])))

    def _store(self, item: _Item) -> None:
        """The epilogue of the thread's sums: two neighbours of a row at a time."""
        builder, product = self.builder, self.product
        row, column = builder.bind(item.top + self.row), builder.bind(item.left + self.column)
        for i in range(0, self.tile.columns // 2, 2):
            m, n = builder.bind(row + i // 2 % 2 * 8), builder.bind(column + i // 4 * 8)
            if product.stores_neighbours:
                with builder.when(tirx.And(m < product.m, n < product.n)):
                    builder.store_neighbours(2, partial(self._store_one, item, m, n, i))
                continue
            for e in range(2):
                with builder.when(tirx.And(m < product.m, n + e < product.n)):
                    self._store_one(item, m, n, i, e)

    def _store_one(self, item: _Item, m: Expr, n: Expr, number: int, e: int) -> None:
        product, value = self.product, self.sums[_i32(number + e)]
        n = self.builder.bind(n + e) if e else n
        if self.partial_sums is None:
            product.store(item.batch, m, n, value)
            return
        line = (item.split * product.batch + item.batch) * product.m + m
        self.builder.store(self.partial_sums, line * product.n + n, value)


def _is_item(turn: Expr, block: _Block, is_ragged: bool) -> Expr:
    """Whether a block has an item in a turn."""
    if not is_ragged:
        return tirx.const(True, "bool")
    return turn * block.blocks + block.block < block.product.items


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


_ZERO = _i32(0)
