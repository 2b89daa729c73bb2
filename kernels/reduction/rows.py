"""Groups of reductions over the same rows, with pointwise operators before, between and after them: one trip over memory.

A row is computed by one thread, in as many loops as there are reductions that depend on each other. Values that a later loop
reads again are kept in the output, if they are one, else in scratch of the thread, which stays in L1 or L2.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import Size, SizeLike, estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, broadcast_index, row_major
from ..codegen.work_stealing import Shares
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.pointwise import LoopBody, operator_body, pointwise_body, vector_steps
from ..cost.rows import MAX_INSTRUCTIONS, RowPass, row_cycles
from ..expressions import math
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder, pointwise_cost, same_place_operands
from ..template.loops import bound_unravel, nest
from ..template.values import GroupValues, Reader
from .reduction_loops import Block, Loop, block_slots
from .row_lowering import COMPOSITES, EXP, FOLDS
from .row_schedule import RowForm, row_form

SCRATCH_BYTES = 128 * 1024  # of a thread: half of a small L2
_LINE_BYTES = 64
_SHARE = 1.02  # of the time of a template for one operator; measured are 0.95 to 1.1 for normalizations with an epilogue
OPERATORS = frozenset(COMPOSITES)


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes reductions over the same trailing dimensions, with pointwise operators around them, of floats."""
    if target.is_gpu:
        return Refusal("a row would be the work of one thread")
    form = row_form(group)
    if isinstance(form, Refusal):
        return form
    if form.scratch_bytes > SCRATCH_BYTES:
        needs = f"{form.length} elements need {form.scratch_bytes // 1024} KiB of scratch"
        return Refusal(f"rows of {needs}, more than the {SCRATCH_BYTES // 1024} KiB that a thread keeps in cache")
    work = row_work(form)
    estimate = Estimate(
        row_form_cycles(form, target),
        work,
        unit="vector",
        is_parallel=hint_of(prod(form.outer)) > 1 and work >= parallel_work(target.machine),
        streamed_overlap=1 / max(form.loops, 1),
    )
    return Candidate(with_bytes(estimate, group), partial(_build, group, form, target, work), stored_runs=form.row[-1:])


def row_work(form: RowForm) -> int:
    """Scalar operations of all rows, by a rough count."""
    return hint_of(prod(form.outer) * form.length) * (pointwise_cost(form.group) + 2 * len(form.folds))


@estimating
def row_form_cycles(form: RowForm, target: Target) -> float:
    """Estimated cycles of one core for all rows of a form."""
    machine = target.machine.of_items(max(np.dtype(form.group.types[op.outputs[0]].dtype).itemsize for op in form.folds))
    *outer, last = form.row
    lanes, slots = block_slots(machine.lanes, last)
    steps = prod(outer) * vector_steps(last, lanes)
    row_values = [op for op in form.group.ops if op.op_type not in FOLDS and op.outputs[0] not in form.elements]
    returned = LoopBody(stores=len([name for name in form.group.outputs if name not in form.elements]))
    beside = (pointwise_body(form.group, row_values, machine) + returned).cycles(machine)
    passes = [_pass(form, loop, machine) for loop in range(form.loops)]
    return _SHARE * prod(form.outer) * (row_cycles(passes, steps, slots, machine) + beside) if form.length else 0.0


def _pass(form: RowForm, loop: int, machine: Machine) -> RowPass:
    """What a loop does for each vector: all that its targets and folds need and that no loop before has kept."""
    group, folds = form.group, [op for op in form.folds if form.levels[op.inputs[0]] == loop]
    targets = form.targets(loop)
    waiting, seen, body = [*targets, *(op.inputs[0] for op in folds)], set[str](), LoopBody()
    while waiting:
        name = waiting.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        if name in form.elements and form.kept.get(name, loop) >= loop:
            body += operator_body(group, group.producers[name], machine)
            waiting += group.producers[name].inputs
        elif name in form.elements or prod(group.types[name].shape[len(form.outer) :]) > 1:
            body += LoopBody(loads=1)
    folded = sum(MAX_INSTRUCTIONS if op.op_type in ("FoldMax", "FoldMin") else 1 for op in folds)
    stored = len([name for name in targets if name in form.kept])
    return RowPass(body + LoopBody(folded, stores=stored), len(folds))


def _build(group: Group, form: RowForm, target: Target, work: int) -> BuiltKernel:
    builder = new_builder(target)
    if prod(form.outer) != 0:
        emit_in_turns(form, builder, work)
    return finish("rows", builder, group, flops=work, inplace=row_operands(form, group))


def row_operands(form: RowForm, group: Group) -> tuple[tuple[int, str], ...]:
    """Inputs of a row's elements that nobody reads after an output, by its number, is stored, so that this may alias them.

    Each row is the work of one thread. None where no state is read.
    """
    if not group.updates_state:
        return ()
    shape = (*form.outer, *form.row)
    return tuple(
        (number, name)
        for number, name in same_place_operands(group)
        if (output := group.outputs[number]) in form.elements
        and form.group.types[output].shape == form.group.types[name].shape == shape
        and not form.is_read_after(name, output)
    )


def emit_in_turns(form: RowForm, builder: KernelBuilder, work: int) -> None:
    """The rows, dealt to the threads; a thread computes one after the other."""
    rows = prod(form.outer)
    threads = builder.threads_for(work) if isinstance(rows, Size) else min(builder.threads_for(work), rows)
    scratch = row_scratch(form, builder, threads)
    shares = Shares(builder, threads, rows, work)
    with (
        builder.loop(threads, "parallel", "thread") as thread,
        shares.of(thread) as (begin, end),
        builder.loop(end - begin, name="row") as i,
    ):
        emit_row(form, builder, builder.bind(begin + i), thread, scratch)


def row_scratch(form: RowForm, builder: KernelBuilder, threads: int) -> dict[str, Buffer]:
    """Scratch for one row of each kept value that is no output, for each thread."""
    return {name: builder.workspace(threads * _padded(form, name), form.group.types[name].dtype) for name in form.scratch}


def emit_row(
    form: RowForm,
    builder: KernelBuilder,
    row: Expr,
    thread: Expr,
    scratch: dict[str, Buffer],
    given: dict[str, Reader] | None = None,
) -> None:
    """The loops over the row of this number; `given` says how operands that are no parameters are read."""
    index = bound_unravel(builder, row, form.outer)
    places = {name: (buffer, thread * _padded(form, name)) for name, buffer in scratch.items()}
    for name in form.group.outputs:
        if name in form.elements:
            places[name] = element_buffer(form, builder, name), row * form.length
    RowLoops(form, builder, index, places, given or {}).emit()


def _padded(form: RowForm, name: str) -> SizeLike:
    """Elements of a row in scratch, whole cache lines."""
    line = _LINE_BYTES // np.dtype(form.group.types[name].dtype).itemsize
    return -(-form.length // line) * line


def element_buffer(form: RowForm, builder: KernelBuilder, name: str) -> Buffer:
    """The parameter of an output."""
    kind = form.group.types[name]
    return builder.parameter(name, kind.elements, kind.dtype)


@dataclass(frozen=True)
class RowLoops:
    """The loops over one row, all of it the work of one thread. `given` says how values that are already known are read."""

    form: RowForm
    builder: KernelBuilder
    index: Index  # of the row
    places: dict[str, tuple[Buffer, Expr]]  # element values that are stored: where, and the row's offset there
    given: dict[str, Reader] = field(default_factory=dict)

    def emit(self) -> None:
        self._row_values(0)
        for loop in range(self.form.loops):
            self.loop(loop)
            self._row_values(loop + 1)

    def once(self) -> AbstractContextManager[None]:
        """A context in which one thread alone stores what there is one of for a row."""
        return nullcontext()

    def loop(self, loop: int) -> None:
        """One loop over the row: stores outputs and kept values, and accumulates reductions."""
        form, builder = self.form, self.builder
        folds = self.folds(loop)
        *outer, last = form.row
        widest = min(builder.lanes(form.group.types[name].dtype) for name in self._typed(folds, loop))
        lanes, slots = block_slots(widest, last, is_row=True)
        totals = [builder.local(slots, form.group.types[op.outputs[0]].dtype) for op in folds]

        def block(inner: Index) -> Block:
            base = builder.bind(row_major(inner, outer) * last) if outer else tirx.const(0, "int32")
            return Block(builder, slots, lanes, True, base, (Loop(last, 1),), self.index)

        whole = block((0,) * len(outer)) if not outer else None
        across = Block(builder, slots, lanes, True, tirx.const(0, "int32"), (), self.index)
        for op, total in zip(folds, totals, strict=True):
            initial = tirx.const(FOLDS[op.op_type].initial, str(total.dtype))
            across.each_slot(partial(builder.store, total, value=initial))
        targets = form.targets(loop)

        def along(inner: Index) -> None:
            (whole or block(inner)).walk(
                lambda slot, offset, number: self.element(targets, folds, totals, slot, offset, (*inner, number))
            )

        nest(builder, outer, along)
        self.end_loop(across, targets, folds, totals)

    def folds(self, loop: int) -> list[Op]:
        """The reductions of what a loop computes."""
        return [op for op in self.form.folds if self.form.levels[op.inputs[0]] == loop]

    def end_loop(self, across: Block, targets: list[str], folds: list[Op], totals: list[Buffer]) -> None:
        """Bring the accumulators of each reduction together, and let what the loop has computed be read."""
        for op, total in zip(folds, totals, strict=True):
            across.bring_together(total, FOLDS[op.op_type].combiner(self.builder))
            self.given[op.outputs[0]] = _element_of(total)
        self.given.update({name: self._reader(name) for name in targets if name in self.places})

    def _typed(self, folds: list[Op], loop: int) -> list[str]:
        """The values whose types bound the lanes of a loop."""
        return [*self.form.targets(loop), *(op.inputs[0] for op in folds), *(op.outputs[0] for op in folds)]

    def element(self, targets: list[str], folds: list[Op], totals: list[Buffer], slot: Expr, offset: Expr, inner: Index) -> None:
        """The body of a loop at one element of the row."""
        values = _Values(self.form.group, self.builder, dict(self.given))
        shape = (*self.form.outer, *self.form.row)
        place = (*self.index, *inner)

        def read(name: str) -> Expr:
            return values.read(name, broadcast_index(place, shape, self.form.group.types[name].shape))

        for name in targets:
            value = self.builder.name(read(name))
            if name in self.places:
                buffer, base = self.places[name]
                self.builder.store(buffer, base + offset, value)
            values.given[name] = _known(value)
        for op, total in zip(folds, totals, strict=True):
            x = self.builder.name(read(op.inputs[0]))
            self.builder.store(total, slot, FOLDS[op.op_type].combiner(self.builder)(total[slot], x))

    def _reader(self, name: str) -> Reader:
        """Reads a stored element value in a later loop."""
        buffer, base = self.places[name]
        count = len(self.form.outer)
        return lambda index: buffer[base + row_major(index[count:], self.form.row)]

    def _row_values(self, level: int) -> None:
        """Compute the row values of a level, each once, and store those that are returned."""
        form, builder, group = self.form, self.builder, self.form.group
        for op in group.ops:
            (name,) = op.outputs
            if name in form.elements or form.levels[name] != level:
                continue
            index = self._row_index(name)
            if op.op_type not in FOLDS:
                local = builder.local(1, group.types[name].dtype, "row")
                builder.store(local, 0, _Values(group, builder, self.given).read(name, index))
                self.given[name] = _element_of(local)
            if name in group.outputs:
                with self.once():
                    at = row_major(index, group.types[name].shape)
                    builder.store(element_buffer(form, builder, name), at, self.given[name](index))

    def _row_index(self, name: str) -> Index:
        form = self.form
        whole = self.index if name in form.flat else (*self.index, *(0,) * len(form.row))
        shape = form.outer if name in form.flat else (*form.outer, *form.row)
        return broadcast_index(whole, shape, form.group.types[name].shape)


def _known(value: Expr) -> Reader:
    """Reads a value of one element."""
    return lambda _: value


def _element_of(buffer: Buffer) -> Reader:
    """Reads the first element of a local array."""
    return _known(buffer[tirx.const(0, "int32")])


class _Values(GroupValues):
    """Values of a group with exponentials of x <= 0, which take fewer operations in float32."""

    def read(self, name: str, index: Index) -> Expr:
        op = self.group.producers.get(name)
        if op is None or op.op_type != EXP or name in self.given:
            return super().read(name, index)
        x = super().read(op.inputs[0], index)
        value = math.exp_nonpositive(self.builder.name, x) if str(x.ty) == "float32" else tirx.exp(x)
        named = self.builder.name(value)
        self.given[name] = _known(named)
        return named
