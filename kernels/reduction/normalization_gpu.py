"""Softmax and the normalizations on a GPU: a block of threads for each row, or a thread where rows are short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...runtime.target import Target
from ..codegen.builder import row_major
from ..codegen.gpu_builder import GpuBuilder
from ..groups.group import Group
from ..template.contract import BuiltKernel, Refusal
from . import normalization
from .normalization import Rows
from .reduction_loops import Block, Loop
from .thread_block import SHORT_ROW, emit_rows


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes what the CPU's template takes."""
    built = normalization.build(group, target, _emit)
    return built if isinstance(built, Refusal) else replace(built, template="gpu_normalization")


def _emit(rows: Rows, work: int, compute: Callable[[Block], None]) -> None:
    if not rows.rowwise or rows.length < SHORT_ROW:
        rows.emit(work, compute)
        return
    assert isinstance(rows.builder, GpuBuilder)
    extents, zeros = rows.shape[: rows.row.start], (0,) * len(rows.row)
    emit_rows(
        rows.builder,
        extents,
        lambda index: row_major((*index, *zeros), rows.shape),
        (Loop(rows.length, 1),),
        lambda block: compute(replace(block, index=(*block.index, *zeros))),
        [rows.group.types[name].dtype for name in (rows.anchor.inputs[0], *rows.group.outputs[:1])],
    )
