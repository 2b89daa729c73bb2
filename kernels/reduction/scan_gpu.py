"""CumSum, and CumProd of integers, on a GPU: a block of threads for each line, whose threads have neighbours of it in turn.

Products of floats stay in order: a product of the numbers behind others may overflow where no product from the first one does.
"""

from __future__ import annotations

from math import prod

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..expressions import math
from ..groups.group import Group, literal_ints
from ..template.contract import BuiltKernel, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type
from .scan import SCANS
from .thread_block import SHORT_ROW, scanned_threads, threads_of_rows

_MANY_LINES = 1 << 14  # enough threads by themselves


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes long lines that are too few for a thread each."""
    (op,) = group.ops
    axes = literal_ints(group, op.inputs[1])
    kind = group.types[op.inputs[0]]
    if axes is None:
        return Refusal("the axis is known only to a run")
    if op.op_type == "CumProd" and np.dtype(kind.dtype).kind not in "iu":
        return Refusal("products of floats are multiplied in order, by one thread")
    shape = kind.shape or (1,)
    axis = axes[0] % len(shape)
    length, inner = shape[axis], prod(shape[axis + 1 :])
    lines = prod(shape[:axis]) * inner
    if length < SHORT_ROW or not 0 < lines < _MANY_LINES:
        return Refusal("a thread for each line does better")
    builder = new_builder(target)
    assert isinstance(builder, GpuBuilder)
    source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
    out = builder.parameter(op.outputs[0], kind.elements, kind.dtype)
    count, threads = threads_of_rows(builder, [kind.dtype] if inner == 1 else None, length)
    with builder.blocks(lines, threads) as (block, thread):
        first = builder.bind(tirx.floordiv(block, inner) * (length * inner) + tirx.floormod(block, inner))
        _Line(builder, group, source, out, first, length, inner, count, threads, thread).emit()
    return finish("gpu_scan", builder, group, flops=kind.elements)


class _Line:
    """One line of `length` numbers, `inner` apart; `count` neighbours are a thread's at a time."""

    def __init__(
        self,
        builder: GpuBuilder,
        group: Group,
        source: Buffer,
        out: Buffer,
        first: Expr,
        length: int,
        inner: int,
        count: int,
        threads: int,
        thread: Expr,
    ) -> None:
        (op,) = group.ops
        self.builder, self.source, self.out, self.first, self.inner = builder, source, out, first, inner
        self.runs, self.count, self.threads, self.thread = length // count, count, threads, thread
        self.dtype = str(source.dtype)
        self.working = accumulator_type(self.dtype)
        self.initial, self._operation = SCANS[op.op_type]
        self.is_exclusive, self.is_backwards = bool(op.attribute("exclusive", 0)), bool(op.attribute("reverse", 0))

    def emit(self) -> None:
        """Run after run of all threads; what came before is carried in a register of each."""
        builder = self.builder
        carried = builder.local(1, self.working, "carried")
        own = builder.local(self.count, self.working, "own")
        initial = tirx.const(self.initial, self.working)
        builder.store(carried, 0, initial)
        with builder.loop(-(-self.runs // self.threads), name="turn") as turn:
            run = builder.bind(turn * self.threads + self.thread)
            begin = builder.bind(self.first + (self.runs - 1 - run if self.is_backwards else run) * (self.count * self.inner))
            builder.store(own, self._last, initial)
            with builder.when(run < self.runs):
                self._scan_run(own, begin)
            sums = scanned_threads(builder, own[self._last], initial, self.thread, self.threads, self._combine)
            before = self._combine(carried[0], sums[0])
            builder.store(carried, 0, self._combine(carried[0], sums[1]))
            with builder.when(run < self.runs), builder.neighbours(self.count) as e:
                builder.store(self.out, begin + e, tirx.Cast(self.dtype, self._result(own, before, e)))
            builder.barrier()  # before the next turn overwrites the sums

    @property
    def _last(self) -> int:
        """Which of a run's numbers the scan comes to last."""
        return 0 if self.is_backwards else self.count - 1

    def _scan_run(self, own: Buffer, begin: Expr) -> None:
        """Load a run and scan it in place, in the order of the scan."""
        builder, count = self.builder, self.count
        with builder.neighbours(count) as e:
            builder.store(own, e, tirx.Cast(self.working, self.source[begin + e]))
        for i in range(1, count):
            at, before = (count - 1 - i, count - i) if self.is_backwards else (i, i - 1)
            builder.store(own, at, self._combine(own[before], own[at]))

    def _result(self, own: Buffer, before: Expr, e: Expr) -> Expr:
        """Number `e` of a run, with what came before the run."""
        if not self.is_exclusive:
            return self._combine(before, own[e])
        edge, step = (self.count - 1, 1) if self.is_backwards else (0, -1)
        if self.count == 1:
            return before
        other = own[tirx.min(tirx.max(e + step, 0), self.count - 1)]
        return tirx.Select(tirx.EQ(e, edge), before, self._combine(before, other))

    def _combine(self, a: Expr, b: Expr) -> Expr:
        return self.builder.name(math.wrapping(self._operation, a, b, widest=self.builder.integer_bits))
