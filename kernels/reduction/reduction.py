"""The Reduce operators, and global pooling, which reduces over all spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike, estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.operations import operations_of
from ..cost.pointwise import LoopBody, pointwise_body
from ..cost.reduction import reduction_cycles
from ..cost.rows import MAX_INSTRUCTIONS
from ..expressions import math
from ..groups.group import Group, Op, literal_ints
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import anchor_bodies, epilogue_operands, finish, machine_of, new_builder, pointwise_cost
from ..template.loops import accumulator_type, store_epilogue
from ..template.prologue import flat_obstacle, source_of
from ..template.values import anchor_of
from .reduction_loops import Block, Combine, EmitResults, Results, counted_reduction, reduce_blocks


@dataclass(frozen=True)
class Fold:
    """acc = combine(acc, map(x, slot, offset)) over the reduced elements, from `initial`.

    `slot` is the accumulator's number in its block, `offset` the element's in the operand.
    """

    initial: float
    combine: Combine
    map: Callable[[Expr, Expr, Expr], Expr] = lambda x, slot, offset: x

    def combiner(self, builder: KernelBuilder) -> Combine:
        """`combine`, of integers so that sums and products wrap around."""
        if self.combine not in (add, multiply):
            return self.combine
        return partial(math.wrapping, self.combine, widest=builder.integer_bits)


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def multiply(a: Expr, b: Expr) -> Expr:
    return a * b


def _abs(x: Expr, slot: Expr, offset: Expr) -> Expr:
    return x if str(x.ty).startswith("uint") else tirx.abs(x)


_SUM, _SQUARES = Fold(0, add), Fold(0, add, lambda x, slot, offset: x * x)
_MAX, _MIN = Fold(-np.inf, math.maximum), Fold(np.inf, math.minimum)
_FOLDS = {
    "GlobalAveragePool": _SUM,
    "GlobalMaxPool": _MAX,
    "ReduceL1": Fold(0, add, _abs),
    "ReduceL2": _SQUARES,
    "ReduceLogSum": _SUM,
    "ReduceLogSumExp": _MAX,
    "ReduceMax": _MAX,
    "ReduceMean": _SUM,
    "ReduceMin": _MIN,
    "ReduceProd": Fold(1, multiply),
    "ReduceSum": _SUM,
    "ReduceSumSquare": _SQUARES,
}
OPERATORS = frozenset(_FOLDS)


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one reduction over known dimensions, with its epilogue."""
    anchor = _anchor_of(group)
    return anchor if isinstance(anchor, Refusal) else Candidate(_estimate(group, anchor, target), partial(build, group, target))


def _anchor_of(group: Group) -> Op | Refusal:
    anchor = anchor_of(group)
    if reason := flat_obstacle(group, anchor.inputs[0]):
        return Refusal(reason)
    return Refusal("only a run knows which dimensions are reduced") if reduced_axes(group, anchor) is None else anchor


def _working_type(group: Group, anchor: Op) -> str:
    operand = group.types[anchor.inputs[0]]
    dtype = "uint8" if operand.dtype == "bool" else accumulator_type(operand.dtype)
    return "float64" if anchor.op_type == "ReduceLogSumExp" and "float" not in dtype else dtype


@estimating
def _work(group: Group, anchor: Op) -> int:
    results = hint_of(group.types[group.outputs[0]].elements)
    return hint_of(group.types[anchor.inputs[0]].elements) * operations_of(anchor.op_type) + results * pointwise_cost(group)


@estimating
def _estimate(group: Group, anchor: Op, target: Target) -> Estimate:
    machine, work = machine_of(target, _working_type(group, anchor)), _work(group, anchor)
    before, after = anchor_bodies(group, anchor, machine)
    one = counted_reduction(group, anchor, reduced_axes(group, anchor) or (), machine, in_parts=not target.is_gpu)
    is_greatest = anchor.op_type in ("GlobalMaxPool", "ReduceLogSumExp", "ReduceMax", "ReduceMin")
    passes = [LoopBody(MAX_INSTRUCTIONS if is_greatest else 2 if anchor.op_type == "ReduceL1" else 1) + before]
    if anchor.op_type == "ReduceLogSumExp":
        power = pointwise_body(group, [Op("Exp", anchor.inputs, anchor.outputs)], machine)
        passes.append(LoopBody(2) + power + before)
    if anchor.op_type in ("ReduceLogSum", "ReduceLogSumExp"):
        after += pointwise_body(group, [Op("Log", anchor.inputs, anchor.outputs)], machine)
    cycles = reduction_cycles(one, passes, after, machine)
    is_parallel = (target.is_gpu or one.has_tasks) and work >= parallel_work(target.machine)
    return with_bytes(Estimate(cycles, work, unit="vector", is_parallel=is_parallel), group)


def build(group: Group, target: Target, emit: EmitResults | None = None) -> BuiltKernel | Refusal:
    """Takes one reduction over known dimensions, with its epilogue; `emit` as of `reduce_blocks`, but in parts if left out."""
    anchor = _anchor_of(group)
    if isinstance(anchor, Refusal):
        return anchor
    axes = reduced_axes(group, anchor) or ()
    operand = group.types[anchor.inputs[0]]
    builder = new_builder(target)
    dtype = _working_type(group, anchor)
    count = prod(operand.shape[axis] for axis in axes)
    work = _work(group, anchor)

    def compute(merged: Group, block: Block) -> None:
        value = _accumulate(merged, anchor, block, dtype)
        with block.once():
            block.each_result(
                lambda slot, index: store_epilogue(
                    merged, builder, anchor, index, _result(anchor, builder, value(slot), count, operand.dtype)
                )
            )

    emit = emit or Results.emit_in_parts
    is_once = reduce_blocks(group, builder, operand.shape, axes, anchor.outputs[0], builder.lanes(dtype), work, compute, emit)
    inplace = epilogue_operands(builder, group, anchor) if is_once else ()
    return finish("reduction", builder, group, flops=work, inplace=inplace)


def reduced_axes(group: Group, op: Op) -> tuple[int, ...] | None:
    """The dimensions that are reduced, counted from 0; None if they are no constants."""
    rank = len(group.types[op.inputs[0]].shape)
    if op.op_type.startswith("Global"):
        return tuple(range(2, rank))
    axes = op.attribute("axes")
    if len(op.inputs) > 1 and op.inputs[1]:
        axes = literal_ints(group, op.inputs[1]) if group.types[op.inputs[1]].elements else ()
        if axes is None:
            return None
    if not axes:
        return () if op.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis % rank for axis in axes}))


def _accumulate(group: Group, anchor: Op, block: Block, dtype: str) -> Callable[[Expr], Expr]:
    """How to read the accumulated value of a slot; of slot 0 if row-wise."""
    builder = block.builder
    source = source_of(group, builder, anchor.inputs[0])
    first = fold_block(block, source, dtype, _FOLDS[anchor.op_type])
    if anchor.op_type != "ReduceLogSumExp":
        return lambda slot: first[slot]
    # log(sum(exp(x))) = m + log(sum(exp(x - m))); an infinite m would make NaN of inf - inf
    shift = builder.local(block.slots, dtype, "shift")
    zero, infinity = tirx.const(0, dtype), tirx.const(float("inf"), dtype)
    block.each_result(
        lambda slot, _: builder.store(shift, slot, tirx.Select(tirx.EQ(tirx.abs(first[slot]), infinity), zero, first[slot]))
    )
    where: Callable[[Expr], Expr] = (lambda slot: tirx.const(0, "int32")) if block.rowwise else (lambda slot: slot)
    exp = Fold(0, add, lambda x, slot, offset: math.exponential(builder.name, x - shift[where(slot)]))
    total = fold_block(block, source, dtype, exp)
    return lambda slot: math.logarithm(builder.name, total[slot]) + shift[slot]


def fold_block(block: Block, source: Buffer, dtype: str, fold: Fold) -> Buffer:
    """The accumulators of a block, as a local array; row-wise ones are combined in slot 0."""
    builder = block.builder
    total = builder.local(block.slots, dtype)
    combine = fold.combiner(builder)
    initial = tirx.const(_bounded(fold.initial, dtype), dtype)

    def update_of(total: Buffer, slot: Expr, offset: Expr, number: Expr) -> None:
        x = source[offset]
        x = x if str(source.dtype) == dtype else builder.name(tirx.Cast(dtype, x))
        element = math.wrapping(lambda x: fold.map(x, slot, offset), x, widest=builder.integer_bits)
        builder.store(total, slot, combine(total[slot], builder.name(element)))

    block.gather(total, initial, lambda total: partial(update_of, total), combine)
    block.bring_together(total, combine)
    return total


def _result(anchor: Op, builder: KernelBuilder, total: Expr, count: SizeLike, dtype: str) -> Expr:
    """The operator's output element, of the operand's type."""
    value = total
    match anchor.op_type:
        case "ReduceMean" | "GlobalAveragePool":
            if "float" in str(total.ty):
                value = total / (number_of(count, str(total.ty)) if count else total)  # 0 / 0 is the mean of nothing
            else:
                value = tirx.truncdiv(total, number_of(max(count, 1), str(total.ty)))
        case "ReduceL2":
            value = tirx.sqrt(_real(total))
        case "ReduceLogSum":
            value = math.logarithm(builder.name, _real(total))
    if dtype == "bool":
        return tirx.NE(value, tirx.const(0, "uint8"))
    return value if str(value.ty) == dtype else tirx.Cast(dtype, _held(value, dtype))


def number_of(count: SizeLike, dtype: str) -> Expr:
    """A count, which a call may decide, as a number of a type."""
    return tirx.Cast(dtype, count) if isinstance(count, Size) else tirx.const(count, dtype)


def _held(value: Expr, dtype: str) -> Expr:
    """A logarithm clamped to an integer type: an empty reduction gives -inf, whose cast is undefined."""
    if "int" not in dtype or "float" not in str(value.ty):
        return value
    info = np.iinfo(dtype)
    most = np.nextafter(np.float64(info.max), 0) if info.bits == 64 else np.float64(info.max)
    least, most = (tirx.const(float(bound), str(value.ty)) for bound in (info.min, most))
    return tirx.max(tirx.min(value, most), least)


def _bounded(value: float, dtype: str) -> float | int:
    """The value, or the integer type's nearest to an infinity."""
    if "float" in dtype:
        return value
    info = np.iinfo(dtype)
    return int(min(max(value, info.min), info.max))


def _real(value: Expr) -> Expr:
    return value if "float" in str(value.ty) else tirx.Cast("float64", value)
