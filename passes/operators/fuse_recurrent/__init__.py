"""fuse-recurrent: cells spelled out as gate arithmetic become GRU, LSTM or RNN, consecutive steps one node."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.rewriter import Rejection
from ....compiler.pipeline import Context, Pass
from .building import Constants
from .columns import columns_of, pieces_of
from .rewriting import Rewriter
from .runs import chains_of, runs_of
from .steps import Step, Surroundings, find_first_step, find_step


@dataclass(frozen=True)
class FuseRecurrent(Pass):
    """Rewrite the arithmetic of recurrent cells to ONNX's recurrent operators.

    Before:  a = Gemm(x, w, b);  c = Gemm(h, u, d);  ...  h' = (1 - z) * n + z * h
    After:   h' = Squeeze(GRU(Unsqueeze(x), W, R, B, , Unsqueeze(h)))

    Steps that are chained, and whose inputs are consecutive elements of a sequence, become one node over all of them, whose
    kernel multiplies the inputs of all steps at once. Legal when nothing but a step reads what it computes besides its states,
    the weights are constant, and the activations are among those of the operator.
    """

    name: ClassVar[str] = "fuse-recurrent"

    def run(self, model: ir.Model, context: Context) -> bool:
        known = Surroundings(_multipliers(model.graph))
        rejections: dict[ir.Node, Rejection] = {}
        for node in model.graph:
            found = find_step(node, known) if node.domain == "" and len(node.outputs) == 1 else None
            if isinstance(found, Rejection):
                rejections[node] = found
            elif found is not None:
                first = find_first_step(found, known)
                if isinstance(first, Step):
                    known.add(first)
                known.add(found)
        self._report(rejections, known, context)
        rewriter = Rewriter(model, Constants(model))
        places = {output: place for place, node in enumerate(model.graph) for output in node.outputs}
        chains = chains_of(known.steps.values())
        for chain in sorted(chains, key=lambda chain: places[chain[0].hidden_out]):  # what makes a sequence before its readers
            for run in runs_of(chain, rewriter.place):
                rewriter.rewrite(run)
        rewriter.finish()
        return bool(known.steps)

    def _report(self, rejections: dict[ir.Node, Rejection], known: Surroundings, context: Context) -> None:
        """What was refused, but for nodes that belong to some step after all."""
        taken = {node for step in known.steps.values() for node in step.body}
        for node, rejection in rejections.items():
            if node not in taken:
                context.reject(self.name, rejection)


def _multipliers(graph: ir.Graph) -> dict[ir.Value, set[tuple[ir.Value, int]]]:
    """The constant matrices that multiply each value from the right, each with its first row that takes the value."""
    found: defaultdict[ir.Value, set[tuple[ir.Value, int]]] = defaultdict(set)
    for node in graph:
        if node.op_type not in ("Gemm", "MatMul") or node.domain != "" or (source := columns_of(node.inputs[0])) is None:
            continue
        weights = node.inputs[1]
        if weights is not None and (turned := weights.producer()) is not None and turned.op_type == "Transpose":
            weights = turned.inputs[0]
        if weights is None or constant_tensor(weights) is None:
            continue
        begin = 0
        for piece in pieces_of(source):
            found[piece.value].add((weights, begin))
            begin += piece.width
    return dict(found)
