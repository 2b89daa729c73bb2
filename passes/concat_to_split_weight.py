"""concat-to-split-weight: a product of concatenated operands is the sum of their products by the parts of its weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import onnx_ir as ir

from ..compiler.ir.aliases import Aliases, find_aliases
from ..compiler.ir.constants import add_constant, constant_tensor
from ..compiler.ir.facts import tensor_type
from ..compiler.ir.rewriter import Rejection, drop_unused_constants, remove_nodes, replace_node
from ..compiler.pipeline import Context, Pass
from .canonicalization.scope import static_shape
from .parallel.worth import LAUNCH_BYTES

_Cuts = tuple[int, ...]
_Parts = dict[tuple[ir.Value, int, int, int], ir.Value]  # by weight, axis, begin and end


@dataclass(frozen=True)
class ConcatToSplitWeight(Pass):
    """Multiply the operands of a Concat one by one, instead of copying them side by side.

    Before:  c = Concat<axis=1>(a, b);  y = MatMul(c, w)
    After:   s = MatMul(a, w_top);  t = MatMul(b, w_bottom);  y = Add(t, s)

    Legal when only MatMuls, Gemms and convolutions without groups read the Concat, all of them over its axis, by constants that
    nothing else reads. Worth it when copying the operands costs more than storing and reading the sums: never where the
    operands can be written where the Concat lies. Sums are rounded in another order.
    """

    name: ClassVar[str] = "concat-to-split-weight"

    def run(self, model: ir.Model, context: Context) -> bool:
        concats = [node for node in model.graph if node.op_type == "Concat" and node.domain == ""]
        aliases = find_aliases(model.graph, model.graph.outputs) if concats else None
        sites = []
        for concat in concats:
            assert aliases is not None
            match = _match(concat, aliases)
            if isinstance(match, Rejection):
                context.reject(self.name, match)
            elif match is not None:
                sites.append(match)
        parts: _Parts = {}
        alike: dict[_Cuts, set[tuple[ir.Node, int]]] = defaultdict(set)
        for site in sites:
            alike[site.cuts].update((product.node, product.weight_axis) for product in site.products)
        changed = False
        for site, fault in [(site, _shared_weight(site, alike[site.cuts])) for site in sites]:
            if fault is None:
                _rewrite(model, site, parts)
                changed = True
            else:
                context.reject(self.name, fault)
        return changed


@dataclass(frozen=True, slots=True)
class _Product:
    """A MatMul, Gemm or Conv over the axis of a Concat, which is `weight_axis` of its weight."""

    node: ir.Node
    weight: ir.Value
    weight_axis: int


@dataclass(frozen=True, slots=True)
class _Site:
    """A Concat and the products that read it. The operand i reaches from `cuts[i]` to `cuts[i + 1]` along the axis."""

    concat: ir.Node
    products: tuple[_Product, ...]
    cuts: _Cuts


def _match(concat: ir.Node, aliases: Aliases) -> _Site | Rejection | None:
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
    return _costly(concat, products) or _Site(concat, tuple(products), tuple(accumulate(extents, initial=0)))


def _product(node: ir.Node, value: ir.Value, axis: int, rank: int) -> _Product | None:
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
    return _Product(node, weight, weight_axis)


def _costly(concat: ir.Node, products: Sequence[_Product]) -> Rejection | None:
    """Where the sums cost more than the copy: each further product reads and stores what those before it have summed."""
    value = concat.outputs[0]
    further = sum(piece is not None and tensor_type(piece).elements > 0 for piece in concat.inputs) - 1
    saved = 2 * tensor_type(value).size_bytes
    cost = sum(2 * further * tensor_type(product.node.outputs[0]).size_bytes for product in products)
    launches = further * len(products)
    if saved + LAUNCH_BYTES > cost + launches * LAUNCH_BYTES:
        return None
    reason = f"it would save {saved} bytes and 1 launches, and cost {cost} bytes and {launches} launches"
    return Rejection(f"%{value.name} is joined: {reason}", (concat, *(product.node for product in products)))


def _shared_weight(site: _Site, alike: Container[tuple[ir.Node, int]]) -> Rejection | None:
    """Whether a large weight would exist twice, because somebody reads it besides those who cut it alike, along the same axis."""
    for weight, axis in dict.fromkeys((product.weight, product.weight_axis) for product in site.products):
        others = [reader for reader in weight.consumers() if (reader, axis) not in alike]
        if others and tensor_type(weight).size_bytes > LAUNCH_BYTES:
            reason = f"%{site.concat.outputs[0].name} is joined: %{weight.name} is also read by {others[0].op_type}"
            return Rejection(reason, (site.concat, others[0]))
    return None


def _rewrite(model: ir.Model, site: _Site, parts: _Parts) -> None:
    """Put the sums in the place of the products. `parts` has the parts of weights that other sites have made."""
    for product in site.products:
        nodes = list(_sums(model, site, product, parts))
        replace_node(model, product.node, nodes, [nodes[-1].outputs[0]])
    remove_nodes([site.concat])
    drop_unused_constants(model, [product.weight for product in site.products])


def _sums(model: ir.Model, site: _Site, product: _Product, parts: _Parts) -> Iterator[ir.Node]:
    """The first product, with the bias, then each further one and its sum with those before it."""
    node, so_far = product.node, None
    for piece, (begin, end) in zip(site.concat.inputs, pairwise(site.cuts), strict=True):
        if begin == end:
            continue
        part = _part(model, product, begin, end, parts)
        operands = [piece, part, *([] if so_far else node.inputs[2:])]
        yield (made := ir.Node(node.domain, node.op_type, operands, node.attributes))
        if so_far is not None:
            yield (made := ir.node("Add", [made.outputs[0], so_far]))
        so_far = made.outputs[0]


def _part(model: ir.Model, product: _Product, begin: int, end: int, parts: _Parts) -> ir.Value:
    """A part of a weight along the contracted axis, which is not cut before it is read."""
    key = (product.weight, product.weight_axis, begin, end)
    if key not in parts:
        tensor = constant_tensor(product.weight)
        assert tensor is not None
        place = (slice(None),) * product.weight_axis + (slice(begin, end),)
        shape = list(tensor.shape.numpy())
        shape[product.weight_axis] = end - begin
        lazy = ir.LazyTensor(lambda: ir.tensor(tensor.numpy()[place]), dtype=tensor.dtype, shape=ir.Shape(shape))
        parts[key] = add_constant(model, lazy, f"{product.weight.name}_part")
    return parts[key]
