"""Products by one column, which are sums over the rows of their left operand."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.aliases import remove_unread_views, view_root
from ....compiler.ir.constants import add_constant, add_sizes, constant_tensor
from ....compiler.ir.matching import input_at, static_shape
from ....compiler.ir.rewriter import Rejection, drop_unused_constants, literal_shape, operation, replace_node
from ....compiler.ir.rows import Rows
from ....runtime.symbolic.shapes import broadcasts_to

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # narrower ones would round every product


def is_by_column(node: ir.Node) -> bool:
    """Whether a node is a product whose right operand has one column, all shapes known."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return False
    left, right = (static_shape(value) for value in node.inputs[:2])
    if not left or not right or 0 in left or 0 in right:
        return False
    if node.op_type == "Gemm":
        return right[0 if node.attributes.get_int("transB", 0) else 1] == 1
    return len(right) == 1 or right[-1] == 1


def column_fault(node: ir.Node) -> Rejection | None:
    """Why a product by one column cannot be spelled as a sum; None if it can."""
    reason = _fault(node)
    return Rejection(f"{node.op_type} by one column stays a product: {reason}", (node,)) if reason else None


def _fault(node: ir.Node) -> str:
    left, right = node.inputs[:2]
    assert left is not None
    assert right is not None
    if left.dtype not in _TYPES:
        return f"its products would be rounded to {left.dtype}"
    if constant_tensor(left) is not None:
        return "its left operand is constant"  # then it is the weight, which products lay out and narrow
    attributes = node.attributes
    if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0:
        return "it is not in canonical form"
    batch, own = (static_shape(right) or ())[:-2], (static_shape(left) or ())[:-2]
    if not broadcasts_to(batch, own):
        return f"its left operand is of shape {left.shape}, and there are columns for {list(batch)}"
    return ""


def summed_rows(node: ir.Node) -> Rows:
    """The rows that the sums are over which a product by one column is."""
    return Rows(_shape(_row_source(node)), 1)


def _row_source(node: ir.Node) -> ir.Value:
    """The left operand, before the views that show it where they leave its rows as they are."""
    left, right = node.inputs[:2]
    assert left is not None
    root = view_root(left)
    has_rows = len(static_shape(right) or ()) <= 2 and (static_shape(root) or ())[-1:] == _shape(left)[-1:]
    return root if has_rows else left


def spell_as_sum(model: ir.Model, node: ir.Node) -> None:
    """Put a product of elements, a sum over rows, and Gemm's bias in the place of a product by one column."""
    shown, right = node.inputs[:2]
    left = _row_source(node)
    name, made = str(node.outputs[0].name), list[ir.Node]()
    assert shown is not None
    assert right is not None

    def emit(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made.append(operation(op_type, inputs, **attributes))
        return made[-1].outputs[0]

    def ints(*numbers: int) -> ir.Value:
        return add_sizes(model, numbers, f"{name}_shape")

    right_shape, shape = _shape(right), _shape(node.outputs[0])
    depth, batch = _shape(left)[-1], right_shape[:-2]
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
    drop_unused_constants(model, [right, *remove_unread_views(shown)])


def _shape(value: ir.Value) -> tuple[int, ...]:
    shape = static_shape(value)
    assert shape is not None
    return shape
