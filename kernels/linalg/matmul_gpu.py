"""MatMul and Gemm on a GPU, batched and broadcast, with a pointwise epilogue."""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr
from ..codegen.gpu_builder import GpuBuilder
from ..groups.group import Group
from ..microkernels.gpu_block_tile import GpuProduct, emit_product
from ..template.contract import BuiltKernel, Refusal
from ..template.kernel import finish
from .matmul import Product, Side, product_of


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes what `matmul.product_of` takes."""
    product = product_of(group, target)
    return product if isinstance(product, Refusal) else _build(product)


def _build(product: Product) -> BuiltKernel:
    builder, a, b = product.builder, product.a, product.b
    assert isinstance(builder, GpuBuilder)
    store = product.store()
    blocks = GpuProduct(
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
    emit_product(builder, blocks)
    return finish("gpu_matmul", builder, product.group, flops=blocks.flops)


def _element(product: Product, side: Side, batch: Expr, line: Expr, k: Expr) -> Expr:
    kind = product.group.types[side.name]
    buffer = product.builder.parameter(side.name, kind.elements, kind.dtype)
    value = buffer[side.offset(side.matrix_of(product.batch, batch), line, k)]
    return value if kind.dtype == product.accumulator else tirx.Cast(product.accumulator, value)
