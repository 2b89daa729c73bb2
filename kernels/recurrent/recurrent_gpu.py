"""GRU, LSTM and RNN on GPUs: the input projection, then all steps in one cooperative grid.

A block has some hidden units of a direction, whose weights it keeps in shared memory from the first step to the last (Diamos et
al.: Persistent RNNs: Stashing Recurrent Weights On-Chip, ICML 2016). It reads the state of all units, which others have written,
from L2, and all blocks meet after each stage of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.grids import BLOCK_THREADS
from ..groups.group import Group
from ..microkernels.register_tile import Tile
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish
from ..template.loops import bound_unravel
from .cells import HIDDEN, Stage
from .operands import PackGates, RecurrentOperands
from .products import GateTile, RowProduct, row_format
from .projection import project
from .recurrent import Recurrence, recurrence_of
from .stages import StagePlan

_SHARED_BYTES = 44 * 1024  # of a block, of 48 KiB: weights, rows of the state, and sums
_ROWS = 4  # of the batch that are multiplied at once
_LEAST_UNITS = 8  # of a block: with fewer it waits for others longer than it computes
_MOST_ARRIVALS = 2**31 - 1


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes recurrences of float32, or of narrower floats, in float32."""
    recurrence = recurrence_of(group, target, PersistentRecurrence)
    if isinstance(recurrence, Refusal):
        return recurrence
    operands = recurrence.operands
    if operands.dtype != "float32" or operands.is_quantized(operands.r) or operands.is_quantized(operands.w):
        return Refusal("blocks multiply float32")
    if not recurrence.projected_elements or not operands.inputs:
        return Refusal("has no steps, or nothing to compute")
    layout = recurrence.layout
    if max(layout.columns) > BLOCK_THREADS:
        return Refusal(f"{operands.hidden} hidden units are more than the blocks that run at once have threads for")
    if layout.blocks * (operands.steps + 1) * len(layout.columns) > _MOST_ARRIVALS:
        return Refusal("32 bits do not count how often blocks meet")
    if layout.state_bytes > _SHARED_BYTES:
        return Refusal(f"a block's shared memory does not hold the state of {operands.hidden} units")
    return recurrence.candidate()


@dataclass(frozen=True)
class Layout:
    """How hidden units are dealt to blocks: `units` each, `panels` blocks a direction; a stage has `columns` sums a row."""

    units: int
    panels: int
    blocks: int
    rows: int
    columns: tuple[int, ...]
    state_bytes: int  # of shared memory, beside the weights
    keeps_weights: bool


def layout_of(operands: RecurrentOperands, stages: tuple[Stage, ...], multiprocessors: int) -> Layout:
    """Few blocks, if their weights fit in shared memory; else as many as run at once."""
    hidden, rows, gates = operands.hidden, min(max(operands.batch, 1), _ROWS), [len(stage.gates) for stage in stages]
    unit_bytes = 4 * hidden * sum(gates)
    room = _SHARED_BYTES - 4 * rows * (hidden + BLOCK_THREADS)
    least = ceil(hidden / max(multiprocessors // operands.directions, 1))
    units = max(least, min(_LEAST_UNITS, room // max(unit_bytes, 1), hidden), 1)
    state_bytes = 4 * rows * (hidden + BLOCK_THREADS + max(gates) * units)
    keeps = units * unit_bytes + state_bytes <= _SHARED_BYTES
    panels = ceil(hidden / units)
    return Layout(units, panels, panels * operands.directions, rows, tuple(one * units for one in gates), state_bytes, keeps)


class PersistentRecurrence(Recurrence):
    """The kernel being built."""

    unit: Expr = 0  # that a thread computes

    @property
    def layout(self) -> Layout:
        return layout_of(self.operands, self.cell.stages, gpu_machine(self.target.level).multiprocessors)

    @property
    def gpu(self) -> GpuBuilder:
        assert isinstance(self.builder, GpuBuilder)
        return self.builder

    def build(self) -> BuiltKernel:
        operands, builder = self.operands, self.gpu
        counter = builder.workspace(1, "int32")
        self.projected = project(builder, operands, self.cell, self.target, counter)
        for name in dict.fromkeys(name for stage in self.cell.stages for name in stage.writes):
            self.states[name] = builder.workspace(self.size * (2 if name == HIDDEN else 1), operands.dtype)
        plans = [self._planned(stage) for stage in self.cell.stages]
        with builder.blocks(self.layout.blocks, BLOCK_THREADS) as (block, thread):
            direction, panel = bound_unravel(builder, block, (operands.directions, self.layout.panels))
            _Block(self, plans, counter, block, thread, direction, panel).emit()
        flops = 2 * self.projected_elements * (operands.inputs + operands.hidden)
        return finish("gpu_recurrent", builder, self.group, flops=flops, packed=operands.packed)

    def _planned(self, stage: Stage) -> StagePlan:
        operands, layout = self.operands, self.layout
        number_format = row_format(self.group, operands.x, operands.r, 1, self.target)
        rows = RowProduct(self.builder, number_format, self.rows, operands.hidden)
        pack = PackGates(self.cell.gates, stage.gates, layout.units)
        tiles = GateTile(Tile(layout.rows, len(stage.gates) * layout.units, 1), 1, layout.units, 0.0)
        return StagePlan(stage, rows, tiles, layout.panels, 0, operands.weights(operands.r, pack))

    def for_each_unit(self, row: object, body: Callable[[Expr], None]) -> None:
        """A thread has one unit of a row."""
        body(self.unit)


@dataclass
class _Block:
    """What a block does. Shared arrays: `state` [rows, hidden], `partial` [threads, rows], `totals` [rows, columns]."""

    recurrence: PersistentRecurrence
    plans: list[StagePlan]
    counter: Buffer
    block: Expr
    thread: Expr
    direction: Expr
    panel: Expr

    def emit(self) -> None:
        recurrence, builder, layout = self.recurrence, self.recurrence.gpu, self.recurrence.layout
        operands, hidden = recurrence.operands, recurrence.operands.hidden
        weights = [self._weights(plan) for plan in self.plans]
        state = builder.shared(layout.rows * hidden, "float32", "state")
        partial = builder.shared(BLOCK_THREADS * layout.rows, "float32", "partial")
        totals = builder.shared(layout.rows * max(layout.columns), "float32", "totals")
        for name, source in zip(recurrence.cell.states, operands.initial, strict=False):
            with self._each_unit() as (ours, theirs):
                value = operands.load(source, theirs) if source else operands.zero()
                builder.store(recurrence.states[name], ours, value)
        builder.grid_barrier(self.counter, layout.blocks)
        with builder.loop(operands.steps, name="step") as step:
            for number, (plan, kept) in enumerate(zip(self.plans, weights, strict=True)):
                self._emit_stage(plan, kept, step, (state, partial, totals))
                meeting = step * len(self.plans) + (number + 2)
                builder.grid_barrier(self.counter, meeting * layout.blocks)
        for name, out in zip(recurrence.cell.states, operands.outputs[1:], strict=False):
            if out:
                begin = (operands.steps % 2) * recurrence.size if name == HIDDEN else 0
                with self._each_unit() as (ours, theirs):
                    operands.store(out, theirs, recurrence.states[name][begin + ours])

    def _weights(self, plan: StagePlan) -> Callable[[Expr], Expr]:
        """Number i of the block's weights of a stage: from shared memory, if they are kept there."""
        recurrence, builder = self.recurrence, self.recurrence.gpu
        count = recurrence.operands.hidden * len(plan.stage.gates) * recurrence.layout.units
        begin = builder.bind(self.block * count)

        def given(i: Expr) -> Expr:
            value = plan.weights[begin + i]
            return value if str(plan.weights.dtype) == "float32" else tirx.Cast("float32", value)

        if not recurrence.layout.keeps_weights:
            return given
        kept = builder.shared(count, "float32", "weights")
        with self._each(count) as i:
            builder.store(kept, i, given(i))
        return lambda i: kept[i]

    @contextmanager
    def _each(self, count: int) -> Iterator[Expr]:
        """Each number below `count`, dealt to the threads."""
        builder = self.recurrence.gpu
        with builder.loop(ceil(count / BLOCK_THREADS), name="turn") as turn:
            number = builder.bind(turn * BLOCK_THREADS + self.thread)
            with builder.when(number < count):
                yield number

    @contextmanager
    def _each_unit(self) -> Iterator[tuple[Expr, Expr]]:
        """Offsets, in the workspace and in the operand, of the block's hidden units of all rows."""
        recurrence, builder, layout = self.recurrence, self.recurrence.gpu, self.recurrence.layout
        operands = recurrence.operands
        with self._each(operands.batch * layout.units) as number:
            b, u = bound_unravel(builder, number, (operands.batch, layout.units))
            j = builder.bind(self.panel * layout.units + u)
            with builder.when(j < operands.hidden):
                ours = builder.bind((self.direction * operands.batch + b) * recurrence.pitch + j)
                yield ours, builder.bind(operands.state_offset(self.direction, b) + j)

    def _emit_stage(
        self, plan: StagePlan, weights: Callable[[Expr], Expr], step: Expr, arrays: tuple[Buffer, Buffer, Buffer]
    ) -> None:
        recurrence, builder, layout = self.recurrence, self.recurrence.gpu, self.recurrence.layout
        operands, (state, partial, totals) = recurrence.operands, arrays
        hidden, columns = operands.hidden, len(plan.stage.gates) * layout.units
        place = recurrence.place(self.direction, step, self.panel)
        source, origin = recurrence.states[plan.stage.reads], place.old[plan.stage.reads]
        with builder.loop(ceil(operands.batch / layout.rows), name="rows") as tile:
            first = builder.bind(tile * layout.rows)
            with self._each(layout.rows * hidden) as i:
                row, k = bound_unravel(builder, i, (layout.rows, hidden))
                b = builder.bind(tirx.min(first + row, operands.batch - 1))
                builder.store(state, i, source[origin + b * recurrence.pitch + k])
            builder.barrier()
            slices = self._sum_slices(columns, weights, state, partial)
            builder.barrier()
            with self._each(layout.rows * columns) as i:
                total = builder.local(1, "float32", "total")
                builder.store(total, 0, tirx.const(0, "float32"))
                with builder.loop(slices, name="slice") as s:
                    builder.store(total, 0, total[0] + partial[s * (layout.rows * columns) + i])
                builder.store(totals, i, total[0])
            builder.barrier()
            with self._each(layout.rows * layout.units) as i:
                row, u = bound_unravel(builder, i, (layout.rows, layout.units))
                b, j = builder.bind(first + row), builder.bind(self.panel * layout.units + u)
                with builder.when(tirx.And(b < operands.batch, j < hidden)):
                    recurrence.unit = j
                    recurrence.emit_row(plan, place, b, (totals,), builder.bind(row * columns - self.panel * layout.units))

    def _sum_slices(self, columns: int, weights: Callable[[Expr], Expr], state: Buffer, partial: Buffer) -> int:
        """Each column's sums over slices of k, a thread each; how many slices there are."""
        builder, rows, hidden = self.recurrence.gpu, self.recurrence.layout.rows, self.recurrence.operands.hidden
        slices = min(BLOCK_THREADS // columns, hidden)
        length = ceil(hidden / slices)
        column, part = builder.bind(tirx.floormod(self.thread, columns)), builder.bind(tirx.floordiv(self.thread, columns))
        with builder.when(part < slices):
            sums = builder.local(rows, "float32", "sums")
            for row in range(rows):
                builder.store(sums, row, tirx.const(0, "float32"))
            with builder.loop(length, name="k") as i:
                k = builder.bind(part * length + i)
                with builder.when(k < hidden):
                    weight = builder.name(weights(k * columns + column))
                    for row in range(rows):
                        builder.store(sums, row, sums[row] + weight * state[row * hidden + k])
            for row in range(rows):
                builder.store(partial, (part * rows + row) * columns + column, sums[row])
        return slices
