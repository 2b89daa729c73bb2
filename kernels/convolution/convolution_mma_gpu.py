"""Conv on the matrix unit of a GPU, NHWC, as implicit GEMM: positions are rows of the product, output channels columns.

Windows are read where the image lies, if its channels fill chunks of 16 bytes; else a first grid copies it with padded channels
and zeros around it, also from an image that lies channels-first. There the taps of a row are neighbours in memory, and one of k:
a 7 x 7 window of 3 channels is seven taps of 28 numbers, not 49 of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, unravel
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..cost.gpu_product import ProductSize, TiledProduct, copy_clocks, tiled_products
from ..groups.group import Group
from ..microkernels.gpu_matrix_unit import MatrixUnit
from ..microkernels.gpu_operand_tiles import PackedSource
from ..microkernels.gpu_part_layout import CHUNK_BYTES
from ..microkernels.gpu_pipelined_product import PipelinedProduct, Store, emit_pipelined_product
from ..microkernels.gpu_window_tiles import MOST_TAPS, ImageWindows, PackTaps
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import finish, new_builder
from .channels_last_form import ChannelsLast, channels_last_form
from .merged_positions import merge_positions
from .mma_image_product import MmaImageProduct, obstacle
from .window import Window

_NARROW_PITCH = 4  # elements of a pixel with up to four channels


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Conv of float32, bfloat16 or float16, or of bytes by int8, with constant weights, an epilogue, and a result
    transposed to NHWC."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "Conv":
        return Refusal("has no convolution")
    if reason := obstacle(form, target):
        return Refusal(reason)
    kernel = MmaConvolution(form, target)
    return Candidate(kernel.estimate(), kernel.build)


@dataclass(frozen=True)
class _Copied:
    """The image as a first grid writes it: zeros around it, `pitch` elements a pixel of each group."""

    extents: tuple[int, ...]
    pitch: int
    joins: bool


class MmaConvolution(MmaImageProduct):
    """The kernel of a Conv being built."""

    template = "gpu_mma_convolution"

    def __init__(self, form: ChannelsLast, target: Target) -> None:
        super().__init__(form, target, form.inner.types[form.anchor.inputs[1]].shape[0])

    # What is read -----------------------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> ImageWindows:
        """The operand of the product: of the image in place, or of its copy."""
        window, copied = self.window, self.copied
        images = self.image.shape[0]
        if copied is None:
            rest = self.image.shape[1], self.channels, self.channels, self.channels, self.chunk
            return ImageWindows(images, window.inputs, window.outputs, *_steps(window), window.begins, *rest)
        none = (0,) * len(window.kernel)
        if not copied.joins:
            rest = copied.pitch * self.groups, copied.pitch, copied.pitch, copied.pitch, self.chunk
            return ImageWindows(images, copied.extents, window.outputs, *_steps(window), none, *rest)
        valid = copied.pitch * window.kernel[-1]
        rest = copied.pitch, ceil(valid / self.chunk) * self.chunk, valid, 0, self.chunk
        steps = (*window.kernel[:-1], 1), window.strides, window.dilations
        return ImageWindows(images, copied.extents, window.outputs, *steps, none, *rest)

    @cached_property
    def copied(self) -> _Copied | None:
        """How the image is copied first; None where it is read in place."""
        window = self.window
        last = [
            (out - 1) * stride + (taps - 1) * dilation
            for out, stride, taps, dilation in zip(window.outputs, window.strides, window.kernel, window.dilations, strict=True)
        ]
        ends = [max(end - begin, size - 1) for end, begin, size in zip(last, window.begins, window.inputs, strict=True)]
        is_padded = any(window.begins) or any(end >= size for end, size in zip(ends, window.inputs, strict=True))
        if self.lies_in_chunks and (not is_padded or (prod(window.kernel) <= MOST_TAPS and self.zero is None)):
            return None  # what is beside an image that has a zero point is no zero
        extents = tuple(begin + end + 1 for begin, end in zip(window.begins, ends, strict=True))
        lanes = CHUNK_BYTES // self.item_bytes
        if (
            self.groups == 1
            and self.channels <= _NARROW_PITCH
            and window.dilations[-1] == 1
            and window.strides[-1] * _NARROW_PITCH % lanes == 0
        ):
            even = extents[-1] + -extents[-1] % (lanes // _NARROW_PITCH)  # so that each row begins at a multiple of 16 bytes
            return _Copied((*extents[:-1], even), _NARROW_PITCH, joins=True)
        return _Copied(extents, ceil(self.channels / self.chunk) * self.chunk, joins=False)

    # What it takes ----------------------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> ProductSize:
        return self.size_of(self.groups, self.windows)

    @cached_property
    def ways(self) -> list[TiledProduct]:
        return tiled_products(self.size, self.machine)

    @property
    def flops(self) -> int:
        return self.flops_of(self.windows.rows)

    def estimate(self) -> Estimate:
        """That of the fastest way, in clocks of the whole GPU, with all bytes; and of the copy before it."""
        clocks = self.ways[0].clocks - self.machine.launch_cycles
        if self.copied is not None:
            clocks += copy_clocks(self.image.size_bytes + self.windows.elements * self.item_bytes, self.machine)
        return Estimate(clocks, self.flops, unit="tile", is_parallel=False)

    # What is written --------------------------------------------------------------------------------------------------

    def build(self) -> BuiltKernel:
        builder = new_builder(self.target, self.form.outer.configuration)
        assert isinstance(builder, GpuBuilder)
        self.form.copy_pieces(builder)
        way = builder.choose("tile", {str(one): one for one in self.ways})
        tile, size = way.tile, self.size
        unit = self.unit_of(builder, tile)
        source = self.windows_source(unit, tile, self._image(builder), self.windows)
        packed, weights = self._weights(unit, way)
        store, stores_neighbours = self._store(builder, unit.neighbours, packed)
        product = PipelinedProduct(
            size.batch,
            size.m,
            size.n,
            size.k,
            unit,
            way,
            source,
            weights,
            lambda batch: batch,
            lambda batch: batch,
            store,
            stores_neighbours=stores_neighbours,
        )
        emit_pipelined_product(builder, product)
        return finish(self.template, builder, self.form.outer, flops=self.flops, packed=packed)

    def _image(self, builder: GpuBuilder) -> Buffer:
        """The image, or its copy, which is written first: a thread for each chunk of a pixel."""
        copied, windows = self.copied, self.windows
        if copied is None:
            return self.image_in_place(builder)
        unread = windows.run - windows.valid  # of the last chunk, which may be copied whole
        buffer = builder.workspace(windows.elements + unread, self.image.dtype)
        width = min(copied.pitch, CHUNK_BYTES // self.item_bytes)
        chunks = copied.pitch // width
        shape = (windows.images, self.groups, chunks, *copied.extents)
        zero = self.zero_point(builder)
        fill = tirx.const(0, self.image.dtype) if zero is None else zero
        with builder.chunks(prod(shape), windows.elements) as thread:
            image, group, chunk, *place = (builder.bind(i) for i in unravel(thread, shape))
            at = [builder.bind(i - begin) for i, begin in zip(place, self.window.begins, strict=True)]
            inside = [tirx.And(i >= 0, i < extent) for i, extent in zip(at, self.window.inputs, strict=True)]
            pixel: Expr = image
            for i, extent in zip(place, copied.extents, strict=True):
                pixel = pixel * extent + i
            target = builder.bind((pixel * self.groups + group) * copied.pitch + chunk * width)
            values = builder.local(width, self.image.dtype, "pixel")
            for i in range(width):
                builder.store(values, i, fill)
                channel = chunk * width + i
                exists = [*inside, channel < self.channels] if self.channels % width or chunks > 1 else inside
                if chunks == 1 and i >= self.channels:
                    continue
                with builder.when(tirx.all(*exists)):
                    index: Index = (image, group * self.channels + channel, *at)
                    builder.store(values, i, self.form.read_image(builder, index))
            with builder.vector(width) as lane:
                builder.store(buffer, target + lane, values[lane])
        return buffer

    def _weights(self, unit: MatrixUnit, way: TiledProduct) -> tuple[dict[str, Operand], PackedSource]:
        name, windows = self.anchor.inputs[1], self.windows
        joins = self.copied is not None and self.copied.joins
        pitch = windows.run if not joins else _NARROW_PITCH
        panels = PackTaps(self.weights.shape, self.groups, pitch, windows.run, joins, way.tile.columns)
        pack, source = self.weights_source(unit, way, panels, packed_name(name))
        return {packed_name(name): Operand(name, pack)}, source

    def _store(self, builder: GpuBuilder, neighbours: int, packed: dict[str, Operand]) -> tuple[Store, bool]:
        """The epilogue of a sum, and whether those of so many neighbouring channels may be stored at once."""
        merged = merge_positions(self.form)
        form = merged or self.form
        extents = (0, *self.window.outputs)
        correction = self.corrections(builder, packed)

        def store(batch: Expr, m: Expr, n: Expr, value: Expr) -> None:
            channel = builder.bind(batch * self.outputs + n) if self.groups > 1 else n
            value = value if correction is None else value + correction(channel)
            self.store_one(builder, form, channel, (0, m) if merged is not None else unravel(m, extents), value)

        return store, self.stores_neighbours(form, neighbours)


def _steps(window: Window) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return window.kernel, window.strides, window.dilations
