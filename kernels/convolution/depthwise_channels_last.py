"""Depthwise Conv, NHWC: vectors run over channels; a strip of neighbouring positions of an output row shares loads of weights.

There is no padded copy: taps in the padding are skipped. At the ends of a row the positions of a strip share the taps that lie in
the image for all of them, and each adds its own others.

Bytes are multiplied as float32, less their zero point: sums of integers stay below 2^24, and their weights stay 8 bits. What is
widened is widened once for all positions of a strip that read it.

bfloat16 images are read as 32-bit pairs of channels. A shift makes float32 of the even channels and a mask of the odd ones; both
have accumulators and weights of their own, and are interleaved when the sums are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod

from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike, estimating, greatest_of, maximum_of, minimum_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, int32_of, row_major, unravel
from ..codegen.work_stealing import share
from ..formats.bfloat16 import high, low
from ..groups.group import Op
from ..microkernels.packing import PackPanels, pack_in_kernel
from ..template.contract import Operand
from ..template.kernel import maximum, minimum
from ..template.loops import accumulator_type
from ..template.values import GroupValues, Reader
from .channels_last_form import ChannelsLast
from .tile_loops import each_height
from .window import Window, clipped_taps

_STRIP = 8  # positions of a strip: 8 accumulators hide the latency of both FMA units
_BYTE_STRIP = 12  # of bytes, where there are registers for as many: more positions share what is widened
_ROW_TAPS = 8  # taps of a row of bfloat16 pairs at once: the weights of more do not stay in registers
_EDGE_SUMS = 4  # accumulators at the ends of a row: positions times vectors of channels, to hide their latency
_BYTES = ("uint8", "int8")
_MOST_BYTE_TAPS = {"int8": 2**24 // (255 * 128), "uint8": 2**24 // 255**2}  # by the weights, whose sums float32 holds exactly
_WORK_PER_OPERATION = 8  # floating-point operations that count as one scalar operation of the work dealt to threads


def is_depthwise(form: ChannelsLast) -> bool:
    """Whether each output channel has one input channel of its own, and the input is NHWC."""
    source, weights = (form.inner.types[name].shape for name in form.anchor.inputs[:2])
    is_single = form.anchor.attribute("group", 1) == source[1] == weights[0] and weights[1] == 1
    return is_single and form.anchor.inputs[0] in form.operands


def sums_bytes(form: ChannelsLast) -> bool:
    """Whether a depthwise convolution is one of bytes, whose sums float32 holds exactly."""
    source, weights = (form.inner.types[name] for name in form.anchor.inputs[:2])
    return source.dtype in _BYTES and prod(weights.shape[2:]) <= _MOST_BYTE_TAPS.get(weights.dtype, 0)


@dataclass(frozen=True)
class _Line:
    """A row of the output: its image, its index in all spatial dimensions but the last, and the taps [begin, end) in the image
    along each of these.
    """

    image: Expr
    place: Index
    taps: tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True)
class _Stretch:
    """Taps [begin, end) along the last dimension, and the positions of a strip that have them."""

    positions: range
    begin: Expr
    end: Expr


class Depthwise:
    """The kernel being built."""

    def __init__(self, form: ChannelsLast, window: Window, builder: KernelBuilder) -> None:
        self.form, self.window, self.builder = form, window, builder
        self.anchor: Op = form.anchor
        self.images, self.channels = form.inner.types[form.anchor.inputs[0]].shape[:2]
        self.dtype = form.inner.types[form.anchor.inputs[0]].dtype
        self.accumulator = "float32" if self.dtype in _BYTES else accumulator_type(self.dtype)
        # Channels that are loaded as one 32-bit pair. No dot product applies: channels are not summed over.
        self.per_word = 2 if self.dtype == "bfloat16" and self.channels % 2 == 0 and not form.is_computed() else 1
        self.shares_columns = self.per_word > 1 or self.dtype in _BYTES  # whose numbers take instructions to widen
        self.strip = _BYTE_STRIP if self.dtype in _BYTES and builder.machine.registers >= 2 * _BYTE_STRIP else _STRIP
        self.packed: dict[str, Operand] = {}
        self.load: Reader = form.readers(builder)[form.anchor.inputs[0]]
        zero = form.inner.zero_points.get(form.anchor.inputs[0])
        self.zero_point = zero and builder.bind(tirx.Cast(self.accumulator, GroupValues(form.inner, builder).read(zero, ())))

    def emit(self) -> int:
        """Write the loops; returns the convolution's floating-point operations."""
        builder, window = self.builder, self.window
        *rows, columns = window.outputs
        flops: int = 2 * self.images * self.channels * prod(window.outputs) * prod(window.kernel)
        if not greatest_of(flops):
            return 0
        weights = self._weights()
        begin, end = self._inner_columns()
        segments = [
            (first, last - first, is_inner)
            for first, last, is_inner in ((0, begin, False), (end, columns, False), (begin, end, True))
            if greatest_of(last - first) > 0
        ]
        lines, threads = self.images * prod(rows), builder.threads_for(flops // _WORK_PER_OPERATION)
        parts = self._parts(lines, threads, [length for _, length, _ in segments])
        with builder.chunks(lines * parts, flops // _WORK_PER_OPERATION) as chunk:
            image, *place, part = (builder.bind(i) for i in unravel(chunk, (self.images, *rows, parts)))
            corners = [builder.bind(row * s - b) for row, s, b in zip(place, window.strides, window.begins, strict=False)]
            taps = tuple(clipped_taps(builder, window, axis, corner) for axis, corner in enumerate(corners))
            line = _Line(image, tuple(place), taps)
            for segment in segments:
                length = segment[1]
                strips = partial(self._strips, weights, line, segment, (part, parts))
                each_height(builder, self._widths(length, is_inner=segment[2]), length, strips)
        return flops

    def _widths(self, length: SizeLike, *, is_inner: bool) -> dict[int, int]:
        """The positions that a strip of a segment may have, and about what it then costs."""
        if not isinstance(length, Size):
            return {ceil(length / ceil(length / self.strip)): 1}
        if not is_inner:  # one by one: each position of a strip has taps of its own
            return {1: 1}
        widths = [self.strip]
        while widths[-1] > max(length.least, 1):
            widths.append(widths[-1] // 2)
        return {width: width + 1 for width in widths}  # and what any strip costs

    @estimating
    def _parts(self, lines: SizeLike, threads: int, lengths: Sequence[SizeLike]) -> int:
        """Parts of a row that are dealt to threads, where there are few rows."""
        strips = max(ceil(length / self.strip) for length in lengths)
        return min(ceil(threads / lines), strips) if lines < threads else 1

    def _strips(
        self, weights: Buffer, line: _Line, segment: tuple[SizeLike, SizeLike, bool], of: tuple[Expr, int], width: int
    ) -> None:
        """The strips of `width` positions in part number `of[0]` of `of[1]` of a segment of a row.

        `segment`: its first column, its length, and whether windows lie in the image there.
        """
        (first, length, is_inner), builder = segment, self.builder
        start, stop = share(*of, ceil(length / width))
        with builder.loop(stop - start, name="strip") as i:
            is_one_strip = isinstance(length, int) and length <= width
            column = first if is_one_strip else builder.bind(tirx.min(first + (start + i) * width, first + length - width))
            self._strip(weights, line, column, width, is_inner=is_inner)

    def _inner_columns(self) -> tuple[SizeLike, SizeLike]:
        """The output columns [begin, end) whose windows lie in the image along the last dimension."""
        window, columns, stride = self.window, self.window.outputs[-1], self.window.strides[-1]
        span = (window.kernel[-1] - 1) * window.dilations[-1]
        begin = minimum_of(-(-window.begins[-1] // stride), columns)
        end = (window.inputs[-1] - span + window.begins[-1] + stride - 1) // stride
        return begin, maximum_of(minimum_of(end, columns), begin)

    def _overhanging(self, axis: int, column: Expr, width: int) -> list[_Stretch]:
        """The taps of a strip at the end of a row: those that all its positions have, and what each has before and after."""
        builder, window = self.builder, self.window
        step, before = window.strides[-1], window.begins[-1]
        corners = [(column + i) * step - before for i in range(width)]
        corners = [corner if isinstance(corner, int | Size) else builder.bind(corner) for corner in corners]
        taps = [clipped_taps(builder, window, axis, corner) for corner in corners]
        begin = taps[0][0]  # later positions begin and end at no later tap
        end = builder.bind(maximum(begin, taps[-1][1]))
        own = [
            stretch
            for i, (first, last) in enumerate(taps)
            for stretch in (
                _Stretch(range(i, i + 1), first, builder.bind(minimum(begin, last))),
                _Stretch(range(i, i + 1), end, builder.bind(maximum(end, last))),
            )
        ]
        found = [_Stretch(range(width), begin, end), *(own if width > 1 else ())]
        # As expressions, also where they are numbers: those are of whole windows.
        return [replace(one, begin=int32_of(one.begin), end=int32_of(one.end)) for one in found]

    def _strip(self, weights: Buffer, line: _Line, column: Expr, width: int, *, is_inner: bool) -> None:
        """`width` neighbouring positions of a row, for all channels."""
        stretches = (
            [_Stretch(range(width), 0, self.window.kernel[-1])] if is_inner else self._overhanging(len(line.place), column, width)
        )
        lanes = self.builder.lanes(self.accumulator) * self.per_word
        vectors, done = 1 if is_inner else max(_EDGE_SUMS // width, 1), 0
        while done < self.channels:
            while vectors * lanes > self.channels - done:
                vectors, lanes = (vectors // 2, lanes) if vectors > 1 else (1, lanes // 2)
            blocks = (self.channels - done) // (vectors * lanes)
            with self.builder.loop(blocks, name="block") as block:
                first = self.builder.bind(done + block * (vectors * lanes))
                self._block(weights, line, column, stretches, (width, vectors), first, lanes)
            done += blocks * vectors * lanes

    def _block(
        self,
        weights: Buffer,
        line: _Line,
        column: Expr,
        stretches: Sequence[_Stretch],
        extents: tuple[int, int],
        first: Expr,
        lanes: int,
    ) -> None:
        """The sums of `extents` (positions, vectors of channels) of a strip, from channel `first` on, and their epilogue."""
        builder = self.builder
        parts = [(position, vector * lanes) for position in range(extents[0]) for vector in range(extents[1])]
        sums = builder.local(len(parts) * lanes, self.accumulator)
        for number in range(len(parts)):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(sums, number * lanes + lane, tirx.const(0, self.accumulator))
        met = self._zeros(lanes) if self._is_corrected(stretches) else None
        with ExitStack() as loops:
            downs = [begin + loops.enter_context(builder.loop(end - begin, name="down")) for begin, end in line.taps]
            downs = [builder.bind(down) for down in downs]
            for stretch in stretches:
                if self.shares_columns and isinstance(stretch.end, int):
                    self._add_columns(weights, (line.image, first, *line.place, column), downs, (sums, parts), lanes)
                    if met is not None:
                        self._add_weights(weights, first, downs, met, lanes)
                    continue
                kind = "unrolled" if isinstance(stretch.end, int) else "serial"
                with builder.loop(stretch.end - stretch.begin, kind, "right") as j:
                    taps = [*downs, stretch.begin + j]
                    chosen = [(number, *part) for number, part in enumerate(parts) if part[0] in stretch.positions]
                    self._add(weights, (line.image, first, *line.place, column), taps, (sums, chosen), lanes)
        if self.per_word > 1:
            sums = self._in_order(sums, len(parts), lanes)
        if met is not None:
            for number in range(len(parts)):
                with builder.loop(lanes, "vectorized", "lane") as lane:
                    builder.store(sums, number * lanes + lane, sums[number * lanes + lane] - met[lane] * self.zero_point)
        for number, (position, offset) in enumerate(parts):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                index = (line.image, first + offset + lane, *line.place, column + position)
                self._store(index, sums[number * lanes + lane])

    def _add(
        self, weights: Buffer, place: Index, taps: Sequence[Expr], sums: tuple[Buffer, list[tuple[int, int, int]]], lanes: int
    ) -> None:
        """Add one tap's products to `sums`: (number of the accumulator, position after `place`, channel after its own)."""
        builder, window, (image, first, *outputs) = self.builder, self.window, place
        base = builder.bind(row_major(taps, window.kernel) * self.channels + first)
        *rows, corner = self._read_place(outputs, taps)
        for number, position, offset in sums[1]:
            column = corner + position * window.strides[-1]
            if self.per_word > 1:
                self._add_words(weights, (image, first + offset, *rows, column), [(number, taps)], sums[0], lanes)
                continue
            with builder.loop(lanes, "vectorized", "lane") as lane:
                x = tirx.Cast(self.accumulator, self.load((image, first + offset + lane, *rows, column)))
                x = x - self.zero_point if self.zero_point is not None else x
                product = x * tirx.Cast(self.accumulator, weights[base + offset + lane])
                builder.store(sums[0], number * lanes + lane, sums[0][number * lanes + lane] + product)

    def _read_place(self, outputs: Sequence[Expr], taps: Sequence[Expr]) -> list[Expr]:
        """The image position that a tap of an output position's window reads."""
        window = self.window
        geometry = zip(outputs, taps, window.strides, window.begins, window.dilations, strict=True)
        return [self.builder.bind(output * stride - begin + tap * dilation) for output, tap, stride, begin, dilation in geometry]

    def _add_columns(
        self, weights: Buffer, place: Index, downs: Sequence[Expr], sums: tuple[Buffer, list[tuple[int, int]]], lanes: int
    ) -> None:
        """Add one row of taps of whole windows: each column of the image is loaded once for all accumulators, if taps are few."""
        window, (image, first, *outputs) = self.window, place
        *rows, corner = self._read_place(outputs, [*downs, 0])
        width = window.kernel[-1]
        for begin in range(0, width, _ROW_TAPS):
            readers: dict[int, list[tuple[int, Sequence[Expr]]]] = {}
            for number, (position, _) in enumerate(sums[1]):  # one vector of channels each
                for tap in range(begin, min(begin + _ROW_TAPS, width)):
                    column = position * window.strides[-1] + tap * window.dilations[-1]
                    readers.setdefault(column, []).append((number, [*downs, tap]))
            add = self._add_words if self.per_word > 1 else self._add_values
            for column, products in sorted(readers.items()):
                add(weights, (image, first, *rows, corner + column), products, sums[0], lanes)

    def _add_values(
        self, weights: Buffer, index: Index, products: Sequence[tuple[int, Sequence[Expr]]], sums: Buffer, lanes: int
    ) -> None:
        """Widen `lanes` channels at an index of the image, and add their products by the weights of taps, as `_add_words`."""
        builder, (image, first, *place) = self.builder, index
        value = builder.local(lanes, self.accumulator)
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(value, lane, tirx.Cast(self.accumulator, self.load((image, first + lane, *place))))
        for number, taps in products:
            base = builder.bind(row_major(taps, self.window.kernel) * self.channels + first)
            with builder.loop(lanes, "vectorized", "lane") as lane:
                at, weight = number * lanes + lane, tirx.Cast(self.accumulator, weights[base + lane])
                builder.store(sums, at, sums[at] + value[lane] * weight)

    def _is_corrected(self, stretches: Sequence[_Stretch]) -> bool:
        """Whether zero points are taken from the sums, by the weights that these have met, and not from each number: where all
        positions of a strip meet the same weights."""
        return self.zero_point is not None and all(isinstance(stretch.end, int) for stretch in stretches)

    def _zeros(self, lanes: int) -> Buffer:
        found = self.builder.local(lanes, self.accumulator)
        with self.builder.loop(lanes, "vectorized", "lane") as lane:
            self.builder.store(found, lane, tirx.const(0, self.accumulator))
        return found

    def _add_weights(self, weights: Buffer, first: Expr, downs: Sequence[Expr], met: Buffer, lanes: int) -> None:
        """Add the weights of a row of taps to those that a strip has met."""
        for tap in range(self.window.kernel[-1]):
            base = self.builder.bind(row_major((*downs, tap), self.window.kernel) * self.channels + first)
            with self.builder.loop(lanes, "vectorized", "lane") as lane:
                self.builder.store(met, lane, met[lane] + tirx.Cast(self.accumulator, weights[base + lane]))

    def _add_words(
        self, weights: Buffer, index: Index, products: Sequence[tuple[int, Sequence[Expr]]], sums: Buffer, lanes: int
    ) -> None:
        """Load `lanes` channels at an index of the image as pairs, and add their products by the weights of some taps.

        `products`: (number of the accumulator, index of the tap).
        """
        builder, (_, channel, *_), words = self.builder, index, lanes // 2
        image = self.form.words(builder, index)
        for half, part in enumerate((low, high)):
            for number, taps in products:
                base = builder.bind(
                    row_major((*taps, half), (*self.window.kernel, 2)) * (self.channels // 2) + tirx.div(channel, 2)
                )
                with builder.loop(words, "vectorized", "lane") as lane:
                    at = number * lanes + half * words + lane
                    builder.store(sums, at, sums[at] + part(image(lane)) * tirx.Cast(self.accumulator, weights[base + lane]))

    def _in_order(self, sums: Buffer, count: int, lanes: int) -> Buffer:
        """The sums interleaved to the order of channels, where each of `count` runs of `lanes` has its even channels first."""
        ordered, words = self.builder.local(count * lanes, self.accumulator), lanes // 2
        for number in range(count):
            first = number * lanes
            if words == 1:
                for half in range(2):
                    self.builder.store(ordered, first + half, sums[first + half])
                continue
            halves = [sums[tirx.Ramp(tirx.const(first + half, "int32"), 1, words)] for half in (0, words)]
            places = [lane // 2 + lane % 2 * words for lane in range(lanes)]
            self.builder.store(ordered, tirx.Ramp(tirx.const(first, "int32"), 1, lanes), tirx.Shuffle(halves, places))
        return ordered

    def _store(self, index: tuple[Expr, ...], value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(self.accumulator, GroupValues(self.form.inner, self.builder).read(bias, index[1:2]))
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.store_epilogue(self.builder, index, tirx.Cast(dtype, value))

    def _weights(self) -> Buffer:
        """The weights as [*tap, channel], packed at compile time if constant; for pairs even channels before odd ones."""
        name, taps = self.anchor.inputs[1], prod(self.window.kernel)
        pack, kind = PackPanels((self.channels, taps), (0, 1), 0, 1, self.channels), self.form.inner.types[name]
        if self.per_word > 1:
            pack = PackPanels((self.channels // 2, 2, taps), (0, 2, 1), 0, 1, self.channels // 2)
        if name not in self.form.inner.constants:
            return pack_in_kernel(self.builder, self.builder.parameter(name, kind.elements, kind.dtype), pack)
        key = f"{name}/last"
        self.packed[key] = Operand(name, pack)
        return self.builder.parameter(key, pack.packed_type(kind).elements, kind.dtype)
