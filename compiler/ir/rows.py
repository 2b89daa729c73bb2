"""What of a graph can be computed row by row: which reductions are over rows, and what each value has for a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import onnx_ir as ir

from .kinds import Kind, is_pointwise, kind_of
from .matching import has_same_shape, int_constants, static_shape

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TYPES = (*FLOATS, ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)
_STORED_TYPES = (ir.DataType.INT8, ir.DataType.UINT8)
# Their results have the shape of their first operands.
ROW_OPERATORS = frozenset(["LayerNormalization", "LogSoftmax", "RMSNormalization", "Softmax"])
_REDUCTION_NAMES = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"
_REDUCTIONS = frozenset(f"Reduce{name}" for name in _REDUCTION_NAMES.split())
_ANCHORS = (Kind.INJECTIVE, Kind.REDUCTION, Kind.OUTPUT_FUSABLE)


class Place(Enum):
    """What a value has for each row: an element at each place of it, one number, or one without the dimensions of the row."""

    ELEMENT = "element"
    ROW = "row"
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the last `count` dimensions of `shape`."""

    shape: tuple[int, ...]
    count: int

    @property
    def outer(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.count]

    @property
    def length(self) -> int:
        """Elements of a row."""
        return prod(self.shape[len(self.shape) - self.count :])

    @property
    def number(self) -> int:
        """How many rows there are."""
        return prod(self.outer)

    def place_of(self, value: ir.Value) -> Place | None:
        """The place that a value of this shape has; None where it has another one."""
        shapes = {self.shape: Place.ELEMENT, (*self.outer, *(1,) * self.count): Place.ROW, self.outer: Place.FLAT}
        shape = static_shape(value)
        return None if shape is None else shapes.get(shape)


def rows_of(node: ir.Node) -> Rows | None:
    """The rows that an operator of rows is over; None for other operators, other dimensions and unknown shapes."""
    operand = node.inputs[0] if node.inputs else None
    shape = static_shape(operand)
    if node.domain != "" or operand is None or not shape or operand.dtype not in FLOATS or node.graph is None:
        return None
    axes = _axes_of(node, len(shape))
    if axes is None or axes != tuple(range(len(shape) - len(axes), len(shape))):
        return None
    return Rows(shape, len(axes))


def _axes_of(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    if node.op_type in _REDUCTIONS:
        return reduced_axes(node)
    if node.op_type not in ROW_OPERATORS:
        return None
    axis = node.attributes.get_int("axis", -1) % rank
    return (axis,) if node.op_type in ("LogSoftmax", "Softmax") else tuple(range(axis, rank))


def reduced_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The dimensions that a reduction is over, counted from 0, whether given as attribute or input; None where a run decides."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None:
        return None
    axes: Sequence[int] | None = node.attributes.get_ints("axes")
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = int_constants(node.inputs[1])
        if axes is None:
            return None
    if not axes:
        return None if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(len(shape)))
    return tuple(sorted({axis % len(shape) for axis in axes}))


def has_row_types(node: ir.Node) -> bool:
    """Whether all that a node reads and makes is of types that rows are computed in; 8 bits may be made of them, too."""
    results = () if node.op_type == "Cast" and node.outputs[0].dtype in _STORED_TYPES else node.outputs
    return all(value is None or not value.name or value.dtype in _TYPES for value in (*node.inputs, *results))


def claimed_nodes(graph: ir.Graph) -> dict[ir.Node, ir.Node]:
    """The pointwise nodes that follow a matrix product, convolution or other anchor without another reader, and the anchor.

    Its epilogue takes them, so that what is before them is never written. In a row's group it would be written and read instead
    of their result: as many bytes.
    """
    claimed: dict[ir.Node, ir.Node] = {}
    for node in graph:
        if not is_pointwise(node):
            continue
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if value is None or producer is None or not _is_left_to(node, value):
                continue
            if not has_same_shape(value, node.outputs[0]):
                continue
            if producer in claimed:
                claimed[node] = claimed[producer]
            elif kind_of(producer) in _ANCHORS and rows_of(producer) is None and len(producer.outputs) == 1:
                claimed[node] = producer
    return claimed


def _is_left_to(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node alone reads a value, or with what alone reads its own result, as x * Sigmoid(x) does."""
    result = node.outputs[0]
    following = set(result.consumers()) if not result.is_graph_output() else set[ir.Node]()
    others = set(value.consumers()) - {node}
    return not value.is_graph_output() and (not others or (len(following) == 1 and others == following))
