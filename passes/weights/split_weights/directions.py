"""A recurrence of two directions as two of one, whose weights pass through memory one after the other.

Each step of a recurrence reads all weights of its direction, so these are not cut further.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array, constant_tensor
from ....compiler.ir.facts import infer_node
from ....compiler.ir.matching import input_at, is_constant
from ....compiler.ir.names import fresh_name
from ....compiler.ir.rewriter import copy_source, drop_unused_constants, operation, remove_nodes, replace_node

_OPERATORS = ("GRU", "LSTM", "RNN")
_WEIGHTS = (1, 2)  # W and R
_BY_DIRECTION = (1, 2, 3, 5, 6, 7)  # inputs whose directions are a dimension: weights, biases, first states and peepholes
_STATES = (5, 6)  # of these, those that layout says the order of
_ACTIVATIONS = "activations"  # of one direction, then of the other
_PARAMETERS = ("activation_alpha", "activation_beta")  # of those activations that take one: whose they are is not told
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def weight_bytes(node: ir.Node) -> int:
    """Bytes of the weights of a recurrence that can be cut into its directions; 0 for all other nodes."""
    direction = node.attributes.get_string("direction", "forward")
    if node.domain != "" or node.op_type not in _OPERATORS or direction != "bidirectional":
        return 0
    found = [input_at(node, position) for position in _WEIGHTS]
    if any(value is None or not is_constant(value) or len(value.uses()) != 1 or value.is_graph_output() for value in found):
        return 0
    if any(name in node.attributes for name in _PARAMETERS) or len(node.attributes.get_strings(_ACTIVATIONS, ())) % 2:
        return 0
    tensors = [constant_tensor(value) for value in found if value is not None]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.dtype in _FLOATS)


def directions_of(model: ir.Model, node: ir.Node) -> list[ir.Node]:
    """The recurrences of both directions, in the model before the node, with what cuts their first states out."""
    parts = []
    for number, direction in enumerate(("forward", "reverse")):
        inputs = [
            _of_direction(model, node, position, value, number) if value is not None and position in _BY_DIRECTION else value
            for position, value in enumerate(node.inputs)
        ]
        attributes = [_half(attribute, number) for name, attribute in node.attributes.items() if name != "direction"]
        part = ir.Node(
            "", node.op_type, inputs, [*attributes, ir.AttrString("direction", direction)], num_outputs=len(node.outputs)
        )
        for made, whole in zip(part.outputs, node.outputs, strict=True):
            made.name = fresh_name(model, f"{whole.name}_{direction}") if whole.name else ""
        copy_source((node,), part)
        model.graph.insert_before(node, part)
        infer_node(part, model)
        parts.append(part)
    return parts


def join_directions(model: ir.Model, node: ir.Node, parts: list[ir.Node]) -> None:
    """Put recurrences of one direction in the place of that of both: their results side by side."""
    layout, weights = node.attributes.get_int("layout", 0), [input_at(node, position) for position in _BY_DIRECTION[:3]]
    joined: list[ir.Node | None] = []
    for position, whole in enumerate(node.outputs):
        axis = layout if position else 1 + layout
        pieces = [part.outputs[position] for part in parts]
        joined.append(operation("Concat", pieces, axis=axis) if whole.name else None)
    outputs = [None if one is None else one.outputs[0] for one in joined]
    replace_node(model, node, [one for one in joined if one is not None], outputs)
    drop_unused_constants(model, weights)


def take_back(model: ir.Model, parts: list[ir.Node]) -> None:
    """Take recurrences that nothing reads out of the model, with all that was made for them."""
    made = [value for part in parts for value in part.inputs]
    remove_nodes(parts)
    slices = [value.producer() for value in made if value is not None and value.producer() is not None and not value.uses()]
    cuts = [one for one in slices if one is not None and one.op_type == "Slice" and one.graph is model.graph]
    made += [value for one in cuts for value in one.inputs]
    remove_nodes(cuts)
    drop_unused_constants(model, made)


def _of_direction(model: ir.Model, node: ir.Node, position: int, value: ir.Value, number: int) -> ir.Value:
    """The part of an input that belongs to a direction."""
    axis = node.attributes.get_int("layout", 0) if position in _STATES else 0
    array = constant_array(value) if is_constant(value) else None
    if array is not None:
        return add_constant(model, np.ascontiguousarray(np.take(array, [number], axis=axis)), f"{value.name}_direction")
    places = (add_constant(model, np.array([place], np.int64), "place") for place in (number, number + 1, axis))
    cut = operation("Slice", [value, *places])
    cut.outputs[0].name = fresh_name(model, f"{value.name}_direction")
    copy_source((node,), cut)
    model.graph.insert_before(node, cut)
    infer_node(cut, model)
    return cut.outputs[0]


def _half(attribute: ir.Attr, number: int) -> ir.Attr:
    """An attribute of one direction."""
    if attribute.name != _ACTIVATIONS:
        return attribute
    half = len(attribute.value) // 2
    return ir.Attr(attribute.name, attribute.type, attribute.value[number * half : (number + 1) * half])
