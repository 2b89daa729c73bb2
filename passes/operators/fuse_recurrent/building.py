"""New nodes around a recurrent operator: sequences, states and constants in the shapes that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant
from ....compiler.ir.rewriter import literal_shape
from .columns import Columns, Place, static_shape
from .runs import Run
from .steps import Step
from .weights import biases, input_weights, recurrent_weights


@dataclass(slots=True)
class Constants:
    """Weights and integers that were added to a model, each once."""

    model: ir.Model
    _weights: dict[object, tuple[ir.Value | None, ...]] = field(default_factory=dict)
    _integers: dict[tuple[tuple[int, ...], bool], ir.Value] = field(default_factory=dict)

    def integers(self, numbers: Sequence[int], *, is_scalar: bool = False) -> ir.Value:
        key = (tuple(numbers), is_scalar)
        if key not in self._integers:
            array = np.array(numbers[0] if is_scalar else numbers, np.int64)
            self._integers[key] = add_constant(self.model, array, "integers")
        return self._integers[key]

    def weights_of(self, step: Step) -> tuple[ir.Value | None, ...]:
        """W, R and B of the operator; B is None where it has none."""
        if step.kernel not in self._weights:
            dtype, hidden = step.hidden_out.dtype, static_shape(step.hidden_out)[-1]
            assert dtype is not None
            arrays = input_weights(step.kernel), recurrent_weights(step.kernel), biases(step.kernel, hidden, dtype.numpy())
            name = f"{step.hidden_out.name}_{step.kernel.op_type.lower()}"
            self._weights[step.kernel] = tuple(
                None if array is None else add_constant(self.model, array, f"{name}_{letter}")
                for letter, array in zip("wrb", arrays, strict=True)
            )
        return self._weights[step.kernel]


@dataclass(slots=True)
class Builder:
    """Nodes in the making, in order, in no graph yet."""

    constants: Constants
    nodes: list[ir.Node] = field(default_factory=list)

    def operation(self, op_type: str, inputs: Sequence[ir.Value | None], **attributes: int | Sequence[int]) -> ir.Value:
        """A new node's only output."""
        self.nodes.append(ir.node(op_type, inputs, attributes))
        return self.nodes[-1].outputs[0]

    def reshaped(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        if static_shape(value) == tuple(shape):
            return value
        return self.operation("Reshape", [value, self.constants.integers(shape)], **literal_shape(shape))

    def part(self, value: ir.Value, axis: int, begin: int, end: int) -> ir.Value:
        """A range of one axis of a value of known shape."""
        if (begin, end) == (0, static_shape(value)[axis]):
            return value
        bounds = [self.constants.integers([number]) for number in (begin, end, axis)]
        return self.operation("Slice", [value, *bounds])

    def moved(self, value: ir.Value, shape: Sequence[int], axis: int, to: int, target: Sequence[int]) -> ir.Value:
        """A value of `shape` with one axis in another place, reshaped to `target`."""
        order = [number for number in range(len(shape)) if number != axis]
        order.insert(to, axis)
        between = shape[min(axis, to) : max(axis, to)] if axis > to else shape[axis + 1 : to + 1]
        if shape[axis] != 1 and prod(between) != 1:
            value = self.operation("Transpose", [self.reshaped(value, shape)], perm=order)
        return self.operation("Reshape", [value, self.constants.integers(target)], **literal_shape(target))

    def state(self, columns: Columns | None, rows: int) -> ir.Value | None:
        """Columns as an initial state [1, rows, hidden]."""
        return None if columns is None else self.reshaped(self._cut(columns), (1, rows, columns.width))

    def rows(self, inputs: Sequence[Columns], rows: int) -> ir.Value:
        """Inputs of one step, side by side, as a sequence [1, rows, inputs]."""
        return self._joined([self.reshaped(self._cut(one), (1, rows, one.width)) for one in inputs])

    def sequence(self, run: Run, rows: int) -> ir.Value:
        """The inputs of all steps of a run, side by side, as a sequence [steps, rows, inputs] in the sequences' own order."""
        return self._joined([self._elements(place, run, rows) for place in run.places])

    def _elements(self, place: Place, run: Run, rows: int) -> ir.Value:
        count, shape = len(run.steps), list(static_shape(place.sequence))
        first = min(place.index, place.index + run.direction * (count - 1))
        value = self.part(place.sequence, place.axis, first, first + count)
        shape[place.axis] = count
        if (place.begin, place.end) != (0, shape[-1]):
            bounds = [self.constants.integers([number]) for number in (place.begin, place.end, len(shape) - 1)]
            value = self.operation("Slice", [value, *bounds])
            shape[-1] = place.end - place.begin
        target = (count, rows, shape[-1])
        return value if tuple(shape) == target and place.axis == 0 else self.moved(value, shape, place.axis, 0, target)

    def _cut(self, columns: Columns) -> ir.Value:
        return self.part(columns.value, len(static_shape(columns.value)) - 1, columns.begin, columns.end)

    def _joined(self, values: list[ir.Value]) -> ir.Value:
        return values[0] if len(values) == 1 else self.operation("Concat", values, axis=2)
