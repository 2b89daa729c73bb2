"""ScatterElements and ScatterND: a copy of the data with updates stored, or combined, at indices known at run time only.

Negative indices count from the end. Updates whose index is out of range are dropped, so that nothing is written outside of the
tensor. Updates of one element take effect in row-major order of the updates, as each element belongs to one thread. Where nothing
else reads the data, the output aliases it and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.work_stealing import share
from ..expressions import math
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, map_elements, new_builder
from ..template.loops import accumulator_type, bound_unravel, nest
from .injective import as_bits

OPERATORS = frozenset(["ScatterElements", "ScatterND"])
_LONG_SLICE = 1024  # elements of a slice that are worth dealing to threads
_SHORT_SLICE = 16  # elements below which finding the thread that owns a slice costs more than storing it
_COLUMNS = 64  # neighbouring columns that a thread updates together
Combine = Callable[[Expr, Expr], Expr]


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    (op,) = group.ops
    dtype, reduction = group.types[op.inputs[0]].dtype, op.attribute("reduction", "none")
    is_refused = dtype == "complex128" or (reduction != "none" and np.dtype(dtype).kind == "c")
    return f"no {reduction} of {dtype}" if is_refused else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one scattering operator alone, with any reduction."""
    (op,) = group.ops
    reduction = op.attribute("reduction", "none")
    data, indices, updates = op.inputs
    dtype = group.types[data].dtype
    if (reduction == "none" and indices not in (data, updates)) or dtype == "bool":
        group = as_bits(group, (data, updates, op.outputs[0]))
    builder = new_builder(target)
    scatter = _Scatter(builder, group, op, _combination(reduction, dtype, builder))
    if scatter.is_by_lines:
        scatter.elements()
    elif group.types[data].elements:
        copy_unless_aliased(builder, scatter.source, scatter.out, group.types[data])
        if group.types[updates].elements:
            {"ScatterElements": scatter.elements, "ScatterND": scatter.slices}[op.op_type]()
    is_free = data not in group.constants and data not in op.inputs[1:]  # which are read while the output is written
    inplace = ((0, data),) if is_free and (scatter.is_by_lines or not builder.is_grid) else ()
    return finish("scatter", builder, group, flops=group.types[updates].elements, inplace=inplace)


def _combination(reduction: str, dtype: str, builder: KernelBuilder) -> Combine:
    """The element that is stored for an old one and an update. bfloat16 and float16 are combined in float32, booleans as bits."""
    if reduction == "none":
        return lambda old, new: new
    if dtype == "bool":
        return (lambda old, new: old | new) if reduction in ("add", "max") else (lambda old, new: old & new)
    functions: dict[str, Combine] = {
        "add": partial(math.wrapping, lambda a, b: a + b, widest=builder.integer_bits),
        "mul": partial(math.wrapping, lambda a, b: a * b, widest=builder.integer_bits),
        "max": math.maximum,
        "min": math.minimum,
    }
    working = accumulator_type(dtype)

    def combined(old: Expr, new: Expr) -> Expr:
        a, b = (builder.name(x if dtype == working else tirx.Cast(working, x)) for x in (old, new))
        result = functions[reduction](a, b)
        return result if dtype == working else tirx.Cast(dtype, result)

    return combined


def copy_unless_aliased(builder: KernelBuilder, source: Buffer, out: Buffer, kind: TensorType) -> None:
    """Copy all elements of a tensor to another, unless the two are one."""

    def element(index: Index) -> None:
        builder.store(out, index[0], source[index[0]])

    def copy() -> None:
        map_elements(builder, (kind.elements,), builder.lanes(kind.dtype), kind.elements, element)

    if builder.is_grid:
        copy()
        return
    # TIR cannot compare pointers: what is stored through one is seen through the other only if they are equal.
    first = builder.name(source[0])
    one, zero = (tirx.const(value, str(first.ty)) for value in (1, 0))
    other = builder.name(tirx.Select(tirx.EQ(first, one), zero, one))
    builder.store(out, 0, other)
    is_shared = builder.name(tirx.EQ(source[0], other))
    builder.store(out, 0, first)
    with builder.when(tirx.Not(is_shared)):
        copy()


class _Scatter:
    """The statements of one scattering operator."""

    def __init__(self, builder: KernelBuilder, group: Group, op: Op, combine: Combine) -> None:
        self.builder = builder
        self.op = op
        self.combine = combine
        self.data, self.indices, self.updates = (group.types[name] for name in op.inputs)
        self.source, self.places, self.values = (self._buffer(name, group) for name in op.inputs)
        self.out = self._buffer(op.outputs[0], group)
        axis = op.attribute("axis", 0) % max(len(self.data.shape), 1)
        others = [one.shape[:axis] + one.shape[axis + 1 :] for one in (self.data, self.indices)]
        # On a GPU a state is renewed by one grid, whose threads each have a whole line of it: two could not run in place.
        is_state = builder.is_grid and group.updates_state and op.op_type == "ScatterElements"
        self.is_by_lines = is_state and others[0] == others[1] and self.data.elements > 0

    def _buffer(self, name: str, group: Group) -> Buffer:
        kind = group.types[name]
        return self.builder.parameter(name, kind.elements, kind.dtype)

    def elements(self) -> None:
        """ScatterElements: the update at an index goes to that index with its part along the axis replaced."""
        builder, axis = self.builder, self.op.attribute("axis", 0) % len(self.data.shape)
        outer, inner = (_merged(self.indices.shape, self.data.shape, part) for part in (slice(axis), slice(axis + 1, None)))
        length, extent = self.indices.shape[axis], self.data.shape[axis]
        rows, columns = ([n for n, _ in part] for part in (outer, inner))
        shape = (*rows, length, *columns)
        strides = [*(m for _, m in outer), extent, *(m for _, m in inner)]

        def update(before: Index, i: Expr, after: Index) -> None:
            number = builder.bind(row_major((*before, i, *after), shape))
            place, is_inside = self._place(number, extent)
            with builder.when(is_inside):
                self._update(row_major((*before, place, *after), strides), number)

        work = 8 * prod(shape)
        if not builder.is_grid and prod(rows) >= builder.threads_for(work):
            with builder.chunks(prod(rows), work) as row, builder.loop(length, name="i") as i:
                before = bound_unravel(builder, row, rows)
                nest(builder, columns, lambda after: update(before, i, after))
            return
        # Each element belongs to one column; neighbouring columns go together, as they share cache lines.
        width = 1 if builder.is_grid else min(_COLUMNS, prod(columns))
        blocks = -(-prod(columns) // width)
        with builder.chunks(prod(rows) * blocks, work) as chunk:
            before = bound_unravel(builder, tirx.floordiv(chunk, blocks), rows)
            first = builder.bind(tirx.floormod(chunk, blocks) * width)
            count = builder.bind(tirx.min(prod(columns) - first, width))
            if self.is_by_lines:
                self._copy_line((*before, 0, *bound_unravel(builder, first, columns)), strides, len(rows))
            with builder.loop(length, name="i") as i, builder.loop(count, name="j") as j:
                update(before, i, bound_unravel(builder, builder.bind(first + j), columns))

    def _copy_line(self, place: Index, extents: Sequence[int], axis: int) -> None:
        """Copy the line along an axis from `place` on to the output, unless that is the data."""
        builder = self.builder
        assert isinstance(builder, GpuBuilder)
        with builder.when(tirx.Not(builder.is_same(self.source, self.out))), builder.loop(extents[axis], name="e") as e:
            at = builder.bind(row_major((*place[:axis], e, *place[axis + 1 :]), extents))
            builder.store(self.out, at, self.source[at])

    def slices(self) -> None:
        """ScatterND: whole slices of the data, each of them at a tuple of indices."""
        builder, depth = self.builder, self.indices.shape[-1]
        leading, slice_size = self.data.shape[:depth], prod(self.data.shape[depth:])
        count = prod(self.indices.shape[:-1])
        work = count * (4 * depth + slice_size)
        threads = builder.threads_for(work) if slice_size >= _SHORT_SLICE else 1
        if builder.is_grid:
            with builder.chunks(slice_size, work) as j, builder.loop(count, name="n") as n:
                self._slice(n, leading, 0, prod(leading), lambda place: self._update(place * slice_size + j, n * slice_size + j))
            return
        is_long = slice_size >= _LONG_SLICE * threads
        with builder.loop(threads, "parallel", "thread") as thread:
            begin, end = (builder.bind(bound) for bound in share(thread, threads, slice_size if is_long else prod(leading)))
            first, last = (begin, end) if is_long else (0, slice_size)
            low, high = (0, prod(leading)) if is_long else (begin, end)
            with builder.loop(count, name="n") as n:

                def run(place: Expr, n: Expr = n) -> None:
                    place, number = builder.bind(place * slice_size), builder.bind(n * slice_size)
                    builder.dynamic_vector_loop(
                        first, last, builder.lanes(self.data.dtype), lambda j: self._update(place + j, number + j)
                    )

                self._slice(n, leading, low, high, run)

    def _slice(self, n: Expr, leading: Sequence[int], low: Expr, high: Expr, body: Callable[[Expr], None]) -> None:
        """`body(number of the slice)` for tuple n, if it is one of [low, high)."""
        builder, depth = self.builder, len(leading)
        number: Expr = tirx.const(0, "int32")
        is_inside: Expr = tirx.const(True, "bool")
        for part, extent in enumerate(leading):
            place, is_valid = self._place(n * depth + part, extent)
            number, is_inside = number * extent + place, tirx.And(is_inside, is_valid)
        number = builder.bind(number)
        with builder.when(tirx.And(is_inside, tirx.And(number >= low, number < high))):
            body(number)

    def _place(self, number: Expr, extent: int) -> tuple[Expr, Expr]:
        """The index at a flat offset of the indices, and whether it is in bounds."""
        builder = self.builder
        value = builder.bind(tirx.Cast("int64", self.places[number]))
        place = builder.bind(tirx.Select(value < 0, value + extent, value))
        return tirx.Cast("int32", place), tirx.And(place >= 0, place < extent)

    def _update(self, place: Expr, number: Expr) -> None:
        self.builder.store(self.out, place, self.combine(self.out[place], self.values[number]))


def _merged(shape: Sequence[int], data: Sequence[int], part: slice) -> list[tuple[int, int]]:
    """Dimensions (extent of the indices, extent of the data) of a part, those that lie whole in one another made one."""
    pairs: list[tuple[int, int]] = []
    for n, m in zip(shape[part], data[part], strict=True):
        if pairs and n == m:
            rows, extent = pairs.pop()
            pairs.append((rows * n, extent * m))
        else:
            pairs.append((n, m))
    return pairs
