"""Copies of nodes with other inputs and attributes, for outlining and inlining."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import onnx_ir as ir

ValueMap = dict[ir.Value, ir.Value | None]


def clone_node(node: ir.Node, values: ValueMap, attributes: Mapping[str, ir.Attr] | None = None) -> ir.Node:
    """Copy a node, with its subgraphs, without its metadata.

    Args:
        values: what stands for each value the node reads; a value that is absent stands for itself. The copies of its outputs,
            which keep names and facts, are added.
        attributes: what stands for each reference attribute; one that has no value here is left out. None: keep references.
    """
    copied = [new for one in node.attributes.values() if (new := _clone_attribute(one, values, attributes)) is not None]
    inputs = [None if value is None else values.get(value, value) for value in node.inputs]
    outputs = [copy_value(value) for value in node.outputs]
    values.update(zip(node.outputs, outputs, strict=True))
    return ir.Node(
        node.domain, node.op_type, inputs, copied, overload=node.overload, outputs=outputs, version=node.version, name=node.name
    )


def copy_value(value: ir.Value) -> ir.Value:
    """A new value with the name and the facts of `value`, that nothing produces or reads."""
    new = ir.Value(name=value.name)
    copy_facts(value, new)
    return new


def copy_facts(source: ir.Value, target: ir.Value) -> None:
    """Give `target` the type and shape of `source`, not the same objects: setting a dtype changes a type in place."""
    target.type = copy(source.type)
    target.shape = None if source.shape is None else ir.Shape(source.shape)


def _clone_attribute(attribute: ir.Attr, values: ValueMap, attributes: Mapping[str, ir.Attr] | None) -> ir.Attr | None:
    if attribute.is_ref():
        if attributes is None:
            return attribute
        actual = attributes.get(str(attribute.ref_attr_name))
        return None if actual is None or actual.value is None else ir.Attr(attribute.name, actual.type, actual.value)
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, _clone_graph(attribute.as_graph(), values, attributes))
    if attribute.type == ir.AttributeType.GRAPHS:
        return ir.AttrGraphs(attribute.name, [_clone_graph(graph, values, attributes) for graph in attribute.as_graphs()])
    return attribute


def _clone_graph(graph: ir.Graph, values: ValueMap, attributes: Mapping[str, ir.Attr] | None) -> ir.Graph:
    scope = dict(values)
    for value in (*graph.inputs, *graph.initializers.values()):
        if value not in scope:
            scope[value] = copy_value(value)
    initializers = []
    for value in graph.initializers.values():
        new = scope[value]
        assert new is not None
        new.const_value = value.const_value
        initializers.append(new)
    nodes = [clone_node(node, scope, attributes) for node in graph]
    return ir.Graph(
        [new for value in graph.inputs if (new := scope[value]) is not None],
        [new for value in graph.outputs if (new := scope.get(value, value)) is not None],
        nodes=nodes,
        initializers=initializers,
        name=graph.name,
    )
