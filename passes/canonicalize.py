"""canonicalize: constants computed, nodes without effect dropped, and one spelling for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import onnx_ir as ir

from ..compiler.ir.facts import has_static_type, infer_node
from ..compiler.ir.rewriter import Rejection, replace_node
from ..compiler.ir.scopes import subgraphs_of
from ..compiler.pipeline import Context, Pass
from .canonicalization import arithmetic, branches, folding, no_ops, sequences, views, windows
from .canonicalization.scope import Replacement, Rule, Scope
from .eliminate_dead import release_subgraphs

_BUDGETED_FOLDS = 16  # folds of the largest size that one model may have

# Rules in the order of trial at each node: what computes nothing and what is known before folding, spelling after it.
_BEFORE_FOLDING: tuple[Mapping[str, tuple[Rule, ...]], ...] = (no_ops.RULES, folding.RULES, branches.RULES)
_AFTER_FOLDING: tuple[Mapping[str, tuple[Rule, ...]], ...] = (views.RULES, windows.RULES, sequences.RULES, arithmetic.RULES)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Bring the graph to the form that later passes and lowering expect, in one walk from inputs to outputs.

    Before:  s = Shape(x); d = Gather(s, 0); t = Concat(d, [-1]); y = Reshape(x, t); z = Identity(y)
    After:   z = Reshape(x, [8, 12])

    Legal when the values read stay equal for every input, NaN and infinities included. Rounding may differ where constants are
    combined (batch normalisation), and the sign of a zero where 0 is added.
    """

    name: ClassVar[str] = "canonicalize"
    fold_limit_kib: int = 4096  # largest constant that folding may make bigger than what it is made from

    def run(self, model: ir.Model, context: Context) -> bool:
        limit_bytes = self.fold_limit_kib * 1024
        scope = Scope(model, limit_bytes, limit_bytes * _BUDGETED_FOLDS)
        return _Walk(scope, context, self.name).visit_graph(model.graph)


@dataclass(slots=True)
class _Walk:
    """One run of the pass. Inputs of a node are in canonical form when it is visited, so that each is visited once."""

    scope: Scope
    context: Context
    name: str

    def visit_graph(self, graph: ir.Graph) -> bool:
        changed = False
        for original in tuple(graph):
            pending = [original]
            while pending:
                node = pending.pop()
                made = self._rewrite(node)
                if made is None:
                    for subgraph in subgraphs_of(node):
                        changed |= self.visit_graph(subgraph)
                else:
                    changed = True
                    pending.extend(reversed(made))
        return changed

    def _rewrite(self, node: ir.Node) -> tuple[ir.Node, ...] | None:
        """Apply the first rule that has something to say and return the nodes made; None where no rule has."""
        if node.domain != "":
            return None
        if not all(output.name == "" or has_static_type(output) for output in node.outputs):
            infer_node(node, self.scope.model)  # its inputs may be better known by now
        for rule in _RULES.get(node.op_type, _ANY):
            found = rule(node, self.scope)
            if isinstance(found, Rejection):
                self.context.reject(self.name, found)
            elif found is not None:
                self._replace(node, found)
                return found.nodes
        return None

    def _replace(self, node: ir.Node, found: Replacement) -> None:
        """Rewrite the graph; what is made in the place of a value takes its name."""
        graph = node.graph
        if found.nodes and found.nodes[-1].outputs[0] is found.outputs[0] and found.outputs[0].name is None:
            found.outputs[0].name, found.nodes[-1].name = node.outputs[0].name, node.name
        renamed = [
            (new, old.name)
            for old, new in zip(node.outputs, found.outputs, strict=True)
            if found.are_constants and new is not None and graph is self.scope.model.graph and not old.is_graph_output()
        ]
        replace_node(self.scope.model, node, found.nodes, found.outputs)
        release_subgraphs(node)
        for value, name in renamed:
            value.name = name


def _rules_of(op_type: str) -> tuple[Rule, ...]:
    """Every rule for an operator, in order."""
    before = [rule for family in _BEFORE_FOLDING for rule in family.get(op_type, ())]
    after = [rule for family in _AFTER_FOLDING for rule in family.get(op_type, ())]
    return (*before, folding.fold, *after)


_RULES: dict[str, tuple[Rule, ...]] = {
    op_type: _rules_of(op_type) for op_type in sorted(set(chain.from_iterable((*_BEFORE_FOLDING, *_AFTER_FOLDING))))
}
_ANY: tuple[Rule, ...] = (folding.fold,)
