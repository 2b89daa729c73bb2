"""Implicit GEMM by AMX: rows of tiles are positions of an image, columns are output channels.

The image is copied once, as padded bfloat16 terms or bytes (amx_input.py), a large one in bands of rows; every tap loads its
tiles from there, and no im2col matrix exists. Weights are packed into AMX tiles at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil, prod

from tvm import tirx

from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SizeLike, estimating, greatest_of, hint_of, maximum_of, minimum_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, row_major, unravel
from ..codegen.work_stealing import Shares
from ..cost.amx import OVERLAP, STREAMED_SHARE, BlockWalk, memory_share, tile_convolution_cycles
from ..cost.estimate import Estimate, bytes_of_values, epilogue_cycles
from ..formats.format import BF16X1, Format, formats_for
from ..microkernels.amx_blocks import (
    AmxMicroKernel,
    BlockEpilogue,
    NextPanel,
    TileOperand,
    begin_sums,
    packed_operand,
    stored_lanes,
    tile_threads,
    work_of_dots,
)
from ..microkernels.amx_packing import LINES, TERM_WORDS, PackTiles
from ..microkernels.amx_unit import ROWS, tile_unit
from ..microkernels.packed_gemm import Scratch
from ..template.contract import BuiltKernel, Operand
from ..template.kernel import finish, new_builder, pointwise_cost
from ..template.values import GroupValues
from .amx_input import TiledImage, WindowProduct, of_volume
from .channels_last_form import ChannelsLast, estimate_with_bytes, extents_of
from .zero_points import zero_point_of

_BAND_SHARE = 0.75  # of L2, for weights and a band of rows
_BAND_WEIGHTS = 0.25  # of L2, for weights alone: with more, bands were slower
_BAND_MOST = 1.25  # of L2, where fewer rows would mostly be copied twice
_BANDED = 2.0  # times L2, of a thread's part of a copy, beyond which bands are made; below, they were as fast or slower


Excess = Callable[[Expr, Expr], Expr]


def tiles_obstacle(form: ChannelsLast, target: Target) -> str:
    """Why a form's anchor, a convolution, cannot be computed by AMX; empty if it can."""
    anchor, inner = form.anchor, form.inner
    source, weights = (inner.types[name] for name in anchor.inputs[:2])
    result = inner.types[anchor.outputs[0]]
    formats = _tile_formats(form, target)
    if not formats or result.dtype not in ("float32", "bfloat16", formats[0].sums):
        return f"no convolution of {source.dtype} and {weights.dtype} as {result.dtype} on the tile unit"
    if len(source.shape) not in (3, 4, 5):
        return "is not of signals, images or volumes"
    if anchor.inputs[1] not in inner.constants:
        return "weights that change are not packed into tiles"
    if source.dtype != "float32" and form.is_computed():
        return f"{source.dtype} that the kernel computes itself is not read as bits"
    return "" if greatest_of(source.elements * weights.elements * result.elements) else "has nothing to multiply"


def tile_format(form: ChannelsLast, target: Target) -> Format:
    """The format by which tiles multiply the operands of a form's anchor, to which there is no obstacle: of float32, with the
    fewest terms that the precision allows, where one is bfloat16 itself, to which operands are rounded as they are packed."""
    found, terms = _tile_formats(form, target), form.outer.tolerance.terms
    if terms == 1 and found[0].a.dtype == "float32":
        return BF16X1
    return next((one for one in found if one.terms >= terms), found[-1])


def _tile_formats(form: ChannelsLast, target: Target) -> tuple[Format, ...]:
    a, b = map(form.inner.storage, form.anchor.inputs[:2])
    return formats_for(a, b, target, unit="tile")


@estimating
def tiles_estimate(form: ChannelsLast, target: Target, image: TiledImage) -> Estimate:
    """The estimate of a form's anchor by AMX, with the copy of its input unless tiles are loaded in place."""
    k_pack, band_bytes = image.product.k_pack, image.elements * image.product.bits // 8 if image.band else None
    copies = 0.0 if image.in_place else image.extents[1] / image.band if image.band else 1.0
    cycles = tile_convolution_cycles(
        extents_of(form),
        image.terms,
        target.machine,
        copies=copies,
        k_pack=k_pack,
        band_bytes=band_bytes,
        is_narrow=image.source.dtype != "float32",
        beside=epilogue_cycles(form.inner, target.machine, form.anchor),
    )
    if not image.band:
        cycles += _walk(form, target, image).cycles(target.machine)
    estimate = estimate_with_bytes(form, cycles, unit="tile")
    # A few blocks of rows prefetch a panel of several terms too late.
    is_prefetched = image.terms == 1 or extents_of(form).rows * extents_of(form).columns > 4 * LINES
    share = memory_share(image.terms, is_prefetched=is_prefetched)
    return replace(estimate, overlap=OVERLAP if is_prefetched else 0.0, memory_share=share)


@estimating
def _walk(form: ChannelsLast, target: Target, image: TiledImage) -> BlockWalk:
    one, bits = extents_of(form), image.product.bits
    beside = bytes_of_values(form.outer)
    source = form.operands.get(form.anchor.inputs[0], form.anchor.inputs[0])
    streamed = sum(size for name, size in beside.items() if name not in form.outer.constants and name != source)
    weights = form.inner.types[form.anchor.inputs[1]].elements * image.terms * bits // 8
    rows = one.images * ceil(one.rows * one.columns / LINES)
    columns = one.groups * one.phases * ceil(one.outputs / one.phases / LINES)
    return BlockWalk(rows, columns, weights, image.elements * bits // 8, streamed, target.threads)


def in_bands(form: ChannelsLast, image: TiledImage, products: Sequence[WindowProduct], target: Target) -> TiledImage:
    """The layout of a copy in bands of rows, where that pays; else the layout that is given."""
    most = reduce(maximum_of, [product.outputs[1] for product in products])
    is_flat = is_one(image.extents[0]) and all(is_one(product.outputs[0]) for product in products)
    if image.in_place or not is_flat:
        return image
    rows = band_rows(image, hint_of(most), sum(_weights_bytes(form, image, product) for product in products), target)
    return image.in_bands(min(rows, hint_of(most)), most) if rows else image


@estimating
def band_rows(image: TiledImage, most: int, weights_bytes: int, target: Target) -> int:
    """Of the `most` rows of results, those whose input is copied at a time, so that it stays in L2 beside the weights; 0: all,
    where a thread's part of the whole copy is not large, or weights leave no room."""
    l2, item_bits = target.machine.l2, image.product.bits
    of_thread = image.elements * item_bits // 8 // target.threads
    if of_thread <= l2.part_bytes(_BANDED) or weights_bytes > l2.part_bytes(_BAND_WEIGHTS):
        return 0
    row_bytes = prod(image.phases) * image.extents[2] * image.pitch * item_bits // 8
    around = image.extents[1] - most
    rows = max((l2.part_bytes(_BAND_SHARE) - weights_bytes) // row_bytes - around, 2 * around, 1)
    if (rows + around) * row_bytes + weights_bytes > l2.part_bytes(_BAND_MOST):
        return 0  # or more than every second row would be copied twice
    images, least = image.source.shape[0], ceil(most / rows)

    def of_a_thread(bands: int) -> int:
        """Rows of the thread that has most, with so many bands an image."""
        return ceil(hint_of(images) * bands / target.threads) * ceil(most / bands)

    return ceil(most / min(range(least, 2 * least + target.threads), key=of_a_thread))


def _weights_bytes(form: ChannelsLast, image: TiledImage, product: WindowProduct) -> int:
    outputs = form.inner.types[form.anchor.outputs[0]].shape[1] // image.groups
    steps = prod(one.count for one in product.taps) * (image.group_channels // image.product.depth)
    return 4 * image.groups * product.phases * ceil(outputs / LINES) * steps * image.terms * TERM_WORDS


@dataclass(frozen=True)
class _Rows:
    """Rows of results from `first` on, `positions` of a plane, whose input lies in `copy`: of all images, or of one."""

    copy: Scratch
    first: Expr
    positions: Expr
    image: Expr | None = None


@dataclass(frozen=True)
class _Weights:
    """The packed weights of a product, as words.

    `excess` is how much a sum is more than that of elements less their zero point, for its matrix and output channel (matmul.py);
    with `by_panel` they are the outer loop, and prefetched.
    """

    buffer: Buffer
    excess: Excess | None
    by_panel: bool


class TiledWindows:
    """The kernel being built, of the products of a Conv or ConvTranspose over one image."""

    def __init__(self, form: ChannelsLast, target: Target, image: TiledImage) -> None:
        self.form, self.anchor, self.image, self.target = form, form.anchor, image, target
        self.builder = new_builder(target)
        self.unit = tile_unit(self.builder, target, image.product)
        self.outputs = form.inner.types[form.anchor.outputs[0]].shape[1] // image.groups  # channels of a group
        self.packed: dict[str, Operand] = {}

    def build(self, template: str, products: Sequence[WindowProduct]) -> BuiltKernel:
        builder, image = self.builder, self.image
        self.form.copy_pieces(builder)
        padding = self._padding()
        whole = None if image.band else image.fill(builder, self.form, padding)
        weights = [self._weights(number, product) for number, product in enumerate(products)]
        dots = sum(prod(self._extents(product).values()) * prod(self._steps(product)) * 4 for product in products)
        beside = self.form.inner.types[self.anchor.outputs[0]].elements * pointwise_cost(self.form.inner)
        whole_work = work_of_dots(dots, image.terms) + beside
        threads = builder.threads_for(whole_work)
        bands = builder.workspace(threads * image.elements, image.product.numbers) if whole is None else None
        blocks = [prod(self._extents(product).values()) for product in products]
        extents = [image.source.shape[0] * self._bands_of_image(products)] if whole is None else blocks
        work = whole_work // len(extents)
        shares = [Shares(builder, threads, extent, work) for extent in extents]
        with tile_threads(builder, self.unit, threads) as (thread, sums):
            if whole is None:
                copy = Scratch(bands, builder.bind(thread * image.elements))
                image.clear_end(builder, copy)
                with shares[0].of(thread) as run:
                    self._bands(products, weights, copy, run, sums, padding)
            else:
                for product, one, dealt in zip(products, weights, shares, strict=True):
                    with dealt.of(thread) as run:
                        self._blocks(product, _Rows(whole, 0, image.positions(product.outputs)), one, run, sums)
        outer, inplace = self.form.outer, self.form.same_place_operands(builder)
        return finish(template, builder, outer, flops=self._flops(products), packed=self.packed, inplace=inplace)

    def _bands(
        self,
        products: Sequence[WindowProduct],
        weights: Sequence[_Weights],
        copy: Scratch,
        run: tuple[Expr, Expr],
        sums: Scratch,
        padding: Expr,
    ) -> None:
        """A run [begin, end) of the bands of all images, each copied and multiplied before the next."""
        builder, image, of_image, (begin, end) = self.builder, self.image, self._bands_of_image(products), run
        with builder.loop(builder.bind(end - begin), name="band") as number:
            at, band = (builder.bind(part) for part in unravel(builder.bind(begin + number), (image.source.shape[0], of_image)))
            first = builder.bind(band * image.band)
            image.fill_band(builder, self.form, copy, at, first, padding)
            for product, one in zip(products, weights, strict=True):
                left = tirx.max(tirx.min(product.outputs[1] - first, image.band), 0)
                positions = tirx.Select(left > 0, left * image.extents[2] - (image.extents[2] - product.outputs[2]), 0)
                rows = _Rows(copy, first, builder.bind(positions), at)
                blocks = tirx.floordiv(rows.positions + (LINES - 1), LINES) * self._columns(product)
                self._blocks(product, rows, replace(one, by_panel=False), (0, builder.bind(blocks)), sums)

    def _bands_of_image(self, products: Sequence[WindowProduct]) -> SizeLike:
        return ceil(reduce(maximum_of, [product.outputs[1] for product in products]) / self.image.band)

    def _columns(self, product: WindowProduct) -> int:
        """Blocks of 32 columns."""
        extents = self._extents(product)
        return int(extents["matrix"] * extents["n"])

    def _extents(self, product: WindowProduct) -> dict[str, SizeLike]:
        """Extents of the loops around a block, outermost first."""
        return {
            "matrix": self.image.groups * product.phases,
            "n": ceil(self.outputs / LINES),
            "image": self.image.source.shape[0],
            "plane": product.outputs[0],
            "m": ceil(self.image.positions(product.outputs) / LINES),
        }

    def _steps(self, product: WindowProduct) -> tuple[int, ...]:
        return (*(one.count for one in product.taps), self.image.group_channels // self.image.product.depth)

    def _panel_words(self, product: WindowProduct) -> int:
        return prod(self._steps(product)) * self.image.terms * TERM_WORDS

    def _flops(self, products: Sequence[WindowProduct]) -> int:
        image, flops = self.image, 0
        for product in products:
            columns = image.groups * product.phases * self.outputs
            depth = prod(one.count for one in product.taps) * image.joined * image.of_group
            flops += 2 * image.source.shape[0] * prod(product.outputs) * columns * depth
        return flops

    def _weights(self, number: int, product: WindowProduct) -> _Weights:
        name, image = self.anchor.inputs[1], self.image
        key = f"{name}/tiles{number}"
        pack = PackTiles(product.weights, image.terms, True, image.of_group * image.joined, image.product)
        self.packed[key] = Operand(name, pack)
        words = pack.packed_type(self.form.inner.types[name]).elements // image.product.k_pack
        buffer = self.builder.parameter(key, words, "uint32")
        by_panel = _walk(self.form, self.target, self.image).goes_by_panel(self.target.machine)
        return _Weights(buffer, self._excess(number, product), by_panel)

    # Zero points ------------------------------------------------------------------------------------------------------

    def _padding(self) -> Expr:
        """The number that stands for zero around the image."""
        zero = zero_point_of(self.form, self.builder)
        return 0 if zero is None else self.builder.bind(tirx.Cast("uint8", zero & tirx.const(255, "int32")))

    def _excess(self, number: int, product: WindowProduct) -> Excess | None:
        zero = zero_point_of(self.form, self.builder)
        if zero is None:
            return None
        name, pack = self.anchor.inputs[1], product.weights.sums
        kind = pack.packed_type(self.form.inner.types[name])
        self.packed[f"{name}/sums{number}"] = Operand(name, pack)
        sums = self.builder.parameter(f"{name}/sums{number}", kind.elements, "int32")
        return lambda matrix, channel: zero * sums[matrix * kind.shape[1] + channel]

    # A block ----------------------------------------------------------------------------------------------------------

    def _blocks(self, product: WindowProduct, rows: _Rows, weights: _Weights, of: tuple[Expr, Expr], sums: Scratch) -> None:
        """The blocks [begin, end) `of` the rows, with their epilogues."""
        builder, extents, (begin_at, end) = self.builder, self._extents(product), of
        axes: tuple[str, ...] = (
            ("matrix", "n", "image", "plane", "m") if weights.by_panel else ("image", "plane", "m", "matrix", "n")
        )
        axes = axes if rows.image is None else ("m", "matrix", "n")

        halves = 1 if greatest_of(self._most_positions(product)) <= ROWS else 2, 1 if self.outputs <= ROWS else 2
        kernel = AmxMicroKernel(builder, self.unit, self._steps(product), self.image.terms, halves)

        def place(block: Expr) -> dict[str, Expr]:
            parts = unravel(builder.bind(begin_at + block), tuple(extents[axis] for axis in axes))
            found = {axis: builder.bind(part) for axis, part in zip(axes, parts, strict=True)}
            return found if rows.image is None else {**found, "image": rows.image, "plane": 0}

        def multiply(block: Expr, first: Scratch | None, between: BlockEpilogue | None) -> None:
            self._multiply(
                kernel, product, (rows, weights.buffer), place(block), sums, first, between, prefetches=weights.by_panel
            )

        def epilogue(block: Expr) -> BlockEpilogue:
            return self._epilogue(product, rows, place(block), sums)

        begin = None if weights.excess is None else self._begin(weights.excess, place)
        kernel.pipeline(builder.bind(end - begin_at), sums, multiply, epilogue, begin)

    def _most_positions(self, product: WindowProduct) -> SizeLike:
        """Of the rows that are multiplied at a time."""
        planes, rows, columns = product.outputs
        return self.image.positions((planes, minimum_of(rows, self.image.band or rows), columns))

    def _group_and_phase(self, product: WindowProduct, at: dict[str, Expr]) -> tuple[Expr, Expr]:
        group, phase = unravel(at["matrix"], (self.image.groups, product.phases))
        return self.builder.bind(group), self.builder.bind(phase)

    def _multiply(
        self,
        kernel: AmxMicroKernel,
        product: WindowProduct,
        operands: tuple[_Rows, Buffer],
        at: dict[str, Expr],
        to: Scratch,
        first: Scratch | None,
        between: BlockEpilogue | None,
        *,
        prefetches: bool,
    ) -> None:
        """The sums of a 32 x 32 block of the result, of image and weights; `prefetches`: also its share of the next panel."""
        builder, image, extents, (rows, weights) = self.builder, self.image, self._extents(product), operands
        group, _ = self._group_and_phase(product, at)
        top = builder.bind(image.first_of(at["m"], product.outputs))
        a = image.lines(rows.copy, (at["image"] if rows.image is None else 0, at["plane"], top), group, product.taps)
        base = builder.bind((at["matrix"] * extents["n"] + at["n"]) * self._panel_words(product))
        then = None
        if prefetches and extents["n"] > 1:
            blocks = [extents[axis] for axis in ("image", "plane", "m")]
            number = builder.bind(row_major([at[axis] for axis in ("image", "plane", "m")], blocks))
            ahead = tirx.Select(at["n"] < extents["n"] - 1, self._panel_words(product), 0)
            known = prod(map(hint_of, blocks))
            if any(isinstance(extent, Size) for extent in blocks):
                number = builder.bind(tirx.floormod(number, known))
            then = NextPanel(builder.bind(base + ahead), number, known)
        left = builder.bind(rows.positions) - at["m"] * LINES
        is_short = left <= ROWS if self._has_short(product) else None
        a = replace(a, is_streamed=prefetches and self._is_streamed(product))
        is_large = 4 * self._panel_words(product) > self.target.machine.l1.size_bytes  # no line stays there until the next block
        b = replace(self._panel(weights, base, kernel.steps), is_streamed=image.terms == 1 and is_large)
        kernel.multiply(a, b, to, is_short=is_short, then=then, first=first, between=between)

    @estimating
    def _is_streamed(self, product: WindowProduct) -> bool:
        """Whether an image that the inner loop walks leaves L1 to a panel of weights: a block reads each position once, and none
        is there any more when the next panel's blocks read it."""
        image, most = self.image, self.target.machine.l1.part_bytes(STREAMED_SHARE)
        is_read_once = image.terms == prod(self._steps(product)[:3]) == 1
        return is_read_once and image.elements * image.product.bits // 8 > most

    def _has_short(self, product: WindowProduct) -> bool:
        """Whether the last of several blocks may have at most the 16 positions of one tile."""
        planes, rows, columns = product.outputs
        if isinstance(rows, Size) or isinstance(columns, Size):
            return greatest_of(self._most_positions(product)) > ROWS
        band = self.image.band or rows
        counts = {min(rows, band), rows % band or rows}
        most = self._most_positions(product) > ROWS
        return any(0 < self.image.positions((planes, count, columns)) % LINES <= ROWS for count in counts) and most

    def _begin(self, excess: Excess, place: Callable[[Expr], dict[str, Expr]]) -> Callable[[Expr, Scratch], None]:
        """What stores the sums that those of a block's channels begin with."""

        def begin(block: Expr, line: Scratch) -> None:
            at = place(block)
            left = self.builder.bind(at["n"] * LINES)
            begin_sums(self.builder, line, self._channels(left), lambda c: -excess(at["matrix"], left + c))

        return begin

    def _channels(self, left: Expr) -> Expr:
        """Channels of a block whose first channel in its group is `left`."""
        return LINES if self.outputs % LINES == 0 else self.builder.bind(tirx.min(self.outputs - left, LINES))

    def _panel(self, weights: Buffer, base: Expr, steps: tuple[int, ...]) -> TileOperand:
        """A panel of weights, whose steps are numbered by loops of these extents."""
        lines = packed_operand(weights, base, self.image.terms, words=True, product=self.image.product)
        return TileOperand(lines.buffer, lines.stride, lambda ks, term, half: lines.at((row_major(ks, steps),), term, half))

    def _epilogue(self, product: WindowProduct, rows: _Rows, at: dict[str, Expr], sums: Scratch) -> BlockEpilogue:
        """What stores a block of the result."""
        builder, width, columns = self.builder, self.image.extents[2], product.outputs[2]
        group, phase = self._group_and_phase(product, at)
        left, top = builder.bind(at["n"] * LINES), builder.bind(at["m"] * LINES)
        count = self._channels(left)
        skipped = builder.bind(top - self.image.first_of(at["m"], product.outputs))  # rows that the previous block stores
        lanes = stored_lanes(builder, count, min(self.form.outer.types[name].bits for name in self.form.outer.outputs))

        is_wider = isinstance(width - columns, Size) or width > columns

        def store_row(row: Expr) -> None:
            position, base = builder.bind(top + row), builder.bind((skipped + row) * LINES)
            y, x = (builder.bind(part) for part in unravel(position, (1, width)))
            with builder.when(x < columns) if is_wider else nullcontext():
                place = product.place(phase, of_volume((at["plane"], y + rows.first, x), len(self.image.source.shape) - 2))
                place = tuple(builder.bind(i) for i in place)
                channel = group * self.outputs + left

                def store(c: Expr) -> None:
                    self._store((at["image"], channel + c, *place), sums[base + c])

                builder.dynamic_vector_loop(0, count, lanes, store)

        return BlockEpilogue(builder.bind(tirx.min(rows.positions - top, LINES)), store_row)

    def _store(self, index: Index, value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(self.unit.product.sums, GroupValues(self.form.inner, self.builder).read(bias, (index[1],)))
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.store_epilogue(self.builder, index, tirx.Cast(dtype, value))
