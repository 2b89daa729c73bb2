"""A matrix product by a constant fused with reductions over its rows (bias, residual, LayerNorm): nothing between goes to memory.

Each thread computes blocks of whole rows: all columns of a block into scratch that stays in its L2, then the row part. So every
thread reads all of B, which the plain product divides among threads. The loop over panels of B is outside of that over a block's
rows: a block reads each panel once, and its rows of A stay in cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, row_major
from ..codegen.work_stealing import Shares
from ..cost.memory import WORK_PER_OPERATION
from ..cost.product import product_block_bytes
from ..groups.group import Group, Op
from ..microkernels.register_tile import Plane, Tile, TileProduct, emit_tile, tile_options
from ..reduction.row_schedule import RowForm, row_form
from ..reduction.rows import OPERATORS as ROW_OPERATORS
from ..reduction.rows import SCRATCH_BYTES, emit_row, row_operands, row_scratch
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, pointwise_cost
from ..template.values import Reader
from .matmul import Load, MatMulKernel

PRODUCTS = frozenset(["MatMul", "Gemm"])
OPERATORS = ROW_OPERATORS | PRODUCTS


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one float32 product by a constant with reductions and pointwise operators over its rows, where that pays."""
    if target.is_gpu:
        return Refusal("a row would be the work of one thread")
    products = [op for op in group.ops if op.op_type in PRODUCTS]
    if len(products) != 1 or len(group.ops) == 1:
        return Refusal(f"has {len(products)} products before {len(group.ops) - len(products)} other operators")
    (anchor,) = products
    if reason := _product_obstacle(group, anchor):
        return Refusal(reason)
    (result,) = anchor.outputs
    others = replace(group, ops=tuple(op for op in group.ops if op is not anchor), inputs=(*group.inputs, result))
    form = row_form(others, takes_one=True)
    if isinstance(form, Refusal):
        return form
    product = _ProductRows(group, anchor, target, form)
    if reason := product.obstacle():
        return Refusal(reason)
    return Candidate(product.estimate(), product.build)


def _product_obstacle(group: Group, anchor: Op) -> str:
    """Why the product cannot be computed in blocks of whole rows; empty if it can."""
    a, b = anchor.inputs[:2]
    if {group.types[name].dtype for name in (*anchor.inputs, *anchor.outputs) if name} != {"float32"}:
        return "operands of the product are not float32"
    if b not in group.constants or a in group.constants:
        return "the right operand alone of the product is to be constant"
    if any(name in group.producers for name in anchor.inputs):
        return "an operand of the product is computed in the group"
    return "the product is read by others" if anchor.outputs[0] in group.outputs else ""


@dataclass(frozen=True)
class _Blocks:
    """How rows are dealt: `tiles` register tiles of rows to `threads`, blocks of up to `in_block` tiles."""

    threads: int
    tile: Tile
    tiles: int
    in_block: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.in_block * self.tile.rows


class _ProductRows(MatMulKernel):
    """The kernel of a product with reductions over its rows being built."""

    template = "product_rows"

    def __init__(self, group: Group, anchor: Op, target: Target, form: RowForm) -> None:
        super().__init__(group, anchor, target)
        self.form = form
        self.rows, self.columns = self.a.lines, self.b.lines
        self.pitch = ceil(self.columns / self.builder.lanes("float32")) * self.builder.lanes("float32")

    def obstacle(self) -> str:
        """Why the reductions are not over the product's rows, or blocks of whole rows do not pay; empty if neither."""
        if self.batch:
            return "the product is a batch of products"
        if self.form.length != self.columns or prod(self.form.outer) != self.rows or not self.rows:
            return f"{prod(self.form.outer)} rows of {self.form.length} are not the product's {self.rows} of {self.columns}"
        if self.form.scratch_bytes > SCRATCH_BYTES:
            return f"rows of {self.form.length} elements need {self.form.scratch_bytes // 1024} KiB of scratch"
        return ""

    def build(self) -> BuiltKernel:
        builder, form = self.builder, self.form
        flops = 2 * self.rows * self.columns * self.a.depth
        work = self.rows * self.columns * (pointwise_cost(form.group) + 2 * len(form.folds))
        blocks = self._blocks(builder.threads_for(flops // WORK_PER_OPERATION + work))
        results = builder.workspace(blocks.threads * blocks.rows * self.pitch, "float32")
        scratch = row_scratch(form, builder, blocks.threads)
        load_a = self.copy_rows_apart() if self.has_set_conflicts() else self._in_place(self.a)
        load_b = self._panels(self.b, blocks.tile.columns, self._constant(self.b, blocks.tile.columns))
        shares = Shares(builder, blocks.threads, blocks.tiles, flops // WORK_PER_OPERATION + work)
        with builder.loop(blocks.threads, "parallel", "thread") as thread, shares.of(thread) as (begin, end):
            in_run = builder.bind(tirx.floordiv(end - begin + (blocks.in_block - 1), blocks.in_block))
            with builder.loop(in_run, name="block") as i:
                first = builder.bind(begin + i * blocks.in_block)
                count = builder.bind(tirx.max(tirx.min(end - first, blocks.in_block), 0))
                start = builder.bind(first * blocks.tile.rows)
                base = builder.bind((thread * blocks.rows - start) * self.pitch)  # where row 0 of the result would lie
                product = self._product(blocks.tile, load_a, load_b, results, base)
                with builder.loop(ceil(self.columns / blocks.tile.columns), name="n") as n, builder.loop(count, name="m") as m:
                    emit_tile(builder, product, 0, builder.bind(first + m), n)
                stop = tirx.min(start + count * blocks.tile.rows, self.rows)
                with builder.loop(builder.bind(tirx.max(stop - start, 0)), name="row") as j:
                    row = builder.bind(start + j)
                    given = {self.anchor.outputs[0]: self._reader(results, builder.bind(base + row * self.pitch))}
                    emit_row(form, builder, row, thread, scratch, given)
        inplace = tuple(pair for pair in row_operands(form, self.group) if pair[1] != self.a.name)
        return finish(self.template, builder, self.group, flops=flops + work, packed=self.packed, inplace=inplace)

    def _product(self, tile: Tile, load_a: Load, load_b: Load, results: Buffer, base: Expr) -> TileProduct:
        """The product, stored row-major to `results` from element `base` on."""

        def store(batch: Expr, m: Expr, r: Expr, n: Expr, value: Expr) -> None:
            self.builder.store(results, base + m * self.pitch + n, self._with_bias((m, n), value))

        plane = Plane(self.columns, self.columns, self.columns)
        panel = self.panel_of_b(self._constant(self.b, tile.columns), self.a.depth, tile.columns)
        return TileProduct(
            1,
            self.rows,
            plane,
            (self.a.depth,),
            tile,
            self.format,
            load_a,
            load_b,
            store,
            a_padded=False,
            b_padded=True,
            panel=panel,
        )

    def _blocks(self, threads: int) -> _Blocks:
        """Register tiles of rows dealt evenly to threads, in equal blocks whose results fit `product_block_bytes` of L2."""
        share_rows = ceil(self.rows / threads)
        options = tile_options(
            share_rows,
            self.columns,
            self.a.depth,
            self.target.machine,
            shifted_loads=False,
            b_padded=True,
            streams_b=True,
            row_bytes=0 if self.has_set_conflicts() else self.group.types[self.a.name].bytes_of(self.a.depth),
            cuts_last=True,
        )
        tile = self.builder.choose("tile", self.as_shared(options))
        tiles = ceil(self.rows / tile.rows)
        most = max(product_block_bytes(self.target.machine) // (4 * self.pitch * tile.rows), 1)
        threads = min(threads, tiles)
        of_thread = ceil(tiles / threads)
        return _Blocks(threads, tile, tiles, self.builder.choose("block", _block_options(of_thread, most)))

    def _reader(self, results: Buffer, base: Expr) -> Reader:
        """How the row part reads the product: from the row of `results` that begins at element `base`."""
        count = len(self.form.outer)

        def read(index: Index) -> Expr:
            return results[base + row_major(index[count:], self.form.row)]

        return read


def _block_options(tiles: int, most: int) -> dict[str, int]:
    """The legal numbers of tiles in a block, by name, for a thread that has `tiles`: equal blocks of at most `most` first."""
    fewest = ceil(tiles / most)
    sizes = dict.fromkeys(ceil(tiles / blocks) for blocks in range(fewest, 4 * fewest + 1))
    return {str(size): size for size in sizes}
