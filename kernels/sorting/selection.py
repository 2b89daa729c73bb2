"""NonZero and Compress: stream compaction to the front of a buffer for the largest result, and the number of elements selected.

Both count first and store then, each thread its own share of the positions, so that the order is that of the positions and the
work is balanced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr, KernelBuilder, int32_of, unravel
from ..codegen.work_stealing import share
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type

OPERATORS = frozenset(["NonZero", "Compress"])
_PARTS = {"complex64": (2, "float32")}  # the real and the imaginary part
_LARGEST = 2**30 - 1  # the parts of complex numbers are twice as many


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    (op,) = group.ops
    if len(op.outputs) != 2:
        return "the size of its result depends on data and is needed while compiling"
    if target.is_gpu:
        return "it counts on the CPU only"
    elements = group.types[op.inputs[0]].elements
    return f"{elements} elements are more than 32-bit indices reach the parts of" if elements > _LARGEST else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one bounded NonZero or Compress: its outputs are a buffer for the largest result and the number selected."""
    (op,) = group.ops
    builder = new_builder(target)
    count = (_non_zero if op.op_type == "NonZero" else _compress)(group, op, builder)
    if op.attribute("padded", 0):
        axis = 1 if op.op_type == "NonZero" else op.attribute("axis", 0)
        word = _word(group.types[op.outputs[0]].dtype) if op.op_type == "Compress" else ""
        clear_rest(builder, group, op.outputs[0], axis, count, word)
    builder.store(builder.parameter(op.outputs[1], 1, "int64"), 0, tirx.Cast("int64", count))
    return finish("selection", builder, group, flops=group.types[op.inputs[0]].elements)


def _non_zero(group: Group, op: Op, builder: KernelBuilder) -> Expr:
    """Row r of the result has the indices along dimension r of the elements that are not zero, in row-major order."""
    kind, largest = group.types[op.inputs[0]], group.types[op.outputs[0]]
    parts, dtype = _PARTS.get(kind.dtype, (1, kind.dtype))
    source = builder.parameter(op.inputs[0], kind.elements * parts, dtype)
    out = builder.parameter(op.outputs[0], largest.elements, "int64")
    working = "int32" if dtype == "bool" else accumulator_type(dtype)

    def is_not_zero(element: Expr) -> Expr:
        element = element if working == dtype else tirx.Cast(working, element)
        is_other = tirx.NE(element, tirx.const(0, working))
        return tirx.Or(is_other, tirx.isnan(element)) if "float" in working else is_other

    def is_chosen(position: Expr) -> Expr:
        return reduce(tirx.Or, (is_not_zero(source[position * parts + part]) for part in range(parts)))

    def store(position: Expr, place: Expr) -> None:
        for row, index in enumerate(unravel(position, kind.shape)):
            builder.store(out, place + row * kind.elements, tirx.Cast("int64", int32_of(index)))

    return select(builder, kind.elements, 4 * kind.elements, is_chosen, store)


def _compress(group: Group, op: Op, builder: KernelBuilder) -> Expr:
    """Slices of the data along an axis, or elements of it, where the condition holds. Bytes are moved, whatever they mean."""
    data, largest = group.types[op.inputs[0]], group.types[op.outputs[0]]
    axis = op.attribute("axis")
    shape = (data.elements,) if axis is None else data.shape
    axis = 0 if axis is None else axis % len(shape)
    outer, size, inner, most = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]), largest.shape[axis]
    dtype = _word(data.dtype)
    condition = builder.parameter(op.inputs[1], group.types[op.inputs[1]].elements, "bool")
    source = builder.parameter(op.inputs[0], data.elements, dtype)
    out = builder.parameter(op.outputs[0], largest.elements, dtype)

    def copy(row: Expr, position: Expr, place: Expr) -> None:
        begin, end = builder.bind((row * size + position) * inner), builder.bind((row * most + place) * inner)
        builder.vector_loop(inner, builder.lanes(dtype), lambda j: builder.store(out, end + j, source[begin + j]))

    def is_chosen(position: Expr) -> Expr:
        return condition[position]

    if outer * inner == 1:
        return select(builder, most, 2 * most, is_chosen, lambda position, place: copy(0, position, place))
    places = builder.workspace(most, "int32")
    count = select(builder, most, 2 * most, is_chosen, lambda position, place: builder.store(places, place, position))
    copy_slices(builder, places, count, outer, outer * most * inner, copy)
    return count


def copy_slices(
    builder: KernelBuilder, places: Expr, count: Expr, outer: int, work: int, copy: Callable[[Expr, Expr, Expr], None]
) -> None:
    """`copy(row, places[p], p)` for each row of [0, outer) and each p of [0, count), dealt to the threads by the longer one.

    `work` is the estimated number of scalar operations of the whole.
    """
    if outer >= builder.threads_for(work):
        with builder.chunks(outer, work) as row, builder.loop(count, name="place") as place:
            copy(row, builder.bind(places[place]), place)
    else:
        with builder.loop(outer, name="row") as row, builder.dynamic_chunks(count, work // max(outer, 1)) as place:
            copy(row, builder.bind(places[place]), place)


def select(
    builder: KernelBuilder, extent: int, work: int, is_chosen: Callable[[Expr], Expr], store: Callable[[Expr, Expr], None]
) -> Expr:
    """`store(position, place)` for each chosen position of [0, extent), with places 0, 1, ...; returns their number.

    `work` is the estimated number of scalar operations of the whole.
    """
    threads = min(builder.threads_for(work), max(extent, 1))
    totals = builder.workspace(threads, "int32")
    zero, one = tirx.const(0, "int32"), tirx.const(1, "int32")
    if threads > 1:
        with builder.loop(threads, "parallel", "thread") as thread:
            begin, end = share(thread, threads, extent)
            total = builder.local(1, "int32", "total")
            builder.store(total, 0, zero)
            with builder.loop(end - begin) as i:
                builder.store(total, 0, total[0] + tirx.Select(is_chosen(builder.bind(begin + i)), one, zero))
            builder.store(totals, thread, total[0])
    with builder.loop(threads, "parallel" if threads > 1 else "serial", "thread") as thread:
        place = builder.local(1, "int32", "place")
        builder.store(place, 0, zero)
        if threads > 1:
            with builder.loop(thread, name="before") as before:
                builder.store(place, 0, place[0] + totals[before])
        begin, end = share(thread, threads, extent)
        with builder.loop(end - begin if threads > 1 else extent) as i:
            position = builder.bind(begin + i)
            with builder.when(is_chosen(position)):
                store(position, place[0])
                builder.store(place, 0, place[0] + one)
        if threads == 1:
            builder.store(totals, 0, place[0])
    count = builder.local(1, "int32", "count")
    builder.store(count, 0, zero)
    with builder.loop(threads, name="thread") as thread:
        builder.store(count, 0, count[0] + totals[thread])
    return builder.bind(count[0])


def clear_rest(builder: KernelBuilder, group: Group, name: str, axis: int, count: Expr, dtype: str = "") -> None:
    """Put zeros behind the first `count` elements of an output along an axis; it is stored as `dtype`, if not as its own type."""
    kind = group.types[name]
    dtype = dtype or kind.dtype
    axis %= len(kind.shape)
    outer, size, inner = prod(kind.shape[:axis]), kind.shape[axis], prod(kind.shape[axis + 1 :])
    out = builder.parameter(name, kind.elements, dtype)
    with builder.loop(outer, name="row") as row:
        begin, end = builder.bind((row * size + count) * inner), builder.bind((row + 1) * size * inner)
        lanes = builder.lanes(dtype)
        builder.dynamic_vector_loop(begin, end, lanes, lambda i: builder.store(out, i, tirx.const(0, dtype)))


def _word(dtype: str) -> str:
    """The unsigned integer that an element is moved as."""
    return f"uint{8 * np.dtype(dtype).itemsize}"
