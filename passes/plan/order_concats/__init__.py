"""order-concats: operands of a Concat come in the order in which they lie in memory, so that nothing need be copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.aliases import Aliases, find_aliases, is_outermost
from ....compiler.ir.facts import tensor_type
from ....compiler.ir.rewriter import Rejection, drop_unused_constants, replace_node
from ....compiler.pipeline import Context, Pass
from .products import Site, WeightParts, find_site

_Order = tuple[int, ...]


@dataclass(frozen=True)
class OrderConcats(Pass):
    """Join the operands of a Concat in an order in which they can be written where it lies.

    Before:  x = Concat(e, f);  h = Cell(x);  z = Concat(h, f, e);  y = MatMul(z, w)
    After:   x = Concat(e, f);  h = Cell(x);  z = Concat(h, e, f);  y = MatMul(z, v)      with v the rows of w in that order

    Legal when only MatMuls, Gemms and convolutions without groups read the Concat, all of them over its axis, by constants that
    only products of Concats read which take the same order. Worth it when more bytes need no copy then, and they are at least
    half of the Concat. Sums are rounded in another order.
    """

    name: ClassVar[str] = "order-concats"

    def run(self, model: ir.Model, context: Context) -> bool:
        concats = [node for node in model.graph if node.op_type == "Concat" and node.domain == ""]
        if not concats:
            return False
        aliases = find_aliases(model.graph, model.graph.outputs)
        matches = [find_site(concat, aliases) for concat in concats]  # concat-to-split-weight says why others are none
        sites = [match for match in matches if isinstance(match, Site)]
        parts, changed = WeightParts(model), False
        for alike in _sharing_weights(sites):
            order = _best_order(alike, aliases)
            if isinstance(order, Rejection):
                context.reject(self.name, order)
            elif order is not None:
                for site in alike:
                    _reorder(model, site, order, parts)
                changed = True
        return changed


def _sharing_weights(sites: Sequence[Site]) -> list[list[Site]]:
    """The sites by the weights of their products, which follow one order of operands."""
    alike: dict[object, list[Site]] = defaultdict(list)
    for site in sites:
        alike[(site.cuts, *((product.weight, product.weight_axis) for product in site.products))].append(site)
    return list(alike.values())


def _best_order(alike: Sequence[Site], aliases: Aliases) -> _Order | Rejection | None:
    """The order in which most bytes of some Concats need no copy that do now; or why it is not theirs; None if there is none."""
    gains: dict[_Order, int] = defaultdict(int)
    for site in alike:
        order, gain = _order_of_places(site.concat, aliases)
        gains[order] += gain
    best = max(gains, key=lambda order: gains[order])
    if not gains[best]:
        return None
    products = {product.node for site in alike for product in site.products}
    for weight in (product.weight for product in alike[0].products):
        if other := next((reader for reader in weight.consumers() if reader not in products), None):
            name = alike[0].concat.outputs[0].name
            return Rejection(f"%{name} keeps its order: %{weight.name} is also read by {other.op_type}", (alike[0].concat, other))
    return best


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


def _reorder(model: ir.Model, site: Site, order: _Order, parts: WeightParts) -> None:
    """Join the operands in another order, and read the weights in that order too."""
    concat = ir.Node("", "Concat", [site.concat.inputs[index] for index in order], site.concat.attributes)
    replace_node(model, site.concat, [concat], concat.outputs)
    cuts = [(site.cuts[index], site.cuts[index + 1]) for index in order]
    for product in site.products:
        product.node.replace_input_with(1, parts.of(product, cuts))
    drop_unused_constants(model, [product.weight for product in site.products])
