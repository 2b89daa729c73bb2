"""Constant weights of products that lie as integers of 2, 4 or 8 bits with scales, and are multiplied as they lie.

In the graph they are a DequantizeLinear of constants that one product alone reads as its right operand, or one recurrence as the
weights of its inputs or of its states.
"""

from __future__ import annotations

import onnx_ir as ir

from ...runtime.precision import LONGEST_SUM
from .assignments.stored_form import StoredForm
from .constants import constant_tensor

PRODUCTS = ("Gemm", "MatMul")
RECURRENT = frozenset(["GRU", "LSTM", "RNN"])
# Metadata of a product: 8 where its rows may be rounded to int8 by blocks. Of a recurrence: 8 where the rows of its inputs and of
# its states may be rounded to uint8, each by its own range.
ROW_BITS = "prefuse.row_bits"
_RECURRENT_WEIGHTS = (1, 2)


def form_of(scaling: ir.Node, result: ir.DataType = ir.DataType.FLOAT) -> StoredForm | str:
    """The form of what a DequantizeLinear reads, or why it is none that kernels read. `result`: the type that it makes, and that
    of its scales."""
    weights, scale, zero = (*scaling.inputs, None)[:3]
    assert weights is not None
    assert scale is not None
    if not all(value is None or _is_known(scaling, value) for value in (weights, scale, zero)):
        return "weights, scales or zero points are no constants"
    if scale.dtype != result or scaling.outputs[0].dtype != result:
        return f"scales are not {_name(result)}"
    shape, scales = _static(weights), _static(scale)
    if shape is None or scales is None or weights.dtype is None:
        return "weights are of unknown size"
    if zero is not None and (_static(zero) != scales or zero.dtype != weights.dtype):
        return "zero points are of another shape than scales, or of another type than weights"
    axis = scaling.attributes.get_int("axis", 1)
    block = scaling.attributes.get_int("block_size", 0)
    return StoredForm(weights.dtype, shape, scales, axis % max(len(shape), 1), block, zero is not None)


def product_fault(product: ir.Node, rows_type: ir.DataType = ir.DataType.FLOAT) -> str:
    """Why the kernels of a product do not read weights as they lie; empty if they might. `rows_type`: what its rows are to be."""
    rows = product.inputs[0]
    if rows is None or rows.dtype != rows_type:
        return f"rows are not {_name(rows_type)}"
    turned = product.attributes.get_int("transA", 0) if product.op_type == "Gemm" else 0
    return "the left operand is transposed" if turned else ""


def is_stored_weights(node: ir.Node) -> bool:
    """Whether a node is a DequantizeLinear that the kernel of its one reader does in its loads."""
    if node.op_type != "DequantizeLinear" or node.domain != "":
        return False
    result = node.outputs[0]
    readers = tuple(result.uses())
    if len(readers) != 1 or (result.is_graph_output() and not isinstance(node.graph, ir.Function)):
        return False
    product, position = readers[0]
    if product.op_type in RECURRENT and product.domain == "":
        return position in _RECURRENT_WEIGHTS and not recurrent_fault(product, node)
    if product.op_type not in PRODUCTS or product.domain != "" or position != 1 or product_fault(product):
        return False
    form = form_of(node)
    return not isinstance(form, str) and not form.fault(k_axis_of(product))


def recurrent_fault(recurrence: ir.Node, scaling: ir.Node) -> str:
    """Why the kernel of a recurrence does not multiply what a DequantizeLinear, one of its weights, reads; empty if it does."""
    form, rows = form_of(scaling), recurrence.inputs[0]
    if isinstance(form, str):
        return form
    is_allowed = recurrence.metadata_props.get(ROW_BITS) == "8" or isinstance(recurrence.graph, ir.Function)
    if not is_allowed:
        return "nothing says that rows may be rounded to 8 bits"
    if form.dtype != ir.DataType.INT8 or len(form.shape) != 3 or len(scaling.inputs) > 2:
        return "weights are not int8 without zero points"
    if rows is None or rows.dtype != ir.DataType.FLOAT:
        return "rows are not float32"
    if form.axis != 2 or form.block < max(form.shape[2], 1) or form.scales != (*form.shape[:2], 1):
        return "scales are not one for each line of the weights"
    return "" if form.shape[2] <= LONGEST_SUM else f"sums of {form.shape[2]} products could pass 2^31"


def reads_integers(recurrence: ir.Node) -> tuple[int, ...]:
    """The positions of a recurrence's weights that lie as integers."""
    found = ((position, recurrence.inputs[position]) for position in _RECURRENT_WEIGHTS)
    producers = [(position, None if value is None else value.producer()) for position, value in found]
    return tuple(position for position, producer in producers if producer is not None and is_stored_weights(producer))


def k_axis_of(product: ir.Node) -> int:
    """The dimension of a product's right operand, a matrix, that is summed over."""
    is_turned = product.op_type == "Gemm" and product.attributes.get_int("transB", 0) != 0
    return int(is_turned)


def reads_stored_weights(product: ir.Node) -> bool:
    """Whether a product's right operand lies as integers."""
    value = product.inputs[1] if product.op_type in PRODUCTS and len(product.inputs) > 1 else None
    producer = None if value is None else value.producer()
    return producer is not None and is_stored_weights(producer)


def _is_known(node: ir.Node, value: ir.Value) -> bool:
    """Whether a value is a constant; in the body of a group, whether it comes from outside, as only constants do there."""
    if constant_tensor(value) is not None:
        return True
    return isinstance(node.graph, ir.Function) and value.producer() is None


def _name(dtype: ir.DataType) -> str:
    return "float32" if dtype == ir.DataType.FLOAT else dtype.name.lower()


def _static(value: ir.Value) -> tuple[int, ...] | None:
    if value.shape is None:
        return None
    dims = tuple(dim for dim in value.shape if isinstance(dim, int))
    return dims if len(dims) == len(value.shape) else None
