"""What a format leaves of the two operands of a product: the numbers of `compiler/quantization/formats.py`, as float32.

| format | activations | weights |
|---|---|---|
| float32 | as they are | as they are |
| bfloat16 | bfloat16 | bfloat16 |
| a16 | bfloat16 | as they are |
| w16 | as they are | bfloat16 |
| int8 | uint8, one scale and zero point, of an observed range | int8, a scale for each output channel |
| int8-rows | uint8, a scale and zero point for each row, its own | int8, a scale for each output channel |
| w8 | as they are | int8, a scale for each output channel |
| w4 | as they are | 4 bits, a scale for each `GROUP` neighbours along k |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np

from ...quantization.formats import quantize_channels, quantize_groups, quantize_pairs, quantize_rows, unsigned_affine

Array: TypeAlias = np.ndarray
ActivationRounding: TypeAlias = Literal["none", "bfloat16", "tensor", "rows"]
WeightRounding: TypeAlias = Callable[[Array, int], Array]  # of weights and the dimension of their output channels

GROUP = 32  # as quantize-weights has it by default

UNCHANGED = "float32"


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a format rounds: `weights` gets an array and its dimension of output channels, and returns one of the same shape."""

    activations: ActivationRounding
    weights: WeightRounding


def _same(w: Array, axis: int) -> Array:
    return w


def _bfloat16(w: Array, axis: int) -> Array:
    return rounded_to_bfloat16(w)


def _channels(w: Array, axis: int) -> Array:
    return quantize_channels(w, axis).dequantize()


def _groups(w: Array, axis: int) -> Array:
    """By groups of neighbours along k, which of a convolution's weights are all dimensions behind the first."""
    if w.ndim > 2:
        flat = w.reshape(len(w), -1)
        return quantize_groups(flat, GROUP, 4, axis=1).dequantize().reshape(w.shape)
    return quantize_groups(w, GROUP, 4, axis=1 - axis % 2).dequantize()


ROUNDINGS: Mapping[str, Rounding] = {
    UNCHANGED: Rounding("none", _same),
    "bfloat16": Rounding("bfloat16", _bfloat16),
    "a16": Rounding("bfloat16", _same),
    "w16": Rounding("none", _bfloat16),
    "int8": Rounding("tensor", _channels),
    "int8-rows": Rounding("rows", _channels),
    "w8": Rounding("none", _channels),
    "w4": Rounding("none", _groups),
}


def rounding_of(form: str, keeps_pairs: bool) -> Rounding:
    """How a format rounds where weights whose activations have 8 bits are to be as `pairs.keeps_pairs` asks, or not."""
    found = ROUNDINGS[form]
    return replace(found, weights=quantized_pairs) if keeps_pairs and form in ("int8", "int8-rows") else found


def quantized_pairs(w: Array, axis: int) -> Array:
    """By channels, of small pairs."""
    return quantize_pairs(w, axis).dequantize()


def rounded_to_bfloat16(x: Array) -> Array:
    """The nearest bfloat16 numbers, as float32."""
    rounded: Array = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded


def rounded_activations(x: Array, how: ActivationRounding, span: tuple[float, float]) -> Array:
    """What is left of activations; `span` is the range that "tensor" spreads its levels over."""
    if how == "bfloat16":
        return rounded_to_bfloat16(x)
    if how == "tensor":
        return unsigned_affine(*span).rounded(x)
    return quantize_rows(x).dequantize() if how == "rows" else x
