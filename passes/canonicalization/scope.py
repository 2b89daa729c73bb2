"""What a local rewrite may ask of the graph and may make: the vocabulary of the rules of `canonicalize`.

A rule is a function of one node. It returns what the node becomes, a Rejection, or None; it changes nothing itself, except
that it may add constants. A rule must make progress towards the canonical form: what it returns is visited again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...compiler.ir.constants import add_constant, constant_array, constant_tensor
from ...compiler.ir.rewriter import Rejection

_MAX_UNIFORM_ELEMENTS = 4096  # larger constants are not searched for a single repeated value
_BUDGETED_FOLDS = 16  # folds of the largest size that one model may have


@dataclass(slots=True)
class Scope:
    """The model under rewrite. `budget_bytes` bounds what folding may still add to the model's constants.

    `folded` are the operators of the nodes that `onnx.reference` has computed.
    """

    model: ir.Model
    fold_limit_bytes: int
    budget_bytes: int
    folded: list[str] = field(default_factory=list)

    @classmethod
    def with_limit(cls, model: ir.Model, fold_limit_bytes: int) -> Scope:
        """The scope of one run of a pass, with the usual budget."""
        return cls(model, fold_limit_bytes, fold_limit_bytes * _BUDGETED_FOLDS)

    @property
    def opset(self) -> int:
        return self.model.graph.opset_imports.get("", 1)

    def constant(self, contents: np.ndarray | ir.LazyTensor, hint: str | None) -> ir.Value:
        """A new initializer of the main graph, which subgraphs see too."""
        return add_constant(self.model, contents, hint or "constant")

    def ints(self, numbers: Sequence[int], hint: str | None) -> ir.Value:
        """A new int64 vector: a shape, axes, or pads."""
        return self.constant(np.array(numbers, np.int64), hint)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes to put in the place of one, and the values that its outputs become (None: nothing reads that output)."""

    nodes: tuple[ir.Node, ...]
    outputs: tuple[ir.Value | None, ...]
    are_constants: bool = False  # the outputs are new constants, to be named as what they replace


Rule = Callable[[ir.Node, Scope], Replacement | Rejection | None]


def becomes(node: ir.Node, value: ir.Value) -> Replacement | None:
    """The first output of `node` is `value` itself; None where another output is read."""
    if any(is_read(output) for output in node.outputs[1:]):
        return None
    return Replacement((), (value, *[None] * (len(node.outputs) - 1)))


def spelled(*nodes: ir.Node) -> Replacement:
    """A node of one output becomes `nodes`, of which the last gives the result."""
    return Replacement(nodes, (nodes[-1].outputs[0],))


def operation(op_type: str, inputs: Sequence[ir.Value | None], **attributes: int | float | str | Sequence[int]) -> ir.Node:
    """A new node of one output, in no graph yet."""
    return ir.node(op_type, inputs, attributes)


def respelled(node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> Replacement:
    """The same operator with other inputs or attributes."""
    new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
    for old_output, output in zip(node.outputs, new.outputs, strict=True):
        if old_output.name == "":
            output.name = ""
    return Replacement((new,), tuple(new.outputs))


def is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def can_replace(old: ir.Value, new: ir.Value) -> bool:
    """Whether `new` can take the place of `old` without an Identity to carry the name of a graph output."""
    if not old.is_graph_output():
        return True
    producer, consumer = new.producer(), old.producer()
    assert consumer is not None
    return producer is not None and producer.graph is consumer.graph and not new.is_graph_output()


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The dimensions of a value, or None where one is unknown or symbolic."""
    if value is None or value.shape is None:
        return None
    dims = tuple(dim for dim in value.shape if isinstance(dim, int))
    return dims if len(dims) == len(value.shape) else None


def rank_of(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def has_same_shape(first: ir.Value, second: ir.Value) -> bool:
    """Whether the shapes are known to be equal: the same numbers and the same named dimensions."""
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return False
    return all(
        a == b and (isinstance(a, int) or a.value is not None) for a, b in zip(first.shape.dims, second.shape.dims, strict=True)
    )


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """The input at a position; None where an optional one is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant of numbers; nothing is read of it."""
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.dtype != ir.DataType.STRING


def int_constants(value: ir.Value | None) -> tuple[int, ...] | None:
    """The elements of a constant integer tensor."""
    array = constant_array(value)
    return None if array is None else tuple(int(element) for element in array.reshape(-1))


def uniform_constant(value: ir.Value | None) -> float | int | bool | None:
    """The number that every element of a constant is; None if they differ, or there are none or too many to look."""
    tensor = None if value is None else constant_tensor(value)
    array = constant_array(value) if tensor is not None and 1 <= tensor.size <= _MAX_UNIFORM_ELEMENTS else None
    if array is None:
        return None
    first = array.reshape(-1)[0]
    if array.size > 1 and not bool((array == first).all()):
        return None
    element = first.item()
    return element if isinstance(element, (bool, int)) else float(element)


def is_floating(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is an ONNX operator of that type."""
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == op_type and producer.domain == "" else None
