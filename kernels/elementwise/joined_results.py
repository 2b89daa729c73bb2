"""Results of pointwise groups that a Concat puts together: each is stored where the Concat would copy it to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...runtime.symbolic.shapes import equal, is_one, same_shape
from ...runtime.symbolic.sizes import SizeLike
from ..codegen.builder import Expr, Index, KernelBuilder
from ..groups.group import Group
from ..movement.injective import row_strides
from ..template.contract import Refusal

_RESHAPES = frozenset(["Flatten", "Reshape", "Squeeze", "Unsqueeze"])  # which may stand before the Concat
JOINING = _RESHAPES | {"Concat"}


@dataclass(frozen=True, slots=True)
class Joined:
    """The element of `part` at `index` is result[base + sum(index[d] * strides[d])]."""

    part: str
    base: SizeLike
    strides: tuple[SizeLike, ...]

    def place(self, index: Index) -> Expr:
        steps = [i * stride for i, stride in zip(index, self.strides, strict=True) if not equal(stride, 0)]
        return sum(steps, start=self.base)


Joins = tuple[Joined, ...]


def through_concat(group: Group) -> tuple[Group, Joins] | Refusal:
    """A group without the Concat that makes its one result of parts of one shape, perhaps with other dimensions of one: the parts
    are results then, which the second tells where to store. As it is where no Concat makes a result."""
    last = group.producers.get(group.outputs[0])  # None: a constant alone
    if last is None or last.op_type != "Concat":
        return group, ()
    if len(group.outputs) > 1:
        return Refusal("has other results than a Concat")
    result = group.types[group.outputs[0]].shape
    axis, strides = last.attribute("axis", 1) % len(result), row_strides(result)
    ends = list(accumulate(group.types[name].shape[axis] for name in last.inputs))
    joins: list[Joined] = []
    dropped = {last.outputs[0]}
    for operand, end in zip(last.inputs, ends, strict=True):
        shape, name = group.types[operand].shape, operand
        while name in group.producers and group.producers[name].op_type in _RESHAPES:
            dropped.add(name)
            name = group.producers[name].inputs[0]
        if name not in group.producers:
            return Refusal("a part of a Concat is no result")
        steps = _steps(group.types[name].shape, shape, strides)
        if steps is None:
            return Refusal("a part of a Concat is reshaped")
        joins.append(Joined(name, (end - shape[axis]) * strides[axis], steps))
    parts = tuple(one.part for one in joins)
    if len(set(parts)) < len(parts):
        return Refusal("a Concat has a part twice")
    if not all(same_shape(group.types[name].shape, group.types[parts[0]].shape) for name in parts):
        return Refusal("parts of a Concat differ in shape")
    return replace(group, ops=tuple(op for op in group.ops if dropped.isdisjoint(op.outputs)), outputs=parts), tuple(joins)


def _steps(shape: Sequence[SizeLike], under: Sequence[SizeLike], strides: Sequence[SizeLike]) -> tuple[SizeLike, ...] | None:
    """From an index of `shape` to the next along each dimension, where the same elements lie as `under` with these strides. None
    where the two differ by more than dimensions of one."""
    left = [(extent, stride) for extent, stride in zip(under, strides, strict=True) if not is_one(extent)]
    if not same_shape([extent for extent in shape if not is_one(extent)], [extent for extent, _ in left]):
        return None
    found = iter(left)
    return tuple(0 if is_one(extent) else next(found)[1] for extent in shape)


def store_joined(builder: KernelBuilder, group: Group, joins: Joins, index: Index, results: Sequence[Expr]) -> None:
    """Store the parts' elements at an index where they belong in the result of `group`."""
    name = group.outputs[0]
    result = builder.parameter(name, group.types[name].elements, group.types[name].dtype)
    for one, element in zip(joins, results, strict=True):
        builder.store(result, one.place(index), element)
