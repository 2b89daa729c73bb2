"""merge-groups: groups that read each other's results, or the same tensor, become one kernel with several outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.assignments.kernel_choice import Ask
from ...compiler.ir.functions import body_of, drop_uncalled_groups, fuse_into_function, group_name, inline_function, is_fused
from ...compiler.ir.kinds import Kind, is_pointwise, kind_of
from ...compiler.ir.matching import has_same_shape
from ...compiler.ir.rewriter import Rejection
from ...compiler.pipeline import Context, Pass, number
from .short_runs import short_run_fault

_NORMALIZATIONS = frozenset(["LayerNormalization", "RMSNormalization"])
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
_MAX_OUTPUTS = 4
_MAX_OPERANDS = 16  # addresses that stay in registers


@dataclass(frozen=True)
class MergeGroups(Pass):
    """Merge a pointwise group into one that produces, or also reads, a tensor of its size; what others read becomes an output.

    Before:  h = prefuse.matmul_add(x, w, b);  y = Relu(h);  z = MatMul(h, v)      Relu cannot follow in a group of one output
    After:   h, y = prefuse.matmul_add_relu(x, w, b);  z = MatMul(h, v)

    Saved is one reading of the tensor that both have, or, where they have none and are small, a launch. Legal when all results
    have one shape, the earlier group is pointwise or ends in a product, convolution or normalization, and the two can stand at
    one place of the graph's order: everything that the later one reads comes before the earlier one, or everybody who reads the
    earlier one comes after the later one. Then no path leaves the merged group and returns. What
    only makes floats of bytes that are stored stays apart, for its readers to compute.
    """

    name: ClassVar[str] = "merge-groups"
    max_ops: int = number(32, least=1)  # largest group, in nodes
    small_elements: int = 4096  # groups with results up to this size merge also where they share nothing

    def run(self, model: ir.Model, context: Context) -> bool:
        return _Merging(model, context, self, context.kernels_of(model)).run()


@dataclass(slots=True)
class _Merging:
    """The groups of a graph, each at a place in its order; a merged group takes the place of one of its parts."""

    model: ir.Model
    context: Context
    limits: MergeGroups
    ask: Ask
    places: dict[ir.Node, int] = field(default_factory=dict)
    last_small: dict[str, ir.Node] = field(default_factory=dict)  # by shape, the last small pointwise group
    rejected: set[Rejection] = field(default_factory=set)

    def run(self) -> bool:
        """Merge until nothing merges: what has been merged is no longer between others."""
        changed = False
        while self._merge_in_order():
            changed = True
        if changed:
            drop_uncalled_groups(self.model)
        return changed

    def _merge_in_order(self) -> bool:
        self.places = {node: place for place, node in enumerate(self.model.graph)}
        self.last_small.clear()
        changed = False
        for node in [node for node in self.places if self._is_pointwise(node)]:
            if node in self.places:
                changed |= self._merge_with_earlier(node)
        return changed

    def _merge_with_earlier(self, node: ir.Node) -> bool:
        changed = False
        for other in dict.fromkeys(self._partners(node)):
            if other not in self.places or other is node:
                continue  # merged since
            first, second = sorted((other, node), key=self.places.__getitem__)  # what has been merged may stand earlier
            if reason := self._fault(first, second):
                if self._has_outlet(first):
                    rejection = Rejection(f"{second.op_type} not merged with {first.op_type}: {reason}", (first, second))
                    self._reject(rejection)
                continue
            node = self._merge(first, second)
            changed = True
        if self._is_small(node):
            self.last_small[str(node.outputs[0].shape)] = node
        return changed

    def _reject(self, rejection: Rejection) -> None:
        """Record a refusal, once in all trips over the graph."""
        if rejection not in self.rejected:
            self.rejected.add(rejection)
            self.context.reject(self.limits.name, rejection)

    def _partners(self, node: ir.Node) -> Iterator[ir.Node]:
        """Earlier groups, those that share most bytes first: whose result `node` reads, who read what it reads, small ones."""
        large = [value for value in node.inputs if value is not None and has_same_shape(value, node.outputs[0])]
        for value in large:
            producer = value.producer()
            if producer in self.places:
                yield producer
        for value in large:
            if not _is_constant(value):
                readers = [
                    reader for reader in value.consumers() if self._stands_before(reader, node) and self._is_pointwise(reader)
                ]
                yield from sorted(readers, key=lambda reader: -self.places[reader])[:1]
        if self._is_small(node) and (other := self.last_small.get(str(node.outputs[0].shape))) is not None:
            yield other

    def _stands_before(self, reader: ir.Node, node: ir.Node) -> bool:
        return reader in self.places and self.places[reader] < self.places[node]

    def _fault(self, first: ir.Node, second: ir.Node) -> str | None:
        """Why two groups, in this order, cannot be one; None if they can."""
        if not self._has_outlet(first):
            return f"{first.op_type} is neither pointwise nor a product, convolution or normalization"
        if not self._is_pointwise(second):
            return f"{second.op_type} is not pointwise"
        if not all(has_same_shape(output, second.outputs[0]) for output in first.outputs):
            return f"its shape is {second.outputs[0].shape} and that of {first.op_type} {first.outputs[0].shape}"
        if self._widens_bytes(first, second):
            return "it only widens bytes, which who reads them does as well"
        if self._size(first) + self._size(second) > self.limits.max_ops:
            return f"the group would have more than {self.limits.max_ops} nodes"
        if len(set(first.inputs) | set(second.inputs)) > _MAX_OPERANDS:
            return f"the group would read more than {_MAX_OPERANDS} tensors"
        if len(first.outputs) + len(second.outputs) > _MAX_OUTPUTS:
            return f"the group would have more than {_MAX_OUTPUTS} outputs"
        _, *followers = self._fusable(first)
        if reason := short_run_fault(first, [*followers, *self._operators(second)], self.context.target, self.ask):
            return reason
        if not self._fits_at_first(first, second) and not self._fits_at_second(first, second):
            return "what lies between them in the graph's order reads the one and feeds the other"
        return None

    def _widens_bytes(self, first: ir.Node, second: ir.Node) -> bool:
        """Whether `second` makes larger numbers of nothing but 8-bit results of `first`, which is to store these anyway."""
        large = {value for value in second.inputs if value is not None and has_same_shape(value, second.outputs[0])}
        narrow = all(value in first.outputs and value.dtype in _BYTES for value in large)
        return bool(large) and narrow and all(output.dtype == ir.DataType.FLOAT for output in second.outputs)

    def _fits_at_first(self, first: ir.Node, second: ir.Node) -> bool:
        """Whether all that `second` reads from elsewhere is there before `first`."""
        producers = [value.producer() for value in second.inputs if value is not None]
        return all(
            one is None or one is first or self.places.get(one, len(self.places)) < self.places[first] for one in producers
        )

    def _fits_at_second(self, first: ir.Node, second: ir.Node) -> bool:
        """Whether nobody needs `first` before `second`."""
        readers = [reader for output in first.outputs for reader in output.consumers()]
        return all(one is second or self.places.get(one, -1) > self.places[second] for one in readers)

    def _merge(self, first: ir.Node, second: ir.Node) -> ir.Node:
        at_first = self._fits_at_first(first, second)
        place = self.places[first if at_first else second]
        graph = self.model.graph
        moved, anchor = (second, first) if at_first else (first, second)
        graph.remove(moved)
        (graph.insert_after if at_first else graph.insert_before)(anchor, moved)
        del self.places[first], self.places[second]
        nodes = [*self._nodes(first), *self._nodes(second)]
        merged = fuse_into_function(self.model, nodes, group_name(nodes), adjacent=True)
        self.places[merged] = place
        return merged

    def _nodes(self, node: ir.Node) -> tuple[ir.Node, ...]:
        return inline_function(self.model, node) if is_fused(node) else (node,)

    def _operators(self, node: ir.Node) -> list[ir.Node]:
        body = body_of(self.model, node) if is_fused(node) else (node,)
        return [one for one in body if one.op_type != "Constant"]

    def _fusable(self, node: ir.Node) -> list[ir.Node]:
        """The anchor and what follows it."""
        return [one for one in self._operators(node) if kind_of(one) is not Kind.OPERAND]

    def _size(self, node: ir.Node) -> int:
        return len(self._operators(node))

    def _is_pointwise(self, node: ir.Node) -> bool:
        return (is_fused(node) or is_pointwise(node)) and all(map(is_pointwise, self._operators(node)))

    def _has_outlet(self, node: ir.Node) -> bool:
        """Whether the kernel of a group can store several results."""
        first, *others = self._fusable(node)
        is_normalization = first.op_type in _NORMALIZATIONS and sum(output.name != "" for output in first.outputs) == 1
        is_outlet = is_pointwise(first) or kind_of(first) is Kind.OUTPUT_FUSABLE or is_normalization
        return is_outlet and all(map(is_pointwise, others))

    def _is_small(self, node: ir.Node) -> bool:
        shape = node.outputs[0].shape
        return shape is not None and shape.is_static() and 0 < prod(shape.numpy()) <= self.limits.small_elements


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()
