"""Products by constants that read a weighted sum, alone or among the operands of a Concat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import onnx_ir as ir

from ....compiler.ir.aliases import is_view
from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.matching import input_at, static_shape
from .weighted_sums import WeightedSum, same_rows

_RECURRENT = ("GRU", "LSTM", "RNN")


@dataclass(frozen=True, slots=True)
class Reader:
    """A product by a constant, over columns of which [begin, end) are the weighted sum's.

    `concat` joins these columns with others; None where there are no others. `node` is a Gemm without factors, a MatMul, or one
    step of a recurrent operator in one direction for a batch of one, whose bias is then a row added to the input's share.
    """

    source: WeightedSum
    node: ir.Node
    concat: ir.Node | None
    begin: int
    end: int

    @property
    def weight(self) -> ir.Value:
        value = self.node.inputs[1]
        assert value is not None
        return value

    @property
    def is_stale(self) -> bool:
        """Whether a part of the chain has left the graph since it was found."""
        made = [value.producer() for value in (self.source.weights, self.source.values)]
        return any(node is not None and node.graph is None for node in (self.node, self.concat, self.source.node, *made))

    @property
    def is_recurrent(self) -> bool:
        return self.node.op_type in _RECURRENT

    @property
    def depth_axis(self) -> int:
        """Of the weight: the axis over which the product sums."""
        if self.is_recurrent:
            return 2
        return self.node.attributes.get_int("transB", 0) if self.node.op_type == "Gemm" else 0

    @property
    def columns(self) -> int:
        """Of the result; of the input's share, where it is recurrent."""
        shape = static_shape(self.weight) or ()
        return shape[1] if self.is_recurrent else shape[1 - self.depth_axis]


def readers_of(source: WeightedSum) -> Iterator[Reader]:
    """The products that read a weighted sum along its depth."""
    for value in same_rows(source.node.outputs[0], source.depth):
        yield from _products(value, source, None, 0, source.depth)
        for concat in dict.fromkeys(value.consumers()):
            width = (static_shape(concat.outputs[0]) or (0,))[-1]
            if (place := _place(concat, value)) is not None:
                for joined in same_rows(concat.outputs[0], width):
                    yield from _products(joined, source, concat, *place)


def _place(node: ir.Node, value: ir.Value) -> tuple[int, int] | None:
    """The columns of a Concat along the last axis that are the value; None where it is no such Concat."""
    shapes = [static_shape(piece) for piece in node.inputs]
    if node.op_type != "Concat" or node.domain != "" or list(node.inputs).count(value) != 1 or not all(shapes):
        return None
    if node.attributes.get_int("axis", 0) % len(shapes[0] or ()) != len(shapes[0] or ()) - 1:
        return None
    cuts = list(pairwise(accumulate(((shape or ())[-1] for shape in shapes), initial=0)))
    place = cuts[list(node.inputs).index(value)]
    return place if place != (0, cuts[-1][1]) else None


def _products(value: ir.Value, source: WeightedSum, concat: ir.Node | None, begin: int, end: int) -> Iterator[Reader]:
    for node in dict.fromkeys(value.consumers()):
        if node.domain == "" and list(node.inputs).count(value) == 1 and node.inputs[0] is value and _is_product(node, concat):
            yield Reader(source, node, concat, begin, end)


def _is_product(node: ir.Node, concat: ir.Node | None) -> bool:
    weight = input_at(node, 1)
    shape = static_shape(weight)
    if weight is None or shape is None or constant_tensor(weight) is None:
        return False
    match node.op_type:
        case "Gemm":
            factors = (node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0))
            return factors == (1.0, 1.0) and not node.attributes.get_int("transA", 0)
        case "MatMul":
            return len(shape) == 2
        case "GRU" | "LSTM" | "RNN":
            bias = input_at(node, 3)
            is_one_row = (static_shape(node.inputs[0]) or ())[:2] == (1, 1) and shape[0] == 1
            return concat is not None and is_one_row and (bias is None or constant_tensor(bias) is not None)
    return False


def is_read_by_none_but(source: WeightedSum, family: Sequence[Reader]) -> bool:
    """Whether nobody needs a weighted sum but some of its readers, through views and the Concats before them."""
    nodes = {reader.node for reader in family}
    concats = {reader.concat for reader in family}
    pending = [source.node.outputs[0]]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return False
        for node in set(value.consumers()) - nodes:
            if not is_view(node) and node not in concats:
                return False
            pending.append(node.outputs[0])
    return True
