"""Direct convolution, NHWC: a register tile is some positions of an output row by some output channels.

Input scalars are broadcast; vectors run over output channels of the weights, which are packed into panels at compile time.
Nothing is computed between rows, and neither strides nor dilations need a copy. With padding a zero-padded copy of the input is
read. The input itself may be NCHW: its elements are read as scalars anyway, so the layout conversion costs nothing.

A "line" is a row of the output: all positions that differ in the last dimension only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from tvm import tirx

from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SizeLike, greatest_of, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, row_major, unravel
from ..cost.convolution import (
    channels_last_cycles,
    channels_last_heights,
    channels_last_tiles,
    in_words,
    in_words_of_taps,
    loop_order,
    pays_to_fill_pairs,
    prefetches_next,
    weights_overlap,
)
from ..formats import bfloat16, int8
from ..formats.format import BF16_DOT, F32, Format, format_for
from ..formats.multiply_add import factor
from ..groups.group import Group
from ..microkernels.packing import PackPanels, PackSums, Panel, pack_in_kernel
from ..microkernels.register_tile import Tile, sum_tile
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal
from ..template.kernel import finish, has_short_epilogue, machine_of, new_builder
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast, channels_last_form, convolution_estimate, each_column, extents_of, vector_cycles
from .depthwise_channels_last import Depthwise, is_depthwise, sums_bytes
from .padded_input import BITS, Image, padded_image
from .tile_loops import deal, each_height
from .window import Window, clipped_taps, read_window, share_of_padding
from .zero_points import ImageZero

# Bytes, no share of L2: best on cores of 1 MiB (Zen 4, Zen 5) and of 512 KiB, where half as much made layers of VGG-16 and
# ResNet-18 9 to 25% slower.
_FAR_BYTES = 3 * 512 * 1024  # of weights beyond which they are prefetched within a panel
_LEAST_PRODUCTS, _LEAST_PADDING = 32, 0.02  # multiply-adds of a tap, and share of padding taps, from which these are skipped
_EPILOGUE_SHARE = 0.25  # of L3, of results and epilogue operands above which tiles prefetch theirs during the sum
_LEAST_ROUNDED = 1 << 20  # multiply-adds that are worth a copy of their image in bfloat16
_BYTES = 4  # of a word
_ORDERS = {  # of the loops around a register tile, outermost first
    "by line": ("image", "line", "group", "n", "m"),
    "by panel": ("group", "n", "image", "line", "m"),
    "by image": ("image", "group", "n", "line", "m"),
    "by position": ("image", "line", "group", "m", "n"),
}


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Conv with an epilogue whose result is transposed to NHWC (NDHWC for volumes, NWC for signals)."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "Conv":
        return Refusal("has no convolution")
    source = form.inner.types[form.anchor.inputs[0]]
    number_format = convolution_format(form, target)
    if number_format is None:
        return Refusal(f"no convolution of {source.dtype}")
    if taps := tap_format(form, read_window(form.inner, form.anchor), target):
        words, machine = in_words_of_taps(extents_of(form), taps.k_pack), taps.machine(machine_of(target, taps.sums))
        cycles, unit = channels_last_cycles(words, machine), "dot"
    else:
        words = in_words(extents_of(form), number_format.k_pack)
        machine = number_format.machine(machine_of(target, number_format.sums))
        cycles, unit = vector_cycles(form, target, number_format), "dot" if number_format.k_pack > 1 else "fma"
    if is_depthwise(form) and sums_bytes(form):
        cycles = vector_cycles(form, target, F32)
    estimate = replace(convolution_estimate(form, cycles, target, unit=unit), overlap=weights_overlap(words, machine))
    if is_depthwise(form):
        if "int" in number_format.sums and not sums_bytes(form):
            return Refusal("has integers of one channel a group, which no dot product multiplies")
        return Candidate(estimate, lambda: _build_depthwise(form, target))
    return Candidate(estimate, lambda: _Convolution(form, target, number_format).build())


def _build_depthwise(form: ChannelsLast, target: Target) -> BuiltKernel:
    builder = new_builder(target)
    form.copy_pieces(builder)
    depthwise = Depthwise(form, read_window(form.inner, form.anchor), builder)
    flops = depthwise.emit()
    return finish("convolution_channels_last", builder, form.outer, flops=flops, packed=depthwise.packed)


@dataclass(frozen=True)
class _Product:
    """The product of register tiles over lines of `rows` positions; `depth`: extents of the loops over k; `extents`: of the loops
    around a tile; `prefetched`: what is prefetched, as of `_prefetched`; `first_sums`: what sums begin with."""

    image: Image
    weights: Buffer
    tile: Tile
    depth: tuple[int, ...]
    rows: SizeLike
    extents: Mapping[str, SizeLike]
    prefetched: str
    first_sums: Callable[[Expr, Expr], Expr] | None


class _Convolution:
    """The kernel being built."""

    def __init__(self, form: ChannelsLast, target: Target, number_format: Format) -> None:
        self.form, self.target, self.anchor = form, target, form.anchor
        self.window = read_window(form.inner, form.anchor)
        self.builder = new_builder(target, form.outer.configuration)
        self.source = form.inner.types[form.anchor.inputs[0]]
        self.images, self.channels = self.source.shape[:2]
        self.groups = form.anchor.attribute("group", 1)
        self.out_channels = form.inner.types[form.anchor.outputs[0]].shape[1]
        self.is_last = form.anchor.inputs[0] in form.operands
        taps = tap_format(form, self.window, target)
        self.packs_taps, self.format = taps is not None, taps or number_format
        self.accumulator = self.format.sums
        self.zero = ImageZero(form, self.builder, self.format)
        if not self.packs_taps:  # a pair of channels is one element
            self.channels = ceil(self.channels / self.format.k_pack)
        self.packed: dict[str, Operand] = {}
        self.begins = self.window.begins  # of the image as it is read
        self.inplace = form.same_place_operands(self.builder)

    def build(self) -> BuiltKernel | Refusal:
        self.form.copy_pieces(self.builder)
        window = self.window
        reaches = [
            (out - 1) * stride + (kernel - 1) * dilation + 1
            for out, stride, kernel, dilation in zip(window.outputs, window.strides, window.kernel, window.dilations, strict=True)
        ]
        skipped = [axis < len(reaches) - 1 and self._skips(axis, 1) for axis in range(len(reaches))]
        self.begins = tuple(0 if skips else begin for skips, begin in zip(skipped, window.begins, strict=True))
        reaches = [whole if skips else reach for skips, whole, reach in zip(skipped, window.inputs, reaches, strict=True)]
        if self.packs_taps:
            reaches[-1] += -window.kernel[-1] % self.format.k_pack
        k_pack = 1 if self.packs_taps else self.format.k_pack
        planes = "" if not self.packs_taps else BITS if self.format is BF16_DOT else self.source.dtype
        image = padded_image(
            self.builder, self.form, self.begins, reaches, k_pack=k_pack, planes=planes, fill=self.zero.padding(k_pack)
        )
        if isinstance(image, Refusal):
            return image
        flops = self._product(image)
        outer, name = self.form.outer, "convolution_channels_last"
        return finish(name, self.builder, outer, flops=flops, packed=self.packed, inplace=self.inplace)

    def _first_sums(self, tile: int) -> Callable[[Expr, Expr], Expr] | None:
        """What sums of words begin with, for their group and output channel of it, to be those of elements less their zero point
        (matmul.py); None: nothing."""
        name, factor = self.anchor.inputs[1], self.zero.factor()
        if factor is None:
            return None
        kind = self.form.inner.types[name]
        pack = PackSums(
            (self.groups, kind.shape[0] // self.groups, *kind.shape[1:]), tuple(range(len(kind.shape) + 1)), 1, 1, tile
        )
        channels = pack.packed_type(kind).shape[1]
        self.packed[f"{name}/sums"] = Operand(name, pack)
        sums = self.builder.parameter(f"{name}/sums", self.groups * channels, "int32")
        return lambda group, channel: factor * sums[group * channels + channel]

    # The product ------------------------------------------------------------------------------------------------------

    def _product(self, image: Image) -> int:
        """Write the loops over register tiles; returns the convolution's floating-point operations."""
        window, builder = self.window, self.builder
        inputs, outputs = self.channels // self.groups, self.out_channels // self.groups
        images, lines, rows = self._positions()
        taps = ceil(window.kernel[-1] / self.format.k_pack)
        row = (inputs, taps) if self.packs_taps else (window.kernel[-1], inputs)
        depth = (*window.kernel[:-1], prod(row)) if self._reads_runs(image) else (*window.kernel[:-1], *row)
        flops: int = 2 * images * lines * rows * self.out_channels * (self.source.shape[1] // self.groups) * prod(window.kernel)
        lanes = builder.lanes(self.accumulator)
        words = prod(depth) if self.packs_taps else inputs  # pairs of taps: neighbouring windows share none
        machine, k_pack = self.format.machine(machine_of(self.target, self.accumulator)), self.format.k_pack
        self.zero_point = self.zero.value() if k_pack == 1 else None
        pitch = (image.strides[-1] if self.is_last else words) * window.strides[-1]
        ranked = channels_last_tiles(rows, outputs, prod(depth), words, machine, pitch=pitch, k_pack=k_pack)
        tile = builder.choose("tile", {str(tile): tile for tile in (Tile(*shape, lanes) for shape in ranked)})
        weights, first_sums = self._weights(tile.columns), self._first_sums(tile.columns)
        if not greatest_of(flops):
            return 0
        panels = -(-outputs // tile.columns)
        order = builder.choose("order", self._orders(tile.columns))

        vectors = tile.vectors

        def emit(height: int) -> None:
            tile = Tile(height, vectors, lanes)
            extents = {"image": images, "line": lines, "group": self.groups, "m": -(-rows // tile.rows), "n": panels}
            prefetched = self._prefetched(order, extents, prod(depth) * tile.columns)
            product = _Product(image, weights, tile, depth, rows, extents, prefetched, first_sums)
            loops, sizes = {axis: extents[axis] for axis in order}, self.form.operand_bytes
            deal(builder, loops, flops, sizes, lambda place: self._tile(product, place))

        heights = {tile.rows: 1}
        if isinstance(rows, Size):
            heights = channels_last_heights(rows, vectors, outputs, prod(depth), words, machine, pitch=pitch, k_pack=k_pack)
        each_height(builder, heights, rows, emit)
        return flops

    def _reads_runs(self, image: Image) -> bool:
        """Whether all channels of a row of taps are one run of words of bytes: their loop is longer than over channels alone."""
        window, is_short = self.window, has_short_epilogue(self.form.inner, self.format) and not self.packs_taps
        is_run = self.groups == window.dilations[-1] == 1 and is_one(image.strides[1]) and image.strides[-1] == self.channels
        return is_short and is_run and not self._skips(len(window.kernel) - 1, 1)

    def _prefetched(self, order: tuple[str, ...], extents: Mapping[str, SizeLike], panel: int) -> str:
        """What tiles prefetch while they read a panel of `panel` weights: their share of the next panel into L2, all together
        ("next") or those of each image ("next of image"), rows further on in this panel ("soon"), or nothing ("")."""
        size_bytes = self.form.inner.types[self.anchor.inputs[1]].size_bytes
        is_line = is_one(extents["image"]) and is_one(extents["line"])
        is_by_panel = order == _ORDERS["by panel"] or (is_line and order == _ORDERS["by line"])
        if (is_by_panel or order == _ORDERS["by image"]) and prefetches_next(size_bytes, _BYTES * panel, self.target.machine):
            return "next" if is_by_panel else "next of image"
        return "soon" if size_bytes > _FAR_BYTES else ""

    def _tile(self, product: _Product, place: dict[str, Expr]) -> None:
        """One register tile: the sums, and their epilogue."""
        builder, window, image, tile, depth = self.builder, self.window, product.image, product.tile, product.depth
        inputs, outputs, extents = self.channels // self.groups, self.out_channels // self.groups, product.extents
        number, line, group = (place[axis] for axis in ("image", "line", "group"))
        start = builder.bind(tirx.min(place["m"] * tile.rows, product.rows - tile.rows))
        lead, step = self._lead(line), window.strides
        leads = [begin - own for begin, own in zip(self.begins, window.begins, strict=True)]
        origin = (i * s + lead for i, s, lead in zip((*lead, start), step, leads, strict=True))
        corner = builder.bind(image.offset(number, group * inputs, *origin))
        first_weight = builder.bind((group * extents["n"] + place["n"]) * (prod(depth) * tile.columns))
        panel = Panel(product.weights, first_weight, tile.columns)

        def a(row: int, ks: Index) -> Expr:
            if self.packs_taps:
                return self._taps(image, corner + row * step[-1], ks)
            ks = ks if len(ks) > len(window.kernel) else (*ks[:-1], 0, ks[-1])  # of a run
            *downs, right = (k * d for k, d in zip(ks, window.dilations, strict=False))
            element = factor(self.format, image.element(corner + image.offset(0, ks[-1], *downs, row * step[-1] + right)))
            return element if self.zero_point is None else element - self.zero_point

        def b(column: Expr, ks: Index) -> Expr:
            return factor(self.format, panel.buffer[panel.base + row_major(ks, depth) * tile.columns + column])

        before, spans = self._panel_prefetch(product, panel, place), self._spans(lead, start, tile.rows)
        first = builder.bind(place["n"] * tile.columns)
        self._prefetch_epilogue(tile, number, lead, start, builder.bind(group * outputs + first))
        first_sums = product.first_sums
        begins = None if first_sums is None else lambda column: first_sums(group, first + column)

        def store_row(row: Expr) -> Callable[[Expr, Expr], None]:
            index = self._index(number, lead, builder.bind(start + row))
            return lambda column, value: self._store(index, group * outputs + first + column, value)

        # The last tile of a line is moved back to end with it. Where that may be in place, what it computes twice is stored once.
        is_ragged = isinstance(product.rows, Size) or product.rows % tile.rows > 0
        begin = builder.bind(place["m"] * tile.rows - start) if self.inplace and is_ragged else 0
        if outputs % tile.columns == 0 and has_short_epilogue(self.form.inner, self.format) and isinstance(begin, int):
            sum_tile(builder, tile, self.format, depth, a, b, before, spans, first=begins, store_row=store_row)
            return
        sums = sum_tile(builder, tile, self.format, depth, a, b, before, spans, first=begins)
        with builder.loop(tile.rows - begin, name="row") as i:
            row = builder.bind(begin + i)
            base, store = builder.bind(row * tile.columns), store_row(row)
            each_column(builder, first, outputs, tile, lambda c: store(c, sums[base + c]))

    def _prefetch_epilogue(self, tile: Tile, number: Expr, lead: Index, start: Expr, channel: Expr) -> None:
        """Prefetch what a tile's epilogue reads and writes, so that it arrives during the sum."""
        if hint_of(self.form.epilogue_bytes()) > self.target.machine.l3.part_bytes(_EPILOGUE_SHARE):
            with self.builder.loop(tile.rows, name="row") as row:
                image, *place = self._index(number, lead, self.builder.bind(start + row))
                self.form.prefetch(self.builder, (image, channel, *place), min(tile.columns, self.out_channels))

    def _panel_prefetch(self, product: _Product, panel: Panel, place: dict[str, Expr]) -> Callable[[Index], None] | None:
        """The prefetches of each step over k of the tile at `place`, if any."""
        builder, depth, extents = self.builder, product.depth, product.extents
        if not product.prefetched.startswith("next"):
            return (lambda ks: panel.prefetch(builder, row_major(ks, depth))) if product.prefetched else None
        axes = ("image", "line", "m") if product.prefetched == "next" else ("line", "m")
        part = builder.bind(row_major([place[axis] for axis in axes], [extents[axis] for axis in axes]))
        parts = prod(hint_of(extents[axis]) for axis in axes)
        if any(isinstance(extents[axis], Size) for axis in axes):
            part = builder.bind(tirx.floormod(part, parts))
        prefetch = panel.prefetch_next(builder, prod(depth), part, parts)
        return lambda ks: prefetch(row_major(ks, depth))

    def _skips(self, axis: int, run: int) -> bool:
        """Whether skipping the taps of an axis that read only padding pays, for tiles of `run` positions along it."""
        if self.packs_taps and axis == len(self.window.kernel) - 1:
            return False
        if self.format.offset or self.anchor.inputs[0] in self.form.inner.zero_points:
            return False  # padding is no zero there
        products = prod(self.window.kernel[axis + 1 :]) * (self.channels // self.groups)  # of one tap
        return products >= _LEAST_PRODUCTS and share_of_padding(self.window, axis, run) >= _LEAST_PADDING

    def _spans(self, lead: Index, start: Expr, run: int) -> dict[int, tuple[Expr, Expr]]:
        """For each axis where taps are skipped, the taps [begin, end) with which some window of a tile reads the input."""
        window, builder, spans = self.window, self.builder, {}
        for axis, first in enumerate((*lead, start)):
            length = run if axis == len(lead) else 1
            if self._skips(axis, length):
                stride, begin = window.strides[axis], window.begins[axis]
                corner = builder.bind(first * stride - begin)
                spans[axis] = clipped_taps(builder, window, axis, corner, builder.bind(corner + (length - 1) * stride))
        return spans

    def _taps(self, image: Image, corner: Expr, ks: Index) -> Expr:
        """A word of neighbouring taps of a window's row. The last of an odd number of bfloat16 taps is paired with zero, since
        what follows it in memory may be infinite; bytes that follow are multiplied by zero."""
        *downs, channel, number = ks
        places = (k * dilation for k, dilation in zip(downs, self.window.dilations, strict=False))
        word_at, taps = bfloat16.word_at if self.format is BF16_DOT else int8.word_at, self.window.kernel[-1]
        word = word_at(image.buffer, corner + image.offset(0, channel, *places, self.format.k_pack * number))
        if self.format is not BF16_DOT:
            return word
        return tirx.Select(number == taps // 2, word & tirx.const(0xFFFF, "int32"), word) if taps % 2 else word

    def _orders(self, columns: int) -> dict[str, tuple[str, ...]]:
        """The orders of the loops around a tile of so many output channels by name, the best first."""
        one, k_pack = extents_of(self.form), self.format.k_pack
        words = in_words_of_taps(one, k_pack) if self.packs_taps else in_words(one, k_pack)
        own = loop_order(words, columns, self.format.machine(machine_of(self.target, self.accumulator)))
        return {name: _ORDERS[name] for name in dict.fromkeys((own, *_ORDERS))}

    def _is_flat(self) -> bool:
        """Whether this is a 1x1 convolution of stride 1 without padding."""
        window = self.window
        return prod(window.kernel) == prod(window.strides) == 1 and window.inputs == window.outputs

    def _positions(self) -> tuple[int, int, int]:
        """Images, lines of each and positions of a line; contiguous lines, and contiguous images, are merged into one."""
        images, lines, rows = self.images, prod(self.window.outputs[:-1]), self.window.outputs[-1]
        if self._is_flat():
            return (1, 1, images * lines * rows) if self.is_last else (images, 1, lines * rows)
        return images, lines, rows

    def _lead(self, line: Expr) -> Index:
        """A line's index in all spatial dimensions but the last."""
        outer = self.window.outputs[:-1]
        return (0,) * len(outer) if self._is_flat() else tuple(self.builder.bind(i) for i in unravel(line, outer))

    def _index(self, number: Expr, lead: Index, position: Expr) -> Index:
        """Image and spatial index of a position of a line."""
        if not self._is_flat():
            return number, *lead, position
        if self.is_last and not is_one(self.images):
            return unravel(position, (self.images, *self.window.outputs))
        return number, *unravel(position, self.window.outputs)

    def _weights(self, tile: int) -> Buffer:
        name, window = self.anchor.inputs[1], self.window
        kind = self.form.inner.types[name]
        shape = (self.groups, self.out_channels // self.groups, kind.shape[1], *window.kernel)
        places, k_pack = range(3, len(shape)), self.format.k_pack
        order = (0, 1, *places[:-1], 2, places[-1]) if self.packs_taps else (0, 1, *places, 2)
        pack = PackPanels(shape, order, 1, 1, tile, k_pack=k_pack, rounds=self.packs_taps and self.format is BF16_DOT)
        if name not in self.form.inner.constants:
            return pack_in_kernel(self.builder, self.builder.parameter(name, kind.elements, kind.dtype), pack)
        key = f"{name}/last"
        self.packed[key] = Operand(name, pack)
        elements = pack.packed_type(kind).elements // k_pack
        return self.builder.parameter(key, elements, "int32" if k_pack > 1 else kind.dtype)

    def _store(self, index: Index, channel: Expr, value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(self.accumulator, GroupValues(self.form.inner, self.builder).read(bias, (channel,)))
        number, *place = index
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.store_epilogue(self.builder, (number, channel, *place), tirx.Cast(dtype, value))


def convolution_format(form: ChannelsLast, target: Target) -> Format | None:
    """The format of the products of a form's anchor; None where there is none.

    Dot products of pairs of neighbouring channels need an NHWC image and constant weights. An odd number of channels is padded
    with a zero channel in a copy, if that pays.
    """
    source, weights = form.anchor.inputs[:2]
    channels = form.inner.types[source].shape[1] // form.anchor.attribute("group", 1)
    is_read = source in form.operands and weights in form.inner.constants and not form.is_computed()

    def can_read(one: Format) -> bool:
        return one.k_pack == 1 or (is_read and one.packs_a and (channels % one.k_pack == 0 or _fills_words(form, one, target)))

    return format_for(form.inner.storage(source), form.inner.storage(weights), target, can_read)


def _fills_words(form: ChannelsLast, one: Format, target: Target) -> bool:
    """Whether a Conv with an odd number of channels goes by dot products of pairs, its channels padded."""
    pays = pays_to_fill_pairs(extents_of(form), target.machine)
    return form.anchor.op_type == "Conv" and one is BF16_DOT and target.multiplies_pairs and pays


def tap_format(form: ChannelsLast, window: Window, target: Target) -> Format | None:
    """The format of a Conv that goes by dot products of words of neighbouring taps in a row, of an NCHW copy; None: it does not.

    This is for channels that fill no words: of bytes, and, rounded to bfloat16, of float32 where the precision allows it.
    """
    name, weights_name = form.anchor.inputs[:2]
    source, weights, result = (form.inner.types[one] for one in (name, weights_name, form.anchor.outputs[0]))
    if window.kernel[-1] == 1 or window.dilations[-1] > 1 or weights_name not in form.inner.constants:
        return None
    one = format_for(form.inner.storage(name), form.inner.storage(weights_name), target, lambda one: one.packs_a)
    if one is not None and one.k_pack == _BYTES:
        return one if weights.shape[1] % _BYTES and (weights.shape[1] > 1 or form.anchor.attribute("group", 1) == 1) else None
    if not form.outer.tolerance.may_round or not target.multiplies_pairs or weights.shape[1] % 2 == 0:
        return None
    is_long = hint_of(result.elements) * prod(weights.shape[1:]) >= _LEAST_ROUNDED
    return BF16_DOT if is_long and source.dtype == weights.dtype == "float32" else None
