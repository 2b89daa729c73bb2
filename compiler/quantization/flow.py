"""Where activations lie in 8 bits: what quantized units read, and between convolutions also what pools, sums and joins read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ..ir.kinds import Kind, kind_of
from ..ir.matching import has_same_shape, rank_of

_IMAGE_RANKS = (4, 5)
_POOLS = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
_SAME_NUMBERS = ("MaxPool", "GlobalMaxPool", "Slice")  # what gives only numbers of its first operand: one format serves both
_CARRIERS = (*_POOLS, "Add", "Concat", "Slice")  # beside quantized units: what may read 8 bits between convolutions

Edge = tuple[ir.Node, int]  # a reader, and the position of its operand


@dataclass(frozen=True, slots=True)
class Flow:
    """The values that lie in 8 bits. `readers` are the operands that are read so; `leader` names, for a value that has the format
    of others, one of them (itself, where it has one of its own)."""

    readers: Mapping[ir.Value, tuple[Edge, ...]]
    leader: Mapping[ir.Value, ir.Value]

    def groups(self) -> dict[ir.Value, list[ir.Value]]:
        """The values of each format, by their leader."""
        found: dict[ir.Value, list[ir.Value]] = {}
        for value in self.readers:
            found.setdefault(self.leader[value], []).append(value)
        return found


def find_flow(graph: ir.Graph, units: Collection[ir.Node]) -> Flow:
    """The flow of 8-bit activations in a graph whose nodes `units` are to read their first operand so.

    What a quantized convolution reads is also read so by the pools, sums and Concats beside it, if it has no other readers, and
    then lies in 8 bits alone. What they are made of lies in 8 bits, too: the operand of a pool or a Slice, those of a Concat, and
    of a sum that is stored in 8 bits one operand, if it is made by a quantized convolution; the other is added before anything is
    stored. What only a Concat reads has its format: it would be rounded twice else.
    Matrix products have float32 residuals: theirs are sums over all layers.
    """
    nodes = list(graph)
    search = _Search(frozenset(units), {node: place for place, node in enumerate(nodes)})
    for node in reversed(nodes):
        for value in node.outputs:
            if value in search.readers:
                search.spread(value, node)
    for value in [value for value in graph.inputs if value in search.readers]:
        search.read_everywhere(value)
    return Flow({value: tuple(edges) for value, edges in search.readers.items()}, search.leaders())


@dataclass(slots=True)
class _Search:
    """Values known to lie in 8 bits so far, consumers before producers, and which of them share a format."""

    units: frozenset[ir.Node]
    places: Mapping[ir.Node, int]  # in the graph's order
    readers: dict[ir.Value, list[Edge]] = field(default_factory=dict)
    _parents: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in sorted(self.units, key=lambda one: self.places[one]):
            if node.inputs[0] is not None:
                self.readers.setdefault(node.inputs[0], []).append((node, 0))

    def spread(self, value: ir.Value, producer: ir.Node) -> None:
        """Go on from a value to what it is made of."""
        if rank_of(value) not in _IMAGE_RANKS:
            return
        self.read_everywhere(value)
        maker = self._before_activation(producer)
        if maker.op_type == "Add" and maker.domain == "":
            self._spread_to_sum(maker)
        elif producer.op_type in (*_POOLS, "Concat", "Slice") and producer.domain == "" and len(producer.outputs) == 1:
            for operand in producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]:
                if operand is not None and self._can_lie_narrow(operand):
                    self.readers.setdefault(operand, [])
                    if producer.op_type in _SAME_NUMBERS or (producer.op_type == "Concat" and _is_of_one_reader(operand)):
                        self._share(operand, value)

    def read_everywhere(self, value: ir.Value) -> None:
        """Let all readers of an image read it in 8 bits, if all of them can."""
        if rank_of(value) in _IMAGE_RANKS and self._can_lie_narrow(value):
            self.readers[value] = [(node, index) for node, index in value.uses()]

    def leaders(self) -> dict[ir.Value, ir.Value]:
        return {value: self._root(value) for value in self.readers}

    def _spread_to_sum(self, node: ir.Node) -> None:
        """Of two operands that convolutions make, the later one lies in 8 bits: the earlier has the sum in its epilogue."""
        a, b = node.inputs
        if a is None or b is None or not has_same_shape(a, b) or a in self.readers or b in self.readers:
            return
        makers = {value: maker for value in (a, b) if (maker := value.producer()) is not None and maker in self.units}
        if len(makers) == 2 and self._can_lie_narrow(later := max(makers, key=lambda value: self.places[makers[value]])):
            self.readers[later] = []

    def _before_activation(self, node: ir.Node) -> ir.Node:
        """The node whose result pointwise operators of one operand, each read once, make that of `node`; else `node` itself."""
        while kind_of(node) is Kind.ELEMENTWISE and len([one for one in node.inputs if one is not None]) == 1:
            source = node.inputs[0]
            producer = None if source is None else source.producer()
            if source is None or producer is None or len(source.uses()) != 1 or source.is_graph_output():
                return node
            node = producer
        return node

    def _can_lie_narrow(self, value: ir.Value) -> bool:
        """Whether all readers of a value can read 8 bits."""
        if value.is_graph_output() or value.is_initializer() or value.dtype != ir.DataType.FLOAT:
            return False
        return all(self._can_read_narrow(node, index) for node, index in value.uses())

    def _can_read_narrow(self, node: ir.Node, index: int) -> bool:
        if node in self.units:
            return index == 0
        is_data = index == 0 or node.op_type in ("Add", "Concat")
        return node.domain == "" and node.op_type in _CARRIERS and len(node.outputs) == 1 and is_data

    def _share(self, value: ir.Value, other: ir.Value) -> None:
        """Give a value the format of another."""
        own, root = self._root(value), self._root(other)
        if own is not root:
            self._parents[own] = root

    def _root(self, value: ir.Value) -> ir.Value:
        while (parent := self._parents.get(value)) is not None:
            value = parent
        return value


def _is_of_one_reader(value: ir.Value) -> bool:
    """Whether one node alone reads a value and, where it is made of the numbers of another, those."""
    if len(value.uses()) != 1:
        return False
    producer = value.producer()
    if producer is None or producer.op_type not in _SAME_NUMBERS or producer.inputs[0] is None:
        return True
    return _is_of_one_reader(producer.inputs[0])
