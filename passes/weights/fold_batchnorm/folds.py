"""What folding makes of one product or convolution: a scaled weight, computed when it is read, and a bias."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_tensor
from ....compiler.ir.rewriter import Rejection, copy_source, replace_node
from .anchors import Anchor, blocks
from .chains import Chain
from .operators import Affine


@dataclass(frozen=True, slots=True)
class Fold:
    """An anchor and the nodes to fold into it: factors that broadcast to its weight, and its new bias, one number a channel."""

    anchor: Anchor
    affines: tuple[Affine, ...]
    factors: tuple[np.ndarray, ...]
    bias: np.ndarray

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes that go."""
        return tuple(affine.node for affine in self.affines)

    def weight_key(self) -> Hashable:
        """Equal for folds that make the same weight."""
        return self.anchor.weight, tuple((factor.shape, factor.tobytes()) for factor in self.factors)

    def rejection(self, reason: str) -> Rejection:
        """Why this fold is not made."""
        names = ", ".join(dict.fromkeys(node.op_type for node in self.nodes))
        return Rejection(f"{names} not folded into {self.anchor.node.op_type}: {reason}", (*self.nodes, self.anchor.node))

    def weight(self, model: ir.Model) -> ir.Value:
        """The new weight, an initializer that is computed whenever it is read; the old one where nothing scales it."""
        old, tensor, factors = self.anchor.weight, constant_tensor(self.anchor.weight), self.factors
        if not factors:
            return old
        assert tensor is not None
        made = ir.LazyTensor(lambda: _scaled(tensor, factors), dtype=tensor.dtype, shape=ir.Shape(self.anchor.weight_shape))
        return add_constant(model, made, f"{old.name}_folded")

    def rewrite(self, model: ir.Model, weight: ir.Value) -> None:
        """Put the anchor with its new weight and bias in the place of the old one, and take the folded nodes out."""
        for affine in self.affines:
            replace_node(model, affine.node, (), [affine.data, *[None] * (len(affine.node.outputs) - 1)])
        node, position = self.anchor.node, self.anchor.position
        inputs = list(node.inputs[:2])
        inputs[position] = weight
        bias = self._bias(model)
        if bias is not None and node.op_type != "MatMul":
            inputs.append(bias)
        made = [ir.Node("", node.op_type, inputs, node.attributes, version=node.version, name=node.name)]
        if bias is not None and node.op_type == "MatMul":
            made.append(ir.node("Add", [made[0].outputs[0], bias], version=node.version))
        for one in made:
            copy_source((node, *self.nodes), one)
        replace_node(model, node, made, made[-1].outputs)

    def _bias(self, model: ir.Model) -> ir.Value | None:
        """The new bias, rounded, in the shape that the anchor takes; None where it adds nothing."""
        node, dtype = self.anchor.node, self.anchor.weight.dtype
        assert dtype is not None
        if not self.bias.any():
            return None
        shape = (
            (-1, 1) if node.op_type == "MatMul" and self.anchor.position == 0 and len(self.anchor.data.shape or ()) > 1 else (-1,)
        )
        return add_constant(model, self.bias.astype(dtype.numpy()).reshape(shape), f"{node.outputs[0].name}_bias")


def fold_of(anchor: Anchor, ahead: Chain | None, behind: Chain | None) -> Fold | Rejection | None:
    """What the chains before and behind an anchor become; None where they are as they should be: one shift behind a MatMul."""
    affines = (*(ahead.affines if ahead else ()), *(behind.affines if behind else ()))
    if not affines or (anchor.node.op_type == "MatMul" and ahead is None and len(affines) == 1 and affines[0].is_shift):
        return None
    incomplete = Fold(anchor, affines, (), np.zeros(0))
    if fault := anchor.fault():
        return incomplete.rejection(fault)
    bias = anchor.bias()
    assert isinstance(bias, np.ndarray)
    chains = [(ahead, 1 - anchor.output_dim), (behind, anchor.output_dim)]
    factors = tuple(anchor.factor(chain.scale, dim) for chain, dim in chains if chain is not None and (chain.scale != 1).any())
    with np.errstate(all="ignore"):
        if ahead is not None and ahead.shift.any():
            bias = bias + anchor.response(ahead.shift)
        if behind is not None:
            bias = bias * behind.scale + behind.shift
    if not _is_finite(anchor, factors, bias):
        return incomplete.rejection("a number would not be finite")
    if _is_subnormal(anchor, factors):
        return incomplete.rejection("most weights would be subnormal numbers")
    return Fold(anchor, affines, factors, bias)


def _is_finite(anchor: Anchor, factors: Sequence[np.ndarray], bias: np.ndarray) -> bool:
    """Whether the type of the weight holds the bias, and surely the weight times its factors."""
    dtype, tensor = anchor.weight.dtype, constant_tensor(anchor.weight)
    assert dtype is not None
    assert tensor is not None
    largest = float(ml_dtypes.finfo(dtype.numpy()).max)
    peak = 0.0
    if factors:
        array = tensor.numpy()
        peak = float(np.maximum(array.max(), -array.min())) * float(np.prod([np.abs(factor).max() for factor in factors]))
    return peak <= largest and bool((np.abs(bias) <= largest).all())


def _is_subnormal(anchor: Anchor, factors: Sequence[np.ndarray]) -> bool:
    """Whether most of a float16 weight times its factors would be below the normal numbers, where these have fewer bits."""
    tensor = constant_tensor(anchor.weight)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT16 or not factors:
        return False
    least = float(np.finfo(np.float16).smallest_normal)
    counts = [((block != 0).sum(), ((block != 0) & (np.abs(block) < least)).sum()) for _, block in blocks(tensor, factors)]
    return bool(2 * sum(small for _, small in counts) > sum(some for some, _ in counts))


def _scaled(tensor: ir.TensorProtocol, factors: Sequence[np.ndarray]) -> ir.Tensor[np.ndarray]:
    """The weight times its factors, computed in float64 block by block and rounded once."""
    array = np.empty(tensor.shape.numpy(), tensor.dtype.numpy())
    for place, block in blocks(tensor, factors):
        array[place] = block.astype(array.dtype)
    return ir.Tensor(array)
