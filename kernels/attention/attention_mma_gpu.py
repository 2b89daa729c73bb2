"""Fused attention on the matrix unit of a GPU, as FlashAttention-2 (Dao, arXiv 2307.08691, 2023) does it.

A warp has 16 queries of a head, or 32 by AMD's larger instructions; their fragments, scores and results stay in registers. Parts
of keys and values pass through two stages of shared memory that all warps of a block read. The online softmax is computed on the
sums of the first product as they lie in registers, which are the second product's fragments. Operands of 16 bits are multiplied
as they are, probabilities rounded likewise; those of float32, and probabilities, are sums of bfloat16 numbers (bf16_split.py) on
NVIDIA's unit, and themselves on AMD's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from ...runtime.hardware.gpu import gpu_machine, has_mfma
from ...runtime.target import Target
from ..codegen import amdgcn
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..groups.group import Group
from ..microkernels.bf16_split import PRODUCTS
from ..microkernels.gpu_units import missing_terms, missing_unit, multiplied_as, number_bytes
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import bound_unravel
from .attention_mma_block import STAGES, AttentionBlock, AttentionTile, LocatedOperands, power
from .located import locate
from .pattern import Attention, attention_of

_HALVES = ("bfloat16", "float16")
_MOST_DEPTH = 128  # of heads: results of 16 queries are 64 registers
_LEAST_QUERIES = 8
_PART_CLOCKS, _SCORE_CLOCKS = 900.0, 0.25  # of a part's latency and barrier, and of a score's softmax


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes attention whose operands are tensors of one floating type seen through views and scales, heads up to 128 deep."""
    if missing := missing_unit(target):
        return Refusal(f"{target} has no {missing}")
    form = attention_of(group)
    if isinstance(form, Refusal):
        return form
    if form.dtype != "float32" or max(form.depth, form.width) > _MOST_DEPTH or form.queries < _LEAST_QUERIES:
        return Refusal(f"{form.queries} queries of {form.depth} and {form.width} {form.dtype} fill no tiles of the matrix unit")
    if form.weighs_probabilities and form.guard != 0.0:
        return Refusal("computes something from each probability")
    found = [locate(form, product, position) for product, position in ((form.scores, 0), (form.scores, 1), (form.product, 1))]
    operands = [one for one in found if not isinstance(one, Refusal)]
    if len(operands) < len(found):
        return next(one for one in found if isinstance(one, Refusal))
    dtypes = {group.types[one.source].dtype for one in operands}
    if len(dtypes) > 1 or not dtypes <= {"float32", *_HALVES}:
        return Refusal(f"the matrix unit does not multiply {' by '.join(sorted(dtypes))}")
    if dtypes != {"float32"} and any(one.is_scaled for one in operands):
        return Refusal("scales operands of 16 bits")
    if not all(one.keeps_zero for one in operands):
        return Refusal("what pads an operand would not stay 0")
    if dtypes != {"float32"} and not group.tolerance.may_round and group.types[form.product.inputs[0]].dtype not in dtypes:
        return Refusal("probabilities may not be rounded to 16 bits")
    kernel = _Attention(form, target, LocatedOperands(*operands))
    if missing := missing_terms(target, kernel.terms):
        return Refusal(missing)
    if not kernel.keys:
        return Refusal("shared memory does not hold a block's queries and stages")
    return Candidate(kernel.estimate(), kernel.build)


@dataclass(frozen=True)
class _Attention:
    """The kernel of one attention."""

    form: Attention
    target: Target
    operands: LocatedOperands

    @cached_property
    def dtype(self) -> str:
        """Of the operands in memory."""
        return self.form.group.types[self.operands.query.source].dtype

    @cached_property
    def kind(self) -> amdgcn.Number:
        """What the unit multiplies."""
        return multiplied_as({self.dtype}, self.target, may_round=self.form.group.tolerance.may_round)

    @cached_property
    def terms(self) -> int:
        """Numbers of 16 bits that each operand is the sum of; two make far less error than float16 promises."""
        if self.dtype in _HALVES or self.kind == "f32":
            return 1
        tolerance = self.form.group.tolerance
        return 2 if tolerance.storage == "float16" else tolerance.terms

    @cached_property
    def keys(self) -> int:
        """Of a part: on NVIDIA scores of 16 queries by them are two registers each, and stages of all terms of deep heads are too
        much for consumers' GPUs, which 0 stands for where 16 are too many; on AMD room for two blocks' stages."""
        if self.target.kind == "cuda":
            offered, most = (64, 32, 16) if self.terms == 1 else (32, 16), gpu_machine(self.target.level).block_bytes
            return next((keys for keys in offered if self.shared_bytes(keys) <= most), 0)
        row = (power(self.form.depth) + power(self.form.width)) * number_bytes(self.kind)
        return 64 if STAGES * 64 * row <= gpu_machine(self.target.level).block_bytes // 2 else 32

    def shared_bytes(self, keys: int) -> int:
        """Of a block's queries and stages."""
        rows, warps = self.shape
        depth, width = (max(power(n), rows) for n in (self.form.depth, self.form.width))
        return self.terms * number_bytes(self.kind) * (rows * warps * depth + STAGES * keys * (depth + width))

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Queries of a warp, and warps of a block: the most that still give every multiprocessor a block."""
        heads, machine = prod(self.form.batch), gpu_machine(self.target.level)
        offered = [(rows, n) for rows in (self._most_rows, 16) for n in (4, 2)]
        for rows, n in offered:
            if heads * ceil(self.form.queries / (rows * n)) >= machine.multiprocessors and rows * n < self.form.queries + rows:
                return rows, n
        return 16, 1

    @property
    def _most_rows(self) -> int:
        return 32 if has_mfma(self.target.level) else 16

    @cached_property
    def tile(self) -> AttentionTile:
        return AttentionTile(self.target, self.kind, self.terms, *self.shape, self.keys)

    @property
    def blocks(self) -> int:
        return prod(self.form.batch) * ceil(self.form.queries / self.tile.queries)

    @property
    def flops(self) -> int:
        form = self.form
        return 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)

    def estimate(self) -> Estimate:
        """In clocks of the whole GPU: products and softmax of all blocks, or the wait for parts where there are few."""
        machine, form = gpu_machine(self.target.level), self.form
        rate = machine.float_flops if self.kind == "f32" else machine.half_flops
        products = self.flops * len(PRODUCTS[self.terms]) / rate
        softmax = prod(form.batch) * form.queries * form.keys * _SCORE_CLOCKS
        turns = ceil(self.blocks / machine.multiprocessors)
        waiting = ceil(turns / 4) * ceil(form.keys / self.keys) * _PART_CLOCKS
        clocks = max((products + softmax) / machine.multiprocessors, waiting)
        return Estimate(clocks, self.flops, unit="tile", is_parallel=False)

    def build(self) -> BuiltKernel:
        builder = new_builder(self.target, self.form.group.configuration)
        assert isinstance(builder, GpuBuilder)
        tile, rows = self.tile, ceil(self.form.queries / self.tile.queries)
        with builder.blocks(self.blocks, tile.threads) as (block, thread):
            *batch, number = bound_unravel(builder, block, (*self.form.batch, rows))
            code = AttentionBlock(self.form, tile, self.operands, builder)
            code.emit(thread, tuple(batch), builder.bind(number * tile.queries))
        return finish("gpu_mma_attention", builder, self.form.group, flops=self.flops)
