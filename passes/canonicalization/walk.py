"""The walk that applies rules to a graph, from inputs to outputs, until none has anything to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from ...compiler.ir.facts import has_static_type, infer_node
from ...compiler.ir.rewriter import Rejection, replace_node
from ...compiler.ir.scopes import subgraphs_of
from ...compiler.pipeline import Context
from ..eliminate_dead import release_subgraphs
from . import folding
from .scope import Replacement, Rule, Scope

Family = Mapping[str, tuple[Rule, ...]]  # rules by the operator that they look at


@dataclass(frozen=True, slots=True)
class RuleTable:
    """The rules for each operator in the order of trial, folding among them; `rest` is for operators that have none."""

    by_operator: Mapping[str, tuple[Rule, ...]]
    rest: tuple[Rule, ...] = (folding.fold,)

    @classmethod
    def of(cls, before_folding: Iterable[Family], after_folding: Iterable[Family]) -> RuleTable:
        """The table of some families of rules."""
        before, after = tuple(before_folding), tuple(after_folding)

        def rules_of(op_type: str) -> tuple[Rule, ...]:
            first = [rule for family in before for rule in family.get(op_type, ())]
            last = [rule for family in after for rule in family.get(op_type, ())]
            return (*first, folding.fold, *last)

        return cls({op_type: rules_of(op_type) for op_type in sorted(set(chain.from_iterable((*before, *after))))})


@dataclass(frozen=True, slots=True)
class Walk:
    """One run of a pass. Inputs of a node are in canonical form when it is visited, so that each is visited once."""

    scope: Scope
    context: Context
    name: str  # of the pass
    rules: RuleTable

    def run(self) -> bool:
        """Rewrite the model, and say which constants `onnx.reference` has computed; whether anything changed."""
        changed = self.visit_graph(self.scope.model.graph)
        if self.scope.folded:
            counts = ", ".join(f"{operator} {count}" for operator, count in sorted(Counter(self.scope.folded).items()))
            self.context.remark(self.name, f"onnx.reference computed constants: {counts}")
        return changed

    def visit_graph(self, graph: ir.Graph) -> bool:
        """Rewrite a graph and the subgraphs of its nodes; whether anything changed."""
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
        for rule in self.rules.by_operator.get(node.op_type, self.rules.rest):
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
