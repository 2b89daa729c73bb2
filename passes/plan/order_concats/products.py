"""Products by constants that contract over the axis along which a Concat joins their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import onnx_ir as ir

from ....compiler.ir.aliases import Aliases
from ....compiler.ir.constants import add_constant, constant_tensor, derived_tensor
from ....compiler.ir.facts import tensor_type
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection

Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A MatMul, Gemm or Conv over the axis of a Concat, which is `weight_axis` of its weight."""

    node: ir.Node
    weight: ir.Value
    weight_axis: int


@dataclass(frozen=True, slots=True)
class Site:
    """A Concat and the products that read it. The operand i reaches from `cuts[i]` to `cuts[i + 1]` along the axis."""

    concat: ir.Node
    products: tuple[Product, ...]
    cuts: Cuts


def find_site(concat: ir.Node, aliases: Aliases) -> Site | Rejection | None:
    """The products that can do without a Concat; None where no product contracts over its axis."""
    value, shape = concat.outputs[0], static_shape(concat.outputs[0])
    rank = len(value.shape or ())
    axis = concat.attributes.get_int("axis", 0) % max(rank, 1)
    readers = list(value.consumers())
    products = [product for reader in readers if (product := _product(reader, value, axis, rank)) is not None]
    if not products:
        return None
    if shape is None or any(static_shape(one) is None for one in (*concat.inputs, *(p.node.outputs[0] for p in products))):
        return Rejection(f"%{value.name} is joined: its shape is not static", (concat,))
    if value.is_graph_output():
        return Rejection(f"%{value.name} is joined: it is an output of the graph", (concat,))
    if len(products) < len(readers):
        other = next(reader for reader in readers if all(reader is not product.node for product in products))
        return Rejection(f"%{value.name} is joined: it is also read by {other.op_type}", (concat, other))
    extents = [tensor_type(piece).shape[axis] for piece in concat.inputs if piece is not None]
    if concat in aliases.free:
        return Rejection(f"%{value.name} is joined: its pieces are written in place", (concat,))
    if 0 in shape or len([extent for extent in extents if extent]) < 2:
        return None
    return Site(concat, tuple(products), tuple(accumulate(extents, initial=0)))


def _product(node: ir.Node, value: ir.Value, axis: int, rank: int) -> Product | None:
    """A node as a product over the axis of its left operand by a constant, where it is one."""
    if node.domain != "" or not node.inputs or node.inputs[0] is not value or value in node.inputs[1:]:
        return None
    match node.op_type:
        case "Conv" if axis == 1 and node.attributes.get_int("group", 1) == 1:
            weight_axis = 1
        case "Gemm" if axis == 1 and not node.attributes.get_int("transA", 0):
            weight_axis = node.attributes.get_int("transB", 0)
        case "MatMul" if axis == rank - 1:
            weight_axis = 0
        case _:
            return None
    weight = node.inputs[1]
    shape = static_shape(weight)
    if weight is None or shape is None or not weight.is_initializer() or constant_tensor(weight) is None:
        return None
    if node.op_type == "MatMul" and len(shape) != 2:
        return None
    return Product(node, weight, weight_axis)


@dataclass(slots=True)
class WeightParts:
    """Constants made of parts of weights, each once."""

    model: ir.Model
    made: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)  # by what they are made of

    def of(self, product: Product, cuts: Sequence[tuple[int, int]]) -> ir.Value:
        """Parts of a product's weight along the contracted axis, one behind the other, not computed before they are read."""
        axis, key = product.weight_axis, (product.weight, product.weight_axis, *cuts)
        if key not in self.made:
            tensor = constant_tensor(product.weight)
            assert tensor is not None
            places = [(slice(None),) * axis + (slice(begin, end),) for begin, end in cuts]
            shape = list(tensor.shape.numpy())
            shape[axis] = sum(end - begin for begin, end in cuts)

            def parts() -> np.ndarray:
                return np.concatenate([tensor.numpy()[place] for place in places], axis)

            lazy = derived_tensor(("parts", axis, *cuts), [tensor], parts, tensor.dtype, shape)
            self.made[key] = add_constant(self.model, lazy, f"{product.weight.name}_part")
        return self.made[key]
