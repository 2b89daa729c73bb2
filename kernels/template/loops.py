"""What templates with an anchor share: merging of dimensions as the epilogue allows, the epilogue, and loops over vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import equal, is_one
from ...runtime.symbolic.sizes import Size, SizeLike, estimating
from ..codegen.builder import Expr, Index, KernelBuilder, row_major
from ..groups.group import Group, Op
from .values import GroupValues, followers_of

_ACCUMULATORS = {"float16": "float32", "bfloat16": "float32"}


def accumulator_type(dtype: str) -> str:
    """The type in which elements of `dtype` are added up."""
    return _ACCUMULATORS.get(dtype, dtype)


def merge_sections(
    group: Group, shape: Sequence[SizeLike], sections: Sequence[Sequence[int]], operands: Sequence[str] = ()
) -> tuple[Group, list[list[tuple[int, ...]]]]:
    """The group over fewer, longer dimensions: dimensions of one section merge where the epilogue's operands, and those named in
    `operands`, allow it.

    `shape` is that of the anchor's output; `sections` are its dimensions, cut in order. Returns the group with every value that
    broadcasts to the merged shape retyped, and for each section the runs of dimensions that became one (at least one run, so
    that an index has a part for each section).
    """
    padded = {
        name: (1,) * (len(shape) - len(kind.shape)) + kind.shape
        for name, kind in group.types.items()
        if _broadcasts(kind.shape, shape)
    }
    followers = followers_of(group)
    followed = {name for op in followers for name in (*op.inputs, *op.outputs) if name in padded} | set(operands)
    merged: list[list[tuple[int, ...]]] = []
    for section in sections:
        runs: list[tuple[int, ...]] = []
        for axis in section:
            candidate = (*runs[-1], axis) if runs else (axis,)
            if runs and all(_spans_all_or_none(padded[name], candidate, shape) for name in followed):
                runs[-1] = candidate
            else:
                runs.append((axis,))
        merged.append(runs or [()])
    types = dict(group.types) | {
        name: TensorType(tuple(prod(dims[axis] for axis in run) for runs in merged for run in runs), group.types[name].dtype)
        for name, dims in padded.items()
    }
    return replace(group, types=types), merged


def store_epilogue(
    group: Group, builder: KernelBuilder, anchor: Op, index: Index, value: Expr, offset: Expr | None = None
) -> None:
    """The epilogue: compute and store the group's outputs at an index of the anchor's output, whose element there is `value`.

    All have the anchor's shape, and all are computed before one is stored; further results of the anchor itself, such as a
    normalization's statistics, are not stored here. `offset` is the flat offset of the index, if the caller has it.
    """
    result, *others = anchor.outputs
    outputs = [out for out in group.outputs if out not in others]
    if group.reader_counts.get(result, 0) > 1:
        value = builder.name(value)
    values = GroupValues(group, builder, {result: lambda _: value})
    elements = [values.read(out, index) for out in outputs]
    if len(elements) > 1 and not builder.is_grid:  # all are known before the first is stored: in place of what another reads
        elements = [builder.name(element) for element in elements]
    for out, element in zip(outputs, elements, strict=True):
        shape = group.memory_shape(out)
        place = row_major(index, shape) if offset is None else offset
        builder.store(builder.parameter(out, prod(shape), group.types[out].dtype), place, element)


def cover(builder: KernelBuilder, extent: SizeLike, lanes: int, body: Callable[[Expr], None]) -> None:
    """`body(i)` for i in [0, extent), in whole vectors only: the last one may overlap the one before it.

    So `body` must be idempotent.
    """
    if isinstance(extent, Size):
        builder.overlapping_vector_loop(0, extent, lanes, body)
        return
    while lanes > extent > 0:
        lanes //= 2
    whole = extent // lanes
    if whole:
        with builder.loop(whole, name="v") as block, builder.loop(lanes, "vectorized", "lane") as lane:
            body(block * lanes + lane)
    if extent - whole * lanes:
        with builder.loop(lanes, "vectorized", "lane") as lane:
            body(extent - lanes + lane)


def sweep(builder: KernelBuilder, extent: SizeLike, lanes: int, body: Callable[[Expr], None]) -> None:
    """`body(i)` once for each i in [0, extent): whole vectors, then ever shorter ones for the remainder."""
    if isinstance(extent, Size):
        builder.vector_loop(extent, lanes, body)
        return
    whole = extent // lanes
    with builder.loop(whole, name="v") as block, builder.loop(lanes, "vectorized", "lane") as lane:
        body(block * lanes + lane)
    done = whole * lanes
    while done < extent:
        while lanes > extent - done:
            lanes //= 2
        with builder.loop(lanes, "vectorized", "lane") as lane:
            body(done + lane)
        done += lanes


def nest(builder: KernelBuilder, extents: Sequence[SizeLike], body: Callable[[Index], None]) -> None:
    """`body(index)` in nested serial loops."""
    if not extents:
        body(())
        return
    with builder.loop(extents[0]) as i:
        nest(builder, extents[1:], lambda index: body((i, *index)))


def parallel_nest(builder: KernelBuilder, extents: Sequence[SizeLike], work: SizeLike, body: Callable[[Index], None]) -> None:
    """The same with as many outer loops as balance the threads collapsed into one and dealt to them."""
    outer = _balancing(builder, extents)
    if builder.threads_for(work) == 1:
        nest(builder, extents, body)
        return
    with builder.chunks(prod(extents[:outer]), work) as chunk:
        index = bound_unravel(builder, chunk, extents[:outer])
        nest(builder, extents[outer:], lambda inner: body((*index, *inner)))


@estimating
def _balancing(builder: KernelBuilder, extents: Sequence[SizeLike]) -> int:
    """How many outer loops together have enough iterations for threads of nearly equal work."""
    outer = 0
    while outer < len(extents) and prod(extents[:outer]) < 8 * builder.threads:
        outer += 1
    return outer


def bound_unravel(builder: KernelBuilder, offset: Expr, extents: Sequence[SizeLike]) -> Index:
    """Index of a flat offset, each part named."""
    index: list[Expr] = []
    for position, extent in reversed(list(enumerate(extents))):
        if is_one(extent):
            index.append(tirx.const(0, "int32"))
        elif position == 0 or is_one(prod(extents[:position])):
            index.append(offset)
        else:
            index.append(builder.bind(tirx.floormod(offset, extent)))
            offset = builder.bind(tirx.floordiv(offset, extent))
    return tuple(reversed(index))


def _broadcasts(source: Sequence[SizeLike], shape: Sequence[SizeLike]) -> bool:
    tail = shape[len(shape) - len(source) :] if source else ()
    return len(source) <= len(shape) and all(is_one(a) or equal(a, b) for a, b in zip(source, tail, strict=True))


def _spans_all_or_none(dims: Sequence[SizeLike], run: Sequence[int], shape: Sequence[SizeLike]) -> bool:
    return len({is_one(dims[axis]) for axis in run if not is_one(shape[axis])}) <= 1
