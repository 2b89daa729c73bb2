"""Means, squares and roots, as exporters spell them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rows import reduced_axes
from ....runtime.symbolic.shapes import is_symbolic
from .spelling import either_way, maker, operands, with_constant


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduction that keeps its dimensions: what it reads, over which of them, counted from 0, and its nodes.

    `factor` is what a sum over them is multiplied by; 1 over the number of elements makes a mean. None: that of ReduceMean.
    """

    source: ir.Value
    axes: tuple[int, ...]
    factor: float | None
    nodes: tuple[ir.Node, ...]

    @property
    def count(self) -> int:
        """Elements of a row; 0 where a run decides."""
        shape = static_shape(self.source)
        row = [0] if shape is None else [shape[axis] for axis in self.axes]
        return 0 if is_symbolic(row) else prod(row)

    @property
    def is_mean(self) -> bool:
        return self.factor is None or abs(self.factor * self.count - 1) < 1e-6

    @property
    def is_sample_mean(self) -> bool:
        """Whether the sum is divided by one less than there are elements."""
        return self.factor is not None and self.count > 1 and abs(self.factor * (self.count - 1) - 1) < 1e-6


def reduced(value: ir.Value | None, op_type: str) -> Reduced | None:
    """What a reduction that keeps its dimensions reads; `factor` is 1."""
    view = maker(value, "Reshape", "Unsqueeze")  # puts the dimensions back that the reduction dropped
    node = maker(value if view is None else view.inputs[0], op_type)
    if value is None or node is None or node.inputs[0] is None:
        return None
    axes, shape = reduced_axes(node), static_shape(value)
    if axes is None or bool(node.attributes.get_int("keepdims", 1)) != (view is None):
        return None
    if view is None:
        return Reduced(node.inputs[0], axes, 1.0, (node,))
    kept = tuple(1 if axis in axes else dim for axis, dim in enumerate(static_shape(node.inputs[0]) or ()))
    return Reduced(node.inputs[0], axes, 1.0, (view, node)) if shape is not None and shape == kept else None


def mean_of(value: ir.Value | None) -> Reduced | None:
    """A ReduceMean, or a ReduceSum that is multiplied or divided by constants."""
    if (found := reduced(value, "ReduceMean")) is not None:
        return Reduced(found.source, found.axes, None, found.nodes)
    factor, nodes = 1.0, list[ir.Node]()
    while (node := maker(value, "Mul", "Div")) is not None:
        if (scaled := _scaled(node)) is None:
            return None
        value, factor = scaled[0], factor * scaled[1]
        nodes.append(node)
    if (found := reduced(value, "ReduceSum")) is not None:
        return Reduced(found.source, found.axes, factor, (*nodes, *found.nodes))
    if nodes and (found := reduced(value, "ReduceMean")) is not None and found.count:
        return Reduced(found.source, found.axes, factor / found.count, (*nodes, *found.nodes))
    return None


def _scaled(node: ir.Node) -> tuple[ir.Value, float] | None:
    """What a Mul or Div multiplies by a number, and the number."""
    if node.op_type == "Mul":
        return with_constant(node)
    value, other = operands(node)
    divisor = scalar_constant(other)
    return (value, 1 / float(divisor)) if divisor else None


def deviation_of(value: ir.Value) -> Reduced | None:
    """x - mean(x): x, and the dimensions of the mean."""
    sub = maker(value, "Sub")
    if sub is None:
        return None
    x, subtracted = operands(sub)
    mean = mean_of(subtracted)
    if mean is None or mean.source is not x or not mean.is_mean:
        return None
    return Reduced(x, mean.axes, mean.factor, (sub, *mean.nodes))


def square_of(value: ir.Value | None) -> tuple[ir.Value, ir.Node] | None:
    """What is squared, and the node that does it."""
    node = maker(value, "Mul", "Pow")
    if node is None:
        return None
    base, other = operands(node)
    is_square = base is other if node.op_type == "Mul" else scalar_constant(other) == 2
    return (base, node) if is_square else None


@dataclass(frozen=True, slots=True)
class Quotient:
    """numerator / sqrt(radicand), and the nodes that compute it. Of what is added to the root, `outside` is the number."""

    numerator: ir.Value
    radicand: ir.Value
    outside: float
    nodes: tuple[ir.Node, ...]


def quotient_by_root(node: ir.Node) -> Quotient | None:
    """The quotient that a Div or Mul computes."""
    if node.domain != "":
        return None
    if node.op_type == "Div":
        numerator, divisor = operands(node)
        root = _root(divisor)
        return None if root is None else Quotient(numerator, root[0], root[1], (node, *root[2]))
    if node.op_type == "Mul":
        for numerator, factor in either_way(node):
            if (root := _inverse_root(factor)) is not None:
                return Quotient(numerator, root[0], root[1], (node, *root[2]))
    return None


_Root = tuple[ir.Value, float, tuple[ir.Node, ...]]  # radicand, what is added to the root, nodes


def _root(value: ir.Value) -> _Root | None:
    """sqrt(v) or v ** 0.5, and that plus a constant."""
    node = maker(value, "Sqrt", "Pow", "Add")
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type == "Add":
        found = with_constant(node)
        below = None if found is None or maker(found[0], "Add") else _root(found[0])
        return None if found is None or below is None else (below[0], found[1], (node, *below[2]))
    if node.op_type == "Pow" and scalar_constant(node.inputs[1]) != 0.5:
        return None
    return node.inputs[0], 0.0, (node,)


def _inverse_root(value: ir.Value) -> _Root | None:
    """1 / sqrt(v), its reciprocal or v ** -0.5."""
    node = maker(value, "Reciprocal", "Div", "Pow")
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type == "Pow":
        return (node.inputs[0], 0.0, (node,)) if scalar_constant(node.inputs[1]) == -0.5 else None
    if node.op_type == "Div" and scalar_constant(node.inputs[0]) != 1:
        return None
    divisor = node.inputs[-1]
    below = None if divisor is None else _root(divisor)
    return None if below is None else (below[0], below[1], (node, *below[2]))
