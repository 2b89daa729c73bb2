"""What is quantized: products of activations by constant weights. A unit is one of them, named as its node is."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from ...runtime.precision import LONGEST_SUM
from ..ir.constants import constant_array, constant_tensor
from ..ir.matching import input_at, rank_of, static_shape

# int8: uint8 activations with one scale, int8 weights with one for each output channel. int8-rows: a scale for each row of the
# activations, found while the program runs.
UnitFormat: TypeAlias = Literal["int8", "int8-rows"]

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_OPERATORS = (*_CONVOLUTIONS, "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class Unit:
    """A product `node` of activations by constant weights, both float32."""

    node: ir.Node

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def activations(self) -> ir.Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def weights(self) -> np.ndarray:
        array = constant_array(self.node.inputs[1])
        assert array is not None
        return array

    @property
    def bias(self) -> ir.Value | None:
        return input_at(self.node, 2)

    @property
    def alpha(self) -> float:
        """The factor of the product."""
        return self.node.attributes.get_float("alpha", 1.0) if self.node.op_type == "Gemm" else 1.0

    @property
    def beta(self) -> float:
        """The factor of the bias."""
        return self.node.attributes.get_float("beta", 1.0) if self.node.op_type == "Gemm" else 1.0

    @property
    def is_convolution(self) -> bool:
        return self.node.op_type in _CONVOLUTIONS

    @property
    def is_transposed(self) -> bool:
        """Whether the weights of a convolution are [input channels, output channels, ...]."""
        return self.node.op_type == "ConvTranspose"

    @property
    def groups(self) -> int:
        """Of a convolution; else 1."""
        return self.node.attributes.get_int("group", 1) if self.is_convolution else 1

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel reads one input channel."""
        return self.groups > 1 and self.shape[1] == 1

    @property
    def channels(self) -> int:
        """Of the activations: those of images, or the numbers of a row."""
        return self.group_channels * self.groups if self.is_convolution else self.depth

    @property
    def group_channels(self) -> int:
        """Of the images that a group of a convolution reads."""
        return self.shape[0 if self.is_transposed else 1]

    @property
    def channel_axis(self) -> int:
        """The dimension of the weights that is output channels, or columns of the result."""
        if self.is_transposed:
            return 1
        is_first = self.is_convolution or self.node.attributes.get_int("transB", 0) != 0
        return 0 if is_first else len(self.shape) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights."""
        shape = static_shape(self.node.inputs[1])
        assert shape is not None
        return shape

    @property
    def depth(self) -> int:
        """Products that are added up for an element of the result, at most."""
        shape, axis = self.shape, self.channel_axis
        if self.is_convolution:
            return prod(shape) // max(shape[axis], 1)
        return shape[-2] if axis == len(shape) - 1 else shape[-1]


def find_units(model: ir.Model) -> tuple[Unit, ...]:
    """The products of float32 activations by constant weights in the main graph, in its order."""
    return tuple(Unit(node) for node in model.graph if _is_unit(node))


def fault_of(unit: Unit, form: UnitFormat) -> str:
    """Why a unit cannot have a format, whatever the target; empty if it can."""
    if unit.depth > LONGEST_SUM:
        return f"sums of {unit.depth} products could pass 2^31"
    if form == "int8-rows" and unit.is_convolution:
        return "images have no rows with scales of their own"
    if form == "int8-rows" and (unit.alpha, unit.beta) != (1.0, 1.0):
        return f"it is scaled by {unit.alpha:g} and {unit.beta:g}"
    return "" if np.isfinite(unit.weights).all() else "its weights are not finite"


def _is_unit(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in _OPERATORS:
        return False
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or constant_tensor(w) is None or constant_tensor(x) is not None:
        return False
    if any(value.dtype != ir.DataType.FLOAT for value in (x, w)) or rank_of(x) is None:
        return False
    if node.op_type == "MatMul":
        return len(static_shape(w) or ()) == 2 and (rank_of(x) or 0) >= 2
    if node.op_type == "ConvTranspose":  # whose groups share the channels of their weights
        return node.attributes.get_int("group", 1) == 1
    return node.op_type == "Conv" or node.attributes.get_int("transA", 0) == 0
