"""Operators whose every output element is one element of an operand at an index known at compile time.

Each is described as strided regions of its output (strided_copy.py); a pointwise epilogue is computed in the same stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, product
from math import prod

import numpy as np

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import equal
from ...runtime.symbolic.sizes import Size, SizeLike, estimating, greatest_of, hint_of, least_of, maximum_of, minimum_of
from ...runtime.target import Target
from ..codegen.builder import row_major
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..groups.group import Group, Op, literal_ints
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import anchor_bodies, finish, new_builder, pointwise_cost, result_machine
from ..template.prologue import flat_obstacle
from ..template.values import anchor_of, followers_of
from ..template.views import permutation, slice_places
from .strided_copy import Axis, Region, copy_regions, regions_cycles, stored_runs

Regions = dict[str, list[Region]]  # the regions of each of the anchor's outputs
_MAX_REGIONS = 256  # loop nests of one kernel


class _UnknownOperandError(Exception):
    """An operand that must be known at compile time is not."""


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one operator that moves elements, with its epilogue."""
    anchor, followers = anchor_of(group), followers_of(group)
    moved = moved_values(anchor)
    if reason := next(filter(None, (flat_obstacle(group, name) for name in moved if name in anchor.inputs)), ""):
        return Refusal(reason)
    if followers and len(anchor.outputs) > 1:
        return Refusal(f"parts of {anchor.op_type} are stored one by one: what is computed of several needs all at once")
    if followers and anchor.op_type == "BitCast":
        return Refusal("BitCast changes the type of the bits that it moves")
    if not followers:
        group = as_bits(group, moved)
    try:
        regions = _REGIONS[anchor.op_type](group, anchor)
    except _UnknownOperandError as unknown:
        return Refusal(f"{anchor.op_type} has {unknown} that only a run knows")
    if sum(map(len, regions.values())) > _MAX_REGIONS:
        return Refusal(f"{anchor.op_type} falls into more than {_MAX_REGIONS} regions")
    output, builder = group.outputs[0], new_builder(target)
    runs = stored_runs(group, builder, anchor, output, regions[anchor.outputs[0]]) if len(regions) == 1 else ()
    emit = partial(_build, group, anchor, regions, target)
    return Candidate(_estimate(group, anchor, regions, target), emit, stored_runs=runs)


@estimating
def _estimate(group: Group, anchor: Op, regions: Regions, target: Target) -> Estimate:
    machine, builder = result_machine(group, target), new_builder(target)
    before, after = anchor_bodies(group, anchor, machine)
    body = after + replace(before, loads=0.0)  # which regions count by their strides
    cycles = 0.0
    for result, parts in regions.items():
        output = result if result in group.outputs else group.outputs[0]
        cycles += regions_cycles(group, builder, anchor, output, parts, machine, body)
    work = sum(group.types[name].elements for name in group.outputs)
    estimate = with_bytes(Estimate(cycles, work, unit="vector", is_parallel=work >= parallel_work(target.machine)), group)
    if anchor.op_type != "Slice":
        return estimate
    return replace(estimate, streamed_bytes=min(estimate.streamed_bytes, 2 * group.types[anchor.outputs[0]].size_bytes))


def _build(group: Group, anchor: Op, regions: Regions, target: Target) -> BuiltKernel:
    builder = new_builder(target)
    for result, parts in regions.items():
        output = result if result in group.outputs else group.outputs[0]
        copy_regions(group, builder, anchor, output, parts)
    elements = sum(group.types[name].elements for name in group.outputs)
    return finish("injective", builder, group, flops=hint_of(elements) * pointwise_cost(group))


def moved_values(anchor: Op) -> tuple[str, ...]:
    """Operands and outputs of the element type that the operator moves."""
    operands = {"Concat": anchor.inputs, "Pad": (anchor.inputs[0], *anchor.inputs[2:3])}.get(anchor.op_type, anchor.inputs[:1])
    return tuple(name for name in (*operands, *anchor.outputs) if name)


def as_bits(group: Group, names: Sequence[str]) -> Group:
    """The group with these values as unsigned integers of their size, which is all that copying needs of a type."""
    types, literals = dict(group.types), dict(group.literals)
    for name in names:
        dtype = f"uint{8 * np.dtype(types[name].dtype).itemsize}"
        types[name] = TensorType(types[name].shape, dtype)
        if name in literals:
            literals[name] = literals[name].view(dtype)
    return replace(group, types=types, literals=literals)


def ints(group: Group, op: Op, position: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """An integer operand that shapes the result.

    Raises:
        _UnknownOperandError: it is no constant.
    """
    if position >= len(op.inputs) or not op.inputs[position]:
        assert default is not None, f"{op.op_type} lacks input {position}"
        return default
    value = literal_ints(group, op.inputs[position])
    if value is None:
        raise _UnknownOperandError(f"input {position}")
    return value


def _numbers(group: Group, op: Op, position: int) -> tuple[SizeLike, ...]:
    """The same, of which a call may decide some."""
    value = group.literal(op.inputs[position])
    if value is None:
        raise _UnknownOperandError(f"input {position}")
    return tuple(number if isinstance(number, Size) else int(number) for number in np.ravel(value).tolist())


def row_strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next along each dimension."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _whole(group: Group, op: Op, loops: Sequence[Sequence[Axis]], base: int = 0) -> Regions:
    """One region that is all of the output."""
    return {op.outputs[0]: [Region(op.inputs[0], (0,) * len(loops), tuple(tuple(axes) for axes in loops), base)]}


def _copy(group: Group, op: Op) -> Regions:
    shape = group.types[op.outputs[0]].shape
    return _whole(group, op, [[Axis(*pair)] for pair in zip(shape, row_strides(shape), strict=True)])


def _transpose(group: Group, op: Op) -> Regions:
    shape = group.types[op.inputs[0]].shape
    strides = row_strides(shape)
    return _whole(group, op, [[Axis(shape[axis], strides[axis])] for axis in permutation(group, op)])


def _expand(group: Group, op: Op) -> Regions:
    out, source = group.types[op.outputs[0]].shape, group.types[op.inputs[0]].shape
    padded = (1,) * (len(out) - len(source)) + source
    loops = [[Axis(n, stride if equal(m, n) else 0)] for n, m, stride in zip(out, padded, row_strides(padded), strict=True)]
    return _whole(group, op, loops)


def _tile(group: Group, op: Op) -> Regions:
    out, source = group.types[op.outputs[0]].shape, group.types[op.inputs[0]].shape
    strides = row_strides(source)
    return _whole(
        group, op, [[Axis(n // max(m, 1), 0), Axis(m, stride)] for n, m, stride in zip(out, source, strides, strict=True)]
    )


def _slice(group: Group, op: Op) -> Regions:
    out, strides = group.types[op.outputs[0]].shape, row_strides(group.types[op.inputs[0]].shape)
    places = slice_places(group, op)
    if places is None:
        raise _UnknownOperandError("places")
    base = sum(first * stride for (first, _), stride in zip(places, strides, strict=True))
    loops = [[Axis(n, step * stride)] for n, (_, step), stride in zip(out, places, strides, strict=True)]
    return _whole(group, op, loops, base)


def _concat(group: Group, op: Op) -> Regions:
    out = group.types[op.outputs[0]].shape
    along = op.attribute("axis", 1) % len(out)
    extents = [group.types[name].shape[along] for name in op.inputs]
    regions = []
    for name, extent, end in zip(op.inputs, extents, accumulate(extents), strict=True):
        shape = group.types[name].shape
        starts = tuple(end - extent if axis == along else 0 for axis in range(len(out)))
        regions.append(Region(name, starts, tuple((Axis(*pair),) for pair in zip(shape, row_strides(shape), strict=True))))
    return {op.outputs[0]: regions}


def _split(group: Group, op: Op) -> Regions:
    shape = group.types[op.inputs[0]].shape
    strides = row_strides(shape)
    along = op.attribute("axis", 0) % len(shape)
    regions: Regions = {}
    begin = 0
    for name in op.outputs:
        if name:
            out = group.types[name].shape
            axes = tuple((Axis(*pair),) for pair in zip(out, strides, strict=True))
            regions[name] = [Region(op.inputs[0], (0,) * len(shape), axes, begin * strides[along])]
            begin += out[along]
    return regions


def _depth_to_space(group: Group, op: Op) -> Regions:
    _, channels, height, width = group.types[op.inputs[0]].shape
    side = op.attribute("blocksize")
    plane, depth = height * width, channels // side**2
    channel, block = (side**2, 1) if op.attribute("mode", "DCR") == "CRD" else (1, depth)
    batch = group.types[op.inputs[0]].shape[0]
    loops = [
        [Axis(batch, channels * plane)],
        [Axis(depth, channel * plane)],
        [Axis(height, width), Axis(side, side * block * plane)],
        [Axis(width, 1), Axis(side, block * plane)],
    ]
    return _whole(group, op, loops)


def _space_to_depth(group: Group, op: Op) -> Regions:
    batch, channels, height, width = group.types[op.inputs[0]].shape
    side = op.attribute("blocksize")
    block, depth = (Axis(side, width), Axis(side, 1)), Axis(channels, height * width)
    loops = [
        [Axis(batch, channels * height * width)],
        [depth, *block] if op.attribute("mode", "DCR") == "CRD" else [*block, depth],
        [Axis(height // side, side * width)],
        [Axis(width // side, side)],
    ]
    return _whole(group, op, loops)


def _pad(group: Group, op: Op) -> Regions:
    """Each dimension in segments; the regions are their products. Zeros and constants need only those around the middle."""
    shape, out = group.types[op.inputs[0]].shape, group.types[op.outputs[0]].shape
    pads = _numbers(group, op, 1)
    axes = ints(group, op, 3, tuple(range(len(shape))))
    mode = op.attribute("mode", "constant")
    before, after = [0] * len(shape), [0] * len(shape)
    for position, axis in enumerate(axes):
        before[axis % len(shape)], after[axis % len(shape)] = pads[position], pads[position + len(axes)]
    strides = row_strides(shape)
    if mode == "constant":
        fill = op.inputs[2] if len(op.inputs) > 2 and op.inputs[2] else None
        return {op.outputs[0]: _constant_pad(op, shape, out, before, fill)}
    if any(isinstance(number, Size) for number in pads):
        raise _UnknownOperandError("lengths of what is repeated")
    runs = [_segments(mode, n, b, b + n + a) for n, b, a in zip(shape, before, after, strict=True)]
    segments = [list(islice(run, _MAX_REGIONS + 1)) for run in runs]
    if prod(map(len, segments)) > _MAX_REGIONS:
        raise _UnknownOperandError("many segments")
    regions = []
    for parts in product(*segments):
        base = row_major([first for _, _, first, _ in parts], shape)
        loops = tuple((Axis(n, step * stride),) for (_, n, _, step), stride in zip(parts, strides, strict=True))
        regions.append(Region(op.inputs[0], tuple(start for start, _, _, _ in parts), loops, base))
    return {op.outputs[0]: regions}


def _constant_pad(op: Op, shape: Sequence[int], out: Sequence[int], before: Sequence[int], fill: str | None) -> list[Region]:
    """The middle, and for each dimension two slabs of the fill, over the middle of the dimensions before it."""
    strides = row_strides(shape)
    middle = [(minimum_of(maximum_of(b, 0), m), minimum_of(b + n, m)) for b, n, m in zip(before, shape, out, strict=True)]
    regions = []
    if not _is_empty(middle):
        base = sum((low - b) * stride for (low, _), b, stride in zip(middle, before, strides, strict=True))
        loops = tuple((Axis(high - low, stride),) for (low, high), stride in zip(middle, strides, strict=True))
        regions.append(Region(op.inputs[0], tuple(low for low, _ in middle), loops, base))
    for axis, (low, high) in enumerate(middle):
        high = maximum_of(low, high)
        for start, end in ((0, low), (high, out[axis])):
            box = [*middle[:axis], (start, end), *((0, extent) for extent in out[axis + 1 :])]
            if not _is_empty(box):
                loops = tuple((Axis(last - first, 0),) for first, last in box)
                regions.append(Region(fill, tuple(first for first, _ in box), loops))
    return regions


def _is_empty(box: Sequence[tuple[SizeLike, SizeLike]]) -> bool:
    """Whether a box has no element, whatever a call decides."""
    return any(greatest_of(last - first) <= 0 for first, last in box)


def _segments(mode: str, extent: SizeLike, before: int, out: SizeLike) -> Iterator[tuple[SizeLike, SizeLike, SizeLike, int]]:
    """Runs (start in the output, length, first source index, step) of one padded dimension."""
    if isinstance(extent, Size):
        yield from _segments_of_size(mode, extent, before, out - extent - before)
        return
    position = 0
    while position < out:
        at = position - before
        if mode == "edge":
            first = min(max(at, 0), extent - 1)
            step = 1 if 0 <= at < extent else 0
            length = -at if at < 0 else extent - at if step else out - position
        elif mode == "wrap" or extent == 1:
            first, step = at % extent, 1
            length = extent - first
        else:  # reflect: a triangle wave of period 2 (extent - 1)
            phase = at % (2 * extent - 2)
            first, step = (phase, 1) if phase < extent else (2 * extent - 2 - phase, -1)
            length = extent - first if step == 1 else first
        length = min(length, out - position)
        yield position, length, first, step
        position += length


def _segments_of_size(
    mode: str, extent: Size, before: int, after: SizeLike
) -> Iterator[tuple[SizeLike, SizeLike, SizeLike, int]]:
    """The same of a dimension that a call decides, where all that is before and behind it comes from it once."""
    needed = max(before, after) if isinstance(after, int) else 0
    needed = min(needed, 1) if mode == "edge" else needed + (mode == "reflect" and needed > 0)
    if not isinstance(after, int) or min(before, after) < 0 or needed > least_of(extent):
        raise _UnknownOperandError("lengths of what is repeated")
    left, right, step = {"edge": (0, extent - 1, 0), "wrap": (extent - before, 0, 1)}.get(mode, (before, extent - 2, -1))
    for position, length, first, each in ((0, before, left, step), (before, extent, 0, 1), (before + extent, after, right, step)):
        if isinstance(length, Size) or length > 0:
            yield position, length, first, each


_REGIONS: dict[str, Callable[[Group, Op], Regions]] = {
    "BitCast": _copy,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _copy,
    "Pad": _pad,
    "Reshape": _copy,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _copy,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _copy,
}
OPERATORS = frozenset(_REGIONS)
