"""Packing an operand that is not constant: the same layout as PackPanels gives at compile time, written by the kernel itself."""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.plan import TensorType
from ..builder import Buffer, Expr, KernelBuilder, row_major, unravel
from .tile_product import PackPanels


def pack_in_kernel(builder: KernelBuilder, source: Buffer, pack: PackPanels) -> Buffer:
    """A workspace with the panels of an operand; the statements that fill it are emitted here, before those that read it."""
    packed = pack.packed_type(TensorType(pack.shape, str(source.dtype)))
    groups, panels, depth, tile = packed.shape
    buffer = builder.workspace(packed.elements, packed.dtype)
    steps = pack.steps or ((0, 1),) * len(pack.shape)
    counts = [len(range(start, extent, step)) for extent, (start, step) in zip(pack.shape, steps, strict=True)]
    head = pack.group_axes + pack.line_axes
    group_axes, line_axes, depth_axes = pack.order[: pack.group_axes], pack.order[pack.group_axes : head], pack.order[head:]
    lines = prod(counts[axis] for axis in line_axes)
    if not packed.elements:
        return buffer

    def offset(group: Expr, line: Expr, k: Expr) -> Expr:
        place: list[Expr] = [0] * len(counts)
        for axes, at in ((group_axes, group), (line_axes, line), (depth_axes, k)):
            for axis, i in zip(axes, unravel(at, [counts[axis] for axis in axes]), strict=True):
                start, step = steps[axis]
                place[axis] = i * step + start
        return row_major(place, pack.shape)

    with builder.chunks(groups * panels, packed.elements) as chunk, builder.loop(depth, name="k") as k:
        group, panel = tirx.floordiv(chunk, panels), tirx.floormod(chunk, panels)
        with builder.loop(tile, name="line") as i:
            line = builder.bind(panel * tile + i)
            value = source[builder.bind(offset(group, tirx.min(line, lines - 1), k))]
            filled = builder.masked(line < lines, value, tirx.const(0, packed.dtype))
            builder.store(buffer, (chunk * depth + k) * tile + i, filled)
    return buffer
