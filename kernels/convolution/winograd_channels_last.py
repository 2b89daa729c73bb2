"""3x3 convolutions of stride 1, NHWC, by Winograd's F(m x m, 3x3), where the precision allows its errors.

A block of tiles goes through three steps: the input transform, vectorised over channels; for each of the (m + 2)^2 points a
product of tiles x input channels by the transformed weights; the output transform, with bias and epilogue. bfloat16 images of few
tiles have their transformed input rounded again, for dot products of pairs.

If the transformed inputs of enough tiles fit L2, each thread takes blocks of its own through all steps. Otherwise, or if those of
all tiles fit L2 and are smaller than the weights, threads share one block in L3 and split the weight panels, so that weights
stream from memory once a block.

A dilated convolution is one convolution for each of its phases: the rows, and columns, that are a multiple of the dilation apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import greatest_of, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, unravel
from ..codegen.work_stealing import Shares
from ..cost.convolution import Convolution
from ..cost.memory import WORK_PER_OPERATION
from ..cost.product import product_tiles
from ..cost.winograd import PAIRED_TILES, WINOGRAD_HALF_OUTPUTS, WinogradChoice, tiles_along, winograd_choice, winograd_choices
from ..formats.bfloat16 import rounded, word_at
from ..formats.format import BF16_DOT, F32
from ..formats.multiply_add import factor
from ..groups.group import Group
from ..microkernels.packing import Panel
from ..microkernels.register_tile import Tile, sum_tile
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal
from ..template.kernel import finish, new_builder
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast, channels_last_form, convolution_estimate, extents_of
from .window import Window, read_window
from .winograd_transforms import HALF, NARROW, TYPE, Matrices, PackScales, PackWinograd, winograd

_NEAR_BYTES = 704 * 1024  # of inputs and products of a thread's own block: less, for a smaller L2, reads weights too often
_FAR_SHARE = 0.375  # of L3, for the transformed inputs of a shared block, or for weights that stay there: others use it, too
_PRODUCT_BYTES = 320 * 1024  # of products of a panel, where a block is shared
_WIDE_BYTES = 4 * 1024 * 1024  # of transformed weights up to which they stay float32 for bfloat16 images
_LEAST_TILES = 16  # of a thread's own block, below which weights would be read too often; half where there are many blocks
_TILES_WORTH = 1.25  # factor on Winograd's cycles against AMX's, which are counted with the slowest loads measured
_TYPES = ("float32", "bfloat16")  # of the operands
_BITS = "uint16"  # type of transformed inputs that are rounded to bfloat16, as bits
_LINE_BYTES = 64
_Element = Callable[[int, Expr, Expr], Expr]  # of the input: (row of a tile, column of a tile, channel)


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one 3x3 Conv of stride 1 of images in NHWC form, with its epilogue, where the precision allows Winograd."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    choice = winograd_of(form, target)
    if isinstance(choice, Refusal):
        return choice
    cycles = choice.cycles * (_TILES_WORTH if target.has_tiles else 1.0)
    estimate = convolution_estimate(form, cycles, target, unit="dot" if choice.has_pairs else "fma")
    return Candidate(estimate, lambda: _Kernel(form, extents_of(form), target).build(), transforms_weights=True)


def winograd_of(form: ChannelsLast, target: Target) -> WinogradChoice | Refusal:
    """The F(m x m, 3x3) that would compute the form's anchor, with its cycles; a Refusal where none may."""
    precision = form.outer.precision
    if not form.outer.tolerance.winograd_outputs:
        return Refusal(f"its errors grow with the largest element of a tile, which precision {precision} does not allow")
    if reason := _obstacle(form, target):
        return Refusal(reason)
    choice = winograd_choice(extents_of(form), target.machine, precision, paired_tiles=_paired_tiles(form, target))
    return choice or Refusal("is not of 3x3 windows without strides")


def _paired_tiles(form: ChannelsLast, target: Target) -> int:
    """Tiles of an image up to which products may be dot products of bfloat16 pairs; 0 where they may not."""
    return PAIRED_TILES if target.multiplies_pairs and form.outer.is_on_branch else 0


def _obstacle(form: ChannelsLast, target: Target) -> str:
    anchor = form.anchor
    if anchor.op_type != "Conv":
        return "has no convolution"
    if target.is_gpu:
        return "is for CPUs"
    source, weights = (form.inner.types[name] for name in anchor.inputs[:2])
    if not {source.dtype, weights.dtype} <= {*_TYPES}:
        return f"no fast convolution of {source.dtype}"
    if len(source.shape) != 4:
        return "is not of images"
    if anchor.inputs[0] not in form.operands:
        return "its input lies channels-first"
    if form.is_computed():
        return "its input is computed, and would be so for each tile again"
    if anchor.inputs[1] not in form.inner.constants:
        return "its weights are not constant"
    return "" if greatest_of(source.elements) and weights.elements else "is empty"


class _Kernel:
    """The kernel being built."""

    def __init__(self, form: ChannelsLast, one: Convolution, target: Target) -> None:
        self.form, self.one, self.anchor, self.target = form, one, form.anchor, target
        self.packed: dict[str, Operand] = {}
        self.window: Window = read_window(form.inner, form.anchor)
        self.builder: KernelBuilder = new_builder(target, form.outer.configuration)
        self.lanes = target.vector_lanes
        paired_tiles = _paired_tiles(form, target)
        machine = target.machine
        sizes = winograd_choices(one, machine, form.outer.precision, paired_tiles=paired_tiles)
        choice = self.builder.choose("outputs", {str(choice): choice for choice in sizes})
        outputs, self.format = choice.outputs, BF16_DOT if choice.has_pairs else F32
        self.depth = one.inputs // self.format.k_pack
        self.method = winograd(outputs)
        self.points = self.method.extent**2
        self.grid = (one.images, *tiles_along(one, outputs))
        self.tiles = prod(self.grid)
        tiles = hint_of(self.tiles)  # where a call decides how many there are: any choice is right for all
        channels, self.transformed = one.groups * one.inputs, TYPE if self.format is F32 else _BITS
        item_bytes = np.dtype(self.transformed).itemsize
        self.pitch = channels + (_LINE_BYTES // item_bytes if channels % 512 == 0 else 0)  # avoids set conflicts of rows
        tile = self._tile_options(tiles)[0]
        self.flops = 2 * self.points * self.tiles * one.groups * one.inputs * one.outputs
        self.threads = self.builder.threads_for(self.flops // WORK_PER_OPERATION)
        near = _NEAR_BYTES // (self.points * (item_bytes * self.pitch + 4 * tile.columns))
        weights = self.points * channels * one.outputs
        is_narrow = form.inner.types[form.anchor.inputs[0]].dtype == "bfloat16"
        may_halve = is_narrow and outputs <= WINOGRAD_HALF_OUTPUTS and 4 * weights > _WIDE_BYTES
        self.dtype = NARROW if self.format is BF16_DOT else HALF if may_halve else TYPE  # of the weights in memory
        weights *= np.dtype(self.dtype).itemsize
        # A shared block's inputs beyond all L2s are read from L3 once a panel of weights; own blocks read weights once a block.
        least = _LEAST_TILES if tiles <= 2 * self.threads * near else _LEAST_TILES // 2
        is_near = near >= min(least, tiles) and weights <= machine.l3.part_bytes(_FAR_SHARE)
        # Where all transformed inputs fit L2, threads that share a block read each weight once among them.
        are_few = tiles <= near and item_bytes * self.points * tiles * channels < weights
        is_private = is_near and tiles >= self.threads and not (are_few and self.threads > 1)
        may_be_private = near > 0 and tiles >= self.threads
        blocks_of = ("thread", "all") if is_private else ("all", "thread") if may_be_private else ("all",)
        self.is_private = self.builder.choose("blocks", {whose: whose == "thread" for whose in blocks_of})
        far = max(machine.l3.part_bytes(_FAR_SHARE) // (item_bytes * self.points * self.pitch), 1)
        blocks = self.threads * ceil(tiles / (self.threads * near)) if self.is_private else ceil(tiles / far)
        self.size = ceil(tiles / blocks)
        self.tile = self.builder.choose("tile", {str(tile): tile for tile in self._tile_options(self.size)})
        self.panels = ceil(one.outputs / self.tile.columns)

    def _tile_options(self, rows: int) -> list[Tile]:
        one = self.one
        tiles = product_tiles(rows, one.outputs, self.depth, self.target.machine)
        return [Tile(*tile, self.lanes) for tile in tiles]

    def build(self) -> BuiltKernel:
        name = self.anchor.inputs[1]
        sizes = self.one.groups, self.method.outputs, self.tile.columns
        self.weights = self._packed(name, "winograd", PackWinograd(*sizes, self.dtype))
        self.scales = self._packed(name, "scales", PackScales(*sizes)) if self.dtype == HALF else None
        if self.is_private:
            self._emit_private()
        else:
            self._emit_shared()
        self.form.copy_pieces(self.builder)
        outer, inplace = self.form.outer, self.form.same_place_operands(self.builder)
        return finish("winograd_channels_last", self.builder, outer, flops=self.flops, packed=self.packed, inplace=inplace)

    def _packed(self, name: str, form: str, pack: PackWinograd | PackScales) -> Buffer:
        key, kind = f"{name}/{form}", pack.packed_type(self.form.inner.types[name])
        self.packed[key] = Operand(name, pack)
        if kind.dtype == NARROW:
            return self.builder.parameter(key, kind.elements // 2, "int32")
        return self.builder.parameter(key, kind.elements, kind.dtype)

    # The order of the steps -------------------------------------------------------------------------------------------

    def _matrices(self, rows: int, pitch: int, dtype: str, copies: int = 1) -> Matrices:
        """Workspace for the matrices of all points, `copies` times: a thread's begin at its number times their size."""
        empty = Matrices(None, 0, rows, pitch, _LINE_BYTES // np.dtype(dtype).itemsize)
        return replace(empty, buffer=self.builder.workspace(copies * empty.stride * self.points, dtype))

    def _of_thread(self, matrices: Matrices, thread: Expr) -> Matrices:
        return replace(matrices, base=self.builder.bind(thread * (matrices.stride * self.points)))

    def _emit_private(self) -> None:
        """Each thread takes blocks of its own through all steps, in L2."""
        builder, threads = self.builder, self.threads
        size, blocks = self.size, ceil(self.tiles / self.size)
        inputs = self._matrices(size, self.pitch, self.transformed, threads)
        products = self._matrices(size, self.tile.columns, TYPE, threads)
        shares = Shares(builder, threads, blocks, self.flops // WORK_PER_OPERATION)
        with builder.loop(threads, "parallel", "thread") as thread, shares.of(thread) as (begin, end):
            mine, made = self._of_thread(inputs, thread), self._of_thread(products, thread)
            with builder.loop(builder.bind(end - begin), name="block") as i:
                first = builder.bind((begin + i) * size)
                count = builder.bind(tirx.min(self.tiles - first, size))
                with builder.loop(count, name="tile") as t:
                    self._transform_input(mine, t, builder.bind(first + t))
                with builder.loop(self.one.groups * self.panels, name="panel") as panel:
                    self._products(mine, made, panel, 0, count)
                    self._results(made, panel, first, count)

    def _emit_shared(self) -> None:
        """All threads transform the inputs of one block into L3; then each multiplies them by its share of the weight panels."""
        builder, threads, size = self.builder, self.threads, self.size
        near = max(_PRODUCT_BYTES // (4 * self.points * self.tile.columns), self.tile.rows)
        pieces = ceil(size / near)
        part = max(ceil(size / pieces), self.tile.rows)
        inputs = self._matrices(pieces * part, self.pitch, self.transformed)
        products = self._matrices(part, self.tile.columns, TYPE, threads)
        panels = self.one.groups * self.panels
        with builder.loop(ceil(self.tiles / size), name="block") as block:
            first = builder.bind(block * size)
            count = builder.bind(tirx.min(self.tiles - first, size))
            with builder.dynamic_chunks(count, self.flops // WORK_PER_OPERATION) as t:
                self._transform_input(inputs, t, builder.bind(first + t))
            shares = Shares(builder, threads, panels * pieces, self.flops // WORK_PER_OPERATION)
            with builder.loop(threads, "parallel", "thread") as thread, shares.of(thread) as (begin, end):
                made = self._of_thread(products, thread)
                with builder.loop(builder.bind(end - begin), name="piece") as i:
                    panel, piece = (builder.bind(at) for at in unravel(builder.bind(begin + i), (panels, pieces)))
                    start = builder.bind(piece * part)
                    some = builder.bind(tirx.max(tirx.min(count - start, part), 0))
                    self._products(inputs, made, panel, start, some)
                    self._results(made, panel, builder.bind(first + start), some)

    # The steps --------------------------------------------------------------------------------------------------------

    def _transform_input(self, to: Matrices, row: Expr, number: Expr) -> None:
        """The input transform of tile `number`: row `row` of each point's matrix."""
        builder, one, (below, beside) = self.builder, self.one, self.one.dilations
        image, *at = (builder.bind(at) for at in unravel(number, self.grid))
        top, left = (builder.bind(first - begin) for first, begin in zip(self._firsts(at), self.window.begins, strict=True))
        reach = self.method.extent - 1
        edges = (top, below, one.height), (left, beside, one.width)
        whole = [tirx.And(at >= 0, at + reach * step < size) for at, step, size in edges]
        is_whole = builder.bind(tirx.And(*whole))
        read = self.form.readers(builder)[self.anchor.inputs[0]]

        def load(index: Index) -> Expr:
            return tirx.Cast(TYPE, read(index))

        def inside(i: int, j: Expr, channel: Expr) -> Expr:
            return load((image, channel, top + i * below, left + j * beside))

        def ahead(i: int, j: Expr, channel: Expr) -> Expr:
            return read((image, channel, top + i * below, left + j * beside))

        def clipped(i: int, j: Expr, channel: Expr) -> Expr:
            y, x = top + i * below, left + j * beside
            exists = tirx.And(tirx.And(y >= 0, y < one.height), tirx.And(x >= 0, x < one.width))
            place = [tirx.max(tirx.min(at, size - 1), 0) for at, size in ((y, one.height), (x, one.width))]
            return builder.masked(exists, load((image, channel, *place)), tirx.const(0, TYPE))

        def transform(element: _Element) -> None:
            vector = self._transform_vector
            _vectors(builder, one.groups * one.inputs, self.lanes, lambda c, lanes: vector(to, row, c, lanes, element, ahead))

        with builder.when(is_whole):
            transform(inside)
        with builder.when(tirx.Not(is_whole)):
            transform(clipped)

    def _firsts(self, numbers: Sequence[Expr]) -> tuple[Expr, ...]:
        """Row and column of the first result of a tile; consecutive numbers are the phases of one place (dilation)."""
        steps = zip(numbers, self.one.dilations, strict=True)
        outputs = self.method.outputs
        return tuple(
            self.builder.bind(tirx.floordiv(at, step) * (outputs * step) + tirx.floormod(at, step) if step > 1 else at * outputs)
            for at, step in steps
        )

    def _transform_vector(self, to: Matrices, row: Expr, channel: Expr, lanes: int, element: _Element, ahead: _Element) -> None:
        """Transform one vector of channels of a tile. `ahead` reads the input unclipped, to prefetch the tile to the right."""
        builder, extent = self.builder, self.method.extent
        columns = builder.local(self.points * lanes, TYPE)
        with builder.loop(extent, name="j") as j:
            for i in range(extent):
                builder.prefetch(ahead(i, j + self.method.outputs, channel))
            with builder.loop(lanes, "vectorized", "lane") as lane:
                made = self.method.transform_data(builder, [builder.name(element(i, j, channel + lane)) for i in range(extent)])
                for i, value in enumerate(made):
                    builder.store(columns, (i * extent + j) * lanes + lane, value)
        with builder.loop(extent, name="i") as i, builder.loop(lanes, "vectorized", "lane") as lane:
            values = [columns[(i * extent + j) * lanes + lane] for j in range(extent)]
            for j, value in enumerate(self.method.transform_data(builder, values)):
                builder.store(to.buffer, to.offset(i * extent + j, row, channel + lane), self._as_factor(value))

    def _as_factor(self, value: Expr) -> Expr:
        """A transformed input as it is stored in its matrix: rounded to bfloat16 bits where products are of pairs."""
        if self.format is F32:
            return value
        return tirx.reinterpret(_BITS, rounded(value, self.builder.name, has_instruction=True))

    def _products(self, inputs: Matrices, to: Matrices, panel: Expr, start: Expr, count: Expr) -> None:
        """For each point, rows [start, start + count) of `inputs` by one panel of weights, to rows [0, count) of `to`."""
        builder, tile, depth, parts = self.builder, self.tile, self.depth, ceil(to.rows / self.tile.rows)
        group = builder.bind(tirx.floordiv(panel, self.panels)) if self.one.groups > 1 else 0
        with (
            builder.loop(self.points, name="point") as point,
            builder.loop(builder.bind(tirx.floordiv(count + tile.rows - 1, tile.rows)), name="m") as m,
        ):
            first = builder.bind(tirx.min(m * tile.rows, to.rows - tile.rows))
            left = builder.bind(inputs.offset(point, start + first, group * self.one.inputs))
            right = builder.bind((panel * self.points + point) * (depth * tile.columns))

            def a(row: int, ks: Index) -> Expr:
                line = left + row * inputs.pitch
                k_pack = self.format.k_pack
                return word_at(inputs.buffer, line + k_pack * ks[0]) if k_pack > 1 else inputs.buffer[line + ks[0]]

            def b(column: Expr, ks: Index) -> Expr:
                return factor(self.format, self.weights[right + ks[0] * tile.columns + column])

            prefetch = Panel(self.weights, right, tile.columns).prefetch_next(builder, depth, m, parts)
            sums = sum_tile(builder, tile, self.format, (depth,), a, b, lambda ks: prefetch(ks[0]))
            place = builder.bind(to.offset(point, first, 0))
            with (
                builder.loop(tile.rows * tile.vectors, name="vector") as vector,
                builder.loop(tile.lanes, "vectorized", "lane") as lane,
            ):
                at = vector * tile.lanes + lane
                builder.store(to.buffer, place + at, sums[at])

    def _results(self, made: Matrices, panel: Expr, first: Expr, count: Expr) -> None:
        """The output transform and epilogue of rows [0, count): tiles from `first` on, the channels of one panel."""
        builder, one, columns = self.builder, self.one, self.tile.columns
        group, part = (builder.bind(at) for at in unravel(panel, (one.groups, self.panels)))
        channel = builder.bind(group * one.outputs + part * columns)
        rest = one.outputs % columns
        with builder.loop(count, name="tile") as row:
            image, *at = (builder.bind(at) for at in unravel(builder.bind(first + row), self.grid))
            place = (image, *self._firsts(at))

            def emit(extent: int) -> None:
                _vectors(
                    builder,
                    extent,
                    self.lanes,
                    lambda at, lanes: self._transform_back(made, row, at, lanes, place, channel, panel),
                )

            if not rest:
                emit(columns)
            elif self.panels == 1:
                emit(rest)
            else:
                with builder.when(part < self.panels - 1):
                    emit(columns)
                with builder.when(part == self.panels - 1):
                    emit(rest)

    def _transform_back(
        self, made: Matrices, row: Expr, column: Expr, lanes: int, place: tuple[Expr, ...], channel: Expr, panel: Expr
    ) -> None:
        builder, extent, outputs = self.builder, self.method.extent, self.method.outputs
        half = builder.local(outputs * extent * lanes, TYPE)
        with builder.loop(extent, name="j") as j, builder.loop(lanes, "vectorized", "lane") as lane:
            values = [builder.name(made.buffer[made.offset(i * extent + j, row, column + lane)]) for i in range(extent)]
            for i, value in enumerate(self.method.transform_result(builder, values)):
                builder.store(half, (i * extent + j) * lanes + lane, value)
        (image, top, left), (below, beside) = place, self.one.dilations
        line = builder.local(outputs * lanes, TYPE)
        with builder.loop(self._count(self.one.rows - top, below), name="i") as i:
            with builder.loop(lanes, "vectorized", "lane") as lane:
                values = [builder.name(half[(i * extent + j) * lanes + lane]) for j in range(extent)]
                for j, value in enumerate(self.method.transform_result(builder, values)):
                    scale = self.scales[panel * self.tile.columns + column + lane] if self.scales is not None else 1.0
                    builder.store(line, j * lanes + lane, value * scale)
            with (
                builder.loop(self._count(self.one.columns - left, beside), name="j") as j,
                builder.loop(lanes, "vectorized", "lane") as lane,
            ):
                place = (image, channel + column + lane, top + i * below, left + j * beside)
                self._store(place, line[j * lanes + lane])

    def _count(self, rest: Expr, step: int) -> Expr:
        """Results of a tile along a dimension of which `rest` positions are left, `step` apart; 0 beyond the edge."""
        many = rest if step == 1 else tirx.max(tirx.floordiv(rest + step - 1, step), 0)
        return self.builder.bind(tirx.min(many, self.method.outputs))

    def _store(self, index: tuple[Expr, ...], value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(TYPE, GroupValues(self.form.inner, self.builder).read(bias, index[1:2]))
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.store_epilogue(self.builder, index, tirx.Cast(dtype, value))


def _vectors(builder: KernelBuilder, extent: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """`body(first, lanes)` for vectors that cover [0, extent) once: whole ones, then ever shorter ones."""
    whole = extent // lanes
    with builder.loop(whole, name="v") as block:
        body(builder.bind(block * lanes), lanes)
    done = whole * lanes
    while done < extent:
        while lanes > extent - done:
            lanes //= 2
        body(done, lanes)
        done += lanes
