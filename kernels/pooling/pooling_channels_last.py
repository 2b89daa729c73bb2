"""MaxPool and AveragePool, NHWC: vectors run over channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod

from tvm import tirx

from ...runtime.symbolic.sizes import estimating, greatest_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index, KernelBuilder, unravel
from ..convolution.channels_last_form import ChannelsLast, channels_last_form
from ..convolution.window import Window, clipped_taps, read_window
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.movement import copied_cycles
from ..cost.pointwise import LoopBody
from ..cost.pooling import channels_last_pooling_cycles
from ..formats.bfloat16 import decoded, ordered_code
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder, pointwise_cost
from ..template.loops import accumulator_type, parallel_nest
from ..template.values import Reader
from .pooling import OPERATORS, Pooling, combining_machine, pooling_bodies

_MAX_UNROLLED = 64  # elements of a window whose combination is one expression
# Of a vector of codes: shifted, masked, exclusive or and an addition; compared; and back.
_CODE_BODIES = LoopBody(4, loads=1), LoopBody(1), LoopBody(4, stores=1)


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one pooling of images or volumes without indices, transposed from and to channels-last, with its epilogue."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    anchor = form.anchor
    if anchor.op_type not in OPERATORS or anchor.inputs[0] not in form.operands:
        return Refusal("has no pooling of an image that lies channels-last")
    if len(anchor.outputs) > 1 and anchor.outputs[1]:
        return Refusal("indices of the greatest elements are asked for")
    window = read_window(form.inner, anchor)
    work = form.inner.types[anchor.outputs[0]].elements * (prod(window.kernel) + pointwise_cost(form.inner))
    return Candidate(_estimate(group, form, window, work, target), partial(_build, group, form, window, work, target))


@estimating
def _estimate(group: Group, form: ChannelsLast, window: Window, work: int, target: Target) -> Estimate:
    """Of all windows, and of what comes from elsewhere into the results."""
    anchor = form.anchor
    images, channels = form.inner.types[anchor.inputs[0]].shape[:2]
    dtype = form.inner.types[anchor.inputs[0]].dtype
    machine = combining_machine(form.inner, anchor, accumulator_type(dtype), target)
    is_counted = anchor.op_type == "AveragePool" and any(window.begins)
    bodies = pooling_bodies(form.inner, anchor, machine)
    if _has_codes(anchor, dtype, target) and len(form.inner.ops) == 1:
        machine, bodies = replace(target.machine, item_bytes=2), _CODE_BODIES
    positions, taps = images * prod(window.outputs), prod(window.kernel)
    cycles = channels_last_pooling_cycles(positions, channels, taps, bodies, machine, is_counted=is_counted)
    copied = sum(copied_cycles(one.shape, one.places[-1][1], machine.lanes, LoopBody(stores=1), machine) for one in form.pieces)
    estimate = Estimate(cycles + copied, work, unit="vector", is_parallel=work >= parallel_work(target.machine))
    return with_bytes(estimate, group)


def _has_codes(anchor: Op, dtype: str, target: Target) -> bool:
    """Whether elements are compared by their codes."""
    return anchor.op_type == "MaxPool" and dtype == "bfloat16" and not target.is_gpu


def _build(group: Group, form: ChannelsLast, window: Window, work: int, target: Target) -> BuiltKernel:
    builder, anchor = new_builder(target), form.anchor
    dtype = form.inner.types[anchor.inputs[0]].dtype
    if _has_codes(anchor, dtype, target):
        pooling: Pooling = _MaxOfCodes(form.inner, builder, anchor, window, "uint16")
    else:
        pooling = Pooling(form.inner, builder, anchor, window, accumulator_type(dtype))
    form.copy_pieces(builder)
    if greatest_of(work):
        _Emission(form, builder, pooling, form.readers(builder)[anchor.inputs[0]]).emit(work)
    return finish("pooling_channels_last", builder, group, flops=work)


@dataclass(frozen=True)
class _MaxOfCodes(Pooling):
    """MaxPool of bfloat16 by uint16 codes of the same order: twice the lanes, and NaN is the greatest without further code."""

    @property
    def initial(self) -> Expr:
        return tirx.const(0, self.dtype)

    def mapped(self, x: Expr) -> Expr:
        return ordered_code(x, self.builder.name)

    def merge(self, a: Expr, b: Expr) -> Expr:
        return tirx.max(a, b)

    def finished(self, total: Expr, count: Expr) -> Expr:
        greatest, dtype = decoded(total, self.builder.name), self.group.types[self.anchor.outputs[0]].dtype
        return greatest if dtype == "float32" else tirx.Cast(dtype, greatest)


@dataclass(frozen=True)
class _Place:
    """An output position of an image, where its window begins in the input, and the divisor of an average; of all channels, or of
    one."""

    image: Expr
    place: Index
    corner: Index
    count: Expr
    channel: Expr | None = None


@dataclass(frozen=True)
class _Emission:
    """The loops of one kernel. `load` reads the image at (image, channel, *spatial)."""

    form: ChannelsLast
    builder: KernelBuilder
    pooling: Pooling
    load: Reader

    def emit(self, work: int) -> None:
        images, channels = self.form.inner.types[self.form.anchor.inputs[0]].shape[:2]
        window = self.pooling.window

        def position(index: Index, channel: Expr | None = None) -> None:
            image, *place = index
            corner = tuple(self.builder.bind(o * s - b) for o, s, b in zip(place, window.strides, window.begins, strict=True))
            count = self.pooling.counted(range(len(place)), place) if self.form.anchor.op_type == "AveragePool" else 1
            self._emit_position(_Place(image, tuple(place), corner, self.builder.bind(count), channel), channels)

        if not self.builder.is_grid:
            parallel_nest(self.builder, [images, *window.outputs], work, position)
            return
        shape = (images, *window.outputs, channels)  # a thread for each element, neighbours of which read neighbours
        with self.builder.chunks(prod(shape), work) as thread:
            *place, channel = (self.builder.bind(i) for i in unravel(thread, shape))
            position(tuple(place), channel)

    def _emit_position(self, at: _Place, channels: int) -> None:
        rank = len(at.place)
        window = self.pooling.window
        overhanging = [d for d in range(rank) if self.pooling.overhangs(d)]
        if prod(window.kernel) > _MAX_UNROLLED:
            ranges = [
                clipped_taps(self.builder, window, d, at.corner[d]) if d in overhanging else (0, window.kernel[d])
                for d in range(rank)
            ]
            self._each_block(at, channels, lambda first, lanes: self._clipped_window(at, ranges, first, lanes))
            return
        if not overhanging:
            self._each_block(at, channels, lambda first, lanes: self._whole_window(at, first, lanes))
            return
        last = [(k - 1) * d for k, d in zip(window.kernel, window.dilations, strict=True)]
        conditions = [tirx.And(at.corner[d] >= 0, at.corner[d] + last[d] < window.inputs[d]) for d in overhanging]
        inside = self.builder.bind(tirx.all(*conditions))
        with self.builder.when(inside):
            self._each_block(at, channels, lambda first, lanes: self._whole_window(at, first, lanes))
        with self.builder.when(tirx.Not(inside)):
            ranges = [clipped_taps(self.builder, window, d, at.corner[d]) for d in range(rank)]
            self._each_block(at, channels, lambda first, lanes: self._clipped_window(at, ranges, first, lanes))

    def _each_block(self, at: _Place, channels: int, body: Callable[[Expr, int], None]) -> None:
        """`body(first, lanes)` for blocks of channels: whole vectors, then ever shorter ones."""
        if at.channel is not None:
            body(at.channel, 1)
            return
        lanes = self.builder.lanes(self.pooling.dtype)
        whole = channels // lanes
        if whole:
            with self.builder.loop(whole, name="block") as block:
                body(self.builder.bind(block * lanes), lanes)
        done = whole * lanes
        while done < channels:
            while lanes > channels - done:
                lanes //= 2
            body(done, lanes)
            done += lanes

    def _whole_window(self, at: _Place, first: Expr, lanes: int) -> None:
        builder, pooling = self.builder, self.pooling
        with builder.loop(lanes, "vectorized", "lane") as lane:
            total = None
            for taps in product(*(range(k) for k in pooling.window.kernel)):
                x = pooling.mapped(self._element(at, first + lane, taps))
                total = x if total is None else builder.name(pooling.merge(total, x))
            self._store(at, first + lane, total)

    def _clipped_window(self, at: _Place, ranges: list[tuple[Expr, Expr]], first: Expr, lanes: int) -> None:
        builder, pooling = self.builder, self.pooling
        total = builder.local(lanes, pooling.dtype)
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(total, lane, pooling.initial)
        with ExitStack() as loops:
            taps = [begin + loops.enter_context(builder.loop(end - begin, name="tap")) for begin, end in ranges]
            lane = loops.enter_context(builder.loop(lanes, "vectorized", "lane"))
            x = pooling.mapped(self._element(at, first + lane, taps))
            builder.store(total, lane, pooling.merge(total[lane], x))
        with builder.loop(lanes, "vectorized", "lane") as lane:
            self._store(at, first + lane, total[lane])

    def _element(self, at: _Place, channel: Expr, taps: Sequence[Expr]) -> Expr:
        place = [c + t * d for c, t, d in zip(at.corner, taps, self.pooling.window.dilations, strict=True)]
        return self.load((at.image, channel, *place))

    def _store(self, at: _Place, channel: Expr, total: Expr) -> None:
        self.form.store_epilogue(self.builder, (at.image, channel, *at.place), self.pooling.finished(total, at.count))
