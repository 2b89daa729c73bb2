"""What is wrong with the launches of a Plan for GPUs: sizes that no device has, tensor maps that lie outside of what they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from .plan import VECTOR_ALIGNMENT, Grid, Kernel, Launch, Plan, Region, TensorMap, step_reads, step_writes

_BLOCK_THREADS = 1024  # of any GPU
_SHARED_BYTES = 227 * 1024  # of a block, on any GPU
_MOST_DIMENSIONS = 5  # of a tensor map; its other limits are those of cuTensorMapEncodeTiled, too
_CHUNK_BYTES = 16
_MOST_OF_BOX = 256
_MOST_EXTENT = 2**32
_MOST_STRIDE = 2**40
_SWIZZLES = (0, 32, 64, 128)


def grid_faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where, and what."""
    kernels = {kernel.symbol: kernel for kernel in plan.kernels if kernel.grids}
    for kernel in kernels.values():
        for grid in kernel.grids:
            yield from ((f"kernel {kernel.symbol}", what) for what in _size_faults(kernel, grid))
    for number, step in enumerate(plan.steps):
        if not isinstance(step, Launch) or step.kernel not in kernels:
            continue
        for region in (*step_reads(step), *step_writes(step)):  # kernels of GPUs load vectors of their operands
            if region.offset % VECTOR_ALIGNMENT:
                yield f"step {number}", f"{region} begins at no multiple of {VECTOR_ALIGNMENT} bytes"
        regions = (*step.reads, *step.writes, *step.scratch)
        for grid in kernels[step.kernel].grids:
            yield from ((f"step {number}", what) for what in _reach_faults(grid, regions))


def _size_faults(kernel: Kernel, grid: Grid) -> Iterator[str]:
    if not (0 < grid.blocks < 2**31 and 0 < grid.threads <= _BLOCK_THREADS):
        yield f"no device runs {grid.blocks} blocks of {grid.threads} threads"
    if not 0 <= grid.shared_bytes <= _SHARED_BYTES:
        yield f"no device has {grid.shared_bytes} bytes of shared memory for a block"
    for one in grid.maps:
        if not 0 <= one.argument < kernel.arguments:
            yield f"a tensor map is of pointer {one.argument}, of {kernel.arguments}"
        elif what := tensor_map_fault(one):
            yield f"the tensor map of pointer {one.argument} {what}"


def tensor_map_fault(one: TensorMap) -> str:
    """Why the driver would refuse a tensor map; empty if it would not."""
    rank = len(one.extents)
    if not 1 <= rank <= _MOST_DIMENSIONS or (len(one.strides), len(one.box)) != (rank - 1, rank):
        return f"has {rank} dimensions, {len(one.strides)} strides and a box of {len(one.box)}"
    if one.item_bytes not in (1, 2, 4, 8) or one.swizzle_bytes not in _SWIZZLES:
        return f"has elements of {one.item_bytes} bytes and a swizzle of {one.swizzle_bytes}"
    if not all(0 < extent <= _MOST_EXTENT for extent in one.extents):
        return f"has extents {list(one.extents)}"
    if any(stride % _CHUNK_BYTES or not 0 < stride < _MOST_STRIDE for stride in one.strides):
        return f"has strides {list(one.strides)}, which are no multiples of {_CHUNK_BYTES} bytes"
    if not all(0 < extent <= _MOST_OF_BOX for extent in one.box):
        return f"has a box {list(one.box)}, of more than {_MOST_OF_BOX} elements along a dimension"
    row_bytes = one.box[0] * one.item_bytes
    if row_bytes % _CHUNK_BYTES or (one.swizzle_bytes and row_bytes > one.swizzle_bytes):
        return f"has a box with rows of {row_bytes} bytes and a swizzle of {one.swizzle_bytes}"
    if prod(one.box) * one.item_bytes > _SHARED_BYTES:
        return f"has a box of {prod(one.box) * one.item_bytes} bytes"
    return ""


def _reach_faults(grid: Grid, regions: Sequence[Region]) -> Iterator[str]:
    """Tensor maps that end behind the memory that the launch has for their pointer."""
    for one in grid.maps:
        if one.argument < len(regions) and not tensor_map_fault(one) and one.size_bytes > regions[one.argument].size_bytes:
            yield f"a tensor map sees {one.size_bytes} bytes of {regions[one.argument]}"
