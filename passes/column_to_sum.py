"""column-to-sum: a product by one column is a sum over each row, which can be computed with what makes the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ..compiler.ir.aliases import view_root
from ..compiler.ir.constants import add_constant, constant_tensor
from ..compiler.ir.rewriter import Rejection, drop_unused_constants, literal_shape, replace_node
from ..compiler.pipeline import Context, Pass
from .canonicalization.scope import input_at, operation, static_shape

_AXES_OPSET = 13  # from which on the axes of ReduceSum are an operand
_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # narrower ones would round every product


@dataclass(frozen=True)
class ColumnToSum(Pass):
    """Spell a product by one column as a product of elements and a sum over rows.

    Before:  t = Tanh(x);  y = MatMul(t, w)                         with t [1, 24, 512], w [512, 1]
    After:   t = Tanh(x);  m = Mul(t, v);  y = ReduceSum(m, -1)     with v [512], the column laid along rows

    So fuse-rows computes it with what makes the rows and what follows. Tiles of a product have a vector of columns, all of which
    but one would be computed for nothing. Legal for floats of 32 bits or more, where the left operand has all dimensions of the
    batch. Not where that operand is constant: then it is the weight, which products lay out and narrow. Sums are rounded in
    another order.
    """

    name: ClassVar[str] = "column-to-sum"

    def run(self, model: ir.Model, context: Context) -> bool:
        if not context.target.fuses_rows or model.graph.opset_imports.get("", 1) < _AXES_OPSET:
            return False  # GPUs do not compute rows with what makes them
        found = [node for node in model.graph if _is_by_column(node)]
        changed = False
        for node in found:
            if (reason := _obstacle(node)) is not None:
                context.reject(self.name, Rejection(f"{node.op_type} by one column stays a product: {reason}", (node,)))
            else:
                _rewrite(model, node)
                changed = True
        return changed


def _is_by_column(node: ir.Node) -> bool:
    """Whether a node is a product whose right operand has one column, all shapes known."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return False
    left, right = (static_shape(value) for value in node.inputs[:2])
    if not left or not right or 0 in left or 0 in right:
        return False
    if node.op_type == "Gemm":
        return right[0 if node.attributes.get_int("transB", 0) else 1] == 1
    return len(right) == 1 or right[-1] == 1


def _obstacle(node: ir.Node) -> str | None:
    """Why a product by one column is not spelled as a sum; None if it may be."""
    left, right = node.inputs[:2]
    assert left is not None
    assert right is not None
    if left.dtype not in _TYPES:
        return f"its products would be rounded to {left.dtype}"
    if constant_tensor(left) is not None:
        return "its left operand is constant"
    attributes = node.attributes
    if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0:
        return "it is not in canonical form"
    batch, own = (static_shape(right) or ())[:-2], (static_shape(left) or ())[:-2]
    if np.broadcast_shapes(batch, own) != own:
        return f"its left operand is of shape {left.shape}, and there are columns for {list(batch)}"
    return None


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    """Put a product of elements, a sum over rows, and Gemm's bias in the place of a product by one column."""
    left, right = node.inputs[:2]
    name, made = str(node.outputs[0].name), list[ir.Node]()
    assert left is not None
    assert right is not None

    def emit(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made.append(operation(op_type, inputs, **attributes))
        return made[-1].outputs[0]

    def ints(*numbers: int) -> ir.Value:
        return add_constant(model, np.array(numbers, np.int64), f"{name}_shape")

    left_shape, right_shape, shape = _shape(left), _shape(right), _shape(node.outputs[0])
    depth, root = left_shape[-1], view_root(left)
    if len(right_shape) <= 2 and (static_shape(root) or ())[-1:] == (depth,):  # rows as they are made, whatever view shows them
        left = root
    batch = right_shape[:-2]
    laid = (*batch, 1, depth) if len(right_shape) > 2 else (depth,)
    if (tensor := constant_tensor(right)) is not None:
        lazy = ir.LazyTensor(lambda: ir.tensor(tensor.numpy().reshape(laid)), dtype=tensor.dtype, shape=ir.Shape(laid))
        row = add_constant(model, lazy, str(right.name))
    else:
        row = right if right_shape == laid else emit("Reshape", right, ints(*laid), **literal_shape(laid))
    total = emit("ReduceSum", emit("Mul", left, row), ints(-1), keepdims=1)
    if (*_shape(left)[:-1], 1) != shape:
        total = emit("Reshape", total, ints(*shape), **literal_shape(shape))
    bias = input_at(node, 2)
    total = total if bias is None else emit("Add", total, bias)
    replace_node(model, node, made, [total])
    drop_unused_constants(model, [right])


def _shape(value: ir.Value) -> tuple[int, ...]:
    shape = static_shape(value)
    assert shape is not None
    return shape
