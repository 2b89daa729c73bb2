"""LayerNormalization, RMSNormalization and InstanceNormalization: a quotient by the root of a mean of squares.

With d = x - mean(x) the quotient d / sqrt(mean(d * d) + epsilon) is LayerNormalization, with d = x RMSNormalization; over the
spatial dimensions of an image, scaled by channel, it is InstanceNormalization. J. Ba et al., Layer Normalization, 2016;
B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, 2019; D. Ulyanov et al., Instance Normalization, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array, scalar_constant
from ....compiler.ir.facts import dtype_name
from ....compiler.ir.matching import has_same_shape, static_shape
from ....compiler.ir.rewriter import Rejection
from .moments import Quotient, Reduced, deviation_of, mean_of, quotient_by_root, square_of
from .spelling import Spelling, combined_by_channel, either_way, maker, only_reader

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)  # whose statistics ONNX computes in float32
_MAX_ONES = 1 << 16  # largest row for which a scale of ones is made


@dataclass(frozen=True, slots=True)
class _Core:
    """value = (x - mean, or x) / sqrt(... + epsilon) over the last dimensions from `axis`; `scale` is what the numerator had."""

    x: ir.Value
    axes: tuple[int, ...]
    centred: bool
    epsilon: float
    scale: ir.Value | None
    last: ir.Node
    nodes: frozenset[ir.Node]

    @property
    def op_type(self) -> str:
        return "LayerNormalization" if self.centred else "RMSNormalization"


def standardization(node: ir.Node) -> Spelling | Rejection | None:
    """The normalization whose quotient `node` computes, with the scale and the bias that follow."""
    quotient = quotient_by_root(node)
    if quotient is None:
        return None
    core = _core(quotient, node)
    if core is None or isinstance(core, Rejection):
        return core
    core = _without_casts(core)
    if not has_same_shape(core.last.outputs[0], core.x):
        return _near(node, f"the result has another shape than %{core.x.name}")
    rank = len(core.x.shape or ())
    if core.axes != tuple(range(rank - len(core.axes), rank)):
        return Rejection(f"no {core.op_type}: the mean is over dimensions {list(core.axes)}, not the last ones", (node,))
    row = _row(core)
    if row is None:
        return Rejection(f"no {core.op_type}: the length of a row of %{core.x.name} is not known", (node,))
    by_channel = core.centred and rank >= 3 and core.axes == tuple(range(2, rank)) and core.scale is None
    found = (_of_channels(core) if by_channel else None) or _of_rows(core, row)
    return found if isinstance(found, Rejection) else found.obstacle() or found


def _row(core: _Core) -> tuple[int, ...] | None:
    """The dimensions of a row; None where one is symbolic."""
    dims = [core.x.shape[axis] for axis in core.axes if core.x.shape is not None]
    row = tuple(dim for dim in dims if isinstance(dim, int))
    return row if len(row) == len(core.axes) else None


def _core(quotient: Quotient, node: ir.Node) -> _Core | Rejection | None:
    epsilon, nodes, radicand = 0.0, list(quotient.nodes), quotient.radicand
    while (add := maker(radicand, "Add")) is not None:
        inner = next(
            ((value, number) for value, other in either_way(add) if (number := scalar_constant(other)) is not None), None
        )
        if inner is None:
            return None
        if epsilon:
            return _near(node, "epsilon is added twice") if _variance(inner[0]) else None
        radicand, epsilon = inner[0], float(inner[1])
        nodes.append(add)
    mean = _variance(radicand)
    squared = None if mean is None else square_of(mean.source)
    if mean is None or squared is None:
        return None
    deviation, square = squared
    scale = _scale_of(quotient.numerator, deviation)
    if scale is None:
        return None
    nodes += [*mean.nodes, square, *scale[1]]
    if quotient.outside:
        return _near(node, "epsilon is added outside the root")
    if not mean.is_mean:
        what = "by one less than its elements" if mean.is_sample_mean else "by another number than its elements"
        return _near(node, f"the sum of squares is divided {what}")
    if deviation.dtype not in _TYPES:
        return _near(node, f"ONNX computes the statistics of {deviation.dtype} in float32")
    centre = deviation_of(deviation)
    if centre is not None and centre.axes == mean.axes:
        members = frozenset([*nodes, *centre.nodes])
        return _Core(centre.source, mean.axes, True, epsilon, scale[0], node, members)
    return _Core(deviation, mean.axes, False, epsilon, scale[0], node, frozenset(nodes))


def _near(node: ir.Node, reason: str) -> Rejection:
    return Rejection(f"no normalization: {reason}", (node,))


def _variance(value: ir.Value) -> Reduced | None:
    """A mean of squares."""
    found = mean_of(value)
    return found if found is not None and square_of(found.source) is not None else None


def _scale_of(numerator: ir.Value, deviation: ir.Value) -> tuple[ir.Value | None, tuple[ir.Node, ...]] | None:
    """What the numerator multiplies the deviation by (None: nothing), with the nodes; None where it is something else."""
    if (nodes := _same(numerator, deviation)) is not None:
        return None, nodes
    if (product := maker(numerator, "Mul")) is not None:
        for value, scale in either_way(product):
            if (nodes := _same(value, deviation)) is not None:
                return scale, (product, *nodes)
    return None


def _same(value: ir.Value, deviation: ir.Value) -> tuple[ir.Node, ...] | None:
    """The nodes that compute a deviation once more, as torch's `var` has them; None for another value."""
    if value is deviation:
        return ()
    first, second = deviation_of(value), deviation_of(deviation)
    if first is None or second is None or (first.source, first.axes) != (second.source, second.axes):
        return None
    return first.nodes


def _without_casts(core: _Core) -> _Core:
    """The same of what was cast to float32 for it, if the result is cast back at once."""
    widening, narrowing = maker(core.x, "Cast"), only_reader(core.last.outputs[0], "Cast")
    source = widening.inputs[0] if widening is not None else None
    if widening is None or narrowing is None or source is None or core.scale is not None or source.dtype not in _TYPES:
        return core
    if core.x.dtype is not ir.DataType.FLOAT or narrowing.outputs[0].dtype is not source.dtype:
        return core
    return replace(core, x=source, last=narrowing, nodes=core.nodes | {narrowing})


def _of_rows(core: _Core, row: tuple[int, ...]) -> Spelling | Rejection:
    """LayerNormalization or RMSNormalization."""
    scale: ir.Value | np.ndarray | None = None if core.scale is None else _parameter(core.scale, row)
    if core.scale is not None and scale is None:
        return _near(core.last, f"the scale %{core.scale.name} is not of the row's shape")
    last, nodes = core.last, set(core.nodes)
    if scale is None and (following := _follower(last, "Mul", row, core.x)) is not None:
        last, scale = following
        nodes.add(last)
    bias: ir.Value | np.ndarray | None = None
    if core.centred and scale is not None and (following := _follower(last, "Add", row, core.x)) is not None:
        last, bias = following
        nodes.add(last)
    if scale is None:
        if prod(row) > _MAX_ONES:
            return _near(core.last, f"a scale of {prod(row)} ones would be needed")
        scale = np.ones(row, dtype_name(core.x.dtype or ir.DataType.FLOAT))
    inputs = (core.x, scale) if bias is None else (core.x, scale, bias)
    attributes = {"axis": -len(row), "epsilon": core.epsilon}
    since = 17 if core.centred else 23
    return Spelling(core.op_type, inputs, attributes, since, last, frozenset(nodes))


def _of_channels(core: _Core) -> Spelling | None:
    """InstanceNormalization, where a scale by channel follows, or none at all and a row of ones would be larger."""
    shape = static_shape(core.x)
    if shape is None:
        return None
    last, nodes = core.last, set(core.nodes)
    scale, bias = combined_by_channel(last, "Mul", shape), None
    if scale is not None:
        last = scale[0]
        bias = combined_by_channel(last, "Add", shape)
        nodes.add(last)
    if bias is not None:
        last = bias[0]
        nodes.add(last)
    reader = only_reader(core.last.outputs[0], "Mul")
    if scale is None and (len(shape) == 3 or (reader is not None and has_same_shape(reader.outputs[0], core.x))):
        return None
    dtype = dtype_name(core.x.dtype or ir.DataType.FLOAT)
    ones, zeros = np.ones(shape[1], dtype), np.zeros(shape[1], dtype)
    inputs = (core.x, ones if scale is None else scale[1], zeros if bias is None else bias[1])
    return Spelling("InstanceNormalization", inputs, {"epsilon": core.epsilon}, 6, last, frozenset(nodes))


def _follower(node: ir.Node, op_type: str, row: tuple[int, ...], x: ir.Value) -> tuple[ir.Node, ir.Value | np.ndarray] | None:
    """The one reader of a node's result, if it is of this operator and its other operand is of the row's shape."""
    reader = only_reader(node.outputs[0], op_type)
    if reader is None or not has_same_shape(reader.outputs[0], x):
        return None
    for value, other in either_way(reader):
        if value is node.outputs[0] and other.dtype is x.dtype and (parameter := _parameter(other, row)) is not None:
            return reader, parameter
    return None


def _parameter(value: ir.Value, row: tuple[int, ...]) -> ir.Value | np.ndarray | None:
    """`value` with the shape of a row: itself, or a constant without leading ones."""
    shape = static_shape(value)
    if shape is None or shape == row:
        return None if shape is None else value
    array = constant_array(value)
    leads = len(shape) - len(row)
    if array is None or leads <= 0 or shape[leads:] != row or prod(shape[:leads]) != 1:
        return None
    return array.reshape(row)
