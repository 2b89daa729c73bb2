"""What runs a node on the host between programs: our own operators where they can, else `onnx.reference` (strings, images)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ...runtime.errors import UnsupportedModelError
from ...runtime.staged.host_operators import OPERATORS, Attribute, HostFunction, HostOperator, Value
from ...runtime.staged.strings import with_str_objects
from ..ir.facts import source_of

# Operators that exist nowhere but in the reference: domain and name.
HOST_OPERATORS = frozenset({("", "ImageDecoder")})


def host_function(node: ir.Node, opsets: Mapping[str, int], source: str) -> HostFunction:
    """What runs a node on the host: a `HostOperator`, or a function that needs onnx. `source` names the node in errors."""
    if node.domain == "" and node.op_type in OPERATORS:
        return HostOperator(node.op_type, _attributes(node), source)
    return _reference(node, opsets)


def _attributes(node: ir.Node) -> dict[str, Attribute]:
    """The node's attributes that our operator reads."""
    kinds = OPERATORS[node.op_type].attributes
    given = {name: node.attributes[name] for name in kinds if name in node.attributes}
    found: dict[str, Attribute] = {
        name: one.as_int() if kinds[name] is int else one.as_tensor().numpy() for name, one in given.items()
    }
    return found | {"outputs": len(node.outputs)} if "outputs" in kinds else found


def _reference(node: ir.Node, opsets: Mapping[str, int]) -> HostFunction:
    """A node by `onnx.reference`. Built at its first run: a branch may never be taken."""
    if node.op_type == "ImageDecoder" and find_spec("PIL") is None:
        raise UnsupportedModelError(source_of(node), "ImageDecoder needs Pillow", "pip install pillow")
    names = [f"i{position}" for position in range(len(node.inputs))]
    outputs = [value.name or f"unread{position}" for position, value in enumerate(node.outputs)]
    proto = ir.serde.serialize_node(node)
    del proto.input[:], proto.output[:]
    proto.input.extend(name if value is not None else "" for name, value in zip(names, node.inputs, strict=True))
    proto.output.extend(outputs)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    given = [name for name, value in zip(names, node.inputs, strict=True) if value is not None]
    evaluators: list[ReferenceEvaluator] = []

    def run(*arguments: Value) -> list[Value]:
        if not evaluators:
            function = onnx.helper.make_function("prefuse", "host", given, outputs, [proto], imports)
            evaluators.append(ReferenceEvaluator(function))
        fed = {name: argument for name, argument in zip(names, arguments, strict=True) if name in given}
        with np.errstate(all="ignore"):
            results: Any = evaluators[0].run(None, fed, attributes={})
            return [_with_str_objects(result) for result in results]

    return run


def _with_str_objects(value: Value) -> Value:
    """A result of the reference, which has strings as NumPy has them."""
    if isinstance(value, list):
        return [_with_str_objects(item) for item in value]
    return with_str_objects(value) if isinstance(value, np.ndarray) else value
