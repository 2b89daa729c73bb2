"""From a graph's nodes to the groups that kernel templates take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from ...kernels.group import Group, Op
from ..ir.constants import constant_tensor
from ..ir.facts import tensor_type
from ..ir.functions import body_of, is_fused

_LITERAL_ELEMENTS = 64  # integer constants up to this size are parameters: axes, pads, permutations, steps


def group_of(model: ir.Model, node: ir.Node) -> Group:
    """The group of a node: the body of a fused call, or the operator alone.

    Values keep the names that they have outside; inner values of a call get names of their own.

    Raises:
        InvalidModelError: a value has no static type.
    """
    if not is_fused(node):
        return _group(model, (node,), node, {})
    body = body_of(model, node)
    names: dict[ir.Value, str] = {}
    for inner, outer in zip(body.inputs, node.inputs, strict=False):
        if outer is not None:
            names[inner] = str(outer.name)
    for inner, outer in zip(body.outputs, node.outputs, strict=True):
        names[inner] = str(outer.name)
    for number, value in enumerate(value for child in body for value in child.outputs):
        names.setdefault(value, f".{number}")
    return _group(model, tuple(body), node, names)


def _group(model: ir.Model, nodes: tuple[ir.Node, ...], call: ir.Node, names: dict[ir.Value, str]) -> Group:
    def name(value: ir.Value | None) -> str:
        return "" if value is None else names.get(value, str(value.name))

    types = {str(v.name): tensor_type(v) for v in (*call.inputs, *call.outputs) if v is not None and v.name}
    types |= {
        name(value): tensor_type(value) for node in nodes for value in node.outputs if value.name and name(value) not in types
    }
    literals: dict[str, np.ndarray] = {}
    constants: set[str] = set()
    for value in call.inputs:
        tensor = None if value is None else constant_tensor(value)
        if value is None or tensor is None:
            continue
        constants.add(str(value.name))
        if tensor.size == 1 or (tensor.size <= _LITERAL_ELEMENTS and tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32)):
            literals[str(value.name)] = tensor.numpy()
    ops = []
    for node in nodes:
        if node.op_type == "Constant" and node.domain == "":
            array = constant_tensor(node.outputs[0])
            assert array is not None
            literals[name(node.outputs[0])] = array.numpy()
            continue
        inputs = tuple(name(value) for value in node.inputs)
        outputs = tuple(name(value) for value in node.outputs)
        ops.append(Op(node.op_type, inputs, outputs, dict(_attributes(node)), _version(model, node)))
    inputs = tuple(dict.fromkeys(str(v.name) for v in call.inputs if v is not None))
    return Group(tuple(ops), inputs, tuple(str(v.name) for v in call.outputs if v.name), types, frozenset(constants), literals)


def _attributes(node: ir.Node) -> Iterator[tuple[str, Any]]:
    for attribute in node.attributes.values():
        value = attribute.value
        if isinstance(value, ir.TensorProtocol):
            value = value.numpy()
        elif isinstance(value, list | tuple):
            value = tuple(value)
        yield attribute.name, value


def _version(model: ir.Model, node: ir.Node) -> int:
    return node.version or model.opset_imports.get(node.domain, 0)
