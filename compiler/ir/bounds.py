"""Results whose size depends on data: calls that compute them at their largest size, and calls that cut them to what a run found.

`bound-shapes` makes both. They are told by their bodies, so that they survive saving:

    y_max, count = prefuse.bounded_nonzero(x)     NonZero, its result padded to a static shape, and its size, an int64[1]
    y = prefuse.trim(y_max, count)                Slice of y_max along one axis, up to count
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .constants import constant_array
from .functions import body_of, is_fused

DATA_SIZED = {"Compress": 1, "NonMaxSuppression": 1, "NonZero": 1, "Unique": 4}  # operators, with their numbers of outputs


@dataclass(frozen=True, slots=True)
class Trim:
    """A call that cuts `data` along `axis` to the first `count` of its elements."""

    data: ir.Value
    count: ir.Value
    axis: int


@dataclass(frozen=True, slots=True)
class Bounded:
    """The operator in the body of a bounded call.

    `results` has, for each output that the operator may have, the position of the call's output that holds it, None where that
    is not asked for; `count` is the position of the number of results, None where nobody reads it.
    """

    operator: ir.Node
    results: tuple[int | None, ...]
    count: int | None


def is_data_sized(node: ir.Node) -> bool:
    """Whether the size of some result of an ONNX operator depends on the elements of an input."""
    return node.domain == "" and node.op_type in DATA_SIZED


def sized_axes(node: ir.Node) -> dict[ir.Value, int]:
    """The results of a data-sized operator whose size a run finds, each with the axis that has it, where that can be told."""
    first = node.outputs[0]
    axis: int | None = {"NonZero": 1}.get(node.op_type, 0)
    attribute = node.attributes.get("axis")
    if attribute is not None:
        axis = attribute.as_int()
        source = node.inputs[0]
        if axis < 0:
            axis = None if source is None or source.shape is None else axis + len(source.shape)
    found = {} if axis is None else {first: axis}
    if node.op_type == "Unique":
        found |= {value: 0 for place, value in enumerate(node.outputs) if place in (1, 3) and value.name}
    return found


def bounded_of(model: ir.Model, node: ir.Node) -> Bounded | None:
    """What a bounded call computes; None for any other node."""
    if not is_fused(node):
        return None
    body = body_of(model, node)
    operator = next((child for child in body if is_data_sized(child)), None)
    if operator is None:
        return None
    results: list[int | None] = [None] * DATA_SIZED[operator.op_type]
    count = None
    for position, value in enumerate(body.outputs):
        origin, is_size = _origin(value, operator)
        if is_size:
            count = position
        else:
            results[origin] = position
    return Bounded(operator, tuple(results), count)


def trim_of(model: ir.Model, node: ir.Node) -> Trim | None:
    """What a trim cuts; None for any other node."""
    if not is_fused(node):
        return None
    *constants, last = body_of(model, node)
    if last.op_type != "Slice" or any(child.op_type != "Constant" for child in constants):
        return None
    body = body_of(model, node)
    axes = constant_array(last.inputs[3])
    data, count = (node.inputs[body.inputs.index(last.inputs[position])] for position in (0, 2))
    if axes is None or data is None or count is None:
        return None
    return Trim(data, count, int(axes[0]))


def _origin(value: ir.Value, operator: ir.Node) -> tuple[int, bool]:
    """The output of `operator` that a value of its body is, under paddings and reshapes, and whether it is its size instead."""
    is_size = False
    while (producer := value.producer()) is not operator:
        source = None if producer is None else producer.inputs[0]
        assert source is not None, f"%{value.name} does not come from {operator.op_type}"
        is_size |= producer is not None and producer.op_type == "Shape"
        value = source
    return operator.outputs.index(value), is_size
