"""Groups of reductions over the same rows on a GPU: a block of threads for each row, or a thread where rows are short.

A thread has the same elements of a row in each loop, so that what it keeps for a later one it alone reads: from shared memory, or
from the output. Results of reductions are in a register of every thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import Size
from ...runtime.target import Target
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.grids import BLOCK_THREADS
from ..groups.group import Group
from ..template.contract import BuiltKernel, Candidate, Refusal, at_floors
from ..template.kernel import finish, new_builder
from ..template.loops import bound_unravel
from .row_lowering import FOLDS
from .row_schedule import RowForm, row_form
from .rows import RowLoops, element_buffer, emit_in_turns, row_work
from .thread_block import SHORT_ROW, ThreadBlock, threads_of_rows

_SHARED_BYTES = 40 * 1024  # of a block, of 48 KiB: what later loops read, which is computed again above it, and sums of threads


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes what the CPU's template takes, of sizes that are known."""
    form = row_form(group)
    if isinstance(form, Refusal):
        return form
    if isinstance(prod((*form.outer, *form.row)), Size):
        return Refusal("a call decides how long rows are, or how many")
    if _bytes_of_sums(form) > _SHARED_BYTES:
        return Refusal(f"{len(form.folds)} reductions have more sums than a block's shared memory holds")
    return at_floors(partial(_build, form=_recomputing(form)))(group, target)


def _recomputing(form: RowForm) -> RowForm:
    """The form that keeps nothing but outputs, where the rest is too large for shared memory."""
    if form.scratch_bytes + _bytes_of_sums(form) <= _SHARED_BYTES or form.length < SHORT_ROW:
        return form
    return replace(form, kept={name: loop for name, loop in form.kept.items() if name in form.group.outputs})


def _bytes_of_sums(form: RowForm) -> int:
    """What the threads of a block bring together: one number each, for each reduction."""
    types = (np.dtype(form.group.types[op.outputs[0]].dtype) for op in form.folds)
    return sum(BLOCK_THREADS * kind.itemsize for kind in types)


def _build(group: Group, target: Target, form: RowForm) -> BuiltKernel:
    builder, work = new_builder(target), row_work(form)
    assert isinstance(builder, GpuBuilder)
    if form.length < SHORT_ROW and 0 not in form.outer:
        emit_in_turns(form, builder, work)
    elif 0 not in form.outer:
        _emit_blocks(form, builder)
    return finish("gpu_rows", builder, group, flops=work)


def _emit_blocks(form: RowForm, builder: GpuBuilder) -> None:
    """A block of threads for each row."""
    types = form.group.types
    whole = (*form.outer, *form.row)
    dtypes = [kind.dtype for name in (*form.group.inputs, *form.group.outputs) if (kind := types[name]).shape == whole]
    count, threads = threads_of_rows(builder, dtypes, form.length)
    with builder.blocks(prod(form.outer), threads) as (row, thread):
        index = bound_unravel(builder, row, form.outer)
        places = {name: (builder.shared(form.length, types[name].dtype, "row"), tirx.const(0, "int32")) for name in form.scratch}
        places |= {
            name: (element_buffer(form, builder, name), builder.bind(row * form.length))
            for name in form.group.outputs
            if name in form.elements
        }
        block = ThreadBlock(builder, 1, 1, True, tirx.const(0, "int32"), (), index, thread, threads, count)
        _BlockRow(form, builder, index, places, {}, block).emit()


@dataclass(frozen=True)
class _BlockRow(RowLoops):
    """The loops over one row, whose elements are dealt to the threads of a block."""

    block: ThreadBlock | None = None

    def once(self) -> AbstractContextManager[None]:
        assert self.block is not None
        return self.block.once()

    def loop(self, loop: int) -> None:
        """One loop over the row: each thread stores and accumulates what is its own of it."""
        assert self.block is not None
        form, zero, folds = self.form, tirx.const(0, "int32"), self.folds(loop)
        totals = [self.builder.local(1, form.group.types[op.outputs[0]].dtype) for op in folds]
        for op, total in zip(folds, totals, strict=True):
            self.builder.store(total, 0, tirx.const(FOLDS[op.op_type].initial, str(total.dtype)))
        targets = form.targets(loop)
        self.block.each_of_row(form.row, lambda index, offset: self.element(targets, folds, totals, zero, offset, index))
        self.end_loop(self.block, targets, folds, totals)
