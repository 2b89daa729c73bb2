"""A stable sort of positions by whatever they stand for."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from ..builder import Expr, KernelBuilder
from .common import minimum


def sort_positions(
    builder: KernelBuilder,
    memory: Expr,
    begin: Expr,
    size: Expr,
    most: int,
    is_before: Callable[[Expr, Expr], Expr],
    *,
    work: int = 0,
) -> Expr:
    """Sort the `size` positions in memory[begin:begin + size], and return where in `memory` they stand afterwards.

    Merges runs of 1, 2, 4, ... from one half of memory[begin:begin + 2 * most] to the other, in O(size log most).

    Args:
        memory: an int32 buffer.
        most: the largest that `size` can be.
        is_before: whether the first of two positions must stand before the second; a strict weak order. It may emit statements.
        work: estimated scalar operations of one merge over all runs, where threads may share it; 0 in a thread already.
    """
    levels = (most - 1).bit_length() if most > 1 else 0
    with builder.loop(levels, name="level") as level:
        half = builder.bind(tirx.bitwise_and(level, tirx.const(1, "int32")) * most)
        source, target = builder.bind(begin + half), builder.bind(begin + (most - half))
        width = builder.bind(tirx.shift_left(tirx.const(1, "int32"), level))
        pairs = builder.bind(tirx.floordiv(size + 2 * width - 1, 2 * width))
        with builder.dynamic_chunks(pairs, work) as pair:
            low = builder.bind(pair * 2 * width)
            middle = builder.bind(minimum(low + width, size))
            high = builder.bind(minimum(middle + width, size))
            _merge(builder, memory, (source, target), (low, middle, high), is_before)
    return begin + (levels % 2) * most


def _merge(
    builder: KernelBuilder,
    memory: Expr,
    places: tuple[Expr, Expr],
    runs: tuple[Expr, Expr, Expr],
    is_before: Callable[[Expr, Expr], Expr],
) -> None:
    """Merge the runs [low, middle) and [middle, high) behind the first of `places` into [low, high) behind the second."""
    (source, target), (low, middle, high) = places, runs
    cursor = builder.local(2, "int32", "cursor")
    builder.store(cursor, 0, low)
    builder.store(cursor, 1, middle)
    with builder.loop(high - low, name="k") as k:
        left, right = builder.bind(cursor[0]), builder.bind(cursor[1])
        first = builder.bind(memory[source + tirx.min(left, high - 1)])
        second = builder.bind(memory[source + tirx.min(right, high - 1)])
        later_first = is_before(second, first)
        takes_right = builder.name(tirx.And(right < high, tirx.Or(left >= middle, later_first)))
        step = builder.bind(tirx.Cast("int32", takes_right))
        builder.store(memory, target + low + k, tirx.Select(takes_right, second, first))
        builder.store(cursor, 0, left + 1 - step)
        builder.store(cursor, 1, right + step)
