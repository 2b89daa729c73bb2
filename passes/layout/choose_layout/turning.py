"""Other axes for nodes that only move elements of images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array
from ....compiler.ir.matching import static_shape
from .forms import to_first, to_last

_AXES_INPUT = {"Pad": 3, "Slice": 3}
_VECTORS = {"Pad": (1,), "Resize": (1, 2, 3)}  # operands with numbers for each axis, where a node names no axes


def turn_axes(model: ir.Model, node: ir.Node) -> list[ir.Value]:
    """Make a Concat, Pad, Resize, Slice or Split work on the same axes of an image that lies channels-last.

    Returns the constants that may be left without a reader.
    """
    rank = len(static_shape(node.inputs[0]) or ())
    if node.op_type in ("Concat", "Split"):
        node.attributes["axis"] = ir.AttrInt64("axis", to_first(rank)[node.attributes.get_int("axis", 0) % rank])
        return []
    if "axes" in node.attributes:
        node.attributes["axes"] = ir.AttrInt64s("axes", _turned_axes(node.attributes.get_ints("axes"), rank))
        return []
    position = _AXES_INPUT.get(node.op_type, len(node.inputs))
    axes = constant_array(node.inputs[position]) if position < len(node.inputs) else None
    if axes is not None:
        return _replace(model, node, position, np.array(_turned_axes(axes.reshape(-1).tolist(), rank), axes.dtype))
    if "pads" in node.attributes:  # before opset 11
        node.attributes["pads"] = ir.AttrInt64s("pads", _turned(np.array(node.attributes.get_ints("pads")), rank).tolist())
        return []
    left: list[ir.Value] = []
    for place in _VECTORS[node.op_type]:
        array = constant_array(node.inputs[place]) if place < len(node.inputs) else None
        if array is not None and array.size:
            left += _replace(model, node, place, _turned(array, rank))
    return left


def _turned_axes(axes: Sequence[int], rank: int) -> list[int]:
    return [to_first(rank)[axis % rank] for axis in axes]


def _turned(numbers: np.ndarray, rank: int) -> np.ndarray:
    """A number for each axis, or begins and then ends."""
    return np.ascontiguousarray(numbers.reshape(-1, rank)[:, list(to_last(rank))].reshape(-1))


def _replace(model: ir.Model, node: ir.Node, position: int, array: np.ndarray) -> list[ir.Value]:
    old = node.inputs[position]
    assert old is not None
    node.replace_input_with(position, add_constant(model, array, str(old.name)))
    return [old]
