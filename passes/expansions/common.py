"""What the writers of bodies ask of a node."""

from __future__ import annotations

import onnx_ir as ir


def dims(value: ir.Value | None) -> tuple[int, ...]:
    """The static shape of a value; () where it is left out or its shape is unknown."""
    return tuple(value.shape.numpy()) if value is not None and value.shape is not None else ()
