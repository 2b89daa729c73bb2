"""MatMul and Gemm, batched and broadcast, with their pointwise followers in the tile store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

from tvm import tirx

from ...runtime.machine import LINE_BYTES
from ...runtime.target import Target
from ..builder import Buffer, Expr, Index, broadcast_index, row_major, unravel
from ..formats.packing import PackPanels
from ..group import Group, Op
from ..template import BuiltKernel, Operand, Refusal
from ..values import GroupValues, pointwise_obstacle, split_anchor
from .anchored import follow
from .common import finish, machine_of, new_builder
from .tile_product import Panel, Plane, TileProduct, emit, share_sets, tile_options

_ACCUMULATORS = {"float16": "float32", "bfloat16": "float32"}
_SPREAD_LINES = 64  # rows and columns from which a copy of rows that crowd each other costs less than it saves
_SPREAD_BYTES = 64 * 1024 * 1024  # of the rows, beyond which the copy would be seen in a program's memory
_TYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32", "uint64")
Load = Callable[[Expr, Expr, Expr, Expr, Index], Expr]  # of TileProduct.a and .b: batch, panel, start, line, ks


@dataclass(frozen=True)
class Side:
    """One operand as matrices of `lines` (rows of A, columns of B) by `depth`. `lines_last`: lines run fastest in memory.

    `batch` are its own batch dimensions, 1 where it broadcasts along the product's.
    """

    name: str
    batch: tuple[int, ...]
    lines: int
    depth: int
    lines_last: bool

    def pack(self, tile: int, *, pairs: bool = False) -> PackPanels:
        """How to lay the operand out in panels, if it is constant."""
        rank = len(self.batch)
        shape, order = (self.lines, self.depth), (*range(rank), rank, rank + 1)
        if self.lines_last:
            shape, order = (self.depth, self.lines), (*range(rank), rank + 1, rank)
        return PackPanels((*self.batch, *shape), order, rank, 1, tile, pairs=pairs)

    def matrix_of(self, batch: tuple[int, ...], position: Expr) -> Expr:
        """Number of the operand's matrix that belongs to a position of the product's batch."""
        if self.batch == batch:
            return position
        return row_major(broadcast_index(unravel(position, batch), batch, self.batch), self.batch)

    def offset(self, matrix: Expr, line: Expr, k: Expr) -> Expr:
        """Where an element lies in the operand itself."""
        if self.lines_last:
            return (matrix * self.depth + k) * self.lines + line
        return (matrix * self.lines + line) * self.depth + k


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one MatMul or Gemm with pointwise followers of its output's shape."""
    product = product_of(group, target)
    return product if isinstance(product, Refusal) else product.build()


def product_of(group: Group, target: Target) -> Product | Refusal:
    """The group's product, to be built."""
    anchor, _ = split_anchor(group)
    if anchor is None or anchor.op_type not in ("MatMul", "Gemm"):
        return Refusal("has no matrix product")
    dtypes = [group.types[name].dtype for name in anchor.inputs[:2]]
    if (dtypes[0] != dtypes[1] and not {*dtypes} <= {"float32", *_ACCUMULATORS}) or dtypes[0] not in _TYPES:
        return Refusal(f"no product of {' and '.join(dict.fromkeys(dtypes))}")
    if anchor.inputs[0] == anchor.inputs[1] and anchor.inputs[0] in group.constants:
        return Refusal("both operands are one constant")
    if reason := pointwise_obstacle(group):
        return Refusal(reason)
    return Product(group, anchor, target)


class Product:
    """One kernel being built. `shares_b`: neighbouring matrices of the batch often have the same B."""

    template = "matmul"
    shares_b = False

    def __init__(self, group: Group, anchor: Op, target: Target) -> None:
        self.group, self.anchor, self.target = group, anchor, target
        self.builder = new_builder(target, group.configuration)
        self.batch, self.a, self.b = _normal_form(group, anchor)
        self.dtype = group.types[anchor.outputs[0]].dtype
        self.accumulator = _ACCUMULATORS.get(self.dtype, self.dtype)
        self.packed: dict[str, Operand] = {}

    def build(self) -> BuiltKernel:
        a, b, machine = self.a, self.b, machine_of(self.target, self.accumulator)
        packs_a, packs_b = a.name in self.group.constants, b.name in self.group.constants
        spreads_a = not packs_a and self.crowds()
        # A changing B is read where it is if its columns are contiguous and fill one vector; else it is staged.
        stages_b = not packs_b and (not b.lines_last or b.lines < machine.lanes)
        padded = packs_b or stages_b
        tiles = tile_options(
            a.lines,
            b.lines,
            a.depth,
            machine,
            shifted_loads=not padded and b.lines % machine.lanes != 0,
            b_padded=padded,
            streams_b=padded,
            row_bytes=0 if packs_a or a.lines_last or spreads_a else a.depth * self.group.types[a.name].item_bytes,
            cuts_last=not packs_a,
        )
        tile = self.builder.choose("tile", tiles)
        product = TileProduct(
            prod(self.batch),
            a.lines,
            Plane(b.lines, b.lines, b.lines),
            (a.depth,),
            tile,
            self.accumulator,
            self._packed(a, tile.rows) if packs_a else self.spread_rows() if spreads_a else self._in_place(a),
            self._packed(b, tile.columns) if packs_b else self._staged(b, tile.columns) if stages_b else self._in_place(b),
            self.store(),
            a_padded=packs_a,
            b_padded=padded,
            shares_b=self.shares_b,
            panel=self.panel_of_b(self._constant(b, tile.columns), a.depth, tile.columns) if packs_b else None,
        )
        sizes = [self.group.types[side.name].size_bytes for side in (a, b)]
        emit(self.builder, product, a_bytes=sizes[0], b_bytes=sizes[1])
        return finish(self.template, self.builder, self.group, flops=product.flops, packed=self.packed)

    def crowds(self) -> bool:
        """Whether the rows of A, where they lie, share so few sets of the first cache that a copy of them pays."""
        a = self.a
        kind = self.group.types[a.name]
        pays = min(a.lines, self.b.lines) >= _SPREAD_LINES and kind.size_bytes <= _SPREAD_BYTES and not self.builder.is_grid
        return pays and not a.lines_last and share_sets(a.depth * kind.item_bytes, self.target.machine)

    def spread_rows(self) -> Load:
        """A copy of the rows of A in the workspace, a cache line further apart, which begins with a zero."""
        builder, a, kind = self.builder, self.a, self.group.types[self.a.name]
        pitch = a.depth + LINE_BYTES // kind.item_bytes
        source = builder.parameter(a.name, kind.elements, kind.dtype)
        spread = builder.workspace(kind.elements // a.depth * pitch, kind.dtype)
        with builder.chunks(kind.elements // a.depth, kind.elements) as row:
            origin, target = builder.bind(row * a.depth), builder.bind(row * pitch)
            builder.vector_loop(
                a.depth, builder.lanes(kind.dtype), lambda i: builder.store(spread, target + i, source[origin + i])
            )
            builder.store(spread, target + a.depth, tirx.const(0, kind.dtype))

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            row = a.matrix_of(self.batch, batch) * a.lines + start + line
            return tirx.Cast(self.accumulator, spread[row * pitch + ks[0]])

        return load

    def _in_place(self, side: Side) -> Load:
        kind = self.group.types[side.name]
        buffer = self.builder.parameter(side.name, kind.elements, kind.dtype)

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            return tirx.Cast(self.accumulator, buffer[side.offset(side.matrix_of(self.batch, batch), start + line, ks[0])])

        return load

    def _packed(self, side: Side, tile: int) -> Load:
        """The constant operand, packed at compile time."""
        return self._panels(side, tile, self._constant(side, tile))

    def _constant(self, side: Side, tile: int) -> Buffer:
        """The panels of a constant operand."""
        pack = side.pack(tile)
        self.packed[side.name] = Operand(side.name, pack)
        kind = pack.packed_type(self.group.types[side.name])
        return self.builder.parameter(side.name, kind.elements, kind.dtype)

    def _staged(self, side: Side, tile: int) -> Load:
        """A copy in panels of the workspace, filled up with zeros."""
        builder, panels, matrices = self.builder, ceil(side.lines / tile), prod(side.batch)
        size = matrices * panels * side.depth * tile
        staged = builder.workspace(size, self.accumulator)
        kind = self.group.types[side.name]
        source = builder.parameter(side.name, kind.elements, kind.dtype)
        zero = tirx.const(0, self.accumulator)
        with builder.chunks(matrices * panels, size) as chunk:
            matrix, panel = builder.bind(tirx.floordiv(chunk, panels)), builder.bind(tirx.floormod(chunk, panels))
            with builder.loop(side.depth, name="k") as k, builder.loop(tile, name="line") as i:
                line = panel * tile + i
                value = tirx.Cast(self.accumulator, source[side.offset(matrix, tirx.min(line, side.lines - 1), k)])
                builder.store(staged, (chunk * side.depth + k) * tile + i, builder.masked(line < side.lines, value, zero))
        return self._panels(side, tile, staged)

    def _panels(self, side: Side, tile: int, buffer: Buffer) -> Load:
        panels = ceil(side.lines / tile)

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            matrix = side.matrix_of(self.batch, batch)
            return tirx.Cast(self.accumulator, buffer[((matrix * panels + panel) * side.depth + ks[0]) * tile + line])

        return load

    def panel_of_b(self, buffer: Buffer, depth: int, tile: int) -> Callable[[Expr, Expr], Panel]:
        """Where the panels of B lie in a buffer, `depth` rows each."""
        panels = ceil(self.b.lines / tile)

        def panel(batch: Expr, number: Expr) -> Panel:
            matrix = self.b.matrix_of(self.batch, batch)
            return Panel(buffer, self.builder.bind((matrix * panels + number) * (depth * tile)), tile)

        return panel

    def store(self) -> Callable[[Expr, Expr, Expr, Expr, Expr], None]:
        group, builder = self.group, self.builder
        shape = group.types[self.anchor.outputs[0]].shape

        def store(batch: Expr, m: Expr, r: Expr, n: Expr, value: Expr) -> None:
            line = batch * self.a.lines + m
            offset = line * self.b.lines + n
            index = (*unravel(line, shape[:-1]), n) if shape[-1:] == (self.b.lines,) else unravel(offset, shape)
            follow(group, builder, self.anchor, index, tirx.Cast(self.dtype, self._with_bias(index, value)), offset)

        return store

    def _with_bias(self, index: Index, value: Expr) -> Expr:
        """alpha * value + beta * C, for Gemm."""
        if self.anchor.op_type != "Gemm":
            return value
        alpha, beta = self.anchor.attribute("alpha", 1.0), self.anchor.attribute("beta", 1.0)
        if alpha != 1.0:
            value = value * tirx.const(alpha, self.accumulator)
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if not bias or beta == 0.0:
            return value
        types = self.group.types
        place = broadcast_index(index, types[self.anchor.outputs[0]].shape, types[bias].shape)
        element = tirx.Cast(self.accumulator, GroupValues(self.group, self.builder).read(bias, place))
        return value + (element * tirx.const(beta, self.accumulator) if beta != 1.0 else element)


def _normal_form(group: Group, anchor: Op) -> tuple[tuple[int, ...], Side, Side]:
    """The product's batch dimensions and its operands. A batch of rows that share one B becomes more rows."""
    a_name, b_name = anchor.inputs[:2]
    a, b = group.types[a_name].shape, group.types[b_name].shape
    if anchor.op_type == "Gemm":
        a_last, b_first = bool(anchor.attribute("transA", 0)), bool(anchor.attribute("transB", 0))
        m, k = (a[1], a[0]) if a_last else a
        return (), Side(a_name, (), m, k, a_last), Side(b_name, (), b[0] if b_first else b[1], k, not b_first)
    a = (1, *a) if len(a) == 1 else a
    b = (*b, 1) if len(b) == 1 else b
    rank = max(len(a), len(b)) - 2
    a_batch = (1,) * (rank - len(a) + 2) + a[:-2]
    b_batch = (1,) * (rank - len(b) + 2) + b[:-2]
    batch = tuple(y if x == 1 else x for x, y in zip(a_batch, b_batch, strict=True))
    (m, k), n = a[-2:], b[-1]
    if prod(b_batch) == 1 and a_batch == batch:
        return (), Side(a_name, (), prod(batch) * m, k, False), Side(b_name, (), n, k, True)
    return batch, Side(a_name, a_batch, m, k, False), Side(b_name, b_batch, n, k, True)
