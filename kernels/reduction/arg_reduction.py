"""ArgMax and ArgMin: the place of the greatest or least element along one dimension. NaN counts as beyond all numbers."""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import hint_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.operations import operations_of
from ..cost.pointwise import LoopBody
from ..cost.reduction import search_cycles
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import anchor_bodies, finish, machine_of, new_builder, pointwise_cost
from ..template.loops import accumulator_type, store_epilogue
from ..template.values import anchor_of
from .reduction_loops import Block, counted_reduction, reduce_blocks

OPERATORS = frozenset(["ArgMax", "ArgMin"])


_COMPARED = LoopBody(5)  # of a vector: which elements are better, NaN among them, and their places


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one ArgMax or ArgMin, with its epilogue."""
    anchor = anchor_of(group)
    elements = group.types[anchor.inputs[0]].elements
    work = elements * operations_of(anchor.op_type) + group.types[group.outputs[0]].elements * pointwise_cost(group)
    return Candidate(_estimate(group, anchor, target, work), partial(_build, group, anchor, target, work))


def _estimate(group: Group, anchor: Op, target: Target, work: int) -> Estimate:
    operand = group.types[anchor.inputs[0]]
    machine = machine_of(target, accumulator_type(operand.dtype))
    before, _ = anchor_bodies(group, anchor, machine)
    one = counted_reduction(group, anchor, (_axis_of(anchor, operand.shape or (1,)),), machine)
    cycles = search_cycles(one, _COMPARED + before, machine)
    is_parallel = (target.is_gpu or one.has_tasks) and hint_of(work) >= parallel_work(target.machine)
    return with_bytes(Estimate(cycles, work, unit="vector", is_parallel=is_parallel), group)


def _axis_of(anchor: Op, shape: tuple[int, ...]) -> int:
    return int(anchor.attribute("axis", 0)) % len(shape)


def _build(group: Group, anchor: Op, target: Target, work: int) -> BuiltKernel:
    builder = new_builder(target)
    operand = group.types[anchor.inputs[0]]
    shape = operand.shape or (1,)
    search = _Search(accumulator_type(operand.dtype), anchor.op_type == "ArgMax", bool(anchor.attribute("select_last_index", 0)))

    def compute(merged: Group, block: Block) -> None:
        source = builder.parameter(anchor.inputs[0], operand.elements, operand.dtype)
        best, place = builder.local(block.slots, search.dtype, "best"), builder.local(block.slots, "int32", "place")
        block.each_slot(lambda slot: builder.store(best, slot, search.initial))
        block.each_slot(lambda slot: builder.store(place, slot, tirx.const(0, "int32")))

        def update(slot: Expr, offset: Expr, number: Expr) -> None:
            x = source[offset] if operand.dtype == search.dtype else builder.name(tirx.Cast(search.dtype, source[offset]))
            better = search.is_better(x, best[slot])
            builder.store(place, slot, tirx.Select(better, number, place[slot]))
            builder.store(best, slot, tirx.Select(better, x, best[slot]))

        block.walk(update)
        if block.rowwise and block.slots > 1:
            zero = tirx.const(0, "int32")
            with builder.loop(block.slots - 1, name="slot") as before:
                slot = before + 1
                better = search.is_better_slot(best[slot], place[slot], best[zero], place[zero])
                with builder.when(better):
                    builder.store(place, zero, place[slot])
                    builder.store(best, zero, best[slot])

        def store(slot: Expr, index: Index) -> None:
            store_epilogue(merged, builder, anchor, index, tirx.Cast("int64", place[slot]))

        block.each_result(store)

    axes = (_axis_of(anchor, shape),)
    reduce_blocks(group, builder, shape, axes, anchor.outputs[0], builder.lanes(search.dtype), work, compute)
    return finish("arg_reduction", builder, group, flops=work)


class _Search:
    """What is looked for: the greatest or least element, and which of equal ones."""

    def __init__(self, dtype: str, greatest: bool, last: bool) -> None:
        self.dtype = dtype
        self.greatest = greatest
        self.last = last

    @property
    def initial(self) -> Expr:
        """An element that no other is worse than."""
        if "float" in self.dtype:
            return tirx.const(-np.inf if self.greatest else np.inf, self.dtype)
        bounds = np.iinfo(self.dtype)
        return tirx.const(int(bounds.min if self.greatest else bounds.max), self.dtype)

    def is_better(self, x: Expr, best: Expr) -> Expr:
        """Whether x replaces the best of the elements before it."""
        if self.last:
            wins = x >= best if self.greatest else x <= best
            return tirx.Or(wins, tirx.isnan(x)) if "float" in self.dtype else wins
        return self._beats(x, best)

    def is_better_slot(self, x: Expr, place: Expr, best: Expr, best_place: Expr) -> Expr:
        """Whether the best of one slot replaces that of another, which saw other elements."""
        equal = tirx.EQ(x, best)
        if "float" in self.dtype:
            equal = tirx.Or(equal, tirx.And(tirx.isnan(x), tirx.isnan(best)))
        return tirx.Or(self._beats(x, best), tirx.And(equal, place > best_place if self.last else place < best_place))

    def _beats(self, x: Expr, best: Expr) -> Expr:
        wins = x > best if self.greatest else x < best
        return tirx.Or(wins, tirx.And(tirx.isnan(x), tirx.Not(tirx.isnan(best)))) if "float" in self.dtype else wins
