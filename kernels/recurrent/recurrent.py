"""GRU, LSTM and RNN: the input projection of all steps in one product, then the steps, with the gates in the epilogue.

What differs between the three is data (cells.py). R is packed so that one panel has the columns of all gates of the same hidden
units: the epilogue of a register tile computes those units' new state. Directions run on threads of their own; where there are
more threads than directions, each step deals its panels to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product as nest
from math import ceil, prod
from typing import TypeVar

from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.precision import LONGEST_SUM
from ...runtime.symbolic.sizes import greatest_of, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..expressions import pointwise
from ..groups.group import Group, Op
from ..microkernels.amx_blocks import tile_chunks
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import BF16_TILES, U8_TILES, tile_unit
from ..microkernels.packed_gemm import Scratch
from ..microkernels.register_tile import sum_tile
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import bound_unravel, sweep
from .cells import HIDDEN, Activation, Cell, activations_of, cell_of
from .estimate import recurrence_estimate
from .operands import RecurrentOperands, order_obstacle
from .products import Element, RowProduct, pitch_of
from .projection import project
from .quantized_rows import ByteProduct
from .stages import StagePlan, plan_stage

OPERATORS = frozenset(["GRU", "LSTM", "RNN"])
_TYPES = ("float32", "float64", "float16", "bfloat16")
_WORK_PER_CYCLE = 0.25  # scalar operations a cycle: a step of less than 9 us is not dealt to threads, which share states
_AHEAD_BYTES = 16 << 10  # prefetch distance in weights that exceed L2
_MAX_ELEMENTS = 2**31 - 1
_Kind = TypeVar("_Kind", bound="Recurrence")


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one GRU, LSTM or RNN of any attributes."""
    recurrence = recurrence_of(group, target, Recurrence)
    return recurrence if isinstance(recurrence, Refusal) else recurrence.candidate()


def recurrence_of(group: Group, target: Target, kind: type[_Kind]) -> _Kind | Refusal:
    """The kernel to be built of a group that is one recurrent operator, and what orders its inputs and its sequence otherwise."""
    op = next((one for one in group.ops if one.op_type in OPERATORS), None)
    if op is None:
        return Refusal("is no GRU, LSTM or RNN")
    if reason := order_obstacle(group, op):
        return Refusal(reason)
    if (dtype := group.types[op.inputs[0]].dtype) not in _TYPES:
        return Refusal(f"no recurrence of {dtype}")
    if (fault := _bytes_fault(group, op)) is not None:
        return fault
    cell = cell_of(op)
    directions, expected = group.types[op.inputs[1]].shape[0], 2 if op.attribute("direction") == "bidirectional" else 1
    if directions != expected:
        return Refusal(f"weights of {directions} directions for {expected}")
    activations = activations_of(op, cell, directions)
    if isinstance(activations, str):
        return Refusal(activations)
    recurrence = kind(group, op, cell, activations, target)
    if greatest_of(recurrence.projected_elements) > _MAX_ELEMENTS:
        return Refusal("the input's share has more elements than 32-bit indices can reach")
    return recurrence


def _bytes_fault(group: Group, op: Op) -> Refusal | None:
    """Why no product is by those weights of the operator that lie as integers; None if all are."""
    for name in (one for one in op.inputs[1:3] if one in group.weights):
        kind, scaling = group.types[name], group.weights[name]
        scales = group.types[scaling.inputs[1]]
        if kind.dtype != "int8" or len(scaling.inputs) > 2 or str(scales) != str(TensorType((*kind.shape[:2], 1), "float32")):
            return Refusal(f"weights {kind} with scales {scales} are not int8 with a scale for each line")
        if group.types[op.inputs[0]].dtype != "float32":
            return Refusal("rows that are rounded to 8 bits are of float32")
        if kind.shape[2] > LONGEST_SUM:
            return Refusal(f"sums of {kind.shape[2]} products could pass 2^31")
    return None


@dataclass(frozen=True)
class Place:
    """A panel in a step of a direction. `old` and `new`: offsets of row 0 of the states that are read and written."""

    direction: Expr
    step: Expr
    panel: Expr
    old: dict[str, Expr]
    new: dict[str, Expr]


@dataclass(frozen=True)
class _Unit:
    """Hidden unit `j` of a row of the batch: the `Unit` that a cell's arithmetic sees.

    Offsets of the row's unit 0: `sums` in each of the finished tiles, `share` in the input projection, `line` in the states.
    `row` is its number over all directions.
    """

    recurrence: Recurrence
    plan: StagePlan
    place: Place
    activations: tuple[Activation, ...]
    finished: tuple[Buffer | Scratch, ...]
    sums: Expr
    share: Expr
    line: Expr
    row: Expr
    j: Expr = 0

    def projected(self, number: int) -> Expr:
        return self.recurrence.projected[self.share + number * self.recurrence.operands.hidden + self.j]

    def product(self, number: int) -> Expr:
        operands = self.recurrence.operands
        part, column = self.plan.place_of(number)
        of_gate = (self.place.direction * operands.gates + number) * operands.hidden + self.j
        value = self.plan.rows.finished(self.finished[part][self.sums + column + self.j], self.row, of_gate)
        if operands.bias and number in self.recurrence.cell.separate:
            value = value + operands.bias_of(self.place.direction, 1, number * operands.hidden + self.j)
        return value

    def gate(self, number: int) -> Expr:
        return self.projected(number) + self.product(number)

    def peephole(self, number: int) -> Expr:
        operands = self.recurrence.operands
        return operands.load(operands.peepholes, (self.place.direction * 3 + number) * operands.hidden + self.j)

    def state(self, name: str) -> Expr:
        return self.recurrence.states[name][self.place.old[name] + self.line + self.j]

    def activate(self, number: int, value: Expr, *, clipped: bool = True) -> Expr:
        operands = self.recurrence.operands
        if clipped and (bound := operands.op.attribute("clip")) is not None:
            clip = Op("Clip", ("x",), ("y",), {"min": -bound, "max": bound})
            value = pointwise.apply(clip, [self.name(value)], [operands.dtype], operands.dtype, self.name)
        return self.activations[number](self.name, operands.dtype, value, is_rough=self.plan.rows.is_rough)

    def name(self, value: Expr) -> Expr:
        return self.recurrence.builder.name(value)

    def one(self) -> Expr:
        return tirx.const(1, self.recurrence.operands.dtype)


class Recurrence:
    """The kernel being built.

    States in the workspace are [directions, batch, hidden], rows `pitch` elements apart; the hidden state is double-buffered.
    """

    def __init__(self, group: Group, op: Op, cell: Cell, activations: tuple[tuple[Activation, ...], ...], target: Target) -> None:
        self.group, self.cell, self.activations = group, cell, activations
        self.target = target
        self.builder = new_builder(target)
        self.operands = RecurrentOperands(group, op, self.builder)
        self.lanes = self.builder.lanes(self.operands.dtype)
        self.rows = self.operands.directions * self.operands.batch
        self.pitch = pitch_of(self.operands.hidden)
        self.size = self.rows * self.pitch
        self.projected_elements = self.operands.steps * self.rows * self.operands.hidden * cell.gates
        self.states: dict[str, Buffer] = {}
        self.projected: Buffer = None

    def candidate(self) -> Candidate:
        """What it would take, and what writes it."""
        return Candidate(
            recurrence_estimate(self.group, self.operands.op, self.cell, self.operands.directions, self.target), self.build
        )

    def build(self) -> BuiltKernel:
        operands, dtype = self.operands, self.operands.dtype
        if self.rows * operands.hidden:
            self.projected = project(self.builder, operands, self.cell, self.target)
            for name in dict.fromkeys(name for stage in self.cell.stages for name in stage.writes):
                self.states[name] = self.builder.workspace(self.size * (2 if name == HIDDEN else 1), dtype)
            product = U8_TILES if operands.is_quantized(operands.r) else BF16_TILES
            unit = tile_unit(self.builder, self.target, product) if self.target.has_tiles else None
            plans = [plan_stage(operands, self.cell, stage, unit, self.target) for stage in self.cell.stages]
            self._set_initial_states()
            self._emit_steps(plans)
            self._store_last_states()
        flops = 2 * hint_of(self.projected_elements) * (operands.inputs + operands.hidden)
        return finish("recurrent", self.builder, self.group, flops=flops, packed=operands.packed)

    def _set_initial_states(self) -> None:
        for name, source in zip(self.cell.states, self.operands.initial, strict=False):
            self._copy_state(self.states[name], source)

    def _copy_state(self, state: Buffer, source: str) -> None:
        """Copy an initial state to the workspace; zeros where the operator has none."""
        builder, operands = self.builder, self.operands

        def element(ours: Expr, theirs: Expr) -> None:
            builder.store(state, ours, operands.load(source, theirs) if source else operands.zero())

        self._for_each_element(element)

    def _store_last_states(self) -> None:
        """Store Y_h and Y_c."""
        for name, out in zip(self.cell.states, self.operands.outputs[1:], strict=False):
            if out:
                self._store_state(self.states[name], (self.operands.steps % 2) * self.size if name == HIDDEN else 0, out)

    def _store_state(self, state: Buffer, begin: int, out: str) -> None:
        self._for_each_element(lambda ours, theirs: self.operands.store(out, theirs, state[begin + ours]))

    def _for_each_element(self, body: Callable[[Expr, Expr], None]) -> None:
        """`body(offset in the workspace, offset in the operand)` for every hidden unit of a state."""
        builder, operands = self.builder, self.operands
        with builder.loop(operands.directions, name="d") as d, builder.loop(operands.batch, name="b") as b:
            ours = builder.bind((d * operands.batch + b) * self.pitch)
            theirs = builder.bind(operands.state_offset(d, b))
            builder.vector_loop(operands.hidden, self.lanes, lambda j: body(ours + j, theirs + j))

    def _emit_steps(self, plans: list[StagePlan]) -> None:
        """All steps: a direction a thread, or, with more threads than directions, each stage's panels dealt to all threads."""
        builder, operands = self.builder, self.operands
        work = [int(plan.cycles * _WORK_PER_CYCLE) for plan in plans]
        if builder.threads_for(sum(work) * operands.directions) <= operands.directions:
            with (
                self._chunks(plans, operands.directions, sum(work) * operands.steps) as (d, sums),
                builder.loop(operands.steps, name="step") as step,
            ):
                for plan in plans:
                    if plan.rows.rounds:
                        with builder.loop(operands.batch, name="b") as b:
                            self._round_state(plan, d, step, b)
                    with builder.loop(plan.panels, name="panel") as number:
                        # Every second step walks the panels backwards: of weights beyond L2, those read last are still there.
                        back = tirx.Select(tirx.floormod(step, 2) > 0, plan.panels - 1 - number, number)
                        panel = builder.bind(back) if plan.tiled else number
                        self._emit_panel(plan, d, step, panel, sums)
            return
        with builder.loop(operands.steps, name="step") as step:
            for plan, share in zip(plans, work, strict=True):
                if plan.rows.rounds:
                    with builder.chunks(self.rows, self.rows * operands.hidden // 2) as row:
                        d, b = bound_unravel(builder, row, (operands.directions, operands.batch))
                        self._round_state(plan, d, step, b)
                blocks = ceil(operands.batch / plan.tiles.tile.rows) if builder.is_grid else 1
                extents = operands.directions, plan.panels, blocks
                with self._chunks([plan], prod(extents), share * operands.directions) as (chunk, sums):
                    d, panel, rows = bound_unravel(builder, chunk, extents)
                    self._emit_panel(plan, d, step, panel, sums, rows if builder.is_grid else None)

    @contextmanager
    def _chunks(self, plans: list[StagePlan], extent: int, work: int) -> Iterator[tuple[Expr, Scratch | None]]:
        """A loop dealt to the threads; yields an iteration, and the thread's scratch for sums if a stage goes by AMX."""
        units = [plan.tiled.unit for plan in plans if plan.tiled is not None]
        if not units:
            with self.builder.chunks(extent, work) as chunk:
                yield chunk, None
            return
        parts = max(plan.tiles.parts for plan in plans)
        with tile_chunks(self.builder, units[0], extent, work, parts) as (chunk, sums):
            yield chunk, sums

    def _round_state(self, plan: StagePlan, direction: Expr, step: Expr, b: Expr) -> None:
        """Round a row of the state that the stage reads, as its format needs."""
        place = self.place(direction, step, 0)
        plan.rows.round_row(direction * self.operands.batch + b, self._row_of(plan, place)(b))

    def _row_of(self, plan: StagePlan, place: Place) -> Callable[[Expr], Element]:
        """Rows of the state that the stage reads, as functions of k."""
        source, origin = self.states[plan.stage.reads], place.old[plan.stage.reads]

        def row(b: Expr) -> Element:
            return lambda k: source[origin + b * self.pitch + k]

        return row

    def _emit_panel(
        self, plan: StagePlan, direction: Expr, step: Expr, panel: Expr, sums: Scratch | None, only: Expr | None = None
    ) -> None:
        """Products and epilogue of one panel: new states of its hidden units, for all rows of the batch or for block `only`."""
        builder, operands, tile = self.builder, self.operands, plan.tiles.tile
        place = self.place(direction, step, panel)
        with builder.loop(ceil(operands.batch / tile.rows) if only is None else 1, name="rows") as block:
            begin = builder.bind((block if only is None else only) * tile.rows)
            start = begin if plan.tiled else builder.bind(tirx.min(begin, operands.batch - tile.rows))
            if plan.prefetches_projection(self.projected_elements * (builder.vector_bytes // self.lanes)) and not builder.is_grid:
                self._prefetch_projection(plan, place, start)
            finished = tuple(self._sum_part(plan, place, start, part, sums) for part in range(plan.tiles.parts))
            with builder.loop(builder.bind(tirx.min(tile.rows, operands.batch - begin)), name="row") as row:
                b = builder.bind(begin + row)
                at = builder.bind((b - start) * tile.columns - panel * plan.tiles.units)
                self.emit_row(plan, place, b, finished, at)

    def _prefetch_projection(self, plan: StagePlan, place: Place, start: Expr) -> None:
        """Prefetch a tile's input projection, which is on as many pages as the tile has rows."""
        builder = self.builder
        with builder.loop(plan.tiles.tile.rows, name="row") as row:
            share = builder.bind(self._share_of(place, self._time_of(place, start + row)[1], start + row))
            for gate, vector in nest(plan.stage.gates, range(0, plan.tiles.units, self.lanes)):
                column = gate * self.operands.hidden + place.panel * plan.tiles.units + vector
                builder.prefetch(self.projected[share + column])

    def _time_of(self, place: Place, b: Expr) -> tuple[Expr, Expr]:
        """The length of a row's sequence, and the element of it that the step computes."""
        length = self.builder.bind(self.operands.length_of(b))
        return length, self.builder.bind(self.operands.time_of(place.direction, place.step, length))

    def _share_of(self, place: Place, time: Expr, b: Expr) -> Expr:
        """Offset of a row's input projection."""
        operands = self.operands
        line = place.direction * (operands.steps * operands.batch) + operands.x_line(time, b)
        return line * self.cell.gates * operands.hidden

    def _sum_part(self, plan: StagePlan, place: Place, start: Expr, part: int, sums: Scratch | None) -> Buffer | Scratch:
        """The register tile of rows from `start` on by one part of a panel; by AMX a block in `sums`."""
        builder, operands, tile, rows = self.builder, self.operands, plan.tiles.tile, plan.rows
        if plan.tiled is not None and sums is not None:
            block = Scratch(sums.buffer, sums.base + part * (LINES * LINES))
            number = builder.bind(place.panel * plan.tiles.parts + part)
            plan.tiled.multiply(place.direction, tirx.floordiv(start, LINES), number, block)
            return block
        assert isinstance(rows, RowProduct | ByteProduct), "a stage on tiles has no place for its sums"
        home, state = builder.bind(place.direction * operands.batch), self._row_of(plan, place)
        panel = (place.direction * plan.panels + place.panel) * plan.tiles.parts + part
        first = builder.bind(panel * rows.steps * tile.columns)
        return sum_tile(
            builder,
            tile,
            rows.format,
            (rows.steps,),
            lambda row, ks: rows.factor(home + (start + row), ks[0], state(start + row)),
            lambda column, ks: rows.weight(plan.weights[first + ks[0] * tile.columns + column]),
            (lambda ks: self._prefetch_weights(plan, first, ks[0])) if plan.prefetches_weights and not builder.is_grid else None,
        )

    def _prefetch_weights(self, plan: StagePlan, first: Expr, k: Expr) -> None:
        """Prefetch weights of later k: hardware prefetches none of the next page before it is read."""
        tile = plan.tiles.tile
        ahead = k + max(_AHEAD_BYTES // (tile.columns * 4), 1)
        for vector in range(tile.vectors):
            self.builder.prefetch(plan.weights[first + ahead * tile.columns + vector * tile.lanes])

    def place(self, direction: Expr, step: Expr, panel: Expr) -> Place:
        builder, operands = self.builder, self.operands
        home = builder.bind(direction * (operands.batch * self.pitch))
        turn = builder.bind(tirx.floormod(step, 2) * self.size)
        old, new = dict.fromkeys(self.states, home), dict.fromkeys(self.states, home)
        old[HIDDEN], new[HIDDEN] = builder.bind(home + turn), builder.bind(home + self.size - turn)
        return Place(direction, step, panel, old, new)

    def emit_row(self, plan: StagePlan, place: Place, b: Expr, finished: tuple[Buffer | Scratch, ...], sums: Expr) -> None:
        """The epilogue of a row: new states of its units in a panel; beyond its sequence's length they stay, and Y is zero."""
        builder, operands = self.builder, self.operands
        length, time = self._time_of(place, b)
        share = builder.bind(self._share_of(place, time, b))
        y = builder.bind(operands.y_offset(place.direction, time, b))
        line, number = builder.bind(b * self.pitch), builder.bind(place.direction * operands.batch + b)
        row = _Unit(self, plan, place, self.activations[0], finished, sums, share, line, number)
        running = [place.step < length] if operands.lengths else []
        variants = tuple(dict.fromkeys(self.activations))  # distinct activations of the directions, in order
        for number, activations in enumerate(variants):
            chosen = [tirx.EQ(place.direction, number)] if len(variants) > 1 else []
            with self._where(*running, *chosen):
                self._emit_units(replace(row, activations=activations), y)
        if running and HIDDEN in plan.stage.writes:
            with self._where(place.step >= length):
                self._emit_idle(row, y)

    @contextmanager
    def _where(self, *conditions: Expr) -> Iterator[None]:
        with ExitStack() as guards:
            for condition in conditions:
                guards.enter_context(self.builder.when(condition))
            yield

    def _emit_units(self, row: _Unit, y: Expr) -> None:
        """Compute the new states of a row's units in a panel, and store them to Y, too."""

        def unit(j: Expr) -> None:
            values = {name: self.builder.name(value) for name, value in row.plan.stage.unit(replace(row, j=j)).items()}
            for name, value in values.items():
                self.builder.store(self.states[name], row.place.new[name] + row.line + j, value)
            if HIDDEN in values:
                self.operands.store(self.operands.outputs[0], y + j, values[HIDDEN])

        self.for_each_unit(row, unit)

    def _emit_idle(self, row: _Unit, y: Expr) -> None:
        """Copy the hidden state unchanged to the other buffer, and zeros to Y; states written in place stay as they are."""

        def unit(j: Expr) -> None:
            self.builder.store(self.states[HIDDEN], row.place.new[HIDDEN] + row.line + j, replace(row, j=j).state(HIDDEN))
            self.operands.store(self.operands.outputs[0], y + j, self.operands.zero())

        self.for_each_unit(row, unit)

    def for_each_unit(self, row: _Unit, body: Callable[[Expr], None]) -> None:
        """`body` for vectors of the units of the row's panel; ever shorter ones at the end of the last panel."""
        builder, columns, hidden = self.builder, row.plan.tiles.units, self.operands.hidden
        first = builder.bind(row.place.panel * columns)
        if hidden >= columns:
            with builder.when(first + columns <= hidden):
                sweep(builder, columns, self.lanes, lambda j: body(first + j))
        if rest := hidden % columns:
            with builder.when(first + columns > hidden):
                sweep(builder, rest, self.lanes, lambda j: body(first + j))
