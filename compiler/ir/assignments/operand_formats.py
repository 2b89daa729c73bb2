"""In which formats nodes are to read their operands: data in the graph, which one pass assigns and another acts on.

What decides them, how exactly a node is to be computed, may be data in the graph, too, where that is not what the user asked for
all of it. Both are metadata of the node, so that they are saved with the model, and may differ from node to node; what passes
make of a node has its precision. Formats of few bits are QuantizeLinear and DequantizeLinear in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, get_args

import onnx_ir as ir

from ....runtime.precision import PRECISIONS, Precision

Format: TypeAlias = Literal["bfloat16", "float16"]
Formats: TypeAlias = Mapping[int, Format]  # by the operand's position; others are read as they are
FORMATS: dict[str, Format] = {name: name for name in get_args(Format)}
FORMATS_KEY = "prefuse.formats"  # metadata of a node: the formats of its operands, as in "0=bfloat16,1=bfloat16"
PRECISION_KEY = "prefuse.precision"  # metadata of a node: its precision, as "float32-fast"
CHOICES_KEY = "prefuse.choices"  # metadata of a model: how the formats of its nodes were chosen, in lines for its report
_RISING: tuple[Precision, ...] = ("bfloat16", "float16", "float32-fast", "float32")
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
