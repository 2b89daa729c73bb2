"""How many AMX products of two bfloat16 terms a chain of products may have, so that "float32-fast" keeps its error bound.

The errors of products that follow each other add up as those of a random walk do. Measured on ResNet-50, whose chain is 53
products long, all of two terms: 1.8e-5, with a bound of 2e-5. So 40 of them leave a fifth for nets that are worse.
"""

from __future__ import annotations

import onnx_ir as ir

from ...runtime.precision import TOLERANCES, Precision
from ...runtime.target import Target
from ..ir.functions import body_of, is_fused

MOST_FAST = 40
_PRODUCTS = frozenset(["Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"])


def precise_products(model: ir.Model, target: Target, precision: Precision) -> dict[ir.Node, Precision]:
    """The nodes with products that keep "float32" though "float32-fast" is wanted: as many, evenly spread, as leave at most
    `MOST_FAST` others on any chain. Linear in the nodes of the graph, which are in order."""
    if TOLERANCES[precision].terms != 2 or not target.has_tiles:
        return {}
    counts = {node: _products_of(model, node) for node in model.graph}
    depths: dict[ir.Node | None, int] = {}
    for node, count in counts.items():
        before = (depths.get(value.producer(), 0) for value in node.inputs if value is not None)
        depths[node] = max(before, default=0) + count
    longest = max(depths.values(), default=0)
    if longest <= MOST_FAST:
        return {}

    def fast_before(depth: int) -> int:
        return depth * MOST_FAST // longest

    # One with several products is fast if as many of its chain may be.
    found = (node for node, n in counts.items() if n and fast_before(depths[node]) - fast_before(depths[node] - n) < n)
    return dict.fromkeys(found, "float32")


def _products_of(model: ir.Model, node: ir.Node) -> int:
    nodes = body_of(model, node) if is_fused(node) else (node,)
    return sum(one.op_type in _PRODUCTS for one in nodes)
