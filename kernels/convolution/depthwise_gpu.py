"""Depthwise Conv on a GPU, NHWC: a thread has some neighbouring channels of a few neighbouring positions of an output row.

Loads and stores are vectors of up to 16 bytes along channels; a column of the image is loaded once for all positions of a strip
whose windows have it. Nothing is shared between threads but what caches hold: there is no sum over channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import ceil, prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen import ptx
from ..codegen.builder import Buffer, Expr, row_major, unravel
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..groups.group import Group
from ..microkernels.packing import PackPanels
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal
from ..template.kernel import finish, new_builder
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast, channels_last_form
from .depthwise_channels_last import is_depthwise
from .window import Window, read_window

_STRIP = 4  # positions of a thread
_TAP_OPERATIONS = 3.0  # of a tap and channel, with its loads and conversions
_MOST_UNROLLED = 81  # taps
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Conv of a channel a group with constant weights, NHWC, in place, with an epilogue."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "Conv" or not is_depthwise(form) or form.is_computed():
        return Refusal("has no depthwise convolution of an image that lies channels-last")
    image, weights, result = (form.inner.types[name] for name in (*form.anchor.inputs[:2], form.anchor.outputs[0]))
    if {image.dtype, weights.dtype, result.dtype} - set(_ITEM_BYTES):
        return Refusal(f"no depthwise convolution of {image.dtype} by {weights.dtype}")
    if form.anchor.inputs[1] not in form.outer.constants or 0 in (image.elements, weights.elements, result.elements):
        return Refusal("its weights are not constant, or there are none")
    if prod(weights.shape[2:]) > _MOST_UNROLLED:
        return Refusal(f"its windows have more than {_MOST_UNROLLED} taps, which no thread unrolls")
    taps = prod(weights.shape[2:]) * result.elements
    alone = with_bytes(Estimate(_TAP_OPERATIONS * taps, 2 * taps), form.outer)
    return Candidate(with_epilogue(alone, form.inner, target.machine, form.anchor), _Depthwise(form, target).build)


@dataclass(frozen=True)
class _Depthwise:
    """The kernel of one depthwise convolution."""

    form: ChannelsLast
    target: Target

    @cached_property
    def window(self) -> Window:
        return read_window(self.form.inner, self.form.anchor)

    @cached_property
    def builder(self) -> GpuBuilder:
        builder = new_builder(self.target, self.form.outer.configuration)
        assert isinstance(builder, GpuBuilder)
        return builder

    @cached_property
    def lanes(self) -> int:
        """Channels of a thread."""
        image, weights = (self.form.inner.types[name] for name in self.form.anchor.inputs[:2])
        most = ptx.COPY_BYTES // max(_ITEM_BYTES[image.dtype], _ITEM_BYTES[weights.dtype])
        firsts = [image.shape[1], *(one.first for one in self.form.destinations)]
        widths = [self.form.outer.types[one.parameter].shape[-1] for one in self.form.destinations]
        return next(n for n in (8, 4, 2, 1) if n <= most and all(one % n == 0 for one in (*firsts, *widths)))

    def build(self) -> BuiltKernel:
        form, builder, window = self.form, self.builder, self.window
        form.copy_pieces(builder)
        name = form.anchor.inputs[1]
        kind = form.inner.types[name]
        taps = PackPanels(kind.shape, tuple(range(len(kind.shape))), 0, 1, kind.shape[0])  # [taps, channels]
        weights = builder.parameter(name, kind.elements, kind.dtype)
        images, channels = form.inner.types[form.anchor.inputs[0]].shape[:2]
        *rows, columns = window.outputs
        shape = (images, *rows, ceil(columns / _STRIP), channels // self.lanes)
        flops = 2 * images * channels * prod(window.outputs) * prod(window.kernel)
        with builder.chunks(prod(shape), flops) as thread:
            image, *place, strip, vector = (builder.bind(i) for i in unravel(thread, shape))
            self._strip(weights, image, place, builder.bind(strip * _STRIP), builder.bind(vector * self.lanes))
        return finish("gpu_depthwise", builder, form.outer, flops=flops, packed={name: Operand(name, taps)})

    def _strip(self, weights: Buffer, image: Expr, place: Sequence[Expr], first: Expr, channel: Expr) -> None:
        builder, window, lanes = self.builder, self.window, self.lanes
        count = min(_STRIP, window.outputs[-1])
        sums = builder.local(count * lanes, "float32", "sums")
        for i in range(count * lanes):
            builder.store(sums, i, tirx.const(0, "float32"))
        corner = [builder.bind(o * s - b) for o, s, b in zip((*place, first), window.strides, window.begins, strict=True)]
        for outer in product(*(range(taps) for taps in window.kernel[:-1])):
            at = [builder.bind(c + t * d) for c, t, d in zip(corner, outer, window.dilations, strict=False)]
            inside = [tirx.And(i >= 0, i < n) for i, n in zip(at, window.inputs, strict=False)]
            self._row(weights, sums, (image, *at), inside, outer, corner[-1], channel)
        self._store(sums, image, place, first, channel)

    def _row(
        self,
        weights: Buffer,
        sums: Buffer,
        row: tuple[Expr, ...],
        inside: Sequence[Expr],
        outer: Sequence[int],
        corner: Expr,
        channel: Expr,
    ) -> None:
        """Add the taps of one row of the window to all sums of the strip."""
        builder, window, lanes = self.builder, self.window, self.lanes
        stride, dilation, width = window.strides[-1], window.dilations[-1], window.kernel[-1]
        channels = self.form.inner.types[self.form.anchor.inputs[0]].shape[1]
        tap = row_major(outer, window.kernel[:-1]) if outer else 0
        factors = [self._load(weights, (tap * width + t) * channels + channel, ()) for t in range(width)]
        uses: dict[int, list[tuple[int, int]]] = {}
        for position, t in product(range(min(_STRIP, window.outputs[-1])), range(width)):
            uses.setdefault(position * stride + t * dilation, []).append((position, t))
        name = self.form.operands[self.form.anchor.inputs[0]]
        kind = self.form.outer.types[name]
        image = builder.parameter(name, kind.elements, kind.dtype)
        for column, taps in sorted(uses.items()):
            at = builder.bind(corner + column)
            origin = builder.bind(row_major((*row, at), (0, *window.inputs)) * channels + channel)
            exists = [*inside, tirx.And(at >= 0, at < window.inputs[-1])]
            values = self._load(image, origin, exists)
            for (position, t), lane in product(taps, range(lanes)):
                cell = _i32(position * lanes + lane)
                builder.store(sums, cell, sums[cell] + values[lane] * factors[t][lane])

    def _load(self, source: Buffer, origin: Expr, conditions: Sequence[Expr]) -> list[Expr]:
        """Neighbours as float32; zeros where a condition fails."""
        builder, lanes, dtype = self.builder, self.lanes, str(source.dtype)
        values = builder.local(lanes, dtype, "values")
        for lane in range(lanes if conditions else 0):
            builder.store(values, lane, tirx.const(0, dtype))
        with builder.when(tirx.all(*conditions) if conditions else tirx.const(1, "bool")), builder.vector(lanes) as lane:
            builder.store(values, lane, source[origin + lane])
        return [builder.name(tirx.Cast("float32", values[_i32(lane)])) for lane in range(lanes)]

    def _store(self, sums: Buffer, image: Expr, place: Sequence[Expr], first: Expr, channel: Expr) -> None:
        form, builder, anchor, lanes = self.form, self.builder, self.form.anchor, self.lanes
        result, columns = form.inner.types[anchor.outputs[0]], self.window.outputs[-1]

        def store_one(position: int, column: Expr, lane: int) -> None:
            value, at = sums[_i32(position * lanes + lane)], builder.bind(channel + lane)
            if len(anchor.inputs) > 2 and anchor.inputs[2]:
                value = value + tirx.Cast("float32", GroupValues(form.inner, builder).read(anchor.inputs[2], (at,)))
            form.store_epilogue(builder, (image, at, *place, column), tirx.Cast(result.dtype, value))

        for position in range(min(_STRIP, columns)):
            column = builder.bind(first + position)
            with builder.when(column < columns):
                builder.store_neighbours(lanes, partial(store_one, position, column))


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")
