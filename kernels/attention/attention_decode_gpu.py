"""Fused attention of a few queries on a GPU, as each new token asks for it: keys and values are read once, by many blocks.

As in Flash-Decoding (Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023): a block of threads has a part
of the keys of some heads that read the same ones, and stores the sum of its exponentials times values, the sum of the
exponentials, and their maximum. A second grid brings the parts together, in their order. Where one part has all keys there is one
grid. Neighbouring lanes read a key, 16 bytes each, and add up by shuffles; probabilities stay float32.

A block all of whose keys are masked, as those of a cache that no token has reached, reads no more than the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from ...runtime.hardware.gpu import GpuMachine, gpu_machine
from ...runtime.target import Target
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..groups.group import Group
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder
from .attention_decode_block import DecodeShape, Parts, emit_meeting, emit_parts
from .attention_mma_block import power
from .located import Located, locate
from .mask import may_hide_keys
from .operands import Elements
from .pattern import Attention, attention_of

_WARPS = 4
_MOST_ROWS, _ROW_ELEMENTS = 8, 1024  # of a block: its queries, and elements of all their results
_MOST_WIDTH = 256
_SCORE_BYTES = 16 << 10  # of a block's queries and keys
_STATIC_BYTES = 48 << 10  # of shared memory that a block may have without asking for more
_KEYS_AT_ONCE = 4  # of a lane, so that as many loads are under way


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes attention of up to 8 queries, heads up to 256 deep."""
    form = attention_of(group)
    if isinstance(form, Refusal):
        return form
    if form.dtype != "float32" or max(form.depth, form.width) > _MOST_WIDTH or form.queries > _MOST_ROWS:
        return Refusal(f"{form.queries} queries of {form.depth} and {form.width} {form.dtype} are not few, float32 and narrow")
    if form.weighs_probabilities and form.guard != 0.0:
        return Refusal("computes something from each probability")
    kernel = _Decode(form, target)
    if not kernel.keys:
        return Refusal("shared memory does not hold a block's scores and results")
    return Candidate(kernel.estimate(), kernel.build)


@dataclass(frozen=True)
class _Decode:
    """The kernel of one attention."""

    form: Attention
    target: Target

    @cached_property
    def machine(self) -> GpuMachine:
        return gpu_machine(self.target.level)

    @cached_property
    def heads(self) -> int:
        """Of a block, which read the same keys and values."""
        widest = max(self.form.depth, self.form.width)
        most = max(min(_MOST_ROWS, _ROW_ELEMENTS // power(widest)) // self.form.queries, 1)
        return Elements(self.form, GpuBuilder()).shared_heads(most)

    @cached_property
    def shape(self) -> DecodeShape:
        form, lanes = self.form, self.machine.lanes
        of_key = self._vector(locate(form, form.scores, 1), along_rows=False)
        of_value = self._vector(locate(form, form.product, 1), along_rows=True)
        return DecodeShape(form, self.heads, _WARPS, lanes, of_key, of_value, _KEYS_AT_ONCE)

    def _vector(self, operand: Located | Refusal, *, along_rows: bool) -> int:
        """Neighbours of a key, or of a value, that are loaded at once."""
        if isinstance(operand, Refusal):
            return 1
        widest = 16 // (4 if self.form.group.types[operand.source].dtype == "float32" else 2)
        options = (n for n in (8, 4, 2) if n <= widest)
        return next((n for n in options if operand.has_runs(n, along_rows=along_rows)), 1)

    @cached_property
    def keys(self) -> int:
        """Of a part: as many as take the least time; 0 where a block's shared memory holds not even those of a step."""
        shape, step, rows = self.shape, self.shape.step, self.heads * self.form.queries
        beside = 2 * rows + shape.warps * rows * self.form.width + shape.threads  # maxima and sums, results, looks at the mask
        held = (min(_STATIC_BYTES, self.machine.block_bytes) // 4 - beside) // rows // step
        most = min(max(_SCORE_BYTES // (4 * rows) // step, 1), held)
        if most < 1:
            return 0
        steps = ceil(self.form.keys / step)
        offered = sorted({min(1 << n, most, steps) for n in range(steps.bit_length() + 1)}, reverse=True)
        return min((n * step for n in offered), key=self._clocks)

    @property
    def parts(self) -> int:
        return ceil(self.form.keys / self.keys)

    @property
    def _groups(self) -> int:
        return prod(self.form.batch) // self.heads

    def _clocks(self, keys: int) -> float:
        """Of parts of so many keys, as far as they depend on that: what blocks wait for, their bytes, and the second grid."""
        machine, form, shape = self.machine, self.form, self.shape
        parts = ceil(form.keys / keys)
        resident = machine.multiprocessors * max(2048 // shape.threads // 2, 1)
        turns = ceil(self._groups * parts / resident)
        loads = ceil(keys / shape.step) * 2  # of keys, and of values
        looks = 1 if parts > 1 and may_hide_keys(form) else 0  # at the mask
        waiting = turns * (looks + loads) * machine.memory_latency
        bytes_ = 2 * 4 * parts * prod(form.batch) * form.queries * form.width if parts > 1 else 0
        launch = machine.launch_cycles + 2.0 * machine.memory_latency if parts > 1 else 0.0
        return waiting + bytes_ / machine.memory_bytes + launch

    @property
    def flops(self) -> int:
        form = self.form
        return 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)

    def estimate(self) -> Estimate:
        """In clocks of the whole GPU: what blocks wait for, or the arithmetic of all."""
        machine = self.machine
        arithmetic = self.flops / machine.fma_flops / machine.multiprocessors
        return Estimate(max(self._clocks(self.keys), 2.0 * arithmetic), self.flops, is_parallel=False)

    def build(self) -> BuiltKernel:
        builder, form = new_builder(self.target, self.form.group.configuration), self.form
        assert isinstance(builder, GpuBuilder)
        parts = None
        if self.parts > 1:
            rows = prod(form.batch) * form.queries * self.parts
            maxima, sums, results = (builder.workspace(rows * n, "float32") for n in (1, 1, form.width))
            parts = Parts(maxima, sums, results, self.parts)
        emit_parts(builder, self.shape, self.keys, parts)
        if parts is not None:
            emit_meeting(builder, self.shape, parts)
        return finish("gpu_decode_attention", builder, form.group, flops=self.flops)
