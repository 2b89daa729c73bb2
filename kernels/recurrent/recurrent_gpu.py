"""GRU, LSTM and RNN on GPUs: the input projection and all steps of all directions in one cooperative grid.

A block has some hidden units of a direction. First it computes their input projection of all steps, then the steps, for which it
keeps their weights in shared memory (Diamos et al.: Persistent RNNs: Stashing Recurrent Weights On-Chip, ICML 2016). It reads the
state of all units, which others have written, from L2: between two stages of steps all blocks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import ClassVar

from tvm import tirx

from ...runtime.hardware.gpu import GpuMachine, gpu_machine
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
from .projection import bias_of_share
from .recurrent import Place, Recurrence, recurrence_of
from .stages import StagePlan

_MOST_BYTES = 227 * 1024  # of a block's shared memory, where the GPU has as much
_STATE_ROWS = 4  # of the batch that are multiplied at once by recurrent weights, and of all steps by those of the inputs
_INPUT_ROWS = 16
_INPUT_DEPTH = 256  # of these rows in shared memory at a time
_LEAST_UNITS = 8  # of a block: with fewer it waits for others longer than it computes


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
    if layout.units * operands.gates > BLOCK_THREADS:
        return Refusal(f"{operands.hidden} hidden units are more than the blocks that run at once have threads for")
    if layout.shared_bytes > _block_bytes(recurrence.machine):
        return Refusal(f"a block's shared memory does not hold the state of {operands.hidden} units")
    return recurrence.candidate()


@dataclass(frozen=True)
class Layout:
    """How hidden units are dealt to blocks, and where arrays of float32 lie in a block's shared memory.

    `units` are those of a block, `panels` the blocks of a direction. Of the state `rows` of all units are there at a time, and of
    the inputs `input_rows` with `input_depth` numbers each, in the same array at `loaded`. Behind it lie, at `partial`, sums over
    slices of k [slice, row, column], at `totals` [row, column], and at `weights` those that are kept: with `keeps_recurrent` all
    of the recurrent ones, and before them in the same place, with `keeps_input`, those of the inputs.
    """

    units: int
    panels: int
    rows: int
    input_rows: int
    input_depth: int
    partial: int
    totals: int
    weights: int
    elements: int
    keeps_recurrent: bool
    keeps_input: bool
    loaded: ClassVar[int] = 0

    @property
    def shared_bytes(self) -> int:
        return 4 * self.elements


def layout_of(operands: RecurrentOperands, machine: GpuMachine) -> Layout:
    """Few blocks, if their weights fit in shared memory; else as many as run at once on the smallest GPU of the architecture. On
    a large one, if a block has too few threads for so many units, or if only so many hold the weights and the GPUs are alike."""
    portable, large = (_layout(operands, machine, count) for count in (machine.fewest, machine.multiprocessors))
    if portable.units * operands.gates > BLOCK_THREADS:
        return large
    are_alike = machine.multiprocessors < 2 * machine.fewest
    return large if are_alike and large.keeps_recurrent and not portable.keeps_recurrent else portable


def _layout(operands: RecurrentOperands, machine: GpuMachine, multiprocessors: int) -> Layout:
    """At most a block for each of so many multiprocessors."""
    hidden, gates = operands.hidden, operands.gates
    rows = min(operands.batch, _STATE_ROWS)
    input_rows, input_depth = min(operands.batch * operands.steps, _INPUT_ROWS), min(operands.inputs, _INPUT_DEPTH)
    partial = max(rows * hidden, input_rows * input_depth)
    totals = partial + BLOCK_THREADS * max(rows, input_rows)
    room = _block_bytes(machine) // 4 - totals
    least = ceil(hidden / max(multiprocessors // operands.directions, 1))
    unit = max(rows, input_rows) * gates  # totals of a unit
    units = max(least, min(_LEAST_UNITS, room // (unit + gates * hidden), hidden), 1)
    weights = totals + unit * units
    keeps_recurrent, keeps_input = (
        weights + units * gates * depth <= _block_bytes(machine) // 4 for depth in (hidden, operands.inputs)
    )
    kept = max(hidden if keeps_recurrent else 0, operands.inputs if keeps_input else 0)
    sizes = units, ceil(hidden / units), rows, input_rows, input_depth
    return Layout(*sizes, partial, totals, weights, weights + units * gates * kept, keeps_recurrent, keeps_input)


def _block_bytes(machine: GpuMachine) -> int:
    return min(machine.block_bytes, _MOST_BYTES)


class PersistentRecurrence(Recurrence):
    """The kernel being built."""

    unit: Expr = 0  # that a thread computes

    @property
    def machine(self) -> GpuMachine:
        return gpu_machine(self.target.level)

    @property
    def layout(self) -> Layout:
        return layout_of(self.operands, self.machine)

    @property
    def gpu(self) -> GpuBuilder:
        assert isinstance(self.builder, GpuBuilder)
        return self.builder

    def build(self) -> BuiltKernel:
        operands, builder, layout = self.operands, self.gpu, self.layout
        self.projected = builder.workspace(self.projected_elements, operands.dtype)
        for name in dict.fromkeys(name for stage in self.cell.stages for name in stage.writes):
            self.states[name] = builder.workspace(self.size * (2 if name == HIDDEN else 1), operands.dtype)
        plans = [self._planned(stage) for stage in self.cell.stages]
        all_gates = tuple(range(operands.gates))
        inputs = operands.weights(operands.w, PackGates(operands.gates, all_gates, layout.units))
        with builder.blocks(layout.panels * operands.directions, BLOCK_THREADS) as (block, thread):
            direction, panel = bound_unravel(builder, block, (operands.directions, layout.panels))
            _Block(self, layout, plans, inputs, block, thread, direction, panel).emit()
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
    """What a block does."""

    recurrence: PersistentRecurrence
    layout: Layout
    plans: list[StagePlan]
    inputs: Buffer
    block: Expr
    thread: Expr
    direction: Expr
    panel: Expr
    shared: Buffer = None  # the arrays of Layout

    def emit(self) -> None:
        recurrence, builder, operands = self.recurrence, self.recurrence.gpu, self.recurrence.operands
        allocate = builder.shared if recurrence.target.kind == "rocm" else builder.dynamic_shared
        self.shared = allocate(self.layout.elements, "float32", "arrays")
        self._project()
        for name, source in zip(recurrence.cell.states, operands.initial, strict=False):
            with self._each_unit() as (ours, theirs):
                builder.store(recurrence.states[name], ours, operands.load(source, theirs) if source else operands.zero())
        begins = accumulate((self.layout.units * len(plan.stage.gates) * operands.hidden for plan in self.plans), initial=0)
        weights = [
            self._weights(plan.weights, operands.hidden, len(plan.stage.gates), begin if self.layout.keeps_recurrent else None)
            for plan, begin in zip(self.plans, begins, strict=False)
        ]
        builder.barrier()
        with builder.loop(operands.steps, name="step") as step:
            for number, (plan, kept) in enumerate(zip(self.plans, weights, strict=True)):
                self._emit_stage(plan, kept, step)
                if number + 1 < len(self.plans):
                    builder.grid_barrier()
            if operands.steps > 1:
                with builder.when(step < operands.steps - 1):
                    builder.grid_barrier()
        builder.barrier()
        for name, out in zip(recurrence.cell.states, operands.outputs[1:], strict=False):
            if out:
                begin = (operands.steps % 2) * recurrence.size if name == HIDDEN else 0
                with self._each_unit() as (ours, theirs):
                    operands.store(out, theirs, recurrence.states[name][begin + ours])

    def _project(self) -> None:
        """The inputs' share of the block's units in all steps, which no other block reads."""
        recurrence, builder, layout, operands = self.recurrence, self.recurrence.gpu, self.layout, self.recurrence.operands
        gates, count, rows = operands.gates, operands.steps * operands.batch, layout.input_rows
        columns = gates * layout.units
        weights = self._weights(self.inputs, operands.inputs, gates, 0 if layout.keeps_input else None)
        with builder.loop(ceil(count / rows), name="rows") as tile:
            first = builder.bind(tile * rows)

            def element(row: Expr, k: Expr) -> Expr:
                return operands.load(operands.x, tirx.min(first + row, count - 1) * operands.inputs + k)

            self._multiply(rows, operands.inputs, layout.input_depth, columns, element, weights)
            with self._each(rows * columns) as i:
                row, gate, u = bound_unravel(builder, i, (rows, gates, layout.units))
                m, j = builder.bind(first + row), builder.bind(self.panel * layout.units + u)
                with builder.when(tirx.And(m < count, j < operands.hidden)):
                    column = builder.bind(gate * operands.hidden + j)
                    total = self.shared[layout.totals + i]
                    if operands.bias:
                        total = total + bias_of_share(operands, recurrence.cell, self.direction, column)
                    place = (self.direction * count + m) * (gates * operands.hidden) + column
                    builder.store(recurrence.projected, place, total)

    def _weights(self, packed: Buffer, depth: int, gates: int, begin: int | None) -> Callable[[Expr], Expr]:
        """Number i of the block's weights [depth, gate, unit]: of shared memory, if they are kept there from `begin` on."""
        builder, layout = self.recurrence.gpu, self.layout
        count = depth * gates * layout.units
        origin = builder.bind(self.block * count)

        def given(i: Expr) -> Expr:
            value = packed[origin + i]
            return value if str(packed.dtype) == "float32" else tirx.Cast("float32", value)

        if begin is None:
            return given
        builder.barrier()  # what lay there before has been read
        with self._each(count) as i:
            builder.store(self.shared, layout.weights + begin + i, given(i))
        return lambda i: self.shared[layout.weights + begin + i]

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
        recurrence, builder, layout = self.recurrence, self.recurrence.gpu, self.layout
        operands = recurrence.operands
        with self._each(operands.batch * layout.units) as number:
            b, u = bound_unravel(builder, number, (operands.batch, layout.units))
            j = builder.bind(self.panel * layout.units + u)
            with builder.when(j < operands.hidden):
                ours = builder.bind((self.direction * operands.batch + b) * recurrence.pitch + j)
                yield ours, builder.bind(operands.state_offset(self.direction, b) + j)

    def _emit_stage(self, plan: StagePlan, weights: Callable[[Expr], Expr], step: Expr) -> None:
        recurrence, builder, layout = self.recurrence, self.recurrence.gpu, self.layout
        operands, columns = recurrence.operands, len(plan.stage.gates) * layout.units
        place = recurrence.place(self.direction, step, self.panel)
        with builder.loop(ceil(operands.batch / layout.rows), name="rows") as tile:
            first = builder.bind(tile * layout.rows)
            element = self._state_element(plan, place, step, first)
            self._multiply(layout.rows, operands.hidden, operands.hidden, columns, element, weights)
            with self._each(layout.rows * layout.units) as i:
                row, u = bound_unravel(builder, i, (layout.rows, layout.units))
                b, j = builder.bind(first + row), builder.bind(self.panel * layout.units + u)
                with builder.when(tirx.And(b < operands.batch, j < operands.hidden)):
                    recurrence.unit = j
                    at = builder.bind(layout.totals + row * columns - self.panel * layout.units)
                    recurrence.emit_row(plan, place, b, (self.shared,), at)

    def _state_element(self, plan: StagePlan, place: Place, step: Expr, first: Expr) -> Callable[[Expr, Expr], Expr]:
        """Elements of the state that a stage reads. What it is at first is read where it is given: no block waits for it."""
        recurrence, operands, name = self.recurrence, self.recurrence.operands, plan.stage.reads
        source, origin = recurrence.states[name], place.old[name]
        builder = recurrence.gpu

        def element(row: Expr, k: Expr) -> Expr:
            b = builder.bind(tirx.min(first + row, operands.batch - 1))
            if name != HIDDEN:
                return source[origin + b * recurrence.pitch + k]
            value, given = builder.local(1, "float32", "value"), operands.initial[0]
            with builder.when(step > 0):
                builder.store(value, 0, source[origin + b * recurrence.pitch + k])
            with builder.when(tirx.EQ(step, 0)):
                initial = operands.load(given, operands.state_offset(self.direction, b) + k) if given else operands.zero()
                builder.store(value, 0, initial)
            return value[0]

        return element

    def _multiply(
        self,
        rows: int,
        depth: int,
        most: int,
        columns: int,
        element: Callable[[Expr, Expr], Expr],
        weights: Callable[[Expr], Expr],
    ) -> None:
        """Totals of `rows` times weights [depth, columns], of which `most` numbers of each row are in shared memory at a time.

        A thread has a column of a slice of k. Slices are added in their order, so that sums are the same in every run.
        """
        builder, layout, shared = self.recurrence.gpu, self.layout, self.shared
        slices = min(BLOCK_THREADS // columns, most)
        column, part = builder.bind(tirx.floormod(self.thread, columns)), builder.bind(tirx.floordiv(self.thread, columns))
        sums = builder.local(rows, "float32", "sums")
        for row in range(rows):
            builder.store(sums, row, tirx.const(0, "float32"))
        with builder.loop(ceil(depth / most), name="piece") as piece:
            begin = builder.bind(piece * most)
            builder.barrier()  # what lay there before has been read
            with self._each(rows * most) as i:
                row, k = bound_unravel(builder, i, (rows, most))
                with builder.when(begin + k < depth):
                    builder.store(shared, layout.loaded + i, element(row, builder.bind(begin + k)))
            builder.barrier()
            length = ceil(most / slices)
            with builder.when(part < slices), builder.loop(length, name="k") as i:
                k = builder.bind(part * length + i)
                with builder.when(tirx.And(k < most, begin + k < depth)):
                    weight = builder.name(weights((begin + k) * columns + column))
                    for row in range(rows):
                        builder.store(sums, row, sums[row] + weight * shared[layout.loaded + row * most + k])
        with builder.when(part < slices):
            for row in range(rows):
                builder.store(shared, layout.partial + (part * rows + row) * columns + column, sums[row])
        builder.barrier()
        with self._each(rows * columns) as i:
            total = builder.local(1, "float32", "total")
            builder.store(total, 0, tirx.const(0, "float32"))
            with builder.loop(slices, name="slice") as s:
                builder.store(total, 0, total[0] + shared[layout.partial + s * (rows * columns) + i])
            builder.store(shared, layout.totals + i, total[0])
        builder.barrier()
