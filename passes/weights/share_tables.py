"""share-tables: tables of a Gather that a product multiplies by, too, lie in memory once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ...compiler.ir.constants import add_sizes, constant_array, constant_tensor
from ...compiler.ir.facts import infer_node
from ...compiler.ir.matching import static_shape
from ...compiler.ir.rewriter import Rejection, drop_unused_constants, literal_shape, operation, replace_node
from ...compiler.ir.shared_weights import PANELS, TABLE, has_shared_weights
from ...compiler.pipeline import Context, Pass


@dataclass(frozen=True)
class ShareTables(Pass):
    """Let a Gather of rows, such as an embedding, and the product by the same matrix (tied weights) read one constant.

    Before:  e = Gather(w, tokens);  y = MatMul(x, v)      with v the transposed w [vocabulary, width]
    After:   e = Gather(w, tokens);  y = Gemm<transB=1>(x, w)

    The Gather's metadata say that its table is a product's, and on CPUs that it lies as kernels of products read it; later passes
    that make the product's weights narrow make the Gather read these. Only in models whose weights programs for other sizes
    read: there memory counts, and the panels' rows, whose elements lie apart, cost a step of few tokens nothing.
    """

    name: ClassVar[str] = "share-tables"

    def run(self, model: ir.Model, context: Context) -> bool:
        if not has_shared_weights(model):
            return False
        changed = False
        for gather in [node for node in model.graph if _reads_table(node)]:
            table = gather.inputs[0]
            assert table is not None
            products = [node for node in model.graph if _multiplies_by(node, table)]
            if not products:
                context.reject(self.name, Rejection(f"%{table.name} is no weight of a product", (gather,)))
                continue
            others = [node for node in products if node.op_type == "MatMul"]
            for product in others:
                _multiply_by_rows(model, product, table)
            changed = changed or bool(others) or TABLE not in gather.metadata_props
            gather.metadata_props[TABLE] = "1"
            if not context.target.is_gpu:  # whose kernels read shared weights as they lie
                gather.metadata_props[PANELS] = "1"
        return changed


def _reads_table(node: ir.Node) -> bool:
    """Whether a node gathers rows of a constant matrix of floating point numbers."""
    if node.op_type != "Gather" or node.domain != "" or node.inputs[0] is None or static_shape(node.inputs[1]) is None:
        return False
    tensor, axis = constant_tensor(node.inputs[0]), node.attributes.get_int("axis", 0)
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) == 2 and axis in (0, -2)


def _multiplies_by(node: ir.Node, table: ir.Value) -> bool:
    """Whether a node is a product by the transposed table: a Gemm by the table itself, or a MatMul by another constant."""
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul"):
        return False
    right = node.inputs[1]
    if node.op_type == "Gemm":
        return right is table and node.attributes.get_int("transB", 0) == 1
    array = constant_array(right) if right is not None and static_shape(right) == (static_shape(table) or ())[::-1] else None
    if array is None or prod(static_shape(node.inputs[0]) or (0,)) == 0:
        return False
    rows = constant_array(table)
    assert rows is not None
    is_same_memory = array.ctypes.data == rows.ctypes.data and array.strides == rows.strides[::-1]
    return array.dtype == rows.dtype and (is_same_memory or np.array_equal(array, rows.T))


def _multiply_by_rows(model: ir.Model, product: ir.Node, table: ir.Value) -> None:
    """Write a MatMul by the transposed table as a Gemm by the table."""
    left, weights = product.inputs
    shape, columns = static_shape(left), static_shape(table)
    assert left is not None
    assert shape is not None
    assert columns is not None
    nodes = []
    if len(shape) != 2:
        flat = (prod(shape[:-1]), shape[-1])
        nodes.append(operation("Reshape", [left, add_sizes(model, flat, "rows")], **literal_shape(flat)))
        left = nodes[-1].outputs[0]
    nodes.append(operation("Gemm", [left, table], transB=1))
    if len(shape) != 2:
        full = (*shape[:-1], columns[0])
        nodes.append(operation("Reshape", [nodes[-1].outputs[0], add_sizes(model, full, "shape")], **literal_shape(full)))
    replace_node(model, product, nodes, [nodes[-1].outputs[0]])
    for node in nodes:
        infer_node(node, model)
    drop_unused_constants(model, [weights])
