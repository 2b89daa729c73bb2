"""Matrix products of bfloat16 operands, two neighbouring k at a time.

A row of A is read as 32-bit words where it lies, or from a copy, in which the last of an odd number of elements has a zero beside
it; B is packed in pairs, at compile time or, where it changes, by the kernel. With float32 rows (few of them, by weights alone
stored as bfloat16) each word of B gives two vectors.
"""

from __future__ import annotations

from math import ceil, prod

from tvm import tirx

from ...runtime.machine import LINE_BYTES
from ...runtime.target import Target
from ..builder import Buffer, Expr, Index
from ..formats.bfloat16 import MultiplyAdd, halves_multiply_add, pair, words_multiply_add
from ..group import Group
from ..template import BuiltKernel, Operand, Refusal
from .common import finish
from .matmul import Load, Product, Side, product_of
from .tile_product import Plane, TileProduct, emit, tile_options


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one MatMul or Gemm of bfloat16 operands, or of float32 and constant bfloat16, with pointwise followers."""
    if target.is_gpu:
        return Refusal("is for CPUs")
    product = product_of(group, target)
    if isinstance(product, Refusal):
        return product
    if reason := _obstacle(group, product.a, product.b):
        return Refusal(reason)
    return PairedProduct(group, product.anchor, target).build()


def _obstacle(group: Group, a: Side, b: Side) -> str:
    """Why a product cannot go by pairs; empty where it can."""
    kinds = group.types[a.name].dtype, group.types[b.name].dtype
    if kinds not in (("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        return f"operands are {kinds[0]} and {kinds[1]}"
    if a.lines_last:
        return "elements of a row are not neighbours"
    if a.depth % 2 and b.name not in group.constants:
        return f"rows of {a.depth} elements are no pairs, and the second operand is not constant"
    if b.name not in group.constants and (kinds[0] == "float32" or not b.lines_last):
        return "the second operand is not constant"
    return ""


class PairedProduct(Product):
    """One kernel being built."""

    template = "paired_product"

    def build(self) -> BuiltKernel:
        a, b, types = self.a, self.b, self.group.types
        has_words, is_copied = types[a.name].dtype == "bfloat16", a.depth % 2 == 1 or self.crowds()
        tiles = tile_options(
            a.lines,
            b.lines,
            self.pairs,
            self.target.machine,
            shifted_loads=False,
            b_padded=True,
            streams_b=True,
            row_bytes=0 if is_copied else a.depth * types[a.name].item_bytes,
            cuts_last=True,
        )
        tile = self.builder.choose("tile", tiles)
        panels = self._packed_pairs(tile.columns) if b.name in self.group.constants else self._staged_pairs(tile.columns)
        product = TileProduct(
            prod(self.batch),
            a.lines,
            Plane(b.lines, b.lines, b.lines),
            (self.pairs,),
            tile,
            self.accumulator,
            self._words(is_copied) if has_words else self._halves(is_copied),
            self._panels_of_pairs(panels, tile.columns),
            self.store(),
            a_padded=False,
            b_padded=True,
            panel=self.panel_of_b(panels, self.pairs, tile.columns),
            multiply_add=self._multiply_add(has_words),
            terms=2,
        )
        emit(self.builder, product, a_bytes=types[a.name].size_bytes, b_bytes=types[b.name].size_bytes)
        flops = product.flops // max(2 * self.pairs, 1) * a.depth
        return finish(self.template, self.builder, self.group, flops=flops, packed=self.packed)

    @property
    def pairs(self) -> int:
        """Of a row, the last one perhaps with a zero."""
        return ceil(self.a.depth / 2)

    def _multiply_add(self, has_words: bool) -> MultiplyAdd:
        return words_multiply_add(self.target) if has_words else halves_multiply_add

    def _words(self, is_copied: bool) -> Load:
        """Pairs of A as words."""
        a, pitch = self.a, self.pairs
        words = self.builder.parameter(a.name, self.group.types[a.name].elements // 2, "int32")
        if is_copied:
            words, pitch = self._copied_words()

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            return words[(a.matrix_of(self.batch, batch) * a.lines + start + line) * pitch + ks[0]]

        return load

    def _copied_words(self) -> tuple[Buffer, int]:
        """A copy of the rows of A as words, and from row to row their number, with which rows do not share sets of the cache."""
        builder, a, elements = self.builder, self.a, self.group.types[self.a.name].elements
        lanes, whole, rows = builder.lanes("int32"), a.depth // 2, elements // max(a.depth, 1)
        pitch = self.pairs + (LINE_BYTES // 4 if self.crowds() else 0)
        bits, copy = builder.parameter(a.name, elements, "uint16"), builder.workspace(rows * pitch, "int32")
        with builder.chunks(rows, elements) as row:
            origin, target = builder.bind(row * a.depth), builder.bind(row * pitch)
            with builder.loop(whole // lanes, name="words") as i:
                vector = bits[tirx.Ramp(origin + i * (2 * lanes), 1, 2 * lanes)]
                builder.store(copy, tirx.Ramp(target + i * lanes, 1, lanes), tirx.reinterpret(f"int32x{lanes}", vector))
            with builder.loop(whole % lanes, name="word") as i:
                at = builder.bind(i + whole // lanes * lanes)
                builder.store(copy, target + at, pair(bits[origin + at * 2], bits[origin + at * 2 + 1]))
            if a.depth % 2:
                builder.store(copy, target + whole, tirx.Cast("int32", bits[origin + a.depth - 1]))
        return copy, pitch

    def _halves(self, is_copied: bool) -> Load:
        """Pairs of A as two numbers."""
        element = self.spread_rows() if is_copied else self._in_place(self.a)

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> tuple[Expr, Expr]:
            first, second = (element(batch, panel, start, line, (ks[0] * 2 + i,)) for i in range(2))
            return first, second

        return load

    def _panels_of_pairs(self, buffer: Buffer, tile: int) -> Load:
        b, pairs, panels = self.b, self.pairs, ceil(self.b.lines / tile)

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            return buffer[((b.matrix_of(self.batch, batch) * panels + panel) * pairs + ks[0]) * tile + line]

        return load

    def _packed_pairs(self, tile: int) -> Buffer:
        """The words of constant weights."""
        name, pack = self.b.name, self.b.pack(tile, pairs=True)
        self.packed[name] = Operand(name, pack)
        return self.builder.parameter(name, pack.packed_type(self.group.types[name]).elements // 2, "int32")

    def _staged_pairs(self, tile: int) -> Buffer:
        """The words of a changing operand, in the workspace. Columns that do not exist are left as they are."""
        builder, b, pairs = self.builder, self.b, self.b.depth // 2
        matrices, panels = prod(b.batch), ceil(b.lines / tile)
        staged = builder.workspace(matrices * panels * pairs * tile, "int32")
        bits = builder.parameter(b.name, self.group.types[b.name].elements, "uint16")
        with builder.chunks(matrices * panels, matrices * panels * b.depth * tile) as chunk:
            matrix, panel = builder.bind(tirx.floordiv(chunk, panels)), builder.bind(tirx.floormod(chunk, panels))
            columns = builder.bind(tirx.min(b.lines - panel * tile, tile))
            with builder.loop(pairs, name="k") as k:
                source = builder.bind((matrix * b.depth + k * 2) * b.lines + panel * tile)
                target = builder.bind((chunk * pairs + k) * tile)

                def word(i: Expr, source: Expr = source, target: Expr = target) -> None:
                    builder.store(staged, target + i, pair(bits[source + i], bits[source + b.lines + i]))

                builder.dynamic_vector_loop(0, columns, builder.lanes("int32"), word)
        return staged
