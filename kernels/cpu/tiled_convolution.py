"""Conv of two spatial dimensions whose result lies channels-last, on the tile unit: positions are rows, channels are columns.

The input is copied once, as bfloat16 terms with zeros around them (tile_image.py); then every tap of the window reads its rows of
tiles from there, and no matrix of windows exists. Weights are packed at compile time into the tiles that are loaded.
"""

from __future__ import annotations

from math import ceil, prod

from tvm import tirx

from ...runtime.target import Target
from ..builder import Expr, share, unravel
from ..configuration import TEMPLATE
from ..costs import TERMS, Convolution, channels_last_cycles, tile_convolution_cycles
from ..group import Group
from ..template import BuiltKernel, Operand, Refusal
from ..values import GroupValues
from .channels_last import ChannelsLast, channels_last_form
from .common import finish, new_builder
from .packing import PackPanels
from .panel_product import Scratch
from .tile_blocks import BlockProduct, Lines, Next, packed_lines, tile_threads
from .tile_image import TiledImage
from .tile_packing import LINES, TERM_ELEMENTS, PackTiles
from .tile_unit import DEPTH, ROWS, tile_unit
from .winograd_channels_last import winograd_of

_NEAR_BYTES = 1 << 20  # of weights that the second cache holds while all positions pass
_WORK_PER_DOT = 16  # cycles


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one Conv of float32 or bfloat16 with constant weights whose result, of float32, is transposed to channels-last."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "Conv":
        return Refusal("has no convolution for the tile unit")
    source, weights = (form.inner.types[name] for name in form.anchor.inputs[:2])
    result = form.inner.types[form.anchor.outputs[0]]
    if source.dtype != weights.dtype or source.dtype not in ("float32", "bfloat16") or result.dtype != "float32":
        return Refusal(f"no convolution of {source.dtype} and {weights.dtype} as {result.dtype} on the tile unit")
    if len(source.shape) != 4:
        return Refusal("is not of images")
    if form.anchor.attribute("group", 1) != 1:
        return Refusal("groups of channels are no whole tiles")
    if form.anchor.inputs[1] not in form.inner.constants:
        return Refusal("weights that change are not packed into tiles")
    if source.dtype == "bfloat16" and form.is_computed():
        return Refusal("bfloat16 that the kernel computes itself is not read as bits")
    if not source.elements * weights.elements * result.elements:
        return Refusal("has nothing to multiply")
    return TiledConvolution(form, target).build()


class TiledConvolution:
    """One kernel being built."""

    def __init__(self, form: ChannelsLast, target: Target) -> None:
        self.form, self.anchor = form, form.anchor
        self.builder = new_builder(target)
        is_narrow = form.inner.types[form.anchor.inputs[0]].dtype == "bfloat16"
        self.terms = 1 if is_narrow else TERMS[form.outer.precision]
        self.image = TiledImage.of(form, self.terms)
        self.outputs = form.inner.types[form.anchor.outputs[0]].shape[1]
        self.target = target
        self.steps = (*self.image.reads.kernel, self.image.channels // DEPTH)
        halves = 1 if self.image.positions <= ROWS else 2, 1 if self.outputs <= ROWS else 2
        self.unit = tile_unit(self.builder, target)
        self.blocks = BlockProduct(self.builder, self.unit, self.steps, self.terms, halves)

    def build(self) -> BuiltKernel | Refusal:
        tiles, vectors = self._cycles()
        if tiles >= vectors and self.form.outer.configuration.get(TEMPLATE) != "convolution_tiles":
            return Refusal(f"{tiles:.0f} cycles on tiles are no fewer than {vectors:.0f} on vectors")
        image, window, builder = self.image, self.image.window, self.builder
        self.form.copy_pieces(builder)
        source = image.fill(builder, self.form)
        key = f"{self.anchor.inputs[1]}/tiles"
        pack, kind = self._pack(), self.form.inner.types[self.anchor.inputs[1]]
        elements = pack.packed_type(kind).elements
        weights = builder.parameter(key, elements // 2, "uint32")
        images, inputs = image.source.shape[:2]
        panels, blocks = ceil(self.outputs / LINES), ceil(image.positions / LINES)
        panel_words = prod(self.steps) * self.terms * TERM_ELEMENTS // 2
        extents = {"image": images, "m": blocks, "n": panels}
        is_far = 2 * elements > _NEAR_BYTES
        if is_far:
            extents = {"n": panels, "image": images, "m": blocks}
        work = prod(extents.values()) * prod(self.steps) * 4 * _WORK_PER_DOT
        threads = builder.threads_for(work)
        with tile_threads(builder, self.unit, threads) as (thread, sums):
            begin, end = share(thread, threads, prod(extents.values()))
            with builder.loop(end - begin, name="block") as i:
                parts = unravel(builder.bind(begin + i), tuple(extents.values()))
                place = {axis: builder.bind(part) for axis, part in zip(extents, parts, strict=True)}
                first = builder.bind(image.first_of(place["m"]))
                a = image.lines(source, place["image"], first)
                base = builder.bind(place["n"] * panel_words)
                number = builder.bind(place["image"] * blocks + place["m"])
                then = Next(builder.bind(base + panel_words), number, images * blocks) if is_far else None
                self._block(a, self._weight_lines(weights, base), sums, place, first, then)
        flops = 2 * images * prod(window.outputs) * self.outputs * inputs * prod(window.kernel)
        return finish(
            "convolution_tiles", builder, self.form.outer, flops=flops, packed={key: Operand(self.anchor.inputs[1], pack)}
        )

    def _cycles(self) -> tuple[float, float]:
        """Estimated: on tiles, and on vectors."""
        window = self.image.window
        images, inputs, *extents = self.image.source.shape
        pairs = [(pair[0], pair[1]) for pair in (extents, window.outputs, window.kernel, window.strides, window.dilations)]
        size, outputs, kernel, strides, dilations = pairs
        overhangs = any(window.begins)
        one = Convolution(images, 1, inputs, self.outputs, *size, *outputs, kernel, strides, overhangs, dilations=dilations)
        lanes, registers = self.builder.lanes("float32"), self.target.vector_registers
        slowdown = 2 if self.image.source.dtype == "bfloat16" else 1  # of products of pairs: see vector_product_cycles
        vectors = channels_last_cycles(one, lanes, registers) * slowdown
        choice = winograd_of(self.form, self.target)
        if not isinstance(choice, Refusal):
            vectors = min(vectors, choice.cycles)
        return tile_convolution_cycles(one, self.terms, copies=not self.image.in_place), vectors

    def _pack(self) -> PackTiles:
        window, inputs = self.image.window, self.image.source.shape[1]
        panels = PackPanels((self.outputs, inputs, *window.kernel), (0, 2, 3, 1), 0, 1, LINES)
        return PackTiles(panels, self.terms, True, inputs * self.image.joined)

    def _weight_lines(self, weights: object, base: Expr) -> Lines:
        """A panel of weights, its steps by the three loops."""
        lines = packed_lines(weights, base, self.terms, words=True)
        _, columns, parts = self.steps
        return Lines(
            lines.buffer, lines.stride, lambda ks, term, half: lines.at(((ks[0] * columns + ks[1]) * parts + ks[2],), term, half)
        )

    def _block(self, a: Lines, b: Lines, sums: Scratch, place: dict[str, Expr], first: Expr, then: Next | None) -> None:
        """A block of the result, and what follows it."""
        builder, (_, columns) = self.builder, self.image.window.outputs
        is_short = tirx.EQ(place["m"], ceil(self.image.positions / LINES) - 1) if self.image.has_short else None
        self.blocks.multiply(a, b, sums, is_short=is_short, then=then)
        left = builder.bind(place["n"] * LINES)
        width = LINES if self.outputs % LINES == 0 else builder.bind(tirx.min(self.outputs - left, LINES))
        top = builder.bind(place["m"] * LINES)
        skipped = builder.bind(top - first)  # rows that the block before stores
        with builder.loop(builder.bind(tirx.min(self.image.positions - top, LINES)), name="row") as row:
            position, base = builder.bind(top + row), builder.bind((skipped + row) * LINES)
            y, x = (
                builder.bind(part)
                for part in (tirx.floordiv(position, self.image.width), tirx.floormod(position, self.image.width))
            )
            with builder.when(x < columns):
                builder.dynamic_vector_loop(
                    0, width, builder.lanes("float32"), lambda c: self._store((place["image"], left + c, y, x), sums[base + c])
                )

    def _store(self, index: tuple[Expr, Expr, Expr, Expr], value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + GroupValues(self.form.inner, self.builder).read(bias, (index[1],))
        self.form.follow(self.builder, index, value)
