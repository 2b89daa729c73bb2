"""MatMul and Gemm on the tile unit, of bfloat16 operands or of float32 ones as sums of bfloat16 terms.

Weights are packed at compile time into the tiles that are loaded. What changes is packed by the kernel: if the whole of A fits
the second cache, once, and then every thread walks its own panels of B, so that weights come from memory once; else each thread
packs blocks of its own rows and walks all panels with each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from tvm import tirx

from ...runtime.target import Target
from ..builder import Buffer, Expr, share, unravel
from ..costs import tile_product_cycles, vector_product_cycles
from ..group import Group, Op
from ..template import BuiltKernel, Operand, Refusal
from ..values import pointwise_obstacle, split_anchor
from .common import finish
from .matmul import Product, Side
from .tile_blocks import BlockProduct, Lines, packed_lines
from .tile_packing import LINES, PackTiles, StepPacker
from .tile_unit import DEPTH, ROWS, tile_unit

_NEAR_BYTES = 1 << 20  # of packed rows that the second cache holds beside a panel
_WORK_PER_DOT = 16  # how many cycles a product of two tiles takes, which are 16384 multiply-adds
_TERMS = {"float32": 3, "float32-fast": 2}  # of a float32
Panels = Callable[[Expr, Expr], Lines]  # of (matrix, panel)


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one MatMul or Gemm of float32 with pointwise followers of its output's shape."""
    anchor, _ = split_anchor(group)
    if anchor is None or anchor.op_type not in ("MatMul", "Gemm"):
        return Refusal("has no matrix product")
    if (dtype := group.types[anchor.inputs[0]].dtype) != "float32":
        return Refusal(f"no product of {dtype} on the tile unit")
    if anchor.inputs[0] == anchor.inputs[1] and anchor.inputs[0] in group.constants:
        return Refusal("both operands are one constant")
    if reason := pointwise_obstacle(group):
        return Refusal(reason)
    product = TiledProduct(group, anchor, target)
    if reason := product.obstacle():
        return Refusal(reason)
    return product.build()


class TiledProduct(Product):
    """One kernel being built."""

    template = "matmul_tiles"

    def __init__(self, group: Group, anchor: Op, target: Target) -> None:
        super().__init__(group, anchor, target)
        self.terms = _TERMS.get(group.precision, 3)
        self.matrices = prod(self.batch)
        self.rows, self.columns = ceil(self.a.lines / LINES), ceil(self.b.lines / LINES)
        self.steps = ceil(self.a.depth / DEPTH)
        halves = 1 if self.a.lines <= ROWS else 2, 1 if self.b.lines <= ROWS else 2
        self.blocks = BlockProduct(self.builder, tile_unit(self.builder, target), (self.steps,), self.terms, halves)

    @property
    def flops(self) -> int:
        return 2 * self.matrices * self.a.lines * self.b.lines * self.a.depth

    def obstacle(self) -> str:
        """Why vectors had better compute it."""
        if not self.flops:
            return "has nothing to multiply"
        size = self.a.lines, self.b.lines, self.a.depth
        packs_a, packs_b = (side.name not in self.group.constants for side in (self.a, self.b))
        tiles = tile_product_cycles(*size, self.terms, packs_a=packs_a, packs_b=packs_b)
        vectors = vector_product_cycles(*size, self.builder.lanes("float32"))
        return "" if tiles < vectors else f"{tiles:.0f} cycles on tiles are no fewer than {vectors:.0f} on vectors"

    def build(self) -> BuiltKernel:
        builder = self.builder
        dots = self.matrices * self.rows * self.columns * self.steps * 4
        threads = builder.threads_for(dots * _WORK_PER_DOT)
        b = self._constant_panels(self.b, True) if self.b.name in self.group.constants else self._packed_panels(self.b, True)
        packer = self._packer(self.a, False)
        a_bytes = 2 * packer.panel_elements * packer.panels * prod(self.a.batch)
        if self.a.name in self.group.constants:
            self._columns_outside(self._constant_panels(self.a, False), b, threads)
        elif a_bytes <= _NEAR_BYTES or self.matrices * self.rows < 2 * threads:
            self._columns_outside(self._packed_panels(self.a, False), b, threads)
        else:
            self._rows_outside(packer, b, threads)
        return finish(self.template, builder, self.group, flops=self.flops, packed=self.packed)

    # Operands ---------------------------------------------------------------------------------------------------------

    def _constant_panels(self, side: Side, pairs: bool) -> Panels:
        """Packed at compile time."""
        pack = PackTiles(side.pack(LINES), self.terms, pairs)
        self.packed[side.name] = Operand(side.name, pack)
        elements = pack.packed_type(self.group.types[side.name]).elements
        buffer = self.builder.parameter(side.name, elements // 2 if pairs else elements, "uint32" if pairs else "uint16")
        return self._lines(side, buffer, pairs)

    def _packer(self, side: Side, pairs: bool) -> StepPacker:
        kind = self.group.types[side.name]

        def element(matrix: Expr, line: Expr, k: Expr) -> Expr:
            return self.builder.parameter(side.name, kind.elements, kind.dtype)[side.offset(matrix, line, k)]

        return StepPacker(self.builder, element, side.lines, side.depth, self.terms, pairs)

    def _packed_panels(self, side: Side, pairs: bool) -> Panels:
        """Packed by the kernel, the whole of it, before the product."""
        builder, packer = self.builder, self._packer(side, pairs)
        per_word = 2 if pairs else 1
        matrices, step = prod(side.batch), packer.panel_elements // packer.steps
        buffer = builder.workspace(matrices * packer.panels * packer.panel_elements // per_word, "uint32" if pairs else "uint16")
        extents = matrices, packer.panels, packer.steps
        with builder.chunks(prod(extents), prod(extents) * step) as chunk:
            matrix, panel, k = (builder.bind(i) for i in unravel(chunk, extents))
            packer.pack(buffer, builder.bind(chunk * (step // per_word)), matrix, panel, k)
        return self._lines(side, buffer, pairs)

    def _lines(self, side: Side, buffer: Buffer, pairs: bool) -> Panels:
        packer = self._packer(side, pairs)
        size = packer.panel_elements // (2 if pairs else 1)

        def lines(matrix: Expr, panel: Expr) -> Lines:
            return packed_lines(buffer, self.builder.bind((matrix * packer.panels + panel) * size), self.terms, words=pairs)

        return lines

    # Loops ------------------------------------------------------------------------------------------------------------

    def _columns_outside(self, a: Panels, b: Panels, threads: int) -> None:
        """All rows by one panel of columns, then by the next: blocks are dealt to the threads in that order."""
        builder, extents = self.builder, (self.matrices, self.columns, self.rows)
        with self.blocks.threads(threads) as thread:
            begin, end = share(thread, threads, prod(extents))
            with builder.loop(end - begin, name="block") as i:
                batch, n, m = (builder.bind(part) for part in unravel(builder.bind(begin + i), extents))
                self._block(a(self.a.matrix_of(self.batch, batch), m), b, batch, m, n)

    def _rows_outside(self, packer: StepPacker, b: Panels, threads: int) -> None:
        """Each thread packs some panels of its rows, as many as the second cache holds, and walks all columns with them."""
        builder, size = self.builder, packer.panel_elements
        panels = max(min(_NEAR_BYTES // (2 * size), ceil(self.matrices * self.rows / threads), self.rows), 1)
        scratch = builder.workspace(threads * panels * size, "uint16")
        extents = self.matrices, ceil(self.rows / panels)
        with self.blocks.threads(threads) as thread:
            near = builder.bind(thread * (panels * size))
            begin, end = share(thread, threads, prod(extents))
            with builder.loop(end - begin, name="rows") as i:
                batch, part = (builder.bind(place) for place in unravel(builder.bind(begin + i), extents))
                first = builder.bind(part * panels)
                count = builder.bind(tirx.min(self.rows - first, panels))
                self._pack_panels(packer, scratch, near, self.a.matrix_of(self.batch, batch), first, count)
                with builder.loop(self.columns, name="n") as n, builder.loop(count, name="m") as m:
                    a = packed_lines(scratch, builder.bind(near + m * size), self.terms, words=False)
                    self._block(a, b, batch, builder.bind(first + m), n)

    def _pack_panels(self, packer: StepPacker, to: Buffer, base: Expr, matrix: Expr, first: Expr, count: Expr) -> None:
        builder, size = self.builder, packer.panel_elements // packer.steps
        with builder.loop(count, name="panel") as panel, builder.loop(packer.steps, name="step") as step:
            at = builder.bind(base + (panel * packer.steps + step) * size)
            packer.pack(to, at, matrix, builder.bind(first + panel), step)

    def _block(self, a: Lines, b: Panels, batch: Expr, m: Expr, n: Expr) -> None:
        """A block of the result, and what follows it."""
        builder, store = self.builder, self.store()
        sums = self.blocks.multiply(a, b(self.b.matrix_of(self.batch, batch), n))
        top, left = builder.bind(m * LINES), builder.bind(n * LINES)
        whole = self.b.lines % LINES == 0
        width = LINES if whole else builder.bind(tirx.min(self.b.lines - left, LINES))
        with builder.loop(builder.bind(tirx.min(self.a.lines - top, LINES)), name="row") as row:
            line, base = builder.bind(top + row), builder.bind(row * LINES)
            lanes = builder.lanes("float32")
            builder.dynamic_vector_loop(0, width, lanes, lambda c: store(batch, line, 0, left + c, sums[base + c]))
