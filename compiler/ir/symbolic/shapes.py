"""Shapes of results whose operands have sizes that a call decides.

ONNX's inference takes a symbol for a name, not for a number: it computes nothing with it, and takes it for equal to what it is
added to. So what computes with sizes, or compares them, has a rule here; of a few operators, which do neither, ONNX's is taken.
What has no rule has no shape, and is not compiled for sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ....runtime.symbolic.shapes import broadcast_shape, equal, same_shape
from ....runtime.symbolic.sizes import Domain, Size, SizeLike, SymbolicSizeError, maximum_of, minimum_of

Sizes: TypeAlias = tuple[Any, ...]  # of SizeLike
_TRUSTED_OPERATORS = """
    ArgMax ArgMin AveragePool BatchNormalization Conv CumSum Dropout GatherElements GlobalAveragePool
    GlobalMaxPool GroupNormalization Identity InstanceNormalization LRN LogSoftmax LpPool MaxPool OneHot ReduceL1
    ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Softmax
    Transpose Trilu"""
_OF_DATA_OPERATORS = """
    DequantizeLinear Hardmax LpNormalization MeanVarianceNormalization QuantizeLinear ReverseSequence ScatterElements ScatterND"""
_OF_DATA = tuple(_OF_DATA_OPERATORS.split())  # whose result has the shape of the first operand
_PLACE_OF_WEIGHTS = {"QLinearConv": 3, "QLinearMatMul": 3}  # among the operands of products; 1 of all others
_LARGEST_FRACTION = 64  # of a size by which images are scaled: products of 32-bit numbers hold their sizes
_TRUSTED = frozenset(_TRUSTED_OPERATORS.split())


@dataclass(frozen=True, slots=True)
class Question:
    """A node as the rules see it: shapes of its operands, and the numbers of those that are constants, as objects."""

    node: ir.Node
    shapes: tuple[Sizes | None, ...]
    numbers: Mapping[int, np.ndarray]

    def shape(self, position: int = 0) -> Sizes:
        """Raises _UnknownError where it is not known."""
        if position >= len(self.shapes) or (found := self.shapes[position]) is None:
            raise _UnknownError
        return found

    def values(self, position: int) -> list[SizeLike] | None:
        """The numbers of an operand; None where it is absent. Raises _UnknownError where they are not known."""
        if position >= len(self.node.inputs) or self.node.inputs[position] is None:
            return None
        if position not in self.numbers:
            raise _UnknownError
        return list(self.numbers[position].reshape(-1))

    def axes(self, position: int, attribute: str = "axes") -> list[int] | None:
        """Axes that an operand or an attribute names; None where neither is there."""
        given = self.values(position)
        if given is None and attribute in self.node.attributes:
            return list(self.node.attributes[attribute].as_ints())
        return None if given is None else [int(axis) for axis in given]


class _UnknownError(Exception):
    """A shape does not follow from what is known."""


def infer_sizes(
    question: Question, inferred: Sequence[ir.Shape | None], domain: Domain, *, is_pointwise: bool
) -> list[list[SizeLike | None] | None]:
    """The shapes of a node's results, dimension by dimension, None where they are unknown; `inferred` are those by ONNX.

    The domain is cut to the points where no dimension is negative. Raises SymbolicSizeError where that would leave too few.
    """
    node = question.node
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    if rule is _windows and not any(isinstance(side, Size) for side in (question.shapes[0] or ())[2:]):
        rule = None  # ONNX's inference, which knows all ways of padding
    if is_pointwise:
        rule = _broadcast
    if rule is not None:
        try:
            found = rule(question)
        except (_UnknownError, ValueError):
            return [None if shape is None else [None] * len(shape) for shape in inferred]
        if negative := [dim for shape in found for dim in shape if not dim >= 0]:  # as of windows larger than what they lie on
            raise SymbolicSizeError(f"{node.op_type}: a dimension of {negative[0]}, which is negative")
        return [list(shape) for shape in found]
    is_trusted = node.op_type in _TRUSTED and node.domain == ""
    return [None if shape is None else [_named(dim, domain, is_trusted) for dim in shape] for shape in inferred]


def _named(dim: int | ir.SymbolicDim, domain: Domain, is_trusted: bool) -> SizeLike | None:
    if not is_trusted:
        return None
    return dim if isinstance(dim, int) else domain.known.get(dim.value or "")


def _broadcast(question: Question) -> list[Sizes]:
    if question.node.op_type == "DequantizeLinear":
        return [question.shape()]
    shapes = [question.shape(place) for place, value in enumerate(question.node.inputs) if value is not None]
    if question.node.op_type == "PRelu" and not same_shape(broadcast_shape(*shapes), shapes[0]):
        raise _UnknownError
    return [broadcast_shape(*shapes)]


def _matmul(question: Question) -> list[Sizes]:
    a, b = question.shape(0), question.shape(_PLACE_OF_WEIGHTS.get(question.node.op_type, 1))
    left, right = (a if len(a) > 1 else (1, *a)), (b if len(b) > 1 else (*b, 1))
    if not equal(left[-1], right[-2]):
        raise _UnknownError
    rows, columns = left[-2:-1] if len(a) > 1 else (), right[-1:] if len(b) > 1 else ()
    return [(*broadcast_shape(left[:-2], right[:-2]), *rows, *columns)]


def _gemm(question: Question) -> list[Sizes]:
    a, b = question.shape(0), question.shape(1)
    a = a[::-1] if question.node.attributes.get_int("transA", 0) else a
    b = b[::-1] if question.node.attributes.get_int("transB", 0) else b
    out = (a[0], b[1])
    bias = question.shape(2) if len(question.node.inputs) > 2 and question.node.inputs[2] is not None else ()
    if not equal(a[1], b[0]) or not same_shape(broadcast_shape(out, bias), out):
        raise _UnknownError
    return [out]


def _normalization(question: Question) -> list[Sizes]:
    """Of rows of a known length, as scale and bias are."""
    shape, attributes = question.shape(), question.node.attributes
    axis = attributes.get_int("axis", -1) % len(shape)
    for position in range(1, len(question.node.inputs)):
        if question.node.inputs[position] is not None and not same_shape(broadcast_shape(shape, question.shape(position)), shape):
            raise _UnknownError
    statistics = (*shape[:axis], *(1,) * (len(shape) - axis))
    return [shape, *[statistics] * (len(question.node.outputs) - 1)]


def _reshape(question: Question) -> list[Sizes]:
    shape, target = question.shape(), question.values(1) or []
    keeps_zero = bool(question.node.attributes.get_int("allowzero", 0))
    zeros = [isinstance(dim, int) and dim == 0 and not keeps_zero for dim in target]
    dims = [shape[place] if zero else dim for place, (zero, dim) in enumerate(zip(zeros, target, strict=True))]
    open_places = [place for place, dim in enumerate(dims) if isinstance(dim, int) and dim == -1]
    if len(open_places) > 1:
        raise _UnknownError
    if open_places:
        others = prod(dim for place, dim in enumerate(dims) if place != open_places[0])
        if not others > 0:  # where it is, the others follow; sizes for which it is not have a program of their own
            raise _UnknownError
        dims[open_places[0]] = prod(shape) // others
    if not equal(prod(dims), prod(shape)):
        raise _UnknownError
    return [tuple(dims)]


def _flatten(question: Question) -> list[Sizes]:
    shape, axis = question.shape(), question.node.attributes.get_int("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return [(prod(shape[:axis]), prod(shape[axis:]))]


def _squeeze(question: Question) -> list[Sizes]:
    shape, axes = question.shape(), question.axes(1)
    if axes is None:
        if any(isinstance(dim, Size) for dim in shape):
            raise _UnknownError  # which of them are 1, a call decides
        return [tuple(dim for dim in shape if dim != 1)]
    gone = {axis % len(shape) for axis in axes}
    if any(not equal(shape[axis], 1) for axis in gone):
        raise _UnknownError
    return [tuple(dim for axis, dim in enumerate(shape) if axis not in gone)]


def _unsqueeze(question: Question) -> list[Sizes]:
    shape, axes = question.shape(), question.axes(1)
    if axes is None:
        raise _UnknownError
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    rest = iter(shape)
    return [tuple(1 if axis in new else next(rest) for axis in range(rank))]


def _concat(question: Question) -> list[Sizes]:
    shapes = [question.shape(place) for place in range(len(question.node.inputs))]
    first = shapes[0]
    axis = question.node.attributes.get_int("axis", 0) % len(first)
    for shape in shapes[1:]:
        if not same_shape((*shape[:axis], *shape[axis + 1 :]), (*first[:axis], *first[axis + 1 :])):
            raise _UnknownError
    return [(*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])]


def _slice(question: Question) -> list[Sizes]:
    shape = list(question.shape())
    starts, ends, axes, steps = (question.values(place) for place in range(1, 5))
    if starts is None or ends is None:
        raise _UnknownError
    places = list(range(len(starts))) if axes is None else [int(axis) % len(shape) for axis in axes]
    for axis, start, end, step in zip(places, starts, ends, steps or [1] * len(starts), strict=True):
        shape[axis] = _sliced(shape[axis], start, end, int(step))
    return [tuple(shape)]


def _sliced(extent: SizeLike, start: SizeLike, end: SizeLike, step: int) -> SizeLike:
    """Elements of a Slice along one axis, by ONNX's rules: negative places count from the end, and all are clamped."""
    if step < 0:
        first, last = (
            minimum_of(maximum_of(place + extent if place < 0 else place, least), extent - 1)
            for place, least in ((start, 0), (end, -1))
        )
        return maximum_of(-((last - first) // -step), 0)
    first, last = (minimum_of(maximum_of(place + extent if place < 0 else place, 0), extent) for place in (start, end))
    return maximum_of(-(-(last - first) // step), 0)


def _split(question: Question) -> list[Sizes]:
    shape, attributes = question.shape(), question.node.attributes
    axis, count = attributes.get_int("axis", 0) % len(shape), len(question.node.outputs)
    parts = question.values(1)
    if parts is None:
        size = shape[axis]
        if not isinstance(size, int):
            raise _UnknownError
        step = -(-size // count)
        parts = [min(step, max(size - step * place, 0)) for place in range(count)]
    if not equal(sum(parts), shape[axis]):
        raise _UnknownError
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


def _expand(question: Question) -> list[Sizes]:
    return [broadcast_shape(question.shape(), tuple(question.values(1) or ()))]


def _constant_of_shape(question: Question) -> list[Sizes]:
    return [tuple(question.values(0) or ())]


def _range(question: Question) -> list[Sizes]:
    start, limit, delta = ((question.values(place) or [None])[0] for place in range(3))
    if start is None or limit is None or not isinstance(delta, int) or delta == 0 or isinstance(start, float):
        raise _UnknownError
    distance = limit - start if delta > 0 else start - limit
    return [(maximum_of(-(-distance // abs(delta)), 0),)]


def _gather(question: Question) -> list[Sizes]:
    data, indices = question.shape(0), question.shape(1)
    axis = question.node.attributes.get_int("axis", 0) % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def _gather_nd(question: Question) -> list[Sizes]:
    data, indices = question.shape(0), question.shape(1)
    axes, batch = indices[-1], question.node.attributes.get_int("batch_dims", 0)
    if not isinstance(axes, int):
        raise _UnknownError
    return [(*indices[:-1], *data[batch + axes :])]


def _windows(question: Question) -> list[Sizes]:
    """Conv and pooling: positions along each side that windows begin at."""
    shape, node = question.shape(), question.node
    sides, attributes = shape[2:], node.attributes
    weights = question.shape(_PLACE_OF_WEIGHTS.get(node.op_type, 1)) if "Conv" in node.op_type else None
    kernel = list(attributes["kernel_shape"].as_ints()) if weights is None else list(weights[2:])
    ones = [1] * len(sides)

    def of(name: str, default: list[int]) -> list[int]:
        return list(attributes[name].as_ints()) if name in attributes else default

    strides, dilations, pads = of("strides", ones), of("dilations", ones), of("pads", [0] * 2 * len(sides))
    is_same = attributes.get_string("auto_pad", "NOTSET").startswith("SAME")
    found = []
    for axis, (side, stride) in enumerate(zip(sides, strides, strict=True)):
        if is_same:
            found.append(-(-side // stride))
            continue
        free = side + pads[axis] + pads[axis + len(sides)] - dilations[axis] * (kernel[axis] - 1) - 1
        if attributes.get_int("ceil_mode", 0):  # as far as windows begin before the end of the input
            found.append(minimum_of((free + stride - 1) // stride, (side + pads[axis] - 1) // stride) + 1)
        else:
            found.append(free // stride + 1)
    channels = shape[1] if weights is None else weights[0]
    return [(shape[0], channels, *found)] * len(node.outputs)


def _transposed_windows(question: Question) -> list[Sizes]:
    """ConvTranspose: the positions that the windows at all elements reach, less what is cut off at both ends."""
    shape, weights, attributes = question.shape(), question.shape(1), question.node.attributes
    rank = len(shape) - 2
    if attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in attributes:
        raise _UnknownError

    def of(name: str, default: int, count: int = rank) -> list[int]:
        return list(attributes[name].as_ints()) if name in attributes else [default] * count

    strides, dilations, extra, pads = of("strides", 1), of("dilations", 1), of("output_padding", 0), of("pads", 0, 2 * rank)
    found = [
        strides[axis] * (side - 1) + extra[axis] + dilations[axis] * (weights[axis + 2] - 1) + 1 - pads[axis] - pads[axis + rank]
        for axis, side in enumerate(shape[2:])
    ]
    return [(shape[0], weights[1] * attributes.get_int("group", 1), *found)]


def _as_data(question: Question) -> list[Sizes]:
    return [question.shape()]


def _depth_to_space(question: Question) -> list[Sizes]:
    (images, channels, *sides), block = question.shape(), question.node.attributes.get_int("blocksize")
    if question.node.op_type == "DepthToSpace":
        return [(images, channels // block**2, *(side * block for side in sides))]
    return [(images, channels * block**2, *(side // block for side in sides))]


def _tile(question: Question) -> list[Sizes]:
    return [tuple(dim * times for dim, times in zip(question.shape(), question.values(1) or [], strict=True))]


def _pad(question: Question) -> list[Sizes]:
    shape, pads = list(question.shape()), question.values(1) or []
    axes = question.axes(3) or list(range(len(shape)))
    for place, axis in enumerate(axes):
        shape[axis] = shape[axis] + pads[place] + pads[place + len(axes)]
    return [tuple(shape)]


def _top(question: Question) -> list[Sizes]:
    shape, count = list(question.shape()), question.values(1)
    if count is None:
        raise _UnknownError
    shape[question.node.attributes.get_int("axis", -1)] = count[0]
    return [tuple(shape)] * 2


def _determinant(question: Question) -> list[Sizes]:
    return [question.shape()[:-2]]


def _recurrent(question: Question) -> list[Sizes]:
    """Of sequences, their last states, and those of the cells of an LSTM."""
    attributes = question.node.attributes
    x, directions, states = question.shape(), question.shape(1)[0], question.shape(2)[2]
    if attributes.get_int("layout", 0):
        every, last = (x[0], x[1], directions, states), (x[0], directions, states)
    else:
        every, last = (x[0], directions, x[1], states), (directions, x[1], states)
    return [every, last, last][: len(question.node.outputs)]


def _resized(question: Question) -> list[Sizes]:
    """By scales of all axes; of what a call decides, by binary fractions such as 0.5 and 1.25."""
    scales, shape = question.values(2), question.shape()
    if not scales and (sizes := question.values(3)):
        if question.node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise _UnknownError
        axes = question.axes(len(question.node.inputs)) or list(range(len(shape)))
        given = {axis % len(shape): size for axis, size in zip(axes, sizes, strict=True)}
        return [tuple(given.get(axis, dim) for axis, dim in enumerate(shape))]
    if not scales or len(scales) != len(shape):
        raise _UnknownError
    return [tuple(_scaled(dim, float(scale)) for dim, scale in zip(shape, scales, strict=True))]


def _scaled(dim: SizeLike, scale: float) -> SizeLike:
    """The whole number below their product."""
    if not isinstance(dim, Size):
        return int(dim * scale)
    above, below = scale.as_integer_ratio()
    if below > _LARGEST_FRACTION:
        raise _UnknownError
    return dim * above // below


def _shape(question: Question) -> list[Sizes]:
    rank = len(question.shape())
    attributes = question.node.attributes
    return [(len(range(rank)[attributes.get_int("start", 0) : attributes.get_int("end", rank)]),)]


_RULES: dict[str, Callable[[Question], list[Sizes]]] = {
    "Concat": _concat,
    "ConvTranspose": _transposed_windows,
    "ConstantOfShape": _constant_of_shape,
    **dict.fromkeys(("AveragePool", "Conv", "ConvInteger", "LpPool", "MaxPool", "QLinearConv"), _windows),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    "Det": _determinant,
    "Expand": _expand,
    "Flatten": _flatten,
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth_to_space),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LayerNormalization": _normalization,
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    "Pad": _pad,
    "RMSNormalization": _normalization,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resized,
    **dict.fromkeys(_OF_DATA, _as_data),
    "DynamicQuantizeLinear": lambda question: [question.shape(), (), ()],
    "Shape": _shape,
    "Size": lambda question: [()],
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top,
    "Unsqueeze": _unsqueeze,
}
