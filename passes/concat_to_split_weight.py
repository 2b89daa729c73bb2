"""concat-to-split-weight: a product of concatenated operands is the sum of their products by the parts of its weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ..compiler.ir.aliases import Aliases, find_aliases, is_outermost
from ..compiler.ir.constants import add_constant, constant_tensor
from ..compiler.ir.facts import tensor_type
from ..compiler.ir.rewriter import Rejection, drop_unused_constants, remove_nodes, replace_node
from ..compiler.pipeline import Context, Pass
from .canonicalization.scope import static_shape
from .parallel.worth import LAUNCH_BYTES

_Cuts = tuple[int, ...]
_Order = tuple[int, ...]
_Weights = dict[tuple[object, ...], ir.Value]  # made of others, by what they are made of


@dataclass(frozen=True)
class ConcatToSplitWeight(Pass):
    """Multiply the operands of a Concat one by one, instead of copying them side by side.

    Before:  c = Concat<axis=1>(a, b);  y = MatMul(c, w)
    After:   s = MatMul(a, w_top);  t = MatMul(b, w_bottom);  y = Add(t, s)

    Legal when only MatMuls, Gemms and convolutions without groups read the Concat, all of them over its axis, by constants that
    nothing else reads. Worth it when copying the operands costs more than storing and reading the sums: never where the
    operands can be written where the Concat lies. Where they could in another order, which is that of another Concat of some of
    them, they are joined in that order, and the weight follows. Sums are rounded in another order.
    """

    name: ClassVar[str] = "concat-to-split-weight"

    def run(self, model: ir.Model, context: Context) -> bool:
        concats = [node for node in model.graph if node.op_type == "Concat" and node.domain == ""]
        if not concats:
            return False
        aliases = find_aliases(model.graph, model.graph.outputs)
        matches = [_match(concat, aliases) for concat in concats]
        sites = [match for match in matches if isinstance(match, _Site)]
        orders = _orders(sites, aliases)
        weights: _Weights = {}
        for site in sites:
            if (order := orders.get(site.concat)) is not None:
                _reorder(model, site, order, weights)
        split, rejections = _worthwhile([site for site in sites if site.concat not in orders])
        for site in split:
            _rewrite(model, site, weights)
        for match in (*matches, *rejections):
            if isinstance(match, Rejection):
                context.reject(self.name, match)
        return bool(orders or split)


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
    return _Site(concat, tuple(products), tuple(accumulate(extents, initial=0)))


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


def _orders(sites: Sequence[_Site], aliases: Aliases) -> dict[ir.Node, _Order]:
    """The Concats that can be written in place when their operands come in another order, which their weights must share."""
    alike: dict[object, list[_Site]] = defaultdict(list)
    for site in sites:
        alike[(site.cuts, *((product.weight, product.weight_axis) for product in site.products))].append(site)
    orders = {}
    for group in alike.values():
        products = {product.node for site in group for product in site.products}
        weights = [product.weight for product in group[0].products]
        if any(reader not in products for weight in weights for reader in weight.consumers()):
            continue
        gains: dict[_Order, int] = defaultdict(int)
        for site in group:
            order, gain = _order_of_places(site.concat, aliases)
            gains[order] += gain
        best = max(gains, key=lambda order: gains[order])
        if gains[best]:
            orders.update({site.concat: best for site in group})
    return orders


def _order_of_places(concat: ir.Node, aliases: Aliases) -> tuple[_Order, int]:
    """The order in which neighbours in memory are neighbours in the Concat, and how many bytes more need no copy then."""
    pieces = [piece for piece in concat.inputs if piece is not None]
    shape = tensor_type(concat.outputs[0]).shape
    given = tuple(range(len(pieces)))
    if not is_outermost(shape, concat.attributes.get_int("axis", 0) % len(shape)):
        return given, 0
    places = [aliases.place(piece) for piece in pieces]
    first = {place.value: index for index, place in reversed(list(enumerate(places)))}
    order = tuple(sorted(given, key=lambda index: (first[places[index].value], places[index].offset_bytes)))
    in_place = aliases.bytes_in_place([pieces[index] for index in order])
    is_enough = 2 * in_place >= tensor_type(concat.outputs[0]).size_bytes
    return (order, max(in_place - aliases.bytes_in_place(pieces), 0)) if is_enough else (given, 0)


def _reorder(model: ir.Model, site: _Site, order: _Order, weights: _Weights) -> None:
    """Join the operands in another order, and read the weights in that order too."""
    concat = ir.Node("", "Concat", [site.concat.inputs[index] for index in order], site.concat.attributes)
    replace_node(model, site.concat, [concat], concat.outputs)
    cuts = [(site.cuts[index], site.cuts[index + 1]) for index in order]
    for product in site.products:
        product.node.replace_input_with(1, _cut(model, product, cuts, weights))
    drop_unused_constants(model, [product.weight for product in site.products])


def _worthwhile(sites: Sequence[_Site]) -> tuple[list[_Site], list[Rejection]]:
    """The Concats that cost more than sums do, and why others stay."""
    costs = {site.concat: _costly(site) for site in sites}
    cheap = [site for site in sites if costs[site.concat] is None]
    alike: dict[_Cuts, set[tuple[ir.Node, int]]] = defaultdict(set)
    for site in cheap:
        alike[site.cuts].update((product.node, product.weight_axis) for product in site.products)
    shared = {site.concat: _shared_weight(site, alike[site.cuts]) for site in cheap}
    faults = [fault for fault in (*costs.values(), *shared.values()) if fault is not None]
    return [site for site in cheap if shared[site.concat] is None], faults


def _costly(site: _Site) -> Rejection | None:
    """Where the sums cost more than the copy: each further product reads and stores what those before it have summed."""
    value = site.concat.outputs[0]
    further = sum(begin < end for begin, end in pairwise(site.cuts)) - 1
    saved = 2 * tensor_type(value).size_bytes
    cost = sum(2 * further * tensor_type(product.node.outputs[0]).size_bytes for product in site.products)
    launches = further * len(site.products)
    if saved + LAUNCH_BYTES > cost + launches * LAUNCH_BYTES:
        return None
    reason = f"it would save {saved} bytes and 1 launches, and cost {cost} bytes and {launches} launches"
    return Rejection(f"%{value.name} is joined: {reason}", (site.concat, *(product.node for product in site.products)))


def _shared_weight(site: _Site, alike: Container[tuple[ir.Node, int]]) -> Rejection | None:
    """Whether a large weight would exist twice, because somebody reads it besides those who cut it alike, along the same axis."""
    for weight, axis in dict.fromkeys((product.weight, product.weight_axis) for product in site.products):
        others = [reader for reader in weight.consumers() if (reader, axis) not in alike]
        if others and tensor_type(weight).size_bytes > LAUNCH_BYTES:
            reason = f"%{site.concat.outputs[0].name} is joined: %{weight.name} is also read by {others[0].op_type}"
            return Rejection(reason, (site.concat, others[0]))
    return None


def _rewrite(model: ir.Model, site: _Site, weights: _Weights) -> None:
    """Put sums in the place of the products. `weights` has the parts that other sites have made."""
    for product in site.products:
        nodes = list(_sums(model, site, product, weights))
        replace_node(model, product.node, nodes, [nodes[-1].outputs[0]])
    remove_nodes([site.concat])
    drop_unused_constants(model, [product.weight for product in site.products])


def _sums(model: ir.Model, site: _Site, product: _Product, weights: _Weights) -> Iterator[ir.Node]:
    """The first product, with the bias, then each further one and its sum with those before it."""
    node, so_far = product.node, None
    for piece, (begin, end) in zip(site.concat.inputs, pairwise(site.cuts), strict=True):
        if begin == end:
            continue
        part = _cut(model, product, [(begin, end)], weights)
        operands = [piece, part, *([] if so_far else node.inputs[2:])]
        yield (made := ir.Node(node.domain, node.op_type, operands, node.attributes))
        if so_far is not None:
            yield (made := ir.node("Add", [made.outputs[0], so_far]))
        so_far = made.outputs[0]


def _cut(model: ir.Model, product: _Product, cuts: Sequence[tuple[int, int]], weights: _Weights) -> ir.Value:
    """Parts of a weight along the contracted axis, one behind the other, which is not made before it is read."""
    axis, key = product.weight_axis, (product.weight, product.weight_axis, *cuts)
    if key not in weights:
        tensor = constant_tensor(product.weight)
        assert tensor is not None
        places = [(slice(None),) * axis + (slice(begin, end),) for begin, end in cuts]
        shape = list(tensor.shape.numpy())
        shape[axis] = sum(end - begin for begin, end in cuts)
        lazy = ir.LazyTensor(
            lambda: ir.tensor(np.concatenate([tensor.numpy()[place] for place in places], axis)),
            dtype=tensor.dtype,
            shape=ir.Shape(shape),
        )
        weights[key] = add_constant(model, lazy, f"{product.weight.name}_part")
    return weights[key]
