"""Rows written into a tensor: one ScatterElements along the rows' axis, which in place touches nothing but the rows.

torch writes `cache[:, :, position] = rows` and `index_copy_` as a ScatterND between two Transposes of the whole tensor.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....compiler.ir.matching import producer_of, static_shape
from ....compiler.ir.rewriter import operation
from ....compiler.ir.states import state_inputs
from .scope import Replacement, Rule, Scope, spelled


def scatter_along_axis(node: ir.Node, scope: Scope) -> Replacement | None:
    """Transpose(ScatterND(Transpose(data), indices[n, 1], updates)) that transposes back scatters along an axis of the data."""
    scatter = producer_of(node.inputs[0], "ScatterND")
    before = None if scatter is None else producer_of(scatter.inputs[0], "Transpose")
    if scatter is None or before is None or len(scatter.outputs[0].uses()) > 1 or scatter.outputs[0].is_graph_output():
        return None
    data, (_, indices, updates) = before.inputs[0], scatter.inputs
    dims, index_dims, update_dims = static_shape(data), static_shape(indices), static_shape(updates)
    if data is None or indices is None or updates is None or dims is None or index_dims is None or update_dims is None:
        return None
    reverse = tuple(range(len(dims)))[::-1]
    order, back = (tuple(one.attributes.get_ints("perm") or reverse) for one in (before, node))
    if len(index_dims) != 2 or index_dims[1] != 1 or [order[axis] for axis in back] != sorted(order) or 0 in update_dims:
        return None
    axis, rows = order[0], index_dims[0]
    taken = [update_dims[place] for place in back]
    turned = operation("Transpose", [updates], perm=back)
    column = operation("Reshape", [indices, scope.ints([rows if one == axis else 1 for one in range(len(dims))], indices.name)])
    spread = operation("Expand", [column.outputs[0], scope.ints(taken, indices.name)])
    reduction = scatter.attributes.get_string("reduction", "none")
    inputs = [data, spread.outputs[0], turned.outputs[0]]
    return spelled(turned, column, spread, operation("ScatterElements", inputs, axis=axis, reduction=reduction))


def write_state_row(node: ir.Node, scope: Scope) -> Replacement | None:
    """Where(positions == position, row, state) writes one row of a state. Nothing is written at a position outside of it."""
    condition, row, state = node.inputs
    dims, row_dims = static_shape(state), static_shape(row)
    if state is None or row is None or dims is None or row_dims is None or static_shape(node.outputs[0]) != dims:
        return None
    if state.name not in state_inputs(scope.model) or not state.is_graph_input() or 0 in dims:
        return None
    position, extent = _one_of_a_range(condition)
    seen = static_shape(condition) or ()
    axes = [axis for axis, dim in enumerate((1,) * (len(dims) - len(seen)) + seen) if dim > 1]
    if position is None or len(axes) != 1 or dims[axes[0]] != extent:
        return None
    (axis,) = axes
    written = tuple(1 if one == axis else dim for one, dim in enumerate(dims))
    aligned = (1,) * (len(dims) - len(row_dims)) + row_dims
    if aligned[axis] != 1:
        return None
    ones, number = (
        scope.ints([1] * len(dims), position.name),
        np.dtype("int64" if position.dtype == ir.DataType.INT64 else "int32"),
    )
    place = operation("Reshape", [position, ones])
    is_before = operation("Less", [place.outputs[0], scope.constant(np.zeros((), number), position.name)])
    outside = scope.constant(np.array(extent, number), position.name)  # a negative index would count from the end
    index = operation("Where", [is_before.outputs[0], outside, place.outputs[0]])
    spread = operation("Expand", [index.outputs[0], scope.ints(written, position.name)])
    update = operation("Expand", [row, scope.ints(written, row.name)])
    inputs = [state, spread.outputs[0], update.outputs[0]]
    return spelled(place, is_before, index, spread, update, operation("ScatterElements", inputs, axis=axis))


def _one_of_a_range(condition: ir.Value | None) -> tuple[ir.Value | None, int]:
    """The one position that a condition compares each of 0, 1, 2, ... with, and how many these are; None for other conditions."""
    while (view := producer_of(condition, "Reshape")) is not None:
        condition = view.inputs[0]
    equal = producer_of(condition, "Equal")
    for place in (0, 1) if equal is not None else ():
        assert equal is not None
        numbers, position = constant_array(_unshaped(equal.inputs[place])), equal.inputs[1 - place]
        dims = static_shape(position)
        if numbers is None or position is None or dims is None or prod(dims) != 1:
            continue
        if numbers.dtype.name in ("int32", "int64") and np.array_equal(numbers.reshape(-1), np.arange(numbers.size)):
            return position, numbers.size
    return None, 0


def _unshaped(value: ir.Value | None) -> ir.Value | None:
    while (view := producer_of(value, "Reshape")) is not None:
        value = view.inputs[0]
    return value


RULES: dict[str, tuple[Rule, ...]] = {
    "Transpose": (scatter_along_axis,),
    "Where": (write_state_row,),
}
