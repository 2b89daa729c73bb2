"""How often, and in which way, a group reads the elements of one of its operands: what may be computed there instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ...compiler.ir.aliases import is_outermost, part_offsets
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.functions import body_of, is_fused
from ...compiler.ir.kinds import Kind, is_pointwise, kind_of
from ...runtime.plan import TensorType
from .parts import parts_of

_ZERO_POINT = 2  # position of that of a DequantizeLinear


@dataclass(frozen=True, slots=True)
class Reading:
    """`times` that each element of an operand is read, on average.

    Where `is_indexed`, the kernel knows the index of what it reads, so that other operands of what is computed there may span
    only some of its dimensions.
    """

    times: float
    is_indexed: bool = True


@dataclass(frozen=True, slots=True)
class Body:
    """The nodes of a group, or a node alone. `values` are its parameters by the values outside that they stand for, and `parts`
    the nodes that take parts of operands for pointwise ones, which are all others."""

    nodes: tuple[ir.Node, ...]
    values: dict[ir.Value, tuple[ir.Value, ...]]
    parts: tuple[ir.Node, ...] = ()

    @classmethod
    def of(cls, model: ir.Model, node: ir.Node) -> Body:
        if not is_fused(node):
            return cls((node,), {value: (value,) for value in node.inputs if value is not None})
        parts = parts_of(model, node)
        function = body_of(model, node)
        values: dict[ir.Value, tuple[ir.Value, ...]] = {}
        for outer, inner in zip(node.inputs, function.inputs, strict=False):
            if outer is not None:
                values[outer] = (*values.get(outer, ()), inner)
        return cls(tuple(child for child in function if child.op_type != "Constant"), values, parts.nodes if parts else ())

    @property
    def anchors(self) -> list[ir.Node]:
        """What is neither pointwise nor widens operands or moves an image between layouts for another one, nor one of several
        parts that pointwise nodes read."""
        others = [node for node in self.nodes if not is_pointwise(node) and kind_of(node) is not Kind.OPERAND]
        if len(others) == 1:
            return others
        return [node for node in others if node.op_type != "Transpose" and node not in self.parts]

    @property
    def is_channels_last(self) -> bool:
        return len(self.nodes) > 1 and any(node.op_type == "Transpose" for node in self.nodes)


def is_readable(op_type: str) -> bool:
    """Whether some kernel of an operator computes its operand where it reads it."""
    return op_type in _READERS


def reading_of(model: ir.Model, group: ir.Node, value: ir.Value) -> Reading | str:
    """How a group reads a value from outside, or why that must lie in memory."""
    body = Body.of(model, group)
    anchors = body.anchors
    if len(anchors) > 1 or any(kind_of(anchor) in (Kind.VIEW, Kind.OPAQUE) for anchor in anchors):
        return f"{anchors[0].op_type} reads its operands from memory"
    values = (one for node in body.nodes for one in (*node.inputs, *node.outputs))
    if not all(has_static_type(one) for one in values if one is not None and one.name):
        return "shapes are symbolic"
    before = _before(body, anchors)
    readings = []
    for inner in body.values.get(value, ()):
        one = _reading(body, before, inner)
        if isinstance(one, str):
            return one
        readings.append(one)
    return Reading(sum(one.times for one in readings), all(one.is_indexed for one in readings))


def _before(body: Body, anchors: list[ir.Node]) -> set[ir.Node]:
    """The anchors and what computes their operands."""
    members, before, waiting = set(body.nodes), set[ir.Node](), list(anchors)
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            producers = (value.producer() for value in node.inputs if value is not None)
            waiting += [producer for producer in producers if producer is not None and producer in members]
    return before


def _reading(body: Body, before: set[ir.Node], value: ir.Value) -> Reading | str:
    """How the nodes of a body read a value of theirs: once beside an anchor, and as often as the anchor does before it."""
    users = [(user, position) for user, position in value.uses() if user in body.nodes]
    if any(user in body.parts and user not in body.anchors for user, _ in users):
        return "parts of it are read where it lies"
    found: list[Reading | str] = []
    result = body.anchors[0] if body.anchors else body.nodes[-1]
    if any(user not in before for user, _ in users):
        found.append(Reading(_elements(result.outputs[0]) / max(_elements(value), 1)))
    for user, position in users:
        if user in body.anchors:
            found.append(_anchor_reading(body, user, position))
    computing = [(user, position) for user, position in users if user in before and user not in body.anchors]
    through = [_through(body, before, user, position, value) for user, position in computing]
    found += [one for one in through if isinstance(one, str)]
    readings = [one for one in through if isinstance(one, Reading)]
    if readings:
        found.append(Reading(max(one.times for one in readings), all(one.is_indexed for one in readings)))
    if fault := next((one for one in found if isinstance(one, str)), None):
        return fault
    settled = [one for one in found if isinstance(one, Reading)]
    return Reading(sum(one.times for one in settled), all(one.is_indexed for one in settled))


def _through(body: Body, before: set[ir.Node], user: ir.Node, position: int, value: ir.Value) -> Reading | str:
    """How a value is read for what one of its users computes of it."""
    if kind_of(user) is Kind.OPERAND and position == _ZERO_POINT:
        return Reading(1.0)  # which kernels subtract from sums
    if kind_of(user) is Kind.OPERAND:
        return f"{body.anchors[0].op_type} reads that operand from memory as it is"
    one = _reading(body, before, user.outputs[0])
    if isinstance(one, str):
        return one
    return Reading(one.times * _elements(user.outputs[0]) / max(_elements(value), 1), one.is_indexed)


def _elements(value: ir.Value) -> int:
    return tensor_type(value).hinted.elements


def _anchor_reading(body: Body, anchor: ir.Node, position: int) -> Reading | str:
    reader = _READERS.get(anchor.op_type)
    if reader is None or (position and anchor.op_type != "Concat"):
        return f"{anchor.op_type} reads that operand from memory"
    source, result = anchor.inputs[position], anchor.outputs[0]
    assert source is not None
    return reader(body, anchor, tensor_type(source).hinted, tensor_type(result).hinted)


Reader = Callable[[Body, ir.Node, TensorType, TensorType], Reading | str]


def _gather(body: Body, anchor: ir.Node, source: TensorType, result: TensorType) -> Reading | str:
    if len(body.nodes) == 1 and part_offsets(anchor) is not None:
        return f"{anchor.op_type} is a part of its operand, without a kernel"
    return Reading(result.elements / max(source.elements, 1), is_indexed=False)


def _concat(body: Body, anchor: ir.Node, source: TensorType, result: TensorType) -> Reading | str:
    axis = anchor.attributes.get_int("axis", 1) % max(len(result.shape), 1)
    if len(body.nodes) == 1 and is_outermost(result.shape, axis):
        return "the operands of Concat are written in place, without a kernel"
    return Reading(1.0, is_indexed=False)


def _fold(times: int) -> Reader:
    return lambda body, anchor, source, result: Reading(float(times), is_indexed=False)


def _pool(body: Body, anchor: ir.Node, source: TensorType, result: TensorType) -> Reading | str:
    if sum(output.name != "" for output in anchor.outputs) > 1:
        return f"{anchor.op_type} with indices reads its operand from memory"
    taps = prod(anchor.attributes.get_ints("kernel_shape"))
    return Reading(taps * result.elements / max(source.elements, 1), body.is_channels_last)


def _convolution(body: Body, anchor: ir.Node, source: TensorType, result: TensorType) -> Reading | str:
    """Read once where a padded copy is made; else again for each tile of output channels."""
    weights = anchor.inputs[1]
    assert weights is not None
    taps = tensor_type(weights).shape[2:]
    channels, of_group = tensor_type(weights).shape[:2]
    if body.is_channels_last and of_group == 1 and source.shape[1] == channels == anchor.attributes.get_int("group", 1):
        return Reading(prod(taps) * result.elements / max(source.elements, 1))
    strides = tuple(anchor.attributes.get_ints("strides", (1,) * len(taps)))
    dilations = tuple(anchor.attributes.get_ints("dilations", (1,) * len(taps)))
    spans = [
        (out - 1) * stride + (tap - 1) * dilation + 1
        for out, stride, tap, dilation in zip(result.shape[2:], strides, taps, dilations, strict=True)
    ]
    overhangs = any(span > extent for span, extent in zip(spans, source.shape[2:], strict=True))
    if overhangs or any(anchor.attributes.get_ints("pads", ())[: len(taps)]) or (not body.is_channels_last and prod(strides) > 1):
        return Reading(1.0)
    return "Conv reads its operand in place, again for each tile of output channels"


def _readers() -> Iterator[tuple[str, Reader]]:
    for name in ("Gather", "GatherElements", "GatherND", "Slice", "Expand", "Tile"):
        yield name, _gather
    yield "Concat", _concat
    yield "Conv", _convolution
    yield "Pad", _fold(1)
    for name in ("AveragePool", "LpPool", "MaxPool"):
        yield name, _pool
    for name in ("L1", "L2", "LogSum", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
        yield f"Reduce{name}", _fold(1)
    for name in ("GlobalAveragePool", "GlobalMaxPool"):
        yield name, _fold(1)
    for name in ("ReduceLogSumExp", "RMSNormalization", "Softmax"):
        yield name, _fold(2)
    for name in ("GroupNormalization", "InstanceNormalization", "LayerNormalization", "LogSoftmax"):
        yield name, _fold(3)


_READERS: dict[str, Reader] = dict(_readers())
