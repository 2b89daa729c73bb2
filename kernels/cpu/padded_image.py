"""Images as channels-last convolutions read them: in either layout, and with zeros around them where windows overhang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from ...runtime.plan import TensorType
from ..builder import Buffer, Expr, KernelBuilder
from .anchored import accumulator_type
from .channels_last import ChannelsLast


@dataclass(frozen=True)
class Image:
    """The input as the products read it. Element (image, channel, row, column) is at the sum of the products with `strides`.

    Position (0, 0) is that which the first window begins with.
    """

    buffer: Buffer
    strides: tuple[int, int, int, int]

    def offset(self, image: Expr, channel: Expr, row: Expr, column: Expr) -> Expr:
        return sum(i * stride for i, stride in zip((image, channel, row, column), self.strides, strict=True))


def padded_image(
    builder: KernelBuilder, form: ChannelsLast, begins: Sequence[int], reaches: Sequence[int], *, words: bool = False
) -> Image:
    """The anchor's input, or where it is not whole the copy of it that begins `begins` rows and columns before it.

    Products read rows and columns up to `reaches`, counted from there. With `words`, two neighbouring channels of 16 bits are one
    element of it.
    """
    name = form.anchor.inputs[0]
    kind, parameter = form.inner.types[name], form.operands.get(name, name)
    if words:
        images, channels, *extents = kind.shape
        kind = TensorType((images, channels // 2, *extents), "int32")
    height, width = kind.shape[2:]
    is_last = name in form.operands
    source = Image(builder.parameter(parameter, kind.elements, kind.dtype), _strides(kind.shape[1], height, width, is_last))
    if not any(begins) and reaches[0] <= height and reaches[1] <= width:
        return source
    elements, dtype = prod(kind.shape[:2]) * prod(reaches), accumulator_type(kind.dtype)
    staged = Image(builder.workspace(elements, dtype), _strides(kind.shape[1], reaches[0], reaches[1], is_last))
    _Copy(builder, source.buffer, staged.buffer, kind.shape, dtype, is_last, begins, reaches).emit()
    return staged


def _strides(channels: int, height: int, width: int, is_last: bool) -> tuple[int, int, int, int]:
    if is_last:
        return height * width * channels, 1, width * channels, channels
    return channels * height * width, height * width, width, 1


@dataclass(frozen=True)
class _Copy:
    """A copy of images of `shape` as elements of `dtype`, line by line, with zeros around them."""

    builder: KernelBuilder
    source: Buffer
    target: Buffer
    shape: tuple[int, ...]
    dtype: str
    is_last: bool
    begins: Sequence[int]
    extents: Sequence[int]

    def emit(self) -> None:
        builder, extents, (top, left) = self.builder, self.extents, self.begins
        images, channels, height, width = self.shape
        unit = channels if self.is_last else 1  # elements of one column of a line
        planes = images if self.is_last else images * channels
        begin = min(left, extents[1]) * unit
        end = max(min(left + width, extents[1]) * unit, begin)
        with builder.chunks(planes * extents[0], planes * prod(extents) * unit) as line:
            plane, row = builder.bind(tirx.floordiv(line, extents[0])), tirx.floormod(line, extents[0])
            at = builder.bind(row - top)
            base = builder.bind(line * (extents[1] * unit))
            origin = builder.bind((plane * height + at) * (width * unit) - left * unit)
            inside = builder.bind(tirx.And(at >= 0, at < height))
            with builder.when(inside):
                self._fill(base, begin)
                self._copy(base + begin, origin + begin, end - begin)
                self._fill(base + end, extents[1] * unit - end)
            with builder.when(tirx.Not(inside)):
                self._fill(base, extents[1] * unit)

    def _fill(self, base: Expr, count: int) -> None:
        zero = tirx.const(0, self.dtype)
        self.builder.vector_loop(count, self.builder.lanes(self.dtype), lambda i: self.builder.store(self.target, base + i, zero))

    def _copy(self, base: Expr, origin: Expr, count: int) -> None:
        self.builder.vector_loop(
            count,
            self.builder.lanes(self.dtype),
            lambda i: self.builder.store(self.target, base + i, tirx.Cast(self.dtype, self.source[origin + i])),
        )
