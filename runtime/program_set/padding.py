"""A program for one size called with smaller ones: its inputs are made longer, what counts of its results is cut out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..interchange import all_as_tensors, as_array, is_torch
from ..symbolic.size_text import evaluator


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension `name` in an axis of a result: the axis is [outer, name, inner] row by row; `inner` is the text of a size."""

    name: str
    axis: int
    inner: str


@dataclass(frozen=True, slots=True)
class Padding:
    """Along which axes of inputs dimensions lie, by their names; and how those that may be padded lie in outputs."""

    inputs: tuple[Mapping[int, str], ...]
    outputs: tuple[frozenset[Cut], ...]

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The sizes of a call."""
        return {name: shape[axis] for shape, axes in zip(shapes, self.inputs, strict=True) for axis, name in axes.items()}

    def run(self, callee: Callable[..., object], tensors: Sequence[object], padded: Mapping[str, int]) -> object:
        """Call a program for the sizes `padded` with inputs of these or smaller ones: one array or tensor, or a tuple of them."""
        arrays = [as_array(value, f"input {position}") for position, value in enumerate(tensors)]
        sizes = self.sizes([array.shape for array in arrays])
        if all(sizes[name] == size for name, size in padded.items()):
            return callee(*tensors)
        result = callee(*[self.longer(array, position, padded) for position, array in enumerate(arrays)])
        row = result if isinstance(result, tuple) else (result,)
        cut: list[object] = [self.cut(as_array(one, "result"), place, sizes, padded) for place, one in enumerate(row)]
        found = all_as_tensors(cut) if any(map(is_torch, tensors)) else cut
        return found[0] if len(found) == 1 else tuple(found)

    def longer(self, array: np.ndarray, position: int, padded: Mapping[str, int]) -> np.ndarray:
        """An input of these sizes; behind its end stands its last part again, with which nothing happens that did not before."""
        shape = [padded.get(self.inputs[position].get(axis, ""), size) for axis, size in enumerate(array.shape)]
        if tuple(shape) == array.shape:
            return array
        longer = np.empty(shape, array.dtype)
        longer[tuple(map(slice, array.shape))] = array
        for axis, (old, new) in enumerate(zip(array.shape, shape, strict=True)):
            if new > old:
                before = (slice(None),) * axis
                longer[(*before, slice(old, new))] = longer[(*before, slice(old - 1, old))]
        return longer

    def cut(self, array: np.ndarray, position: int, sizes: Mapping[str, int], padded: Mapping[str, int]) -> np.ndarray:
        """What counts of an output of a program for the sizes `padded`."""
        for cut in self.outputs[position]:
            before, size, behind = array.shape[: cut.axis], array.shape[cut.axis], array.shape[cut.axis + 1 :]
            most, inner = padded[cut.name], evaluator(cut.inner)(sizes)
            parts = array.reshape(*before, size // (most * inner), most, inner, *behind)
            kept = parts[(*(slice(None),) * (cut.axis + 1), slice(sizes[cut.name]))]
            array = kept.reshape(*before, size // most * sizes[cut.name], *behind)
        return np.asarray(array, order="C")  # np.ascontiguousarray gives a scalar an axis
