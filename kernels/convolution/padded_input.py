"""The input of NHWC convolutions: in place, in either layout, or a zero-padded copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import maximum_of, minimum_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major, unravel
from ..cost.convolution import spread_pitch
from ..formats.bfloat16 import rounded, word_at
from ..template.contract import Refusal
from ..template.loops import accumulator_type
from .channels_last_form import ChannelsLast

BITS = "uint16"  # type of bfloat16 numbers as bits


@dataclass(frozen=True)
class Image:
    """The input as register tiles read it: element (image, channel, *spatial) is at the dot product of that index and `strides`.

    Spatial index (0, ..., 0) is where the first window begins.
    """

    buffer: Buffer
    strides: tuple[int, ...]
    k_pack: int = 1  # channels in an element: 2 for 32-bit pairs

    def element(self, offset: Expr) -> Expr:
        return word_at(self.buffer, self.k_pack * offset) if self.k_pack > 1 else self.buffer[offset]

    def offset(self, image: Expr, channel: Expr, *place: Expr) -> Expr:
        return sum(i * stride for i, stride in zip((image, channel, *place), self.strides, strict=True))


def padded_image(
    builder: KernelBuilder,
    form: ChannelsLast,
    begins: Sequence[int],
    reaches: Sequence[int],
    *,
    k_pack: int = 1,
    planes: str = "",
    fill: Expr = 0,
) -> Image | Refusal:
    """The anchor's input in place, or a zero-padded copy that begins `begins` positions before it in each dimension.

    Positions in [0, `reaches`) are read, counted from there. An element has `k_pack` neighbouring channels, as a 32-bit pair; an
    odd number of channels is always copied, padded with a zero (targets with AVX512_BF16 only). An input with a prologue must be
    copied. With `planes` the input is always copied, NCHW as elements of that type: "uint16" are bfloat16 numbers. Padding is
    `fill`, an element of the copy.
    """
    name = form.anchor.inputs[0]
    kind, parameter = form.inner.types[name], form.operands.get(name, name)
    if kind.shape[1] % k_pack:
        return _filled_image(builder, form, begins, reaches, k_pack)
    if k_pack > 1:
        kind = TensorType((kind.shape[0], kind.shape[1] // k_pack, *kind.shape[2:]), "int32")
    extents = kind.shape[2:]
    is_last = name in form.operands
    if planes:
        staged = Image(builder.workspace(prod(kind.shape[:2]) * prod(reaches), planes), _strides(kind.shape[1], reaches, False))
        _Copy(builder, form, None, staged.buffer, kind.shape, planes, False, begins, reaches, fill=fill).emit()
        return staged
    if not any(begins) and all(reach <= extent for reach, extent in zip(reaches, extents, strict=True)):
        if form.is_computed():
            return Refusal("an operand that is read in place, again for each tile of channels, is computed")
        return Image(builder.parameter(parameter, kind.elements, kind.dtype), _strides(kind.shape[1], extents, is_last))
    (images, channels), dtype = kind.shape[:2], accumulator_type(kind.dtype)
    pitch = spread_pitch(channels, np.dtype(dtype).itemsize, builder.machine) if is_last else channels
    staged = Image(builder.workspace(images * pitch * prod(reaches), dtype), _strides(pitch, reaches, is_last))
    source = None if form.is_computed() else builder.parameter(parameter, kind.elements, kind.dtype)
    places = _lines(kind.shape, begins, reaches) if is_last else (kind.shape, begins, reaches)
    _Copy(builder, form, source, staged.buffer, places[0], dtype, is_last, *places[1:], zeros=pitch - channels, fill=fill).emit()
    return staged


def _filled_image(
    builder: KernelBuilder, form: ChannelsLast, begins: Sequence[int], reaches: Sequence[int], k_pack: int
) -> Image:
    """A copy of bfloat16 NHWC images with an odd number of channels, padded with a zero channel."""
    name = form.anchor.inputs[0]
    kind = form.inner.types[name]
    images, channels = kind.shape[:2]
    pitch = spread_pitch(channels + -channels % k_pack, np.dtype(BITS).itemsize, builder.machine)
    buffer = builder.workspace(images * pitch * prod(reaches), BITS)
    source = builder.parameter(form.operands[name], kind.elements, BITS)
    shape, begins, extents = _lines(kind.shape, begins, reaches)
    _Copy(builder, form, source, buffer, shape, BITS, True, begins, extents, zeros=pitch - channels).emit()
    return Image(buffer, _strides(pitch // k_pack, reaches, True), k_pack)


def _lines(
    shape: tuple[int, ...], begins: Sequence[int], reaches: Sequence[int]
) -> tuple[tuple[int, ...], Sequence[int], Sequence[int]]:
    """Shape, begins and reaches of an NHWC copy: a signal becomes an image of one column, so that threads share its rows."""
    return ((*shape, 1), (*begins, 0), (*reaches, 1)) if len(reaches) == 1 else (shape, begins, reaches)


def _strides(channels: int, extents: Sequence[int], is_last: bool) -> tuple[int, ...]:
    steps = [prod(extents[axis + 1 :]) for axis in range(len(extents))]  # in positions
    if is_last:
        return prod(extents) * channels, 1, *(step * channels for step in steps)
    return channels * prod(extents), prod(extents), *steps


@dataclass(frozen=True)
class _Copy:
    """A zero-padded copy of images as elements of `dtype`, row by row.

    `shape` may have one dimension of extent 1 more than the input. An NHWC input of `dtype` BITS without prologue is copied bit
    by bit. In an NHWC copy (`is_last`) each position may have `zeros` more elements after its channels.
    """

    builder: KernelBuilder
    form: ChannelsLast
    source: Buffer | None  # None: the images are computed
    target: Buffer
    shape: tuple[int, ...]
    dtype: str
    is_last: bool
    begins: Sequence[int]
    extents: Sequence[int]
    zeros: int = 0
    fill: Expr = 0

    def emit(self) -> None:
        builder, (*heights, width), (*tops, left) = self.builder, self.extents, self.begins
        images, channels, *rows, columns = self.shape
        unit = channels + self.zeros if self.is_last else 1  # elements of one column of a row
        planes = images if self.is_last else images * channels
        begin = minimum_of(left, width) * unit
        end = maximum_of(minimum_of(left + columns, width) * unit, begin)
        with builder.chunks(planes * prod(heights), planes * prod(self.extents) * unit) as line:
            plane, *place = unravel(line, (planes, *heights))
            plane, at = builder.bind(plane), tuple(builder.bind(row - top) for row, top in zip(place, tops, strict=True))
            base = builder.bind(line * (width * unit))
            inside = builder.bind(_all(tirx.And(row >= 0, row < extent) for row, extent in zip(at, rows, strict=True)))
            with builder.when(inside):
                self._fill(base, begin)
                self._copy(builder.bind(base + begin), plane, at, begin // unit - left, (end - begin) // unit)
                self._fill(base + end, width * unit - end)
            with builder.when(tirx.Not(inside)):
                self._fill(base, width * unit)

    def _fill(self, base: Expr, count: int) -> None:
        fill = tirx.const(self.fill, self.dtype) if isinstance(self.fill, int) else self.fill
        self.builder.vector_loop(count, self.builder.lanes(self.dtype), lambda i: self.builder.store(self.target, base + i, fill))

    def _copy(self, base: Expr, plane: Expr, rows: Index, first: int, columns: int) -> None:
        """Copy columns of a row of the input; `plane` is an image (NHWC) or a channel of one (NCHW)."""
        builder, lanes, (images, channels, *extents) = self.builder, self.builder.lanes(self.dtype), self.shape
        source = self.source
        if source is None and self.is_last:
            with builder.loop(columns, name="column") as column:
                place = builder.bind(base + column * (channels + self.zeros))
                at = (*rows, first + column)[: len(self.form.inner.types[self.form.anchor.inputs[0]].shape) - 2]
                self._each(channels, lanes, place, lambda c: self.form.read_image(builder, (plane, c, *at)))
                self._fill(builder.bind(place + channels), self.zeros)
        elif source is None:
            image, channel = builder.bind(tirx.floordiv(plane, channels)), builder.bind(tirx.floormod(plane, channels))
            self._each(columns, lanes, base, lambda i: self.form.read_image(builder, (image, channel, *rows, first + i)))
        else:  # a row is contiguous
            unit = channels if self.is_last else 1
            planes = images if self.is_last else images * channels
            origin = builder.bind((row_major((plane, *rows), (planes, *extents[:-1])) * extents[-1] + first) * unit)
            if self.zeros:
                self._copy_columns(source, origin, base, columns)
            else:
                self._each(columns * unit, lanes, base, lambda i: source[origin + i])

    def _copy_columns(self, source: Buffer, origin: Expr, base: Expr, columns: int) -> None:
        """Copy columns of a row, each followed by its zeros."""
        builder, channels = self.builder, self.shape[1]
        with builder.loop(columns, name="column") as column:
            read, written = builder.bind(origin + column * channels), builder.bind(base + column * (channels + self.zeros))
            self._each(channels, builder.lanes(self.dtype), written, lambda c: source[read + c])
            self._fill(builder.bind(written + channels), self.zeros)

    def _each(self, count: int, lanes: int, base: Expr, element: Callable[[Expr], Expr]) -> None:
        def convert(value: Expr) -> Expr:
            if self.dtype == str(value.ty):
                return value
            if self.dtype != BITS:
                return tirx.Cast(self.dtype, value)
            return tirx.reinterpret(BITS, rounded(value, self.builder.name, has_instruction=self.builder.has_bfloat16))

        self.builder.vector_loop(count, lanes, lambda i: self.builder.store(self.target, base + i, convert(element(i))))


def _all(conditions: Iterable[Expr]) -> Expr:
    """Whether all hold, of which there may be none."""
    return tirx.all(tirx.const(1, "bool"), *conditions)
