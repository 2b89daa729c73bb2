"""Operators on images whose meaning changed with an opset, and which ONNX's version converter leaves as they were or refuses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from ..ir.constants import add_constant, constant_array
from ..ir.names import fresh_name

_RESIZE_OPSET = 10  # before, there is Upsample alone
_COORDINATES_OPSET = 11  # from here on Resize says how it maps coordinates
_TRAINING_OPSET = 14  # from here on BatchNormalization says that it trains
_TESTING_OPSET = 7  # before, it says that it does not
_POWERS_OPSET = 2  # from here on the power of LpPool is an integer; the converter refuses those before
_KEPT_DOMAIN = "prefuse.kept"  # of nodes that the converter shall not see
_TRAINING_MARK = "prefuse.training"


def respell_images_before(model: ir.Model) -> None:
    """Mark, before a conversion, what the converter would lose or refuse.

    Raises:
        UnsupportedModelError: a BatchNormalization's saved statistics, which later opsets do not have, are used.
    """
    opset = model.graph.opset_imports[""]
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        if node.op_type in ("LpPool", "GlobalLpPool") and opset < _POWERS_OPSET:
            node.attributes.add(ir.AttrInt64("p", round(node.attributes.get_float("p", 2.0))))
            node.domain = _KEPT_DOMAIN
            model.graph.opset_imports[_KEPT_DOMAIN] = 1
        elif node.op_type == "BatchNormalization" and opset < _TRAINING_OPSET:
            _mark_training(node, opset)


def respell_images_after(model: ir.Model, opset: int) -> None:
    """Give operators of a converted model, which had `opset`, the spelling in which they mean what they meant.

    Raises:
        UnsupportedModelError: there is no such spelling.
    """
    for node in list(model.graph.all_nodes()):
        if node.domain == _KEPT_DOMAIN:
            node.domain = ""
        elif node.op_type == "Resize" and node.domain == "" and opset < _COORDINATES_OPSET:
            _spell_out_resize(model, node, can_shrink=opset >= _RESIZE_OPSET)
        elif node.metadata_props.pop(_TRAINING_MARK, None):
            node.attributes.add(ir.AttrInt64("training_mode", 1))
            _add_running_statistics(model, node)
    model.graph.opset_imports.pop(_KEPT_DOMAIN, None)


def _mark_training(node: ir.Node, opset: int) -> None:
    """Remember that a BatchNormalization uses the statistics of the batch, and drop its outputs that nobody reads."""
    if any(value.consumers() or value.is_graph_output() for value in node.outputs[3:]):
        raise UnsupportedModelError(
            f"BatchNormalization {node.name or ''}".strip(), "its saved statistics are used", "export it with opset 14 or newer"
        )
    node.resize_outputs(min(len(node.outputs), 3))
    trains = len(node.outputs) > 1
    if opset < _TESTING_OPSET:
        trains = not node.attributes.get_int("is_test", 0)
        node.attributes.add(ir.AttrInt64("is_test", 1))
    if trains:
        node.metadata_props[_TRAINING_MARK] = "1"
    else:
        node.resize_outputs(1)


def _add_running_statistics(model: ir.Model, node: ir.Node) -> None:
    """Outputs that a BatchNormalization which trains must have, read or not."""
    given = len(node.outputs)
    node.resize_outputs(3)
    for output in node.outputs[given:]:
        output.name = fresh_name(model, f"{node.outputs[0].name}_statistic")


def _spell_out_resize(model: ir.Model, node: ir.Node, *, can_shrink: bool) -> None:
    """A Resize or Upsample of an old opset: output x reads x / scale, rounded down, where it shrinks up, to the nearest element.

    The rounding is what ONNX Runtime does and ONNX's own cases of opset 10 ask for. An Upsample never shrinks.
    """
    node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
    if node.attributes.get_string("mode", "nearest") in ("bilinear", "linear"):
        node.attributes.add(ir.AttrString("mode", "linear"))
        return
    if not can_shrink:
        node.attributes.add(ir.AttrString("nearest_mode", "floor"))
        return
    scales = constant_array(node.inputs[2])
    if scales is None:
        raise UnsupportedModelError(
            f"Resize {node.name or ''}".strip(), "scales of opset 10 that only a run knows", "export it with opset 11 or newer"
        )
    shrinks = bool((scales < 1).any())
    if shrinks and (scales > 1).any():
        _shrink_before(model, node, scales)
        shrinks = False
    node.attributes.add(ir.AttrString("nearest_mode", "ceil" if shrinks else "floor"))


def _shrink_before(model: ir.Model, node: ir.Node, scales: np.ndarray) -> None:
    """Let a Resize of its own shrink, since the two round differently."""
    name = fresh_name(model, f"{node.outputs[0].name}_shrunk")
    shrinking = add_constant(model, np.minimum(scales, np.float32(1)), f"{name}_scales")
    growing = add_constant(model, np.maximum(scales, np.float32(1)), f"{name}_growth")
    attributes = [*node.attributes.values(), ir.AttrString("nearest_mode", "ceil")]
    first = ir.Node("", "Resize", [node.inputs[0], None, shrinking], attributes, name=name)
    first.outputs[0].name = name
    assert node.graph is not None
    node.graph.insert_before(node, first)
    node.replace_input_with(0, first.outputs[0])
    node.replace_input_with(2, growing)
