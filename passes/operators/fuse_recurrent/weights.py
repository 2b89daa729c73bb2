"""Weights of a step in the order and layout of ONNX's recurrent operators."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .steps import GateWeights, Kernel
from .terms import Matrix, Shift


def input_weights(kernel: Kernel) -> np.ndarray:
    """W [1, gates * hidden, inputs]: the sources' columns one after the other."""
    gates = [np.concatenate([_sum(matrices) for matrices in gate.inputs], axis=1) for gate in kernel.gates]
    return _stack(gates, kernel)


def recurrent_weights(kernel: Kernel) -> np.ndarray:
    """R [1, gates * hidden, hidden]."""
    return _stack([_sum(gate.recurrent) for gate in kernel.gates], kernel)


def biases(kernel: Kernel, hidden: int, dtype: np.dtype) -> np.ndarray | None:
    """B [1, 2 * gates * hidden]: those of the sums, then those of the products with the state; None if there are none."""
    if not any(gate.shifts or gate.recurrent_shifts for gate in kernel.gates):
        return None

    def total(shifts: Iterable[Shift]) -> np.ndarray:
        return sum((shift.array() for shift in shifts), np.zeros(hidden, dtype))

    sums = _stack([total(gate.shifts) for gate in kernel.gates], kernel)
    return np.concatenate([sums, _stack([total(gate.recurrent_shifts) for gate in kernel.gates], kernel)], axis=1)


def _sum(matrices: tuple[Matrix, ...]) -> np.ndarray:
    arrays = [matrix.array() for matrix in matrices]
    return arrays[0] if len(arrays) == 1 else np.sum(arrays, axis=0)


def _stack(gates: list[np.ndarray], kernel: Kernel) -> np.ndarray:
    return np.concatenate([_signed(array, gate) for array, gate in zip(gates, kernel.gates, strict=True)])[None]


def _signed(array: np.ndarray, gate: GateWeights) -> np.ndarray:
    return array if gate.sign == 1 else -array
