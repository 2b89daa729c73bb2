"""MatMul and Gemm, batched and broadcast, with a pointwise epilogue.

Where the format has dot products of neighbours along k, B is packed in VNNI layout (32-bit pairs of bfloat16), at compile time
or, where it is not constant, by the kernel. A bfloat16 row of A is read as pairs in place, or from a copy that pads an odd depth
with a zero. A float32 A (where only weights are stored as bfloat16) is multiplied by FMAs: a pair of B gives two vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from operator import add, mul
from typing import Any

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ...runtime.symbolic.shapes import is_one, same_shape
from ...runtime.symbolic.sizes import Size, estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, broadcast_index, row_major, unravel
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.product import product_estimate
from ..cost.register_tile import share_sets
from ..expressions.math import wrapping
from ..formats.format import Format, format_for, formats_for
from ..formats.multiply_add import joined
from ..groups.group import Group, Op
from ..microkernels.packing import SHARED_VECTORS, PackPanels, PackSums, Panel
from ..microkernels.register_tile import Plane, Tile, TileProduct, emit, tile_options
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import epilogue_operands, finish, has_short_epilogue, machine_of, new_builder
from ..template.loops import store_epilogue
from ..template.values import GroupValues, anchor_of
from .shared_panels import SharedPanels, tiles_over_panels
from .staged_columns import Columns, OwnPanel, stage_elements, stage_words

_SPREAD_LINES = 64  # rows and columns from which copying A costs less than the set conflicts of its rows
_WIDE_ROWS = 2  # of register tiles that may be wider than panels of shared weights
_SPREAD_BYTES = 64 * 1024 * 1024  # of A, beyond which the copy would be too large a part of a program's memory
Load = Callable[[Expr, Expr, Expr, Expr, Index], Any]  # of TileProduct.a and .b: batch, panel, start, line, ks


@dataclass(frozen=True)
class Side:
    """One operand as matrices of `lines` by `depth`: a line is a row of A or a column of B.

    `lines_last`: in memory k is the slower dimension ([depth, lines]: A transposed, B as it is). `batch` are the operand's own
    batch dimensions, 1 where it broadcasts along the product's.
    """

    name: str
    batch: tuple[int, ...]
    lines: int
    depth: int
    lines_last: bool

    def pack(self, tile: int, k_pack: int = 1) -> PackPanels:
        """The packing of the operand, if it is constant, into panels of `tile` lines."""
        return PackPanels(*self.layout(), tile, k_pack=k_pack)

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """The first arguments of a pack: shape, order of the dimensions, and how many of these are batch and lines."""
        rank = len(self.batch)
        shape, order = (self.lines, self.depth), (*range(rank), rank, rank + 1)
        if self.lines_last:
            shape, order = (self.depth, self.lines), (*range(rank), rank + 1, rank)
        return (*self.batch, *shape), order, rank, 1

    def matrix_of(self, batch: tuple[int, ...], position: Expr) -> Expr:
        """Number of the operand's matrix that belongs to a position of the product's batch."""
        if same_shape(self.batch, batch):
            return position
        return row_major(broadcast_index(unravel(position, batch), batch, self.batch), self.batch)

    def offset(self, matrix: Expr, line: Expr, k: Expr) -> Expr:
        """Flat offset of an element in the operand."""
        if self.lines_last:
            return (matrix * self.depth + k) * self.lines + line
        return (matrix * self.lines + line) * self.depth + k


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one MatMul or Gemm with an epilogue of pointwise operators of its output's shape."""
    product = product_of(group, target)
    if isinstance(product, Refusal):
        return product
    return Candidate(product.estimate(), product.build, stored_runs=(product.b.lines,))


def product_of(group: Group, target: Target) -> MatMulKernel | Refusal:
    """The group's product before code is written, or why there is none."""
    anchor = anchor_of(group)
    dtypes = [group.types[name].dtype for name in anchor.inputs[:2]]
    a, b = map(group.storage, anchor.inputs[:2])
    if format_for(a, b, target) is None:
        return Refusal(f"no product of {' and '.join(dict.fromkeys(dtypes))}")
    if anchor.inputs[0] == anchor.inputs[1] and anchor.inputs[0] in group.constants:
        return Refusal("both operands are one constant")
    return MatMulKernel(group, anchor, target)


class MatMulKernel:
    """The kernel of a MatMul or Gemm being built. `shares_b`: neighbouring matrices of the batch often have the same B."""

    template = "matmul"
    shares_b = False

    def __init__(self, group: Group, anchor: Op, target: Target) -> None:
        self.group, self.anchor, self.target = group, anchor, target
        self.builder = new_builder(target, group.configuration)
        self.batch, self.a, self.b = _normal_form(group, anchor)
        self.dtype = group.types[anchor.outputs[0]].dtype
        self.formats = self._formats()
        self.format, self.accumulator = self.formats[0], self.formats[0].sums  # of several, all have the same sums
        self.packed: dict[str, Operand] = {}

    def _formats(self) -> tuple[Format, ...]:
        a, b = map(self.group.storage, self.anchor.inputs[:2])
        return formats_for(a, b, self.target, self._reads)

    def _reads(self, one: Format) -> bool:
        """Whether the operands' layouts allow the format: neighbours along k can be loaded, or packed, as its k-pack needs."""
        a, b, zeros = self.a, self.b, self.group.zero_points
        if one.k_pack == 1:
            return True
        if a.lines_last or b.name in zeros:  # sums of words lack those of A
            return False
        is_plain = not one.offset and a.name not in zeros
        return b.name in self.group.constants or (is_plain and a.depth % one.k_pack == 0 and one.packs_a and b.lines_last)

    @property
    def k_steps(self) -> int:
        """Iterations of the loop over k: depth by k-pack, rounded up, as an odd depth is padded with zeros."""
        return ceil(self.a.depth / self.format.k_pack)

    @estimating
    def estimate(self) -> Estimate:
        """The estimate of all products by the best register tile, epilogue included."""
        best = self.formats[0]
        machine = machine_of(self.target, self.accumulator)
        size, batch = (self.a.lines, self.b.lines, self.a.depth), prod(self.batch)
        alone = product_estimate(*size, best.machine(machine), k_pack=best.k_pack, batch=batch, unit=best.unit)
        return with_epilogue(with_bytes(alone, self.group), self.group, machine, self.anchor)

    def build(self) -> BuiltKernel:
        self.format = self.builder.choose("format", {one.name: one for one in self.formats})
        a, b, k_pack, machine = self.a, self.b, self.format.k_pack, self.format.machine(machine_of(self.target, self.accumulator))
        packs_a, packs_b = a.name in self.group.constants and k_pack == 1, b.name in self.group.constants
        copies_a = not packs_a and (a.depth % k_pack > 0 or self.has_set_conflicts())
        # A B that is not constant is read in place if it is contiguous along columns, which fill a vector; else it is packed.
        # Where a call decides how many columns there are, they may be fewer than those of a tile.
        is_narrow = isinstance(b.lines, Size) or b.lines < machine.lanes
        stages_b = not packs_b and (not b.lines_last or is_narrow or k_pack > 1)
        padded = packs_b or stages_b
        tiles = tile_options(
            a.lines,
            b.lines,
            self.k_steps,
            machine,
            shifted_loads=not padded and b.lines % machine.lanes != 0,
            b_padded=padded,
            streams_b=padded,
            row_bytes=0 if packs_a or a.lines_last or copies_a else self.group.types[a.name].bytes_of(a.depth),
            cuts_last=not packs_a,
        )
        tile = self.builder.choose("tile", self.as_shared(tiles, _WIDE_ROWS))
        rows = self._panels(a, tile.rows, self._constant(a, tile.rows)) if packs_a else self._rows(copies_a)
        width = self.panel_columns(tile)
        panels = self._constant(b, width) if packs_b else self._staged(tile.columns) if stages_b else None
        own = panels if isinstance(panels, OwnPanel) else None
        is_wide = panels is not None and width != tile.columns
        wide = SharedPanels(panels, ceil(b.lines / width), self.k_steps, width, tile.columns) if is_wide else None
        product = TileProduct(
            prod(self.batch),
            a.lines,
            Plane(b.lines, b.lines, b.lines),
            (self.k_steps,),
            tile,
            self.format,
            rows,
            own.element if own else self._in_place(b) if panels is None else self._panels(b, tile.columns, panels, wide),
            self.store(is_corrected=True),
            a_padded=packs_a,
            b_padded=padded,
            shares_b=self.shares_b,
            panel=self._panel_of(panels, wide, tile) if packs_b or k_pack > 1 else None,
            first=self._first_sums(tile.columns),
            is_short=has_short_epilogue(self.group, self.format),
            stage=own.stage if own else None,
        )
        sizes = [self.group.types[side.name].hinted.size_bytes for side in (a, b)]
        emit(self.builder, product, a_bytes=sizes[0], b_bytes=sizes[1])
        flops = hint_of(product.flops) // max(k_pack * self.k_steps, 1) * a.depth
        return self.finish(flops)

    def finish(self, flops: int) -> BuiltKernel:
        """The finished kernel, whose `store` was called once for each element."""
        inplace = epilogue_operands(self.builder, self.group, self.anchor)
        return finish(self.template, self.builder, self.group, flops=flops, packed=self.packed, inplace=inplace)

    @property
    def shares_weights(self) -> bool:
        """Whether kernels for other numbers of rows read the packed B, too."""
        return self.group.shares_weights and self.b.name in self.group.constants and self.a.name not in self.group.constants

    def as_shared(self, tiles: dict[str, Tile], few_rows: int = 0) -> dict[str, Tile]:
        """The register tiles that fit shared weights, as `tiles_over_panels` says; all where weights are not shared."""
        return tiles_over_panels(tiles, few_rows) if self.shares_weights else tiles

    def panel_columns(self, tile: Tile) -> int:
        """Columns of a panel of B."""
        return SHARED_VECTORS * tile.lanes if self.shares_weights else tile.columns

    @estimating
    def has_set_conflicts(self) -> bool:
        """Whether the rows of A conflict in the sets of L1, so that a copy with another pitch pays."""
        a = self.a
        kind = self.group.types[a.name]
        pays = min(a.lines, self.b.lines) >= _SPREAD_LINES and kind.size_bytes <= _SPREAD_BYTES and not self.builder.is_grid
        return pays and not a.lines_last and share_sets(kind.bytes_of(a.depth), self.target.machine)

    def copy_rows_apart(self) -> Load:
        """A copy of A in the workspace with a pitch that avoids set conflicts; the first element between rows is zero."""
        builder, a, kind = self.builder, self.a, self.group.types[self.a.name]
        pitch = a.depth + LINE_BYTES * 8 // kind.bits
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
            return self._number(a, spread[row * pitch + ks[0]])

        return load

    def _in_place(self, side: Side) -> Load:
        kind = self.group.types[side.name]
        buffer = self.builder.parameter(side.name, kind.elements, kind.dtype)

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            return self._number(side, buffer[side.offset(side.matrix_of(self.batch, batch), start + line, ks[0])])

        return load

    def _number(self, side: Side, element: Expr) -> Expr:
        """An element that is multiplied alone, less the operand's zero point, in the type of the sums."""
        number = tirx.Cast(self.accumulator, element)
        return number - self._zero_point(side) if side.name in self.group.zero_points else number

    def _zero_point(self, side: Side) -> Expr:
        return tirx.Cast(self.accumulator, GroupValues(self.group, self.builder).read(self.group.zero_points[side.name], ()))

    def _rows(self, is_copied: bool) -> Load:
        """The loads of A that multiply-adds take, in place or from a copy."""
        if self.format.packs_a:
            return self._words(*(self._copied_words() if is_copied else self._words_in_place()))
        element, k_pack = self.copy_rows_apart() if is_copied else self._in_place(self.a), self.format.k_pack
        if k_pack == 1:
            return element

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> tuple[Expr, ...]:
            return tuple(element(batch, panel, start, line, (ks[0] * k_pack + i,)) for i in range(k_pack))

        return load

    def _words(self, words: Buffer, pitch: int) -> Load:
        a = self.a

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            return words[(a.matrix_of(self.batch, batch) * a.lines + start + line) * pitch + ks[0]]

        return load

    def _words_in_place(self) -> tuple[Buffer, int]:
        """A in place as 32-bit pairs, and its pitch in pairs."""
        elements = self.group.types[self.a.name].elements
        return self.builder.parameter(self.a.name, elements // self.format.k_pack, "int32"), self.k_steps

    def _copied_words(self) -> tuple[Buffer, int]:
        """A copy of A as 32-bit pairs, an odd depth padded with zeros, and its pitch in pairs, which avoids set conflicts."""
        builder, a, elements, k_pack = self.builder, self.a, self.group.types[self.a.name].elements, self.format.k_pack
        lanes, whole, rows, width = builder.lanes("int32"), a.depth // k_pack, elements // max(a.depth, 1), self.format.a.bits
        pitch = self.k_steps + (LINE_BYTES // 4 if self.has_set_conflicts() else 0)
        bits, copy = builder.parameter(a.name, elements, f"uint{width}"), builder.workspace(rows * pitch, "int32")
        with builder.chunks(rows, elements) as row:
            origin, target = builder.bind(row * a.depth), builder.bind(row * pitch)

            def word(first: Expr, count: int) -> Expr:
                return joined([bits[first + i if i else first] for i in range(count)], width)

            with builder.loop(whole // lanes, name="words") as i:
                vector = bits[tirx.Ramp(origin + i * (k_pack * lanes), 1, k_pack * lanes)]
                builder.store(copy, tirx.Ramp(target + i * lanes, 1, lanes), tirx.reinterpret(f"int32x{lanes}", vector))
            with builder.loop(whole % lanes, name="word") as i:
                at = builder.bind(i + whole // lanes * lanes)
                builder.store(copy, target + at, word(origin + at * k_pack, k_pack))
            if rest := a.depth % k_pack:
                builder.store(copy, target + whole, word(origin + a.depth - rest, rest))
        return copy, pitch

    def _constant(self, side: Side, tile: int) -> Buffer:
        """The panels of a constant operand, packed at compile time."""
        k_pack, source = self.format.k_pack, self.group.types[side.name]
        pack = side.pack(tile, k_pack)
        key = packed_name(side.name, "b" if side is self.b else "a")
        self.packed[key] = Operand(side.name, pack)
        elements = pack.packed_type(source).elements // k_pack
        return self.builder.parameter(key, elements, "int32" if k_pack > 1 else source.dtype)

    def _staged(self, tile: int) -> Buffer | OwnPanel:
        """B packed by the kernel into panels in the workspace: all of them, or one a thread. Columns beyond the last are
        undefined."""
        builder, side, k_pack, dtype = self.builder, self.b, self.format.k_pack, self.accumulator
        columns, kind = Columns(prod(side.batch), side.lines, side.depth, tile), self.group.types[side.name]
        if k_pack > 1:
            bits = builder.parameter(side.name, kind.elements, f"uint{self.format.b.bits}")
            return stage_words(builder, columns, bits, k_pack, self.format.b.bits)
        source = builder.parameter(side.name, kind.elements, kind.dtype)

        def number(matrix: Expr, line: Expr, k: Expr) -> Expr:
            return self._number(side, source[side.offset(matrix, line, k)])

        is_small = kind.hinted.size_bytes < self.group.types[self.a.name].hinted.size_bytes  # many rows meet it, A is read once
        has_own = not side.lines_last and not is_small and columns.has_squares(builder, dtype)
        return (OwnPanel if has_own else stage_elements)(builder, columns, dtype, number)

    def _panels(self, side: Side, tile: int, buffer: Buffer, wide: SharedPanels | None = None) -> Load:
        """The loads of a packed operand that multiply-adds take; of `wide` ones by tiles of several panels."""
        panels = ceil(side.lines / tile)

        def load(batch: Expr, panel: Expr, start: Expr, line: Expr, ks: Index) -> Expr:
            matrix = side.matrix_of(self.batch, batch)
            place = ((matrix * panels + panel) * self.k_steps + ks[0]) * tile + line
            element = wide.element(matrix, panel, line, ks[0]) if wide else buffer[place]
            return element if self.format.k_pack > 1 or side.name not in self.group.constants else self._number(side, element)

        return load

    def _panel_of(self, buffer: Buffer, wide: SharedPanels | None, tile: Tile) -> Callable[[Expr, Expr], Panel]:
        """The place of what a register tile reads of packed B, which may be several panels."""
        if wide is None:
            return self.panel_of_b(buffer, self.k_steps, tile.columns)
        return lambda batch, number: wide.panel(self.builder, self.b.matrix_of(self.batch, batch), number)

    def panel_of_b(self, buffer: Buffer, depth: int, tile: int) -> Callable[[Expr, Expr], Panel]:
        """The place of each packed panel of B in a buffer; a panel has `depth` rows of `tile` columns."""
        panels = ceil(self.b.lines / tile)

        def panel(batch: Expr, number: Expr) -> Panel:
            matrix = self.b.matrix_of(self.batch, batch)
            return Panel(buffer, self.builder.bind((matrix * panels + number) * (depth * tile)), tile)

        return panel

    def store(self, *, is_corrected: bool = False) -> Callable[[Expr, Expr, Expr, Expr, Expr], None]:
        """The epilogue of sums. `is_corrected`: they began with `_first_sums`."""
        group, builder = self.group, self.builder
        shape = group.types[self.anchor.outputs[0]].shape
        pitch = group.row_pitch(self.anchor.outputs[0], self.b.lines)
        kind = self.dtype if "float" in self.dtype and "int" in self.accumulator else self.accumulator
        correction = None if is_corrected else self._first_sums(1)

        def store(batch: Expr, m: Expr, r: Expr, n: Expr, value: Expr) -> None:
            value = tirx.Cast(kind, value if correction is None else value + correction(batch, n))
            line = batch * self.a.lines + m
            offset = line * self.b.lines + n
            index = (*unravel(line, shape[:-1]), n) if shape[-1:] == (self.b.lines,) else unravel(offset, shape)
            place = offset if pitch is None else line * pitch + n if pitch else None
            store_epilogue(group, builder, self.anchor, index, tirx.Cast(self.dtype, self._with_bias(index, value)), place)

        return store

    def _first_sums(self, tile: int) -> Callable[[Expr, Expr], Expr] | None:
        """What makes the sum of (a - z) * b of that of a * b, for its matrix and column, where sums begin with it; None: nothing.

        sum (a - z) b = sum a b - z sum b (Jacob et al.: Quantization and Training of Neural Networks for Efficient
        Integer-Arithmetic-Only Inference, CVPR 2018, 2.3); the sums of constant b are made at compile time, for as many columns
        as tiles of `tile` have.
        """
        has_zero_point = self.a.name in self.group.zero_points
        if self.format.k_pack == 1 or not (has_zero_point or self.format.offset):
            return None
        b = self.b
        pack = PackSums(*b.layout(), tile)
        kind = pack.packed_type(self.group.types[b.name])
        sums = self.builder.parameter(f"{b.name}/sums", kind.elements, "int32")
        self.packed[f"{b.name}/sums"] = Operand(b.name, pack)
        factor = tirx.const(-self.format.offset, "int32")
        if has_zero_point:
            factor = self.builder.bind(factor - self._zero_point(self.a))
        return lambda batch, n: factor * sums[b.matrix_of(self.batch, batch) * kind.shape[1] + n]

    def _with_bias(self, index: Index, value: Expr) -> Expr:
        """alpha * value + beta * C for Gemm; of integers by fractions as float64."""
        if self.anchor.op_type != "Gemm":
            return value
        alpha, beta, kind = self.anchor.attribute("alpha", 1.0), self.anchor.attribute("beta", 1.0), str(value.ty)
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 and beta != 0.0 else ""
        if "int" in kind and not (float(alpha).is_integer() and (not bias or float(beta).is_integer())):
            kind, value = "float64", tirx.Cast("float64", value)
        value = _times(value, alpha, kind)
        if not bias:
            return value
        place = broadcast_index(index, self.group.types[self.anchor.outputs[0]].shape, self.group.types[bias].shape)
        element = tirx.Cast(kind, GroupValues(self.group, self.builder).read(bias, place))
        return wrapping(add, value, _times(element, beta, kind))


def _times(value: Expr, factor: float, kind: str) -> Expr:
    """A number of this type times a factor: of integers, which wrap around, by what is the same modulo their range."""
    if factor == 1.0:
        return value
    if "int" not in kind:
        return value * tirx.const(factor, kind)
    half = 1 << (np.dtype(kind).itemsize * 8 - 1)
    number = (int(factor) + half) % (2 * half) - half
    signed = tirx.const(number, kind.lstrip("u"))
    return wrapping(mul, value, tirx.reinterpret(kind, signed) if number < 0 else tirx.const(number, kind))


def _normal_form(group: Group, anchor: Op) -> tuple[tuple[int, ...], Side, Side]:
    """The product's batch dimensions, A and B. Where all matrices of the batch share one B, the batch is folded into A's rows."""
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
    batch = tuple(y if is_one(x) else x for x, y in zip(a_batch, b_batch, strict=True))
    (m, k), n = a[-2:], b[-1]
    if is_one(prod(b_batch)) and same_shape(a_batch, batch):
        return (), Side(a_name, (), prod(batch) * m, k, False), Side(b_name, (), n, k, True)
    return batch, Side(a_name, a_batch, m, k, False), Side(b_name, b_batch, n, k, True)
