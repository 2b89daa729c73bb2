"""Operators that scale and shift: arithmetic with a constant, and batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....compiler.ir.matching import is_constant, is_floating, is_read
from .channels import Channels

_COMMUTATIVE = ("Add", "Mul")


@dataclass(frozen=True, slots=True)
class Affine:
    """A node whose output is its input at `position`, times a constant and plus a constant."""

    node: ir.Node
    position: int

    @property
    def data(self) -> ir.Value:
        value = self.node.inputs[self.position]
        assert value is not None
        return value

    @property
    def is_shift(self) -> bool:
        """Whether the node only adds."""
        return self.node.op_type == "Add" or (self.node.op_type == "Sub" and self.position == 0)

    @property
    def is_scale(self) -> bool:
        """Whether the node only multiplies."""
        return self.node.op_type in ("Div", "Mul", "Neg")

    def coefficients(self, channels: Channels) -> tuple[np.ndarray, np.ndarray] | str:
        """Scale and shift in float64, of each channel that the input has or one for all; else why there is no such pair."""
        if self.node.op_type == "Neg":
            return np.full(1, -1.0), np.zeros(1)
        if self.node.op_type == "BatchNormalization":
            return self._normalization(channels)
        constant = self.node.inputs[1 - self.position]
        assert constant is not None
        dims = None if constant.shape is None else tuple(constant.shape)
        zeros = np.broadcast_to(np.zeros(()), [dim for dim in dims or () if isinstance(dim, int)])
        if channels.spread(zeros, self.data) is None:  # before anything is read: it may be large
            return f"its constant of shape {constant.shape} is not one number a channel"
        array = constant_array(constant)
        numbers = None if array is None else channels.spread(array.astype(np.float64), self.data)
        assert numbers is not None
        one, zero = np.ones(1), np.zeros(1)
        match self.node.op_type:
            case "Add":
                return one, numbers
            case "Mul":
                return numbers, zero
            case "Div":
                with np.errstate(divide="ignore"):
                    return 1 / numbers, zero
        return (one, -numbers) if self.position == 0 else (-one, numbers)

    def _normalization(self, channels: Channels) -> tuple[np.ndarray, np.ndarray] | str:
        """Of inference: https://onnx.ai/onnx/operators/onnx__BatchNormalization.html."""
        parameters = [constant_array(value) for value in self.node.inputs[1:5]]
        known = [parameter.astype(np.float64) for parameter in parameters if parameter is not None]
        if self.node.attributes.get_int("training_mode", 0) or any(is_read(output) for output in self.node.outputs[1:]):
            return "it trains"
        if len(known) < 4:
            return "its statistics are not constant"
        weight, bias, mean, variance = known
        with np.errstate(all="ignore"):
            scale = weight / np.sqrt(variance + self.node.attributes.get_float("epsilon", 1e-5))
            shift = bias - mean * scale
        shape = (-1, *[1] * (len(self.data.shape or (0, 0)) - 2))
        scales, shifts = (channels.spread(numbers.reshape(shape), self.data) for numbers in (scale, shift))
        if scales is None or shifts is None:
            return "its channels are not those of the product"
        return scales, shifts


def affine_of(node: ir.Node) -> Affine | None:
    """The node as arithmetic on its one input that is not constant; None where it is something else."""
    if node.domain != "" or not is_floating(node.outputs[0]):
        return None
    if node.op_type in ("BatchNormalization", "Neg"):
        return Affine(node, 0)
    if node.op_type not in (*_COMMUTATIVE, "Div", "Sub"):
        return None
    constants = [is_constant(value) for value in node.inputs]
    if sum(constants) != 1 or (node.op_type == "Div" and not constants[1]):
        return None
    return Affine(node, constants.index(False))
