"""float16 and bfloat16 while folding: computed in float32 and rounded once, as kernels do and `onnx.reference` does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ....compiler.ir.kinds import Kind, kind_of

_NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Operators that move elements, and those whose sums are rounded after each update.
_MOVES, _ROUNDED = (Kind.INJECTIVE, Kind.VIEW), ("ScatterElements", "ScatterND")


def widened_operands(node: ir.Node, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that a node is computed from: narrow ones as float32, unless elements are only moved."""
    if kind_of(node) in _MOVES or node.op_type in _ROUNDED:
        return dict(inputs)
    return {name: array.astype(np.float32) if array.dtype in _NARROW else array for name, array in inputs.items()}


def rounded_results(outputs: Sequence[ir.Value], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results, those in float32 as the narrow type that the output has."""
    types = [None if output.dtype is None else output.dtype.numpy() for output in outputs]
    with np.errstate(all="ignore"):
        return [
            array.astype(dtype) if dtype in _NARROW and array.dtype == np.float32 else array
            for array, dtype in zip(arrays, types, strict=True)
        ]
