"""`prefuse inspect`: what a model consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import onnx_ir as ir

from ...runtime.errors import CompileError, UnsupportedModelError
from ...runtime.generation.generator import load_generator
from ...runtime.loading.load import holds_generator, load
from ...runtime.target import Target
from ..estimates.cost import bytes_of, flops_of
from ..frontend.dimensions import is_dynamic
from ..frontend.importer import import_model
from ..ir.facts import has_static_type, infer_facts, source_of
from ..ir.kinds import is_known
from ..ir.scopes import subgraphs_of
from ..pipeline import Context, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES
from .common import JSON, MODEL, SHAPES, Shapes, concrete_model, is_program, show, size_text, table

_UNTIL_LOWERING = "canonicalize,unroll-loops,eliminate-dead,merge-equal,decompose,canonicalize,eliminate-dead"


@dataclass(slots=True)
class _Operator:
    """All nodes of one operator together; their costs count only where all their shapes `are_static`."""

    nodes: int = 0
    flops: int = 0
    bytes_moved: int = 0
    are_static: bool = True

    @property
    def cost(self) -> tuple[int | None, int | None]:
        """Operations and bytes; None where some are not known."""
        return (self.flops, self.bytes_moved) if self.are_static else (None, None)


@click.command("inspect")
@MODEL
@SHAPES
@JSON
def command(model: Path, shapes: Shapes, as_json: bool) -> None:
    """List what MODEL, an ONNX file or a .prefuse program, consists of. Costs need concrete shapes: give --shape.

    A program is loaded, as to run it: its native code has your rights, inspect only files that you trust.
    """
    if is_program(model):
        net = load_generator(model) if holds_generator(model) else load(model)
        show(as_json, {"report": net.report()}, net.report())
        return
    try:
        graph = concrete_model(model, shapes) if shapes else import_model(model)
    except UnsupportedModelError as error:
        show(as_json, {"unsupported": [str(error)]}, f"unsupported: {error}")
        return
    if not is_dynamic(graph):
        with suppress(CompileError):  # which the line on kernels tells
            infer_facts(graph)
    operators = _operators(graph)
    weights = list(_weights(graph.graph))
    parameters, weight_bytes = sum(tensor.size for tensor in weights), sum(tensor.nbytes for tensor in weights)
    unsupported = _without_kernel(graph)
    ports = {kind: {str(v.name): _type(v) for v in values} for kind, values in _ports(graph)}
    ranked = sorted(operators.items(), key=lambda item: (-item[1].flops, -item[1].nodes, item[0]))
    data = {
        "opset": graph.graph.opset_imports[""],
        **ports,
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "operators": {name: dict(zip(("nodes", "flops", "bytes"), (o.nodes, *o.cost), strict=True)) for name, o in ranked},
        "unsupported": unsupported,
    }
    head = [f"{kind[:-1]} {name}: {text}" for kind, values in ports.items() for name, text in values.items()]
    head.append(f"{parameters:,} parameters, {size_text(weight_bytes)}; opset {data['opset']}")
    rows = [(name, o.nodes, *_cost_texts(o)) for name, o in ranked]
    if not all(o.are_static for o in operators.values()):
        head.append("? is not known before shapes are concrete: --shape NAME=SIZES")
    lines = [f"no kernel: {line}" for line in unsupported] or ["every operator has a kernel"]
    show(as_json, data, *head, table("Operators", ("operator", "nodes", "MFLOP", "bytes"), rows), *lines)


def _weights(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    """The constants of a graph and of those inside it, whether they are initializers or nodes."""
    yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)
    for node in graph:
        if node.op_type == "Constant" and "value" in node.attributes:
            yield node.attributes["value"].as_tensor()
        for subgraph in subgraphs_of(node):
            yield from _weights(subgraph)


def _ports(graph: ir.Model) -> tuple[tuple[str, list[ir.Value]], tuple[str, list[ir.Value]]]:
    return ("inputs", list(graph.graph.inputs)), ("outputs", list(graph.graph.outputs))


def _type(value: ir.Value) -> str:
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    return f"{dtype}{'[?]' if value.shape is None else value.shape}"


def _cost_texts(operator: _Operator) -> tuple[str, str]:
    flops, size_bytes = operator.cost
    return "?" if flops is None else f"{flops / 1e6:,.3f}", "?" if size_bytes is None else size_text(size_bytes)


def _operators(graph: ir.Model) -> dict[str, _Operator]:
    operators: dict[str, _Operator] = defaultdict(_Operator)
    for node in graph.graph.all_nodes():
        one = operators[f"{node.domain}.{node.op_type}" if node.domain else node.op_type]
        one.nodes += 1
        one.flops += flops_of(node)
        one.bytes_moved += bytes_of(node)
        values = (*node.outputs, *(value for value in node.inputs if value is not None))
        one.are_static = one.are_static and all(has_static_type(value) for value in values if value.name)
    return operators


def _without_kernel(graph: ir.Model) -> list[str]:
    """Operators that are still there before lowering and that it does not know, each with where it comes from."""
    lowered = graph.clone()
    try:
        run_pipeline(lowered, parse_pipeline(_UNTIL_LOWERING, PASSES), Context(Target.parse("cpu")))
    except CompileError as error:
        return [str(error)]
    return [f"{node.op_type} at {source_of(node)}" for node in lowered.graph if not is_known(node)]
