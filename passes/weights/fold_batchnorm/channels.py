"""Where the channels of a product or convolution lie in the values beside it: through views, slices and pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.matching import input_at, int_constants, is_read, rank_of

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
_Dims = Sequence[int | ir.SymbolicDim]


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels of an anchor as a value beside it has them.

    `axes` are neighbouring axes of the value that count its channels in order, without those of size 1 at either end; None
    where the channels are no longer together, so that only a number for all of them commutes. Behind the anchor `index` gives
    the anchor's channel for each of the value, before it the value's for each of the anchor. Of the nodes between,
    `monotone` commutes with no negative scale, `linear` with no shift.
    """

    axes: tuple[int, ...] | None
    index: np.ndarray
    monotone: ir.Node | None = None
    linear: ir.Node | None = None

    @classmethod
    def along(cls, axis: int, count: int) -> Channels:
        """`count` channels along one axis of an anchor's operand or result."""
        return cls((axis,) if count != 1 else (), np.arange(count))

    def spread(self, constant: np.ndarray, value: ir.Value) -> np.ndarray | None:
        """The number for each channel that `value` has, of a constant that broadcasts to it; None where they are not per channel.

        One number where the channels are not together.
        """
        rank = rank_of(value)
        if value.shape is None or rank is None or constant.ndim > rank:
            return None
        sizes = (*[1] * (rank - constant.ndim), *constant.shape)
        axes = self.axes or ()
        if any(size != 1 and (axis not in axes or size != value.shape[axis]) for axis, size in enumerate(sizes)):
            return None
        if not axes:
            return constant.reshape(-1)
        inner = constant.reshape([sizes[axis] for axis in axes])
        return np.broadcast_to(inner, [dim for axis in axes if isinstance(dim := value.shape[axis], int)]).reshape(-1)


def after(node: ir.Node, channels: Channels) -> Channels | None:
    """The channels in the output of `node`, of those in its first input; None where the node commutes with no scale."""
    return _through(node, channels, node.inputs[0], node.outputs[0], is_forward=True)


def before(node: ir.Node, channels: Channels) -> Channels | None:
    """The channels in the first input of `node`, of those in its output; None where the node commutes with no scale."""
    return _through(node, channels, node.outputs[0], node.inputs[0], is_forward=False)


def _through(
    node: ir.Node, channels: Channels, source: ir.Value | None, target: ir.Value | None, *, is_forward: bool
) -> Channels | None:
    if node.domain != "" or source is None or target is None or source.shape is None or target.shape is None:
        return None
    if any(is_read(output) for output in node.outputs[1:]):
        return None
    if node.op_type in _VIEWS:
        return replace(channels, axes=_reshaped(channels.axes, source.shape.dims, target.shape.dims))
    if node.op_type == "Transpose":
        order = tuple(node.attributes.get_ints("perm") or reversed(range(len(source.shape))))
        place = order.index if is_forward else order.__getitem__
        return replace(channels, axes=_permuted(channels.axes, place, source.shape.dims, target.shape.dims))
    if node.op_type == "Slice":
        return _sliced(node, channels, is_forward=is_forward)
    if node.op_type in _POOLS:
        return _pooled(node, channels)
    if node.op_type == "ReduceMean":
        return _averaged(node, channels, is_forward=is_forward)
    return None


def _reshaped(axes: tuple[int, ...] | None, source: _Dims, target: _Dims) -> tuple[int, ...] | None:
    """The axes of `target` that count what `axes` of `source` do: as many elements lie within, and as many make them up."""
    if not axes:
        return axes
    known = [dim for dim in source[axes[0] :] if isinstance(dim, int)]
    if len(known) != len(source) - axes[0]:
        return None
    end = _suffix(target, len(target), prod(known[len(axes) :]))
    begin = None if end is None else _suffix(target, end, prod(known[: len(axes)]))
    return None if end is None or begin is None else _trimmed(range(begin, end), target)


def _suffix(dims: _Dims, end: int, elements: int) -> int | None:
    """Where the shortest run of dimensions begins that ends at `end` and has so many elements."""
    found, begin = 1, end
    while found != elements:
        begin -= 1
        if begin < 0 or not isinstance(dim := dims[begin], int) or not 0 < dim <= elements:
            return None
        found *= dim
    return begin


def _permuted(axes: tuple[int, ...] | None, place: Callable[[int], int], source: _Dims, target: _Dims) -> tuple[int, ...] | None:
    """The axes in their new places, if they are still in order with nothing but dimensions of 1 between them."""
    if not axes:
        return axes
    places = [place(axis) for axis in axes if source[axis] != 1]
    if not places:  # a Slice has left one channel
        return ()
    between = [axis for axis in range(min(places), max(places)) if target[axis] != 1 and axis not in places]
    return None if between or places != sorted(places) else _trimmed(range(places[0], places[-1] + 1), target)


def _trimmed(axes: Sequence[int], dims: _Dims) -> tuple[int, ...]:
    """`axes` without those of size 1 at either end."""
    large = [axis for axis in axes if dims[axis] != 1]
    return tuple(range(large[0], large[-1] + 1)) if large else ()


def _sliced(node: ir.Node, channels: Channels, *, is_forward: bool) -> Channels | None:
    """Whole channels are left out, or elements of all channels alike."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    starts, ends = int_constants(input_at(node, 1)), int_constants(input_at(node, 2))
    if shape is None or starts is None or ends is None:
        return None
    axes = tuple(range(len(starts))) if input_at(node, 3) is None else int_constants(input_at(node, 3))
    steps = (1,) * len(starts) if input_at(node, 4) is None else int_constants(input_at(node, 4))
    if axes is None or steps is None:
        return None
    index = channels.index
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(shape)
        if axis not in (channels.axes or ()):
            continue
        dim = shape[axis]
        if channels.axes != (axis,) or not isinstance(dim, int):
            return None
        kept = slice(start, end, step)
        index = index[kept] if is_forward else np.arange(dim)[kept][index]
    return replace(channels, index=index)


def _pooled(node: ir.Node, channels: Channels) -> Channels | None:
    """Pools keep the first two axes. A maximum commutes with what rises, an average that counts padding with what is linear."""
    if channels.axes is None or any(axis > 1 for axis in channels.axes):
        return None
    if node.op_type in ("MaxPool", "GlobalMaxPool"):
        return replace(channels, monotone=node)
    pads_count = node.attributes.get_int("count_include_pad", 0) != 0
    is_padded = any(node.attributes.get_ints("pads", ())) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    is_padded |= node.attributes.get_int("ceil_mode", 0) != 0
    return replace(channels, linear=node) if pads_count and is_padded else channels


def _averaged(node: ir.Node, channels: Channels, *, is_forward: bool) -> Channels | None:
    """A mean over other axes than the channels'."""
    rank = rank_of(node.inputs[0])
    given = node.attributes.get_ints("axes") if input_at(node, 1) is None else int_constants(input_at(node, 1))
    if rank is None or not given or channels.axes is None:
        return None
    reduced = {axis % rank for axis in given}
    kept = [axis for axis in range(rank) if axis not in reduced]
    place = list(range(rank)) if node.attributes.get_int("keepdims", 1) else kept  # of each axis of the output, in the input
    within = channels.axes if is_forward else tuple(place[axis] for axis in channels.axes)
    if any(axis not in kept for axis in within) or (within and within[-1] - within[0] >= len(within)):
        return None
    return replace(channels, axes=tuple(place.index(axis) for axis in within) if is_forward else within)
