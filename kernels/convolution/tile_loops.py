"""The loops around the register tiles of NHWC convolutions: dealt to threads, and of heights that suit lines of any length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike
from ..codegen.builder import Expr, KernelBuilder
from ..codegen.work_stealing import Shares
from ..microkernels.register_tile import split_options


def each_height(builder: KernelBuilder, most: int, rows: SizeLike, body: Callable[[int], None]) -> None:
    """`body(height)` for tiles that have no more rows than there are: `most`, or, where a call decides how many rows there are,
    the largest of `most`, its half, the half of that... that fits, each with code of its own. A number of `rows` is no less than
    `most`."""
    if not isinstance(rows, Size):
        body(most)
        return
    heights = [most]
    while heights[-1] > max(rows.least, 1):
        heights.append(heights[-1] // 2)
    count = builder.bind(rows)
    for place, height in enumerate(heights):
        conditions = [count < heights[place - 1]] * (place > 0) + [count >= height] * (height != heights[-1])
        with builder.when(tirx.all(*conditions)) if conditions else nullcontext():
            body(height)


def deal(builder: KernelBuilder, extents: dict[str, SizeLike], work: SizeLike, body: Callable[[dict[str, Expr]], None]) -> None:
    """`body` at each place of nested loops over `extents`, outermost first; the best balanced one is dealt to the threads.

    `work`: scalar operations of the whole.
    """
    threads = builder.threads_for(work)
    split = builder.choose("split", split_options(list(extents), extents, threads))
    shares = Shares(builder, threads, extents[split], work)
    with ExitStack() as loops:
        thread = loops.enter_context(builder.loop(threads, "parallel", "thread"))
        own = loops.enter_context(shares.of(thread))
        place: dict[str, Expr] = {}
        for axis, extent in extents.items():
            begin, end = own if axis == split else (0, extent)
            i = loops.enter_context(builder.loop(end - begin, name=axis))
            place[axis] = builder.bind(begin + i) if threads > 1 and axis == split else i
        body(place)
