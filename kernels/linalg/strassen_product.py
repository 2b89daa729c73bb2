"""Strassen's algorithm for products by constant weights (strassen_tables.py), shared by MatMul and 1x1 convolutions.

Sums of blocks of A are made once, into scratch; those of the weights at compile time. Then, panel by panel of columns, register
tiles multiply sums of A by sums of B into scratch that stays in L2, from where the blocks of C are added up and go through the
epilogue. While a panel is multiplied, the next one is prefetched from memory, a part at each step of k; so are the next rows of
sums of A, which are too short for the hardware prefetcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr, Index, KernelBuilder, unravel
from ..codegen.work_stealing import Shares
from ..cost.estimate import with_bytes, with_epilogue
from ..cost.memory import WORK_PER_OPERATION
from ..cost.strassen import StrassenChoice, strassen_choices
from ..formats.format import F32
from ..groups.group import Group, Op
from ..microkernels.packing import Panel
from ..microkernels.register_tile import sum_tile, tile_options
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import finish
from .matmul import Side
from .strassen_tables import PackBilinear, combine, strassen

TYPE = "float32"
_NEAR_SHARE = 0.375  # of L2, for the products with a panel, beside the panel and the rows that it multiplies
_LINE = 16  # float32 numbers in a cache line
Place = Callable[[Expr], Expr]
Store = Callable[[Expr, Expr, Expr], None]


class StrassenProduct:
    """The kernel being built: blocks of A are m x k, blocks of B k x n, blocks of C m x n.

    Row r of A begins at element `begin(r)` of its parameter. `store(r, c, value)`, the epilogue, gets C[r, c] once; outputs may
    take the memory of `inplace` operands.
    """

    def __init__(
        self,
        template: str,
        group: Group,
        anchor: Op,
        target: Target,
        builder: KernelBuilder,
        a: Side,
        b: Side,
        *,
        begin: Place,
        store: Store,
        inplace: tuple[tuple[int, str], ...],
    ) -> None:
        self.template, self.group, self.anchor, self.target, self.builder = template, group, anchor, target, builder
        self.a, self.b, self.begin, self.store, self.inplace = a, b, begin, store, inplace

    def plan(self, followed: Group, prepare: Callable[[], None] = lambda: None) -> Candidate | Refusal:
        """The candidate; a Refusal where the product is too small for blocks. `prepare` emits statements before all others.

        `followed`, the group without views around the anchor, has the epilogue that the estimate counts.
        """
        choices = strassen_choices(self.a.lines, self.b.lines, self.a.depth, self.target.machine)
        if not choices:
            return Refusal("is too small to be cut into blocks, or so large that their sums would take too much memory")
        streamed = with_bytes(choices[0].estimate, self.group).streamed_bytes
        estimate = replace(choices[0].estimate, streamed_bytes=streamed)

        def emit() -> BuiltKernel:
            prepare()
            return self._build(choices)

        estimate = with_epilogue(estimate, followed, self.target.machine, self.anchor)
        return Candidate(estimate, emit, transforms_weights=True)

    def _build(self, choices: Sequence[StrassenChoice]) -> BuiltKernel:
        self._choose_sizes(choices)
        builder, one = self.builder, self.one
        pack = PackBilinear(one, self.a.depth, self.b.lines, self.b.lines_last, (self.k, self.n), self.tile.columns)
        kind = pack.packed_type(self.group.types[self.b.name])
        key = packed_name(self.b.name)
        self.weights = builder.parameter(key, kind.elements, kind.dtype)
        flops = 2 * one.products * self.m * self.k * self.n
        threads = builder.threads_for(flops // WORK_PER_OPERATION)
        self.sums = builder.workspace(one.products * self.sum_stride, TYPE)
        self.made = builder.workspace(threads * one.products * self.made_stride, TYPE)
        self._add_blocks()
        shares = Shares(builder, threads, self.panels * self.parts, flops // WORK_PER_OPERATION)
        with builder.loop(threads, "parallel", "thread") as thread, shares.of(thread) as (begin, end):
            mine = builder.bind(thread * (one.products * self.made_stride))
            with builder.loop(builder.bind(end - begin), name="part") as i:
                panel, part = (builder.bind(at) for at in unravel(builder.bind(begin + i), (self.panels, self.parts)))
                first = builder.bind(part * self.size)
                count = builder.bind(tirx.min(self.m - first, self.size))
                self._multiply(mine, first, count, panel)
                with builder.loop(count, name="row") as row:
                    self._add_products(builder.bind(mine + row * self.tile.columns), builder.bind(first + row), panel)
        packed = {key: Operand(self.b.name, pack)}
        return finish(self.template, builder, self.group, flops=flops, packed=packed, inplace=self.inplace)

    def _choose_sizes(self, choices: Sequence[StrassenChoice]) -> None:
        """Choose the levels, extents of blocks, register tile, and the number of rows of blocks multiplied by a panel at once."""
        lanes = self.builder.lanes(TYPE)
        self.one = one = strassen(self.builder.choose("levels", {str(c.levels): c.levels for c in choices}))
        self.m, self.k = ceil(self.a.lines / one.rows), ceil(self.a.depth / one.depth)
        self.n = ceil(self.b.lines / (one.columns * lanes)) * lanes
        tiles = tile_options(self.m, self.n, self.k, self.target.machine, shifted_loads=False, b_padded=True, streams_b=True)
        self.tile = self.builder.choose("tile", tiles)
        self.panels, rows = ceil(self.n / self.tile.columns), ceil(self.m / self.tile.rows)
        most = max(self.target.machine.l2.part_bytes(_NEAR_SHARE) // (4 * one.products * self.tile.rows * self.tile.columns), 1)
        self.tiles = ceil(rows / ceil(rows / most))  # register tiles of rows in a part
        self.size = self.tiles * self.tile.rows
        self.parts = ceil(self.m / self.size)
        self.pitch = _odd_lines(self.k)
        self.sum_stride = _odd_lines(self.parts * self.size * self.pitch)
        self.made_stride = _odd_lines(self.size * self.tile.columns)

    def _add_blocks(self) -> None:
        """Store the sums of blocks of A to scratch; rows and columns beyond A's edges count as zeros."""
        builder, one = self.builder, self.one
        less_rows, less_depth = one.rows * self.m - self.a.lines, one.depth * self.k - self.a.depth
        runs = [(0, self.m - less_rows, one.rows), (self.m - less_rows, less_rows, one.rows - 1)]
        spans = [(0, self.k - less_depth, one.depth), (self.k - less_depth, less_depth, one.depth - 1)]
        for begin, count, rows in runs:
            if count:
                with builder.chunks(count, 2 * count * self.k * one.products) as i:
                    row = builder.bind(begin + i)
                    for first, extent, depth in spans:
                        self._add_rows(row, first, extent, (rows, depth))

    def _add_rows(self, row: Expr, first: int, extent: int, blocks: tuple[int, int]) -> None:
        """Elements [first, first + extent) of row `row` of all sums; `blocks` (down, across) of A have these elements."""
        builder, one, kind = self.builder, self.one, self.group.types[self.a.name]
        source = builder.parameter(self.a.name, kind.elements, kind.dtype)
        begins = [builder.bind(self.begin(builder.bind(i * self.m + row))) for i in range(blocks[0])]

        def vector(at: Expr) -> None:
            k, values = first + at, {}
            for i, begin in enumerate(begins):
                for j in range(blocks[1]):
                    values[i * one.depth + j] = builder.name(source[begin + (j * self.k + k)])
            for product, factors in enumerate(one.left):
                builder.store(self.sums, product * self.sum_stride + row * self.pitch + k, combine(factors, values))

        builder.vector_loop(extent, builder.lanes(TYPE), vector)

    def _multiply(self, mine: Expr, first: Expr, count: Expr, panel: Expr) -> None:
        """The products of rows [first, first + count) of all sums of A with a panel, to the thread's scratch."""
        builder, one, tile = self.builder, self.one, self.tile
        tiles = builder.bind(tirx.floordiv(count + (tile.rows - 1), tile.rows))
        with builder.loop(one.products, name="product") as product, builder.loop(tiles, name="m") as m:
            left = builder.bind(product * self.sum_stride + (first + m * tile.rows) * self.pitch)
            right = builder.bind((panel * one.products + product) * (self.k * tile.columns))
            place = builder.bind(mine + product * self.made_stride + m * (tile.rows * tile.columns))
            self._multiply_tile(m, left, Panel(self.weights, right, tile.columns), place)

    def _multiply_tile(self, m: Expr, left: Expr, panel: Panel, place: Expr) -> None:
        """The `m`-th register tile of rows, of the sums of A from element `left` on, by a panel; prefetches its share of the next
        panel and the next rows."""
        builder, tile = self.builder, self.tile
        below = builder.bind(left + tile.rows * self.pitch)
        prefetch_next = panel.prefetch_next(builder, self.k, m, self.tiles)

        def prefetch(ks: Index) -> None:
            prefetch_next(ks[0])
            builder.prefetch(self.sums[below + ks[0] * tile.rows], is_near=False)

        sum_tile(
            builder,
            tile,
            F32,
            (self.k,),
            lambda row, ks: self.sums[left + row * self.pitch + ks[0]],
            lambda column, ks: self.weights[panel.base + ks[0] * tile.columns + column],
            before=prefetch,
            into=(self.made, place),
        )

    def _add_products(self, base: Expr, row: Expr, panel: Expr) -> None:
        """Add up the products of row `row` of all blocks of C, in the columns of a panel, and hand them to the epilogue."""
        builder, one, tile = self.builder, self.one, self.tile
        blocks, begin = one.rows * one.columns, builder.bind(panel * tile.columns)
        lines = builder.local(blocks * tile.columns, TYPE, "lines")
        with builder.loop(tile.vectors, name="v") as v, builder.loop(tile.lanes, "vectorized", "lane") as lane:
            at = v * tile.lanes + lane
            values = {p: builder.name(self.made[base + p * self.made_stride + at]) for p in range(one.products)}
            for block in range(blocks):
                builder.store(lines, block * tile.columns + at, combine([factors[block] for factors in one.result], values))
        with builder.loop(blocks, name="block") as block:
            i, j = (builder.bind(at) for at in unravel(block, (one.rows, one.columns)))
            m, n = builder.bind(i * self.m + row), builder.bind(j * self.n + begin)
            line = builder.bind(block * tile.columns)
            extent = builder.bind(tirx.min(tirx.min(self.n - begin, tile.columns), self.b.lines - n))

            def put(at: Expr) -> None:
                self.store(m, n + at, lines[line + at])

            with builder.when(tirx.And(m < self.a.lines, extent >= tile.columns)):
                builder.vector_loop(tile.columns, tile.lanes, put)
            if self.n % tile.columns or self.b.lines < one.columns * self.n:
                with builder.when(tirx.And(m < self.a.lines, extent < tile.columns)):
                    builder.dynamic_vector_loop(0, extent, tile.lanes, put)


def strassen_obstacle(group: Group, seen: Group, anchor: Op, target: Target) -> str:
    """Why Strassen's algorithm may not compute a group's anchor; empty if it may. `seen`: the group without views around it."""
    if not group.tolerance.allows_strassen:
        return f"its errors grow with the largest element of a block, which precision {group.precision} does not allow"
    if target.is_gpu:
        return "is for CPUs"
    dtypes = {seen.types[name].dtype for name in (*anchor.inputs[:2], anchor.outputs[0])} - {TYPE}
    return f"no fewer multiplications of {min(dtypes)}" if dtypes else ""


def _odd_lines(elements: int) -> int:
    """The least pitch of at least `elements` that is an odd number of cache lines, so that rows do not conflict in sets."""
    lines = ceil(elements / _LINE)
    return _LINE * (lines + 1 - lines % 2)
