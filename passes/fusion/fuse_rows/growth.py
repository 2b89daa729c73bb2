"""The search for the largest group of operators that can be computed row by row, around one reduction."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.facts import tensor_type
from ....compiler.ir.kinds import is_pointwise
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.rows import Place, Rows, has_row_types, rows_of
from ....runtime.symbolic.shapes import same_shape
from ....runtime.symbolic.sizes import greatest_of

SCRATCH_BYTES = 128 * 1024  # of a thread, as the kernel has it
_ROW_OPERATOR_VALUES = 2  # that one keeps at most: shifted or centred elements, and its result
_MAX_SEARCH = 256  # nodes that are looked at for a path that leaves the group and returns


@dataclass(slots=True)
class Growth:
    """One search. Nodes before and after the group join, in order of the graph, as long as they may.

    What follows `head` may join, and it itself; the group is of use only if nobody else reads its result (`holds_head`).
    """

    seed: ir.Node
    rows: Rows
    order: dict[ir.Node, int]  # of the nodes of the graph
    taken: set[ir.Node]  # nodes of other groups
    claimed: dict[ir.Node, ir.Node]
    max_ops: int
    head: ir.Node | None = None  # a matrix product that may be computed with the rows of its result
    members: dict[ir.Node, Place] = field(default_factory=dict)  # each with what its result is for a row
    rejected: dict[ir.Node, str] = field(default_factory=dict)
    waiting: list[tuple[int, ir.Node]] = field(default_factory=list)  # heap of neighbours

    def grow(self) -> tuple[list[ir.Node], list[Rejection]]:
        """The group, in order of the graph, and why its neighbours are not in it."""
        self._join(self.seed)
        while self.waiting:
            _, node = heapq.heappop(self.waiting)
            if node in self.members:
                continue
            if reason := self._fault(node):
                self.rejected[node] = reason
            else:
                self._join(node)
        group = sorted(self.members, key=self.order.__getitem__)
        return group, list(self._rejections())

    def _join(self, node: ir.Node) -> None:
        place = self.rows.place_of(node.outputs[0])
        assert place is not None
        self.members[node] = place
        for other in dict.fromkeys(neighbours(node)):
            is_candidate = is_pointwise(other) or rows_of(other) is not None or other is self.head
            if other in self.order and other not in self.members and is_candidate:
                self.rejected.pop(other, None)
                heapq.heappush(self.waiting, (self.order[other], other))

    def _fault(self, node: ir.Node) -> str | None:
        """Why a neighbour cannot join; None if it can."""
        if node in self.taken:
            return "it is in another group"
        if node in self.claimed and self.claimed[node] is not self.head:
            return f"it follows {self.claimed[node].op_type}, which stores it for the same bytes"
        if len(self.members) >= self.max_ops:
            return f"the group would have more than {self.max_ops} nodes"
        if (fault := self._operand_fault(node) if node is self.head else self._shape_fault(node)) is not None:
            return fault
        if self._scratch(node) > SCRATCH_BYTES:
            return f"a row of {self.rows.length} elements would keep {self._scratch(node) // 1024} KiB in scratch"
        return self._path_fault(node)

    def holds_head(self) -> bool:
        """Whether the product is in the group, and all that read it."""
        return self.head in self.members and all(reader in self.members for reader in self.head.outputs[0].consumers())

    def _operand_fault(self, head: ir.Node) -> str | None:
        made = any(value is not None and value.producer() in self.members for value in head.inputs)
        return "its operands are computed in the group" if made else None

    def _shape_fault(self, node: ir.Node) -> str | None:
        if self.head is not None and any(value in self.head.inputs for value in node.outputs):
            return f"{self.head.op_type}, with which the rows are computed, reads it"
        place = self.rows.place_of(node.outputs[0])
        if not has_row_types(node):
            return "it has types that rows are not computed in"
        if (rows := rows_of(node)) is not None:
            reads = [value for value in node.inputs[1:] if value is not None and value.producer() in self.members]
            fault = "" if rows == self.rows and not reads else f"its rows are not those of {self.seed.op_type}"
            return fault or self._both_ways_fault(node)
        made = [value for value in node.inputs if value is not None and value.producer() in self.members]
        flat = [value for value in made if self.rows.place_of(value) is Place.FLAT]
        if place is None or (place is Place.FLAT) != bool(flat) or (flat and len(flat) != len(made)):
            return f"its shape is {node.outputs[0].shape}, which is not that of the rows {list(self.rows.shape)}"
        if place is Place.ROW and not made:
            return "it computes one number for each row, and reads nothing of the group"
        return self._both_ways_fault(node)

    def _both_ways_fault(self, node: ir.Node) -> str | None:
        """That an operand in memory is read along rows, and by what has lost their dimensions."""
        is_flat = self._is_flat(node)
        others = {value for member in self.members if self._is_flat(member) != is_flat for value in member.inputs}
        read = [value for value in node.inputs if value in others and value is not None and not _is_number(value)]
        is_outside = any(value.producer() not in self.members for value in read)
        return "an operand is read with and without the dimensions of the row" if is_outside else None

    def _is_flat(self, node: ir.Node) -> bool:
        """Whether a node reads values without the dimensions of the row; a reduction reads rows, whatever it makes."""
        return rows_of(node) is None and self.rows.place_of(node.outputs[0]) is Place.FLAT

    def _scratch(self, node: ir.Node) -> int:
        """Bytes of a row of all element values that could be kept, an upper bound.

        Of sequences, whose lengths all rows share, the limit cuts a range; images have as many limits as planes: of them the
        greatest counts.
        """
        total = 0
        length = self.rows.length if self.rows.count == 1 else greatest_of(self.rows.length)
        for member in (*self.members, node):
            of_rows = rows_of(member)
            kind = tensor_type(member.inputs[0] if of_rows and member.inputs[0] else member.outputs[0])
            if of_rows or same_shape(kind.shape, self.rows.shape):
                width = max(kind.hinted.size_bytes // max(kind.hinted.elements, 1), 4)
                total += length * width * (_ROW_OPERATOR_VALUES if of_rows else 1)
        return total

    def _path_fault(self, node: ir.Node) -> str | None:
        """What leaves the group, or the node, and comes back to either through others."""
        members = {*self.members, node}
        last = max(self.order[one] for one in members)
        pending = [reader for one in members for value in one.outputs for reader in value.consumers() if reader not in members]
        seen: set[ir.Node] = set()
        while pending:
            other = pending.pop()
            if other in members:
                return "a path leaves the group and returns to it"
            if other in seen or self.order.get(other, last) >= last:
                continue
            seen.add(other)
            if len(seen) > _MAX_SEARCH:
                return f"more than {_MAX_SEARCH} nodes lie between it and the group"
            pending.extend(reader for value in other.outputs for reader in value.consumers())
        return None

    def _rejections(self) -> Iterator[Rejection]:
        for node, reason in self.rejected.items():
            if node not in self.members:
                yield Rejection(f"{node.op_type} not computed in the rows of {self.seed.op_type}: {reason}", (self.seed, node))


def _is_number(value: ir.Value) -> bool:
    """Whether a value is a constant of one element, which is in the code."""
    tensor = constant_tensor(value)
    return tensor is not None and tensor.size == 1


def neighbours(node: ir.Node) -> Iterator[ir.Node]:
    """What makes a node's operands, what reads its results, and for a reduction the others of what it reduces."""
    for value in node.inputs:
        if value is not None and (producer := value.producer()) is not None:
            yield producer
    for value in node.outputs:
        yield from value.consumers()
    operand = node.inputs[0] if rows_of(node) is not None else None
    if operand is not None:
        yield from (reader for reader in operand.consumers() if reader is not node and rows_of(reader) is not None)
