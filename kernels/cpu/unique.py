"""Unique: equal elements, or equal slices along an axis, found by a stable sort of their positions.

As numpy.unique does: NaN is greater than every number; among elements all NaN are one, but slices with a NaN are equal to none.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..builder import Expr, KernelBuilder
from ..formats import is_coded
from ..group import Group, Op
from ..template import BuiltKernel, Refusal
from .anchored import accumulator_type
from .common import finish, new_builder
from .merge_sort import sort_positions
from .selection import copy_slices

OPERATORS = frozenset(["Unique"])


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one bounded Unique: its outputs are the four of the operator at their largest, and the number of what is unique."""
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    if len(op.outputs) != 5:
        return Refusal("the size of its result depends on data and is needed while compiling")
    if target.is_gpu:
        return Refusal("it sorts on the CPU only")
    if is_coded(kind.dtype) or kind.dtype.startswith("complex"):
        return Refusal(f"{kind.dtype} has no order")
    builder = new_builder(target)
    items = _Items(group, op, builder)
    steps = items.size * max(items.size.bit_length(), 1) * 8
    _store(group, op, builder, items, _group_equals(builder, items))
    return finish("unique", builder, group, flops=steps)


class _Items:
    """What is compared: `size` elements, or slices of `length` elements, each seen as [outer, inner] around the axis."""

    def __init__(self, group: Group, op: Op, builder: KernelBuilder) -> None:
        kind, axis = group.types[op.inputs[0]], op.attribute("axis")
        shape = (kind.elements,) if axis is None else kind.shape
        axis = 0 if axis is None else axis % len(shape)
        self.outer, self.size, self.inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
        self.length = self.outer * self.inner
        self.are_slices = len(shape) > 1
        self.builder = builder
        self.source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
        self.dtype = kind.dtype
        self._working = "int32" if kind.dtype == "bool" else accumulator_type(kind.dtype)
        self._is_float = "float" in kind.dtype

    def place(self, item: Expr, part: Expr) -> Expr:
        """Offset of one element of an item."""
        if self.inner == 1:
            return part * self.size + item
        if self.outer == 1:
            return item * self.inner + part
        return (tirx.floordiv(part, self.inner) * self.size + item) * self.inner + tirx.floormod(part, self.inner)

    def is_before(self, first: Expr, second: Expr) -> Expr:
        """Whether an item stands before another: by their first elements that are neither equal nor both NaN."""
        if self.length == 0:
            return tirx.const(False, "bool")
        part = self._first_difference(first, second, self._is_same)
        return self._is_less(self._read(first, part), self._read(second, part))

    def differs(self, first: Expr, second: Expr) -> Expr:
        """Whether two neighbours of the sorted order are different items."""
        if self.length == 0:
            return tirx.const(False, "bool")
        if not self.are_slices:
            return self._is_less(self._read(first, 0), self._read(second, 0))
        part = self._first_difference(first, second, tirx.EQ)
        a, b = self._read(first, part), self._read(second, part)
        differs = tirx.Or(a < b, b < a)
        return tirx.Or(differs, tirx.Or(tirx.isnan(a), tirx.isnan(b))) if self._is_float else differs

    def _first_difference(self, first: Expr, second: Expr, is_same: Callable[[Expr, Expr], Expr]) -> Expr:
        """The first part in which two items are not the same, else the last one."""
        if self.length == 1:
            return tirx.const(0, "int32")
        part = self.builder.local(1, "int32", "part")
        self.builder.store(part, 0, tirx.const(0, "int32"))
        same = is_same(self._read(first, part[0]), self._read(second, part[0]))
        with self.builder.while_true(tirx.And(part[0] < self.length - 1, same)):
            self.builder.store(part, 0, part[0] + 1)
        return self.builder.bind(part[0])

    def _read(self, item: Expr, part: Expr) -> Expr:
        element = self.source[self.place(item, part)]
        return element if self._working == self.dtype else tirx.Cast(self._working, element)

    # No comparison of floats may stand under a negation: TVM turns "not a < b" into "b <= a", which NaN makes false as well.

    def _is_less(self, a: Expr, b: Expr) -> Expr:
        less = a < b
        return tirx.Or(less, tirx.And(tirx.isnan(b), tirx.Not(tirx.isnan(a)))) if self._is_float else less

    def _is_same(self, a: Expr, b: Expr) -> Expr:
        same = tirx.EQ(a, b)
        return tirx.Or(same, tirx.And(tirx.isnan(a), tirx.isnan(b))) if self._is_float else same


class _Classes:
    """Items that are equal, numbered in sorted order: of each class its first item and size, of each item its class."""

    def __init__(self, builder: KernelBuilder, size: int) -> None:
        self.first = builder.workspace(size, "int32")
        self.members = builder.workspace(size, "int32")
        self.of = builder.workspace(size, "int32")
        self.rank = builder.workspace(size, "int32")  # of each class, by the first item
        self.by_rank = builder.workspace(size, "int32")
        self.count: Expr = 0


def _group_equals(builder: KernelBuilder, items: _Items) -> _Classes:
    """Sort the items, and number the runs of equal ones."""
    classes = _Classes(builder, items.size)
    order = builder.workspace(2 * items.size, "int32")
    builder.vector_loop(items.size, builder.lanes("int32"), lambda i: builder.store(order, i, i))
    sorted_at = sort_positions(builder, order, 0, items.size, items.size, items.is_before, work=8 * items.size)
    count = builder.local(1, "int32", "count")
    builder.store(count, 0, tirx.const(0, "int32"))
    with builder.loop(items.size, name="k") as k:
        item = builder.bind(order[sorted_at + k])
        before = builder.bind(order[sorted_at + tirx.max(k - 1, 0)])
        with builder.when(tirx.Or(tirx.EQ(k, 0), items.differs(before, item))):
            builder.store(classes.first, count[0], item)
            builder.store(classes.members, count[0], tirx.const(0, "int32"))
            builder.store(count, 0, count[0] + 1)
        number = builder.bind(count[0] - 1)
        builder.store(classes.of, item, number)
        builder.store(classes.members, number, classes.members[number] + 1)
    classes.count = builder.bind(count[0])
    return classes


def _rank_by_first(builder: KernelBuilder, items: _Items, classes: _Classes) -> None:
    """Number the classes in the order of their first items."""
    rank = builder.local(1, "int32", "rank")
    builder.store(rank, 0, tirx.const(0, "int32"))
    with builder.loop(items.size, name="item") as item:
        number = builder.bind(classes.of[item])
        with builder.when(tirx.EQ(classes.first[number], item)):
            builder.store(classes.rank, number, rank[0])
            builder.store(rank, 0, rank[0] + 1)


def _store(group: Group, op: Op, builder: KernelBuilder, items: _Items, classes: _Classes) -> None:
    """Write the outputs that are asked for."""
    is_sorted = bool(op.attribute("sorted", 1))
    if not is_sorted:
        _rank_by_first(builder, items, classes)
    values, indices, inverse, counts, count = (
        builder.parameter(name, group.types[name].elements, group.types[name].dtype) if name else None for name in op.outputs
    )

    def rank_of(number: Expr) -> Expr:
        return number if is_sorted else classes.rank[number]

    with builder.loop(classes.count, name="class") as number:
        rank = builder.bind(rank_of(number))
        builder.store(classes.by_rank, rank, classes.first[number])
        for out, found in ((indices, classes.first), (counts, classes.members)):
            if out is not None:
                builder.store(out, rank, tirx.Cast("int64", found[number]))
    if inverse is not None:
        with builder.loop(items.size, name="item") as item:
            builder.store(inverse, item, tirx.Cast("int64", rank_of(classes.of[item])))
    if values is not None and items.length:

        def copy(row: Expr, item: Expr, rank: Expr) -> None:
            begin, end = builder.bind((row * items.size + item) * items.inner), (row * items.size + rank) * items.inner
            end = builder.bind(end)
            lanes = builder.lanes(items.dtype)
            builder.vector_loop(items.inner, lanes, lambda j: builder.store(values, end + j, items.source[begin + j]))

        work = items.size * items.length
        copy_slices(builder, classes.by_rank, classes.count, items.outer, work, copy)
    if count is not None:
        builder.store(count, 0, tirx.Cast("int64", classes.count))
