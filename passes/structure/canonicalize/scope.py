"""What a local rewrite may make: the vocabulary of the rules of `canonicalize`.

A rule is a function of one node. It returns what the node becomes, a Rejection, or None; it changes nothing itself, except
that it may add constants. A rule must make progress towards the canonical form: what it returns is visited again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, add_sizes
from ....compiler.ir.matching import is_read
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.symbolic.symbols import SizeTensor

_BUDGETED_FOLDS = 16  # folds of the largest size that one model may have


@dataclass(slots=True)
class Scope:
    """The model under rewrite. `budget_bytes` bounds what folding may still add to the model's constants.

    `folded` are the operators of the nodes that `onnx.reference` has computed; `unrolled` counts the nodes that loops became.
    """

    model: ir.Model
    fold_limit_bytes: int
    budget_bytes: int
    folded: list[str] = field(default_factory=list)
    unrolled: int = 0

    @classmethod
    def with_limit(cls, model: ir.Model, fold_limit_bytes: int) -> Scope:
        """The scope of one run of a pass, with the usual budget."""
        return cls(model, fold_limit_bytes, fold_limit_bytes * _BUDGETED_FOLDS)

    @property
    def opset(self) -> int:
        return self.model.graph.opset_imports.get("", 1)

    def constant(self, contents: np.ndarray | ir.LazyTensor | SizeTensor, hint: str | None) -> ir.Value:
        """A new initializer of the main graph, which subgraphs see too."""
        return add_constant(self.model, contents, hint or "constant")

    def ints(self, numbers: Sequence[int], hint: str | None) -> ir.Value:
        """A new int64 vector: a shape, axes, or pads."""
        return add_sizes(self.model, numbers, hint or "constant")


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


def respelled(node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> Replacement:
    """The same operator with other inputs or attributes."""
    new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
    for old_output, output in zip(node.outputs, new.outputs, strict=True):
        if old_output.name == "":
            output.name = ""
    return Replacement((new,), tuple(new.outputs))


def can_replace(old: ir.Value, new: ir.Value) -> bool:
    """Whether `new` can take the place of `old` without an Identity to carry the name of a graph output."""
    if not old.is_graph_output():
        return True
    producer, consumer = new.producer(), old.producer()
    assert consumer is not None
    return producer is not None and producer.graph is consumer.graph and not new.is_graph_output()
