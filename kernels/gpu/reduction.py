"""The Reduce operators and global pooling on a GPU: a block of threads for each result, or a thread where there are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ...runtime.target import Target
from ..builder import KernelBuilder
from ..cpu import reduction
from ..cpu.reduction_loops import Block, Loop, emit_blocks, offset_of
from ..group import Group
from ..template import BuiltKernel, Refusal
from .builder import GpuBuilder
from .thread_block import SHORT_ROW, emit_rows

_MANY_RESULTS = 1 << 14  # enough threads by themselves; along columns they then read what is contiguous


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes what the CPU's template takes."""
    built = reduction.build(group, target, _emit)
    return built if isinstance(built, Refusal) else replace(built, template="gpu_reduction")


def _emit(
    group: Group,
    builder: KernelBuilder,
    kept: Sequence[Loop],
    reduced: tuple[Loop, ...],
    lanes: int,
    work: int,
    compute: Callable[[Group, Block], None],
) -> None:
    assert isinstance(builder, GpuBuilder)
    extents = [loop.extent for loop in kept]
    is_column = bool(reduced) and reduced[-1].stride != 1
    if prod(loop.extent for loop in reduced) < SHORT_ROW or (is_column and prod(extents) >= _MANY_RESULTS):
        emit_blocks(group, builder, kept, reduced, lanes, work, compute)
        return
    emit_rows(builder, extents, lambda index: offset_of(index, kept), reduced, lambda block: compute(group, block))
