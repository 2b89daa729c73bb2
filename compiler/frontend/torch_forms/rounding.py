"""Operators of 16-bit numbers that torch computes in float32 and rounds once, and ONNX in several nodes, each of which rounds.

Python's numbers beside them are float32 to torch, too: 0.1 as a bfloat16 is off by 0.1%.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any

from .numbers import number, scaled_in_double

Translation = Callable[..., Any]


def rounded_once() -> dict[Any, Translation]:
    """The translation of each operator: that of torch's exporter, between casts where operands are narrow."""
    import torch
    from onnxscript.function_libs.torch_lib.ops import core, nn

    aten = torch.ops.aten
    always = {
        aten.addcdiv.default: scaled_in_double(core.aten_addcdiv, 1, "value"),
        aten.addcmul.default: scaled_in_double(core.aten_addcmul, 1, "value"),
        aten.glu.default: nn.aten_glu,
        aten.lerp.Scalar: core.aten_lerp,
        aten.lerp.Tensor: core.aten_lerp,
        aten.log10.default: _logarithm(10),
        aten.log2.default: _logarithm(2),
        aten.rsqrt.default: core.aten_rsqrt,
        aten.sinc.default: _sinc,
    }
    beside_numbers = {
        aten.add.Tensor: scaled_in_double(core.aten_add, 1, "alpha"),
        aten.div.Tensor: core.aten_div,
        aten.mul.Tensor: core.aten_mul,
        aten.softplus.default: nn.aten_softplus,
        aten.sub.Tensor: scaled_in_double(core.aten_sub, 1, "alpha"),
    }
    found = {operator: _in_float32(translate, lambda kind, values: True) for operator, translate in always.items()}
    return found | {operator: _in_float32(translate, is_rounded) for operator, translate in beside_numbers.items()}


def _logarithm(base: int) -> Translation:
    def translated(self: Any) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        return op.Div(op.Log(self), number(log(base), self))

    return translated


def _sinc(self: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    angle = op.Mul(self, number(pi, self))
    return op.Where(op.Equal(self, number(0.0, self)), number(1.0, self), op.Div(op.Sin(angle), angle))


def is_rounded(kind: Any, values: list[Any]) -> bool:
    """Whether a number among values is not one of a narrow type."""
    numbers = [number for value in values if (number := _number_of(value)) is not None]
    return any(float(kind.numpy().type(number)) != number for number in numbers)


def _number_of(value: Any) -> float | None:
    """The number that the program had, which torch's exporter makes a constant in the type of the operands beside it."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else float(value)
    cast = value.producer() if hasattr(value, "producer") else None
    if cast is None or cast.op_type != "Cast" or (made := cast.inputs[0].producer()) is None or made.op_type != "Constant":
        return None
    tensor = made.attributes["value"].as_tensor() if "value" in made.attributes else None
    return float(tensor.numpy()) if tensor is not None and tensor.size == 1 and tensor.shape.rank() == 0 else None


def _in_float32(translate: Translation, is_wide: Callable[[Any, list[Any]], bool]) -> Translation:
    """A translation between casts where operands are narrow and `is_wide` of their type and all arguments."""

    def translated(*given: Any, **named: Any) -> Any:
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        narrow = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        kinds = [kind for value in given if (kind := getattr(value, "dtype", None)) is not None]
        if not kinds or any(kind not in narrow for kind in kinds) or not is_wide(kinds[0], [*given, *named.values()]):
            return translate(*given, **named)

        def widened(value: Any) -> Any:
            if getattr(value, "dtype", None) not in narrow:
                return value
            number = _number_of(value)
            wide = op.Cast(value, to=ir.DataType.FLOAT) if number is None else op.Constant(value_float=number)
            wide.dtype, wide.shape = ir.DataType.FLOAT, value.shape  # which translations ask for
            return wide

        made = translate(*map(widened, given), **{name: widened(value) for name, value in named.items()})
        results = made if isinstance(made, tuple | list) else (made,)
        rounded = tuple(op.Cast(value, to=kinds[0]) for value in results)
        return rounded if isinstance(made, tuple | list) else rounded[0]

    return translated
