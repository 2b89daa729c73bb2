"""What a family of patterns finds: several nodes that together are one operator of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array, scalar_constant
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection, copy_source, remove_nodes, replace_node

Attributes = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Spelling:
    """`nodes`, in any order and `last` among them, compute what one node of `op_type` does; `last` gives its result.

    Nothing outside `nodes` may read what those of `core` compute, `last` excepted; the others stay where somebody reads them.
    Arrays among the inputs are new constants. `since` is the first opset that has the operator as it is meant here.
    """

    op_type: str
    inputs: tuple[ir.Value | np.ndarray, ...]
    attributes: Attributes
    since: int
    last: ir.Node
    core: frozenset[ir.Node]
    nodes: frozenset[ir.Node] = field(default_factory=frozenset)

    def obstacle(self) -> Rejection | None:
        """The value in the middle that somebody else reads."""
        members = self.nodes | self.core
        for node in self.core - {self.last}:
            for value in node.outputs:
                if value.is_graph_output():
                    return self._rejection(f"%{value.name} is an output of the graph", node)
                if other := next((user for user in value.consumers() if user not in members), None):
                    return self._rejection(f"%{value.name} is also read by {other.op_type}", node, other)
        return None

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        """Put the operator in the place of `last`, and remove what nobody reads any more."""
        hint = str(self.last.outputs[0].name)
        inputs = [add_constant(model, one, f"{hint}_{place}") if isinstance(one, np.ndarray) else one
                  for place, one in enumerate(self.inputs)]  # fmt: skip
        new = ir.node(self.op_type, inputs, dict(self.attributes))
        members = sorted(self.nodes | self.core, key=_name)
        copy_source(members, new)
        replace_node(model, self.last, [new], [new.outputs[0]])
        pending = [node for node in members if node is not self.last]
        while dead := [node for node in pending if not any(v.uses() or v.is_graph_output() for v in node.outputs)]:
            remove_nodes(dead)
            pending = [node for node in pending if node not in dead]
        return [new]

    def _rejection(self, reason: str, *nodes: ir.Node) -> Rejection:
        return Rejection(f"no {self.op_type}: {reason}", (self.last, *nodes))


Family = Callable[[ir.Node], Spelling | Rejection | None]


def _name(node: ir.Node) -> str:
    return str(node.outputs[0].name)


def maker(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node of ONNX's own domain that makes a value, if it is of one of these operators."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type in op_types else None


def operands(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The two operands of a binary operator."""
    first, second = node.inputs[:2]
    assert first is not None
    assert second is not None
    return first, second


def either_way(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The operands of a commutative operator in both orders."""
    first, second = operands(node)
    yield first, second
    yield second, first


def with_constant(node: ir.Node) -> tuple[ir.Value, float] | None:
    """The variable operand of a commutative operator and the one number that the other one is."""
    for value, other in either_way(node):
        number = scalar_constant(other)
        if number is not None:
            return value, float(number)
    return None


def only_reader(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The one node that reads a value, if it is of one of these operators and the graph does not return the value."""
    readers = value.consumers()
    if len(readers) != 1 or value.is_graph_output():
        return None
    (reader,) = readers
    return reader if reader.domain == "" and reader.op_type in op_types and reader.graph is value.graph else None


def combined_by_channel(node: ir.Node, op_type: str, shape: tuple[int, ...]) -> tuple[ir.Node, np.ndarray] | None:
    """The one reader of a node's result, if it combines it with one constant for each channel, [C, 1, ...]."""
    reader = only_reader(node.outputs[0], op_type)
    if reader is None or static_shape(reader.outputs[0]) != shape:
        return None
    wanted = (shape[1], *(1,) * (len(shape) - 2))
    for value, other in either_way(reader):
        array = constant_array(other)
        if value is node.outputs[0] and array is not None and array.shape[-len(wanted) :] == wanted and array.size == shape[1]:
            return reader, array.reshape(-1)
    return None
