"""A stable merge sort of positions by a comparison."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder


def sort_positions(
    builder: KernelBuilder, memory: Buffer, size: int, is_before: Callable[[Expr, Expr], Expr], *, work: int
) -> int:
    """Sort the positions in memory[:size]; returns the offset in `memory` at which they begin afterwards.

    Merges runs of 1, 2, 4, ... from one half of memory[:2 * size] to the other.

    Args:
        memory: an int32 buffer.
        is_before: whether the first of two positions must stand before the second; a strict weak order. It may emit statements.
        work: estimated scalar operations of one merge over all runs, which the threads share.
    """
    levels = (size - 1).bit_length()
    with builder.loop(levels, name="level") as level:
        source = builder.bind(tirx.bitwise_and(level, tirx.const(1, "int32")) * size)
        target = builder.bind(size - source)
        width = builder.bind(tirx.shift_left(tirx.const(1, "int32"), level))
        pairs = builder.bind(tirx.floordiv(size + 2 * width - 1, 2 * width))
        with builder.dynamic_chunks(pairs, work) as pair:
            low = builder.bind(pair * 2 * width)
            middle = builder.bind(tirx.min(low + width, size))
            high = builder.bind(tirx.min(middle + width, size))
            _merge(builder, memory, (source, target), (low, middle, high), is_before)
    return levels % 2 * size


def _merge(
    builder: KernelBuilder,
    memory: Buffer,
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
