"""What a node can do with values that lie channels-last: how it would be written, and what it would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from ...compiler.ir.aliases import is_outermost
from ...compiler.ir.constants import constant_tensor
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.functions import body_of, is_fused
from ...compiler.ir.kinds import is_known, is_pointwise
from ...compiler.ir.rewriter import Rejection
from ...kernels.costs import Convolution, channels_first_cycles, channels_last_cycles, direct_cycles, winograd_choice
from ...runtime.precision import Precision
from ...runtime.target import Target
from ..canonicalization.scope import int_constants, static_shape

_CONVOLVED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
POOLS = ("AveragePool", "MaxPool")
MEANS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax", "ReduceMax": "ReduceMax", "ReduceMean": "ReduceMean"}

Form = Literal["window", "pointwise", "concat", "slice", "mean"]


@dataclass(frozen=True, slots=True)
class Flexible:
    """A node that may compute channels-last: its operands at the positions `operands` and its output then lie so.

    `direct` are positions that it can also read channels-first when it is channels-last, at the cost of `direct_cycles`. A "mean"
    has no result that lies one way or the other. Costs are cycles; those of nodes that only move bytes are the same in both
    layouts, and left out.
    """

    node: ir.Node
    form: Form
    operands: tuple[int, ...]
    direct: tuple[int, ...] = ()
    first_cycles: float = 0.0
    last_cycles: float = 0.0
    direct_cycles: float = 0.0


def flexible_form(
    model: ir.Model, node: ir.Node, target: Target, precision: Precision = "float32"
) -> Flexible | Rejection | None:
    """What a node permits: a Rejection for a convolution that has no kernel channels-last; None for what has one layout only."""
    nodes = [child for child in body_of(model, node) if child.op_type != "Constant"] if is_fused(node) else [node]
    anchors = [child for child in nodes if not is_pointwise(child)]
    if any(child.op_type == "Transpose" for child in anchors) or not all(is_known(child) for child in nodes):
        return None
    if len(anchors) > 1 or len(node.outputs) != 1:
        why = "has several results" if len(anchors) == 1 else "has other operators that are not pointwise"
        is_convolution = any(child.op_type == "Conv" for child in anchors)
        return Rejection(f"the group of Conv {why}", (node,)) if is_convolution else None
    if not anchors:
        return _pointwise(node)
    (anchor,) = anchors
    if anchor.op_type == "Conv":
        return _convolution(model, node, anchor, nodes, target, precision)
    if anchor.op_type in POOLS:
        found = _window_operands(model, node, anchor, nodes)
        return None if isinstance(found, Rejection) else Flexible(node, "window", found)
    return None if is_fused(node) or not node.inputs or not _is_image(node.inputs[0]) else _moved(node)


def is_laid(value: ir.Value) -> bool:
    """Whether the order of the dimensions of an image matters in memory: it has several channels and several positions."""
    shape = static_shape(value) or ()
    return len(shape) == 4 and shape[1] > 1 and shape[2] * shape[3] > 1


def conversion_bytes(value: ir.Value) -> int:
    """Bytes of a value that a kernel must move to give it the other layout."""
    return tensor_type(value).size_bytes if is_laid(value) else 0


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a Slice or a reduction of an image works on, from 0; None where they are not known."""
    if node.op_type.startswith("Global"):
        return 2, 3
    position = 3 if node.op_type == "Slice" else 1
    axes = tuple(node.attributes.get_ints("axes")) if "axes" in node.attributes else None
    if axes is None and len(node.inputs) > position:
        axes = int_constants(node.inputs[position])
    return None if axes is None else tuple(axis % 4 for axis in axes)


def _is_image(value: ir.Value | None) -> bool:
    return value is not None and has_static_type(value) and len(tensor_type(value).shape) == 4


def _convolution(
    model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: list[ir.Node], target: Target, precision: Precision
) -> Flexible | Rejection:
    """A convolution and what follows it."""
    source, weights = anchor.inputs[:2]
    assert source is not None
    assert weights is not None
    if source.shape is not None and len(source.shape) != 4:
        return Rejection(f"Conv has {len(source.shape) - 2} spatial dimensions, and the kernel has two", (node,))
    if not all(has_static_type(value) for value in (source, weights, anchor.outputs[0])):
        return Rejection("the shape of Conv is symbolic", (node,))
    if target.is_gpu:
        return Rejection(f"no kernel computes Conv channels-last on {target.kind}", (node,))
    if source.dtype not in _CONVOLVED:
        return Rejection(f"no kernel computes Conv of {tensor_type(source).dtype} channels-last", (node,))
    found = _window_operands(model, node, anchor, nodes)
    if isinstance(found, Rejection):
        return found
    element_bytes = max(4, tensor_type(source).size_bytes // max(tensor_type(source).elements, 1))  # what it computes in
    lanes, one = target.vector_lanes * 4 // element_bytes, _extents(anchor)
    registers = target.vector_registers
    last_cycles, saved = channels_last_cycles(one, lanes, registers), 0.0
    if precision == "float32-fast" and source.dtype == ir.DataType.FLOAT and _is_constant(model, node, weights):
        choice = winograd_choice(one, lanes, registers)
        saved = 0.0 if choice is None else max(last_cycles - choice.cycles, 0.0)
    return Flexible(
        node,
        "window",
        found,
        direct=() if one.is_depthwise else found[:1],
        first_cycles=channels_first_cycles(one, lanes, registers),
        last_cycles=last_cycles - saved,
        direct_cycles=direct_cycles(one, lanes, registers) + saved,  # Winograd's tiles are read channels-last
    )


def _is_constant(model: ir.Model, node: ir.Node, operand: ir.Value) -> bool:
    """Whether an operand of the anchor of a node never changes."""
    outside = node.inputs[body_of(model, node).inputs.index(operand)] if is_fused(node) else operand
    return outside is not None and constant_tensor(outside) is not None


def _window_operands(model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: list[ir.Node]) -> tuple[int, ...] | Rejection:
    """Positions of the data of a window, first, and of the operands of its followers that lie as its result does."""
    parameters = body_of(model, node).inputs if is_fused(node) else node.inputs
    shape, inner = static_shape(anchor.outputs[0]), {output for child in nodes for output in child.outputs}
    source = anchor.inputs[0]
    if not _is_image(source) or sum(output.name != "" for output in anchor.outputs) != 1:
        return Rejection(f"{anchor.op_type} is not of one image", (node,))
    found = [source]
    for child in nodes:
        if child is anchor:
            continue
        if static_shape(child.outputs[0]) != shape or (source is not None and source in inner):
            return Rejection(f"{child.op_type} does not follow {anchor.op_type} element by element", (node,))
        for value in child.inputs:
            if value is None or value in inner or _is_beside_positions(value):
                continue
            if static_shape(value) != shape:
                return Rejection(f"an operand of {child.op_type} of shape {value.shape} lies channels-first", (node,))
            found.append(value)
    positions = tuple(dict.fromkeys(parameters.index(value) for value in found if value is not None))
    if any(constant_tensor(value) is not None for i in positions if (value := node.inputs[i]) is not None):
        return Rejection(f"{anchor.op_type} has a constant image", (node,))
    return positions


def _is_beside_positions(value: ir.Value) -> bool:
    """Whether a value spans the channels alone or the positions alone, so that any layout is as good."""
    shape = static_shape(value)
    if shape is None or len(shape) > 4:
        return False
    _, channels, height, width = (1,) * (4 - len(shape)) + shape
    return channels == 1 or height * width == 1


def _pointwise(node: ir.Node) -> Flexible | None:
    if not _is_image(node.outputs[0]):
        return None
    found = []
    for position, value in enumerate(node.inputs):
        if value is None or constant_tensor(value) is not None or static_shape(value) in ((), (1,)):
            continue
        if not _is_image(value):
            return None
        found.append(position)
    return Flexible(node, "pointwise", tuple(found)) if found else None


def _moved(node: ir.Node) -> Flexible | None:
    """Operators that are the same in both layouts but for the numbers of their axes."""
    if node.op_type == "Concat":
        images = all(_is_image(value) and value is not None and constant_tensor(value) is None for value in node.inputs)
        if not images or node.attributes.get_int("axis") % 4 != 1 or is_outermost(tensor_type(node.outputs[0]).shape, 1):
            return None  # the channels of one image are written in place, which those of its positions cannot be
        return Flexible(node, "concat", tuple(range(len(node.inputs))))
    axes = axes_of(node) if node.op_type in ("Slice", *MEANS) else None
    if axes is None or constant_tensor(_first(node)) is not None or not has_static_type(node.outputs[0]):
        return None
    if node.op_type == "Slice":
        return Flexible(node, "slice", (0,))
    return Flexible(node, "mean", (0,)) if node.op_type in MEANS and sorted(axes) == [2, 3] else None


def _first(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _extents(anchor: ir.Node) -> Convolution:
    source, weights, result = (tensor_type(value) for value in (*anchor.inputs[:2], anchor.outputs[0]) if value is not None)
    groups = anchor.attributes.get_int("group", 1)
    kernel, strides = weights.shape[2:], tuple(anchor.attributes.get_ints("strides", (1, 1)))
    dilations = anchor.attributes.get_ints("dilations", (1, 1))
    reaches = [
        (out - 1) * stride + (taps - 1) * dilation + 1
        for out, stride, taps, dilation in zip(result.shape[2:], strides, kernel, dilations, strict=True)
    ]
    overhangs = any(reach > extent for reach, extent in zip(reaches, source.shape[2:], strict=True))
    return Convolution(
        images=source.shape[0],
        groups=groups,
        inputs=weights.shape[1],
        outputs=weights.shape[0] // max(groups, 1),
        height=source.shape[2],
        width=source.shape[3],
        rows=result.shape[2],
        columns=result.shape[3],
        kernel=(kernel[0], kernel[1]),
        strides=(strides[0], strides[1]),
        dilations=(dilations[0], dilations[1]),
        is_padded=overhangs or any(anchor.attributes.get_ints("pads", ())),
        element_bytes=source.size_bytes // max(source.elements, 1),
    )
