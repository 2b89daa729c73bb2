"""The nodes of one stage as a model of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..ir.cloning import ValueMap, clone_node, copy_value
from ..ir.constants import constant_tensor
from ..ir.scopes import read_values


@dataclass(frozen=True)
class StageModel:
    """A model, and the values of the whole graph that its inputs and outputs are, in order."""

    model: ir.Model
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]


def stage_model(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value], whole: ir.Model) -> StageModel:
    """Nodes in order, as a model that computes `outputs`. Constants that they read are shared; all else they read is an input."""
    made = {value for node in nodes for value in node.outputs}
    read = dict.fromkeys(value for node in nodes for value in read_values(node) if value not in made)
    values: ValueMap = {value: copy_value(value) for value in read}
    constants, inputs = [], []
    for value in read:
        copied, tensor = values[value], constant_tensor(value)
        assert copied is not None
        if tensor is None:
            inputs.append(value)
        else:
            copied.const_value = tensor
            constants.append(copied)
    clones = []
    for node in nodes:
        clone = clone_node(node, values)
        clone.metadata_props.update(node.metadata_props)
        clones.append(clone)
    graph = ir.Graph(
        _mapped(inputs, values),
        _mapped(outputs, values),
        nodes=clones,
        initializers=constants,
        opset_imports=dict(whole.graph.opset_imports),
        name=whole.graph.name,
    )
    model = ir.Model(graph, ir_version=whole.ir_version, functions=list(whole.functions.values()))
    return StageModel(model, tuple(inputs), tuple(outputs))


def _mapped(originals: Sequence[ir.Value], values: Mapping[ir.Value, ir.Value | None]) -> list[ir.Value]:
    return [copied for value in originals if (copied := values[value]) is not None]
