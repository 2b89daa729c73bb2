"""Images as convolutions on the tile unit read them: bfloat16 terms, channels last and filled up to whole tiles, zeros around.

With strides, positions that a tap of the window reads one after the other shall lie so: the image is cut in phases, position
(y, x) into phase (y mod stride, x mod stride). In each of them every tap reads as a window of stride 1 does, and result (r, c) is
number r * width + c of the positions of a plane, so that 16 neighbours are the rows of a tile. Those beyond the end of a row of
the result are computed and not stored.

Few channels would fill a small part of a tile's 32 values of k. Then those of all columns of the window lie side by side at each
position of the result, and k runs over the window's rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from tvm import tirx

from ...runtime.plan import TensorType
from ..builder import Buffer, Expr, Index, KernelBuilder, row_major, unravel
from ..costs import joins_columns
from .channels_last import ChannelsLast
from .panel_product import Scratch
from .split_bfloat16 import split
from .tile_blocks import Lines
from .tile_packing import LINES
from .tile_unit import DEPTH, ROWS
from .window import Window, read_window

_BAD_STRIDE_BYTES = 2048  # between rows that fall on two sets of the first cache
_MOST_LINE = 8192  # elements of a line on the stack


@dataclass(frozen=True)
class TiledImage:
    """The layout of an input [image, channel, row, column] for a window and so many terms.

    Elements of 16 bits: [image, phase, row, column, term, channel]. `in_place` says that the input itself lies so, and that
    nothing lies behind it. With `joined` columns of the window the channels are those of as many neighbouring positions.
    """

    source: TensorType
    window: Window
    terms: int
    in_place: bool = False
    joined: int = 1

    @classmethod
    def of(cls, form: ChannelsLast, terms: int) -> TiledImage:
        """That of the anchor's input: itself, where it is bfloat16 and every position is read by the result at its place."""
        name = form.anchor.inputs[0]
        source, window = form.inner.types[name], read_window(form.inner, form.anchor)
        is_flat = prod(window.kernel) == prod(window.strides) == 1 and window.inputs == window.outputs and not any(window.begins)
        is_whole = source.shape[1] % DEPTH == 0 and prod(window.outputs) >= LINES
        in_place = is_flat and is_whole and source.dtype == "bfloat16" and name in form.operands
        joins = joins_columns(source.shape[1], window.kernel[1], window.dilations[1])
        one = cls(source, window, terms, in_place, window.kernel[1] if joins else 1)
        return one if one.line <= _MOST_LINE else replace(one, joined=1)

    @property
    def reads(self) -> Window:
        """What is read of the image in this layout."""
        window = self.window
        if self.joined == 1:
            return window
        return replace(window, kernel=(window.kernel[0], 1), strides=(window.strides[0], 1))

    @property
    def line(self) -> int:
        """Elements of one term of a line of the input, with zeros at its ends, from which joined columns are copied."""
        columns = (self.window.outputs[1] - 1) * self.window.strides[1] + self.joined
        return columns * self.source.shape[1] + DEPTH

    @property
    def channels(self) -> int:
        """Of one term, whole tiles."""
        return ceil(self.source.shape[1] * self.joined / DEPTH) * DEPTH

    @property
    def phases(self) -> tuple[int, int]:
        """Of rows and of columns, those that a tap reads."""
        return self._largest(0, True) + 1, self._largest(1, True) + 1

    @property
    def height(self) -> int:
        return self.window.outputs[0] + self._largest(0, False)

    @property
    def width(self) -> int:
        return self.window.outputs[1] + self._largest(1, False)

    @property
    def pitch(self) -> int:
        """Elements of a position; a few more where tile rows would crowd each other out of the first cache."""
        pitch = self.channels * self.terms
        return pitch + DEPTH if 2 * pitch % _BAD_STRIDE_BYTES == 0 and not self.in_place else pitch

    @property
    def plane(self) -> int:
        """Elements of a phase. The last block of positions may reach up to 31 positions beyond it."""
        return self.height * self.width * self.pitch

    @property
    def elements(self) -> int:
        return self.source.shape[0] * prod(self.phases) * self.plane + LINES * self.pitch

    @property
    def positions(self) -> int:
        """Of one image, in which its results lie, with those between the rows."""
        rows, columns = self.window.outputs
        return (rows - 1) * self.width + columns

    def first_of(self, block: Expr) -> Expr:
        """The first of the 32 positions of a block: the last one may overlap, where nothing lies behind the image."""
        read = ROWS if self.has_short else LINES
        return tirx.min(block * LINES, self.positions - read) if self.in_place else block * LINES

    @property
    def has_short(self) -> bool:
        """Whether the last of some blocks has one tile's positions at most."""
        return self.positions > LINES and 0 < self.positions % LINES <= ROWS

    def lines(self, buffer: Buffer, image: Expr, first: Expr) -> Lines:
        """32 positions from number `first` on. Steps are (row of the window, column of it, 32 channels)."""
        base = image * (prod(self.phases) * self.plane) + first * self.pitch

        def at(ks: tuple[Expr, ...], term: int, half: Expr) -> Expr:
            (py, dy), (px, dx) = (self._place(axis, ks[axis] * self.reads.dilations[axis]) for axis in range(2))
            phase = py * self.phases[1] + px
            place = (dy * self.width + dx + half * ROWS) * self.pitch + term * self.channels + ks[2] * DEPTH
            return base + phase * self.plane + place

        return Lines(buffer, self.pitch, at)

    def _place(self, axis: int, tap: Expr) -> tuple[Expr, Expr]:
        """Phase of a tap, and the position in it."""
        stride = self.reads.strides[axis]
        return (tirx.floormod(tap, stride), tirx.floordiv(tap, stride)) if stride > 1 else (0, tap)

    def _largest(self, axis: int, is_phase: bool) -> int:
        stride, taps = self.reads.strides[axis], range(self.reads.kernel[axis])
        places = (divmod(tap * self.reads.dilations[axis], stride) for tap in taps)
        return max(place[1 if is_phase else 0] for place in places)

    # Filling ----------------------------------------------------------------------------------------------------------

    def fill(self, builder: KernelBuilder, form: ChannelsLast) -> Buffer:
        """The anchor's input, or a workspace with its terms, dealt to the threads by lines."""
        if self.in_place:
            return builder.parameter(form.operands[form.anchor.inputs[0]], self.source.elements, "uint16")
        target = builder.workspace(self.elements, "uint16")
        images, (rows, columns) = self.source.shape[0], self.phases
        extents = images, rows, columns, self.height
        with builder.chunks(prod(extents), self.elements) as line:
            image, py, px, row = (builder.bind(part) for part in unravel(line, extents))
            y = builder.bind(row * self.window.strides[0] + py - self.window.begins[0])
            exists = builder.bind(tirx.And(y >= 0, y < self.source.shape[2]))
            start = builder.bind(line * (self.width * self.pitch))
            if self.joined > 1:
                self._fill_joined(builder, form, Scratch(target, start), (image, y), exists)
            else:
                self._fill_line(builder, form, Scratch(target, start), (image, y, px), exists)
        rest = images * prod(self.phases) * self.plane
        self._clear(builder, target, rest, self.elements - rest)
        return target

    def _fill_line(
        self, builder: KernelBuilder, form: ChannelsLast, to: Scratch, place: tuple[Expr, Expr, Expr], exists: Expr
    ) -> None:
        """The positions of one phase in a line, those beside the input with zeros."""
        image, y, phase = place
        with builder.loop(self.width, name="column") as column:
            at = builder.bind(to.base + column * self.pitch)
            x = builder.bind(column * self.window.strides[1] + phase - self.window.begins[1])
            inside = builder.bind(tirx.And(exists, tirx.And(x >= 0, x < self.source.shape[3])))
            with builder.when(inside):
                self._fill_position(builder, form, to.buffer, at, (image, y, x))
            with builder.when(tirx.Not(inside)):
                self._clear(builder, to.buffer, at, self.pitch)

    def _fill_joined(
        self, builder: KernelBuilder, form: ChannelsLast, to: Scratch, place: tuple[Expr, Expr], exists: Expr
    ) -> None:
        """The terms of a line with its channels last, then of each position of the result as many as its window has there."""
        (image, y), channels, begin = place, self.source.shape[1], self.window.begins[1]
        line = builder.local(self.terms * self.line, "uint16", "line")
        self._clear(builder, line, 0, self.terms * self.line)
        count = min(self.source.shape[3], (self.line - DEPTH) // channels - begin)
        with builder.when(exists), builder.loop(channels, name="channel") as channel:

            def store(x: Expr) -> None:
                for term, part in enumerate(self._parts(builder, form, (image, channel, y, x))):
                    builder.store(line, (x + begin) * channels + channel + term * self.line, part)

            builder.vector_loop(count, builder.lanes("float32"), store)
        with builder.loop(self.width, name="column") as column:
            at, source = (builder.bind(column * step) for step in (self.pitch, self.window.strides[1] * channels))
            for term in range(self.terms):
                for first in range(0, self.channels, DEPTH):
                    with builder.loop(DEPTH, "vectorized", "lane") as lane:
                        number = line[source + (term * self.line + first) + lane]
                        is_read = first + lane < channels * self.joined
                        value = tirx.Select(is_read, number, tirx.const(0, "uint16"))
                        builder.store(to.buffer, to.base + at + (term * self.channels + first) + lane, value)
            self._clear(builder, to.buffer, to.base + at + self.terms * self.channels, self.pitch - self.terms * self.channels)

    def _fill_position(
        self, builder: KernelBuilder, form: ChannelsLast, target: Buffer, at: Expr, place: tuple[Expr, Expr, Expr]
    ) -> None:
        """The terms of all channels of a position of the input."""
        image, y, x = place
        channels = self.source.shape[1]

        def store(channel: Expr) -> None:
            for term, part in enumerate(self._parts(builder, form, (image, channel, y, x))):
                builder.store(target, at + (term * self.channels) + channel, part)

        builder.vector_loop(channels, builder.lanes("float32"), store)
        for term in range(self.terms):
            begin = term * self.channels
            self._clear(builder, target, at + (begin + channels), self.channels - channels)
        self._clear(builder, target, at + self.terms * self.channels, self.pitch - self.terms * self.channels)

    def _parts(self, builder: KernelBuilder, form: ChannelsLast, index: Index) -> list[Expr]:
        """The terms of an element of the input, at (image, channel, row, column)."""
        if self.source.dtype == "float32":
            return split(builder, form.read_image(builder, index), self.terms)
        name = form.anchor.inputs[0]
        image, channel, y, x = index
        place = (image, y, x, channel) if name in form.operands else index
        parameter = form.operands.get(name, name)
        bits = builder.parameter(parameter, self.source.elements, "uint16")
        return [bits[row_major(place, form.outer.types[parameter].shape)]]

    def _clear(self, builder: KernelBuilder, target: Buffer, begin: Expr, count: int) -> None:
        zero = tirx.const(0, "uint16")
        builder.vector_loop(count, builder.lanes("uint16"), lambda i: builder.store(target, begin + i, zero))
