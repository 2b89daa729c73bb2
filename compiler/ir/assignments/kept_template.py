"""Which kernel template must compute a product, where its numbers are to be those of another: data in the graph.

A piece of a product is to have the bits of the whole, and another template might be the cheapest one for it alone. The assignment
is metadata of the node; what no template of the name takes is computed by another, so whoever assigns one asks first.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

TEMPLATE_KEY = "prefuse.template"  # metadata of a node: the template's name


def keep_template(node: ir.Node, template: str) -> None:
    """Let the template of this name compute a product."""
    node.metadata_props[TEMPLATE_KEY] = template


def kept_template(metadata: Mapping[str, str]) -> str | None:
    """The template that a node's metadata name, or None."""
    return metadata.get(TEMPLATE_KEY)
