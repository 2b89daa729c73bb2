"""Stable text of a graph: every fact, no weights, no addresses. For people, tests and diffs; it is not parsed back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from .assignments.operand_formats import operand_formats
from .constants import constant_array
from .symbolic.symbols import constant_sizes

_MAX_SHOWN_ELEMENTS = 8  # constants up to this size are printed with their values
_INDENT = "    "


def print_model(model: ir.Model) -> str:
    """The main graph, then the functions by name. Equal models give equal text."""
    parts = ["\n".join(_print_graph(f"graph @{model.graph.name or 'main'}", model.graph, ""))]
    for function in sorted(model.functions.values(), key=ir.Function.identifier):
        header = f"function @{function.domain}.{function.name}" + (f":{function.overload}" if function.overload else "")
        parts.append("\n".join(_print_function(header, function)))
    return "\n\n".join(parts) + "\n"


def print_node(node: ir.Node) -> str:
    """One node with its facts, as `print_model` shows it, without subgraphs."""
    outputs = ", ".join(_name(value) for value in node.outputs)
    formats = operand_formats(node)
    forms = [f" as {formats[position]}" if position in formats else "" for position in range(len(node.inputs))]
    inputs = ", ".join(_name(value) + form for value, form in zip(node.inputs, forms, strict=True))
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.overload:
        operator += f":{node.overload}"
    types = ", ".join(print_type(value) for value in node.outputs if value.name)
    return f"{outputs} = {operator}{_print_attributes(node)}({inputs}) : {types}"


def print_type(value: ir.Value) -> str:
    """Element type and shape of a value: `float[N,64]`, `?` for what is unknown."""
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return str(value.type)
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    if value.shape is None:
        return f"{dtype}[...]"
    return f"{dtype}[{','.join(map(_print_dim, value.shape))}]"


def _print_graph(header: str, graph: ir.Graph, indent: str) -> list[str]:
    inner = indent + _INDENT
    parameters = ", ".join(f"{_name(value)} : {print_type(value)}" for value in graph.inputs)
    results = ", ".join(f"{_name(value)} : {print_type(value)}" for value in graph.outputs)
    lines = [f"{header} ({parameters}) -> ({results}) {{"]
    constants = (value for value in graph.initializers.values() if not value.is_graph_input())
    lines += [f"{inner}const {_name(value)} : {print_type(value)}{_print_value(value)}" for value in constants]
    lines += _print_nodes(graph, inner)
    return [*lines, indent + "}"]


def _print_function(header: str, function: ir.Function) -> list[str]:
    parameters = ", ".join(f"{_name(value)} : {print_type(value)}" for value in function.inputs)
    results = ", ".join(f"{_name(value)} : {print_type(value)}" for value in function.outputs)
    attributes = ", ".join(_print_attribute(one) if one.value is not None else one.name for one in function.attributes.values())
    lines = [f"{header}{f'{{{attributes}}}' if attributes else ''} ({parameters}) -> ({results}) {{"]
    return [*lines, *_print_nodes(function, _INDENT), "}"]


def _print_nodes(nodes: Iterable[ir.Node], indent: str) -> list[str]:
    lines = []
    for node in nodes:
        lines.append(indent + print_node(node))
        for attribute in sorted(node.attributes.values(), key=lambda one: one.name):
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.GRAPH:
                lines += _print_subgraph(attribute.name, attribute.as_graph(), indent + _INDENT)
            elif attribute.type == ir.AttributeType.GRAPHS:
                for index, graph in enumerate(attribute.as_graphs()):
                    lines += _print_subgraph(f"{attribute.name}[{index}]", graph, indent + _INDENT)
    return lines


def _print_subgraph(name: str, graph: ir.Graph, indent: str) -> list[str]:
    return _print_graph(f"{indent}{name} =", graph, indent)


def _print_attributes(node: ir.Node) -> str:
    shown = [one for one in node.attributes.values() if one.is_ref() or one.type not in _GRAPH_TYPES]
    text = ", ".join(_print_attribute(one) for one in sorted(shown, key=lambda one: one.name))
    return f"{{{text}}}" if text else ""


_GRAPH_TYPES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _print_attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"{attribute.name}=@{attribute.ref_attr_name}"
    match attribute.type:
        case ir.AttributeType.TENSOR:
            text = _print_tensor(attribute.as_tensor())
        case ir.AttributeType.STRING:
            text = f'"{attribute.as_string()}"'
        case ir.AttributeType.INTS | ir.AttributeType.FLOATS | ir.AttributeType.STRINGS:
            text = "[" + ",".join(_print_scalar(item) for item in attribute.value) + "]"
        case _:
            text = _print_scalar(attribute.value)
    return f"{attribute.name}={text}"


def _print_tensor(tensor: ir.TensorProtocol) -> str:
    text = f"{tensor.dtype.name.lower()}[{','.join(map(str, tensor.shape))}]"
    if tensor.size <= _MAX_SHOWN_ELEMENTS and tensor.dtype != ir.DataType.STRING:
        text += " " + _print_array(tensor.numpy())
    return text


def _print_value(value: ir.Value) -> str:
    if (sizes := constant_sizes(value)) is not None:
        return f" = {_print_array(sizes)}"
    if value.const_value is None or value.const_value.size > _MAX_SHOWN_ELEMENTS:
        return ""
    array = constant_array(value)
    return "" if array is None else f" = {_print_array(array)}"


def _print_array(array: np.ndarray) -> str:
    items: object = array.tolist()
    return _print_nested(items)


def _print_nested(items: object) -> str:
    return "[" + ",".join(map(_print_nested, items)) + "]" if isinstance(items, list) else _print_scalar(items)


def _print_scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_dim(dim: int | ir.SymbolicDim) -> str:
    return str(dim) if isinstance(dim, int) else dim.value or "?"


def _name(value: ir.Value | None) -> str:
    return f"%{value.name}" if value is not None and value.name else "_"
