"""Rules of the ONNX specification that neither onnx's checker nor its shape inference enforces, and on which kernels rely."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ...runtime.symbolic.sizes import Domain, SymbolicSizeError
from .constants import constant_array
from .facts import source_of
from .kinds import Kind, kind_of
from .operand_shapes import Fault, Rule, at_point, dims_of, shape_rules
from .scopes import subgraphs_of
from .symbolic.symbols import SizeDim, some_points

_LARGEST_BYTES = 1 << 46  # of one tensor: more than any machine has, and far from where sizes overflow


def check_nodes(model: ir.Model) -> None:
    """Raise the error of the first node that breaks a rule, as far as its shapes are known.

    Raises:
        InvalidModelError: an attribute or a shape that the operator cannot have.
        UnsupportedModelError: a tensor larger than any memory.
        SymbolicSizeError: a rule that sizes which a call decides break at some points of their domain.
    """
    for value in model.graph.inputs:
        _check_size(value, f"input {value.name}")
    for node in model.graph:
        check_node(node)


def check_lowered(model: ir.Model) -> None:
    """Raise as `check_nodes`, in groups too: sizes that a model computes are known after passes, and kernels believe them."""
    check_nodes(model)
    for function in model.functions.values():
        for node in function:
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
    rules = [*_RULES.get(node.op_type, ()), *shape_rules(node.op_type), *([_changes_size] if kind_of(node) is Kind.VIEW else [])]
    for rule in rules:
        if fault := rule(node):
            raise InvalidModelError(source_of(node), f"{node.op_type} {fault}", "correct the model")
    for value in node.outputs:
        _check_size(value, source_of(node))
    if rules and (domain := _domain_of(node)) is not None:
        _check_sizes(node, rules, domain)


def _domain_of(node: ir.Node) -> Domain | None:
    """The domain of the sizes that a call decides, in the shapes of a node's values; None where there are none."""
    shapes = [value.shape for value in (*node.inputs, *node.outputs) if value is not None and value.shape is not None]
    return next((dim.size.domain for shape in shapes for dim in shape if isinstance(dim, SizeDim)), None)


def _check_sizes(node: ir.Node, rules: Sequence[Rule], domain: Domain) -> None:
    """Raise SymbolicSizeError where a node breaks a rule at some sizes, of which a few are tried: sizes that differ from each
    other do so at the ends of their ranges. Compiled for the sizes of a call, it may be right."""
    for point in some_points(domain):
        with at_point(point):
            if fault := next(filter(None, (rule(node) for rule in rules)), None):
                raise SymbolicSizeError(f"{source_of(node)}: {node.op_type} {fault}")


def _check_size(value: ir.Value, where: str) -> None:
    dims = dims_of(value)
    if dims is None:
        return
    if min(dims, default=0) < 0:
        raise InvalidModelError(where, f"{value.name} has shape {list(dims)}, with a negative dimension", "correct the model")
    if value.dtype is not None and value.dtype != ir.DataType.STRING and prod(dims) * value.dtype.itemsize > _LARGEST_BYTES:
        what = f"{value.name} has shape {list(dims)}, more than {_LARGEST_BYTES >> 40} TiB"
        raise UnsupportedModelError(where, what, "make it smaller")


def _changes_size(node: ir.Node) -> Fault:
    before, after = (dims_of(value) for value in (node.inputs[0], node.outputs[0]))
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


def _from_nothing(node: ir.Node) -> Fault:
    """What is repeated, or lies between elements, needs one along its axis; constants that are padded with do not."""
    data, result = dims_of(node.inputs[0]), dims_of(node.outputs[0])
    if node.op_type == "Pad" and node.attributes.get_string("mode", "constant") == "constant":
        return None
    if data is None or result is None or not any(not old and new for old, new in zip(data, result, strict=False)):
        return None
    return f"has data {list(data)}, without the elements of which {list(result)} is made"


def _scanned_axis(node: ir.Node) -> Fault:
    """CumSum and CumProd: one axis, of those that the data have."""
    data, axis = dims_of(node.inputs[0]), constant_array(node.inputs[1])
    if axis is None or axis.dtype.kind not in "iu":
        return None
    rank = None if data is None else max(len(data), 1)
    if axis.size == 1 and (rank is None or -rank <= int(axis.reshape(())) < rank):
        return None
    return f"has axis {axis.tolist()}" + ("" if data is None else f" and data {list(data)}")


_WINDOWED = ("AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "LpPool", "MaxPool", "QLinearConv")
_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_WINDOWED, (_window,)),
    **dict.fromkeys(("CumProd", "CumSum"), (_scanned_axis,)),
    **dict.fromkeys(("Pad", "Resize"), (_from_nothing,)),
}
