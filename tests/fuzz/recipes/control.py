"""Branches, loops with values captured from around them, and sequences."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..draft import BOOL, FLOAT, INT64, Draft, NotPossibleError, Shape

_UNARY, _BINARY = ("Tanh", "Neg", "Relu", "Abs", "Sigmoid"), ("Add", "Mul", "Sub", "Max", "Min")


def _info(name: str, kind: int, shape: Shape | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _values(b: Draft) -> tuple[str, str]:
    """A float32 value, and another of its shape."""
    x = b.tensor(FLOAT, 0, 3)
    if x not in b.types:
        raise NotPossibleError("no shape")
    return x, b.fresh(FLOAT, b.shape_of(x))


def branch(b: Draft) -> None:
    """If by a constant, an input, or something computed; both sides read values from around."""
    x, y = _values(b)
    shape = b.shape_of(x)
    if b.chance(0.4):
        (least,) = b.op("ReduceSum", y, keepdims=0)
        (condition,) = b.op("Greater", least, b.value(np.array(0, np.float32), 1.0))
    else:
        condition = b.value(np.array(b.chance(0.5)), 0.3)
    sides = []
    for side in ("then", "else"):
        inner = b.name(side)
        nodes = [
            helper.make_node(b.pick(_BINARY), [x, y], [f"{inner}_a"]),
            helper.make_node(b.pick(_UNARY), [f"{inner}_a"], [inner]),
        ]
        sides.append(helper.make_graph(nodes, side, [], [_info(inner, TensorProto.FLOAT, shape)]))
    b.op("If", condition, then_branch=sides[0], else_branch=sides[1])


def loop(b: Draft) -> None:
    """A value carried around, another stacked; the trip count is a constant or an input, and the condition may end it."""
    x, y = _values(b)
    shape = b.shape_of(x)
    p = b.name("b")
    nodes = [
        helper.make_node(b.pick(_BINARY), [f"{p}_carried", y], [f"{p}_sum"]),
        helper.make_node(b.pick(_UNARY), [f"{p}_sum"], [f"{p}_next"]),
        helper.make_node("Cast", [f"{p}_i"], [f"{p}_f"], to=TensorProto.FLOAT),
        helper.make_node("Add", [f"{p}_next", f"{p}_f"], [f"{p}_stacked"]),
    ]
    if b.chance(0.5):
        nodes.append(helper.make_node("Identity", [f"{p}_go"], [f"{p}_on"]))
    else:
        limit = b.value(np.array(b.integer(0, 3)), 0.7)
        nodes.append(helper.make_node("Less", [f"{p}_i", limit], [f"{p}_on"]))
    takes = [_info(f"{p}_i", TensorProto.INT64, ()), _info(f"{p}_go", TensorProto.BOOL, ())]
    takes.append(_info(f"{p}_carried", TensorProto.FLOAT, shape))
    gives = [_info(f"{p}_on", TensorProto.BOOL, ())]
    gives += [_info(f"{p}_{name}", TensorProto.FLOAT, shape) for name in ("next", "stacked")]
    body = helper.make_graph(nodes, "body", takes, gives)
    count, go = b.value(np.array(b.integer(0, 4)), 0.6), b.value(np.array(True), 0.8) if b.chance(0.6) else ""
    last, stacked = b.op("Loop", count, go, x, body=body, outputs=2)
    b.declare(last, FLOAT, shape)
    b.declare(stacked, FLOAT, (None, *shape))


def scan(b: Draft) -> None:
    steps, width = b.integer(1, 5), b.integer(1, 4)
    start, rows, captured = b.fresh(FLOAT, (width,)), b.fresh(FLOAT, (steps, width), 0.1), b.fresh(FLOAT, (width,))
    p = b.name("s")
    nodes = [
        helper.make_node(b.pick(_BINARY), [f"{p}_a", f"{p}_x"], [f"{p}_b"]),
        helper.make_node(b.pick(_BINARY), [f"{p}_b", captured], [f"{p}_c"]),
    ]
    takes = [_info(f"{p}_{name}", TensorProto.FLOAT, (width,)) for name in "ax"]
    gives = [_info(f"{p}_{name}", TensorProto.FLOAT, (width,)) for name in "bc"]
    body = helper.make_graph(nodes, "body", takes, gives)
    way = [b.integer(0, 1)]
    b.op("Scan", start, rows, body=body, num_scan_inputs=1, scan_input_directions=way, scan_output_directions=way, outputs=2)


def sequence(b: Draft) -> None:
    """Make a sequence, change it, and take a tensor out of it."""
    shape = b.shape(1, 3, nonempty=True)
    dtype = b.pick([FLOAT, FLOAT, INT64, BOOL])
    items = [b.fresh(dtype, shape) for _ in range(b.integer(1, 3))]
    (made,) = b.op("SequenceConstruct", *items)
    count = len(items)
    if b.chance(0.5):
        at = [b.value(np.array(b.integer(-count, count)), 0.7)] if b.chance(0.7) else []
        (made,) = b.op("SequenceInsert", made, b.fresh(dtype, shape), *at)
        count += 1
    if count > 1 and b.chance(0.4):
        (made,) = b.op("SequenceErase", made, b.value(np.array(b.integer(-count, count - 1)), 0.7))
        count -= 1
    how = b.integer(0, 3)
    if how == 0:
        b.op("SequenceAt", made, b.value(np.array(b.integer(-count, count - 1)), 0.6))
    elif how == 1:
        b.op("ConcatFromSequence", made, axis=b.axis(len(shape)))
    elif how == 2:
        b.op("ConcatFromSequence", made, axis=b.integer(0, len(shape)), new_axis=1)
    else:
        b.op("SequenceLength", made)


def split_to_sequence(b: Draft) -> None:
    x = b.tensor(FLOAT, 1, 3, nonempty=True)
    shape = b.shape_of(x)
    axis = b.axis(len(shape))
    size = b.value(np.array(b.integer(1, shape[axis])), 0.9)
    (parts,) = b.op("SplitToSequence", x, *([size] if b.chance(0.7) else []), axis=axis, keepdims=1)
    b.op("ConcatFromSequence", parts, axis=axis) if b.chance(0.6) else b.op("SequenceAt", parts, b.value(np.array(0)))


RECIPES = [branch, branch, loop, loop, loop, scan, sequence, sequence, split_to_sequence]
