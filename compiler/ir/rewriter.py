"""Rewriting a graph: replacing and removing nodes safely, and rules that say why they did not match."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from .assignments.node_precision import assign_precision, most_exact, precision_in
from .cloning import copy_facts
from .constants import constant_tensor
from .facts import ORIGINS_KEY, SOURCE_KEY, infer_node, origins_of, source_of
from .names import fresh_name, release_name


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a rewrite was refused, and the nodes to blame."""

    reason: str
    nodes: tuple[ir.Node, ...] = ()


class Rejections(Protocol):
    """Where refusals are recorded, such as the `Context` of a compilation."""

    def reject(self, pass_name: str, rejection: Rejection) -> None:
        """Record why a rewrite was refused."""


class Match(Protocol):
    """What a rule found: an immutable value that can rewrite it."""

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        """Rewrite the graph and return the nodes made."""


class Rule(Protocol):
    """A local rewrite. `match` finds and judges, and changes and stores nothing."""

    @property
    def name(self) -> str: ...

    def match(self, node: ir.Node) -> Match | Rejection | None:
        """What to rewrite at `node`; a Rejection where it is nearly so; None where the rule has nothing to do with it."""


def operation(op_type: str, inputs: Sequence[ir.Value | None], **attributes: int | float | str | Sequence[int]) -> ir.Node:
    """A new node of one output, in no graph yet."""
    return ir.node(op_type, inputs, attributes)


def replace_node(
    owner: ir.Model | ir.Graph, node: ir.Node, new_nodes: Sequence[ir.Node], new_outputs: Sequence[ir.Value | None]
) -> None:
    """Put `new_nodes` in the place of `node`, and `new_outputs` in the place of its outputs (None: that output is unused).

    True afterwards: graph outputs keep their names, under an Identity where the new value cannot take the name (it is an input,
    an initializer or already an output). New values without a name get that of the value they replace, or one derived from
    it, and, if `owner` is the model, facts: inferred, else those of what they replace. New nodes carry the old node's torch
    source. `node` is out of the graph and uses nothing.
    """
    graph = graph_of(node)
    assert len(new_outputs) == len(node.outputs), f"{len(node.outputs)} outputs replaced by {len(new_outputs)}"
    for old_value, new_value in zip(node.outputs, new_outputs, strict=True):
        if new_value is not None and new_value.name is None:
            new_value.name = old_value.name or None  # that of an output that is left out is empty
    for new in new_nodes:
        copy_source((node,), new)
        for output in new.outputs:
            if output.name is None:
                output.name = fresh_name(owner, node.outputs[0].name or node.op_type.lower())
    graph.insert_before(node, new_nodes)
    if isinstance(owner, ir.Model):
        for new in new_nodes:
            infer_node(new, owner)
    for old_value, new_value in zip(node.outputs, new_outputs, strict=True):
        if new_value is not None:
            _replace_value(old_value, new_value)
    graph.remove(node, safe=True)


def remove_nodes(nodes: Iterable[ir.Node]) -> None:
    """Take nodes out of their graphs. Nothing outside `nodes` may read their outputs, nor a graph return them."""
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        by_graph.setdefault(graph_of(node), []).append(node)
    for graph, members in by_graph.items():
        graph.remove(members, safe=True)


def drop_unused_constants(model: ir.Model, values: Iterable[ir.Value | None]) -> None:
    """Take those of some constants out of the model that nothing reads any more, with the nodes that made them."""
    for value in dict.fromkeys(values):
        if value is None or constant_tensor(value) is None or value.uses() or value.is_graph_output():
            continue
        producer = value.producer()
        if producer is not None:
            remove_nodes([producer])
        elif value.graph is not None:
            value.graph.initializers.pop(str(value.name))
        release_name(model, str(value.name))


def copy_source(origins: Sequence[ir.Node], node: ir.Node) -> None:
    """Give `node` the metadata of what it was made from: all of it for one origin; the joined sources for several, and the most
    exact of their precisions."""
    if len(origins) == 1:
        for key, value in origins[0].metadata_props.items():
            node.metadata_props.setdefault(key, value)
        if not node.name and source_of(origins[0]) == origins[0].name:  # which is all that says where it comes from
            node.metadata_props.setdefault(SOURCE_KEY, source_of(origins[0]))
    else:
        node.metadata_props[SOURCE_KEY] = ", ".join(dict.fromkeys(source_of(origin) for origin in origins))
        precision = most_exact(precision_in(origin.metadata_props) for origin in origins)
        if precision is not None:
            assign_precision(node, precision)
    if not node.name and ORIGINS_KEY not in node.metadata_props:  # it is new, neither a copy under its old name nor moved
        names = dict.fromkeys(name for origin in origins for name in origins_of(origin.name, origin.metadata_props))
        node.metadata_props[ORIGINS_KEY] = json.dumps(list(names))


def literal_shape(shape: Sequence[int]) -> dict[str, int]:
    """Attributes of a Reshape to these extents: without them a 0 stands for the extent that was there before."""
    return {"allowzero": 1} if 0 in shape else {}


def apply_rules(model: ir.Model, rules: Sequence[Rule], rejections: Rejections) -> bool:
    """Apply rules until none matches, first rule first at each node, from the inputs on; return whether any did.

    A rewrite makes its new nodes and their readers be looked at again, so that the cost is linear in nodes and rewrites.
    """
    queue = deque(model.graph)
    queued = set(queue)
    changed = False
    while queue:
        node = queue.popleft()
        queued.discard(node)
        for rule in rules:
            if node.graph is None:
                break
            match = rule.match(node)
            if match is None:
                continue
            if isinstance(match, Rejection):
                rejections.reject(rule.name, match)
                continue
            made = match.rewrite(model)
            changed = True
            again = [*made, *(reader for new in made for output in new.outputs for reader, _ in output.uses())]
            queue.extend(other for other in again if other not in queued)
            queued.update(again)
    return changed


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph a node is in, that of a function for a node of its body."""
    owner = node.graph
    assert owner is not None, f"{node.name} is in no graph"
    return owner.graph if isinstance(owner, ir.Function) else owner


def _replace_value(old: ir.Value, new: ir.Value) -> None:
    """Make every reader of `old` read `new`, and the graph return it, under an Identity where it cannot take the name."""
    if old is new:
        return
    if new.type is None:
        new.type = old.type
    if new.producer() is not None:
        new.shape = _merged_shape(new.shape, old.shape)
    for reader, position in tuple(old.uses()):
        reader.replace_input_with(position, new)
    if old.is_graph_output():
        old.replace_all_uses_with(_output_value(old, new), replace_graph_outputs=True)


def _merged_shape(new: ir.Shape | None, old: ir.Shape | None) -> ir.Shape | None:
    """What is known of a value by either shape; `new` counts where both know a dimension."""
    if new is None or old is None or len(new) != len(old):
        return ir.Shape(old) if new is None and old is not None else new
    is_known = [isinstance(dim, int) or dim.value is not None for dim in new]
    return ir.Shape([fresh if known else before for fresh, before, known in zip(new, old, is_known, strict=True)])


def _output_value(old: ir.Value, new: ir.Value) -> ir.Value:
    """A value with the contents of `new` that may be a graph output named as `old` is: `new` renamed, or an Identity of it."""
    producer, consumer = new.producer(), old.producer()
    assert consumer is not None
    if producer is None or producer.graph is not consumer.graph or new.is_graph_output():
        identity = ir.node("Identity", [new], version=consumer.version)
        copy_source((consumer,), identity)
        graph_of(consumer).insert_before(consumer, identity)
        copy_facts(new, identity.outputs[0])
        new = identity.outputs[0]
    new.name = old.name
    return new
