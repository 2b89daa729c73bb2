"""The Reduce operators and global pooling on a GPU: a block of threads for each result, or a thread where there are many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

from ...runtime.target import Target
from ..codegen.gpu_builder import GpuBuilder
from ..groups.group import Group
from ..template.contract import BuiltKernel, Refusal
from ..template.values import anchor_of
from . import reduction
from .reduction_loops import Block, Results, offset_of
from .thread_block import SHORT_ROW, emit_rows

_MANY_RESULTS = 1 << 14  # enough threads by themselves; along columns they then read what is contiguous


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes what the CPU's template takes."""
    built = reduction.build(group, target, partial(_emit, group.types[anchor_of(group).inputs[0]].dtype))
    return built if isinstance(built, Refusal) else replace(built, template="gpu_reduction")


def _emit(dtype: str, results: Results, work: int, compute: Callable[[Block], None]) -> None:
    length = prod(loop.extent for loop in results.reduced)
    if length < SHORT_ROW or (not results.rowwise and prod(results.extents) >= _MANY_RESULTS):
        results.emit(work, compute)
        return
    assert isinstance(results.builder, GpuBuilder)
    base = results.kept
    emit_rows(results.builder, results.extents, lambda index: offset_of(index, base), results.reduced, compute, [dtype])
