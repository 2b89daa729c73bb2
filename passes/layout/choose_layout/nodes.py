"""What a node can do with values that lie channels-last: how it would be written, and what it would cost."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, prod

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.facts import has_static_type, tensor_type
from ....compiler.ir.functions import body_of, is_fused
from ....compiler.ir.kinds import Kind, is_known, is_pointwise, kind_of
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection
from ....kernels.cost.amx import tile_convolution_cycles
from ....kernels.cost.convolution import (
    Convolution,
    channels_first_cycles,
    channels_last_cycles,
    direct_cycles,
    in_pairs,
    pays_to_fill_pairs,
)
from ....kernels.cost.memory import conversion_cycles, scattered_cycles
from ....kernels.cost.winograd import winograd_choice
from ....runtime.hardware.machine import Machine
from ....runtime.precision import TOLERANCES, Precision
from ....runtime.target import Target
from .edges import EDGES, edge_form
from .extents import convolution_extents, numbers_of, phase_extents
from .forms import Flexible, as_it_lies, conversion_bytes, is_image
from .movers import moved_form, pointwise_form, transposed_form

_CONVOLVED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
POOLS = ("AveragePool", "MaxPool")
CONVOLUTIONS = ("Conv", "ConvTranspose")
_MOST_DIMENSIONS = 3  # spatial ones
_MAX_PHASES = 16  # of a transposed convolution with holes or of volumes, each of which may read the input in its own way


def flexible_form(
    model: ir.Model, node: ir.Node, target: Target, precision: Precision = "float32", images: Collection[ir.Value] = ()
) -> Flexible | Rejection | None:
    """What a node permits: a Rejection for a convolution that has no kernel channels-last; None for what has one layout only.

    `images` are the values that windows, or nodes after them, make.
    """
    nodes = [child for child in body_of(model, node) if child.op_type != "Constant"] if is_fused(node) else [node]
    if not is_fused(node) and node.op_type in EDGES and is_known(node):
        return edge_form(model, node, images)
    anchors = [child for child in nodes if not is_pointwise(child) and kind_of(child) is not Kind.OPERAND]
    if not all(is_known(child) for child in nodes):
        return None
    if any(child.op_type == "Transpose" for child in anchors):
        return transposed_form(model, node, anchors[0], nodes, images) if len(anchors) == 1 else None
    if not anchors:
        return pointwise_form(model, node, nodes)
    convolution = next((child.op_type for child in anchors if child.op_type in CONVOLUTIONS), None)
    if len(anchors) > 1:
        why = f"the group of {convolution} has other operators that are not pointwise"
        return Rejection(why, (node,)) if convolution else None
    (anchor,) = anchors
    if convolution:
        return _convolution(model, node, anchor, nodes, target, precision)
    if anchor.op_type in POOLS:
        found = _window_operands(model, node, anchor, nodes)
        return None if isinstance(found, Rejection) else Flexible(node, "window", found)
    return moved_form(model, node, anchor, nodes)


def _convolution(
    model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: list[ir.Node], target: Target, precision: Precision
) -> Flexible | Rejection:
    """A convolution and what follows it."""
    source, weights = (as_it_lies(value) for value in anchor.inputs[:2])
    assert source is not None
    assert weights is not None
    if fault := _convolution_fault(anchor, source, weights, target):
        return Rejection(fault, (node,))
    found = _window_operands(model, node, anchor, nodes)
    if isinstance(found, Rejection):
        return found
    is_conv = anchor.op_type == "Conv"
    phases = 1 if is_conv else prod(numbers_of(anchor, "strides"))
    one = convolution_extents(anchor) if is_conv else phase_extents(anchor)
    scattered = scattered_cycles(tensor_type(anchor.outputs[0]).elements) if phases > 1 else 0.0
    is_narrow = source.dtype != anchor.outputs[0].dtype
    machine = _machine(source, target)
    last_cycles, transformed = _cycles_of_last(model, node, anchor, one, target, precision)
    saved = max(last_cycles - transformed, 0.0)
    needs_last = saved > conversion_cycles(conversion_bytes(source))  # Winograd's tiles are read channels-last only
    return Flexible(
        node,
        "window",
        found,
        direct=() if is_narrow or needs_last or (one.is_depthwise and is_conv) else found[:1],
        first_cycles=channels_first_cycles(one, machine) + scattered,
        last_cycles=last_cycles - saved,
        direct_cycles=direct_cycles(one, machine) + saved,
    )


def _convolution_fault(anchor: ir.Node, source: ir.Value, weights: ir.Value, target: Target) -> str:
    """Why a convolution stays channels-first; empty if it need not."""
    kind = anchor.op_type
    if source.shape is not None and (dimensions := len(source.shape) - 2) not in range(1, _MOST_DIMENSIONS + 1):
        return f"{kind} has {dimensions} spatial dimensions, and the kernel {_MOST_DIMENSIONS}"
    if not all(has_static_type(value) for value in (source, weights, anchor.outputs[0])):
        return f"the shape of {kind} is symbolic"
    if not target.has_channels_last:
        return f"no kernel computes {kind} channels-last on {target.kind}"
    if source.dtype not in _CONVOLVED:
        return f"no kernel computes {kind} of {tensor_type(source).dtype} channels-last"
    phases = prod(numbers_of(anchor, "strides"))
    if kind == "ConvTranspose" and phases > _MAX_PHASES and (where := _many_reads(anchor)):
        return f"ConvTranspose {where} has {phases} phases of output positions, more than {_MAX_PHASES}"
    return ""


def _machine(source: ir.Value, target: Target) -> Machine:
    """The machine as it computes the numbers that a convolution of `source` adds up."""
    return target.machine.of_items(tensor_type(source).bytes_of(1))


def _cycles_of_last(
    model: ir.Model, node: ir.Node, anchor: ir.Node, one: Convolution, target: Target, precision: Precision
) -> tuple[float, float]:
    """What a convolution whose values lie channels-last costs directly, and by Winograd's, infinite where that is not made."""
    source, weights = (as_it_lies(value) for value in anchor.inputs[:2])
    assert source is not None
    assert weights is not None
    machine = _machine(source, target)
    is_narrow = source.dtype != anchor.outputs[0].dtype
    may_pair = is_narrow and weights.dtype == source.dtype
    fills_pairs = anchor.op_type == "Conv" and target.multiplies_pairs and pays_to_fill_pairs(one, machine)
    cycles = channels_last_cycles(one, machine)
    if may_pair and target.has("avx512_bf16") and (one.inputs % 2 == 0 or fills_pairs):  # side by side channels-last only
        cycles = channels_last_cycles(in_pairs(one), machine)
    has_weights = _is_constant(model, node, weights)
    is_plain = has_weights and source.dtype == ir.DataType.FLOAT
    is_bfloat16 = has_weights and is_narrow and source.dtype == ir.DataType.BFLOAT16
    if target.has_tiles and (is_plain or is_bfloat16):
        cycles = min(cycles, tile_convolution_cycles(one, 1 if is_bfloat16 else TOLERANCES[precision].terms, machine))
    is_plane = anchor.op_type == "Conv" and len(tensor_type(source).shape) == 4
    may_transform = is_plane and (is_plain or is_bfloat16)
    choice = winograd_choice(one, machine, precision) if may_transform else None
    return cycles, inf if choice is None else choice.cycles


def _many_reads(anchor: ir.Node) -> str:
    """Why the phases of a transposed convolution may read the input in more ways than four for each of two dimensions."""
    if prod(numbers_of(anchor, "dilations")) > 1:
        return "with holes"
    return "of volumes" if len(tensor_type(anchor.outputs[0]).shape) > 4 else ""


def _is_constant(model: ir.Model, node: ir.Node, operand: ir.Value) -> bool:
    """Whether an operand of the anchor of a node never changes."""
    outside = node.inputs[body_of(model, node).inputs.index(operand)] if is_fused(node) else operand
    return outside is not None and constant_tensor(outside) is not None


def _window_operands(model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: list[ir.Node]) -> tuple[int, ...] | Rejection:
    """Positions of the data of a window, first, and of the operands of its followers that lie as its result does."""
    parameters = body_of(model, node).inputs if is_fused(node) else node.inputs
    shape, inner = static_shape(anchor.outputs[0]), {output for child in nodes for output in child.outputs}
    source = as_it_lies(anchor.inputs[0])
    if not is_image(source) or sum(output.name != "" for output in anchor.outputs) != 1:
        return Rejection(f"{anchor.op_type} is not of one image", (node,))
    found = [source]
    for child in nodes:
        if child is anchor or (kind_of(child) is Kind.OPERAND and anchor in child.outputs[0].consumers()):
            continue
        if static_shape(child.outputs[0]) != shape or (source is not None and source in inner):
            return Rejection(f"{child.op_type} does not follow {anchor.op_type} element by element", (node,))
        for value in child.inputs:
            if value is None or value in inner or _is_beside_positions(value, len(shape or ())):
                continue
            if static_shape(value) != shape:
                return Rejection(f"an operand of {child.op_type} of shape {value.shape} lies channels-first", (node,))
            found.append(value)
    positions = tuple(dict.fromkeys(parameters.index(value) for value in found if value is not None))
    if any(constant_tensor(value) is not None for i in positions if (value := node.inputs[i]) is not None):
        return Rejection(f"{anchor.op_type} has a constant image", (node,))
    return positions


def _is_beside_positions(value: ir.Value, rank: int) -> bool:
    """Whether a value spans the channels alone or the positions alone of `rank` dimensions, so that any layout is as good."""
    shape = static_shape(value)
    if shape is None or len(shape) > rank:
        return False
    _, channels, *places = (1,) * (rank - len(shape)) + shape
    return channels == 1 or prod(places) == 1
