"""Operators that carry an axis of their input to their result: one part of the result for each part of the input.

They can work on a tensor that is longer than what counts, as `bound-shapes` makes them: what is behind the end of the input
is behind the end of the result. Zeros stand there at first, and after a few operators anything: none of these traps on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

from .constants import constant_array
from .kinds import Kind, kind_of

_MAX_GROWTH = 64  # by which a carried result may have more elements than its input: all of the largest size is computed
Axes = Mapping[ir.Value, int]  # of inputs: the axis, not negative, of which one does not know how much counts


def carried_axis(node: ir.Node, axes: Axes) -> int | None:
    """The axis of all results of `node` to which the axes of its inputs are carried; None where they are not, or not for sure.

    Each part of the results along it depends on the same part of the inputs in `axes`, and on the other inputs. What is found
    without knowing a shape stays right once it is known.
    """
    if node.domain != "" or any(value.shape is None for value in node.inputs if value is not None):
        return None
    rule = _RULES.get(node.op_type) or _OF_KIND.get(kind_of(node))
    return None if rule is None else rule(node, axes)


def _elementwise(node: ir.Node, axes: Axes) -> int | None:
    return _of_first(node, axes)


def _broadcast(node: ir.Node, axes: Axes) -> int | None:
    """The axis counted from the right is the same for all; the other inputs must have one element along it."""
    inputs = [value for value in node.inputs if value is not None]
    if node.op_type in ("Div", "Mod") and any(value.dtype is None or not value.dtype.is_floating_point() for value in inputs):
        return None  # a division of integers by zero traps
    ranks = {value: _rank(value) for value in inputs}
    from_right = {ranks[value] - axis for value, axis in axes.items() if value in ranks}
    if len(from_right) != 1:
        return None
    (place,) = from_right
    others = [value for value in inputs if value not in axes]
    if any(ranks[value] >= place and _dim(value, ranks[value] - place) != 1 for value in others):
        return None
    rank = max(ranks.values())
    growths = [_growth(value, axes, rank) for value in others]
    return rank - place if all(growth is not None and growth <= _MAX_GROWTH for growth in growths) else None


def _growth(other: ir.Value, axes: Axes, rank: int) -> int | None:
    """By how much broadcasting with `other` makes the least of the inputs in `axes` longer; None where that is not known."""
    growth = 1
    for place in range(1, min(_rank(other), rank) + 1):
        dim = _dim(other, _rank(other) - place)
        is_met = all(_rank(value) >= place and _dim(value, _rank(value) - place) not in (1, None) for value in axes)
        if dim == 1 or is_met:
            continue
        if dim is None:
            return None
        growth *= dim
    return growth


def _transpose(node: ir.Node, axes: Axes) -> int | None:
    axis = _of_first(node, axes)
    if axis is None:
        return None
    order = node.attributes.get_ints("perm") or tuple(reversed(range(_rank(node.inputs[0]))))
    return tuple(order).index(axis)


def _unsqueeze(node: ir.Node, axes: Axes) -> int | None:
    axis, added = _of_first(node, axes), _ints(node, 1)
    if axis is None or added is None:
        return None
    rank = _rank(node.inputs[0]) + len(added)
    kept = [place for place in range(rank) if place not in {one % rank for one in added}]
    return kept[axis]


def _squeeze(node: ir.Node, axes: Axes) -> int | None:
    axis, removed = _of_first(node, axes), _ints(node, 1)
    if axis is None or removed is None:
        return None
    gone = {one % _rank(node.inputs[0]) for one in removed}
    return None if axis in gone else axis - sum(one < axis for one in gone)


def _reshape(node: ir.Node, axes: Axes) -> int | None:
    """To a target in which -1 stands for the outermost dimension longer than 1, with as many elements behind it as before."""
    axis, target = _of_first(node, axes), _ints(node, 1)
    if axis is None or target is None or list(target).count(-1) != 1 or 0 in target:
        return None
    rank = _rank(node.inputs[0])
    if any(_dim(node.inputs[0], place) != 1 for place in range(axis)):
        return None
    behind = 1
    for place in range(axis + 1, rank):
        dim = _dim(node.inputs[0], place)
        if dim is None:
            return None
        behind *= dim
    free = list(target).index(-1)
    after = 1
    for dim in target[free + 1 :]:
        after *= dim
    return free if after == behind and all(dim == 1 for dim in target[:free]) else None


def _slice(node: ir.Node, axes: Axes) -> int | None:
    axis = _of_first(node, axes)
    cut = _ints(node, 3)
    if axis is None or cut is None or any(_ints(node, place) is None for place in range(1, len(node.inputs))):
        return None
    return None if axis in {one % _rank(node.inputs[0]) for one in cut} else axis


def _gather(node: ir.Node, axes: Axes) -> int | None:
    """Parts of the data are carried around the gathered axis; indices choose parts, whatever they are."""
    data, indices = _two(node)
    gathered = _attribute(node, "axis", 0) % _rank(data)
    if data in axes and indices not in axes:
        axis = axes[data]
        return None if axis == gathered else axis if axis < gathered else axis - 1 + _rank(indices)
    if (
        indices not in axes
        or data in axes
        or not _is_short(_dim(data, place) for place in range(_rank(data)) if place != gathered)
    ):
        return None
    return gathered + axes[indices]


def _gather_nd(node: ir.Node, axes: Axes) -> int | None:
    data, indices = _two(node)
    if data in axes or indices not in axes or _attribute(node, "batch_dims", 0):
        return None
    depth = _dim(indices, _rank(indices) - 1)
    if axes[indices] == _rank(indices) - 1 or depth is None or not _is_short(_dim(data, at) for at in range(depth, _rank(data))):
        return None
    return axes[indices]


def _reduction(node: ir.Node, axes: Axes) -> int | None:
    """Reductions over other axes, given as a constant input."""
    axis, reduced = _of_first(node, axes), _ints(node, 1)
    if axis is None or not reduced:
        return None
    gone = {one % _rank(node.inputs[0]) for one in reduced}
    if axis in gone:
        return None
    return axis if _attribute(node, "keepdims", 1) else axis - sum(one < axis for one in gone)


def _search(node: ir.Node, axes: Axes) -> int | None:
    axis, gone = _of_first(node, axes), _attribute(node, "axis", 0)
    if axis is None or axis == (gone := gone % _rank(node.inputs[0])):
        return None
    return axis if _attribute(node, "keepdims", 1) else axis - (gone < axis)


def _row(node: ir.Node, axes: Axes) -> int | None:
    """Softmax and its like along another axis."""
    axis = _of_first(node, axes)
    return None if axis is None or axis == _attribute(node, "axis", -1) % _rank(node.inputs[0]) else axis


def _concat(node: ir.Node, axes: Axes) -> int | None:
    """Of inputs that are all of unknown length along one axis, joined along another."""
    found = {axes.get(value) if value is not None else None for value in node.inputs}
    (axis,) = found if len(found) == 1 else (None,)
    return None if axis is None or axis == _attribute(node, "axis", 0) % _rank(node.inputs[0]) else axis


def _split(node: ir.Node, axes: Axes) -> int | None:
    axis = _of_first(node, axes)
    is_known = len(node.inputs) < 2 or _ints(node, 1) is not None
    return None if axis is None or not is_known or axis == _attribute(node, "axis", 0) % _rank(node.inputs[0]) else axis


_OF_KIND: dict[Kind, Callable[[ir.Node, Axes], int | None]] = {Kind.ELEMENTWISE: _elementwise, Kind.BROADCAST: _broadcast}
_RULES: dict[str, Callable[[ir.Node, Axes], int | None]] = {
    "ArgMax": _search,
    "ArgMin": _search,
    "Concat": _concat,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": _elementwise,
    "LogSoftmax": _row,
    "Reshape": _reshape,
    "Slice": _slice,
    "Softmax": _row,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    **{f"Reduce{name}": _reduction for name in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")},
}


def _of_first(node: ir.Node, axes: Axes) -> int | None:
    """The axis of the first input, where no other one is of unknown length."""
    first, *others = node.inputs
    return None if first is None or any(value in axes for value in others if value is not None) else axes.get(first)


def _two(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    first, second = node.inputs
    assert first is not None
    assert second is not None
    return first, second


def _rank(value: ir.Value | None) -> int:
    assert value is not None
    assert value.shape is not None
    return len(value.shape)


def _dim(value: ir.Value | None, axis: int) -> int | None:
    """A dimension; None where it is not known."""
    assert value is not None
    assert value.shape is not None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def _is_short(dims: Iterable[int | None]) -> bool:
    """Whether what one index chooses is known to be no more than a result may grow by."""
    size = 1
    for dim in dims:
        if dim is None:
            return False
        size *= dim
    return size <= _MAX_GROWTH


def _ints(node: ir.Node, position: int) -> tuple[int, ...] | None:
    """The elements of a constant input; None where it is absent or no constant."""
    array = constant_array(node.inputs[position]) if position < len(node.inputs) else None
    return None if array is None else tuple(int(one) for one in array.reshape(-1))


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes.get_int(name, default) or 0
