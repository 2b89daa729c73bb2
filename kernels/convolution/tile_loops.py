"""The loops around the register tiles of NHWC convolutions: dealt to threads, and of heights that suit lines of any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from math import prod

from tvm import tirx

from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SizeLike
from ..codegen.builder import Expr, KernelBuilder
from ..codegen.work_stealing import Shares
from ..cost.memory import product_work
from ..microkernels.register_tile import split_options

_UNITS = 256  # of the most cycles that a tile takes, fewer for so many rows that what all take would be no int32
_NEVER = 2**31 - 1
_CUT = {"n": ("weights",), "phase": ("weights",), "group": ("image", "weights")}  # operands that a loop cuts, if not the image


def each_height(builder: KernelBuilder, cycles: Mapping[int, int], rows: SizeLike, body: Callable[[int], None]) -> None:
    """`body(height)` for tiles that have no more rows than there are: of the heights of which a tile takes so many `cycles`, the
    one by which `rows` take the fewest. Where a call decides how many rows there are, each has code of its own, and one of them
    is no more than the least number of rows (or 1); a number of rows is no less than the first."""
    heights = list(cycles)
    if not isinstance(rows, Size) or len(heights) == 1:
        body(heights[0])
        return
    count, most = builder.bind(rows), max(cycles.values())
    units = max(min(_UNITS, _NEVER // max(rows.greatest, 1)), 1)
    taken = [
        builder.bind(
            tirx.Select(
                count >= height,
                tirx.truncdiv(count + (height - 1), height) * max(round(units * cycles[height] / most), 1),
                tirx.const(_NEVER, "int32"),
            )
        )
        for height in heights
    ]
    for place, height in enumerate(heights):
        others = [taken[place] < other for other in taken[:place]] + [taken[place] <= other for other in taken[place + 1 :]]
        with builder.when(builder.bind(tirx.all(*others))):
            body(height)


def deal(
    builder: KernelBuilder,
    extents: dict[str, SizeLike],
    flops: SizeLike,
    operands: Mapping[str, int],
    body: Callable[[dict[str, Expr]], None],
) -> None:
    """`body` at each place of nested loops over `extents`, outermost first; the best one is dealt to the threads.

    `flops`: of the whole. `operands`: bytes of the image ("image") and of the weights ("weights"). A loop over "n" or phases cuts
    the weights, one over groups both, any other the image.
    """
    work = product_work(flops, sum(operands.values()), builder.machine)
    threads = builder.threads_for(0 if is_one(prod(extents.values())) else work)
    cut = {axis: sum(operands[name] for name in _CUT.get(axis, ("image",))) for axis in extents}
    split = builder.choose("split", split_options(list(extents), extents, threads, flops, cut, builder.machine))
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
