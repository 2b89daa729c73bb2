"""How exactly single nodes are to be computed: data in the graph, where that is not what the user asked for all of it.

The precision is metadata of a node, so that it is saved with the model, and what passes make of the node has it, too. It says how
far kernels may round what a product reads; formats of few bits are QuantizeLinear and DequantizeLinear in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from ....runtime.precision import PRECISIONS, Precision

PRECISION_KEY = "prefuse.precision"  # metadata of a node: its precision, as "float32-fast"
CHOICES_KEY = "prefuse.choices"  # metadata of a model: how the formats of its nodes were chosen, in lines for its report
_RISING: tuple[Precision, ...] = ("bfloat16", "float16", "float32-fast", "float32")


def assign_precision(node: ir.Node, precision: Precision) -> None:
    """Let this be the precision of a node, whatever that of its program."""
    node.metadata_props[PRECISION_KEY] = precision


def precision_in(metadata: Mapping[str, str]) -> Precision | None:
    """The precision that a node's metadata assign to it; None: that of its program."""
    text = metadata.get(PRECISION_KEY)
    return next((known for known in PRECISIONS if known == text), None)


def most_exact(precisions: Iterable[Precision | None]) -> Precision | None:
    """The most exact one of those that are there; None if none is."""
    return max((one for one in precisions if one is not None), key=_RISING.index, default=None)
