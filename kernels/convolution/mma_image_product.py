"""What convolutions on the matrix unit of a GPU have in common: windows of an image by constant weights, an epilogue, NHWC."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..cost.gpu_product import MmaTile, ProductSize, TiledProduct
from ..microkernels.bf16_split import PRODUCTS
from ..microkernels.gpu_matrix_unit import MatrixUnit
from ..microkernels.gpu_operand_tiles import PackedSource, Source
from ..microkernels.gpu_part_layout import PackParts, PartLayout
from ..microkernels.gpu_units import (
    BYTES,
    byte_format,
    chunk_of,
    missing_bytes,
    missing_terms,
    missing_unit,
    multiplied_as,
    new_unit,
    number_bytes,
)
from ..microkernels.gpu_window_tiles import ConvertedWindows, CopiedWindows, ImageWindows
from ..microkernels.packing import PackSums
from ..template.contract import Operand, Pack
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast
from .window import read_window

_TYPES = ("float32", "bfloat16", "float16")


def obstacle(form: ChannelsLast, target: Target) -> str:
    """Why the matrix unit does not compute the form's convolution; empty where it may."""
    if missing := missing_unit(target):
        return f"{target} has no {missing}"
    image, weights = form.anchor.inputs[:2]
    types = {form.inner.types[name].dtype for name in (image, weights)}
    if types <= BYTES:
        if reason := _byte_obstacle(form, target):
            return reason
    elif len(types) > 1 or not types <= set(_TYPES) or form.inner.types[form.anchor.outputs[0]].dtype not in _TYPES:
        return f"the matrix unit does not multiply {' by '.join(sorted(types))}"
    elif "float32" in types and (missing := missing_terms(target, form.outer.tolerance.terms)):
        return missing
    if weights not in form.outer.constants:
        return "its weights are not constant"
    if 0 in (form.inner.types[name].elements for name in (image, weights, form.anchor.outputs[0])):
        return "has nothing to multiply"
    groups, channels = form.anchor.attribute("group", 1), form.inner.types[image].shape[1]
    if groups == channels > 1:
        return "has one channel a group, which no product of matrices sums over"
    return ""


def _byte_obstacle(form: ChannelsLast, target: Target) -> str:
    """Why the unit does not multiply bytes; empty where it does."""
    if missing := missing_bytes(target):
        return f"{target} has no {missing}"
    if form.anchor.op_type != "Conv" or form.inner.types[form.anchor.inputs[1]].dtype != "int8":
        return "bytes are multiplied by int8 in a Conv only"
    return "a bias is added to sums of bytes behind their scales" if any(form.anchor.inputs[2:]) else ""


class MmaImageProduct:
    """The kernel of a Conv or ConvTranspose being built. An image has `channels` a group, a result `outputs` a group.

    The unit multiplies `kind`, `chunk` of it in 16 bytes; elements that are split are sums of `terms` numbers.
    """

    def __init__(self, form: ChannelsLast, target: Target, outputs: int) -> None:
        self.form, self.target, self.anchor = form, target, form.anchor
        self.window = read_window(form.inner, form.anchor)
        self.image, self.weights = (form.inner.types[name] for name in form.anchor.inputs[:2])
        self.groups = form.anchor.attribute("group", 1)
        self.channels, self.outputs = self.image.shape[1] // self.groups, outputs // self.groups
        self.kind = multiplied_as({self.image.dtype}, target, may_round=form.outer.tolerance.may_round)
        self.is_wide, self.chunk = self.image.dtype == "float32", chunk_of(self.kind)
        self.is_split = self.is_wide and self.kind != "f32"
        self.terms = form.outer.tolerance.terms if self.is_split else 1
        self.machine = gpu_machine(target.level)
        self.zero = form.inner.zero_points.get(form.anchor.inputs[0])  # that bytes of the image are less

    @property
    def item_bytes(self) -> int:
        """Of an element of the image."""
        return self.image.bits // 8

    @property
    def lies_in_chunks(self) -> bool:
        """Whether the image is in memory, channels-last, with whole chunks of a group's channels."""
        is_last = self.anchor.inputs[0] in self.form.operands and not self.form.is_computed()
        return is_last and self.channels % self.chunk == 0

    def size_of(self, batch: int, windows: ImageWindows) -> ProductSize:
        """Of `batch` products of the windows by weights."""
        conversions = 3 + 4 * self.terms if self.is_split else 0
        sizes, terms = (batch, windows.rows, self.outputs, windows.k), (self.terms, self.terms)
        moved = windows.elements * self.item_bytes
        return ProductSize(*sizes, terms, len(PRODUCTS[self.terms]), (conversions, 0), moved, number_bytes(self.kind))

    def unit_of(self, builder: GpuBuilder, tile: MmaTile) -> MatrixUnit:
        is_unsigned = self.image.dtype == "uint8"
        return new_unit(builder, self.target, self.kind, tile.warp_rows, tile.warp_columns, is_unsigned=is_unsigned)

    def windows_source(self, unit: MatrixUnit, tile: MmaTile, buffer: Buffer, windows: ImageWindows) -> Source:
        """What brings windows of an image: as they lie, or through registers."""
        layout = PartLayout(tile.rows, tile.depth, self.terms, along_k=True, chunk=self.chunk)
        brings = ConvertedWindows if self.is_split else CopiedWindows
        return brings(unit, layout, tile.threads, buffer, windows)

    def weights_source(self, unit: MatrixUnit, way: TiledProduct, panels: Pack, name: str) -> tuple[PackParts, PackedSource]:
        """How the weights are packed as a parameter `name`, and what brings them."""
        layout = PartLayout(way.tile.columns, way.tile.depth, self.terms, along_k=True, chunk=self.chunk)
        pack = PackParts(panels, layout)
        packed = pack.packed_type(self.weights)
        buffer = unit.builder.parameter(name, packed.elements, packed.dtype)
        return pack, PackedSource(unit, layout, way.tile.threads, buffer, packed.shape[1], packed.shape[2])

    def image_in_place(self, builder: GpuBuilder) -> Buffer:
        name = self.form.operands[self.anchor.inputs[0]]
        return builder.parameter(name, self.image.elements, "uint16" if self.image.bits == 16 else self.image.dtype)

    def zero_point(self, builder: GpuBuilder) -> Expr | None:
        """The byte that stands for zero in the image; None where that is zero."""
        return None if self.zero is None else GroupValues(self.form.inner, builder).read(self.zero, ())

    def corrections(self, builder: GpuBuilder, packed: dict[str, Operand]) -> Callable[[Expr], Expr] | None:
        """What makes the sums of an output channel, by its number, of those of bytes as the unit multiplies them; None: nothing.

        As those of matrices (`MatMulKernel`), with a sum of weights for each channel, which becomes a parameter of its own.
        """
        offset = byte_format(self.image.dtype, self.target).offset if self.kind == "i8" else 0
        zero = self.zero_point(builder)
        if zero is None and not offset:
            return None
        name = f"{self.anchor.inputs[1]}/sums"
        pack = PackSums(self.weights.shape, tuple(range(len(self.weights.shape))), 0, 1)
        sums = builder.parameter(name, pack.packed_type(self.weights).elements, "int32")
        packed[name] = Operand(self.anchor.inputs[1], pack)
        factor: Expr = tirx.const(-offset, "int32")
        if zero is not None:
            factor = builder.bind(factor - tirx.Cast("int32", zero))
        return lambda channel: factor * sums[channel]

    def store_one(self, builder: GpuBuilder, form: ChannelsLast, channel: Expr, place: Index, value: Expr) -> None:
        """The epilogue of a sum: of an image, and position, as `place` has them."""
        if len(self.anchor.inputs) > 2 and self.anchor.inputs[2]:
            bias = GroupValues(form.inner, builder).read(self.anchor.inputs[2], (channel,))
            value = value + tirx.Cast("float32", bias)
        result = form.inner.types[self.anchor.outputs[0]]
        form.store_epilogue(builder, (place[0], channel, *place[1:]), tirx.Cast(result.dtype, value))

    def stores_neighbours(self, form: ChannelsLast, count: int) -> bool:
        """Whether sums of so many neighbouring channels may be stored at once."""
        kinds = {form.outer.types[one.parameter] for one in form.destinations}
        rows = [kind.shape[-1] for kind in kinds] + [self.outputs] + [one.first for one in form.destinations]
        return all(kind.dtype in _TYPES for kind in kinds) and all(row % count == 0 for row in rows)

    def flops_of(self, positions: int) -> int:
        """Of so many positions, each with all taps."""
        return int(2 * self.groups * positions * self.outputs * self.channels * prod(self.window.kernel))
