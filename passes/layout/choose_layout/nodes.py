"""What a node can do with values that lie channels-last: how it would be written, and what it would cost."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, prod

import onnx_ir as ir

from ....compiler.ir.assignments.kernel_choice import AS_IT_IS, Ask, NoKernel, Variant
from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.facts import has_static_type
from ....compiler.ir.functions import body_of, is_fused
from ....compiler.ir.kinds import Kind, is_known, is_pointwise, kind_of
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection
from ....kernels.cost.memory import MoveCosts, move_costs
from ....runtime.target import Target
from .edges import EDGES, edge_form
from .forms import Flexible, WindowKernels, as_it_lies, conversion_bytes, is_image
from .movers import moved_form, pointwise_form, transposed_form

POOLS = ("AveragePool", "MaxPool")
CONVOLUTIONS = ("Conv", "ConvTranspose")
_MOST_DIMENSIONS = 3  # spatial ones
_NO_KERNEL = 1e12  # cycles, where no template computes a convolution and TVM's unscheduled loops would


def flexible_form(
    model: ir.Model, node: ir.Node, target: Target, ask: Ask, images: Collection[ir.Value] = ()
) -> Flexible | Rejection | None:
    """What a node permits: a Rejection for a convolution that has no kernel channels-last; None for what has one layout only.

    `ask` tells the kernels of convolutions; `images` are the values that windows, or nodes after them, make.
    """
    nodes, costs = (
        [child for child in body_of(model, node) if child.op_type != "Constant"] if is_fused(node) else [node],
        move_costs(target.machine),
    )
    if not is_fused(node) and node.op_type in EDGES and is_known(node):
        return edge_form(model, node, images, costs)
    anchors = [child for child in nodes if not is_pointwise(child) and kind_of(child) is not Kind.OPERAND]
    if not all(is_known(child) for child in nodes):
        return None
    if any(child.op_type == "Transpose" for child in anchors):
        return transposed_form(model, node, anchors[0], nodes, images, costs) if len(anchors) == 1 else None
    if not anchors:
        return pointwise_form(model, node, nodes)
    convolution = next((child.op_type for child in anchors if child.op_type in CONVOLUTIONS), None)
    if len(anchors) > 1:
        why = f"the group of {convolution} has other operators that are not pointwise"
        return Rejection(why, (node,)) if convolution else None
    (anchor,) = anchors
    if convolution:
        return _convolution(model, node, anchor, nodes, target, ask)
    if anchor.op_type in POOLS:
        found = _window_operands(model, node, anchor, nodes)
        return None if isinstance(found, Rejection) else Flexible(node, "window", found)
    return moved_form(model, node, anchor, nodes, costs)


def _convolution(
    model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: list[ir.Node], target: Target, ask: Ask
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
    return _window_form(node, found, ask, move_costs(target.machine))


def _window_form(node: ir.Node, found: tuple[int, ...], ask: Ask, costs: MoveCosts) -> Flexible | Rejection:
    """A convolution that may lie in each layout, by its kernels: channels-first, channels-last, and that of an image which lies
    channels-first and a result channels-last."""
    last = ask(node, Variant(channels_last=found, has_channels_last_results=True))
    if isinstance(last, NoKernel):
        return Rejection(f"no kernel computes it channels-last: {last}", (node,))
    first, direct = ask(node, AS_IT_IS), ask(node, Variant(channels_last=found[1:], has_channels_last_results=True))
    more = inf if isinstance(direct, NoKernel) else max(direct.cycles - last.cycles, 0.0)
    image = node.inputs[found[0]]
    is_direct = image is not None and more <= costs.conversion(conversion_bytes(image))  # else it had better be converted
    return Flexible(
        node,
        "window",
        found,
        direct=found[:1] if is_direct else (),
        first_cycles=_NO_KERNEL if isinstance(first, NoKernel) else first.cycles,
        last_cycles=last.cycles,
        direct_cycles=more if is_direct else 0.0,
        kernels=WindowKernels(first, last, direct),
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
    return ""


def _window_operands(model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: list[ir.Node]) -> tuple[int, ...] | Rejection:
    """Positions of the data of a window, first, and of the operands of its followers that lie as its result does."""
    parameters = body_of(model, node).inputs if is_fused(node) else node.inputs
    shape, inner = static_shape(anchor.outputs[0]), {output for child in nodes for output in child.outputs}
    source = as_it_lies(anchor.inputs[0])
    if source not in parameters:  # others read what is made of it, too
        source = anchor.inputs[0]
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
