"""ONNX's own node cases with one extent of one input changed by one, so that operands may not fit each other any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx

from ..conformance.cases import cases
from .judge import Sample


@dataclass(frozen=True)
class _Change:
    """Of the input at a place of a case: the axis whose extent changes, and by how much; 0 leaves the last axis out."""

    case: str
    place: int
    axis: int
    by: int

    def __call__(self, folder: Path) -> Path:
        model, rows = cases("node")[self.case].load()
        model = onnx.ModelProto.FromString(model.SerializeToString())
        for place, (value, example) in enumerate(zip(model.graph.input, rows[0][0], strict=True)):
            if not isinstance(example, np.ndarray) or not value.type.HasField("tensor_type"):
                continue
            shape = list(example.shape)
            if place == self.place:
                shape = shape[:-1] if self.by == 0 else [*shape[: self.axis], shape[self.axis] + self.by, *shape[self.axis + 1 :]]
            value.type.tensor_type.shape.Clear()
            value.type.tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=extent) for extent in shape)
        for value in model.graph.output:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        path = folder / "model.onnx"
        onnx.save(model, path)
        return path


def misfits(count: int, seed: int = 0) -> Iterator[Sample]:
    """`count` of the changes, operators in turns; no other engine is asked, since ONNX Runtime crashes on some of them."""
    by_operator = _changes()
    random = np.random.default_rng(seed)
    for number in range(count):
        operators = sorted(by_operator)
        changes = by_operator[operators[(seed + number) % len(operators)]]
        change = changes[int(random.integers(len(changes)))]
        yield Sample(f"{change.case}, input {change.place}, axis {change.axis} by {change.by}", change, has_answer=False)


@cache
def _changes() -> dict[str, list[_Change]]:
    found: dict[str, list[_Change]] = {}
    for name, case in cases("node").items():
        model, rows = case.load()
        if not rows or "expanded" in name:
            continue
        for place, example in enumerate(rows[0][0]):
            if isinstance(example, np.ndarray) and example.dtype.kind not in "OUS" and example.ndim:
                of_case = found.setdefault(model.graph.node[0].op_type, [])
                of_case.append(_Change(name, place, -1, 0))
                of_case += [
                    _Change(name, place, axis, by)
                    for axis in range(example.ndim)
                    for by in (-1, 1)
                    if example.shape[axis] + by >= 0
                ]
    return found
