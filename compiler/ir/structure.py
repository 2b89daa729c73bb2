"""Structural equality of graphs: what they compute and on what types, whatever their values are called."""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir


def body_structure(graph: ir.Graph) -> Hashable:
    """A key that is equal for graphs with the same nodes, attributes, wiring and types. No subgraphs, no weights.

    Types of what nodes make are more than those of parameters tell: shapes depend on the constants that calls give, too.
    """
    number: dict[ir.Value | None, int] = {None: -1}
    for value in graph.inputs:
        number[value] = len(number)
    nodes = []
    for node in graph:
        inputs = tuple(number[value] for value in node.inputs)
        for value in node.outputs:
            number[value] = len(number)
        nodes.append((*node.op_identifier(), inputs, len(node.outputs), attributes_key(node)))
    types = tuple((value.dtype, None if value.shape is None else str(value.shape)) for value in number if value is not None)
    return types, tuple(nodes), tuple(number[value] for value in graph.outputs)


def attributes_key(node: ir.Node) -> tuple[Hashable, ...]:
    """A key that is equal for nodes whose attributes are equal bit by bit, one item for each of them in the order of names.

    Subgraphs are equal to themselves only.
    """
    return tuple(
        sorted((one.name, one.type.value, one.ref_attr_name or "", _attribute_key(one)) for one in node.attributes.values())
    )


def tensor_key(tensor: ir.TensorProtocol) -> Hashable:
    """A key that is equal for tensors of the same type and bytes."""
    content = tuple(tensor.numpy().flat) if tensor.dtype == ir.DataType.STRING else tensor.tobytes()
    return tensor.dtype.value, str(tensor.shape), content


def _attribute_key(attribute: ir.Attr) -> Hashable:
    if attribute.is_ref():
        return ""
    match attribute.type:
        case ir.AttributeType.TENSOR:
            return tensor_key(attribute.as_tensor())
        case ir.AttributeType.TENSORS:
            return tuple(tensor_key(tensor) for tensor in attribute.as_tensors())
        case ir.AttributeType.GRAPH | ir.AttributeType.GRAPHS:
            return id(attribute.value)
        case _:
            return repr(attribute.value)
