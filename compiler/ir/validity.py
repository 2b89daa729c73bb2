"""Rules of the ONNX specification that neither onnx's checker nor its shape inference enforces, and on which kernels rely."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import onnx_ir as ir

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from .facts import source_of
from .kinds import Kind, kind_of
from .scopes import subgraphs_of

_LARGEST_BYTES = 1 << 46  # of one tensor: more than any machine has, and far from where sizes overflow

Fault = str | None
Rule = Callable[[ir.Node], Fault]


def check_nodes(model: ir.Model) -> None:
    """Raise the error of the first node that breaks a rule, as far as its shapes are known.

    Raises:
        InvalidModelError: an attribute or a shape that the operator cannot have.
        UnsupportedModelError: a tensor larger than any memory.
    """
    for value in model.graph.inputs:
        _check_size(value, f"input {value.name}")
    for node in model.graph:
        check_node(node)


def check_node(node: ir.Node) -> None:
    """Raise if a node, or one in its body, breaks a rule; a branch of an If may do so as long as nothing takes it.

    Raises: as `check_nodes`.
    """
    if node.op_type != "If":
        for graph in subgraphs_of(node):
            for inner in graph:
                check_node(inner)
    if node.domain != "":
        return
    for rule in _RULES.get(node.op_type, ()):
        if fault := rule(node):
            raise InvalidModelError(source_of(node), f"{node.op_type} {fault}", "correct the model")
    if kind_of(node) is Kind.VIEW and (fault := _changes_size(node)):
        raise InvalidModelError(source_of(node), f"{node.op_type} {fault}", "correct the model")
    for value in node.outputs:
        _check_size(value, source_of(node))


def _check_size(value: ir.Value, where: str) -> None:
    dims = _dims(value)
    if dims is None:
        return
    if min(dims, default=0) < 0:
        raise InvalidModelError(where, f"{value.name} has shape {list(dims)}, with a negative dimension", "correct the model")
    if value.dtype is not None and value.dtype != ir.DataType.STRING and prod(dims) * value.dtype.itemsize > _LARGEST_BYTES:
        what = f"{value.name} has shape {list(dims)}, more than {_LARGEST_BYTES >> 40} TiB"
        raise UnsupportedModelError(where, what, "make it smaller")


def _changes_size(node: ir.Node) -> Fault:
    before, after = (None if value is None else _dims(value) for value in (node.inputs[0], node.outputs[0]))
    if before is None or after is None or prod(before) == prod(after):
        return None
    return f"turns {prod(before)} elements into {prod(after)}"


def _window(node: ir.Node) -> Fault:
    """Sizes and steps of a window are positive, pads are not negative, and there is one of each for every axis."""
    data = None if node.inputs[0] is None else node.inputs[0].shape
    axes = None if data is None else len(data) - 2
    for name, least, each in (("kernel_shape", 1, 1), ("strides", 1, 1), ("dilations", 1, 1), ("pads", 0, 2)):
        numbers = node.attributes.get_ints(name)
        if not numbers:
            continue
        if min(numbers) < least:
            return f"has {name} {list(numbers)}, where {least} is the least"
        if axes is not None and len(numbers) != each * axes:
            return f"has {len(numbers)} {name} for {axes} axes"
    return None


def _groups(node: ir.Node) -> Fault:
    """Channels and filters come in equal groups."""
    group = node.attributes.get_int("group", 1)
    if group < 1:
        return f"has group {group}"
    data, weight = (None if value is None else value.shape for value in node.inputs[:2])
    if data is None or weight is None or len(data) < 2 or len(weight) < 2:
        return None
    channels, first, second = data[1], weight[0], weight[1]
    if not isinstance(channels, int) or not isinstance(first, int) or not isinstance(second, int):
        return None
    is_transposed = node.op_type == "ConvTranspose"
    expected = first if is_transposed else second * group
    if channels != expected or (not is_transposed and first % group) or channels % group:
        return f"has {channels} channels and weights {list(weight)} in {group} groups"
    return None


def _recurrent(node: ir.Node) -> Fault:
    """Weights, biases and states have the extents that X, the hidden size and the direction ask for, where these are known."""
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[node.op_type]
    directions = 2 if node.attributes.get_string("direction", "forward") == "bidirectional" else 1
    dims = [None if value is None else _dims(value) for value in node.inputs]
    data, recurrence = dims[0], dims[2]
    hidden = node.attributes.get_int("hidden_size", 0) or (recurrence[-1] if recurrence else 0)
    if data is None or len(data) != 3 or not hidden:
        return None
    is_batch_first = node.attributes.get_int("layout", 0) == 1
    batch = data[0 if is_batch_first else 1]
    state = (batch, directions, hidden) if is_batch_first else (directions, batch, hidden)
    expected = {
        "W": (directions, gates * hidden, data[2]),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
        "sequence_lens": (batch,),
        "initial_h": state,
        "initial_c": state,
        "P": (directions, 3 * hidden),
    }
    for (name, wanted), found in zip(expected.items(), dims[1:], strict=False):
        if found is not None and found != wanted:
            return f"of {hidden} units in {directions} direction(s) has {name} {list(found)}, where {list(wanted)} is asked for"
    return None


def _dims(value: ir.Value) -> tuple[int, ...] | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


_WINDOWED = ("AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "LpPool", "MaxPool", "QLinearConv")
_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_WINDOWED, (_window,)),
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose"), (_window, _groups)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (_recurrent,)),
}
