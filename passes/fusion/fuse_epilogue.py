"""fuse-epilogue: pointwise nodes join the node whose output they work on, so that one kernel computes and stores both."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.aliases import is_view, part_offsets, view_root, whole_of
from ...compiler.ir.assignments.kernel_choice import Ask
from ...compiler.ir.functions import fuse_into_function, group_name, is_fused
from ...compiler.ir.kinds import Kind, is_pointwise, kind_of
from ...compiler.ir.matching import has_same_shape, static_shape
from ...compiler.ir.rewriter import Rejection
from ...compiler.ir.rows import rows_of
from ...compiler.ir.states import state_inputs
from ...compiler.pipeline import Context, Pass, number
from ...runtime.target import Target
from .operand_reads import is_readable
from .short_runs import short_run_fault


@dataclass(frozen=True)
class FuseEpilogue(Pass):
    """Move the pointwise nodes that follow an anchor into one function with it.

    Before:  h = MatMul(x, w);  a = Add(h, b);  e = Erf(a);  y = Mul(a, e)
    After:   y = prefuse.matmul_add_erf_mul(x, w, b)

    An anchor has one output and is a matrix product or convolution, else a reduction, else a node that moves elements, else a
    pointwise node; in this order anchors take epilogues. Casts from bfloat16 or float16 that a member alone reads join with it,
    as kernels load such operands directly. Legal when every operator of the epilogue is pointwise with an output of the anchor's
    shape, and one value alone leaves the group: then no path leaves it and returns. Views and unknown operators stay outside, and
    costly operators where the anchor stores so few neighbours at a time that vectors would be mostly empty. On CPUs
    parts of states that lie in one piece are no anchors: in one kernel with its reader a part could not be renewed in place.
    Groups of one node stay plain.
    """

    name: ClassVar[str] = "fuse-epilogue"
    max_ops: int = number(32, least=1)  # largest group, in nodes; a longer epilogue spills registers

    def run(self, model: ir.Model, context: Context) -> bool:
        order = {node: index for index, node in enumerate(model.graph)}
        anchors = [node for node in order if kind_of(node) not in (Kind.OPERAND, Kind.VIEW, Kind.OPAQUE)]
        taken: set[ir.Node] = set()
        if not context.target.is_gpu and (states := state_inputs(model)):
            taken = {node for node in anchors if _takes_in_place(node, states)}
        groups, ask = [], context.kernels_of(model)
        for anchor in sorted(anchors, key=_anchor_rank):  # stable: in order of the graph within a kind
            if anchor in taken:
                continue
            group, rejections = _Growth(anchor, order, taken, self.max_ops, context.target, ask).grow()
            for rejection in rejections:
                context.reject(self.name, rejection)
            if len(group) > 1:
                taken.update(group)
                groups.append(group)
        anchored = {node for group in groups if not is_pointwise(group[0]) for node in group}
        for node in order:
            if node not in taken:
                for rejection in _left_beside(node, anchored):
                    context.reject(self.name, rejection)
        for group in groups:
            fuse_into_function(model, group, group_name(group))
        return bool(groups)


def _takes_in_place(node: ir.Node, states: Container[str]) -> bool:
    """Whether a node takes a part of a state that lies in one piece: who reads it there may renew it there, too."""
    return part_offsets(node) is not None and str(whole_of(node.outputs[0]).name) in states


def _anchor_rank(node: ir.Node) -> int:
    """Matrix products first, pointwise nodes last."""
    return -max(kind_of(node), Kind.BROADCAST)


def _narrow_operands(reader: ir.Node) -> list[ir.Node]:
    """The Casts, read by the node alone, of its bfloat16 and float16 operands."""
    producers = dict.fromkeys(value.producer() for value in reader.inputs if value is not None)
    casts = [node for node in producers if node is not None and kind_of(node) is Kind.OPERAND]
    return [node for node in casts if node.outputs[0].consumers() == (reader,)]


def _left_beside(node: ir.Node, anchored: set[ir.Node]) -> Iterator[Rejection]:
    """Why pointwise nodes beside one that stays alone, to which no growth comes, are not in one group with it.

    Those `anchored` in another kernel need no reason; what is computed before a row's operator is for fuse-rows to say.
    """
    if is_pointwise(node) or is_view(node) or node.op_type == "Constant":
        return
    for value in node.inputs if rows_of(node) is None and not is_fused(node) else ():
        before = None if value is None else view_root(value).producer()
        if value is not None and value.producer() is before and is_readable(node.op_type):
            continue  # fuse-prologue says why
        if before is not None and is_pointwise(before) and before not in anchored:
            why = "a view lies between" if is_readable(node.op_type) else f"no kernel of {node.op_type} computes its operands"
            yield Rejection(f"{before.op_type} not computed where {node.op_type} reads it: {why}", (before, node))
    for value in node.outputs:
        for reader, view in _readers(value):
            if is_pointwise(reader) and (view is not None or kind_of(node) is Kind.OPAQUE):
                yield Rejection(
                    f"{reader.op_type} not fused with {node.op_type}: {_why_behind(node, reader, view)}", (node, reader)
                )


def _why_behind(node: ir.Node, reader: ir.Node, view: ir.Node | None) -> str:
    """Why a pointwise reader of a node, perhaps through a view, is not in its epilogue."""
    if view is None:
        return f"the kernel of {node.op_type} stores its own results alone"
    result, own = reader.outputs[0], node.outputs[0]
    if (shape := static_shape(result)) is not None and (stored := static_shape(own)) is not None and prod(shape) != prod(stored):
        return f"its shape is {result.shape} and that of {node.op_type} {own.shape}"
    return f"{view.op_type} lies between"


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Node | None]]:
    """Who reads a value in its own graph, each with the last view through which it does."""
    pending: list[tuple[ir.Value, ir.Node | None]] = [(value, None)]
    while pending:
        value, view = pending.pop()
        for reader in (user for user in value.consumers() if user.graph is value.graph):
            if is_view(reader):
                pending.append((reader.outputs[0], reader))
            else:
                yield reader, view


@dataclass(slots=True)
class _Growth:
    """The search for the largest group around one anchor, in time linear in `max_ops`.

    Readers join in order of the graph. Whenever a single value leaves what has joined, that is a legal group; the last such
    one is the result. A value that somebody reads who cannot join always leaves, so that the search ends there.
    """

    anchor: ir.Node
    order: dict[ir.Node, int]  # of the nodes of the graph
    taken: set[ir.Node]  # nodes of other groups
    max_ops: int
    target: Target
    ask: Ask
    members: list[ir.Node] = field(default_factory=list)
    leaving: dict[ir.Value, int] = field(default_factory=dict)  # values of members -> how many others read them
    candidates: list[tuple[int, int, ir.Node]] = field(default_factory=list)  # heap of those others
    queued: set[ir.Node] = field(default_factory=set)

    def grow(self) -> tuple[list[ir.Node], list[Rejection]]:
        """The group, operands and anchor first, in order of the graph, and why the pointwise nodes next to it are not in it."""
        self._join(self.anchor)
        legal, blocker = len(self.members), None
        while self.candidates and blocker is None:
            node = heapq.heappop(self.candidates)[-1]
            if self._fault(node):
                blocker = node
            else:
                self._join(node)
                if len(self.leaving) == 1:
                    legal = len(self.members)
        group = self.members[:legal]
        return group, list(self._rejections(group, blocker))

    def _join(self, node: ir.Node) -> None:
        joining = [*_narrow_operands(node), node]
        self.members += joining
        for value in dict.fromkeys(value for one in joining for value in one.inputs if value in self.leaving):
            assert value is not None
            self.leaving[value] -= 1
            if not self.leaving[value]:
                del self.leaving[value]
        output = node.outputs[0]
        readers = output.consumers()
        self.leaving[output] = len(readers) + output.is_graph_output()
        for reader in readers:
            if reader not in self.queued:
                self.queued.add(reader)
                heapq.heappush(self.candidates, (self.order.get(reader, len(self.order)), len(self.queued), reader))

    def _fault(self, node: ir.Node) -> str | None:
        """Why a reader of the group cannot join it; None if it can."""
        if sum(output.name != "" for output in self.anchor.outputs) > 1:
            return f"{self.anchor.op_type} has {len(self.anchor.outputs)} outputs"
        if node not in self.order:
            return f"{node.op_type} is in a subgraph"
        if not is_pointwise(node):
            return f"{node.op_type} is not pointwise"
        if node in self.taken:
            return f"{node.op_type} follows another anchor"
        if not has_same_shape(node.outputs[0], self.anchor.outputs[0]):
            return f"its shape is {node.outputs[0].shape} and that of {self.anchor.op_type} {self.anchor.outputs[0].shape}"
        if output := next((value for value in node.inputs if value in self.leaving and value.is_graph_output()), None):
            return f"%{output.name} is an output of the graph"
        if len(self.members) >= self.max_ops:
            return f"the group would have more than {self.max_ops} nodes"
        followers = [one for one in self.members if is_pointwise(one)]
        return None if is_pointwise(self.anchor) else short_run_fault(self.anchor, [*followers, node], self.target, self.ask)

    def _rejections(self, group: list[ir.Node], blocker: ir.Node | None) -> Iterator[Rejection]:
        """One for each pointwise node that reads the value which leaves the group."""
        if blocker is None and len(group) == len(self.members):
            return
        result = group[-1].outputs[0]
        for reader in result.consumers():
            if not is_pointwise(reader):
                continue
            if reason := self._fault(reader):
                why = reason
            elif blocker is not None and blocker in result.consumers():
                why = f"%{result.name} is also read by {blocker.op_type}, and {self._fault(blocker)}"
            else:
                why = "several values would leave the group"
            yield Rejection(f"{reader.op_type} not fused with {self.anchor.op_type}: {why}", (self.anchor, reader))
