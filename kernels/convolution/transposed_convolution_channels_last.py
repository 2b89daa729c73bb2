"""ConvTranspose of signals, images and volumes, NHWC, by a register-tiled product for each phase of output positions.

Output positions `u * stride + phase` are a convolution of stride 1 with some of the taps (transposed_phases.py). Phases that read
the same input are one product with as many times the columns: a 2x2 kernel with stride 2 is four 1x1 products of the same rows.
As in `convolution_channels_last`, positions are rows and channels columns, and with padding a zero-padded copy of the input is
read. A "line" is a row of positions: all that differ in the last dimension only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, prod

from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SizeLike, greatest_of, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, row_major, unravel
from ..cost.convolution import channels_last_heights, channels_last_tiles
from ..formats.format import Format
from ..formats.multiply_add import factor
from ..groups.group import Group
from ..microkernels.register_tile import Tile, sum_tile
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal
from ..template.kernel import finish, has_short_epilogue, machine_of, new_builder
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast, channels_last_form, convolution_estimate, each_column, vector_cycles
from .convolution_channels_last import convolution_format
from .padded_input import Image, padded_image
from .tile_loops import deal, each_height
from .transposed_phases import PackPhases, PhaseProduct, phase_products, reaches_of
from .window import Window, read_window
from .zero_points import ImageZero

_NEAR_SHARE = 0.25  # of L2, for a block of the input that stays there for all panels of weights, beside its results
_MAX_PRODUCTS = 16  # each has code of its own


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one ConvTranspose with an epilogue whose result is transposed to NHWC (NDHWC for volumes, NWC for signals)."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "ConvTranspose":
        return Refusal("has no transposed convolution")
    source = form.inner.types[form.anchor.inputs[0]]
    number_format = convolution_format(form, target)
    if number_format is None:
        return Refusal(f"no convolution of {source.dtype}")
    window = read_window(form.inner, form.anchor)
    products = phase_products(window)
    if len(products) > _MAX_PRODUCTS:
        return Refusal(f"{len(products)} different phases of output positions, more than {_MAX_PRODUCTS}")
    unit = "dot" if number_format.k_pack > 1 else "fma"
    estimate = convolution_estimate(form, vector_cycles(form, target, number_format), target, unit=unit)
    return Candidate(estimate, lambda: _TransposedConvolution(form, target, window, number_format).build(products))


class _TransposedConvolution:
    """The kernel being built."""

    def __init__(self, form: ChannelsLast, target: Target, window: Window, number_format: Format) -> None:
        self.form, self.target, self.anchor, self.window = form, target, form.anchor, window
        self.builder = new_builder(target, form.outer.configuration)
        self.source = form.inner.types[form.anchor.inputs[0]]
        self.images, self.channels = self.source.shape[:2]
        self.groups = form.anchor.attribute("group", 1)
        self.out_channels = form.inner.types[form.anchor.outputs[0]].shape[1]
        self.format, self.accumulator = number_format, number_format.sums
        self.zero = ImageZero(form, self.builder, number_format)
        self.is_last = form.anchor.inputs[0] in form.operands
        self.is_whole = True  # whether products read the input in place
        self.channels //= self.format.k_pack  # a pair of channels is one element
        self.packed: dict[str, Operand] = {}

    def build(self, products: list[PhaseProduct]) -> BuiltKernel | Refusal:
        self.form.copy_pieces(self.builder)
        flops = 0
        if greatest_of(self.form.inner.types[self.anchor.outputs[0]].elements):
            leads, reaches = reaches_of(products)
            self.is_whole = not any(leads) and all(reach <= n for reach, n in zip(reaches, self.window.inputs, strict=True))
            k_pack = self.format.k_pack
            image = padded_image(self.builder, self.form, leads, reaches, k_pack=k_pack, fill=self.zero.padding(k_pack))
            if isinstance(image, Refusal):
                return image
            for number, product in enumerate(products):
                flops += self._emit(number, product, image, leads)
        name = "transposed_convolution_channels_last"
        return finish(name, self.builder, self.form.outer, flops=flops, packed=self.packed)

    # One product ------------------------------------------------------------------------------------------------------

    def _emit(self, number: int, product: PhaseProduct, image: Image, leads: list[int]) -> int:
        """Write the loops over register tiles; returns the product's floating-point operations."""
        builder, taps = self.builder, product.taps
        inputs, outputs = self.channels // self.groups, self.out_channels // self.groups
        depth = (*(one.count for one in taps), inputs)
        images, lines, rows = self._positions(product)
        lanes = builder.lanes(self.accumulator)
        machine, pitch = machine_of(self.target, self.accumulator), image.strides[-1]
        ranked = channels_last_tiles(rows, outputs, max(prod(depth), 1), inputs, machine, pitch=pitch)
        tile = builder.choose("tile", {str(tile): tile for tile in (Tile(*shape, lanes) for shape in ranked)})
        vectors = tile.vectors
        panels, phases = ceil(outputs / tile.columns), prod(product.phases)
        weights = self._weights(number, product, tile.columns) if prod(depth) else None
        first_sums = self._first_sums(number, product, tile.columns) if prod(depth) else None
        zero_point = self.zero.value() if self.format.k_pack == 1 else None
        flops: int = 2 * self.format.k_pack * images * lines * rows * phases * self.out_channels * prod(depth)
        is_lines = not is_one(lines)

        def emit_tile(tile: Tile, size: SizeLike, place: dict[str, Expr]) -> None:
            group, phase, first = place["group"], place["phase"], builder.bind(place["n"] * tile.columns)
            line = builder.bind(tirx.min(place["block"] * size + place["line"], lines - 1)) if is_lines else 0
            lead = self._lead(product, line)
            stretch = place["m"] if is_lines else place["block"] * size + place["line"]
            start = builder.bind(tirx.min(stretch * tile.rows, rows - tile.rows))
            origin = (u + one.begin + before for u, one, before in zip((*lead, start), taps, leads, strict=True))
            corner = builder.bind(image.offset(place["image"], group * inputs, *origin))
            panel = builder.bind(((group * phases + phase) * panels + place["n"]) * (prod(depth) * tile.columns))

            def a(row: int, ks: Index) -> Expr:
                *downs, right = (k * one.pitch for k, one in zip(ks, taps, strict=False))
                element = factor(self.format, image.buffer[corner + image.offset(0, ks[-1], *downs, row + right)])
                return element if zero_point is None else element - zero_point

            def b(column: Expr, ks: Index) -> Expr:
                assert weights is not None
                return factor(self.format, weights[panel + row_major(ks, depth) * tile.columns + column])

            begins = None if first_sums is None else lambda column: first_sums(group * phases + phase, first + column)

            def store_row(row: Expr) -> Callable[[Expr, Expr], None]:
                index = self._index(product, place["image"], lead, builder.bind(start + row), phase)
                return lambda column, value: self._store(index, group * outputs + first + column, value)

            if outputs % tile.columns == 0 and has_short_epilogue(self.form.inner, self.format):
                sum_tile(builder, tile, self.format, depth, a, b, first=begins, store_row=store_row)
                return
            sums = sum_tile(builder, tile, self.format, depth, a, b, first=begins)
            with builder.loop(tile.rows, name="row") as row:
                base, store = builder.bind(row * tile.columns), store_row(row)
                each_column(builder, first, outputs, tile, lambda c: store(c, sums[base + c]))

        deal_tiles = partial(self._deal, product, (images, lines, rows), panels, flops, emit_tile)
        heights = {tile.rows: 1}
        if isinstance(rows, Size):
            heights = channels_last_heights(rows, vectors, outputs, max(prod(depth), 1), inputs, machine, pitch=pitch)
        each_height(builder, heights, rows, lambda height: deal_tiles(Tile(height, vectors, lanes)))
        return flops

    def _deal(
        self,
        product: PhaseProduct,
        positions: tuple[SizeLike, SizeLike, SizeLike],
        panels: int,
        flops: SizeLike,
        emit_tile: Callable[[Tile, SizeLike, dict[str, Expr]], None],
        tile: Tile,
    ) -> None:
        """The loops around a register tile, whose input comes in blocks of lines, or of tiles where there is one line."""
        (images, lines, rows), phases = positions, prod(product.phases)
        is_lines = not is_one(lines)
        blocks, size = self._blocks(*((lines, rows) if is_lines else (ceil(rows / tile.rows), tile.rows)))
        extents = {"image": images, "block": blocks, "group": self.groups, "phase": phases, "n": panels, "line": size}
        if is_lines:
            extents["m"] = ceil(rows / tile.rows)
        deal(self.builder, extents, flops, self.form.operand_bytes, partial(emit_tile, tile, size))

    def _blocks(self, units: SizeLike, rows: SizeLike) -> tuple[SizeLike, SizeLike]:
        """Number of blocks, and units of each, into which `units` of `rows` rows are cut so that a block's input stays in L2."""
        near = max(1, self.target.machine.l2.part_bytes(_NEAR_SHARE) // max(hint_of(rows) * self.channels * 4, 1))
        blocks = ceil(units / near)
        return blocks, ceil(units / blocks)

    def _is_flat(self, product: PhaseProduct) -> bool:
        """Whether the product is a 1x1 convolution of the input in place."""
        is_same = all(one.count == 1 and one.begin == 0 for one in product.taps)
        return self.is_whole and is_same and product.positions == self.window.inputs

    def _positions(self, product: PhaseProduct) -> tuple[int, int, int]:
        """Images, lines of each and positions of a line; contiguous lines, and contiguous images, are merged into one."""
        *outer, rows = product.positions
        lines = prod(outer)
        if self._is_flat(product):
            return (1, 1, self.images * lines * rows) if self.is_last else (self.images, 1, lines * rows)
        return self.images, lines, rows

    def _lead(self, product: PhaseProduct, line: Expr) -> Index:
        """A line's index in all spatial dimensions but the last."""
        outer = product.positions[:-1]
        return (0,) * len(outer) if self._is_flat(product) else tuple(self.builder.bind(i) for i in unravel(line, outer))

    def _index(self, product: PhaseProduct, number: Expr, lead: Index, position: Expr, phase: Expr) -> Index:
        """Image and spatial index in the output for a position of a line."""
        if not self._is_flat(product):
            place: Index = (*lead, position)
        elif self.is_last:
            at = unravel(position, (self.images, *product.positions))
            number, place = at[0], at[1:]
        else:
            place = unravel(position, product.positions)
        parts = zip(place, self.window.strides, product.runs, unravel(phase, product.phases), strict=True)
        return number, *(self.builder.bind(u * stride + run.first + part) for u, stride, run, part in parts)

    def _store(self, index: Index, channel: Expr, value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(self.accumulator, GroupValues(self.form.inner, self.builder).read(bias, (channel,)))
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.store_epilogue(self.builder, (index[0], channel, *index[1:]), tirx.Cast(dtype, value))

    # Weights ----------------------------------------------------------------------------------------------------------

    def _packing(self, product: PhaseProduct, tile: int) -> PackPhases:
        inputs = self.source.shape[1] // self.groups
        shape = (self.groups, inputs, self.out_channels // self.groups, *self.window.kernel)
        return PackPhases(shape, product.phases, product.places, tile, self.format.k_pack)

    def _first_sums(self, number: int, product: PhaseProduct, tile: int) -> Callable[[Expr, Expr], Expr] | None:
        """What sums of words begin with, for their group and phase and output channel of it, to be those of elements less their
        zero point; None: nothing."""
        name, factor = self.anchor.inputs[1], self.zero.factor()
        if factor is None:
            return None
        pack = self._packing(product, tile).sums
        kind = pack.packed_type(self.form.inner.types[name])
        self.packed[f"{name}/sums{number}"] = Operand(name, pack)
        sums = self.builder.parameter(f"{name}/sums{number}", kind.elements, "int32")
        return lambda group, channel: factor * sums[group * kind.shape[1] + channel]

    def _weights(self, number: int, product: PhaseProduct, tile: int) -> Buffer:
        name = self.anchor.inputs[1]
        kind = self.form.inner.types[name]
        pack = self._packing(product, tile)
        if name not in self.form.inner.constants:
            return self._pack_here(pack, product, self.builder.parameter(name, kind.elements, kind.dtype))
        key = f"{name}/last{number}"
        self.packed[key] = Operand(name, pack)
        elements = pack.packed_type(kind).elements // self.format.k_pack
        return self.builder.parameter(key, elements, "int32" if self.format.k_pack > 1 else kind.dtype)

    def _pack_here(self, pack: PackPhases, product: PhaseProduct, source: Buffer) -> Buffer:
        """The layout of `pack`, written by the kernel to the workspace, as the weights are not constant."""
        builder, packed = self.builder, pack.packed_type(TensorType((), str(source.dtype)))
        groups, panels, depth, tile = packed.shape
        buffer = builder.workspace(packed.elements, packed.dtype)
        taps = product.taps
        with builder.chunks(groups * panels, packed.elements) as chunk, builder.loop(depth, name="k") as k:
            group, *parts, panel = unravel(chunk, (self.groups, *product.phases, panels))
            *steps, channel = unravel(k, (*(one.count for one in taps), pack.shape[1]))
            at = [one.first + part + i * one.step for one, part, i in zip(taps, parts, steps, strict=True)]
            with builder.loop(tile, name="line") as line:
                output = builder.bind(panel * tile + line)
                place = (group, channel, tirx.min(output, pack.shape[2] - 1), *at)
                value = source[builder.bind(row_major(place, pack.shape))]
                filled = builder.masked(output < pack.shape[2], value, tirx.const(0, packed.dtype))
                builder.store(buffer, (chunk * depth + k) * tile + line, filled)
        return buffer
