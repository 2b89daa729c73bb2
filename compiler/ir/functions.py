"""Fused groups: nodes outlined into a function of our domain, whose ONNX body stays their meaning.

A group is a node `prefuse.<name>` whose function body holds the nodes it replaced, so that any ONNX runtime can still execute
the model, and inlining is exact. Calls share equal bodies, so the original names and metadata are kept with the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import onnx_ir as ir

from ...runtime.errors import InvalidModelError
from .cloning import ValueMap, clone_node, copy_value
from .constants import add_constant, constant_tensor
from .facts import SOURCE_KEY, origins_of, source_of
from .kinds import Kind, is_pointwise, kind_of
from .names import fresh_name, release_name
from .rewriter import drop_unused_constants, graph_of, remove_nodes, replace_node
from .scopes import read_values, subgraphs_of
from .structure import body_structure, tensor_key

DOMAIN = "prefuse"
_DOMAIN_VERSION = 1
NODES_KEY = "prefuse.nodes"  # metadata of a call: the _Origin of each node of its body, as JSON
_BODIES = "prefuse.bodies"  # key of a model's `meta`: the _Bodies of its functions
_NAMED_OPS = 6  # a function of more nodes is named by the first and their number
_MIN_IR_VERSION = 8  # the first that has functions


class _Origin(TypedDict):
    """What a call remembers of one node of its body."""

    name: str | None  # None: an inner constant, which was no node of the group
    outputs: list[str]
    metadata: dict[str, str]


@dataclass(slots=True)
class _Bodies:
    """The functions of our domain by structure, and the last number appended to each of their names."""

    by_structure: dict[object, ir.OperatorIdentifier]
    last_suffix: dict[str, int]


def is_fused(node: ir.Node) -> bool:
    """Whether a node is a call of a fused group."""
    return node.domain == DOMAIN


def body_of(model: ir.Model, node: ir.Node) -> ir.Function:
    """The function that a fused node calls. Calls share it only if their types are equal, so its values have facts."""
    return model.functions[node.op_identifier()]


def fused_names(node: ir.Node) -> tuple[str, ...]:
    """The original names of the nodes of a fused group, in the order of its body; those without one are left out."""
    return tuple(origin["name"] for origin in _origins(node) if origin["name"])


def original_names(node: ir.Node) -> tuple[str, ...]:
    """The names of the imported nodes that a node, or what is fused into it, stands for."""
    if not is_fused(node):
        return origins_of(node.name, node.metadata_props)
    found = (origins_of(origin["name"], origin["metadata"]) for origin in _origins(node) if origin["name"] is not None)
    return tuple(dict.fromkeys(name for names in found for name in names))


def computing_names(model: ir.Model, node: ir.Node) -> tuple[str, ...]:
    """The names of the imported nodes behind what a group is built around: its products, windows, reductions, and the unknown."""
    if not is_fused(node):
        return original_names(node) if kind_of(node) >= Kind.REDUCTION else ()
    body, origins = body_of(model, node), _origins(node)
    if not _fits(origins, body):  # a pass has changed it since: of all that were fused
        return original_names(node)
    members = zip(body, origins, strict=True)
    computing = [origin for child, origin in members if child.op_type != "Constant" and kind_of(child) >= Kind.REDUCTION]
    found = (origins_of(origin["name"], origin["metadata"]) for origin in computing)
    return tuple(dict.fromkeys(name for names in found for name in names))


def anchor_among(nodes: Iterable[ir.Node]) -> ir.Node:
    """What a group of these nodes is built around: the first of the least fusable ones."""
    return max(nodes, key=kind_of)


def group_name(nodes: Sequence[ir.Node]) -> str:
    """What a function of these nodes is called: their operators, or the first and the number of the others."""
    names = [node.op_type.lower() for node in nodes if kind_of(node) is not Kind.OPERAND] or ["cast"]
    return "_".join(names) if len(names) <= _NAMED_OPS else f"{names[0]}_and_{len(names) - 1}_pointwise"


def fuse_into_function(model: ir.Model, nodes: Sequence[ir.Node], name: str, *, adjacent: bool = False) -> ir.Node:
    """Outline `nodes` into a function `prefuse.<name>` and return the call that stands for them.

    `nodes` are of one graph, in topological order, without subgraphs and convex: no path between two of them leaves the group.
    Values that are read outside become the call's outputs and keep their names; the call has the name of the group's anchor, and
    of its sources the anchor's comes first. One-element constants that only pointwise
    operators read go into the body; everything else from outside is an input, in order of first use. A body equal to an
    existing one in structure, attributes and types is shared; a different one of the same name gets the suffix _2, _3, ...
    Linear in the group where one value escapes or no reader stands between its nodes (`adjacent`), else in the graph.
    """
    members = set(nodes)
    assert not any(True for node in nodes for _ in subgraphs_of(node)), f"{name}: a group cannot hold subgraphs"
    outside = dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v.producer() not in members)
    by_anchor = {value for node in nodes if not is_pointwise(node) for value in _data_of(node)}  # must lie in memory
    constants = [value for value in outside if value not in by_anchor and _is_scalar(value)]
    inputs = [value for value in outside if value in by_anchor or not _is_scalar(value)]
    read = [value for node in nodes for value in node.outputs if _is_read_outside(value, members)]
    escaping = read or list(nodes[-1].outputs)  # dead code, such as no pass has removed yet
    body = _outline(constants, inputs, nodes, escaping)
    identifier = _register(model, body, name)
    anchor = anchor_among([node for node in nodes if node.name] or nodes)
    call = ir.Node(DOMAIN, identifier[1], inputs, outputs=[copy_value(value) for value in escaping], name=anchor.name)
    call.metadata_props[SOURCE_KEY] = ", ".join(dict.fromkeys(source_of(node) for node in (anchor, *nodes)))
    call.metadata_props[NODES_KEY] = json.dumps(_origins_of(constants, nodes))
    _substitute(model, nodes, members, call, escaping, adjacent or len(escaping) == 1)
    drop_unused_constants(model, constants)
    model.graph.opset_imports.setdefault(DOMAIN, _DOMAIN_VERSION)
    model.ir_version = max(model.ir_version, _MIN_IR_VERSION)
    return call


def inline_function(model: ir.Model, node: ir.Node, *, infers: bool = True) -> tuple[ir.Node, ...]:
    """Put copies of a function's body in the place of its call, and return them; the function itself stays in the model.

    They get facts, unless somebody `infers` those of the whole model later.

    For a fused group this undoes `fuse_into_function`: names and metadata come back; its inner constants become initializers.

    Raises:
        InvalidModelError: the function wants an opset version other than the model's.
    """
    function = model.functions[node.op_identifier()]
    _import_opsets(model, function)
    origins = _origins(node)
    if not _fits(origins, function):  # nothing of ours, or a pass has changed the body since
        origins = [_Origin(name="", outputs=[str(value.name) for value in child.outputs], metadata={}) for child in function]
    for key in (NODES_KEY, SOURCE_KEY):
        node.metadata_props.pop(key, None)
    arguments = (*node.inputs, *[None] * (len(function.inputs) - len(node.inputs)))
    values: ValueMap = dict(zip(function.inputs, arguments, strict=True))
    attributes = {**function.attributes, **node.attributes}
    made: list[ir.Node] = []
    for child, origin in zip(function, origins, strict=True):
        if origin["name"] is None:
            values[child.outputs[0]] = _restore_constant(model, child, origin)
        else:
            made.append(_restore_node(model, child, origin, values, attributes))
    results = [values[value] for value in function.outputs][: len(node.outputs)]
    replace_node(model if infers else model.graph, node, made, results)
    return tuple(made)


def drop_uncalled_groups(model: ir.Model) -> None:
    """Remove the functions of our domain that no node of the main graph calls any more."""
    called = {node.op_identifier() for node in model.graph if is_fused(node)}
    for identifier in [one for one, function in model.functions.items() if function.domain == DOMAIN and one not in called]:
        del model.functions[identifier]


def inline_all(model: ir.Model) -> bool:
    """Inline every call of a model-local function, nested ones and those in subgraphs too, and drop the functions.

    Raises:
        InvalidModelError: a function wants an opset version other than the model's.
    """
    changed = _inline_calls(model, model.graph)
    domains = {function.domain for function in model.functions.values()}
    changed = changed or bool(model.functions)
    model.functions.clear()
    for domain in domains:
        model.graph.opset_imports.pop(domain, None)
    return changed


def _inline_calls(model: ir.Model, graph: ir.Graph) -> bool:
    changed = False
    pending = list(reversed(graph))
    while pending:
        node = pending.pop()
        if node.op_identifier() in model.functions:
            pending.extend(reversed(inline_function(model, node)))
            changed = True
        else:
            for subgraph in subgraphs_of(node):
                changed |= _inline_calls(model, subgraph)
    return changed


# ----------------------------------------------------------------------------------------------------------- outlining


def _data_of(node: ir.Node) -> Sequence[ir.Value | None]:
    """What an anchor reads; of a zero point before it, its kernel knows the number."""
    return node.inputs[:1] if kind_of(node) is Kind.OPERAND else node.inputs


def _is_scalar(value: ir.Value) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and tensor.size == 1


def _is_read_outside(value: ir.Value, members: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(user not in members for user, _ in value.uses())


def _outline(
    constants: Sequence[ir.Value], inputs: Sequence[ir.Value], nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]
) -> ir.Graph:
    """The body of a group: constants first, then copies of the nodes in order."""
    values: ValueMap = {value: copy_value(value) for value in (*inputs, *constants)}
    parameters = [copy for value in inputs if (copy := values[value]) is not None]
    body: list[ir.Node] = []
    for value in constants:
        tensor, output = constant_tensor(value), values[value]
        if tensor is not None and output is not None:
            attribute = ir.AttrTensor("value", ir.Tensor(tensor.numpy()))
            body.append(ir.Node("", "Constant", (), [attribute], outputs=[output], name=""))
    body += [clone_node(node, values) for node in nodes]
    return ir.Graph(parameters, [copy for value in outputs if (copy := values[value]) is not None], nodes=body)


def _register(model: ir.Model, body: ir.Graph, name: str) -> ir.OperatorIdentifier:
    """The identifier of a function with this body: an existing one, or a new one called `name` or `name_<n>`."""
    bodies: _Bodies | None = model.meta.get(_BODIES)
    if bodies is None:
        ours = [function for function in model.functions.values() if function.domain == DOMAIN]
        bodies = model.meta[_BODIES] = _Bodies({body_structure(one.graph): one.identifier() for one in ours}, {})
    structure = body_structure(body)
    known = bodies.by_structure.get(structure)
    if known in model.functions and body_structure(model.functions[known].graph) == structure:
        return known
    identifier, count = (DOMAIN, name, ""), bodies.last_suffix.get(name, 1)
    while identifier in model.functions:
        count += 1
        identifier = (DOMAIN, f"{name}_{count}", "")
    bodies.last_suffix[name] = count
    bodies.by_structure[structure] = identifier
    imports = model.graph.opset_imports
    body.opset_imports.update({domain: imports[domain] for domain in {"", *(node.domain for node in body)} if domain in imports})
    model.functions[identifier] = ir.Function(DOMAIN, identifier[1], graph=body, attributes=())
    return identifier


def _origins_of(constants: Sequence[ir.Value], nodes: Sequence[ir.Node]) -> list[_Origin]:
    inner = [_Origin(name=None, outputs=[str(value.name)], metadata={}) for value in constants]
    return inner + [
        _Origin(name=node.name or "", outputs=[str(value.name) for value in node.outputs], metadata=dict(node.metadata_props))
        for node in nodes
    ]


def metadata_of(call: ir.Node) -> list[dict[str, str]]:
    """The metadata of each node that a call stands for, in the order of its body; its own, if it is no fused group."""
    return [origin["metadata"] for origin in _origins(call)] if is_fused(call) else [dict(call.metadata_props)]


def _origins(call: ir.Node) -> list[_Origin]:
    origins: list[_Origin] = json.loads(call.metadata_props.get(NODES_KEY, "[]"))
    return origins


def _substitute(
    model: ir.Model, nodes: Sequence[ir.Node], members: set[ir.Node], call: ir.Node, escaping: Sequence[ir.Value], adjacent: bool
) -> None:
    """Put `call` where the last of `nodes` stands, give it their readers, and remove them."""
    graph = graph_of(nodes[-1])
    delayed = [] if adjacent else _readers_between(graph, members)
    graph.insert_after(nodes[-1], call)
    if delayed:
        graph.remove(delayed)
        graph.insert_after(call, delayed)
    for old, new in zip(escaping, call.outputs, strict=True):
        for user, index in tuple(old.uses()):
            if user not in members:
                user.replace_input_with(index, new)
        if old.is_graph_output():
            for index, output in enumerate(graph.outputs):
                if output is old:
                    graph.outputs[index] = new
    for node in nodes:
        for value in node.outputs:
            if value not in escaping:
                release_name(model, str(value.name))
    remove_nodes(nodes)


def _readers_between(graph: ir.Graph, members: set[ir.Node]) -> list[ir.Node]:
    """Nodes standing before the last member that depend on a member: a call in the last one's place must precede them."""
    missing, between = len(members), []
    reached = set(members)
    for node in graph:
        if node in members:
            missing -= 1
            if not missing:
                break
        elif any(value.producer() in reached for value in read_values(node)):
            reached.add(node)
            between.append(node)
    return between


# ------------------------------------------------------------------------------------------------------------ inlining


def _import_opsets(model: ir.Model, function: ir.Function) -> None:
    """Import what the body needs."""
    for domain, version in function.opset_imports.items():
        have = model.graph.opset_imports.setdefault(domain, version)
        if have != version:
            raise InvalidModelError(
                f"function {function.domain}.{function.name}",
                f"it imports opset {version} of domain {domain!r} and the model opset {have}",
                "convert the model to one opset with onnx.version_converter",
            )


def _fits(origins: Sequence[_Origin], body: ir.Function) -> bool:
    """Whether each origin may be that of the body node at its place."""
    return len(origins) == len(body) and all(
        len(origin["outputs"]) == len(node.outputs) and (origin["name"] is not None or node.op_type == "Constant")
        for origin, node in zip(origins, body, strict=True)
    )


def _restore_constant(model: ir.Model, node: ir.Node, origin: _Origin) -> ir.Value:
    """The initializer for a constant of a fused body: the original one where it is still there, else a new one."""
    tensor = constant_tensor(node.outputs[0])
    assert tensor is not None
    name = origin["outputs"][0]
    present = model.graph.initializers.get(name)
    same = None if present is None else constant_tensor(present)
    if present is not None and same is not None and same.size == 1 and tensor_key(same) == tensor_key(tensor):
        return present
    return add_constant(model, tensor.numpy(), name)


def _restore_node(
    model: ir.Model, child: ir.Node, origin: _Origin, values: ValueMap, attributes: Mapping[str, ir.Attr]
) -> ir.Node:
    """A copy of a body node under its original names, or new ones."""
    results = set(graph_of(child).outputs)
    node = clone_node(child, values, attributes)
    node.name = origin["name"] or child.name
    node.metadata_props.update(origin["metadata"] or child.metadata_props)
    for inner, output, name in zip(child.outputs, node.outputs, origin["outputs"], strict=True):
        if name:  # an absent optional output stays so
            output.name = None if inner in results else fresh_name(model, name)
    for graph in subgraphs_of(node):
        _rename_inner(model, graph)
    return node


def _rename_inner(model: ir.Model, graph: ir.Graph) -> None:
    """Give the values of a copied subgraph names of their own: ONNX shares one scope with the graphs around it."""
    made = [value for node in graph for value in node.outputs if value.name]
    for value in (*graph.inputs, *tuple(graph.initializers.values()), *made):
        value.name = fresh_name(model, str(value.name))
    for node in graph:
        for subgraph in subgraphs_of(node):
            _rename_inner(model, subgraph)
