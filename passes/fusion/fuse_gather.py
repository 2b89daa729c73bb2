"""fuse-gather: products by matrices that a Gather chooses read them in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.functions import fuse_into_function
from ...compiler.ir.rewriter import Rejection
from ...compiler.pipeline import Context, Pass

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # that the kernel computes in


@dataclass(frozen=True)
class FuseGather(Pass):
    """Put a Gather of whole matrices into one function with the MatMul that multiplies by them.

    Before:  m = Gather(w, indices);  y = MatMul(a, m)      with w [G, K, N], indices [S], a [S, M, K]
    After:   y = prefuse.gather_matmul(w, indices, a)

    A copy of S matrices, which mixtures of experts make for every token, is then no longer made. Legal when the MatMul alone
    reads what is gathered, as its second operand, one matrix for each of the first.
    """

    name: ClassVar[str] = "fuse-gather"

    def run(self, model: ir.Model, context: Context) -> bool:
        found = [node for node in model.graph if _chooses_matrices(node)]
        changed = False
        for gather in found:
            product = _product_of(gather)
            if isinstance(product, Rejection):
                context.reject(self.name, product)
                continue
            fuse_into_function(model, [gather, product], "gather_matmul")
            changed = True
        return changed


def _product_of(gather: ir.Node) -> ir.Node | Rejection:
    """The MatMul that may join a Gather of matrices, or why none may."""
    gathered = gather.outputs[0]
    readers = gathered.consumers()
    if len(readers) != 1 or gathered.is_graph_output():
        return Rejection(f"%{gathered.name} is not read by one MatMul alone", (gather,))
    (product,) = readers
    if product.op_type != "MatMul" or product.domain != "" or product.inputs[1] is not gathered:
        return Rejection(f"{product.op_type} does not multiply by %{gathered.name} from the right", (gather, product))
    left = product.inputs[0]
    if left is gathered:
        return Rejection(f"MatMul multiplies %{gathered.name} by itself", (gather, product))
    if left is None or left.shape is None or gathered.shape is None or len(left.shape) != 3:
        return Rejection("the left operand of MatMul is not of rank 3", (gather, product))
    if left.shape[0] != gathered.shape[0]:
        return Rejection(f"{left.shape[0]} left operands for {gathered.shape[0]} matrices", (gather, product))
    return product


def _chooses_matrices(node: ir.Node) -> bool:
    """Whether a node gathers whole matrices of a type that the kernel takes, by a vector of indices."""
    if node.op_type != "Gather" or node.domain != "":
        return False
    matrices, indices = node.inputs
    if matrices is None or indices is None or matrices.shape is None or indices.shape is None:
        return False
    axis = node.attributes.get_int("axis", 0)
    return len(matrices.shape) == 3 and len(indices.shape) == 1 and axis in (0, -3) and matrices.dtype in _TYPES
