"""concat-to-split-weight: a product of concatenated operands is the sum of their products by the parts of its weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.aliases import find_aliases
from ...compiler.ir.facts import tensor_type
from ...compiler.ir.rewriter import Rejection, drop_unused_constants, remove_nodes, replace_node
from ...compiler.pipeline import Context, Pass
from ..plan.order_concats.products import Cuts, Product, Site, WeightParts, find_site
from .merge_parallel_matmul.worth import LAUNCH_BYTES


@dataclass(frozen=True)
class ConcatToSplitWeight(Pass):
    """Multiply the operands of a Concat one by one, instead of copying them side by side.

    Before:  c = Concat<axis=1>(a, b);  y = MatMul(c, w)
    After:   s = MatMul(a, w_top);  t = MatMul(b, w_bottom);  y = Add(t, s)

    Legal when only MatMuls, Gemms and convolutions without groups read the Concat, all of them over its axis, by constants that
    nothing else reads. Worth it when copying the operands costs more than storing and reading the sums: never where the
    operands can be written where the Concat lies. Sums are rounded in another order; those of float16 are not parted, as a part
    may be beyond what float16 holds where all of it is not.
    """

    name: ClassVar[str] = "concat-to-split-weight"

    def run(self, model: ir.Model, context: Context) -> bool:
        concats = [node for node in model.graph if node.op_type == "Concat" and node.domain == ""]
        if not concats:
            return False
        aliases = find_aliases(model.graph, model.graph.outputs)
        matches = [find_site(concat, aliases) for concat in concats]
        split, rejections = _worthwhile([match for match in matches if isinstance(match, Site)])
        parts = WeightParts(model)
        for site in split:
            _rewrite(model, site, parts)
        for match in (*matches, *rejections):
            if isinstance(match, Rejection):
                context.reject(self.name, match)
        return bool(split)


def _worthwhile(sites: Sequence[Site]) -> tuple[list[Site], list[Rejection]]:
    """The Concats that cost more than sums do, and why others stay."""
    costs = {site.concat: _too_large(site) or _costly(site) for site in sites}
    cheap = [site for site in sites if costs[site.concat] is None]
    alike: dict[Cuts, set[tuple[ir.Node, int]]] = defaultdict(set)
    for site in cheap:
        alike[site.cuts].update((product.node, product.weight_axis) for product in site.products)
    shared = {site.concat: _shared_weight(site, alike[site.cuts]) for site in cheap}
    faults = [fault for fault in (*costs.values(), *shared.values()) if fault is not None]
    return [site for site in cheap if shared[site.concat] is None], faults


def _too_large(site: Site) -> Rejection | None:
    """Where a sum of a part may be beyond what float16 holds: nothing bounds the operands."""
    products = [product.node for product in site.products if product.node.outputs[0].dtype == ir.DataType.FLOAT16]
    if not products:
        return None
    reason = f"%{site.concat.outputs[0].name} is joined: sums of its parts may be too large for float16"
    return Rejection(reason, (site.concat, *products))


def _costly(site: Site) -> Rejection | None:
    """Where the sums cost more than the copy: each further product reads and stores what those before it have summed."""
    value = site.concat.outputs[0]
    further = sum(begin < end for begin, end in pairwise(site.cuts)) - 1
    saved = 2 * tensor_type(value).hinted.size_bytes
    cost = sum(2 * further * tensor_type(product.node.outputs[0]).hinted.size_bytes for product in site.products)
    launches = further * len(site.products)
    if saved + LAUNCH_BYTES > cost + launches * LAUNCH_BYTES:
        return None
    reason = f"it would save {saved} bytes and 1 launches, and cost {cost} bytes and {launches} launches"
    return Rejection(f"%{value.name} is joined: {reason}", (site.concat, *(product.node for product in site.products)))


def _shared_weight(site: Site, alike: Container[tuple[ir.Node, int]]) -> Rejection | None:
    """Whether a large weight would exist twice, because somebody reads it besides those who cut it alike, along the same axis."""
    for weight, axis in dict.fromkeys((product.weight, product.weight_axis) for product in site.products):
        others = [reader for reader in weight.consumers() if (reader, axis) not in alike]
        if others and tensor_type(weight).size_bytes > LAUNCH_BYTES:
            reason = f"%{site.concat.outputs[0].name} is joined: %{weight.name} is also read by {others[0].op_type}"
            return Rejection(reason, (site.concat, others[0]))
    return None


def _rewrite(model: ir.Model, site: Site, parts: WeightParts) -> None:
    """Put sums in the place of the products."""
    for product in site.products:
        nodes = list(_sums(site, product, parts))
        replace_node(model, product.node, nodes, [nodes[-1].outputs[0]])
    remove_nodes([site.concat])
    drop_unused_constants(model, [product.weight for product in site.products])


def _sums(site: Site, product: Product, parts: WeightParts) -> Iterator[ir.Node]:
    """The first product, with the bias, then each further one and its sum with those before it."""
    node, so_far = product.node, None
    for piece, (begin, end) in zip(site.concat.inputs, pairwise(site.cuts), strict=True):
        if begin == end:
            continue
        part = parts.of(product, [(begin, end)])
        operands = [piece, part, *([] if so_far else node.inputs[2:])]
        yield (made := ir.Node(node.domain, node.op_type, operands, node.attributes))
        if so_far is not None:
            yield (made := ir.node("Add", [made.outputs[0], so_far]))
        so_far = made.outputs[0]
