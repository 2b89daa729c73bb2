"""Going through calibration data once, with the float32 model in ONNX Runtime, and remembering what its values were like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from ..engines.onnxruntime_session import OnnxRuntimeSession
from ..ir.matching import static_shape
from .batches import Batch

Progress: TypeAlias = Callable[[str, float], None]
_MOST_BYTES = 256 << 20  # of values that are fetched at a time
_MANY = 8  # batches: how far this has come is not known, as their number is not
_UNKNOWN_BYTES = 16 << 20  # assumed of a value whose shape is not static


class Observer(Protocol):
    """What remembers something of a value, and never the value."""

    def add(self, array: np.ndarray) -> None:
        """Look at the value in one more batch."""


class FloatModel:
    """The float32 model, with any of its values as outputs."""

    def __init__(self, model: ir.Model, values: Sequence[str] = ()) -> None:
        self._inputs = {str(value.name) for value in model.graph.inputs}
        self._outputs = [str(value.name) for value in model.graph.outputs]
        observed = model.clone()
        present = {str(value.name) for value in observed.graph.outputs}
        made = {str(value.name): value for node in observed.graph for value in node.outputs}
        observed.graph.outputs.extend(made[name] for name in dict.fromkeys(values) if name in made and name not in present)
        self._bytes = {name: _size_bytes(value) for name, value in made.items()}
        try:
            self._session = OnnxRuntimeSession(observed, optimize=True)
        except Exception as error:
            raise _unsupported(error) from error

    def outputs(self, batch: Batch) -> list[np.ndarray]:
        """The outputs of the model."""
        return self._run(batch, self._outputs)

    def values(self, batch: Batch, names: Iterable[str]) -> Iterable[tuple[str, np.ndarray]]:
        """Values by name, a few at a time in memory."""
        pending: list[str] = []
        for name in names:
            if name in self._inputs:
                yield name, batch[name]
                continue
            if pending and sum(self._bytes[one] for one in (*pending, name)) > _MOST_BYTES:
                yield from zip(pending, self._run(batch, pending), strict=True)
                pending = []
            pending.append(name)
        if pending:
            yield from zip(pending, self._run(batch, pending), strict=True)

    def _run(self, batch: Batch, names: Sequence[str]) -> list[np.ndarray]:
        try:
            return list(self._session.run(batch, names))
        except Exception as error:
            raise _unsupported(error) from error


def observe(
    model: ir.Model, batches: Iterable[Batch], observers: Mapping[str, Sequence[Observer]], progress: Progress | None = None
) -> int:
    """Show all batches to the observers of values, by name; return how many there were.

    Raises:
        InputError: a batch is not what the model takes.
        UnsupportedModelError: ONNX Runtime cannot run the model.
    """
    runner, count = FloatModel(model, list(observers)), 0
    for batch in batches:
        for name, array in runner.values(batch, observers):
            for observer in observers[name]:
                observer.add(array)
        count += 1
        if progress is not None:
            progress(f"calibrating: batch {count}", count / (count + _MANY))
    return count


def _size_bytes(value: ir.Value) -> int:
    shape = static_shape(value)
    return _UNKNOWN_BYTES if shape is None else 4 * prod(shape)


def _unsupported(error: Exception) -> UnsupportedModelError:
    what = f"ONNX Runtime, which runs it on calibration data, refuses it: {str(error).splitlines()[0]}"
    return UnsupportedModelError("model", what, "quantize a model that ONNX Runtime can run")
