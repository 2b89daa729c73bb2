"""decompose: operators that lowering does not know, in terms of those it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx
import onnx_ir as ir

from ....compiler.ir.cloning import ValueMap, clone_node, copy_value
from ....compiler.ir.constants import add_constant
from ....compiler.ir.facts import infer_node, schema_of
from ....compiler.ir.functions import inline_function, is_fused
from ....compiler.ir.kinds import is_known
from ....compiler.ir.randomness import RANDOM_OPERATORS
from ....compiler.ir.rewriter import Rejection, replace_node
from ....compiler.ir.scopes import captured_values, release_subgraphs, subgraphs_of
from ....compiler.ir.stored_weights import is_stored_weights
from ....compiler.ir.symbolic.symbols import SizeTensor
from ....compiler.pipeline import Context, Pass
from ....runtime.target import Target
from .expansions import PARTLY_EXPANDED, expansion_of

# Operators that meant something else before this opset, although their attributes look the same.
_CHANGED_MEANING = {"Hardmax": 13, "LogSoftmax": 13, "Softmax": 13}


@dataclass(frozen=True)
class Decompose(Pass):
    """Expand operators that have an ONNX function body and no entry in the lattice of kinds, and calls of the model's functions.

    Before:  y = SwiGLU(a, b)
    After:   s = Swish(a);  y = Mul(s, b)

    Legal when the body means the same at the model's opset, draws no random numbers and has no control flow of its own. What is
    expanded is looked at again. Fused groups stay.
    """

    name: ClassVar[str] = "decompose"

    def run(self, model: ir.Model, context: Context) -> bool:
        return self._visit(model, model.graph, context, set())

    def _visit(self, model: ir.Model, graph: ir.Graph, context: Context, learned: set[ir.Value]) -> bool:
        """Whether anything was expanded. `learned` gets the values of which a body says more than ONNX does of its operator."""
        changed = False
        pending = list(reversed(tuple(graph)))
        while pending:
            node = pending.pop()
            facts = {value.name: (value.type, value.shape) for value in node.outputs}
            if not learned.isdisjoint(node.inputs):
                infer_node(node, model)
            for subgraph in subgraphs_of(node):
                changed |= self._visit(model, subgraph, context, learned)
            made = self._expand(model, node, context)
            if made is not None:
                changed = True
                pending.extend(reversed(made))
            written = [value for one in made or (node,) for value in one.outputs if value.name in facts]
            learned.update(value for value in written if (value.type, value.shape) != facts[value.name])
        return changed

    def _expand(self, model: ir.Model, node: ir.Node, context: Context) -> tuple[ir.Node, ...] | None:
        """The nodes that replaced `node`; None where it stays."""
        if is_fused(node):
            return None
        if node.op_identifier() in model.functions:
            return inline_function(model, node)
        if (is_known(node) and not _is_expanded_here(node, context.target)) or node.op_type in RANDOM_OPERATORS:
            return None
        function = expansion_of(node, model.graph.opset_imports[""]) or _function_body(node, model)
        if function is None:
            return None
        if blame := _obstacle(function, model.graph.opset_imports):
            context.reject(self.name, Rejection(f"{node.op_type} not expanded: {blame}", (node,)))
            return None
        return _inline_body(model, node, function)


def _is_expanded_here(node: ir.Node, target: Target) -> bool:
    """Whether an operator that lowering knows is better expanded: some of them everywhere, stored weights on GPUs."""
    return node.op_type in PARTLY_EXPANDED or (target.is_gpu and is_stored_weights(node))


def _function_body(node: ir.Node, model: ir.Model) -> ir.Function | None:
    """What ONNX says the operator is made of, at the model's opset; None where it says nothing."""
    schema: Any = schema_of(node, model.graph.opset_imports)  # onnx's type stubs lack the function methods
    if schema is None or any(value is not None and value.type is None for value in node.inputs):
        return None
    opset = model.graph.opset_imports[""]
    captured = {value: f"prefuse.captured_{place}" for place, value in enumerate(captured_values(node))}
    if version := _latest(schema.function_opset_versions, opset):
        content = schema.get_function_with_opset_version(version)
    elif version := _latest(schema.context_dependent_function_opset_versions, opset):
        types = [_type_bytes(value) for value in node.inputs]
        proto = _detached(node, captured)
        content = schema.get_context_dependent_function_with_opset_version(version, proto.SerializeToString(), types)
    else:
        return None
    return _read_function(onnx.FunctionProto.FromString(content), captured.values()) if content else None


def _latest(versions: Iterable[int], opset: int) -> int:
    """The latest of the versions that is not after `opset`; 0 if there is none. `_obstacle` judges it."""
    return max((version for version in versions if version <= opset), default=0)


def _detached(node: ir.Node, captured: Mapping[ir.Value, str]) -> onnx.NodeProto:
    """The node alone, whose subgraphs read what they capture under these names, which no body has."""
    inputs = [value for value in node.inputs if value is not None and value not in captured]
    values: ValueMap = {value: copy_value(value) for value in inputs}
    return ir.serde.serialize_node(clone_node(node, values | {value: ir.Value(name=name) for value, name in captured.items()}))


def _read_function(proto: onnx.FunctionProto, captured: Iterable[str]) -> ir.Function:
    """A body, whose last inputs are what the node's subgraphs capture.

    An output that it does not compute, since the node does not ask for it, gets a name nobody reads: an input's.
    """
    proto.input.extend(captured)
    made = {*proto.input, *(name for node in proto.node for name in node.output)}
    outputs = [name if name in made else proto.input[0] for name in proto.output]
    del proto.output[:]
    proto.output.extend(outputs)
    return ir.serde.deserialize_function(proto)


def _type_bytes(value: ir.Value | None) -> bytes:
    proto = onnx.TypeProto()
    if value is not None and value.type is not None:
        ir.serde.serialize_type_into(proto, value.type)
    if value is not None and value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return bytes(proto.SerializeToString())


def _obstacle(function: ir.Function, opsets: Mapping[str, int]) -> str | None:
    """Why the nodes of a body cannot stand in a model with these opsets; None if they can.

    Bodies are written for the opset in which their operator appeared, and for each later one that changed a part of them; what
    remains is to see that the parts take the same inputs and attributes.
    """
    for node in function:
        if any(True for _ in subgraphs_of(node)):
            return f"its body needs {node.op_type}"
        schema = schema_of(node, opsets)
        if schema is None:
            return f"its body needs {node.op_type}, which the model's opset lacks"
        border = _CHANGED_MEANING.get(node.op_type, 0)
        changed = (opsets[""] < border) != (function.opset_imports.get("", opsets[""]) < border)
        if changed or len(node.inputs) > schema.max_input or not set(node.attributes) <= set(schema.attributes):
            return f"its body is of opset {function.opset_imports.get('')}, in which {node.op_type} differs"
    return None


def _inline_body(model: ir.Model, node: ir.Node, function: ir.Function) -> tuple[ir.Node, ...]:
    schema: Any = schema_of(node, model.graph.opset_imports)  # onnx's type stubs lack the function methods
    assert schema is not None
    defaults = {
        name: ir.serde.deserialize_attribute(one.default_value)
        for name, one in schema.attributes.items()
        if one.default_value.type != onnx.AttributeProto.UNDEFINED
    }
    captured = captured_values(node)
    absent = [None] * (len(function.inputs) - len(node.inputs) - len(captured))
    values: ValueMap = dict(zip(function.inputs, (*node.inputs, *absent, *captured), strict=True))
    for child in function:  # what has no contents before a call is no attribute
        if (value := child.attributes.get("value")) is not None and isinstance(sizes := value.value, SizeTensor):
            values[child.outputs[0]] = add_constant(model, sizes, "sizes")
    children = [child for child in function if child.outputs[0] not in values]
    made = tuple(clone_node(child, values, {**defaults, **node.attributes}) for child in children)
    for one in made:
        one.name = None
        for output in one.outputs:
            output.name = "" if output.name == "" else None
    results = [None if old.name == "" else values[result] for old, result in zip(node.outputs, function.outputs, strict=False)]
    for old, new in zip(node.outputs, results, strict=True):
        if new is not None and new.name is None:
            new.name = old.name
    replace_node(model, node, made, results)
    release_subgraphs(node)
    return made
