"""MatMul and Gemm on a GPU, batched and broadcast, with a pointwise epilogue."""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen.builder import Expr
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..groups.group import Group
from ..microkernels.gpu_block_tile import GpuProduct, emit_product, product_clocks
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish
from .matmul import MatMulKernel, Side, product_of

_OPERATIONS = 10  # of an element that is copied to shared memory: its place, and whether it is in bounds


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes what `matmul.product_of` takes."""
    product = product_of(group, target)
    if isinstance(product, Refusal):
        return product
    blocks = _blocks(product)
    clocks = product_clocks(blocks, gpu_machine(target.level), _OPERATIONS)
    return Candidate(Estimate(clocks, blocks.flops, is_parallel=False), lambda: _build(product, blocks))


def _build(product: MatMulKernel, blocks: GpuProduct) -> BuiltKernel:
    assert isinstance(product.builder, GpuBuilder)
    emit_product(product.builder, blocks)
    return finish("gpu_matmul", product.builder, product.group, flops=blocks.flops)


def _blocks(product: MatMulKernel) -> GpuProduct:
    a, b, store = product.a, product.b, product.store()
    return GpuProduct(
        prod(product.batch),
        a.lines,
        b.lines,
        a.depth,
        product.accumulator,
        lambda batch, m, k: _element(product, a, batch, m, k),
        lambda batch, k, n: _element(product, b, batch, n, k),
        lambda batch, m, n, value: store(batch, m, tirx.const(0, "int32"), n, value),
        a_along_k=not a.lines_last,
        b_along_k=not b.lines_last,
    )


def _element(product: MatMulKernel, side: Side, batch: Expr, line: Expr, k: Expr) -> Expr:
    kind = product.group.types[side.name]
    buffer = product.builder.parameter(side.name, kind.elements, kind.dtype)
    value = buffer[side.offset(side.matrix_of(product.batch, batch), line, k)]
    return value if kind.dtype == product.accumulator else tirx.Cast(product.accumulator, value)
