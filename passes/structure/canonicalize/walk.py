"""The walk that applies rules to a graph, from inputs to outputs, until none has anything to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import onnx_ir as ir

from ....compiler.ir.facts import has_static_type, infer_node
from ....compiler.ir.matching import is_read
from ....compiler.ir.rewriter import Rejection, replace_node
from ....compiler.ir.scopes import read_values, release_subgraphs, subgraphs_of
from ....compiler.pipeline import Context
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
    """One run of a pass.

    Inputs of a node are in canonical form when it is visited, so that each is visited once. Two things that rules look at come
    later: one with subgraphs is looked at again when these have become simpler; and where one of several outputs has lost its
    last reader, the graph is walked again.
    """

    scope: Scope
    context: Context
    name: str  # of the pass
    rules: RuleTable
    unread: list[ir.Value] = field(default_factory=list)  # outputs, among several of a node, that this walk has left unread

    def run(self) -> bool:
        """Rewrite the model, and say which constants `onnx.reference` has computed; whether anything changed."""
        changed = self.visit_graph(self.scope.model.graph)
        while self.unread:
            self.unread.clear()
            self.visit_graph(self.scope.model.graph)
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
                found, rejections = self._find(node)
                if found is None and self._visit_subgraphs(node):
                    changed, (found, rejections) = True, self._find(node)
                for rejection in rejections:
                    self.context.reject(self.name, rejection)
                if found is not None:
                    changed = True
                    self._replace(node, found)
                    pending.extend(reversed(found.nodes))
        return changed

    def _visit_subgraphs(self, node: ir.Node) -> bool:
        """Rewrite the subgraphs of a node; whether anything changed."""
        changed = [self.visit_graph(subgraph) for subgraph in subgraphs_of(node)]
        return any(changed)

    def _find(self, node: ir.Node) -> tuple[Replacement | None, list[Rejection]]:
        """What the first rule that has something to say makes of a node, and why those before it refused."""
        rejections: list[Rejection] = []
        if node.domain != "":
            return None, rejections
        if not all(output.name == "" or has_static_type(output) for output in node.outputs):
            infer_node(node, self.scope.model)  # its inputs may be better known by now
        for rule in self.rules.by_operator.get(node.op_type, self.rules.rest):
            found = rule(node, self.scope)
            if isinstance(found, Replacement):
                missing = node.outputs[len(found.outputs) :]  # such as the indices of a MaxPool, which few ask for
                if any(is_read(value) for value in missing):
                    continue
                return replace(found, outputs=(*found.outputs, *[None] * len(missing))), rejections
            if found is not None:
                rejections.append(found)
        return None, rejections

    def _replace(self, node: ir.Node, found: Replacement) -> None:
        """Rewrite the graph; what is made in the place of a value takes its name."""
        graph, reads = node.graph, read_values(node)
        if found.nodes and found.nodes[-1].outputs[0] is found.outputs[0] and found.outputs[0].name is None:
            found.outputs[0].name, found.nodes[-1].name = node.outputs[0].name, node.name
        renamed = [
            (new, old.name)
            for old, new in zip(node.outputs, found.outputs, strict=True)
            if found.are_constants and new is not None and graph is self.scope.model.graph and not old.is_graph_output()
        ]
        replace_node(self.scope.model, node, found.nodes, found.outputs)
        release_subgraphs(node)
        self.unread.extend(value for value in reads if _is_one_of_several(value) and not is_read(value))
        for value, name in renamed:
            value.name = name


def _is_one_of_several(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and len(producer.outputs) > 1
