"""In which format a node is to read its operands: data in the graph, which one pass assigns and another acts on.

The assignment is metadata of the node, so that it prints, is saved with the model, and may differ from node to node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import onnx_ir as ir

Format: TypeAlias = Literal["bfloat16", "float16"]
Formats: TypeAlias = Mapping[int, Format]  # by the operand's position; others are read as they are
FORMATS: dict[str, Format] = {name: name for name in get_args(Format)}
FORMATS_KEY = "prefuse.formats"  # metadata of a node: the formats of its operands, as in "0=bfloat16,1=bfloat16"
_ENTRY = re.compile(rf"(\d+)=({'|'.join(FORMATS)})(?:,|$)")


def operand_formats(node: ir.Node) -> dict[int, Format]:
    """The formats assigned to a node's operands by position, empty where there are none."""
    entries = _ENTRY.findall(node.metadata_props.get(FORMATS_KEY, ""))
    return {int(position): FORMATS[name] for position, name in entries if int(position) < len(node.inputs)}


def assign_operand_formats(node: ir.Node, formats: Formats) -> bool:
    """Let these be the formats of a node's operands, and no others; return whether that is new."""
    before = node.metadata_props.pop(FORMATS_KEY, None)
    if formats:
        node.metadata_props[FORMATS_KEY] = ",".join(f"{position}={formats[position]}" for position in sorted(formats))
    return node.metadata_props.get(FORMATS_KEY) != before
