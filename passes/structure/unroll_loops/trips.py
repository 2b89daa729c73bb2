"""How often a Loop runs, where that follows from constants alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ....compiler.ir.constants import constant_array, scalar_constant
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import input_at
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.scopes import subgraphs_of
from ..canonicalize.folding import is_misread
from ..determinism import is_deterministic

_MOST_ELEMENTS = 4096  # of what a condition is computed from: a state may grow from iteration to iteration
_SIZED_BY_VALUES = frozenset(["Expand", "OneHot", "Pad", "Tile"])
_WINDOWED = frozenset(["Col2Im", "GridSample", "MaxRoiPool", "Resize", "RoiAlign"])
_NUMBER, _CONDITION = 0, 1  # parameters of a body: of the iteration, and whether it runs; the others are carried values


def trip_count(node: ir.Node, model: ir.Model, most: int) -> int | Rejection:
    """How often a Loop runs its body: as long as its condition holds, and no more than its trip count.

    A condition that the body computes from the iteration's number, from constants and from carried values that depend on these
    alone is computed for each iteration, until more than `most` have run. A Rejection says what is not known.
    """
    bound, condition = input_at(node, 0), input_at(node, 1)
    limit, first = scalar_constant(bound), scalar_constant(condition)
    if (limit is not None and limit <= 0) or (first is not None and not first):
        return 0
    if bound is not None and limit is None:
        return _rejection(node, "its trip count is not constant")
    if condition is not None and first is None:
        return _rejection(node, "its condition is not constant at first")
    decision = _decision(node, model)
    return decision if isinstance(decision, Rejection) else _count(node, decision, model, limit, most)


@dataclass(frozen=True, slots=True)
class _Decision:
    """What a body computes its condition with: nodes in order, constants by name, and the parameters read, by position."""

    nodes: tuple[ir.Node, ...]
    constants: dict[str, np.ndarray]
    parameters: tuple[int, ...]


def _decision(node: ir.Node, model: ir.Model) -> _Decision | Rejection:
    """The part of a body that its condition depends on, through carried values too; a Rejection where it is not constant."""
    body = node.attributes["body"].as_graph()
    position = {value: index for index, value in enumerate(body.inputs)}
    nodes: set[ir.Node] = set()
    constants: dict[str, np.ndarray] = {}
    seen: dict[ir.Value, None] = {}
    pending = [body.outputs[0]]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen[value] = None
        producer, index = value.producer(), position.get(value)
        if index is not None:
            if index > _CONDITION and constant_array(node.inputs[index]) is None:
                return _rejection(node, f"its condition depends on %{value.name}, which is not constant at first")
            pending += [body.outputs[index - 1]] if index > _CONDITION else []
        elif (array := constant_array(value)) is not None:
            constants[str(value.name)] = array
        elif producer is None or producer.graph is not body:
            return _rejection(node, f"its condition depends on %{value.name}, which is not constant")
        elif blame := _obstacle(producer, model):
            return _rejection(node, f"its condition depends on {producer.op_type}, {blame}")
        else:
            nodes.add(producer)
            pending += [operand for operand in producer.inputs if operand is not None]
    parameters = tuple(sorted(position[value] for value in seen if value in position))
    return _Decision(tuple(child for child in body if child in nodes), constants, parameters)


def _obstacle(node: ir.Node, model: ir.Model) -> str | None:
    """Why a node may not be computed here; None if it may."""
    if any(True for _ in subgraphs_of(node)):
        return "which has subgraphs"
    if node.domain != "" or is_misread(node, model.graph.opset_imports[""]):
        return "which onnx.reference cannot compute"
    if kind_of(node) > Kind.REDUCTION or node.op_type in _SIZED_BY_VALUES or node.op_type in _WINDOWED:
        return "which may take long"
    return None if is_deterministic(node, model) else "which may be random"


def _count(node: ir.Node, decision: _Decision, model: ir.Model, limit: float | None, most: int) -> int | Rejection:
    """The iterations until the condition fails, computed one after the other."""
    body = node.attributes["body"].as_graph()
    carried = [index for index in decision.parameters if index > _CONDITION]
    state = {str(body.inputs[index].name): constant_array(node.inputs[index]) for index in carried}
    results = [str(body.outputs[0].name), *(str(body.outputs[index - 1].name) for index in carried)]
    parameters = [str(body.inputs[index].name) for index in decision.parameters]
    step = _Steps(decision, model, results)
    end = most + 1 if limit is None else int(limit)
    for trip in range(min(end, most + 1)):
        state |= {str(body.inputs[_NUMBER].name): np.array(trip, np.int64), str(body.inputs[_CONDITION].name): np.array(True)}
        try:
            condition, *found = step.run({name: state[name] for name in parameters})
        except Exception as error:  # the reference raises whatever NumPy does
            return _rejection(node, f"its condition cannot be computed: {type(error).__name__}: {error}")
        if not np.all(condition):
            return trip + 1
        if set(decision.parameters) <= {_CONDITION}:
            return end  # it holds for ever
        state = dict(zip((str(body.inputs[index].name) for index in carried), map(np.asarray, found), strict=True))
    return min(end, most + 1)


class _Steps:
    """The nodes of a decision, computed one by one, so that none reads more than a few elements."""

    def __init__(self, decision: _Decision, model: ir.Model, results: list[str]) -> None:
        imports = [onnx.helper.make_opsetid("", model.graph.opset_imports[""])]
        self._constants, self._results = decision.constants, results
        self._steps = []
        for node in decision.nodes:
            reads = list(dict.fromkeys(str(value.name) for value in node.inputs if value is not None))
            makes = [str(value.name) for value in node.outputs if value.name]
            function = onnx.helper.make_function("prefuse", "step", reads, makes, [ir.serde.serialize_node(node)], imports)
            self._steps.append((ReferenceEvaluator(function), reads, makes))

    def run(self, feeds: Mapping[str, np.ndarray | None]) -> list[np.ndarray]:
        """The condition and the carried values that it depends on.

        Raises:
            ValueError: a value has too many elements.
        """
        known: dict[str, Any] = {**self._constants, **feeds}
        for evaluator, reads, makes in self._steps:
            if any(np.size(known[name]) > _MOST_ELEMENTS for name in reads):
                raise ValueError(f"it needs more than {_MOST_ELEMENTS} elements")
            known.update(zip(makes, evaluator.run(None, {name: known[name] for name in reads}, attributes={}), strict=True))
        return [known[name] for name in self._results]


def _rejection(node: ir.Node, reason: str) -> Rejection:
    return Rejection(f"{node.op_type} not unrolled: {reason}", (node,))
