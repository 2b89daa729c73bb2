"""Numbers in the types of others."""

from __future__ import annotations

from typing import Any


def number(value: float, like: Any) -> Any:
    """A number in the type of `like`, of whose digits it has all: onnxscript makes float32 of Python's."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    return op.CastLike(op.Constant(value=ir.tensor(value, ir.DataType.DOUBLE)), like)
