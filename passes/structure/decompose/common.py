"""What the writers of bodies ask of a node."""

from __future__ import annotations

import onnx_ir as ir

MAX_COMPARISONS = 2**27  # elements of x times what each of them is compared with


def dims(value: ir.Value | None) -> tuple[int, ...]:
    """The static shape of a value; () where it is left out or its shape is unknown."""
    return tuple(value.shape.numpy()) if value is not None and value.shape is not None else ()


def dtype_of(value: ir.Value | None) -> ir.DataType:
    """The element type of an input that the node has: expansions are asked for once all types are known."""
    assert value is not None
    assert value.dtype is not None
    return value.dtype
