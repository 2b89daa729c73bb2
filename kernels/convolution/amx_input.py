"""Inputs of AMX convolutions: a copy in bfloat16 terms or bytes, NHWC, padded around the image and to whole tiles of channels.

Signals and images are volumes (planes, rows, columns) with one plane, or one column. With strides the image is split into phases,
position (z, y, x) into phase (z mod stride, y mod stride, x mod stride): in a phase every tap reads contiguous positions, as with
stride 1. Result (r, c) of a plane is position r * width + c, so that 16 neighbours are the rows of a tile; positions beyond the
end of a row of the result are computed and not stored.

A copy of a large image would go to memory and come back. Then each thread copies bands of rows, one after the other, to memory of
its own that stays in L2 while their results are computed.

Few channels would fill a small part of a row of a tile. Then the channels of all columns of the window are copied side by
side for each position of the result (a partial im2col), and k runs over the window's planes and rows alone. Each group of
channels is padded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TypeVar

from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import Size, SizeLike, greatest_of, least_of, maximum_of, minimum_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major, unravel
from ..microkernels.amx_blocks import TileOperand
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import BF16_TILES, ROWS, TileDot
from ..microkernels.bf16_split import split
from ..microkernels.packed_gemm import Scratch
from ..microkernels.packing import PackPanels
from .channels_last_form import ChannelsLast
from .transposed_phases import PackPhases
from .window import Taps, Window

_BAD_STRIDE_BYTES = 2048  # a pitch in whose multiples 32 rows fall into two sets of L1
T = TypeVar("T")
Place = tuple[int, ...]  # of planes, rows and columns


def as_volume(numbers: Sequence[T], one: T) -> tuple[T, ...]:
    """Numbers of each spatial dimension as (planes, rows, columns), with `one` for missing dimensions."""
    if len(numbers) == 1:
        return one, numbers[0], one
    return (*(one,) * (3 - len(numbers)), *numbers)


def of_volume(place: Sequence[T], rank: int) -> tuple[T, ...]:
    """The inverse of `as_volume`: the index in the `rank` dimensions of the tensor."""
    return (place[1],) if rank == 1 else tuple(place[3 - rank :])


def as_planes(window: Window) -> Window:
    """The window with three spatial dimensions: planes, rows and columns."""
    ones = {name: as_volume(getattr(window, name), 1) for name in ("kernel", "strides", "dilations", "inputs", "outputs")}
    return replace(window, begins=as_volume(window.begins, 0), **ones)


@dataclass(frozen=True)
class WindowProduct:
    """One product: the `taps` of planes, rows and columns, from the copy's origin, at `outputs` positions.

    `weights` are packed as `phases` matrices a group. `place(phase, position)` is the spatial index in the result for a position
    (plane, row, column).
    """

    taps: tuple[Taps, ...]
    outputs: Place
    weights: PackPanels | PackPhases
    phases: int
    place: Callable[[Expr, Index], Index]


@dataclass(frozen=True)
class TiledImage:
    """The layout of the copy of an input [image, channel, *spatial].

    Numbers, as bits, [image, phase, plane, row, column, term, group, channel]: a phase has `extents`, its positions are `strides`
    apart in the input and begin `begins` before it. `in_place`: the input itself has this layout, and no position beyond its end
    may be read. With `joined` > 1 a position has the channels of so many neighbouring columns. `product` multiplies the tiles.
    With `band` > 0 a copy is that of one image's rows for so many rows of results.
    """

    source: TensorType
    strides: Place
    begins: Place
    phases: Place
    extents: Place
    terms: int
    groups: int = 1
    joined: int = 1
    in_place: bool = False
    product: TileDot = BF16_TILES
    band: int = 0

    @property
    def inputs(self) -> Place:
        return as_volume(self.source.shape[2:], 1)

    @property
    def line(self) -> int:
        """Elements of one term of the longest padded row of the input, from which joined columns are copied, a tile's row at
        once."""
        columns = (greatest_of(self.extents[2]) - 1) * self.strides[2] + self.joined
        return columns * self.source.shape[1] + self.product.depth

    @property
    def of_group(self) -> int:
        """Channels of a group."""
        return self.source.shape[1] // self.groups

    @property
    def group_channels(self) -> int:
        """Channels of a group, padded to whole tiles."""
        return ceil(self.of_group * self.joined / self.product.depth) * self.product.depth

    @property
    def channels(self) -> int:
        """Channels of all groups, each padded."""
        return self.groups * self.group_channels

    @property
    def pitch(self) -> int:
        """Elements from position to position; a cache line more where a tile's rows would conflict in L1."""
        pitch = self.channels * self.terms
        return pitch + self.product.depth if self._has_conflicts(pitch) and not self.in_place else pitch

    def _has_conflicts(self, elements: int) -> bool:
        """Whether rows of a tile, so many elements apart, conflict in two sets of L1."""
        return elements * self.product.bits // 8 % _BAD_STRIDE_BYTES == 0

    @property
    def phase_elements(self) -> int:
        """The last block of positions may reach up to 31 positions beyond the last phase."""
        return prod(self.extents) * self.pitch

    @property
    def elements(self) -> int:
        images = 1 if self.band else self.source.shape[0]
        return images * prod(self.phases) * self.phase_elements + LINES * self.pitch

    def in_bands(self, rows: int, of: SizeLike) -> TiledImage:
        """The layout of a copy for `rows` of the `of` rows of results."""
        planes, lines, columns = self.extents
        return replace(self, extents=(planes, greatest_of(lines - of) + rows, columns), band=rows)

    def positions(self, outputs: Place) -> SizeLike:
        """Positions of a plane that are computed for a plane of results, those between rows included."""
        _, rows, columns = outputs
        return (rows - 1) * self.extents[2] + columns

    def first_of(self, block: Expr, outputs: Place) -> Expr:
        """The first of a block's 32 positions; in place the last block is moved back to end with the image, and overlaps."""
        if not self.in_place:
            return block * LINES
        positions = self.positions(outputs)
        if isinstance(positions, Size):
            read = tirx.Select(positions - block * LINES <= ROWS, ROWS, LINES)
        else:
            read = ROWS if self.has_short(outputs) else LINES
        return tirx.min(block * LINES, positions - read)

    def has_short(self, outputs: Place) -> bool:
        """Whether the last of several blocks has at most the 16 positions of one tile."""
        positions = self.positions(outputs)
        return bool(positions > LINES and 0 < positions % LINES <= ROWS)

    def lies_in_place(self, form: ChannelsLast, outputs: Sequence[Place]) -> bool:
        """Whether the anchor's input itself has this layout: not float32, NHWC, whole tiles of channels, no padding is read."""
        name = form.anchor.inputs[0]
        is_plain = self.source.dtype != "float32" and name in form.operands and self.joined == 1
        is_same = not any(self.begins) and prod(self.phases) == 1 and self.extents == self.inputs
        is_whole = self.of_group % self.product.depth == 0 and all(least_of(self.positions(one)) >= LINES for one in outputs)
        return is_plain and is_same and is_whole and not self._has_conflicts(self.channels)

    def lines(self, copy: Scratch, place: tuple[Expr, Expr, Expr], group: Expr, taps: Sequence[Taps]) -> TileOperand:
        """Tiles of 32 positions from `place` (image, plane, position in it) on, for windows with `taps` from the copy's origin.

        Steps are (plane, row, column of the window, channels of a tile's row).
        """
        image, plane, first = place
        position = plane * (self.extents[1] * self.extents[2]) + first
        base = image * (prod(self.phases) * self.phase_elements) + position * self.pitch + group * self.group_channels
        base = copy.base + base

        def at(ks: tuple[Expr, ...], term: int, half: Expr) -> Expr:
            places = [_phase_of(one.at(k), stride) for one, k, stride in zip(taps, ks, self.strides, strict=False)]
            phase = row_major([phase for phase, _ in places], self.phases)
            ahead = row_major([ahead for _, ahead in places], self.extents)
            channel = term * self.channels + ks[3] * self.product.depth
            return base + phase * self.phase_elements + (ahead + half * ROWS) * self.pitch + channel

        return TileOperand(copy.buffer, self.pitch, at)

    # Filling ----------------------------------------------------------------------------------------------------------

    def fill(self, builder: KernelBuilder, form: ChannelsLast, padding: Expr = 0) -> Scratch:
        """The anchor's input in place, or the copy in the workspace, whose rows are dealt to the threads. Around the image lie
        numbers `padding`."""
        if self.in_place:
            return Scratch(builder.parameter(form.operands[form.anchor.inputs[0]], self.source.elements, self.product.numbers), 0)
        to = Scratch(builder.workspace(self.elements, self.product.numbers), 0)
        extents = self.source.shape[0], *self.phases, *self.extents[:2]
        with builder.chunks(prod(extents), self.elements) as line:
            self._fill_row(builder, form, to, line, unravel(line, extents), padding)
        self.clear_end(builder, to)
        return to

    def fill_band(
        self, builder: KernelBuilder, form: ChannelsLast, to: Scratch, image: Expr, first: Expr, padding: Expr = 0
    ) -> None:
        """Copy what the rows of results from `first` on read of an image."""
        extents = *self.phases, *self.extents[:2]
        with builder.loop(prod(extents), name="row") as line:
            *phases, plane, row = unravel(line, extents)
            self._fill_row(builder, form, to, line, (image, *phases, plane, row + first), padding)

    def clear_end(self, builder: KernelBuilder, to: Scratch) -> None:
        """Zeros behind the last row, where the last block of positions ends: what is not finite would be computed again."""
        count = LINES * self.pitch
        self._clear(builder, to.buffer, to.base + (self.elements - count), count)

    def _fill_row(self, builder: KernelBuilder, form: ChannelsLast, to: Scratch, line: Expr, place: Index, padding: Expr) -> None:
        """Copy row number `line`, which is that at `place` (image, three phases, plane, row)."""
        image, *numbers = (builder.bind(part) for part in place)
        z, y = (
            builder.bind(row * self.strides[axis] + numbers[axis] - self.begins[axis]) for axis, row in enumerate(numbers[3:])
        )
        inside = (tirx.And(i >= 0, i < extent) for i, extent in zip((z, y), self.inputs, strict=False))
        exists = builder.bind(tirx.And(*inside))
        at = Scratch(to.buffer, builder.bind(to.base + line * (self.extents[2] * self.pitch)))
        if self.joined > 1:
            self._fill_joined(builder, form, at, (image, z, y), exists, padding)
        else:
            self._fill_line(builder, form, at, (image, z, y, numbers[2]), exists, padding)

    def _fill_line(
        self, builder: KernelBuilder, form: ChannelsLast, to: Scratch, place: Index, exists: Expr, padding: Expr
    ) -> None:
        """Copy the positions of one phase in a row, and those in the padding."""
        *lead, phase = place
        with builder.loop(self.extents[2], name="column") as column:
            at = builder.bind(to.base + column * self.pitch)
            x = builder.bind(column * self.strides[2] + phase - self.begins[2])
            inside = builder.bind(tirx.And(exists, tirx.And(x >= 0, x < self.inputs[2])))
            with builder.when(inside):
                self._fill_position(builder, form, to.buffer, at, (*lead, x))
            with builder.when(tirx.Not(inside)):
                self._clear(builder, to.buffer, at, self.pitch, padding)

    def _fill_joined(
        self, builder: KernelBuilder, form: ChannelsLast, to: Scratch, place: Index, exists: Expr, padding: Expr
    ) -> None:
        """Copy a row's terms with channels last, then for each position of the result those of the window's columns."""
        (image, *lead), channels, begin = place, self.source.shape[1], self.begins[2]
        numbers, of_step = self.product.numbers, self.product.depth
        line = builder.local(self.terms * self.line, numbers, "line")
        self._clear(builder, line, 0, self.terms * self.line, padding)
        count = maximum_of(minimum_of(self.inputs[2], (self.line - of_step) // channels - begin), 0)
        with builder.when(exists), builder.loop(channels, name="channel") as channel:

            def store(x: Expr) -> None:
                for term, part in enumerate(self._parts(builder, form, (image, channel, *lead, x))):
                    builder.store(line, (x + begin) * channels + channel + term * self.line, part)

            builder.vector_loop(count, builder.lanes("float32"), store)
        with builder.loop(self.extents[2], name="column") as column:
            at, source = (builder.bind(column * step) for step in (self.pitch, self.strides[2] * channels))
            for term in range(self.terms):
                for first in range(0, self.channels, of_step):
                    with builder.loop(of_step, "vectorized", "lane") as lane:
                        number = line[source + (term * self.line + first) + lane]
                        is_read = first + lane < channels * self.joined
                        value = tirx.Select(is_read, number, tirx.const(0, numbers))
                        builder.store(to.buffer, to.base + at + (term * self.channels + first) + lane, value)
            self._clear(builder, to.buffer, to.base + at + self.terms * self.channels, self.pitch - self.terms * self.channels)

    def _fill_position(self, builder: KernelBuilder, form: ChannelsLast, target: Buffer, at: Expr, place: Index) -> None:
        """Copy the terms of all channels of a position."""
        image, *lead = place
        groups, count = (1, self.source.shape[1]) if self.of_group == self.group_channels else (self.groups, self.of_group)
        with builder.loop(groups, name="group") as group:
            begin, first = (builder.bind(group * size) for size in (self.group_channels, count))

            def store(i: Expr) -> None:
                for term, part in enumerate(self._parts(builder, form, (image, first + i, *lead))):
                    builder.store(target, at + begin + (term * self.channels) + i, part)

            lanes = builder.lanes("float32") if self.product is BF16_TILES else self.product.depth
            builder.vector_loop(count, lanes, store)
            for term in range(self.terms):
                rest = self.channels // groups - count
                self._clear(builder, target, at + begin + (term * self.channels + count), rest)
        self._clear(builder, target, at + self.terms * self.channels, self.pitch - self.terms * self.channels)

    def _parts(self, builder: KernelBuilder, form: ChannelsLast, index: Index) -> list[Expr]:
        """The terms of the input's element at (image, channel, plane, row, column), as bits."""
        image, channel, *at = index
        place = of_volume(at, len(self.source.shape) - 2)
        if self.source.dtype == "float32":
            return split(builder, form.read_image(builder, (image, channel, *place)), self.terms)
        name = form.anchor.inputs[0]
        at_memory = (image, *place, channel) if name in form.operands else (image, channel, *place)
        parameter = form.operands.get(name, name)
        bits = builder.parameter(parameter, self.source.elements, self.product.numbers)
        return [bits[row_major(at_memory, form.outer.types[parameter].shape)]]

    def _clear(self, builder: KernelBuilder, target: Buffer, begin: Expr, count: int, number: Expr = 0) -> None:
        number = tirx.const(number, self.product.numbers) if isinstance(number, int) else number
        lanes = builder.lanes(self.product.numbers)
        builder.vector_loop(count, lanes, lambda i: builder.store(target, begin + i, number))


def _phase_of(tap: Expr, stride: int) -> tuple[Expr, Expr]:
    """A tap's phase, and its position in that phase."""
    return (tirx.floormod(tap, stride), tirx.floordiv(tap, stride)) if stride > 1 else (0, tap)
