"""Products and convolutions by a constant weight: how the channels of their operand and result lie in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array, constant_tensor
from ....compiler.ir.matching import input_at, is_constant, is_floating, rank_of, static_shape
from ....runtime.symbolic.shapes import is_symbolic

_BLOCK_BYTES = 4 << 20  # of a weight that is at once in float64


@dataclass(frozen=True, slots=True)
class Anchor:
    """A Conv, ConvTranspose, Gemm or MatMul, and its weight of two dimensions of channels and those of the window.

    The weight's dimension `output_dim` counts the channels of the result, the other one those of the operand, for each of
    `groups` in the dimension that is second.
    """

    node: ir.Node
    position: int  # of the weight among the inputs
    output_dim: int
    input_axis: int  # of the operand
    output_axis: int
    groups: int = 1

    @property
    def weight(self) -> ir.Value:
        value = self.node.inputs[self.position]
        assert value is not None
        return value

    @property
    def data(self) -> ir.Value:
        value = self.node.inputs[1 - self.position]
        assert value is not None
        return value

    @property
    def weight_shape(self) -> tuple[int, ...]:
        shape = static_shape(self.weight)
        assert shape is not None
        return shape

    def channels(self, dim: int) -> int:
        """How many channels a dimension of the weight counts, over all groups."""
        return self.weight_shape[dim] * (self.groups if dim == 1 else 1)

    def factor(self, numbers: np.ndarray, dim: int) -> np.ndarray:
        """One number for each channel of a dimension, in a shape that broadcasts to the weight."""
        first, second, *window = self.weight_shape
        ones = [1] * len(window)
        if dim == 0:
            return numbers.reshape(first, 1, *ones)
        if self.groups == 1:
            return numbers.reshape(1, second, *ones)
        by_group = numbers.reshape(self.groups, 1, second)
        return np.broadcast_to(by_group, (self.groups, first // self.groups, second)).reshape(first, second, *ones)

    def response(self, shift: np.ndarray) -> np.ndarray:
        """What a shift of each channel of the operand adds to each channel of the result, where no window leaves the operand."""
        tensor = constant_tensor(self.weight)
        assert tensor is not None
        total = np.zeros(self.channels(self.output_dim))
        for place, block in blocks(tensor, [self.factor(shift, 1 - self.output_dim)]):
            if self.output_dim == 0:
                total[place] = block.sum(axis=tuple(range(1, block.ndim)))
            else:
                total += block.sum(axis=0)
        return total

    def bias(self) -> np.ndarray | str:
        """What the node itself adds to each channel of the result, in float64; else why that is not known."""
        count, value = self.channels(self.output_dim), None if self.node.op_type == "MatMul" else input_at(self.node, 2)
        if value is None:
            return np.zeros(count)
        shape = static_shape(value)
        if not is_constant(value) or shape is None:
            return f"the bias %{value.name} is not constant"
        if any(dim != 1 for dim in shape[:-1]):
            return f"%{value.name} of shape {value.shape} is not one number a channel"
        array = constant_array(value)
        assert array is not None
        return np.broadcast_to(array.astype(np.float64).reshape(-1), (count,))

    def fault(self) -> str:
        """Why nothing can be folded into the weight; empty where something can."""
        if not is_constant(self.weight):
            return f"the weight %{self.weight.name} is not constant"
        if any(self.node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
            return "its alpha or beta is not 1"
        bias = self.bias()
        return bias if isinstance(bias, str) else ""

    def fault_of_shift(self) -> str:
        """Why a shift of the operand is no shift of the result; empty where it is one."""
        if self.node.op_type == "ConvTranspose":
            return "a shift in front of ConvTranspose is not the same everywhere behind it"
        pads, mode = self.node.attributes.get_ints("pads", ()), self.node.attributes.get_string("auto_pad", "NOTSET")
        if any(pads):
            return f"its shift does not reach the padding {list(pads)}"
        return f"its shift does not reach the padding {mode}" if mode.startswith("SAME") else ""


def blocks(tensor: ir.TensorProtocol, factors: Sequence[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """A weight times some factors in float64, a block of rows after the other, with the place of each."""
    weight = tensor.numpy()
    rows = max(1, _BLOCK_BYTES // (8 * weight[:1].size))
    for begin in range(0, len(weight), rows):
        place = slice(begin, begin + rows)
        block = weight[place].astype(np.float64)
        for factor in factors:
            block *= factor if len(factor) == 1 else factor[place]
        yield place, block


def anchor_of(node: ir.Node) -> Anchor | None:
    """The node as an anchor; None where it is none, or its shapes are unknown or a call's. Its weight need not be constant."""
    if node.domain != "" or node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or not is_floating(node.outputs[0]):
        return None
    if node.op_type == "MatMul":
        return _product(node)
    shape = static_shape(node.inputs[1])
    if shape is None or is_symbolic(shape) or 0 in shape or rank_of(node.inputs[0]) is None:
        return None
    if node.op_type == "Gemm":
        output_dim = 0 if node.attributes.get_int("transB", 0) else 1
        return Anchor(node, 1, output_dim, 0 if node.attributes.get_int("transA", 0) else 1, 1)
    return Anchor(node, 1, 0 if node.op_type == "Conv" else 1, 1, 1, node.attributes.get_int("group", 1))


def _product(node: ir.Node) -> Anchor | None:
    """A MatMul by one constant matrix, from either side."""
    constants = [is_constant(value) for value in node.inputs]
    if sum(constants) != 1:
        return None
    position = constants.index(True)
    shape, rank, result_rank = static_shape(node.inputs[position]), rank_of(node.inputs[1 - position]), rank_of(node.outputs[0])
    if shape is None or len(shape) != 2 or 0 in shape or not rank or not result_rank:
        return None
    if position == 1:
        return Anchor(node, 1, 1, rank - 1, result_rank - 1)
    return Anchor(node, 0, 0, max(rank - 2, 0), result_rank - 1 if rank == 1 else result_rank - 2)
