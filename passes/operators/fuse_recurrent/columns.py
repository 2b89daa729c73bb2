"""Values as rows of columns: what arithmetic of cells reads, whatever reshapes, slices and splits lie between."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array

MOVEMENT = frozenset(["Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"])
_RESHAPES = frozenset(["Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"])
_MAX_DEPTH = 32  # reshapes and slices on top of each other, beyond which nobody looks


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns `begin` to `end` of the matrix [rows, last dimension] that the elements of a value are."""

    value: ir.Value
    begin: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.begin

    @property
    def producer(self) -> ir.Node | None:
        """The node of an ONNX operator that computes the value."""
        node = self.value.producer()
        return node if node is not None and node.domain == "" else None

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end) == (0, static_shape(self.value)[-1])

    def of(self, value: ir.Value | None) -> Columns | None:
        """The same columns of an operand that is not broadcast to this value; None where it is."""
        if value is None or static_shape(value)[-1:] != static_shape(self.value)[-1:] or size_of(value) != size_of(self.value):
            return None
        return Columns(value, self.begin, self.end)


@dataclass(frozen=True, slots=True)
class Place:
    """Where columns lie in a sequence: at `index` of its axis `axis`, which is not the last."""

    sequence: ir.Value
    axis: int
    index: int
    begin: int
    end: int


def static_shape(value: ir.Value) -> tuple[int, ...]:
    """The dimensions of a value; () where one is unknown (a scalar has no columns either)."""
    dims = () if value.shape is None else tuple(dim for dim in value.shape if isinstance(dim, int))
    return dims if value.shape is not None and len(dims) == len(value.shape) else ()


def size_of(value: ir.Value) -> int:
    return prod(static_shape(value))


def rows_of(value: ir.Value) -> int:
    return prod(static_shape(value)[:-1])


def columns_of(value: ir.Value | None) -> Columns | None:
    """All columns of a value, read through what only moves them; None where its shape is unknown, empty or a scalar's."""
    if value is None or not static_shape(value) or size_of(value) == 0:
        return None
    return stripped(Columns(value, 0, static_shape(value)[-1]))


def stripped(columns: Columns) -> Columns:
    """The same elements as columns of the value from which reshapes, slices, splits and concatenations have made them."""
    for _ in range(_MAX_DEPTH):
        inner = _inner(columns)
        if inner is None:
            break
        columns = inner
    return columns


def pieces_of(columns: Columns) -> list[Columns]:
    """The operands of the Concat that makes these columns; the columns themselves if none does."""
    node = columns.producer
    if node is None or node.op_type != "Concat" or not columns.is_whole or not _is_last(node, columns.value):
        return [columns]
    pieces = [columns_of(value) for value in node.inputs]
    return [piece for piece in pieces if piece is not None] if None not in pieces else [columns]


def place_of(columns: Columns) -> Place | None:
    """Where the columns lie, if a Gather, Slice or Split takes their value from a sequence."""
    node = columns.producer
    if node is None or node.op_type not in ("Gather", "Slice", "Split"):
        return None
    sequence = node.inputs[0]
    if sequence is None or not static_shape(sequence):
        return None
    part = _part(node, columns.value, sequence)
    if part is None or part[0] == len(static_shape(sequence)) - 1 or part[2] - part[1] != 1:
        return None
    return Place(sequence, part[0], part[1], columns.begin, columns.end)


def _inner(columns: Columns) -> Columns | None:
    """The columns one data movement before these."""
    node, value = columns.producer, columns.value
    if node is None or node.op_type not in MOVEMENT or not static_shape(value):
        return None
    if node.op_type in _RESHAPES:
        return columns.of(node.inputs[0])
    if node.op_type == "Concat":
        return _piece(columns, node)
    source = node.inputs[0]
    part = None if source is None else _part(node, value, source)
    if source is None or part is None or part[0] != len(static_shape(source)) - 1:
        return None
    return Columns(source, part[1] + columns.begin, part[1] + columns.end)


def _piece(columns: Columns, node: ir.Node) -> Columns | None:
    """The columns of the one operand of a Concat in which these lie."""
    if not _is_last(node, columns.value):
        return None
    begin = 0
    for value in node.inputs:
        if value is None or not static_shape(value):
            return None
        end = begin + static_shape(value)[-1]
        if begin <= columns.begin and columns.end <= end:
            return Columns(value, columns.begin - begin, columns.end - begin)
        begin = end
    return None


def _is_last(node: ir.Node, value: ir.Value) -> bool:
    return node.attributes.get_int("axis", 0) in (-1, len(static_shape(value)) - 1)


def _part(node: ir.Node, output: ir.Value, source: ir.Value) -> tuple[int, int, int] | None:
    """Axis, begin and end of the part of `source` that a Gather of one element, Slice of one axis or Split takes."""
    shape = static_shape(source)
    if not shape:
        return None
    if node.op_type == "Slice":
        return _sliced(node, shape)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    if node.op_type == "Gather":
        index = ints_of(node.inputs[1])
        if index is None or len(index) != 1 or not -shape[axis] <= index[0] < shape[axis]:
            return None
        return axis, index[0] % shape[axis], index[0] % shape[axis] + 1
    begin = 0
    for other in node.outputs:
        if not static_shape(other):
            return None
        end = begin + static_shape(other)[axis]
        if other is output:
            return axis, begin, end
        begin = end
    return None


def _sliced(node: ir.Node, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    numbers = [ints_of(value) for value in node.inputs[1:]] + [None] * (5 - len(node.inputs))
    starts, ends, axes, steps = numbers[:4]
    if starts is None or ends is None or len(starts) != 1 or steps not in (None, (1,)):
        return None
    if len(node.inputs) > 4 and steps is None and node.inputs[4] is not None:
        return None
    if axes is None and len(node.inputs) > 3 and node.inputs[3] is not None:
        return None
    axis = (axes[0] if axes else 0) % len(shape)
    begin, end, _ = slice(starts[0], ends[0]).indices(shape[axis])
    return axis, begin, end


def ints_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The elements of a constant vector of integers."""
    array = constant_array(value)
    return None if array is None or not np.issubdtype(array.dtype, np.integer) else tuple(int(one) for one in array.reshape(-1))
