"""Depthwise Conv of images that lie channels-last: vectors run over channels, a few positions of a line at a time share weights.

Nothing is padded: rows of a window that are outside of the image are left out, and so are columns at the ends of a line.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, prod

from tvm import tirx

from ..builder import Buffer, Expr, Index, KernelBuilder, row_major, share, unravel
from ..group import Op
from ..template import Operand
from ..values import GroupValues, Reader
from .anchored import accumulator_type
from .channels_last import ChannelsLast
from .packing import PackPanels, pack_in_kernel
from .window import Window, clipped_taps

_STRIP = 4  # positions that share the weights they load
_WORK_PER_OPERATION = 8  # how many fewer cycles a multiply-add takes here than a scalar operation elsewhere


def is_depthwise(form: ChannelsLast) -> bool:
    """Whether each output channel is made of one input channel of its own, and the input lies channels-last."""
    source, weights = (form.inner.types[name].shape for name in form.anchor.inputs[:2])
    is_single = form.anchor.attribute("group", 1) == source[1] == weights[0] and weights[1] == 1
    return is_single and form.anchor.inputs[0] in form.operands


@dataclass(frozen=True)
class _Line:
    """One line of the output: its image, its place in all dimensions but the last, and the taps [begin, end) of its windows in
    each of these that are in the image.
    """

    image: Expr
    place: Index
    taps: tuple[tuple[Expr, Expr], ...]


class Depthwise:
    """One kernel being built."""

    def __init__(self, form: ChannelsLast, window: Window, builder: KernelBuilder) -> None:
        self.form, self.window, self.builder = form, window, builder
        self.anchor: Op = form.anchor
        self.images, self.channels = form.inner.types[form.anchor.inputs[0]].shape[:2]
        self.dtype = form.inner.types[form.anchor.inputs[0]].dtype
        self.accumulator = accumulator_type(self.dtype)
        self.packed: dict[str, Operand] = {}
        self.load: Reader = form.readers(builder)[form.anchor.inputs[0]]

    def emit(self) -> int:
        """Write the loops; returns the arithmetic operations of the whole."""
        builder, window = self.builder, self.window
        *rows, columns = window.outputs
        flops = 2 * self.images * self.channels * prod(window.outputs) * prod(window.kernel)
        if not flops:
            return 0
        weights = self._weights()
        begin, end = self._inner_columns()
        width = min(_STRIP, end - begin)
        strips = ceil((end - begin) / width) if width else 0
        lines, threads = self.images * prod(rows), builder.threads_for(flops // _WORK_PER_OPERATION)
        parts = min(ceil(threads / lines), max(strips, 1)) if lines < threads else 1  # of a line, where there are few
        with builder.chunks(lines * parts, flops // _WORK_PER_OPERATION) as chunk:
            image, *place, part = (builder.bind(i) for i in unravel(chunk, (self.images, *rows, parts)))
            corners = [builder.bind(row * s - b) for row, s, b in zip(place, window.strides, window.begins, strict=False)]
            taps = tuple(clipped_taps(builder, window, axis, corner) for axis, corner in enumerate(corners))
            line = _Line(image, tuple(place), taps)
            for first, last in ((0, begin), (end, columns)):
                start, stop = share(part, parts, last - first)
                with builder.loop(stop - start, name="edge") as i:
                    self._strip(weights, line, builder.bind(first + start + i), 1, is_inner=False)
            if width:
                start, stop = share(part, parts, strips)
                with builder.loop(stop - start, name="strip") as i:
                    column = builder.bind(tirx.min(begin + (start + i) * width, end - width))
                    self._strip(weights, line, column, width, is_inner=True)
        return flops

    def _inner_columns(self) -> tuple[int, int]:
        """The output columns whose windows overhang on neither side."""
        window, columns = self.window, range(self.window.outputs[-1])
        span = (window.kernel[-1] - 1) * window.dilations[-1]
        starts = [column * window.strides[-1] - window.begins[-1] for column in columns]
        inner = [column for column in columns if starts[column] >= 0 and starts[column] + span < window.inputs[-1]]
        return (inner[0], inner[-1] + 1) if inner else (0, 0)

    def _strip(self, weights: Buffer, line: _Line, column: Expr, width: int, *, is_inner: bool) -> None:
        """`width` neighbouring positions of a line, for all channels."""
        corner = self.builder.bind(column * self.window.strides[-1] - self.window.begins[-1])
        axis = len(line.place)
        left, right = (0, self.window.kernel[-1]) if is_inner else clipped_taps(self.builder, self.window, axis, corner)
        lanes = self.builder.lanes(self.accumulator)
        whole, done = self.channels // lanes, 0
        if whole:
            with self.builder.loop(whole, name="block") as block:
                self._block(weights, line, column, (corner, left, right), width, self.builder.bind(block * lanes), lanes)
        done = whole * lanes
        while done < self.channels:
            while lanes > self.channels - done:
                lanes //= 2
            self._block(weights, line, column, (corner, left, right), width, done, lanes)
            done += lanes

    def _block(
        self,
        weights: Buffer,
        line: _Line,
        column: Expr,
        taps: tuple[Expr, Expr, Expr],
        width: int,
        first: Expr,
        lanes: int,
    ) -> None:
        """The sums of one vector of channels at each position of a strip."""
        builder, window, (corner, left, right) = self.builder, self.window, taps
        sums = builder.local(width * lanes, self.accumulator)
        for position in range(width):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(sums, position * lanes + lane, tirx.const(0, self.accumulator))
        kind = "unrolled" if isinstance(right, int) else "serial"
        with ExitStack() as loops:
            downs = [begin + loops.enter_context(builder.loop(end - begin, name="down")) for begin, end in line.taps]
            j = loops.enter_context(builder.loop(right - left, kind, "right"))
            downs, across = [builder.bind(down) for down in downs], left + j
            base = row_major((*downs, across), window.kernel) * self.channels + first
            geometry = zip(line.place, downs, window.strides, window.begins, window.dilations, strict=False)
            rows = [builder.bind(row * stride - begin + down * dilation) for row, down, stride, begin, dilation in geometry]
            for position in range(width):
                place = corner + position * window.strides[-1] + across * window.dilations[-1]
                with builder.loop(lanes, "vectorized", "lane") as lane:
                    x = tirx.Cast(self.accumulator, self.load((line.image, first + lane, *rows, place)))
                    at = position * lanes + lane
                    builder.store(sums, at, sums[at] + x * tirx.Cast(self.accumulator, weights[base + lane]))
        for position in range(width):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                self._store((line.image, first + lane, *line.place, column + position), sums[position * lanes + lane])

    def _store(self, index: tuple[Expr, ...], value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(self.accumulator, GroupValues(self.form.inner, self.builder).read(bias, index[1:2]))
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.follow(self.builder, index, tirx.Cast(dtype, value))

    def _weights(self) -> Buffer:
        """The weights with their channels last: [*place, channel]."""
        name, taps = self.anchor.inputs[1], prod(self.window.kernel)
        pack, kind = PackPanels((self.channels, taps), (0, 1), 0, 1, self.channels), self.form.inner.types[name]
        if name not in self.form.inner.constants:
            return pack_in_kernel(self.builder, self.builder.parameter(name, kind.elements, kind.dtype), pack)
        key = f"{name}/last"
        self.packed[key] = Operand(name, pack)
        return self.builder.parameter(key, pack.packed_type(kind).elements, kind.dtype)
