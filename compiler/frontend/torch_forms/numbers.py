"""Numbers in the types of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Translation = Callable[..., Any]


def beside_doubles() -> dict[Any, Translation]:
    """The translation of each operator that takes a number of Python's: in torch's exporter that is a float32 first, 0.1 off by
    1.5e-9 and 1e300 infinite."""
    import torch
    from onnxscript.function_libs.torch_lib.ops import core

    aten = torch.ops.aten
    return {
        aten.scalar_tensor.default: _in_double(core.aten_scalar_tensor, 0, is_like_first=False),
        aten.full.default: _in_double(core.aten_full, 1, is_like_first=False),
        aten.full_like.default: _in_double(core.aten_full_like, 1),
        aten.new_full.default: _in_double(core.aten_new_full, 2),
        aten.masked_fill.Scalar: _in_double(core.aten_masked_fill, 2),
        aten.arange.start_step: _range,
        aten.clamp_min.default: _in_double(core.aten_clamp_min, 1),
        aten.clamp_max.default: _in_double(core.aten_clamp_max, 1),
    }


def _in_double(translate: Translation, place: int, is_like_first: bool = True) -> Translation:
    """A translation whose argument at a place is a double where the result's type is: that which is asked for, or the first
    argument's."""

    def translated(*given: Any, **named: Any) -> Any:
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        kind = named.get("dtype", -1)
        if kind in (-1, None) and is_like_first:
            kind = given[0].dtype
        values = list(given)
        if kind == ir.DataType.DOUBLE and place < len(values) and isinstance(values[place], float):
            values[place] = op.Constant(value=ir.tensor(values[place], ir.DataType.DOUBLE))
        return translate(*values, **named)

    return translated


_LONGEST = 1 << 16  # elements of a range that is a constant


def _range(start: Any, end: Any, step: Any = 1, dtype: int = -1, **memory: Any) -> Any:
    """Numbers from `start` to before `end`, counted in double precision: from 2 to 2.1 by 0.1 these are 2, not 1."""
    from math import ceil

    import numpy as np
    import onnx_ir as ir
    from onnxscript.function_libs.torch_lib.ops import core
    from onnxscript.onnx_opset import opset18 as op

    given, kind = (start, end, step), ir.DataType.FLOAT if dtype in (-1, None) else ir.DataType(dtype)
    is_counted = all(isinstance(one, int | float) for one in given) and any(isinstance(one, float) for one in given)
    count = max(ceil((end - start) / step), 0) if is_counted else 0
    if not is_counted or not kind.is_floating_point() or count > _LONGEST:
        return core.aten_arange_start_step(start, end, step, dtype)
    return op.Cast(op.Constant(value=ir.tensor(start + step * np.arange(count, dtype=np.float64))), to=kind)


def scaled_in_double(translate: Translation, place: int, name: str) -> Translation:
    """A translation whose factor `name` has all its digits where the argument at a place, which it multiplies, is a double."""

    def translated(*given: Any, **named: Any) -> Any:
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        factor, operand = named.get(name), given[place]
        if not isinstance(factor, float) or operand.dtype != ir.DataType.DOUBLE:
            return translate(*given, **named)
        scaled = op.Mul(operand, number(factor, operand))
        scaled.dtype, scaled.shape = operand.dtype, operand.shape
        return translate(*given[:place], scaled, *given[place + 1 :], **{key: named[key] for key in named if key != name})

    return translated


def number(value: float, like: Any) -> Any:
    """A number in the type of `like`, of whose digits it has all: onnxscript makes float32 of Python's."""
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    kind = ir.DataType.INT64 if isinstance(value, int) else ir.DataType.DOUBLE
    return op.CastLike(op.Constant(value=ir.tensor(value, kind)), like)


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
