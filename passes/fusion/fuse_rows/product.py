"""Matrix products that may be computed with the rows of their result."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from ....compiler.ir.kinds import is_pointwise
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.rows import Rows, rows_of
from ....compiler.pipeline import Context
from ....kernels.cost.product import product_rows_drawback
from ....kernels.cost.strassen import strassen_drawback
from ....runtime.precision import TOLERANCES


def product_before(seed: ir.Node, claimed: dict[ir.Node, ir.Node]) -> ir.Node | None:
    """The matrix product that a reduction is of, or of what follows it."""
    operand = seed.inputs[0]
    producer = None if operand is None else operand.producer()
    product = claimed.get(producer, producer) if producer is not None else None
    is_product = product is not None and product.domain == "" and product.op_type in ("MatMul", "Gemm")
    return product if is_product else None


def product_fault(product: ir.Node, seed: ir.Node, rows: Rows, context: Context) -> Rejection | None:
    """Why a product is not computed with the rows; None if it may be, and pays."""
    reason = _fault(product, rows, context)
    return (
        Rejection(f"{product.op_type} not computed with the rows of {seed.op_type}: {reason}", (product, seed))
        if reason
        else None
    )


def _fault(product: ir.Node, rows: Rows, context: Context) -> str:
    target, (a, b, *_) = context.target, product.inputs
    (result,) = product.outputs
    if any(value is not None and value.dtype != ir.DataType.FLOAT for value in (*product.inputs, result)):
        return "its operands are not float32"
    if target.has_tiles:
        return "the tile unit computes it faster"
    if static_shape(result) != rows.shape or rows.count != 1:
        return f"its shape is {result.shape}, which is not that of the rows {list(rows.shape)}"
    weights = static_shape(b) or ()
    if not _is_constant(b) or _is_constant(a) or len(weights) != 2:
        return "its right operand alone is to be one constant matrix"
    if result.is_graph_output():
        return f"%{result.name} is an output of the graph"
    if other := next((one for one in result.consumers() if not is_pointwise(one) and rows_of(one) is None), None):
        return f"%{result.name} is read by {other.op_type}, too"
    depth, is_transposed = prod(weights) // rows.length, product.attributes.get_int("transA", 0) == 1
    size = rows.number, rows.length, depth, target.machine
    if TOLERANCES[context.precision].allows_strassen and not is_transposed and not strassen_drawback(*size):
        return "by Strassen's fewer multiplications, which take blocks of all rows, it is faster alone"
    return product_rows_drawback(rows.number, depth, rows.length, target.threads, target.machine)


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and not value.is_graph_input()
