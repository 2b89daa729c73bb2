"""Nodes that work on other axes when their images lie channels-last: pointwise ones, and those that only move elements."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from ....compiler.ir.aliases import is_outermost
from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.facts import has_static_type, tensor_type
from ....compiler.ir.functions import body_of, is_fused
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import int_constants, static_shape
from ....kernels.cost.memory import MoveCosts
from .forms import Flexible, conversion_bytes, is_image, to_first, to_last

MEANS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax", "ReduceMax": "ReduceMax", "ReduceMean": "ReduceMean"}
WINDOWS = ("AveragePool", "Conv", "ConvTranspose", "MaxPool")
_MOVERS = ("Concat", "Pad", "Resize", "Slice", "Split")


def pointwise_form(model: ir.Model, node: ir.Node, nodes: Sequence[ir.Node]) -> Flexible | None:
    """Of a node or group without an anchor."""
    found = _image_operands(model, node, nodes, None)
    return Flexible(node, "other-axes", found) if found else None


def moved_form(model: ir.Model, node: ir.Node, anchor: ir.Node, nodes: Sequence[ir.Node], costs: MoveCosts) -> Flexible | None:
    """Of operators that are the same in both layouts but for the numbers of their axes, with their followers."""
    if anchor.op_type in MEANS:
        return _mean(model, node, anchor)
    if anchor.op_type not in _MOVERS or not all(is_image(output) for output in anchor.outputs):
        return None
    found = _image_operands(model, node, nodes, anchor)
    if not found or axes_of(anchor, _argument(model, node)) is None:
        return None
    first, last = _moving_cycles(model, node, anchor, costs)
    return Flexible(node, "other-axes", found, first_cycles=first, last_cycles=last)


def transposed_form(
    model: ir.Model, node: ir.Node, turn: ir.Node, nodes: Sequence[ir.Node], images: Collection[ir.Value], costs: MoveCosts
) -> Flexible | None:
    """Of a group of pointwise nodes that reads an image through a Transpose, from channels-last or to it."""
    order, body, source = tuple(turn.attributes.get_ints("perm", ())), body_of(model, node), turn.inputs[0]
    if source is None or source not in body.inputs or not is_image(source) or turn.outputs[0] in body.outputs:
        return None
    position = body.inputs.index(source)
    is_either = to_last(len(order)) == to_first(len(order))
    if order == to_last(len(order)) and (not is_either or node.inputs[position] in images):
        return Flexible(node, "to-last", (position,), first_cycles=costs.conversion(conversion_bytes(source)))
    if order != to_first(len(order)) or not is_image(turn.outputs[0]):
        return None
    if len(source.uses()) > 1 or node.inputs.count(node.inputs[position]) > 1:
        return None  # two layouts of one value
    found = _image_operands(model, node, [child for child in nodes if child is not turn], None, (turn.outputs[0],))
    if found is None:
        return None
    return Flexible(node, "other-axes", found, first_cycles=costs.conversion(conversion_bytes(turn.outputs[0])))


def axes_of(node: ir.Node, arguments: dict[ir.Value, ir.Value] | None = None) -> tuple[int, ...] | None:
    """The axes that a mover of images works on, from 0; None where they are not known.

    `arguments` are what the parameters of a function's body stand for.
    """

    def constants(position: int) -> tuple[int, ...] | None:
        value = node.inputs[position] if len(node.inputs) > position else None
        return None if value is None else int_constants((arguments or {}).get(value, value))

    rank = len(static_shape(node.outputs[0]) or ())
    axes: tuple[int, ...] | None
    match node.op_type:
        case "Concat" | "Split":
            axes = (node.attributes.get_int("axis", 0),)
        case "Pad" | "Resize" if "axes" not in node.attributes and (len(node.inputs) < 4 or node.op_type == "Resize"):
            axes = tuple(range(rank))
        case _ if "axes" in node.attributes:
            axes = tuple(node.attributes.get_ints("axes"))
        case _:
            axes = constants(3 if node.op_type in ("Pad", "Slice") else 1)
    return None if axes is None else tuple(axis % rank for axis in axes)


def _argument(model: ir.Model, node: ir.Node) -> dict[ir.Value, ir.Value]:
    """What the parameters of a group stand for."""
    if not is_fused(node):
        return {}
    pairs = zip(body_of(model, node).inputs, node.inputs, strict=True)
    return {parameter: value for parameter, value in pairs if value is not None}


def _image_operands(
    model: ir.Model, node: ir.Node, nodes: Sequence[ir.Node], anchor: ir.Node | None, given: Sequence[ir.Value] = ()
) -> tuple[int, ...] | None:
    """Positions of the operands that are images of one rank; None where another one is neither constant nor one element.

    `given` are values of the group that none of `nodes` makes.
    """
    ranks = {len(static_shape(output) or ()) for output in node.outputs}
    if len(ranks) != 1 or not all(is_image(output) for output in node.outputs):
        return None
    places = {value: place for place, value in enumerate(body_of(model, node).inputs)} if is_fused(node) else None
    inner = {*given, *(output for child in nodes for output in child.outputs)}
    found: list[int] = []
    for child in nodes:
        for place, value in enumerate(child.inputs):
            if value is None or value in inner or (places is not None and value not in places):
                continue  # made inside, or a constant of the group's own
            position = place if places is None else places[value]
            argument = node.inputs[position]
            is_constant = argument is None or constant_tensor(argument) is not None
            if child is anchor:
                is_moved = place == 0 or child.op_type == "Concat"
                if is_constant == is_moved or (is_moved and not _has_rank(argument, ranks)):
                    return None
            else:
                is_moved = not is_constant and static_shape(value) not in ((), (1,))
                if is_moved and not _has_rank(argument, ranks):
                    return None
            found += [position] * is_moved
    return tuple(dict.fromkeys(found))


def _has_rank(value: ir.Value | None, ranks: set[int]) -> bool:
    return is_image(value) and len(static_shape(value) or ()) in ranks


def _mean(model: ir.Model, node: ir.Node, anchor: ir.Node) -> Flexible | None:
    """Of a reduction over all positions, alone or before pointwise nodes of a group, which see its result as it was."""
    value, position = anchor.inputs[0] if anchor.inputs else None, 0
    if is_fused(node):
        parameters = body_of(model, node).inputs
        if value is None or value not in parameters or len(value.uses()) != 1:
            return None
        position = parameters.index(value)
        value = node.inputs[position]
    if not is_image(value) or value is None or constant_tensor(value) is not None or not has_static_type(anchor.outputs[0]):
        return None
    rank = len(tensor_type(value).shape)
    axes: tuple[int, ...] | None = tuple(range(2, rank))
    if not anchor.op_type.startswith("Global"):
        axes = (
            tuple(anchor.attributes.get_ints("axes"))
            if "axes" in anchor.attributes
            else _constant_axes(anchor, _argument(model, node))
        )
    is_of_places = axes is not None and sorted(axis % rank for axis in axes) == list(range(2, rank))
    return Flexible(node, "mean", (position,)) if is_of_places else None


def _constant_axes(node: ir.Node, arguments: dict[ir.Value, ir.Value]) -> tuple[int, ...] | None:
    """Those that a reduction has as an operand; `arguments` are what parameters stand for."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    return None if axes is None else int_constants(arguments.get(axes, axes))


# Costs ---------------------------------------------------------------------------------------------------------------


def _moving_cycles(model: ir.Model, node: ir.Node, anchor: ir.Node, costs: MoveCosts) -> tuple[float, float]:
    """What a mover costs channels-first and channels-last: nothing where its parts are contiguous and nothing follows it."""
    if anchor.op_type not in ("Concat", "Slice", "Split"):
        return 0.0, 0.0
    whole = anchor.outputs[0] if anchor.op_type == "Concat" else anchor.inputs[0]
    shape = tensor_type(whole).shape  # type: ignore[arg-type]
    axes = axes_of(anchor, _argument(model, node)) or ()
    turned = tuple(shape[axis] for axis in to_last(len(shape)))
    free = [
        not is_fused(node) and all(is_outermost(extents, axis) for axis in places)
        for extents, places in ((shape, axes), (turned, [to_first(len(shape))[axis] for axis in axes]))
    ]
    copied = sum(tensor_type(output).size_bytes for output in anchor.outputs)
    if anchor.op_type != "Concat":
        last = 0.0 if free[1] or _is_joined(node) else costs.copy(copied)
        return 0.0 if free[0] else costs.copy(copied), last
    apart = 0 if is_fused(node) or axes != (1,) else max(_stored_bytes(model, value) for value in node.inputs)
    first = costs.copy(_bytes_not_in_place(node)) if free[0] else costs.copy(copied)
    last = costs.copy(_bytes_not_in_place(node)) if free[1] else costs.copy(copied - apart)
    return first, last


def _bytes_not_in_place(concat: ir.Node) -> int:
    """What is copied where the result is written in place: pieces that nobody makes, or that are in other Concats, too."""
    total = copied = 0
    for value in concat.inputs:
        assert value is not None
        size_bytes = tensor_type(value).size_bytes
        joins = sum(user.op_type == "Concat" for user, _ in value.uses())
        total += size_bytes
        copied += size_bytes * (value.producer() is None or joins > 1 or value.is_graph_output())
    return total if 2 * copied > total else copied


def _stored_bytes(model: ir.Model, value: ir.Value | None) -> int:
    """Bytes of a piece of a Concat of channels that its producer can store in its place, since nobody else reads it."""
    return tensor_type(value).size_bytes if value is not None and is_stored_apart(model, value) else 0


def is_stored_apart(model: ir.Model, value: ir.Value) -> bool:
    """Whether a window makes a value that is read once, and so could store it among the channels of another one."""
    producer = value.producer()
    if producer is None or len(value.uses()) != 1 or value.is_graph_output():
        return False
    nodes = body_of(model, producer) if is_fused(producer) else (producer,)
    anchors = [
        child.op_type for child in nodes if kind_of(child) > Kind.OPERAND and child.op_type not in ("Constant", "Transpose")
    ]
    return len(anchors) == 1 and anchors[0] in WINDOWS


def _is_joined(node: ir.Node) -> bool:
    """Whether a Slice is read by a Concat of channels alone, which can read through it."""
    users = tuple(node.outputs[0].consumers())
    return len(users) == 1 and not node.outputs[0].is_graph_output() and users[0].op_type == "Concat"
