"""Which nodes of a graph make one program, and which the host runs between programs.

A program has static shapes, so a graph is cut where a shape comes from data: a stage computes the data, and the next one is
compiled when the data is there. Stages are levels of the graph: a node stands in the first one in which all that it reads can
be had, so there are as few of them as the longest chain of such cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import onnx_ir as ir

from ...runtime.staged.host_operators import DATA_MOVEMENT, SEQUENCE_OPERATORS
from ..frontend.shaping import shaping_operands
from ..ir.bounds import is_data_sized, sized_axes
from ..ir.carried import carried_axis
from ..ir.constants import constant_tensor
from ..ir.scopes import read_values, subgraphs_of
from .host_operators import HOST_OPERATORS


class Means(IntEnum):
    """How a node is run."""

    COMPILED = 0
    HOST = 1  # between programs


@dataclass
class Stage:
    """One level: nodes that a program computes, then nodes that the host runs, both in the graph's order."""

    compiled: list[ir.Node] = field(default_factory=list)
    host: list[ir.Node] = field(default_factory=list)


def partition(nodes: Sequence[ir.Node]) -> tuple[Stage, ...]:
    """The stages of a graph's nodes, which are in topological order."""
    levels = _Levels()
    stages: list[Stage] = []
    for node in nodes:
        means, level = levels.place(node)
        stages.extend(Stage() for _ in range(level + 1 - len(stages)))
        (stages[level].compiled if means is Means.COMPILED else stages[level].host).append(node)
    return tuple(stages)


def needs_host(node: ir.Node) -> bool:
    """Whether no program could hold the node, whatever its shapes: control flow, sequences, optionals, strings."""
    if any(True for _ in subgraphs_of(node)) or node.op_identifier()[:2] in HOST_OPERATORS:
        return True
    if node.domain == "" and node.op_type in SEQUENCE_OPERATORS:
        return True
    return any(value is not None and _is_no_tensor(value) for value in (*node.inputs, *node.outputs))


class _Levels:
    """Of each value: the stage in which a program can read it, and the one at whose begin its bytes are there."""

    def __init__(self) -> None:
        self.computed: dict[ir.Value, int] = {}
        self.there: dict[ir.Value, int] = {}
        self.shape_decided: dict[ir.Value, bool] = {}
        self.sized: dict[ir.Value, tuple[ir.Node, int]] = {}  # what a stage bounds: the operator that sizes it, and its axis

    def place(self, node: ir.Node) -> tuple[Means, int]:
        level = max((self.computed.get(value, 0) for value in read_values(node)), default=0)
        by_data = [value for value in shaping_operands(node) if not self._is_shape_decided(value)]
        moves = bool(by_data) and node.domain == "" and node.op_type in DATA_MOVEMENT
        if needs_host(node) or moves:
            self._record(node, level + 1, level + 1)
            return Means.HOST, level
        level = max([level, *(self.there.get(value, 0) for value in by_data)])
        # A program bounds a size that data decides, and carries it on to other results (pass bound-shapes); what else reads these
        # is compiled when the size is known.
        if (carried := self._carried(node)) is not None:
            operator, axis = carried
            level = self.computed[operator.outputs[0]] - 1
            self.sized.update(dict.fromkeys(node.outputs, (operator, axis)))
        elif is_data_sized(node):
            self.sized.update({value: (node, axis) for value, axis in sized_axes(node).items()})
        self._record(node, level + 1 if is_data_sized(node) or carried is not None else level, level + 1)
        return Means.COMPILED, level

    def _carried(self, node: ir.Node) -> tuple[ir.Node, int] | None:
        """The operator whose unknown size `node` carries on, and the axis; None where it must wait for that size."""
        read = {value: self.sized[value] for value in node.inputs if value is not None and value in self.sized}
        operators = {operator for operator, _ in read.values()}
        if len(operators) != 1:
            return None
        (operator,) = operators
        level = self.computed[operator.outputs[0]] - 1
        if any(self.computed.get(value, 0) > level for value in read_values(node) if value not in read):
            return None
        axis = carried_axis(node, {value: axis for value, (_, axis) in read.items()})
        return None if axis is None else (operator, axis)

    def _record(self, node: ir.Node, computed: int, there: int) -> None:
        for value in node.outputs:
            self.computed[value], self.there[value] = computed, there

    def _is_shape_decided(self, value: ir.Value) -> bool:
        """Whether a value is known once the shapes of a stage's inputs are: constants, and what is computed from shapes."""
        pending = [value]
        while pending:
            one = pending[-1]
            if one in self.shape_decided:
                pending.pop()
                continue
            producer = one.producer()
            if _is_constant(one) or (producer is not None and producer.op_type in ("Shape", "Size")):
                self.shape_decided[one] = True
            elif producer is None or needs_host(producer) or is_data_sized(producer):
                self.shape_decided[one] = False
            else:
                unknown = [operand for operand in read_values(producer) if operand not in self.shape_decided]
                if unknown:
                    pending.extend(unknown)
                    continue
                self.shape_decided[one] = all(self.shape_decided[operand] for operand in read_values(producer))
        return self.shape_decided[value]


def crossing_values(nodes: Iterable[ir.Node], later: Iterable[ir.Value]) -> list[ir.Value]:
    """The values that `nodes` compute and that are among `later`, in order. Constants are wherever they are read."""
    wanted = set(later)
    return [value for node in nodes for value in node.outputs if value in wanted and not _is_constant(value)]


def _is_constant(value: ir.Value) -> bool:
    return constant_tensor(value) is not None


def _is_no_tensor(value: ir.Value) -> bool:
    if isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
        return True
    return value.dtype == ir.DataType.STRING
