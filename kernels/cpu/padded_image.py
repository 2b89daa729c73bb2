"""Images as channels-last convolutions read them: in either layout, and with zeros around them where windows overhang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from ...runtime.plan import TensorType
from ..builder import Buffer, Expr, KernelBuilder
from ..template import Refusal
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
) -> Image | Refusal:
    """The anchor's input, or where it is not whole the copy of it that begins `begins` rows and columns before it.

    Products read rows and columns up to `reaches`, counted from there. With `words`, two neighbouring channels of 16 bits are one
    element of it. An input that is computed must be copied.
    """
    name = form.anchor.inputs[0]
    kind, parameter = form.inner.types[name], form.operands.get(name, name)
    if words:
        images, channels, *extents = kind.shape
        kind = TensorType((images, channels // 2, *extents), "int32")
    height, width = kind.shape[2:]
    is_last = name in form.operands
    if not any(begins) and reaches[0] <= height and reaches[1] <= width:
        if form.is_computed():
            return Refusal("an operand that is read in place, again for each tile of channels, is computed")
        return Image(builder.parameter(parameter, kind.elements, kind.dtype), _strides(kind.shape[1], height, width, is_last))
    elements, dtype = prod(kind.shape[:2]) * prod(reaches), accumulator_type(kind.dtype)
    staged = Image(builder.workspace(elements, dtype), _strides(kind.shape[1], reaches[0], reaches[1], is_last))
    source = None if form.is_computed() else builder.parameter(parameter, kind.elements, kind.dtype)
    _Copy(builder, form, source, staged.buffer, kind.shape, dtype, is_last, begins, reaches).emit()
    return staged


def _strides(channels: int, height: int, width: int, is_last: bool) -> tuple[int, int, int, int]:
    if is_last:
        return height * width * channels, 1, width * channels, channels
    return channels * height * width, height * width, width, 1


@dataclass(frozen=True)
class _Copy:
    """A copy of images of `shape` as elements of `dtype`, line by line, with zeros around them."""

    builder: KernelBuilder
    form: ChannelsLast
    source: Buffer | None  # None: the images are computed
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
            inside = builder.bind(tirx.And(at >= 0, at < height))
            with builder.when(inside):
                self._fill(base, begin)
                self._copy(builder.bind(base + begin), plane, at, begin // unit - left, (end - begin) // unit)
                self._fill(base + end, extents[1] * unit - end)
            with builder.when(tirx.Not(inside)):
                self._fill(base, extents[1] * unit)

    def _fill(self, base: Expr, count: int) -> None:
        zero = tirx.const(0, self.dtype)
        self.builder.vector_loop(count, self.builder.lanes(self.dtype), lambda i: self.builder.store(self.target, base + i, zero))

    def _copy(self, base: Expr, plane: Expr, row: Expr, first: int, columns: int) -> None:
        """Columns of a row of the input, whose plane is an image, or channels-first one channel of it."""
        builder, lanes, (_, channels, height, width) = self.builder, self.builder.lanes(self.dtype), self.shape
        source = self.source
        if source is None and self.is_last:
            with builder.loop(columns, name="column") as column:
                place = builder.bind(base + column * channels)
                self._each(channels, lanes, place, lambda c: self.form.read_image(builder, (plane, c, row, first + column)))
        elif source is None:
            image, channel = builder.bind(tirx.floordiv(plane, channels)), builder.bind(tirx.floormod(plane, channels))
            self._each(columns, lanes, base, lambda i: self.form.read_image(builder, (image, channel, row, first + i)))
        else:  # a row is one run of elements
            unit = channels if self.is_last else 1
            origin = builder.bind(((plane * height + row) * width + first) * unit)
            self._each(columns * unit, lanes, base, lambda i: source[origin + i])

    def _each(self, count: int, lanes: int, base: Expr, element: Callable[[Expr], Expr]) -> None:
        self.builder.vector_loop(
            count, lanes, lambda i: self.builder.store(self.target, base + i, tirx.Cast(self.dtype, element(i)))
        )
