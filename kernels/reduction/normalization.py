"""Softmax, LogSoftmax and the normalizations by mean and variance: rows that are read several times while they are in cache.

Statistics are float32 (float64 for float64 operands), the variance in two passes, as E[x^2] - E[x]^2 cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import Size, estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, broadcast_index, row_major
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.operations import operations_of
from ..cost.pointwise import LoopBody, pointwise_body, vector_steps
from ..cost.reduction import part_cycles
from ..cost.rows import normalization_passes, row_cycles, softmax_passes
from ..expressions import math
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import anchor_bodies, epilogue_operands, finish, machine_of, new_builder, pointwise_cost
from ..template.loops import accumulator_type, merge_sections, nest, parallel_nest, store_epilogue
from ..template.prologue import flat_obstacle, source_of
from ..template.values import anchor_of
from .reduction import Fold, add, fold_block, number_of
from .reduction_loops import Block, Cut, CutBlock, Loop, block_slots, cut_of

_SOFTMAX = ("LogSoftmax", "Softmax")
OPERATORS = frozenset([*_SOFTMAX, "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"])


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one normalization, with its epilogue."""
    anchor = _anchor_of(group)
    if isinstance(anchor, Refusal):
        return anchor
    rows = _rows(group, new_builder(target), anchor)
    runs = rows.shape[-1:] if rows.rowwise else ()
    return Candidate(_estimate(group, anchor, target), partial(build, group, target), stored_runs=runs)


def _anchor_of(group: Group) -> Op | Refusal:
    anchor = anchor_of(group)
    if reason := flat_obstacle(group, anchor.inputs[0]):
        return Refusal(reason)
    operand = group.types[anchor.inputs[0]]
    return anchor if "float" in operand.dtype else Refusal(f"no statistics of {operand.dtype}")


@estimating
def _work(group: Group, anchor: Op) -> int:
    return hint_of(group.types[anchor.inputs[0]].elements) * (operations_of(anchor.op_type) + pointwise_cost(group))


@estimating
def _estimate(group: Group, anchor: Op, target: Target) -> Estimate:
    """Of all rows, or of blocks of neighbouring rows where vectors run across them."""
    work, elements = _work(group, anchor), group.types[anchor.inputs[0]].elements
    rows = _rows(group, new_builder(target), anchor)
    machine = machine_of(target, rows.dtype)
    before, after = anchor_bodies(group, anchor, machine)
    if anchor.op_type in _SOFTMAX:
        power = pointwise_body(group, [Op("ExpNonpositive", anchor.inputs, anchor.outputs)], machine)
        passes = softmax_passes(before, after, power, is_logarithm=anchor.op_type == "LogSoftmax")
    else:
        parameters = sum(map(bool, anchor.inputs[1:3]))
        passes = normalization_passes(before, after, parameters, has_mean=anchor.op_type != "RMSNormalization")
    side = rows.length if rows.rowwise else rows.shape[-1]
    lanes, slots = block_slots(machine.lanes, side)
    if rows.rowwise:
        inner = rows.shape[rows.row.stop - 1]
        steps, blocks = rows.length // max(inner, 1) * vector_steps(inner, lanes), elements / max(rows.length, 1)
    else:
        steps, blocks = rows.length * slots // lanes, elements / max(side * rows.length, 1) * ceil(side / slots)
    settled = _settled(group, anchor, machine).cycles(machine) * (1 if rows.rowwise else slots // lanes)
    cut = None if target.is_gpu else rows.cut
    combined = part_cycles(cut.parts, slots / lanes, machine) * sum(one.folds for one in passes) if cut else 0.0
    cycles = blocks * (row_cycles(passes, steps, slots, machine, is_across=not rows.rowwise) + settled + combined)
    has_tasks = target.is_gpu or blocks > 1 or cut is not None
    is_parallel, first_trip = has_tasks and work >= parallel_work(target.machine), 1.0 / len(passes)
    return with_bytes(Estimate(cycles, work, unit="vector", is_parallel=is_parallel, streamed_overlap=first_trip), group)


def _settled(group: Group, anchor: Op, machine: Machine) -> LoopBody:
    """What is computed from the sums of a row: a logarithm, a quotient, or the quotient of a root."""
    if anchor.op_type == "LogSoftmax":
        return pointwise_body(group, [Op("Log", anchor.inputs, anchor.outputs)], machine)
    return LoopBody(divisions=1 if anchor.op_type == "Softmax" else 2)


def build(group: Group, target: Target, emit: EmitRows | None = None) -> BuiltKernel | Refusal:
    """Takes one normalization, with its epilogue; `emit` writes the loops over the rows, `Rows.emit_in_parts` if left out."""
    anchor = _anchor_of(group)
    if isinstance(anchor, Refusal):
        return anchor
    operand = group.types[anchor.inputs[0]]
    builder = new_builder(target)
    work, inplace = _work(group, anchor), tuple[tuple[int, str], ...]()
    if operand.elements != 0:
        rows = _rows(group, builder, anchor)
        (emit or Rows.emit_in_parts)(rows, work, rows.softmax if anchor.op_type in _SOFTMAX else rows.normalize)
        # Exponentials wait in the output, and blocks of neighbouring rows overlap.
        inplace = epilogue_operands(builder, group, anchor) if rows.rowwise and anchor.op_type != "Softmax" else ()
    return finish("normalization", builder, group, flops=work, inplace=inplace)


@dataclass(frozen=True)
class Rows:
    """The dimensions of the operand, merged: those before a row, those of the row, those after it.

    If there are none after it, vectors run along the row; otherwise along the last dimension.
    """

    group: Group
    builder: KernelBuilder
    anchor: Op
    shape: tuple[int, ...]
    row: range  # dimensions

    @property
    def rowwise(self) -> bool:
        return self.row.stop == len(self.shape)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return prod(self.shape[d] for d in self.row)

    @property
    def dtype(self) -> str:
        """The type of the statistics."""
        return accumulator_type(self.group.types[self.anchor.inputs[0]].dtype)

    @property
    def side(self) -> int:
        """The extent that vectors run along."""
        return self.length if self.rowwise else self.shape[-1]

    @property
    def slots(self) -> tuple[int, int]:
        """Lanes, and slots of a block."""
        return block_slots(self.builder.lanes(self.dtype), self.side, is_row=self.rowwise)

    @property
    def reduced(self) -> tuple[Loop, ...]:
        """The loop over the elements of a row."""
        return (Loop(self.length, prod(self.shape[self.row.stop :])),)

    @property
    def cut(self) -> Cut | None:
        """How rows are cut that take turns, as they are few and long; columns never are."""
        return cut_of(self.reduced, self.slots[1], prod(self.shape[: self.row.start]), True) if self.rowwise else None

    def emit_in_parts(self, work: int, compute: Callable[[Block], None]) -> None:
        """The same as `emit`, but rows that are few and long take turns, and each is the work of all threads."""
        cut, extents = self.cut, self.shape[: self.row.start]
        if cut is None:
            self.emit(work, compute)
            return
        make = partial(CutBlock, cut=cut, work=work // prod(extents))
        nest(self.builder, extents, lambda index: compute(self._block(index, make)))

    def emit(self, work: int, compute: Callable[[Block], None]) -> None:
        """Run `compute(block)` for every row, or for every vector of neighbouring rows."""
        builder, shape, side, slots = self.builder, self.shape, self.side, self.slots[1]
        extents = [shape[d] for d in range(len(shape)) if d not in self.row]
        overlaps = not self.rowwise and side > slots and (isinstance(side, Size) or side % slots != 0)
        if not self.rowwise:
            extents[-1] = -(-side // slots) - overlaps

        def block(index: Index) -> None:
            """The last two vectors of rows overlap, whose exponentials wait in the output: one thread takes both."""
            if overlaps:
                is_last = index[-1] == extents[-1] - 1
                with builder.loop(builder.bind(tirx.Cast("int32", is_last) + 1), name="vector") as i:
                    compute(self._block((*index[:-1], builder.bind(index[-1] + i)), Block))
            else:
                compute(self._block(index, Block))

        parallel_nest(builder, extents, work, block)

    def _block(self, index: Index, make: Callable[..., Block]) -> Block:
        """The row of an index of the other dimensions, or the vector of neighbouring ones."""
        builder, (lanes, slots) = self.builder, self.slots
        if not self.rowwise:
            index = (*index[:-1], builder.bind(tirx.min(index[-1] * slots, self.side - slots)))
        place = (*index[: self.row.start], *[0] * len(self.row), *index[self.row.start :])
        base = builder.bind(row_major(place, self.shape))
        return make(builder, slots, lanes, self.rowwise, base, self.reduced, place)

    def softmax(self, block: Block) -> None:
        """exp(x - max) / sum, or its logarithm; exponentials are kept in the output, or in scratch if its type is smaller."""
        builder, dtype = self.builder, self.dtype
        source = source_of(self.group, self.builder, self.anchor.inputs[0])
        where: Callable[[Expr], Expr] = (lambda slot: tirx.const(0, "int32")) if self.rowwise else (lambda slot: slot)
        top = fold_block(block, source, dtype, Fold(-np.inf, math.maximum))
        logarithmic = self.anchor.op_type == "LogSoftmax"
        out = self.group.types[self.group.outputs[0]]
        waiting = None
        if not logarithmic:
            waiting = self._operand(self.group.outputs[0]) if out.dtype == dtype else self._scratch(out.elements)

        def exponential(x: Expr, slot: Expr, offset: Expr) -> Expr:
            shifted = x - top[where(slot)]
            value = builder.name(math.exp_nonpositive(builder.name, shifted) if dtype == "float32" else tirx.exp(shifted))
            if waiting is not None:
                builder.store(waiting, offset, value)
            return value

        total = fold_block(block, source, dtype, Fold(0, add, exponential))
        factor = builder.local(block.slots, dtype, "factor")  # or, of the logarithm, what is subtracted

        def settle(slot: Expr, _: Index) -> None:
            value = math.logarithm(builder.name, total[slot]) if logarithmic else tirx.const(1, dtype) / total[slot]
            builder.store(factor, slot, value)

        block.each_result(settle)

        def element(slot: Expr, index: Index, offset: Expr) -> None:
            if waiting is not None:
                self._store(index, waiting[offset] * factor[where(slot)])
            else:
                self._store(index, self._cast(source[offset]) - top[where(slot)] - factor[where(slot)])

        self._each_element(block, element)

    def normalize(self, block: Block) -> None:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias; without the mean for RMSNormalization."""
        builder, dtype, anchor = self.builder, self.dtype, self.anchor
        source = source_of(self.group, builder, anchor.inputs[0])
        one, length = tirx.const(1, dtype), self.length
        count = builder.name(one / number_of(length, dtype)) if isinstance(length, Size) else tirx.const(1 / length, dtype)
        zero = tirx.const(0, "int32")
        mean: Expr | None = None
        if anchor.op_type != "RMSNormalization":
            mean = builder.name(fold_block(block, source, dtype, Fold(0, add))[zero] * count)

        def deviation(x: Expr) -> Expr:
            return x if mean is None else x - mean

        def square(x: Expr, slot: Expr, offset: Expr) -> Expr:
            centred = builder.name(deviation(x))
            return centred * centred

        variance = fold_block(block, source, dtype, Fold(0, add, square))[zero] * count
        epsilon = tirx.const(anchor.attribute("epsilon", 1e-5), dtype)
        inverse = builder.name(tirx.const(1, dtype) / tirx.sqrt(variance + epsilon))
        self._store_statistics(block, mean, inverse)
        scale, bias = (*anchor.inputs[1:3], "", "")[:2]

        def element(slot: Expr, index: Index, offset: Expr) -> None:
            value = deviation(self._cast(source[offset])) * inverse
            if scale:
                value = value * self._parameter(scale, index)
            if bias:
                value = value + self._parameter(bias, index)
            self._store(index, value)

        self._each_element(block, element)

    def _store_statistics(self, block: Block, mean: Expr | None, inverse: Expr) -> None:
        """The optional outputs of LayerNormalization, one element a row."""
        outer = self.row.start
        number = row_major(block.index[:outer], self.shape[:outer])
        with block.once():
            for name, value in zip(self.anchor.outputs[1:], (mean, inverse), strict=False):
                if name:
                    self.builder.store(self._operand(name), number, tirx.Cast(self.group.types[name].dtype, value))

    def _each_element(self, block: Block, body: Callable[[Expr, Index, Expr], None]) -> None:
        """`body(slot, index, offset)` for every element of the block's rows; row-wise blocks ignore the slot."""
        first, stop = self.row.start, self.row.stop
        extents = [self.shape[d] for d in self.row]

        def across(inner: Index) -> None:
            place = (*block.index[:first], *inner, *block.index[stop:])
            base = self.builder.bind(row_major(place, self.shape))
            block.each_slot(lambda slot: body(slot, (*place[:-1], place[-1] + slot), base + slot))

        if self.rowwise:
            zero = tirx.const(0, "int32")
            block.each_of_row(extents, lambda inner, offset: body(zero, (*block.index[:first], *inner), offset))
        else:
            nest(self.builder, extents, across)

    def _operand(self, name: str) -> Buffer:
        kind = self.group.types[name]
        return self.builder.parameter(name, kind.elements, kind.dtype)

    def _scratch(self, elements: int) -> Buffer:
        return self.builder.workspace(elements, self.dtype)

    def _parameter(self, name: str, index: Index) -> Expr:
        """An element of scale or bias, broadcast."""
        kind = self.group.types[name]
        return self._cast(self._operand(name)[row_major(broadcast_index(index, self.shape, kind.shape), kind.shape)])

    def _cast(self, x: Expr) -> Expr:
        return x if str(x.ty) == self.dtype else tirx.Cast(self.dtype, x)

    def _store(self, index: Index, value: Expr) -> None:
        dtype = self.group.types[self.anchor.outputs[0]].dtype
        value = self.builder.name(value)
        store_epilogue(self.group, self.builder, self.anchor, index, value if dtype == self.dtype else tirx.Cast(dtype, value))


EmitRows = Callable[[Rows, int, Callable[[Block], None]], None]


def _rows(group: Group, builder: KernelBuilder, anchor: Op) -> Rows:
    shape = group.types[anchor.inputs[0]].shape or (1,)
    parameters: tuple[str, ...] = ()
    if anchor.op_type in _SOFTMAX:
        coerced = anchor.version < 13
        axis = anchor.attribute("axis", 1 if coerced else -1) % len(shape)
        begin, end = axis, len(shape) if coerced else axis + 1
    elif anchor.op_type in ("LayerNormalization", "RMSNormalization"):
        begin, end = anchor.attribute("axis", -1) % len(shape), len(shape)
        parameters = tuple(name for name in anchor.inputs[1:3] if name)
    else:
        parameters = anchor.inputs[1:3]
        group, shape = _grouped(group, anchor)
        begin, end = 2, len(shape)
    sections = [list(range(begin)), list(range(begin, end))] + ([list(range(end, len(shape)))] if end < len(shape) else [])
    merged, runs = merge_sections(group, shape, sections, parameters)
    extents = tuple(prod(shape[axis] for axis in run) for section in runs for run in section)
    first = len(runs[0])
    return Rows(merged, builder, anchor, extents, range(first, first + len(runs[1])))


def _grouped(group: Group, anchor: Op) -> tuple[Group, tuple[int, ...]]:
    """The group with every value's channels split into (groups, channels of a group), and the operand's shape."""
    shape = group.types[anchor.inputs[0]].shape
    rank, channels = len(shape), shape[1]
    groups = anchor.attribute("num_groups", channels)
    types = dict(group.types)
    for name in anchor.inputs[1:3]:  # of each channel, or in opset 18 of each group
        types[name] = TensorType((types[name].elements, *(1,) * (rank - 2)), types[name].dtype)
    split = {
        name: TensorType(_split_channels(kind.shape, rank, groups), kind.dtype)
        for name, kind in types.items()
        if len(kind.shape) <= rank
    }
    return replace(group, types=types | split), (shape[0], groups, channels // groups, *shape[2:])


def _split_channels(shape: tuple[int, ...], rank: int, groups: int) -> tuple[int, ...]:
    position = 1 - (rank - len(shape))  # of the channels
    if position < 0:
        return shape
    pair = (1, 1) if shape[position] == 1 else (groups, shape[position] // groups)
    return (*shape[:position], *pair, *shape[position + 1 :])
