"""What in a loop's body only a run decides, however often the body is copied."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.matching import input_at
from ....compiler.ir.randomness import RANDOM_OPERATORS
from ....compiler.ir.scopes import subgraphs_of

_LOOPS = frozenset(["Loop", "Scan", "SequenceMap"])
# What reads of a value only its type or structure, which copies of the body may well know.
_STRUCTURAL = frozenset(["OptionalHasElement", "SequenceLength", "Shape", "Size"])
# Inputs, by position, that decide what runs or how large a result is.
_DECIDING = {"Compress": (1,), "If": (0,), "Loop": (0, 1), "NonMaxSuppression": (0, 1), "NonZero": (0,), "Unique": (0,)}


def undecided_node(loop: ir.Node) -> ir.Node | None:
    """A node in the body of a loop whose course or whose result's size depends on data; None if there is none.

    Such a loop is better run as it is: unrolled, it would be a stage of the program for each copy of that node.
    """
    members = list(_body(loop).all_nodes())
    inside = set(members)
    loops = [loop, *(node for node in members if node.op_type in _LOOPS)]
    sources = {value: _sources(node, position) for node in loops for position, value in enumerate(_body(node).inputs)}
    for node in members:
        operands = [input_at(node, position) for position in _DECIDING.get(node.op_type, ())] if node.domain == "" else []
        if node.op_type == "Loop":
            operands += _body(node).outputs[:1]
        if not all(_is_decided(value, sources, inside) for value in operands if value is not None):
            return node
    return None


def _body(loop: ir.Node) -> ir.Graph:
    return loop.attributes["body"].as_graph()


def _sources(loop: ir.Node, position: int) -> tuple[ir.Value | None, ...]:
    """What a parameter of a loop's body is in the first iteration and in a later one, none for its number and condition."""
    body, initial = _body(loop), input_at(loop, position)
    if loop.op_type == "Loop":
        return () if position < 2 else (initial, *body.outputs[position - 1 : position])
    states = len(loop.inputs) - loop.attributes.get_int("num_scan_inputs", len(loop.inputs))
    return (initial, *body.outputs[position : position + 1]) if position < states else (initial,)


def _is_decided(value: ir.Value, sources: dict[ir.Value, tuple[ir.Value | None, ...]], inside: set[ir.Node]) -> bool:
    """Whether a value follows from constants, from the numbers of iterations, and from types and structure."""
    seen: set[ir.Value] = set()
    pending: list[ir.Value | None] = [value]
    while pending:
        one = pending.pop()
        if one is None or one in seen or constant_tensor(one) is not None:
            continue
        seen.add(one)
        producer = one.producer()
        if one in sources:
            pending += sources[one]
        elif producer is None or producer.op_type in RANDOM_OPERATORS:
            return False
        elif producer.op_type in _STRUCTURAL:
            continue
        elif producer not in inside:
            return False
        else:
            pending += producer.inputs
            pending += [result for graph in subgraphs_of(producer) for result in graph.outputs]
    return True
