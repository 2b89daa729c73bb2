"""Operators that run between programs: on sequences and optionals, by data whose values make shapes, and on strings and images.

The first two are ours and compute nothing: they keep lists, and move bytes with NumPy. The last are `onnx.reference`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ...runtime.errors import InputError, UnsupportedModelError
from ...runtime.staged import Value
from ..ir.facts import source_of

HostFunction = Callable[..., list[Value]]
Make = Callable[[ir.Node], HostFunction]


def host_function(node: ir.Node, opsets: Mapping[str, int]) -> tuple[HostFunction, bool]:
    """What runs a node on the host, and whether it is `onnx.reference`."""
    tables = (SEQUENCE_OPERATORS, DATA_MOVEMENT, _ANY_VALUE)
    make = next((table[node.op_type] for table in tables if node.op_type in table), None) if node.domain == "" else None
    return (make(node), False) if make is not None else (_reference(node, opsets), True)


def _reference(node: ir.Node, opsets: Mapping[str, int]) -> HostFunction:
    """A node by `onnx.reference`. Built at its first run: a branch may never be taken."""
    if node.op_type == "ImageDecoder" and find_spec("PIL") is None:
        raise UnsupportedModelError(source_of(node), "ImageDecoder needs Pillow", "pip install prefuse[images]")
    names = [f"i{position}" for position in range(len(node.inputs))]
    outputs = [value.name or f"unread{position}" for position, value in enumerate(node.outputs)]
    proto = ir.serde.serialize_node(node)
    del proto.input[:], proto.output[:]
    proto.input.extend(name if value is not None else "" for name, value in zip(names, node.inputs, strict=True))
    proto.output.extend(outputs)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    given = [name for name, value in zip(names, node.inputs, strict=True) if value is not None]
    evaluators: list[ReferenceEvaluator] = []

    def run(*arguments: Value) -> list[Value]:
        if not evaluators:
            function = onnx.helper.make_function("prefuse", "host", given, outputs, [proto], imports)
            evaluators.append(ReferenceEvaluator(function))
        fed = {name: argument for name, argument in zip(names, arguments, strict=True) if name in given}
        with np.errstate(all="ignore"):
            return list(evaluators[0].run(None, fed, attributes={}))

    return run


# ----------------------------------------------------------------------------------------------------- sequences, optionals


def _construct(node: ir.Node) -> HostFunction:
    return lambda *items: [list(items)]


def _empty(node: ir.Node) -> HostFunction:
    return lambda: [[]]


def _insert(node: ir.Node) -> HostFunction:
    def run(sequence: list[Value], item: Value, position: np.ndarray | None = None) -> list[Value]:
        at = len(sequence) if position is None else _position(position, len(sequence) + 1, node)
        return [[*sequence[:at], item, *sequence[at:]]]

    return run


def _erase(node: ir.Node) -> HostFunction:
    def run(sequence: list[Value], position: np.ndarray | None = None) -> list[Value]:
        at = len(sequence) - 1 if position is None else _position(position, len(sequence), node)
        return [[*sequence[:at], *sequence[at + 1 :]]]

    return run


def _at(node: ir.Node) -> HostFunction:
    return lambda sequence, position: [sequence[_position(position, len(sequence), node)]]


def _length(node: ir.Node) -> HostFunction:
    return lambda sequence: [np.array(len(sequence), np.int64)]


def _split(node: ir.Node) -> HostFunction:
    axis, keeps = node.attributes.get_int("axis", 0), node.attributes.get_int("keepdims", 1)

    def run(array: np.ndarray, split: np.ndarray | None = None) -> list[Value]:
        length = array.shape[axis]
        if split is None:
            sizes = [1] * length
        elif split.ndim == 0:
            size = int(split)
            sizes = [size] * (length // size) + ([length % size] if length % size else [])
        else:
            sizes = [int(size) for size in split]
        parts = np.split(array, np.cumsum(sizes)[:-1], axis)
        return [list(parts) if split is not None or keeps else [np.squeeze(part, axis) for part in parts]]

    return run


def _concat(node: ir.Node) -> HostFunction:
    axis, new = node.attributes.get_int("axis", 0), node.attributes.get_int("new_axis", 0)
    return lambda sequence: [np.stack(sequence, axis) if new else np.concatenate(sequence, axis)]


def _optional(node: ir.Node) -> HostFunction:
    return lambda *value: [value[0] if value else None]


def _get_element(node: ir.Node) -> HostFunction:
    def run(value: Value) -> list[Value]:
        if value is None:
            raise InputError(source_of(node), "the optional is empty", "ask OptionalHasElement first")
        return [value]

    return run


def _has_element(node: ir.Node) -> HostFunction:
    return lambda *value: [np.array(bool(value) and value[0] is not None)]


def _same(node: ir.Node) -> HostFunction:
    return lambda value: [value]


def _position(position: np.ndarray, length: int, node: ir.Node) -> int:
    """An index into a sequence, counted from the end where it is negative."""
    index = int(position.reshape(()))
    if not -length <= index < length:
        raise InputError(source_of(node), f"position {index} in a sequence of {length}", "correct the model's inputs")
    return index % length


SEQUENCE_OPERATORS: dict[str, Make] = {
    "ConcatFromSequence": _concat,
    "Optional": _optional,
    "OptionalGetElement": _get_element,
    "OptionalHasElement": _has_element,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
}

_ANY_VALUE: dict[str, Make] = {"Identity": _same}  # on what is no tensor of numbers

# --------------------------------------------------------------------------------------------------------- moves of bytes


def _constant_of_shape(node: ir.Node) -> HostFunction:
    attribute = node.attributes.get("value")
    fill = np.zeros(1, np.float32) if attribute is None else attribute.as_tensor().numpy()
    return lambda shape: [np.full(tuple(shape), fill.reshape(-1)[0], fill.dtype)]


def _expand(node: ir.Node) -> HostFunction:
    return lambda array, shape: [np.broadcast_to(array, np.broadcast_shapes(array.shape, tuple(shape)))]


def _range(node: ir.Node) -> HostFunction:
    def run(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> list[Value]:
        first, end, step = start.reshape(())[()], limit.reshape(())[()], delta.reshape(())[()]
        if step == 0:
            raise InputError(source_of(node), "a step of 0", "give another")
        length = max(int(np.ceil((float(end) - float(first)) / float(step))), 0)
        return [(first + np.arange(length).astype(start.dtype) * step).astype(start.dtype)]

    return run


def _reshape(node: ir.Node) -> HostFunction:
    keeps_zero = bool(node.attributes.get_int("allowzero", 0))

    def run(array: np.ndarray, shape: np.ndarray) -> list[Value]:
        target = [array.shape[axis] if size == 0 and not keeps_zero else int(size) for axis, size in enumerate(shape)]
        return [array.reshape(target)]

    return run


def _slice(node: ir.Node) -> HostFunction:
    def run(
        array: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: np.ndarray | None = None
    ) -> list[Value]:
        index: list[slice] = [slice(None)] * array.ndim
        chosen = range(len(starts)) if axes is None else (int(axis) % array.ndim for axis in axes)
        strides = np.ones(len(starts), np.int64) if steps is None else steps
        for axis, start, end, step in zip(chosen, starts, ends, strides, strict=True):
            index[axis] = _bounds(int(start), int(end), int(step), array.shape[axis])
        return [array[tuple(index)]]

    return run


def _bounds(start: int, end: int, step: int, size: int) -> slice:
    """ONNX's bounds are clamped; an end before the first element, going down, has no number in Python."""
    start, end = (value + size if value < 0 else value for value in (start, end))
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, -1), size - 1), min(max(end, -1), size - 1)
    return slice(0, 0) if start < 0 else slice(start, None if end < 0 else end, step)


def _squeeze(node: ir.Node) -> HostFunction:
    return lambda array, axes: [np.squeeze(array, tuple(int(axis) for axis in axes))]


def _unsqueeze(node: ir.Node) -> HostFunction:
    return lambda array, axes: [np.expand_dims(array, tuple(int(axis) for axis in axes))]


def _split_by_sizes(node: ir.Node) -> HostFunction:
    axis = node.attributes.get_int("axis", 0)
    return lambda array, sizes: list(np.split(array, np.cumsum(sizes)[:-1], axis))


def _tile(node: ir.Node) -> HostFunction:
    return lambda array, repeats: [np.tile(array, tuple(repeats))]


DATA_MOVEMENT: dict[str, Make] = {
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split_by_sizes,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
}

# Operators that exist nowhere but in the reference: domain and name.
HOST_OPERATORS = frozenset({("", "ImageDecoder")})
