"""Operators that run between programs: on sequences and optionals, and by data whose values make shapes.

They compute nothing but which strings are equal: they keep lists, and move bytes with NumPy. A name and attributes as plain
values say all about one of them, so that a program file can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import InputError

Value = np.ndarray | list["Value"] | None  # an array, a sequence, or an empty optional
HostFunction = Callable[..., list[Value]]
Attribute = int | np.ndarray


@dataclass(frozen=True)
class HostOperator:
    """An operator, called with its inputs in order, None for one left out; gives its outputs.

    `source` is the operator and where it comes from, for errors; attributes left out have ONNX's default values.
    """

    name: str
    attributes: Mapping[str, Attribute]
    source: str
    _function: HostFunction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = OPERATORS[self.name]
        assert set(self.attributes) <= set(kind.attributes), self.name
        object.__setattr__(self, "_function", kind.make(self.source, **self.attributes))

    def __call__(self, *inputs: Value) -> list[Value]:
        return self._function(*inputs)


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """How to make the function of an operator, which attributes it has, and how many inputs.

    All but Split and Unique, whose `outputs` says their number, give one output.
    """

    make: Callable[..., HostFunction]
    inputs: tuple[int, int | None]  # fewest and most; None for any number
    attributes: Mapping[str, type[int] | type[np.ndarray]] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------- sequences, optionals


def _construct(source: str) -> HostFunction:
    return lambda *items: [list(items)]


def _empty(source: str) -> HostFunction:
    return lambda: [[]]


def _insert(source: str) -> HostFunction:
    def run(sequence: list[Value], item: Value, position: np.ndarray | None = None) -> list[Value]:
        at = len(sequence) if position is None else _position(position, len(sequence), source, places=len(sequence) + 1)
        return [[*sequence[:at], item, *sequence[at:]]]

    return run


def _erase(source: str) -> HostFunction:
    def run(sequence: list[Value], position: np.ndarray | None = None) -> list[Value]:
        at = len(sequence) - 1 if position is None else _position(position, len(sequence), source)
        return [[*sequence[:at], *sequence[at + 1 :]]]

    return run


def _at(source: str) -> HostFunction:
    return lambda sequence, position: [sequence[_position(position, len(sequence), source)]]


def _length(source: str) -> HostFunction:
    return lambda sequence: [np.array(len(sequence), np.int64)]


def _split(source: str, axis: int = 0, keepdims: int = 1) -> HostFunction:
    def run(array: np.ndarray, split: np.ndarray | None = None) -> list[Value]:
        length = array.shape[axis]
        if split is None:
            sizes = [1] * length
        elif split.ndim == 0:
            size = int(split)
            if size < 1:
                raise InputError(source, f"parts of {size} elements", "correct the model's inputs")
            sizes = [size] * (length // size) + ([length % size] if length % size else [])
        else:
            sizes = [int(size) for size in split]
        parts = _parts(array, sizes, axis, source)
        return [list(parts) if split is not None or keepdims else [np.squeeze(part, axis) for part in parts]]

    return run


def _parts(array: np.ndarray, sizes: list[int], axis: int, source: str) -> list[np.ndarray]:
    """Consecutive parts of an array, of so many elements along an axis. Raises InputError where they are not all of it."""
    if min(sizes, default=0) < 0 or sum(sizes) != array.shape[axis]:
        what = f"parts of {', '.join(map(str, sizes[:8]))}{', ...' * (len(sizes) > 8)} elements of {array.shape[axis]}"
        raise InputError(source, what, "correct the model's inputs")
    return np.split(array, np.cumsum(sizes)[:-1], axis) if sizes else []  # NumPy cuts into one part at least


def _concat(source: str, axis: int = 0, new_axis: int = 0) -> HostFunction:
    return lambda sequence: [np.stack(sequence, axis) if new_axis else np.concatenate(sequence, axis)]


def _optional(source: str) -> HostFunction:
    return lambda *value: [value[0] if value else None]


def _get_element(source: str) -> HostFunction:
    def run(value: Value) -> list[Value]:
        if value is None:
            raise InputError(source, "the optional is empty", "ask OptionalHasElement first")
        return [value]

    return run


def _has_element(source: str) -> HostFunction:
    return lambda *value: [np.array(bool(value) and value[0] is not None)]


def _same(source: str) -> HostFunction:
    return lambda value: [value]


def _position(position: np.ndarray, length: int, source: str, *, places: int | None = None) -> int:
    """An index into a sequence, counted from the end where it is negative; of `places` (default: `length`) allowed ones."""
    index = int(position.reshape(()))
    if not -length <= index < (length if places is None else places):
        raise InputError(source, f"position {index} in a sequence of {length}", "correct the model's inputs")
    return index + length if index < 0 else index


SEQUENCE_OPERATORS: dict[str, OperatorKind] = {
    "ConcatFromSequence": OperatorKind(_concat, (1, 1), {"axis": int, "new_axis": int}),
    "Optional": OperatorKind(_optional, (0, 1)),
    "OptionalGetElement": OperatorKind(_get_element, (1, 1)),
    "OptionalHasElement": OperatorKind(_has_element, (0, 1)),
    "SequenceAt": OperatorKind(_at, (2, 2)),
    "SequenceConstruct": OperatorKind(_construct, (1, None)),
    "SequenceEmpty": OperatorKind(_empty, (0, 0)),
    "SequenceErase": OperatorKind(_erase, (1, 2)),
    "SequenceInsert": OperatorKind(_insert, (2, 3)),
    "SequenceLength": OperatorKind(_length, (1, 1)),
    "SplitToSequence": OperatorKind(_split, (1, 2), {"axis": int, "keepdims": int}),
}

# --------------------------------------------------------------------------------------------------------- moves of bytes


def _constant_of_shape(source: str, value: np.ndarray | None = None) -> HostFunction:
    fill = np.zeros(1, np.float32) if value is None else value
    return lambda shape: [np.full(tuple(shape), fill.reshape(-1)[0], fill.dtype)]


def _expand(source: str) -> HostFunction:
    return lambda array, shape: [np.broadcast_to(array, np.broadcast_shapes(array.shape, tuple(shape)))]


def _range(source: str) -> HostFunction:
    def run(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> list[Value]:
        first, end, step = start.reshape(())[()], limit.reshape(())[()], delta.reshape(())[()]
        if step == 0:
            raise InputError(source, "a step of 0", "give another")
        if start.dtype.kind in "iu":
            length = max(-((int(first) - int(end)) // int(step)), 0)  # a float would round large ones
        else:
            length = max(int(np.ceil((float(end) - float(first)) / float(step))), 0)
        return [(first + np.arange(length).astype(start.dtype) * step).astype(start.dtype)]

    return run


def _reshape(source: str, allowzero: int = 0) -> HostFunction:
    def run(array: np.ndarray, shape: np.ndarray) -> list[Value]:
        target = [array.shape[axis] if size == 0 and not allowzero else int(size) for axis, size in enumerate(shape)]
        return [array.reshape(target)]

    return run


def _slice(source: str) -> HostFunction:
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
    if size == 0:
        return slice(0, 0)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step)


def _squeeze(source: str) -> HostFunction:
    return lambda array, axes=None: [np.squeeze(array, None if axes is None else tuple(int(axis) for axis in axes))]


def _unsqueeze(source: str) -> HostFunction:
    return lambda array, axes: [np.expand_dims(array, tuple(int(axis) for axis in axes))]


def _split_by_sizes(source: str, axis: int = 0, num_outputs: int = 1) -> HostFunction:
    def run(array: np.ndarray, sizes: np.ndarray | None = None) -> list[Value]:
        length = array.shape[axis]
        each = -(-length // num_outputs)  # the last part is smaller
        equal = [max(min(each, length - each * part), 0) for part in range(num_outputs)]
        return list(_parts(array, equal if sizes is None else [int(size) for size in sizes], axis, source))

    return run


def _tile(source: str) -> HostFunction:
    return lambda array, repeats: [np.tile(array, tuple(repeats))]


DATA_MOVEMENT: dict[str, OperatorKind] = {
    "ConstantOfShape": OperatorKind(_constant_of_shape, (1, 1), {"value": np.ndarray}),
    "Expand": OperatorKind(_expand, (2, 2)),
    "Range": OperatorKind(_range, (3, 3)),
    "Reshape": OperatorKind(_reshape, (2, 2), {"allowzero": int}),
    "Slice": OperatorKind(_slice, (3, 5)),
    "Split": OperatorKind(_split_by_sizes, (1, 2), {"axis": int, "num_outputs": int}),
    "Squeeze": OperatorKind(_squeeze, (1, 2)),
    "Tile": OperatorKind(_tile, (2, 2)),
    "Unsqueeze": OperatorKind(_unsqueeze, (2, 2)),
}

# ----------------------------------------------------------------------------------------------------------------- strings


def _gather(source: str, axis: int = 0) -> HostFunction:
    return lambda array, places: [np.asarray(np.take(array, places, axis), array.dtype)]  # of strings, one is no array


def _unique(source: str, axis: int | None = None, sorted: int = 1, outputs: int = 1) -> HostFunction:
    def run(array: np.ndarray) -> list[Value]:
        codes = np.unique(array, return_inverse=True)[1].reshape(array.shape)  # NumPy compares no rows of strings
        _, first, places, counts = np.unique(codes, True, True, True, axis)
        places = places.reshape(-1)
        if not sorted:
            order = np.argsort(first)
            first, places, counts = first[order], np.argsort(order)[places], counts[order]
        values = array.reshape(-1)[first] if axis is None else np.take(array, first, axis)
        found: list[Value] = [values, first, places, counts]
        return found[:outputs]

    return run


# On what is no tensor of numbers.
_OTHERS: dict[str, OperatorKind] = {
    "Gather": OperatorKind(_gather, (2, 2), {"axis": int}),
    "Identity": OperatorKind(_same, (1, 1)),
    "Unique": OperatorKind(_unique, (1, 1), {"axis": int, "sorted": int, "outputs": int}),
}
OPERATORS: dict[str, OperatorKind] = {**SEQUENCE_OPERATORS, **DATA_MOVEMENT, **_OTHERS}
