"""MaxPool, AveragePool and LpPool over any number of spatial dimensions, separably, in two steps of full vectors.

For a run of outputs along the last dimension, the rows of the windows are first combined into one row of scratch, which includes
the padding; then each output combines its columns of that row. No step has a border case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import Size, estimating, greatest_of, least_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major, unravel
from ..convolution.window import Window, read_window
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.pointwise import LoopBody
from ..cost.pooling import pooling_cycles
from ..cost.rows import MAX_INSTRUCTIONS
from ..expressions import math
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import anchor_bodies, finish, machine_of, new_builder, pointwise_cost
from ..template.loops import accumulator_type, cover, parallel_nest, store_epilogue
from ..template.prologue import flat_obstacle, source_of
from ..template.values import anchor_of

OPERATORS = frozenset(["AveragePool", "LpPool", "MaxPool"])
_RUN = 1024  # outputs of one run: its scratch row stays in L1
_ROW = 1 << 14  # elements of that row, which is on the stack, at most, but for those of one window
_MAX_PHASES = 4  # strides up to which every n-th element is picked with shuffles
_MAX_TERMS = 256  # rows or columns of a window whose combination is one expression: LLVM takes quadratic time for it
_MAX_BRANCHES = 64  # rows each of which is combined, if it is there, in statements of its own


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one pooling without indices, with its epilogue."""
    anchor = anchor_of(group)
    if reason := flat_obstacle(group, anchor.inputs[0]):
        return Refusal(reason)
    if len(anchor.outputs) > 1 and anchor.outputs[1]:
        return Refusal("indices of the greatest elements are asked for")
    window = read_window(group, anchor)
    work = group.types[group.outputs[0]].elements * (sum(window.kernel) + pointwise_cost(group))
    return Candidate(_estimate(group, anchor, window, work, target), partial(_build, group, anchor, window, work, target))


@estimating
def _estimate(group: Group, anchor: Op, window: Window, work: int, target: Target) -> Estimate:
    kind = group.types[anchor.inputs[0]]
    *outer, columns = window.outputs
    machine = combining_machine(group, anchor, accumulator_type(kind.dtype), target)
    run = min(columns, _longest_run(window))
    lines = prod(kind.shape[:2]) * prod(outer) * -(-columns // max(run, 1))
    shape = window.kernel, window.strides[-1], window.dilations[-1], run
    cycles = pooling_cycles(lines, *shape, _MAX_PHASES, pooling_bodies(group, anchor, machine), machine)
    return with_bytes(Estimate(cycles, work, unit="vector", is_parallel=work >= parallel_work(target.machine)), group)


def combining_machine(group: Group, anchor: Op, dtype: str, target: Target) -> Machine:
    """The core as it combines windows of a type: the greatest of bytes are compared as many at once as fill a vector, where
    nothing is computed around them."""
    if anchor.op_type == "MaxPool" and len(group.ops) == 1 and "int" in dtype:
        return replace(target.machine, item_bytes=np.dtype(dtype).itemsize)
    return machine_of(target, dtype)


def pooling_bodies(group: Group, anchor: Op, machine: Machine) -> tuple[LoopBody, LoopBody, LoopBody]:
    """What a vector takes: to read it, to combine it with another, and to store a result."""
    before, after = anchor_bodies(group, anchor, machine)
    if anchor.op_type == "LpPool":
        before += LoopBody(float(anchor.attribute("p", 2)))
        after += LoopBody(divisions=1)
    if anchor.op_type == "AveragePool":
        after += LoopBody(divisions=1)
    may_be_nan = anchor.op_type == "MaxPool" and "float" in group.types[anchor.inputs[0]].dtype
    return before, LoopBody(MAX_INSTRUCTIONS if may_be_nan else 1), after


def _build(group: Group, anchor: Op, window: Window, work: int, target: Target) -> BuiltKernel:
    builder, dtype = new_builder(target), accumulator_type(group.types[anchor.inputs[0]].dtype)
    if work:
        Pooling(group, builder, anchor, window, dtype).emit(work)
    return finish("pooling", builder, group, flops=work)


def _longest_run(window: Window) -> int:
    """Outputs of a run: as many as the scratch row holds."""
    span = (window.kernel[-1] - 1) * window.dilations[-1] + 1
    return max(min(_RUN, (_ROW - span) // window.strides[-1] + 1), 1)


@dataclass(frozen=True)
class Pooling:
    """The loops of one pooling; `dtype` is what it computes in."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    window: Window
    dtype: str

    @property
    def lanes(self) -> int:
        return self.builder.lanes(self.dtype)

    @property
    def _has_phases(self) -> bool:
        """Whether columns are picked out of the scratch row with shuffles."""
        return 1 < self.window.strides[-1] <= _MAX_PHASES and not self.builder.is_grid

    @property
    def initial(self) -> Expr:
        if self.anchor.op_type != "MaxPool":
            return tirx.const(0, self.dtype)
        return tirx.const(-np.inf if "float" in self.dtype else int(np.iinfo(self.dtype).min), self.dtype)

    def emit(self, work: int) -> None:
        batch, channels = self.group.types[self.anchor.inputs[0]].shape[:2]
        *outer, columns = self.window.outputs
        run = 1  # of more than one, the last overlaps the one before it
        if not self.builder.is_grid:
            run = max(min(least_of(columns), _longest_run(self.window)), 1)
        step = self.window.strides[-1]
        width = (run - 1) * step + (self.window.kernel[-1] - 1) * self.window.dilations[-1] + 1

        def row(index: Index) -> None:
            *place, piece = index
            first = self.builder.bind(tirx.min(piece * run, columns - run))
            left = self.builder.bind(first * step - self.window.begins[-1])
            scratch = self.builder.local(width + (step * self.lanes if self._has_phases else 0), self.dtype, "row")
            self._combine_rows(scratch, width, place, left)
            column = self._columns(scratch, width)
            rows = self.counted(range(len(outer)), place[2:])
            self._combine_columns(run, column, lambda i, total: self._store((*place, first + i), total, rows))

        parallel_nest(self.builder, [batch, channels, *outer, -(-columns // run)], work, row)

    def _combine_rows(self, scratch: Buffer, width: int, place: list[Expr], left: Expr) -> None:
        """scratch[j] = the window's elements of column left + j, combined; the initial value outside of the operand."""
        builder, window = self.builder, self.window
        columns = window.inputs[-1]
        rank = len(window.inputs) - 1
        begin = builder.bind(tirx.max(0 - left, 0)) if self.overhangs(rank) else 0
        end = builder.bind(tirx.max(tirx.min(columns - left, width), begin)) if self.overhangs(rank) else width
        if self.overhangs(rank):
            for low, high in ((0, begin), (end, width)):
                with builder.loop(high - low) as j:
                    builder.store(scratch, low + j, self.initial)
        rows = window.kernel[:-1]
        corners = [builder.bind(o * s - b) for o, s, b in zip(place[2:], window.strides, window.begins, strict=False)]
        if prod(rows) > _MAX_TERMS:
            self._combine_one_by_one(scratch, begin, end, place, corners, left)
            return
        taps = list(product(*(range(k) for k in rows)))
        inside = [self._inside(corners, tap) for tap in (taps[0], taps[-1])]
        everything = tirx.all(*inside[0], *inside[1]) if any(self.overhangs(d) for d in range(rank)) else None
        if everything is None:
            self._combine_taps(scratch, begin, end, place, corners, left, taps)
            return
        with builder.when(everything):
            self._combine_taps(scratch, begin, end, place, corners, left, taps)
        with builder.when(tirx.Not(everything)):
            self._combine_one_by_one(scratch, begin, end, place, corners, left)

    def _combine_one_by_one(
        self, scratch: Buffer, begin: Expr, end: Expr, place: list[Expr], corners: list[Expr], left: Expr
    ) -> None:
        """Combine those rows that are in the operand, if any, one after the other."""
        builder, rows = self.builder, self.window.kernel[:-1]

        def combine(tap: Index) -> None:
            with builder.when(tirx.all(*self._inside(corners, tap))):
                self._combine_taps(scratch, begin, end, place, corners, left, [tap], onto=True)

        builder.dynamic_vector_loop(begin, end, self.lanes, lambda j: builder.store(scratch, j, self.initial))
        if prod(rows) <= _MAX_BRANCHES:
            for tap in product(*(range(k) for k in rows)):
                combine(tap)
            return
        with builder.loop(prod(rows), name="tap") as number:
            combine(tuple(builder.bind(i) for i in unravel(number, rows)))

    def _combine_taps(
        self,
        scratch: Buffer,
        begin: Expr,
        end: Expr,
        place: list[Expr],
        corners: list[Expr],
        left: Expr,
        taps: list[Index],
        onto: bool = False,
    ) -> None:
        """Combine rows that are all in the operand: into the scratch row, or `onto` what it holds."""
        builder, window = self.builder, self.window
        kind = self.group.types[self.anchor.inputs[0]]
        source = source_of(self.group, builder, self.anchor.inputs[0])
        bases = []
        for tap in taps:
            at = [c + t * d for c, t, d in zip(corners, tap, window.dilations, strict=False)]
            row = row_major((*place[:2], *at), kind.shape[:-1])
            bases.append(builder.bind(row * window.inputs[-1] + left))

        def element(j: Expr) -> None:
            total = scratch[j] if onto else None
            for base in bases:
                x = self.mapped(source[base + j])
                total = x if total is None else builder.name(self.merge(total, x))
            builder.store(scratch, j, total)

        if isinstance(end, int):
            (builder.vector_loop if onto else partial(cover, builder))(end, self.lanes, element)
        else:
            builder.dynamic_vector_loop(begin, end, self.lanes, element)

    def _columns(self, scratch: Buffer, width: int) -> Callable[[Expr, Expr], Expr]:
        """How to read scratch[i * stride + offset] for neighbouring i: from one row for each phase of the stride."""
        builder, step = self.builder, self.window.strides[-1]
        if not self._has_phases:
            return lambda i, offset: scratch[i * step + offset]
        vectors = -(-width // (step * self.lanes))
        length = vectors * self.lanes
        phases = builder.local(step * length, self.dtype, "phases")
        with builder.loop(vectors, name="v") as v:
            loaded = [scratch[tirx.Ramp((v * step + part) * self.lanes, 1, self.lanes)] for part in range(step)]
            for phase in range(step):
                picked = tirx.Shuffle(loaded, [lane * step + phase for lane in range(self.lanes)])
                builder.store(phases, tirx.Ramp(v * self.lanes + phase * length, 1, self.lanes), picked)
        return lambda i, offset: phases[i + (offset % step) * length + offset // step]

    def _combine_columns(self, run: int, column: Callable[[Expr, Expr], Expr], store: Callable[[Expr, Expr], None]) -> None:
        """`store(i, total)` for each output i of a run, `total` being its columns combined; of the last ones maybe twice."""
        builder, kernel, dilation = self.builder, self.window.kernel[-1], self.window.dilations[-1]

        def at_once(i: Expr) -> None:
            total = column(i, 0)
            for k in range(1, kernel):
                total = builder.name(self.merge(total, column(i, k * dilation)))
            store(i, total)

        def in_turn(first: Expr, lanes: int) -> None:
            total = builder.local(lanes, self.dtype, "total")
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(total, lane, column(first + lane, 0))
            with builder.loop(kernel - 1, name="tap") as k, builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(total, lane, self.merge(total[lane], column(first + lane, (k + 1) * dilation)))
            with builder.loop(lanes, "vectorized", "lane") as lane:
                store(first + lane, total[lane])

        if kernel <= _MAX_TERMS:
            cover(builder, run, self.lanes, at_once)
            return
        lanes = min(self.lanes, 1 << (run.bit_length() - 1))
        with builder.loop(-(-run // lanes), name="v") as block:
            in_turn(builder.bind(tirx.min(block * lanes, run - lanes)), lanes)

    def _store(self, index: Index, total: Expr, rows: Expr) -> None:
        """Store the output at an index, whose elements have been combined."""
        count = rows * self.counted([len(self.window.inputs) - 1], index[-1:]) if self.anchor.op_type == "AveragePool" else 1
        store_epilogue(self.group, self.builder, self.anchor, index, self.finished(total, count))

    def finished(self, total: Expr, count: Expr) -> Expr:
        """The result of a window whose elements have been combined; an average divides by `count`."""
        if self.anchor.op_type == "AveragePool":
            total = total / (tirx.Cast(self.dtype, count) if not isinstance(count, int) else tirx.const(count, self.dtype))
        elif self.anchor.op_type == "LpPool" and (power := self.anchor.attribute("p", 2)) != 1:
            total = tirx.sqrt(total) if power == 2 else tirx.pow(total, tirx.const(1 / power, self.dtype))
        dtype = self.group.types[self.anchor.outputs[0]].dtype
        return total if dtype == self.dtype else tirx.Cast(dtype, total)

    def counted(self, dimensions: Sequence[int], place: Sequence[Expr]) -> Expr:
        """The number of the window's elements along some dimensions by which an average divides, at an output position."""
        window = self.window
        count: Expr = 1
        for d, o in zip(dimensions, place, strict=True):
            low, high = 0, window.inputs[d]
            if self.anchor.attribute("count_include_pad", 0):
                low, high = -window.begins[d], window.inputs[d] + self._end_padding(d)
            step, most = window.dilations[d], window.kernel[d] - 1
            if isinstance(window.outputs[d], Size):
                counts = set() if self.overhangs(d) else {most + 1}
            else:
                starts = np.arange(window.outputs[d]) * window.strides[d] - window.begins[d]
                first, last = np.maximum(-((starts - low) // step), 0), np.minimum((high - 1 - starts) // step, most)
                counts = set(np.unique(np.maximum(last - first + 1, 0)).tolist())
            if len(counts) == 1:
                count = count * counts.pop()
                continue
            start = o * window.strides[d] - window.begins[d]
            before, behind = tirx.floordiv(start - low, step), tirx.floordiv(high - 1 - start, step)
            count = count * tirx.max(tirx.min(behind, most) - tirx.max(0 - before, 0) + 1, 1)
        return count

    def _end_padding(self, d: int) -> int:
        window = self.window
        if self.anchor.attribute("auto_pad", "NOTSET") in ("NOTSET", ""):
            pads = self.anchor.attribute("pads")
            return int(pads[len(window.inputs) + d]) if pads else 0
        return max(self._last(d) - window.inputs[d], 0)

    def _last(self, d: int) -> int:
        """One past the last input position that a window reaches along a dimension."""
        window = self.window
        return (window.outputs[d] - 1) * window.strides[d] - window.begins[d] + (window.kernel[d] - 1) * window.dilations[d] + 1

    def overhangs(self, d: int) -> bool:
        """Whether some window reads padding along a dimension."""
        return self.window.begins[d] > 0 or greatest_of(self._last(d) - self.window.inputs[d]) > 0

    def _inside(self, corners: list[Expr], tap: Index) -> list[Expr]:
        """Conditions under which a row of the window is one of the operand."""
        at = [c + t * d for c, t, d in zip(corners, tap, self.window.dilations, strict=False)]
        return [tirx.And(a >= 0, a < extent) for a, extent in zip(at, self.window.inputs, strict=False)]

    def merge(self, a: Expr, b: Expr) -> Expr:
        return math.maximum(a, b) if self.anchor.op_type == "MaxPool" else a + b

    def mapped(self, x: Expr) -> Expr:
        value = x if str(x.ty) == self.dtype else self.builder.name(tirx.Cast(self.dtype, x))
        if self.anchor.op_type != "LpPool":
            return value
        power = self.anchor.attribute("p", 2)
        if power == 1:
            return tirx.abs(value)
        return reduce(lambda a, b: self.builder.name(a * b), [tirx.abs(value) if power % 2 else value] * power)
