"""Operands that pointwise groups read through views: elements of a tensor at distances that are constant along each dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ...runtime.symbolic.shapes import equal, is_one
from ...runtime.symbolic.sizes import Size, SizeLike
from ..codegen.builder import Expr, Index, KernelBuilder, int32_of, row_major
from ..expressions.pointwise import POINTWISE
from ..groups.group import Group, Op
from ..template.contract import Refusal
from ..template.values import Reader
from ..template.views import view_of

AFFINE = frozenset(["Gather", "Slice", "Split", "Transpose"])  # views with constant distances


@dataclass(frozen=True, slots=True)
class Strided:
    """The element at `index` is source[base + sum(index[d] * strides[d])], of a tensor in memory."""

    source: str
    base: SizeLike
    strides: tuple[SizeLike, ...]

    def reader(self, group: Group, builder: KernelBuilder) -> Reader:
        """Reads an element. `group` has the source as it is."""
        kind = group.types[self.source]

        def read(index: Index) -> Expr:
            steps = [i * stride for i, stride in zip(index, self.strides, strict=True) if not equal(stride, 0)]
            return builder.parameter(self.source, kind.elements, kind.dtype)[int32_of(sum(steps, start=self.base))]

        return read


def neighbours(base: SizeLike, strides: Sequence[SizeLike], count: int) -> int:
    """How many elements along the last dimension are one aligned vector wherever it starts: a divisor of `count`."""
    *outer, last = strides
    if equal(last, 0):
        return count
    numbers = [number for number in (base, *outer) if not equal(number, 0)]
    if not is_one(last) or any(isinstance(number, Size) for number in numbers):
        return 1
    return gcd(count, *(int(number) for number in numbers))


Views = Mapping[str, Strided]


def through_views(group: Group) -> tuple[Group, Views] | Refusal:
    """The pointwise operators of a group, which has no others but views of its inputs: results of these become inputs, which the
    second tells how to read."""
    views: dict[str, Strided] = {}
    for op in group.ops:
        if op.op_type in POINTWISE:
            continue
        if op.op_type not in AFFINE or view_of(group, op) is None:
            return Refusal("has an operator that is neither pointwise nor a view")
        if op.inputs[0] not in views and op.inputs[0] not in group.inputs:
            return Refusal(f"{op.op_type} reads what is computed")
        views |= {name: _strided(group, op, name, views) for name in op.outputs if name}
    if not views:
        return group, views
    if any(name in views for name in group.outputs):
        return Refusal("a part of an operand is a result")
    ops = tuple(op for op in group.ops if op.op_type in POINTWISE)
    read = dict.fromkeys(name for op in ops for name in op.inputs if name)
    constants = {name for name, one in views.items() if one.source in group.constants}
    direct = replace(
        group,
        ops=ops,
        inputs=tuple(name for name in read if name in views or name in group.inputs),
        constants=group.constants | constants,
    )
    return direct, {name: one for name, one in views.items() if name in read}


def _strided(group: Group, op: Op, name: str, views: Views) -> Strided:
    """By the places of the first element and of its neighbour along each dimension."""
    view, source = view_of(group, op), op.inputs[0]
    assert view is not None, "asked before"
    rank, under = len(group.types[name].shape), views.get(source)

    def place(index: Sequence[int]) -> SizeLike:
        there = view.source(group, op, name, tuple(index))
        if under is None:
            return row_major(there, group.types[source].shape)
        return sum((i * stride for i, stride in zip(there, under.strides, strict=True)), start=under.base)

    base = place((0,) * rank)
    strides = tuple(place([int(axis == d) for d in range(rank)]) - base for axis in range(rank))
    return Strided(source if under is None else under.source, base, strides)


def merged_strides(shape: Sequence[SizeLike], runs: Sequence[Sequence[int]], strides: Sequence[SizeLike]) -> tuple[SizeLike, ...]:
    """Those of a value of `shape` over runs of its dimensions that were merged: of the last one of each run that it spans."""
    return tuple(next((strides[axis] for axis in reversed(run) if not is_one(shape[axis])), 0) for run in runs)


def is_contiguous(shape: Sequence[SizeLike], run: Sequence[int], strides: Sequence[SizeLike]) -> bool:
    """Whether the dimensions of a run can be one: each spanned one ends where the one before it takes its next step."""
    spanned = [axis for axis in run if not is_one(shape[axis])]
    return all(
        equal(strides[axis], strides[spanned[number + 1]] * shape[spanned[number + 1]])
        for number, axis in enumerate(spanned[:-1])
    )
