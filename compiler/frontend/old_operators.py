"""Operators whose meaning changed with an opset, and which ONNX's version converter leaves as they were."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ..ir.cloning import copy_value
from ..ir.constants import add_constant
from ..ir.facts import infer_facts, infer_node, source_of
from ..ir.names import fresh_name
from ..ir.operand_shapes import channels_of_groups
from ..ir.rewriter import replace_node
from .old_images import respell_images_after, respell_images_before

_NUMPY_OPSET = 7  # from here on operands broadcast as NumPy does, those of PRelu too
_NUMBERS_OPSET = 11  # from here on numbers of Clip and Pad are inputs, which the converter makes floats of any data
_FIRST_NUMBER = {"Clip": 1, "Pad": 2}  # their positions
_ONE_AXIS_OPSET = 13  # from here on Hardmax is along one axis, the last if none is named; before, over all from the second on
_CHANNELS_OPSET = 21  # from here on GroupNormalization has factors for each channel; before, for each group, and it is withdrawn
# Operators that said from which axis on their second operand broadcasts; others that did have no conversion.
_PLACED_OPERATORS = frozenset(["Add", "Div", "Mul", "Pow", "Sub"])
_BATCHED_SCAN_OPSET = 8  # the only one whose Scan has a batch dimension; the converter cuts it off the whole model


def respell_before_conversion(model: ir.Model, new: int) -> None:
    """Bring a model, which will have the opset `new`, past those at which the converter changes its meaning.

    Raises:
        InvalidModelError: groups do not fit.
        UnsupportedModelError: it has operators that stand in the way.
    """
    respell_images_before(model)
    opset = model.graph.opset_imports[""]
    if opset < _NUMPY_OPSET:
        _place_operands(model)
    if opset < _NUMBERS_OPSET:
        _drop_unread_numbers(model)
    if new >= _CHANNELS_OPSET:
        respell_groups(model)
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "Scan" and node.domain == ""]
    if opset != _BATCHED_SCAN_OPSET or not nodes:
        return
    if any(node.op_type == "Upsample" for node in model.graph.all_nodes()):  # the other operator that changes its form here
        raise UnsupportedModelError("model", "Scan of opset 8 beside Upsample", "export it with opset 9 or newer")
    for node in nodes:
        _scan_batch(model, node)
    model.graph.opset_imports[""] = _BATCHED_SCAN_OPSET + 1


def respell_after_conversion(model: ir.Model, opset: int, where: str) -> None:
    """Give operators of a converted model, which had `opset`, the spelling in which they mean what they meant.

    Raises:
        UnsupportedModelError: there is no such spelling.
    """
    respell_images_after(model, opset)
    for node in list(model.graph.all_nodes()):
        if opset < _NUMBERS_OPSET and node.domain == "" and node.op_type in _FIRST_NUMBER:
            _cast_numbers(model, node)
        if opset < _ONE_AXIS_OPSET and node.domain == "":
            _flatten_around(model, node)
    if opset < _NUMPY_OPSET:
        _spread_slopes(model, where)


def respell_groups(model: ir.Model) -> None:
    """Put an InstanceNormalization of the groups, which has their factors, in the place of a withdrawn GroupNormalization.

    [N, C, ...] is read as [N, num_groups, C / num_groups, ...]. The facts of the model should be known.

    Raises:
        InvalidModelError: the groups do not fit.
    """
    opset = model.graph.opset_imports[""]
    if opset >= _CHANNELS_OPSET:
        return
    for node in [node for node in model.graph.all_nodes() if node.domain == "" and node.op_type == "GroupNormalization"]:
        if fault := channels_of_groups(node, opset):
            raise InvalidModelError(source_of(node), f"GroupNormalization {fault}", "correct the model")
        data, scale, bias = node.inputs
        groups = add_constant(model, np.array([node.attributes.get_int("num_groups")]), f"{node.outputs[0].name}_groups")
        whole = ir.Node("", "Shape", [data])
        parts = [ir.Node("", "Shape", [data], [ir.AttrInt64("start", i), ir.AttrInt64("end", i + 1)]) for i in range(2)]
        rest = ir.Node("", "Shape", [data], [ir.AttrInt64("start", 2)])
        each = ir.Node("", "Div", [parts[1].outputs[0], groups])
        sizes = [parts[0].outputs[0], groups, each.outputs[0], rest.outputs[0]]
        shape = ir.Node("", "Concat", sizes, [ir.AttrInt64("axis", 0)])
        grouped = ir.Node("", "Reshape", [data, shape.outputs[0]], [ir.AttrInt64("allowzero", 1)])
        epsilon = ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", 1e-5))
        normal = ir.Node("", "InstanceNormalization", [grouped.outputs[0], scale, bias], [epsilon], name=node.name)
        last = ir.Node("", "Reshape", [normal.outputs[0], whole.outputs[0]], [ir.AttrInt64("allowzero", 1)])
        new = (whole, *parts, rest, each, shape, grouped, normal, last)
        replace_node(model, node, new, last.outputs)


def _place_operands(model: ir.Model) -> None:
    """Give a second operand that broadcasts from an `axis` on, which the converter overlooks, dimensions of 1 behind its own."""
    nodes = list(model.graph.all_nodes())
    if not any(map(_says_place, nodes)):
        return
    infer_facts(model)
    for node in nodes:
        if _says_place(node):
            _place_operand(model, node)
        infer_node(node, model)
        data = node.inputs[0] if node.domain == "" and node.op_type in _PLACED_OPERATORS else None
        if data is not None and data.shape is not None and node.outputs[0].shape is None:  # ONNX infers no sums of opset 5
            node.outputs[0].type, node.outputs[0].shape = data.type, data.shape.copy()


def _says_place(node: ir.Node) -> bool:
    is_placed = node.domain == "" and node.op_type in _PLACED_OPERATORS and "axis" in node.attributes
    return is_placed and bool(node.attributes.get_int("broadcast", 0))


def _place_operand(model: ir.Model, node: ir.Node) -> None:
    data, operand = node.inputs[:2]
    if data is None or operand is None or data.shape is None or operand.shape is None:
        what = f"{node.op_type} of opset 6 or older with an axis and unknown shapes"
        raise UnsupportedModelError(source_of(node), what, "export it anew")
    rank = len(data.shape)
    axes = range(len(operand.shape), rank - node.attributes.pop("axis").as_int() % max(rank, 1))
    if not axes:
        return
    name = fresh_name(model, f"{operand.name}_placed")
    placed = ir.Node("", "Unsqueeze", [operand], [ir.AttrInt64s("axes", [*axes])], name=name)
    placed.outputs[0].name, placed.outputs[0].type = name, operand.type
    placed.outputs[0].shape = ir.Shape([*operand.shape, *[1] * len(axes)])
    assert node.graph is not None
    node.graph.insert_before(node, placed)
    node.replace_input_with(1, placed.outputs[0])


def _drop_unread_numbers(model: ir.Model) -> None:
    """Take the number from a Pad that fills with elements: the converter would leave it."""
    for node in model.graph.all_nodes():
        if node.op_type == "Pad" and node.domain == "" and node.attributes.get_string("mode", "constant") != "constant":
            node.attributes.pop("value", None)


def _cast_numbers(model: ir.Model, node: ir.Node) -> None:
    """Give the numbers of a Clip or Pad, which were attributes, the type of the data."""
    first = _FIRST_NUMBER[node.op_type]
    for position, number in enumerate(node.inputs[first:], first):
        if number is None:
            continue
        name = fresh_name(model, f"{number.name}_like")
        cast = ir.Node("", "CastLike", [number, node.inputs[0]], name=name)
        cast.outputs[0].name = name
        assert node.graph is not None
        node.graph.insert_before(node, cast)
        node.replace_input_with(position, cast.outputs[0])


def _flatten_around(model: ir.Model, node: ir.Node) -> None:
    """Let a Hardmax work on a matrix whose rows are all dimensions from its axis on, as the converter lets Softmax do.

    The Reshape that it puts behind that would take sizes of 0 for those of the matrix.
    """
    if node.op_type in ("Softmax", "LogSoftmax"):
        for reader in node.outputs[0].consumers():
            if reader.op_type == "Reshape" and _restores(reader, node):
                reader.attributes.add(ir.AttrInt64("allowzero", 1))
    if node.op_type != "Hardmax":
        return
    data = node.inputs[0]
    axis = node.attributes.get_int("axis", 1)
    shape = ir.Node("", "Shape", [data])
    rows = ir.Node("", "Flatten", [data], [ir.AttrInt64("axis", axis)])
    hot = ir.Node("", "Hardmax", [rows.outputs[0]], [ir.AttrInt64("axis", -1)], name=node.name)
    whole = ir.Node("", "Reshape", [hot.outputs[0], shape.outputs[0]], [ir.AttrInt64("allowzero", 1)])
    replace_node(model.graph, node, (shape, rows, hot, whole), whole.outputs)


def _restores(reader: ir.Node, node: ir.Node) -> bool:
    """Whether a Reshape gives back the shape that a Flatten in front of the node has taken: the converter's, no other."""
    flatten, shape = (None if value is None else value.producer() for value in (node.inputs[0], reader.inputs[1]))
    if flatten is None or shape is None or (flatten.op_type, shape.op_type) != ("Flatten", "Shape"):
        return False
    return flatten.inputs[0] is shape.inputs[0]


def _spread_slopes(model: ir.Model, where: str) -> None:
    """Give slopes of PRelu, one a channel, the channel's place."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "PRelu" and node.domain == ""]
    if nodes:
        infer_facts(model)
    for node in nodes:
        data, slope = node.inputs[:2]
        if data is None or slope is None or data.shape is None or slope.shape is None:
            raise UnsupportedModelError(where, f"PRelu of opset 6 or older at {node.name} with unknown shapes", "export it anew")
        if len(slope.shape) != 1 or slope.shape[0] == 1 or len(data.shape) < 3:
            continue
        axes = add_constant(model, np.arange(1, len(data.shape) - 1), f"{slope.name}_axes")
        spread = ir.Node("", "Unsqueeze", [slope, axes], name=fresh_name(model, f"{slope.name}_spread"))
        spread.outputs[0].name = spread.name
        assert node.graph is not None
        node.graph.insert_before(node, spread)
        node.replace_input_with(1, spread.outputs[0])


def _scan_batch(model: ir.Model, node: ir.Node) -> None:
    """Put a Scan of opset 8, which runs each item of a batch alone, into a Scan of opset 9 over the batch."""
    if node.inputs[0] is not None:
        raise UnsupportedModelError(node.name or "Scan", "lengths of sequences, of opset 8", "export it with opset 9 or newer")
    given = [value for value in node.inputs[1:] if value is not None]
    inner_inputs = [_item(model, value) for value in given]
    inner_outputs = [_item(model, value) for value in node.outputs]
    attributes = [node.attributes["body"], node.attributes["num_scan_inputs"]]
    if "directions" in node.attributes:
        attributes.append(ir.AttrInt64s("scan_input_directions", node.attributes["directions"].as_ints()))
    inner = ir.Node("", "Scan", inner_inputs, attributes, outputs=inner_outputs, name=node.name)
    body = ir.Graph(inner_inputs, inner_outputs, nodes=[inner], name=f"{node.name or 'Scan'}_batch")
    for index, value in enumerate(given):
        node.replace_input_with(index, value)
    node.resize_inputs(len(given))
    node.attributes.clear()
    node.attributes.add(ir.AttrGraph("body", body))
    node.attributes.add(ir.AttrInt64("num_scan_inputs", len(given)))


def _item(model: ir.Model, value: ir.Value) -> ir.Value:
    """A value of its own for one item of a batch."""
    item = copy_value(value)
    item.name = fresh_name(model, f"{value.name}_item")
    if item.shape is not None:
        item.shape = ir.Shape(item.shape.dims[1:])
    return item
