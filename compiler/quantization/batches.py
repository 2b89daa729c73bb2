"""Calibration data: batches of inputs from whatever the user has, checked one by one.

Data are an iterable of batches, each a mapping of names to arrays, a tuple of arrays in the order of the model's inputs, or, for
a model of one input, an array; or the path of an .npz file, or of a folder of them. A file holds an array for each input: of the
input's shape, which is one batch, or with one dimension more in front, which counts batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.errors import InputError
from ...runtime.interchange import as_array
from ..ir.facts import dtype_name
from ..ir.states import refuse_states
from ..programs.array_files import read_arrays, typed
from ..programs.digest import array_digest, arrays_digest, combine

Batch = dict[str, np.ndarray]
_WHERE = "calibration"


def repeatable(data: object) -> object:
    """Calibration data that can be gone through more than once: what an iterator gives is kept, as copies of arrays that it might
    fill again."""
    return [_copied(batch) for batch in data] if isinstance(data, Iterator) else data


def _copied(given: Any) -> object:
    if isinstance(given, Mapping):
        return {name: _copied(value) for name, value in given.items()}
    if isinstance(given, (tuple, list)):
        return [_copied(value) for value in given]
    return given.copy() if isinstance(given, np.ndarray) else given.clone() if hasattr(given, "detach") else given


def data_digest(data: object) -> str:
    """What makes two sets of calibration data the same: the bytes of their arrays, in order; of files, those of the files.

    Raises:
        InputError: a file cannot be read, or it is no data.
    """
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        paths = sorted(path.glob("*.npz")) if os.path.isdir(path) else [path]
        try:
            return arrays_digest((one.name, partial(np.fromfile, one, np.uint8)) for one in paths)
        except OSError as error:
            raise InputError(str(path), f"cannot be read: {error.strerror or error}", "give an .npz file or a folder") from error
    return arrays_digest(_loaders(data))


def _loaders(data: object) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    for number, batch in enumerate(_iterable(data)):
        row = batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, (tuple, list)) else (batch,))
        for name, given in row:
            yield f"{number} {name}", partial(_as_array, given, f"{_WHERE} batch {number}, input {name!r}")


def _iterable(data: object) -> Iterable[object]:
    if isinstance(data, (Mapping, np.ndarray)) or not isinstance(data, Iterable):
        what = f"{type(data).__name__} given"
        raise InputError(_WHERE, what, "give an iterable of batches, such as a list of one, or the path of an .npz file")
    return data


def check_stateless(model: ir.Model) -> None:
    """Raise UnsupportedModelError for a model with states, of which batches do not show what calls will have kept."""
    what = "ranges of tensors are taken from data, which do not show what calls will have kept"
    refuse_states(model, what, 'use precision="bfloat16", or weights="int8"')


class Batches:
    """Batches that can be gone through again and again: those of a list, of files, or of an iterator, which are kept.

    `inputs` are the values of the graph that a batch holds. Each pass checks what it gives; of other iterables, too, that it is
    what the first one gave, as ranges would be of one half of the data and errors of another where batches are shuffled.

    Raises:
        InputError: `data` is none of what the page describes.
    """

    def __init__(self, data: object, inputs: Sequence[ir.Value]) -> None:
        self._inputs = {str(value.name): value for value in inputs}
        self._source: Iterable[object]
        if isinstance(data, (str, os.PathLike)):
            self._source = _Files(Path(data), self._inputs)
        else:
            self._source = _iterable(repeatable(data))
        self._is_fixed = isinstance(self._source, (_Files, list, tuple))
        self._seen: list[str] = []  # digests of the batches of what is not

    def __iter__(self) -> Iterator[Batch]:
        """Each batch, its arrays by name.

        Raises:
            InputError: there is none; or a batch has other names, shapes or element types than the inputs, or NaN or infinities;
                or it is another one than at first.
        """
        number = -1
        for number, given in enumerate(self._source):
            batch = self._checked(given, f"{_WHERE} batch {number}")
            if not self._is_fixed:
                self._check_same(number, batch)
            yield batch
        if number < 0:
            raise InputError(_WHERE, "there are no batches", "give at least one, and better some dozens")

    def _check_same(self, number: int, batch: Batch) -> None:
        digest = combine(*map(array_digest, batch.values()))
        if number == len(self._seen):
            self._seen.append(digest)
        elif self._seen[number] != digest:
            what, fix = "is another one each time the data are gone through", "give a list of batches, or do not shuffle them"
            raise InputError(f"{_WHERE} batch {number}", what, fix)

    def _checked(self, given: object, where: str) -> Batch:
        named = self._named(given, where)
        return {name: _array(named[name], value, f"{where}, input {name!r}") for name, value in self._inputs.items()}

    def _named(self, given: object, where: str) -> Mapping[str, object]:
        expected = f"the inputs are {', '.join(self._inputs)}"
        if isinstance(given, Mapping):
            if given.keys() != self._inputs.keys():
                raise InputError(where, f"has {', '.join(map(str, given)) or 'nothing'}", expected)
            return given
        row = given if isinstance(given, (tuple, list)) else (given,)
        if len(row) != len(self._inputs):
            raise InputError(where, f"has {len(row)} arrays", expected)
        return dict(zip(self._inputs, row, strict=True))


class _Files:
    """The batches of an .npz file, or of all those of a folder in the order of their names."""

    def __init__(self, path: Path, inputs: Mapping[str, ir.Value]) -> None:
        self._inputs = inputs
        self._paths = sorted(path.glob("*.npz")) if os.path.isdir(path) else [path]
        if not self._paths:
            raise InputError(str(path), "is a folder without .npz files", "write each batch with numpy.savez(path, **inputs)")

    def __iter__(self) -> Iterator[Batch]:
        for path in self._paths:
            yield from self._batches(path, read_arrays(path))

    def _batches(self, path: Path, arrays: Batch) -> Iterator[Batch]:
        if arrays.keys() != self._inputs.keys():
            what = f"holds {', '.join(arrays) or 'nothing'}"
            raise InputError(str(path), what, f"write one array for each input of the model: {', '.join(self._inputs)}")
        counts = {name: len(array) for name, array in arrays.items() if self._is_stacked(name, array)}
        if not counts:
            yield arrays
            return
        if len(counts) < len(arrays) or len(set(counts.values())) > 1:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise InputError(str(path), f"holds {shapes}", "give all arrays the same number of batches, as their first dimension")
        for number in range(next(iter(counts.values()))):
            yield {name: array[number] for name, array in arrays.items()}

    def _is_stacked(self, name: str, array: np.ndarray) -> bool:
        shape = self._inputs[name].shape
        return shape is not None and array.ndim == len(shape) + 1


def _array(given: Any, value: ir.Value, where: str) -> np.ndarray:
    """What was given as an array of an input's type."""
    array = _as_array(given, where)
    expected = None if value.dtype is None else dtype_name(value.dtype)
    array = array if expected is None else typed(array, expected)
    if expected is not None and str(array.dtype) != expected:
        raise InputError(where, f"is of type {array.dtype}", f"give {expected}")
    if value.shape is not None and not _fits(array.shape, value.shape):
        raise InputError(where, f"shape {list(array.shape)} for {value.shape}", "give each batch the shape of the model's input")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(where, "has NaN or infinities", "leave such batches out: their ranges say nothing")
    return array


def _as_array(given: Any, where: str) -> np.ndarray:
    """An array, or a torch tensor as one. Raises InputError for what is none."""
    if hasattr(given, "detach"):
        return as_array(given.detach().cpu(), where)
    try:
        return np.asarray(given)
    except ValueError as error:
        raise InputError(where, f"is no array: {error}", "give arrays of one shape") from error


def _fits(shape: tuple[int, ...], declared: ir.Shape) -> bool:
    if len(shape) != len(declared):
        return False
    return all(not isinstance(dim, int) or dim == size for dim, size in zip(declared, shape, strict=True))
