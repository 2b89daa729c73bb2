"""eliminate-dead: whatever no output of the model depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx
import onnx_ir as ir

from ...compiler.ir.facts import schema_of
from ...compiler.ir.scopes import release_subgraphs, subgraphs_of
from ...compiler.pipeline import Context, Pass


@dataclass(frozen=True)
class EliminateDead(Pass):
    """Remove nodes, optional outputs, initializers and functions that nothing reads.

    Before:  y, indices = MaxPool(x);  t = Exp(y)      (y is the only output of the model)
    After:   y = MaxPool(x)

    Legal always: an ONNX operator has no effect but its outputs. Inputs of the model stay, read or not.
    """

    name: ClassVar[str] = "eliminate-dead"

    def run(self, model: ir.Model, context: Context) -> bool:
        changed = _sweep_graph(model.graph, model.graph.opset_imports)
        for function in model.functions.values():
            changed |= _sweep_graph(function.graph, function.opset_imports)
        changed |= _drop_functions(model)
        return _drop_initializers(model.graph) or changed


def _sweep_graph(graph: ir.Graph, opsets: Mapping[str, int]) -> bool:
    """Remove dead nodes from the outputs back, so that what only they read is dead when its turn comes."""
    changed = False
    for node in reversed(tuple(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
            release_subgraphs(node)
            changed = True
            continue
        changed |= _drop_outputs(node, opsets)
        for subgraph in subgraphs_of(node):
            changed |= _sweep_graph(subgraph, opsets)
            changed |= _drop_initializers(subgraph)
    return changed


def _drop_outputs(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Leave out the optional outputs that nothing reads."""
    if len(node.outputs) < 2 or _trains(node):
        return False
    schema = schema_of(node, opsets)
    if schema is None:
        return False
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    changed = False
    for output, formal in zip(node.outputs, schema.outputs, strict=False):
        if formal.option == optional and output.name != "" and not output.uses() and not output.is_graph_output():
            output.name, output.type, output.shape = "", None, None
            changed = True
    needed = max(index for index, output in enumerate(node.outputs) if output.name != "") + 1
    node.resize_outputs(needed)
    return changed


def _trains(node: ir.Node) -> bool:
    """Whether the node is a BatchNormalization in training mode, whose optional outputs ONNX then requires."""
    return node.op_type == "BatchNormalization" and node.domain == "" and node.attributes.get_int("training_mode", 0) != 0


def _drop_initializers(graph: ir.Graph) -> bool:
    """Forget constants that nothing reads; a default of a model input belongs to that input."""
    dead = [
        name
        for name, value in graph.initializers.items()
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input()
    ]
    for name in dead:
        del graph.initializers[name]
    return bool(dead)


def _drop_functions(model: ir.Model) -> bool:
    """Forget functions that no call reaches."""
    reached: set[ir.OperatorIdentifier] = set()
    pending = [node.op_identifier() for node in model.graph.all_nodes()]
    while pending:
        identifier = pending.pop()
        if identifier in model.functions and identifier not in reached:
            reached.add(identifier)
            pending.extend(_called_by(model.functions[identifier]))
    dead = [identifier for identifier in model.functions if identifier not in reached]
    for identifier in dead:
        del model.functions[identifier]
    return bool(dead)


def _called_by(function: ir.Function) -> Iterator[ir.OperatorIdentifier]:
    return (node.op_identifier() for node in function.all_nodes())
