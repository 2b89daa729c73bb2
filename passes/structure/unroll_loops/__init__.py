"""unroll-loops: Loop, Scan and SequenceMap of known length as plain nodes, iteration after iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....compiler.ir.facts import source_of
from ....compiler.ir.matching import is_read, static_shape
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.scopes import subgraphs_of
from ....compiler.pipeline import Context, Pass
from ....runtime.errors import InvalidModelError
from ..canonicalize import AFTER_FOLDING, BEFORE_FOLDING
from ..canonicalize.scope import Replacement, Rule, Scope
from ..canonicalize.sequences import elements_of, sequence_of
from ..canonicalize.walk import RuleTable, Walk
from .decided import undecided_node
from .iterations import Unroller
from .trips import trip_count

_MOST_WALKS = 8
_BUDGETED_LOOPS = 4  # loops of the largest size that one model may have: those in others multiply
Unroll = Callable[[ir.Node, Scope, int], Replacement | Rejection]


@dataclass(frozen=True)
class UnrollLoops(Pass):
    """Replace loops by copies of their bodies, in a walk that folds constants as canonicalize does.

    So the number of an iteration is a constant in its copy, and what follows from it: shapes, conditions, the length of inner
    loops, places in sequences.

    Before:  y, z = Loop(3, true, x) { i, c, a -> c, b = Mul(a, i), b }
    After:   a = Mul(x, 0);  b = Mul(a, 1);  y = Mul(b, 2);  z = Concat(Unsqueeze(a), Unsqueeze(b), Unsqueeze(y))

    Legal when it is known how often the body runs, and how large what no iteration makes would be.
    """

    name: ClassVar[str] = "unroll-loops"
    max_nodes: int = 4096  # of one loop, unrolled; a longer program is slower to compile than a loop is to run
    fold_limit_kib: int = 4096  # as canonicalize has it

    def run(self, model: ir.Model, context: Context) -> bool:
        if not any(node.op_type in _UNROLLED and node.domain == "" for node in model.graph.all_nodes()):
            return False
        loops = {op_type: (_rule(unroll, self.max_nodes),) for op_type, unroll in _UNROLLED.items()}
        rules = RuleTable.of((*BEFORE_FOLDING, loops), AFTER_FOLDING)
        scope = Scope.with_limit(model, self.fold_limit_kib * 1024)
        walks = 0
        while walks < _MOST_WALKS and Walk(scope, context, self.name, rules).run():
            walks += 1  # types behind a loop may be known only when it has been unrolled
        return walks > 0


def unroll_loop(node: ir.Node, scope: Scope, max_nodes: int) -> Replacement | Rejection:
    """Loop: carried values go from iteration to iteration, and what each appends is stacked.

    Raises:
        InvalidModelError: its length is no single number.
    """
    body = node.attributes["body"].as_graph()
    for name, value in zip(("trip count", "condition"), node.inputs, strict=False):
        if (dims := static_shape(value)) is not None and prod(dims) != 1:
            raise InvalidModelError(source_of(node), f"its {name} has the shape {list(dims)}", "give a single number")
    trips = trip_count(node, scope.model, max_nodes // _size(body))
    if isinstance(trips, Rejection):
        return trips
    if blame := _obstacle(node, trips, max_nodes):
        return blame
    unroller = Unroller(body, scope)
    carried = list(node.inputs[2:])
    rows: list[list[ir.Value]] = []
    for trip in range(trips):
        number = unroller.constant(body.inputs[0], np.array(trip, np.int64))
        condition = unroller.constant(body.inputs[1], np.array(True))
        _, *results = unroller.run((number, condition, *carried))
        carried = list(results[: len(carried)])
        rows.append(results[len(carried) :])
    stacks = [Stack(value, 0) for value in body.outputs[1 + len(carried) :]]
    return _collect(node, unroller, carried, stacks, rows)


def unroll_scan(node: ir.Node, scope: Scope, max_nodes: int) -> Replacement | Rejection:
    """Scan: an iteration takes a slice of each input along its axis, forwards or backwards; its results are stacked likewise."""
    body, count = node.attributes["body"].as_graph(), node.attributes["num_scan_inputs"].as_int()
    carried, scanned = list(node.inputs[:-count]), node.inputs[-count:]
    axes, backward = _axes(node, "scan_input_axes", count), _directions(node, "scan_input_directions", count)
    dims = static_shape(scanned[0])
    if dims is None:
        return Rejection("Scan not unrolled: its length is not known", (node,))
    trips = dims[axes[0]]
    if blame := _obstacle(node, trips, max_nodes):
        return blame
    unroller = Unroller(body, scope)
    rows: list[list[ir.Value]] = []
    for trip in range(trips):
        places = [trips - 1 - trip if reverse else trip for reverse in backward]
        results = unroller.run((*carried, *map(unroller.take, scanned, places, axes)))
        carried = list(results[: len(carried)])
        rows.append(results[len(carried) :])
    made = body.outputs[len(carried) :]
    axes, backward = _axes(node, "scan_output_axes", len(made)), _directions(node, "scan_output_directions", len(made))
    stacks = [Stack(value, axis, reverse) for value, axis, reverse in zip(made, axes, backward, strict=True)]
    return _collect(node, unroller, carried, stacks, rows)


def map_sequence(node: ir.Node, scope: Scope, max_nodes: int) -> Replacement | Rejection:
    """SequenceMap over known sequences: the body once for each element."""
    known: list[tuple[ir.Value, ...] | None] = []
    for value in node.inputs:
        elements = elements_of(value)
        if isinstance(elements, Rejection):
            return elements
        known.append(elements)
        trips = len(known[0] or ())
        if value is not None and isinstance(value.type, ir.SequenceType) and (elements is None or len(elements) < trips):
            what = "is not known" if elements is None else "is shorter than the first"
            return Rejection(f"SequenceMap not unrolled: %{value.name} {what}", (node,))
    if blame := _obstacle(node, trips, max_nodes):
        return blame
    unroller = Unroller(node.attributes["body"].as_graph(), scope)
    pairs = list(zip(node.inputs, known, strict=True))
    rows = [unroller.run([value if part is None else part[place] for value, part in pairs]) for place in range(trips)]
    made = [sequence_of([row[index] for row in rows], value.dtype) for index, value in enumerate(node.outputs)]
    return Replacement((*unroller.nodes, *made), tuple(one.outputs[0] for one in made))


@dataclass(frozen=True, slots=True)
class Stack:
    """How the values that the iterations make for one result of a body are put together; the last first if `is_reversed`."""

    made: ir.Value  # by the body
    axis: int
    is_reversed: bool = False


def _collect(
    node: ir.Node, unroller: Unroller, carried: list[ir.Value | None], stacks: list[Stack], rows: list[list[ir.Value]]
) -> Replacement | Rejection:
    """The outputs of a loop, from its carried values and what each iteration made for each of the stacks."""
    outputs: list[ir.Value | None] = list(carried)
    for index, stack in enumerate(stacks):
        old = node.outputs[len(carried) + index] if len(carried) + index < len(node.outputs) else None
        column = [row[index] for row in rows]
        if old is None or not is_read(old):
            outputs.append(None)
        elif column:
            outputs.append(unroller.stack(column[::-1] if stack.is_reversed else column, stack.axis, old.name))
        elif (empty := unroller.empty(stack.made, stack.axis, old.name)) is not None:
            outputs.append(empty)
        else:
            return Rejection(
                f"{node.op_type} not unrolled: it never runs, and the shape of %{stack.made.name} is not known", (node,)
            )
    return Replacement(tuple(unroller.nodes), tuple(outputs[: len(node.outputs)]))


def _obstacle(node: ir.Node, trips: int, max_nodes: int) -> Rejection | None:
    """A Rejection where the iterations would be more nodes than allowed, or each of them would be decided in a run."""
    size = _size(node.attributes["body"].as_graph())
    if trips * size > max_nodes:
        counted = f"at least {trips}" if node.op_type == "Loop" and trips == max_nodes // size + 1 else f"{trips}"
        return Rejection(f"{node.op_type} not unrolled: {counted} iterations of {size} nodes are more than {max_nodes}", (node,))
    if trips > 1 and (undecided := undecided_node(node)) is not None:
        return Rejection(f"{node.op_type} not unrolled: data decides {undecided.op_type} in each iteration", (node, undecided))
    return None


def _size(body: ir.Graph) -> int:
    """Nodes of a body and of the graphs in it, at least 1."""
    return max(1, sum(1 for _ in body.all_nodes()))


def _axes(node: ir.Node, name: str, count: int) -> tuple[int, ...]:
    """An axis for each of `count` values, 0 where they are left out; inference has checked them."""
    return tuple(node.attributes.get_ints(name) or (0,) * count)


def _directions(node: ir.Node, name: str, count: int) -> tuple[bool, ...]:
    """Whether each of `count` values runs backwards, which is 1 in the attribute.

    Raises:
        InvalidModelError: there are more or fewer numbers than values, or others than 0 and 1.
    """
    numbers = tuple(node.attributes.get_ints(name) or (0,) * count)
    if len(numbers) != count or not {0, 1}.issuperset(numbers):
        raise InvalidModelError(source_of(node), f"{name} is {list(numbers)} for {count} values", "give 0 or 1 for each")
    return tuple(number == 1 for number in numbers)


_UNROLLED: dict[str, Unroll] = {"Loop": unroll_loop, "Scan": unroll_scan, "SequenceMap": map_sequence}


def _rule(unroll: Unroll, max_nodes: int) -> Rule:
    def rule(node: ir.Node, scope: Scope) -> Replacement | Rejection:
        found = unroll(node, scope, min(max_nodes, max(0, _BUDGETED_LOOPS * max_nodes - scope.unrolled)))
        if isinstance(found, Replacement):
            scope.unrolled += sum(1 + sum(_size(graph) for graph in subgraphs_of(made)) for made in found.nodes)
        return found

    return rule
