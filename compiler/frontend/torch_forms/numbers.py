"""Numbers in the types of others."""

from __future__ import annotations

from typing import Any


def number(value: float, like: Any) -> Any:
    """A number in the type of `like`, of whose digits it has all: onnxscript makes float32 of Python's."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    return op.CastLike(op.Constant(value=ir.tensor(value, ir.DataType.DOUBLE)), like)


def of_common_type(*typed: tuple[Any, Any]) -> list[Any]:
    """Values, each with its onnx_ir type, in the type that torch promotes them to."""
    from functools import reduce

    import onnx_ir as ir
    import torch
    from onnxscript.onnx_opset import opset18 as op

    names = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}  # else both call a type the same
    common = reduce(torch.promote_types, (getattr(torch, dtype.name.lower()) for _, dtype in typed))
    wanted = ir.DataType[names.get(common, str(common).removeprefix("torch.").upper())]
    return [value if dtype == wanted else op.Cast(value, to=wanted) for value, dtype in typed]
