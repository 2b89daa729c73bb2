"""What must be true of a graph between any two passes, checked without trusting what onnx_ir keeps for itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import onnx
import onnx_ir as ir

from ...runtime.errors import InvalidModelError
from .facts import infer_types, schema_of
from .functions import is_fused
from .scopes import read_values, subgraphs_of

_ATTRIBUTE_TYPES = {kind: getattr(onnx.defs.OpSchema.AttrType, kind.name, None) for kind in ir.AttributeType}


class VerificationError(AssertionError):
    """A graph that breaks a rule: a bug of whatever made it. The message names the node or value and the rule."""


def verify_model(model: ir.Model) -> None:
    """Check the whole model, its subgraphs and functions; linear in its nodes.

    Names of values are unique in their scope, definitions precede uses, uses are recorded on both ends, every value has a
    definition, every domain an opset import, every node a schema or function that it fits, and recorded types are what
    inference finds.

    Raises:
        VerificationError: the first fault.
    """
    _Verifier(model, model.graph.opset_imports).verify_graph(model.graph, {}, set())
    for identifier, function in model.functions.items():
        _require(function.identifier() == identifier, f"function {identifier} is registered under another name")
        _require(not function.graph.initializers, f"function {function.name} has initializers")
        _Verifier(model, function.opset_imports).verify_graph(function.graph, {}, set())
    _check_calls_end(model)


class _Verifier:
    """One scope of names and opsets: the main graph or a function, with their subgraphs."""

    def __init__(self, model: ir.Model, opsets: Mapping[str, int]) -> None:
        self._model = model
        self._opsets = opsets
        self._nodes: set[ir.Node] = set()
        self._reads: dict[ir.Value, set[tuple[ir.Node, int]]] = {}  # what was seen, to hold against what values say

    def verify_graph(self, graph: ir.Graph, outer_names: Mapping[str, ir.Value], outer_values: set[ir.Value]) -> None:
        """Check one graph, given the names and values that it sees of the scopes around it."""
        names, defined = dict(outer_names), set(outer_values)
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values())):
            _require(value.producer() is None, f"%{value.name} is an input or initializer, and has a producer")
            _define(value, names, defined)
        for name, value in graph.initializers.items():
            _require(name == value.name, f"initializer %{value.name} is registered as {name!r}")
            _require(value.const_value is not None or value.is_graph_input(), f"initializer %{name} has no value")
        for node in graph:
            self._verify_node(node, graph, names, defined)
        for value in graph.outputs:
            _require(value in defined, f"graph output %{value.name} is not produced")
            _require(bool(value.name), "a graph output has no name")
        _require(len(set(graph.outputs)) == len(graph.outputs), "a value is a graph output twice")
        for value in defined - outer_values:
            self._verify_uses(value)

    def _verify_node(self, node: ir.Node, graph: ir.Graph, names: dict[str, ir.Value], defined: set[ir.Value]) -> None:
        where = f"node {node.name or '?'} ({node.op_type})"
        _require(node.graph is graph, f"{where} is listed in a graph that it does not belong to")
        _require(node not in self._nodes, f"{where} is listed twice")
        self._nodes.add(node)
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            if value not in defined:
                _fail_undefined(value, where, graph)
            self._reads.setdefault(value, set()).add((node, index))
        for subgraph in subgraphs_of(node):
            self.verify_graph(subgraph, names, defined)
        for index, value in enumerate(node.outputs):
            owned = value.producer() is node and value.index() == index
            _require(owned, f"%{value.name} is output {index} of {where}, and names another producer")
            _define(value, names, defined)
        self._verify_operator(node, where)

    def _verify_uses(self, value: ir.Value) -> None:
        listed, seen = set(value.uses()), self._reads.get(value, set())
        if listed != seen:
            user, index = next(iter(listed ^ seen))
            fault = "does not list its use" if (user, index) in seen else "lists a use that is not in the graph,"
            raise VerificationError(f"%{value.name} {fault} by {user.name or user.op_type} as input {index}")

    def _verify_operator(self, node: ir.Node, where: str) -> None:
        imported = node.domain in self._opsets or (node.domain == "" and "ai.onnx" in self._opsets)
        _require(imported, f"{where}: no opset import for domain {node.domain!r}")
        function = self._model.functions.get(node.op_identifier())
        if function is not None:
            _verify_call(node, function, where)
            return
        schema = schema_of(node, self._opsets)
        if schema is None:
            known = "function" if is_fused(node) else "operator or function"
            raise VerificationError(
                f"{where}: no {known} {node.domain or 'ai.onnx'}.{node.op_type} in opset {dict(self._opsets)}"
            )
        signature = _signature(schema.name, schema.since_version, schema.domain)
        _verify_arity(node, signature, where)
        _verify_attributes(node, signature, where)
        self._verify_types(node, where)

    def _verify_types(self, node: ir.Node, where: str) -> None:
        if any(attribute.is_ref() for attribute in node.attributes.values()):
            return  # its types depend on the call
        if any(isinstance(value.type, ir.TensorType) and value.shape is None for value in read_values(node)):
            return  # nothing is recorded yet: ONNX's inference takes an unknown shape of axes or sizes for their absence
        try:
            facts = infer_types(node, self._model, self._opsets)
        except InvalidModelError as error:
            raise VerificationError(f"{where}: {error}") from error
        for value, fact in zip(node.outputs, facts, strict=True):
            if fact is not None:
                _require_equal_facts(value, fact.type, fact.shape, f"{where} gives")


def _verify_call(node: ir.Node, function: ir.Function, where: str) -> None:
    _require(len(node.inputs) <= len(function.inputs), f"{where}: {len(node.inputs)} inputs, {function.name} takes fewer")
    _require(len(node.outputs) <= len(function.outputs), f"{where}: {len(node.outputs)} outputs, {function.name} gives fewer")
    if not is_fused(node):
        return
    _require(
        len(node.inputs) == len(function.inputs), f"{where}: {len(node.inputs)} inputs, its body takes {len(function.inputs)}"
    )
    for value, inner in zip(node.inputs, function.inputs, strict=True):
        if value is not None:
            _require_equal_facts(value, inner.type, inner.shape, f"{where}: its body takes")
    for value, inner in zip(node.outputs, function.outputs, strict=False):
        _require_equal_facts(value, inner.type, inner.shape, f"{where}: its body gives")


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a schema says of a node, read once: each look at one of ONNX's schemas copies its parameters or attributes.

    `required`: positions and names of the inputs that may not be absent, and names of such attributes.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    required_inputs: tuple[tuple[int, str], ...]
    attributes: Mapping[str, onnx.defs.OpSchema.AttrType]
    required_attributes: tuple[str, ...]


@cache
def _signature(op_type: str, version: int, domain: str) -> _Signature:
    schema = onnx.defs.get_schema(op_type, version, domain)
    single, attributes = onnx.defs.OpSchema.FormalParameterOption.Single, schema.attributes
    return _Signature(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple((place, one.name) for place, one in enumerate(schema.inputs) if one.option == single),
        {name: one.type for name, one in attributes.items()},
        tuple(name for name, one in attributes.items() if one.required),
    )


def _verify_arity(node: ir.Node, signature: _Signature, where: str) -> None:
    for what, count, (least, most) in (
        ("inputs", len(node.inputs), signature.inputs),
        ("outputs", len(node.outputs), signature.outputs),
    ):
        if not least <= count <= most:
            raise VerificationError(f"{where}: {count} {what}, legal are {least} to {most}")
    for place, name in signature.required_inputs:
        if place < len(node.inputs) and node.inputs[place] is None:
            raise VerificationError(f"{where}: required input {name} is absent")


def _verify_attributes(node: ir.Node, signature: _Signature, where: str) -> None:
    for name, attribute in node.attributes.items():
        known = signature.attributes.get(name)
        if known is None:
            raise VerificationError(f"{where}: {node.op_type} has no attribute {name}")
        if known != _ATTRIBUTE_TYPES[attribute.type]:
            raise VerificationError(f"{where}: attribute {name} is of type {attribute.type.name}, legal is {known}")
    for name in signature.required_attributes:
        if name not in node.attributes:
            raise VerificationError(f"{where}: required attribute {name} is absent")


def _require(legal: bool, fault: str) -> None:
    if not legal:
        raise VerificationError(fault)


def _define(value: ir.Value, names: dict[str, ir.Value], defined: set[ir.Value]) -> None:
    _require(value not in defined, f"%{value.name} is defined twice")
    defined.add(value)
    if value.name:  # an absent optional output has none
        _require(value.name not in names, f"two values are called %{value.name}")
        names[value.name] = value


def _fail_undefined(value: ir.Value, where: str, graph: ir.Graph) -> None:
    producer = value.producer()
    if producer is not None and producer.graph is graph:
        raise VerificationError(f"{where} reads %{value.name} before {producer.name} defines it: a cycle, or nodes out of order")
    raise VerificationError(f"{where} reads %{value.name}, which nothing in scope defines: a dangling value")


def _require_equal_facts(value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None, source: str) -> None:
    """Where both are known, the recorded facts of `value` must be the ones given; symbolic dimensions match anything."""
    recorded, dims = value.type, value.shape
    if kind is not None and recorded is not None and kind != recorded:
        raise VerificationError(f"{source} %{value.name} type {kind}, recorded is {recorded}")
    if shape is None or dims is None:
        return
    pairs = zip(shape, dims, strict=False)
    if len(shape) != len(dims) or any(a != b and isinstance(a, int) and isinstance(b, int) for a, b in pairs):
        raise VerificationError(f"{source} %{value.name} shape {shape}, recorded is {dims}")


def _check_calls_end(model: ir.Model) -> None:
    """No function may call itself, directly or through others."""
    done: set[ir.OperatorIdentifier] = set()

    def visit(identifier: ir.OperatorIdentifier, path: tuple[ir.OperatorIdentifier, ...]) -> None:
        _require(identifier not in path, f"function {identifier[1]} calls itself")
        if identifier in done:
            return
        for callee in _callees(model.functions[identifier], model.functions):
            visit(callee, (*path, identifier))
        done.add(identifier)

    for identifier in model.functions:
        visit(identifier, ())


def _callees(
    nodes: Iterable[ir.Node], functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> dict[ir.OperatorIdentifier, None]:
    found: dict[ir.OperatorIdentifier, None] = {}
    for node in nodes:
        if node.op_identifier() in functions:
            found[node.op_identifier()] = None
        for graph in subgraphs_of(node):
            found.update(_callees(graph, functions))
    return found
