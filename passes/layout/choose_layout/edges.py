"""Where images become something else, or are made of it, and no conversion is needed: rows of a product, tokens, transposes.

A product with constant weights takes the elements of an image in any order that its weights follow. Tokens, such as a vision
transformer's, are positions with their channels: what lies channels-last already.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.facts import tensor_type
from ....compiler.ir.functions import body_of, is_fused
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import static_shape
from ....kernels.cost.memory import MoveCosts
from .forms import Flexible, as_it_lies, conversion_bytes, is_image, to_first, to_last

_SWAP = (0, 2, 1)
_RESHAPES = ("Flatten", "Reshape")
EDGES = (*_RESHAPES, "Transpose")


@dataclass(frozen=True, slots=True)
class Product:
    """A reader of a flattened image: a node whose constant operand at `position` has its elements along `axis`."""

    node: ir.Node
    position: int
    axis: int


def edge_form(model: ir.Model, node: ir.Node, images: Collection[ir.Value], costs: MoveCosts) -> Flexible | None:
    """Of a Transpose, Reshape or Flatten that is no part of a group; `images` are what windows, or nodes after them, make."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or constant_tensor(source) is not None or None in (static_shape(source), static_shape(result)):
        return None
    if node.op_type == "Transpose":
        return None if _goes_with_tokens(node, source, result) else _transpose(node, source, result, images, costs)
    if is_image(source):
        if is_tokens(source, result) and _are_swapped(result):
            return Flexible(node, "tokens", (0,), first_cycles=_turning(source, costs))
        if tensor_type(result).shape == _flat(source) and products_of(model, result) is not None:
            return Flexible(node, "flat", (0,))
    if is_image(result) and is_tokens(result, source) and _swap_before(source):
        return Flexible(node, "from-tokens", (), first_cycles=_turning(result, costs))
    return None


def is_tokens(image: ir.Value, value: ir.Value) -> bool:
    """Whether a value has the shape of an image with its positions merged."""
    images, channels, *places = tensor_type(image).shape
    return static_shape(value) == (images, channels, prod(places))


def products_of(model: ir.Model, flat: ir.Value) -> tuple[Product, ...] | None:
    """The readers of a flattened image, where all are products with constant weights; None where one is not."""
    found = [_product(model, user, index) for user, index in flat.uses()]
    if not found or flat.is_graph_output() or None in found:
        return None
    return tuple(one for one in found if one is not None)


def _product(model: ir.Model, user: ir.Node, index: int) -> Product | None:
    if not is_fused(user):
        return None if index or (axis := _weight_axis(user)) is None or not _is_matrix(user.inputs[1]) else Product(user, 1, axis)
    body = body_of(model, user)
    uses = tuple(body.inputs[index].uses())
    if len(uses) == 1 and kind_of(uses[0].node) is Kind.OPERAND:
        uses = tuple(uses[0].node.outputs[0].uses())
    if len(uses) != 1 or uses[0].idx or (axis := _weight_axis(uses[0].node)) is None:
        return None
    weight = as_it_lies(uses[0].node.inputs[1])
    if weight is None or weight not in body.inputs or len(weight.uses()) != 1:
        return None
    position = body.inputs.index(weight)
    return Product(user, position, axis) if _is_matrix(user.inputs[position]) else None


def _weight_axis(node: ir.Node) -> int | None:
    """The axis of a product's second operand that belongs to the columns of its first one."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "MatMul":
        return 0
    is_plain = node.op_type == "Gemm" and not node.attributes.get_int("transA", 0)
    return node.attributes.get_int("transB", 0) if is_plain else None


def _is_matrix(value: ir.Value | None) -> bool:
    return value is not None and constant_tensor(value) is not None and len(static_shape(value) or ()) == 2


def _transpose(
    node: ir.Node, source: ir.Value, result: ir.Value, images: Collection[ir.Value], costs: MoveCosts
) -> Flexible | None:
    order = tuple(node.attributes.get_ints("perm", ()))
    is_either = to_last(len(order)) == to_first(len(order))  # of signals: what comes from a window is one, else what is made
    if order == to_last(len(order)) and is_image(source) and (not is_either or source in images):
        return Flexible(node, "to-last", (0,), first_cycles=_turning(source, costs))
    if order == to_first(len(order)) and is_image(result):
        return Flexible(node, "from-last", (), first_cycles=_turning(result, costs))
    return None


def _are_swapped(tokens: ir.Value) -> bool:
    """Whether all that reads a value takes it with its last two dimensions exchanged."""
    return bool(tokens.uses()) and not tokens.is_graph_output() and all(_is_swap(user) for user in tokens.consumers())


def _swap_before(tokens: ir.Value) -> bool:
    """Whether a value is such an exchange that nobody else reads."""
    producer = tokens.producer()
    return producer is not None and _is_swap(producer) and len(tokens.uses()) == 1 and not tokens.is_graph_output()


def _goes_with_tokens(node: ir.Node, source: ir.Value, result: ir.Value) -> bool:
    """Whether a node is the exchange that a Reshape beside it, of an image to tokens or back, is written with."""
    if not _is_swap(node):
        return False
    maker, readers = source.producer(), result.consumers()
    if maker is not None and _is_reshape(maker) and _merges_positions(maker.inputs[0], source):
        return _are_swapped(source)
    return (
        len(readers) == 1
        and _is_reshape(readers[0])
        and _merges_positions(readers[0].outputs[0], result)
        and _swap_before(result)
    )


def _merges_positions(image: ir.Value | None, tokens: ir.Value) -> bool:
    return image is not None and is_image(image) and is_tokens(image, tokens)


def _is_reshape(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _RESHAPES


def _is_swap(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.domain == "" and tuple(node.attributes.get_ints("perm", ())) == _SWAP


def _flat(image: ir.Value) -> tuple[int, int]:
    shape = tensor_type(image).shape
    return shape[0], prod(shape[1:])


def _turning(value: ir.Value, costs: MoveCosts) -> float:
    return costs.conversion(conversion_bytes(value))
