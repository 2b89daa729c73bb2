"""The micro-kernel of matrix products and convolutions: C[m, n] = sum over k of A[m, k] B[k, n], a register tile at a time.

A tile is `rows` x `vectors` registers of C (BLIS: MR x NR). For each k it broadcasts `rows` elements of A and loads `vectors`
registers of B, so that the FMAs, two a cycle, and not the loads decide its speed (Van Zee, van de Geijn: BLIS, TOMS 41/3, 2015).
The finished tile goes through a small array in L1 to the epilogue, whose loop is therefore the same for whole and ragged tiles.

Columns are positions of a flattened plane: row r of the result occupies [r * pitch, r * pitch + width). A matrix is one row. A
convolution over a padded input (implicit GEMM) has pitch > width: the few positions between rows are computed and not stored; in
exchange B[k, n] is contiguous along n in the padded input, so that nothing is packed and no im2col matrix exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from itertools import product as nest
from math import ceil, prod
from typing import Any

from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SymbolicSizeError, estimating, hint_of, least_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, unravel
from ..codegen.sum_loops import SumLoops, sum_loops
from ..codegen.work_stealing import Shares
from ..cost.memory import product_work
from ..cost.register_tile import last_rows, ranked_tiles
from ..formats.format import Format
from ..formats.multiply_add import multiply_add_of
from .packing import Panel

_STEP_OPERATIONS = 48  # multiply-adds up to which several steps over k are one
_PREFETCHING_ROWS = 3  # rows of a tile from which on that pays: with fewer, memory bandwidth is the limit anyway
_NARROW_BYTES, _NARROW_AHEAD_BYTES = 2, 8 * 1024  # of elements up to which fewer rows wait for more than bandwidth; as above
_SHARING_TILES = 4  # tiles of rows from which on they prefetch the next panel together
_NEAR_BYTES, _PANEL_BYTES = 256 * 1024, 384 * 1024  # of B, above which that pays; of a panel that stays in L2 beside the next one


@dataclass(frozen=True)
class Tile:
    """A register tile of C: `rows` rows of `vectors` vectors of `lanes` elements."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    def __str__(self) -> str:
        return f"{self.rows}x{self.vectors}"


@dataclass(frozen=True)
class Plane:
    """Where the result's rows lie in the flattened columns: row r in [r * pitch, r * pitch + width).

    `is_row(r)` tells rows of the result from rows between planes, which are not stored; None: all are rows.
    """

    columns: int
    pitch: int
    width: int
    is_row: Callable[[Expr], Expr] | None = None


@dataclass(frozen=True)
class TileProduct:
    """A batch of products C = A B by one register tile, and their epilogue.

    `m`: rows of C; `plane`: its columns; `depth`: extents of the loops over k, outermost first.
    `a(batch, panel, start, row, ks)` is the element of A in row `start + row`, `panel` the number of the tile;
    `b(batch, panel, start, column, ks)` likewise, contiguous in `column`. With `a_padded` (`b_padded`) rows (columns) beyond the
    end may be read, as packed panels are padded with zeros. A and B give what one multiply-add of the `format` takes: with a
    k-pack of 2 that is a 32-bit pair, and the innermost loop over k has half the iterations.
    `store(batch, m, r, c, value)`, the epilogue, gets the element of C at column c of row r of the plane; with `overlaps` it may
    be called more than once for an element.
    `shares_b`: neighbouring batches often have the same B. `panel(batch, number)`: a tile's packed panel of B, for prefetching.
    `first(batch, column)`: what sums of a column of the plane begin with, also of those beyond the last that are read; None: 0.
    `is_short`: the epilogue is, and may be repeated for each register of a tile, so that sums need not be stored before it.
    `stage(thread, threads, batch, panel)` makes a panel of B, which all tiles of rows meet before the next one; None: B is there.
    """

    batch: int
    m: int
    plane: Plane
    depth: tuple[int, ...]
    tile: Tile
    format: Format
    a: Callable[[Expr, Expr, Expr, int, Index], Expr]
    b: Callable[[Expr, Expr, Expr, Expr, Index], Expr]
    store: Callable[[Expr, Expr, Expr, Expr, Expr], None]
    a_padded: bool
    b_padded: bool
    shares_b: bool = False
    panel: Callable[[Expr, Expr], Panel] | None = None
    overlaps: bool = False
    first: Callable[[Expr, Expr], Expr] | None = None
    is_short: bool = False
    stage: Callable[[Expr, int, Expr, Expr], None] | None = None

    @property
    def flops(self) -> int:
        rows = self.plane.columns // max(self.plane.pitch, 1) + 1  # the last row has no gap after it
        wanted = self.plane.columns if self.plane.pitch == self.plane.width else rows * self.plane.width
        return 2 * self.batch * self.m * min(self.plane.columns, wanted) * prod(self.depth) * self.format.k_pack


@estimating
def tile_options(m: int, columns: int, depth: int, machine: Machine, **how: Any) -> dict[str, Tile]:
    """All legal register tiles by name, those with the fewest estimated cycles first; `how`: keywords of `ranked_tiles`."""
    ranked = ranked_tiles(m, columns, depth, machine, **how)
    return {str(tile): tile for tile in (Tile(one.rows, one.vectors, machine.lanes) for one in ranked)}


def choose_tile(m: int, columns: int, depth: int, machine: Machine, **how: Any) -> Tile:
    """The register tile with the fewest estimated cycles; `how`: keywords of `ranked_tiles`."""
    return next(iter(tile_options(m, columns, depth, machine, **how).values()))


def emit(builder: KernelBuilder, product: TileProduct, *, a_bytes: int, b_bytes: int) -> None:
    """Write the macro-kernel: the loops over batches and register tiles, dealt to the threads.

    The outer loop traverses the larger operand (`a_bytes`, `b_bytes`), so that it is read once and the other stays in cache; it
    is cut between the threads, too, unless another loop is clearly better balanced.
    """
    tile, plane = product.tile, product.plane
    if isinstance(plane.columns, Size) and not product.b_padded and least_of(plane.columns) < tile.columns:
        raise SymbolicSizeError(f"{plane.columns} columns may be fewer than a tile's")
    if product.batch * product.m * plane.columns == 0:
        return
    extents = {"batch": product.batch, "m": ceil(product.m / tile.rows), "n": ceil(plane.columns / tile.columns)}
    if builder.is_grid:
        with builder.chunks(prod(extents.values()), product.flops) as chunk:
            batch, m_tile, n_tile = (builder.bind(part) for part in unravel(chunk, tuple(extents.values())))
            emit_tile(builder, product, batch, m_tile, n_tile)
        return
    order = (
        ["n", "batch", "m"]
        if product.shares_b
        else ["batch", "m", "n"]
        if hint_of(a_bytes) > hint_of(b_bytes)
        else ["batch", "n", "m"]
    )
    is_staged = product.stage is not None
    orders = loop_orders(["batch", "n", "m"] if is_staged else order, extents)
    if is_staged:  # each panel is made once
        orders = {name: one for name, one in orders.items() if one[-1] == "m" or is_one(extents["m"])}
    order = builder.choose("order", orders)
    work = product_work(product.flops, a_bytes + b_bytes, builder.machine)
    threads = builder.threads_for(0 if is_one(prod(extents.values())) else work)
    cut = {"batch": a_bytes + b_bytes, "m": a_bytes, "n": b_bytes}
    splits = split_options(order, extents, threads, product.flops, cut, builder.machine)
    if is_staged:
        splits = {name: axis for name, axis in splits.items() if axis != "m"} or {"n": "n"}
    split = builder.choose("split", splits)
    # Each panel meets all tiles of rows, on one thread: these may divide among them what is to be done for the next one.
    parts = hint_of(extents["m"]) if order[-2:] == ["n", "m"] and (threads == 1 or split != "m") else 1
    shares = Shares(builder, threads, extents[split], work)
    with ExitStack() as loops:
        thread = loops.enter_context(builder.loop(threads, "parallel", "thread"))
        own = loops.enter_context(shares.of(thread))
        at: dict[str, Expr] = {}
        for axis in order:
            begin, end = own if axis == split else (0, extents[axis])
            i = loops.enter_context(builder.loop(end - begin, name=axis))
            at[axis] = builder.bind(begin + i) if threads > 1 and axis == split else i
            if product.stage is not None and axis == "n":
                product.stage(thread, threads, at["batch"], at["n"])
        emit_tile(builder, product, at["batch"], at["m"], at["n"], parts)


def loop_orders(order: Sequence[str], extents: Mapping[str, int]) -> dict[str, list[str]]:
    """All permutations of the loops of these extents, by name, `order` first; loops of one iteration stay outermost."""
    once, often = [axis for axis in order if is_one(extents[axis])], [axis for axis in order if not is_one(extents[axis])]
    return {" ".join(some): [*once, *some] for some in permutations(often)}


@estimating
def split_options(
    order: Sequence[str], extents: Mapping[str, int], threads: int, flops: int, cut: Mapping[str, int], machine: Machine
) -> dict[str, str]:
    """The loops that may be dealt to threads, the fastest first and, of equally fast ones, the outermost: by the operations of
    the thread that has most, and by what it reads. `cut`: bytes of operands of which a thread reads its share alone, by loop; of
    others each reads all, what another thread wrote from its L2 or from L3."""
    often = [axis for axis in order if extents[axis] > 1] if threads > 1 else []
    cycles = flops / (2 * machine.multiply_adds * machine.lanes)

    def seen(axis: str) -> float:
        """Cycles that depend on the loop."""
        most = ceil(extents[axis] / threads) / extents[axis]
        return most * cycles - (1 - 1 / threads) * cut.get(axis, 0) / machine.l3.bytes_per_cycle

    ranked = sorted(often, key=lambda axis: (seen(axis), order.index(axis)))
    return {axis: axis for axis in ranked or order[:1]}


def emit_tile(builder: KernelBuilder, product: TileProduct, batch: Expr, m_tile: Expr, n_tile: Expr, parts: int = 1) -> None:
    """One register tile of C: the loop over k, then the epilogue. `parts` tiles that follow each other have one panel of B."""
    tile, plane = product.tile, product.plane
    m_begin, n_begin = builder.bind(m_tile * tile.rows), builder.bind(n_tile * tile.columns)
    is_sized = isinstance(product.m, Size)
    rest = tile.rows if product.a_padded or builder.is_grid or is_sized else last_rows(product.m, tile.rows)
    is_direct = product.is_short and not is_sized and _is_even(product, rest) and not builder.is_grid
    # A ragged last tile is moved back to end with C; what it computes twice is stored once. Unless shorter last tiles have a loop
    # over k of their own: both loops share one epilogue, or LLVM would keep an epilogue's constants in registers over a loop.
    is_whole = product.a_padded or rest < tile.rows or is_direct or is_sized
    m_start = m_begin if is_whole else builder.bind(tirx.min(m_begin, product.m - tile.rows))
    n_start = n_begin if product.b_padded else builder.bind(tirx.min(n_begin, plane.columns - tile.columns))
    before, first = _panel_prefetch(builder, product, batch, m_tile, n_tile, parts), product.first
    finished = None if is_direct else builder.aligned_local(tile.rows * tile.columns, product.format.sums, "tile")

    def store_row(row: int) -> Callable[[Expr, Expr], None]:
        m = builder.bind(m_begin + row)
        return lambda column, value: product.store(batch, m, 0, n_begin + column, value)

    def add_up(tile: Tile) -> None:
        sum_tile(
            builder,
            tile,
            product.format,
            product.depth,
            lambda row, ks: product.a(batch, m_tile, m_start, row, ks),
            lambda column, ks: product.b(batch, n_tile, n_start, column, ks),
            before,
            into=finished,
            first=None if first is None else lambda column: first(batch, n_start + column),
            store_row=store_row if is_direct else None,
        )

    for condition, rows in _heights(builder, product, m_begin, rest):
        with nullcontext() if condition is None else builder.when(condition):
            add_up(replace(tile, rows=rows))
    if finished is not None:
        _emit_epilogue(builder, product, (batch, m_begin, n_begin), m_start, n_start, finished)


def _heights(builder: KernelBuilder, product: TileProduct, m_begin: Expr, rest: int) -> list[tuple[Expr | None, int]]:
    """The rows that tiles may have, each with what must hold for it; None where all have as many."""
    rows, m = product.tile.rows, product.m
    if isinstance(m, Size) and not product.a_padded:  # any remainder, each with a loop over k of its own
        left = builder.bind(tirx.min(m - m_begin, rows))
        heights = {min(size, rows) for size in m.choices} | ({size % rows for size in m.choices} - {0})
        return [(tirx.EQ(left, height), height) for height in sorted(heights, reverse=True)]
    if rest == rows:
        return [(None, rows)]
    return [(m_begin + rows <= m, rows), (m_begin + rows > m, rest)]


def _panel_prefetch(
    builder: KernelBuilder, product: TileProduct, batch: Expr, m_tile: Expr, n_tile: Expr, parts: int
) -> Callable[[Index], None] | None:
    """The prefetches of each step over k, if any: of rows further on in a panel that L1 does not hold, and of the next panel.

    Where several tiles share a panel, the next one comes to L2 in as much time as they take together. The first of them alone
    would wait for it: 24 KiB in 2,500 cycles are more than a core gets from L3.
    """
    tile, steps = product.tile, product.depth[0]
    if product.panel is None or builder.is_grid:
        return None
    panel = product.panel(batch, n_tile)
    panel_bytes = steps * tile.columns * panel.item_bytes
    panels = ceil(product.plane.columns / tile.columns)
    if tile.rows < _PREFETCHING_ROWS:
        widened = product.format.k_pack if product.format.unit == "fma" else 1  # numbers of a word that are multiplied one by one
        is_far = panel.item_bytes <= _NARROW_BYTES * widened and panel_bytes * panels > _NEAR_BYTES
        return (lambda ks: panel.prefetch(builder, ks[0], _NARROW_AHEAD_BYTES)) if is_far else None
    is_shared = parts >= _SHARING_TILES and panel_bytes * panels > _NEAR_BYTES and panel_bytes <= _PANEL_BYTES
    prefetch_next = panel.prefetch_next(builder, steps, m_tile, parts) if is_shared else None

    def before(ks: Index) -> None:
        if prefetch_next is not None:
            prefetch_next(ks[0])
        if not is_shared or panel_bytes > builder.machine.l1.size_bytes:
            panel.prefetch(builder, ks[0])

    return before


def _is_even(product: TileProduct, rest: int) -> bool:
    """Whether tiles have no more rows and columns than C, the last ones of `rest` rows."""
    tile, plane = product.tile, product.plane
    is_even = product.m % tile.rows == 0 or rest < tile.rows
    return is_even and plane.pitch >= plane.columns and plane.columns % tile.columns == 0


def _emit_epilogue(
    builder: KernelBuilder,
    product: TileProduct,
    place: tuple[Expr, Expr, Expr],
    m_start: Expr,
    n_start: Expr,
    finished: tuple[Buffer, Expr],
) -> None:
    """The epilogue of the sums of a tile in L1, which are those from (`m_start`, `n_start`) on, of what is inside C from `place`
    (batch, row, column) on."""
    (batch, m_begin, n_begin), (sums, base), tile = place, finished, product.tile
    m_end = tirx.min(m_begin + tile.rows, product.m)
    with builder.loop(builder.bind(m_end - m_begin), name="row") as row:
        m = builder.bind(m_begin + row)
        line = builder.bind((m - m_start) * tile.columns + base)
        for begin, end, r in _segments(builder, product.plane, n_begin, tile.columns):
            _emit_segment(builder, product, (batch, m, r), begin, end, sums, builder.bind(line - n_start))


def sum_tile(
    builder: KernelBuilder,
    tile: Tile,
    number_format: Format,
    depth: tuple[int, ...],
    a: Callable[[int, Index], Expr],
    b: Callable[[Expr, Index], Expr],
    before: Callable[[Index], None] | None = None,
    spans: Mapping[int, tuple[Expr, Expr]] | None = None,
    into: tuple[Buffer, Expr] | None = None,
    first: Callable[[Expr], Expr] | None = None,
    store_row: Callable[[int], Callable[[Expr, Expr], None]] | None = None,
) -> Buffer:
    """The micro-kernel: sums over k of a(row, ks) * b(column, ks), accumulated in registers.

    Returns an array of `tile.rows` x `tile.columns` sums, row-major, in L1 for the epilogue: that of `into` (buffer, first
    element) where given. Or, where sums need no blocks of k, `store_row(row)(column, sum)` is the epilogue, of registers.
    `depth`: extents of the loops over k. `before(ks)` emits statements before the products of each k, such as prefetches. `spans`
    restricts a loop over k, by its number, to iterations [begin, end). Sums of a column begin with `first(column)`, 0 where that
    is None. Sums of more products than the format's longest chain are made of partial sums over blocks of k, for their error.
    """
    spans, dtype = spans or {}, number_format.sums
    begin, multiply_add = first or (lambda column: tirx.const(0, dtype)), multiply_add_of(number_format)
    steps = _STEP_OPERATIONS if number_format.k_pack == 1 and tile.vectors > 1 else 0  # else LLVM runs out of registers
    nests = sum_loops(depth, number_format.longest_chain, spans, tile.rows * tile.vectors, steps)
    is_blocked = nests[0].outer > 0
    sums = builder.local(tile.rows * tile.columns, dtype, "acc")
    finished, base = into or (sums if store_row else builder.local(tile.rows * tile.columns, dtype, "tile"), 0)

    def add_products(ks: Index) -> None:
        if before is not None:
            before(ks)
        each(lambda row, at, column: builder.store(sums, at, multiply_add(sums[at], a(row, ks), b(column, ks))))

    def total(at: Expr) -> Expr:
        return finished[base + at] + sums[at] if is_blocked else sums[at]

    each = partial(_each_vector, builder, tile)
    if is_blocked:
        each(lambda row, at, column: builder.store(finished, base + at, begin(column)))
    for loops in nests:
        with ExitStack() as blocks:
            block = _enter(builder, blocks, loops, range(loops.outer), spans)
            each(lambda row, at, column: builder.store(sums, at, tirx.const(0, dtype) if is_blocked else begin(column)))
            if prod(loops.extents):
                with ExitStack() as inside:
                    ks = _enter(builder, inside, loops, range(loops.outer, len(loops.extents)), spans)
                    add_products(loops.joined((*block, *ks)))
            if store_row is None:
                each(lambda row, at, column: builder.store(finished, base + at, total(at)))
    if store_row is not None:
        _store_rows(builder, tile, sums, store_row)
    return finished


def _each_vector(builder: KernelBuilder, tile: Tile, body: Callable[[int, Expr, Expr], None]) -> None:
    """`body(row, place, column)` for all vectors of a tile."""
    for row, v in nest(range(tile.rows), range(tile.vectors)):
        with builder.loop(tile.lanes, "vectorized", "lane") as lane:
            body(row, row * tile.columns + v * tile.lanes + lane, v * tile.lanes + lane)


def _enter(
    builder: KernelBuilder, stack: ExitStack, loops: SumLoops, axes: range, spans: Mapping[int, tuple[Expr, Expr]]
) -> Index:
    """The variables of some loops over k, which the stack leaves."""
    ks = []
    for axis in axes:
        low, high = spans.get(axis, (0, loops.extents[axis]))
        k = stack.enter_context(builder.loop(high - low, loops.kinds[axis], "k"))
        ks.append(builder.bind(low + k) if axis in spans else k)
    return tuple(ks)


def _store_rows(
    builder: KernelBuilder, tile: Tile, sums: Buffer, store_row: Callable[[int], Callable[[Expr, Expr], None]]
) -> None:
    """The epilogue of sums in registers."""
    for row in range(tile.rows):
        store = store_row(row)
        for v in range(tile.vectors):
            with builder.loop(tile.lanes, "vectorized", "lane") as lane:
                store(v * tile.lanes + lane, sums[row * tile.columns + v * tile.lanes + lane])


def _emit_segment(
    builder: KernelBuilder, product: TileProduct, row: tuple[Expr, Expr, Expr], begin: Expr, end: Expr, tile: Buffer, offset: Expr
) -> None:
    """The epilogue of columns [begin, end) of one row of the result; column c is element `offset + c` of the tile."""
    first = builder.bind(row[2] * product.plane.pitch)
    loop = builder.overlapping_vector_loop if product.overlaps else builder.dynamic_vector_loop
    loop(begin, end, product.tile.lanes, lambda c: product.store(*row, c - first, tile[offset + c]))


def _segments(builder: KernelBuilder, plane: Plane, n_begin: Expr, columns: int) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Parts of result rows in a tile's columns, as (begin column, end column, row), in a loop around what the caller emits."""
    n_end = builder.bind(tirx.min(n_begin + columns, plane.columns))
    if plane.pitch >= plane.columns:
        yield n_begin, n_end, 0
        return
    first = builder.bind(tirx.floordiv(n_begin, plane.pitch))
    last = tirx.floordiv(n_end - 1, plane.pitch)
    with builder.loop(builder.bind(last - first + 1), name="r") as i:
        r = builder.bind(first + i)
        begin = builder.bind(tirx.max(n_begin, r * plane.pitch))
        end = builder.bind(tirx.min(n_end, r * plane.pitch + plane.width))
        with ExitStack() as guard:
            if plane.is_row is not None:
                guard.enter_context(builder.when(plane.is_row(r)))
            yield begin, end, r
