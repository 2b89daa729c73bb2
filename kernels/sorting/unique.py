"""Unique: equal elements, or equal slices along an axis, found by a stable sort of their positions.

As numpy.unique does: NaN is greater than every number; among elements all NaN are one, but slices with a NaN are equal to none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..formats.minifloat import is_coded
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type
from .merge_sort import sort_positions
from .selection import clear_rest, copy_slices
from .sorting import Sorter, key_type, order_key

OPERATORS = frozenset(["Unique"])
_LARGEST = 2**29  # elements: the sort computes offsets of up to three times as many


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    if len(op.outputs) != 5:
        return "the size of its result depends on data and is needed while compiling"
    if target.is_gpu:
        return "it sorts on the CPU only"
    if is_coded(kind.dtype) or kind.dtype.startswith("complex"):
        return f"{kind.dtype} has no order"
    return f"{kind.elements} elements are more than 32-bit places can be sorted of" if kind.elements > _LARGEST else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one bounded Unique: its outputs are the operator's four at their largest, and the number of unique items."""
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    builder = new_builder(target)
    axis = op.attribute("axis")
    layout = _Layout.of((kind.elements,) if axis is None else kind.shape, axis or 0)
    source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
    is_elements = axis is None or len(kind.shape) == 1
    items = _Elements(builder, source, layout, kind.dtype) if is_elements else _Slices(builder, source, layout, kind.dtype)
    _store(group, op, builder, layout, _group_equals(builder, items, layout.size))
    return finish("unique", builder, group, flops=8 * layout.size * layout.size.bit_length())


@dataclass(frozen=True)
class _Layout:
    """The input as [outer, size, inner] around the axis along which it has `size` items of `length` elements."""

    outer: int
    size: int
    inner: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int) -> _Layout:
        axis %= len(shape)
        return cls(prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))

    @property
    def length(self) -> int:
        return self.outer * self.inner

    def place(self, item: Expr, part: Expr) -> Expr:
        """Offset of one element of an item."""
        if self.inner == 1:
            return part * self.size + item
        if self.outer == 1:
            return item * self.inner + part
        return (tirx.floordiv(part, self.inner) * self.size + item) * self.inner + tirx.floormod(part, self.inner)


class _Items(Protocol):
    """The items that are compared. Once sorted, equal ones are neighbours, in the order of their places."""

    def sort(self) -> None: ...

    def at(self, rank: Expr) -> Expr:
        """The place of an item in the input, by its rank in the sorted order."""
        ...

    def differs(self, rank: Expr, other: Expr) -> Expr:
        """Whether the items of two neighbouring ranks are different."""
        ...


class _Elements:
    """Elements, sorted by integer keys, which are equal where the elements are or both are NaN."""

    def __init__(self, builder: KernelBuilder, source: Expr, layout: _Layout, dtype: str) -> None:
        self._builder, self._source, self._size, self._dtype = builder, source, layout.size, dtype
        self._sorter = Sorter(builder, layout.size, key_type(dtype), 1)
        self._entries = self._sorter.entries(tirx.const(0, "int32"))

    def sort(self) -> None:
        with self._builder.loop(self._size, name="item") as item:
            self._entries.put(item, order_key(self._source[item], self._dtype, self._builder.name), item)
        self._sorter.sort(tirx.const(0, "int32"), self._size)

    def at(self, rank: Expr) -> Expr:
        return self._entries.place(rank)

    def differs(self, rank: Expr, other: Expr) -> Expr:
        return tirx.NE(self._entries.key(rank), self._entries.key(other))


class _Slices:
    """Slices, sorted by their first elements that differ. A slice with a NaN is equal to none."""

    def __init__(self, builder: KernelBuilder, source: Expr, layout: _Layout, dtype: str) -> None:
        self._builder, self._source, self._layout, self._dtype = builder, source, layout, dtype
        self._working = "int32" if dtype == "bool" else accumulator_type(dtype)
        self._is_float = "float" in dtype
        self._order = builder.workspace(2 * layout.size, "int32")
        self._begin: Expr = 0

    def sort(self) -> None:
        builder, size = self._builder, self._layout.size
        builder.vector_loop(size, builder.lanes("int32"), lambda i: builder.store(self._order, i, i))
        self._begin = sort_positions(builder, self._order, size, self._is_before, work=8 * size)

    def at(self, rank: Expr) -> Expr:
        return self._order[self._begin + rank]

    def differs(self, rank: Expr, other: Expr) -> Expr:
        if self._layout.length == 0:
            return tirx.const(False, "bool")
        first, second = self._builder.bind(self.at(rank)), self._builder.bind(self.at(other))
        part = self._first_difference(first, second, tirx.EQ)
        a, b = self._read(first, part), self._read(second, part)
        differs = tirx.Or(a < b, b < a)
        return tirx.Or(differs, tirx.Or(tirx.isnan(a), tirx.isnan(b))) if self._is_float else differs

    def _is_before(self, first: Expr, second: Expr) -> Expr:
        """Whether a slice stands before another: by their first elements that are neither equal nor both NaN."""
        if self._layout.length == 0:
            return tirx.const(False, "bool")
        part = self._first_difference(first, second, self._is_same)
        a, b = self._read(first, part), self._read(second, part)
        return tirx.Or(a < b, tirx.And(tirx.isnan(b), tirx.Not(tirx.isnan(a)))) if self._is_float else a < b

    # No comparison of floats may stand under a negation: TVM turns "not a < b" into "b <= a", which NaN makes false as well.

    def _is_same(self, a: Expr, b: Expr) -> Expr:
        same = tirx.EQ(a, b)
        return tirx.Or(same, tirx.And(tirx.isnan(a), tirx.isnan(b))) if self._is_float else same

    def _first_difference(self, first: Expr, second: Expr, is_same: Callable[[Expr, Expr], Expr]) -> Expr:
        """The first part in which two slices are not the same, else the last one."""
        part = self._builder.local(1, "int32", "part")
        self._builder.store(part, 0, tirx.const(0, "int32"))
        same = is_same(self._read(first, part[0]), self._read(second, part[0]))
        with self._builder.while_true(tirx.And(part[0] < self._layout.length - 1, same)):
            self._builder.store(part, 0, part[0] + 1)
        return self._builder.bind(part[0])

    def _read(self, item: Expr, part: Expr) -> Expr:
        element = self._source[self._layout.place(item, part)]
        return element if self._working == self._dtype else tirx.Cast(self._working, element)


class _Classes:
    """Items that are equal, numbered in sorted order: of each class its first item and size, of each item its class."""

    def __init__(self, builder: KernelBuilder, size: int) -> None:
        self.first = builder.workspace(size, "int32")
        self.members = builder.workspace(size, "int32")
        self.of = builder.workspace(size, "int32")
        self.count: Expr = 0


def _group_equals(builder: KernelBuilder, items: _Items, size: int) -> _Classes:
    """Sort the items, and number the runs of equal ones."""
    classes = _Classes(builder, size)
    items.sort()
    count = builder.local(1, "int32", "count")
    builder.store(count, 0, tirx.const(0, "int32"))
    with builder.loop(size, name="rank") as rank:
        item = builder.bind(items.at(rank))
        with builder.when(tirx.Or(tirx.EQ(rank, 0), items.differs(builder.bind(tirx.max(rank - 1, 0)), rank))):
            builder.store(classes.first, count[0], item)
            builder.store(classes.members, count[0], tirx.const(0, "int32"))
            builder.store(count, 0, count[0] + 1)
        number = builder.bind(count[0] - 1)
        builder.store(classes.of, item, number)
        builder.store(classes.members, number, classes.members[number] + 1)
    classes.count = builder.bind(count[0])
    return classes


def _rank_by_first(builder: KernelBuilder, size: int, classes: _Classes) -> tuple[Buffer, Buffer]:
    """Number the classes in the order of their first items: the rank of each class, and the first item of each rank."""
    ranks, items = builder.workspace(size, "int32"), builder.workspace(size, "int32")
    rank = builder.local(1, "int32", "rank")
    builder.store(rank, 0, tirx.const(0, "int32"))
    with builder.loop(size, name="item") as item:
        number = builder.bind(classes.of[item])
        with builder.when(tirx.EQ(classes.first[number], item)):
            builder.store(ranks, number, rank[0])
            builder.store(items, rank[0], item)
            builder.store(rank, 0, rank[0] + 1)
    return ranks, items


def _store(group: Group, op: Op, builder: KernelBuilder, layout: _Layout, classes: _Classes) -> None:
    """Store those of the outputs that the group has."""
    ranks, firsts = None, classes.first
    if not op.attribute("sorted", 1):
        ranks, firsts = _rank_by_first(builder, layout.size, classes)
    values, indices, inverse, counts, count = (
        builder.parameter(name, group.types[name].elements, group.types[name].dtype) if name else None for name in op.outputs
    )

    def rank_of(number: Expr) -> Expr:
        return number if ranks is None else ranks[number]

    with builder.loop(classes.count, name="class") as number:
        rank = builder.bind(rank_of(number))
        for out, found in ((indices, classes.first), (counts, classes.members)):
            if out is not None:
                builder.store(out, rank, tirx.Cast("int64", found[number]))
    if inverse is not None:
        with builder.loop(layout.size, name="item") as item:
            builder.store(inverse, item, tirx.Cast("int64", rank_of(classes.of[item])))
    if values is not None:
        kind = group.types[op.inputs[0]]
        source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
        _copy_items(builder, source, values, layout, firsts, classes.count, builder.lanes(kind.dtype))
    if op.attribute("padded", 0):
        for name, axis in zip(op.outputs, (op.attribute("axis", 0), 0, None, 0), strict=False):
            if name and axis is not None:
                clear_rest(builder, group, name, axis, classes.count)
    if count is not None:
        builder.store(count, 0, tirx.Cast("int64", classes.count))


def _copy_items(
    builder: KernelBuilder, source: Buffer, target: Buffer, layout: _Layout, places: Buffer, count: Expr, lanes: int
) -> None:
    """Copy the items at the first `count` of `places` to the front of the axis."""

    def copy(row: Expr, item: Expr, rank: Expr) -> None:
        begin, end = (builder.bind((row * layout.size + place) * layout.inner) for place in (item, rank))
        builder.vector_loop(layout.inner, lanes, lambda j: builder.store(target, end + j, source[begin + j]))

    copy_slices(builder, places, count, layout.outer, layout.size * layout.length, copy)
