"""The iterations of a parallel region: shares of the threads, from whose ends a thread takes more that has finished its own.

Cores of one machine are not equally fast: hyper-threads and virtual machines share them with others, and some CPUs have large
and small ones. A thread takes the first half of what is left of its share, again and again, so that a region of equal threads
costs some exchanges more than fixed shares do, and walks through the same memory; an idle thread takes the last half of what is
left of another's (guided self-scheduling, Polychronopoulos and Kuck, IEEE Trans. Computers 36, 1987). What an iteration computes
does not depend on which thread does, so that results are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ...runtime.symbolic.sizes import Size, greatest_of, hint_of
from ..cost.memory import parallel_work

Expr: TypeAlias = Any
Builder: TypeAlias = Any  # KernelBuilder, whose module imports this one
Run: TypeAlias = tuple[Expr, Expr]  # of iterations: [begin, end)

_TAKE = "prefuse_take_iterations"
_WORD_BYTES, _INDEX_BITS = 8, 32  # of a range, whose upper half is its end
_LEAST_WORK = 10.0  # of the work from which on a region is parallel: shares of shorter regions are fixed
_LEAST_TAKEN = 1.0  # of the same: what a thread takes at once, where an iteration has less

LLVM_FUNCTIONS = f"""
define linkonce_odr i64 @{_TAKE}(ptr %ranges, i32 %thread, i32 %threads, i32 %least) noinline nounwind {{
  br label %visit
visit:
  %distance = phi i32 [ 0, %0 ], [ %further, %empty ]
  %sum = add i32 %thread, %distance
  %wraps = icmp uge i32 %sum, %threads
  %wrapped = sub i32 %sum, %threads
  %owner = select i1 %wraps, i32 %wrapped, i32 %sum
  %is.own = icmp eq i32 %distance, 0
  %word = mul i32 %owner, {LINE_BYTES // _WORD_BYTES}
  %place = getelementptr inbounds i64, ptr %ranges, i32 %word
  %first = load atomic i64, ptr %place monotonic, align {_WORD_BYTES}
  br label %look
look:
  %range = phi i64 [ %first, %visit ], [ %changed, %cut ]
  %begin = trunc i64 %range to i32
  %upper = lshr i64 %range, 32
  %end = trunc i64 %upper to i32
  %left = sub i32 %end, %begin
  %is.some = icmp sgt i32 %left, 0
  br i1 %is.some, label %cut, label %empty
cut:
  %odd = and i32 %left, 1
  %even = add i32 %left, %odd
  %half = lshr i32 %even, 1
  %is.short = icmp ult i32 %half, %least
  %wanted = select i1 %is.short, i32 %least, i32 %half
  %is.beyond = icmp ugt i32 %wanted, %left
  %size = select i1 %is.beyond, i32 %left, i32 %wanted
  %behind = add i32 %begin, %size
  %before = sub i32 %end, %size
  %middle = select i1 %is.own, i32 %behind, i32 %before
  %taken.begin = select i1 %is.own, i32 %begin, i32 %middle
  %taken.end = select i1 %is.own, i32 %middle, i32 %end
  %rest.begin = select i1 %is.own, i32 %middle, i32 %begin
  %rest.end = select i1 %is.own, i32 %end, i32 %middle
  %rest.low = zext i32 %rest.begin to i64
  %rest.wide = zext i32 %rest.end to i64
  %rest.high = shl i64 %rest.wide, 32
  %rest = or i64 %rest.low, %rest.high
  %exchange = cmpxchg ptr %place, i64 %range, i64 %rest monotonic monotonic, align {_WORD_BYTES}
  %changed = extractvalue {{ i64, i1 }} %exchange, 0
  %is.done = extractvalue {{ i64, i1 }} %exchange, 1
  br i1 %is.done, label %done, label %look
empty:
  %further = add i32 %distance, 1
  %is.more = icmp ult i32 %further, %threads
  br i1 %is.more, label %visit, label %none
none:
  ret i64 0
done:
  %taken.low = zext i32 %taken.begin to i64
  %taken.wide = zext i32 %taken.end to i64
  %taken.high = shl i64 %taken.wide, 32
  %taken = or i64 %taken.low, %taken.high
  ret i64 %taken
}}
"""


class Shares:
    """The iterations [0, `extent`) of a parallel loop over `threads` threads; `work`: scalar operations of them all.

    Made in front of the loop, where the shares are dealt.
    """

    def __init__(self, builder: Builder, threads: int, extent: Expr, work: Expr) -> None:
        self._builder, self._threads, self._extent = builder, threads, extent
        unit, work = parallel_work(builder.machine), hint_of(work)
        is_short = work < _LEAST_WORK * unit or (isinstance(extent, int) and extent <= threads)
        self._is_fixed = threads == 1 or builder.is_grid or is_short
        if self._is_fixed:
            return
        known = hint_of(extent) if isinstance(extent, int | Size) else 0
        self._least = max(int(known * _LEAST_TAKEN * unit / work), 1)
        line = LINE_BYTES // _WORD_BYTES  # a cache line for each share
        self._ranges, self._first = builder.aligned_local(threads * line, "int64", "ranges")
        with builder.loop(threads, name="owner") as owner:
            begin, end = (tirx.Cast("int64", one) for one in share(owner, threads, extent))
            builder.store(self._ranges, self._first + owner * line, begin + (end << tirx.const(_INDEX_BITS, "int64")))

    @contextmanager
    def of(self, thread: Expr) -> Iterator[Run]:
        """Inside the loop: statements for each run of iterations that a thread takes."""
        builder = self._builder
        if self._is_fixed:
            yield share(thread, self._threads, self._extent)
            return
        taken = builder.local(1, "int64", "taken")
        counts = (tirx.const(count, "int32") for count in (self._threads, self._least))
        take = take_iterations(self._ranges[self._first], thread, *counts)
        builder.store(taken, 0, take)
        with builder.while_true(tirx.NE(taken[0], tirx.const(0, "int64"))):
            begin = builder.bind(tirx.Cast("int32", taken[0]))
            end = builder.bind(tirx.Cast("int32", taken[0] >> tirx.const(_INDEX_BITS, "int64")))
            yield begin, end
            builder.store(taken, 0, take)


def take_iterations(ranges: Expr, thread: Expr, threads: Expr, least: Expr) -> Expr:
    """Take at least `least` iterations of what the threads' shares still have, if they have so many; an int64, of which the lower
    half is the first iteration and the upper half the one behind the last, or 0 where none is left.

    `ranges`: the first word of the shares, which are such numbers, a cache line apart.
    """
    return tirx.call_extern("int64", _TAKE, tirx.address_of(ranges), thread, threads, least)


def share(thread: Expr, threads: int, extent: Expr) -> Run:
    """The share of [0, extent) that belongs to one of `threads`, where all are as fast."""
    if threads == 1:
        return 0, extent
    if isinstance(threads, int) and isinstance(extent, int) and threads * extent >= 1 << 31:
        whole, rest = divmod(extent, threads)  # the products below would be no int32
        return thread * whole + tirx.min(thread, rest), (thread + 1) * whole + tirx.min(thread + 1, rest)
    if not isinstance(thread, int) and str((thread * extent).ty) == "int32" and not _is_small(threads, extent):
        begin, end = share(tirx.Cast("int64", thread), threads, extent)
        return tirx.Cast("int32", begin), tirx.Cast("int32", end)
    return tirx.floordiv(thread * extent, threads), tirx.floordiv((thread + 1) * extent, threads)


def _is_small(threads: Any, extent: Any) -> bool:
    """Whether the product of two numbers is known to be an int32."""
    if not all(isinstance(one, int | Size) for one in (threads, extent)):
        return False
    return int(greatest_of(threads)) * int(greatest_of(extent)) < 1 << 31
