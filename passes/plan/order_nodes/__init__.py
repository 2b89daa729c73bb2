"""order-nodes: choose the order of execution.

| file | what |
|---|---|
| `dataflow.py` | the graph as numbers, and greedy orders |
| `exact.py` | the best order of a small graph |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.pipeline import Context, Pass
from .dataflow import Dataflow
from .exact import best_order


@dataclass(frozen=True)
class OrderNodes(Pass):
    """Put the nodes into a topological order in which fewer bytes live at once.

    Before:  a = Exp(x);  b = Exp(z);  c = ReduceSum(a);  d = ReduceSum(b)
    After:   a = Exp(x);  c = ReduceSum(a);  b = Exp(z);  d = ReduceSum(b)

    Of the nodes that are ready, the one that adds least (or frees most) runs next; among equals the first as given, or, in a
    second attempt, the one that became ready last. Of up to `exact_nodes` nodes, the best of all orders is searched for, as long
    as `states` sets of nodes suffice. The better order replaces the given one if its peak is lower. Always legal:
    nodes of ONNX have no effects on each other. Inputs, outputs and weights are not in the arena; a value without a static type
    counts as nothing.
    """

    name: ClassVar[str] = "order-nodes"
    exact_nodes: int = 40
    states: int = 20_000

    def run(self, model: ir.Model, context: Context) -> bool:
        nodes = list(model.graph)
        flow = Dataflow(model.graph, nodes)
        given = list(range(len(nodes)))
        order = min((given, flow.greedy_order(depth_first=False), flow.greedy_order(depth_first=True)), key=flow.peak_bytes)
        if len(nodes) <= self.exact_nodes:
            order = best_order(flow, self.states, order) or order
        if order is given:
            return False
        before, after = flow.peak_bytes(given), flow.peak_bytes(order)
        context.remark(self.name, f"the largest sum of live activations falls from {before} to {after} bytes")
        chosen = [nodes[index] for index in order]
        model.graph.remove(chosen)
        model.graph.extend(chosen)
        return True
