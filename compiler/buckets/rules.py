"""Which operators keep the parts of their operands apart: for each, how a dimension lies in its results.

A rule raises MixedError where a part of a result may depend on what does not count. What has no rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import least_of
from ..ir.constants import constant_array
from ..ir.kinds import KIND_OF_OPERATOR, Kind
from .carry import NONE, Carries, Carry, MixedError, Question, shown

Rule = Callable[[Question], Sequence[Carries]]


def carried(question: Question) -> list[Carries]:
    """How dimensions lie in the outputs of a node, one for each. Raises MixedError."""
    node = question.node
    if not any(map(question.carries, range(len(node.inputs)))) and node.op_type not in _MAKERS:
        question.require_sizes_for_shapes(())
        if any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()):
            raise MixedError("has a graph of its own")
        return [NONE] * len(node.outputs)
    kind = KIND_OF_OPERATOR.get(node.op_type)
    rule = _RULES.get(node.op_type) or (_pointwise if kind in (Kind.ELEMENTWISE, Kind.BROADCAST) else None)
    if rule is None or node.domain != "":
        raise MixedError("has no rule for padding")
    question.require_sizes_for_shapes(_SHAPES.get(node.op_type, ()))
    found = list(rule(question))
    return found if len(found) == len(node.outputs) else found * len(node.outputs)


def _pointwise(q: Question) -> list[Carries]:
    """NumPy's broadcasting: an operand has each dimension as the others have it, or one element along that axis."""
    if q.node.op_type in ("Div", "Mod") and _may_trap(q):
        raise MixedError("of integers stops a program where padding is divided by zero")
    rank = len(q.result())
    moved = [_from_right(q.carries(place), len(q.shape(place)), rank) if q.given(place) else NONE for place in _places(q)]
    every = NONE.union(*moved)
    for place, carries in zip(_places(q), moved, strict=True):
        for carry in every - carries if q.given(place) else ():
            axis = carry.axis - rank + len(q.shape(place))
            if axis >= 0 and not is_one(q.shape(place)[axis]):
                raise MixedError(f"reads an operand that lies otherwise along {carry.name}")
    return [every]


def _may_trap(q: Question) -> bool:
    dtype = q.node.outputs[0].dtype
    if dtype is None or dtype.is_floating_point():
        return False
    divisor = constant_array(q.node.inputs[1])
    return divisor is None or not divisor.all()


def _places(q: Question) -> range:
    return range(len(q.node.inputs))


def _from_right(carries: Carries, rank: int, result: int) -> Carries:
    """Of an operand that is broadcast to `result` dimensions."""
    return frozenset(Carry(carry.name, carry.axis + result - rank, carry.inner) for carry in carries)


def _scaled(q: Question) -> list[Carries]:
    """Quantization: one scale, or one for each index of another axis."""
    q.require_same_for_all()
    rank = len(q.shape(1))
    if rank > 1:
        raise MixedError("has scales of blocks")
    if rank == 1 and not is_one(q.shape(1)[0]):
        q.require_apart(q.carries(), {q.axis(1)}, "has scales")
    return [q.carries()]


def _shown(q: Question) -> list[Carries]:
    """The same bytes under another shape."""
    q.require_same_for_all()
    return [shown(q.carries(), q.shape(), q.result(), q.domain)]


def _transposed(q: Question) -> list[Carries]:
    order = q.node.attributes.get_ints("perm") or tuple(reversed(range(len(q.shape()))))
    return [frozenset(Carry(carry.name, list(order).index(carry.axis), carry.inner) for carry in q.carries())]


def _product(q: Question) -> list[Carries]:
    """Rows, columns and batches stay apart; what is contracted does not."""
    a, b = q.shape(0), q.shape(1)
    if len(a) < 2 or len(b) < 2:
        q.require_apart(q.carries(0), {len(a) - 1}, "adds")
        q.require_apart(q.carries(1), {max(len(b) - 2, 0)}, "adds")
        last = len(q.result()) - 1
        left = {carry for carry in q.carries(0) if len(b) == 1}
        right = {Carry(one.name, last if one.axis == len(b) - 1 else one.axis, one.inner) for one in q.carries(1)}
        if (q.carries(0) and len(b) > 1) or (right and len(a) > 1):
            raise MixedError("of vectors has padding on both sides")
        return [frozenset(left | right)]
    rank = len(q.result())
    q.require_apart(q.carries(0), {len(a) - 1}, "adds")
    q.require_apart(q.carries(1), {len(b) - 2}, "adds")
    sides = [_from_right(q.carries(place), len(q.shape(place)), rank) for place in (0, 1)]
    for place, other in ((0, sides[1]), (1, sides[0])):
        for carry in other - sides[place]:
            axis = carry.axis - rank + len(q.shape(place))
            if carry.axis < rank - 2 and axis >= 0 and not is_one(q.shape(place)[axis]):
                raise MixedError(f"reads an operand that lies otherwise along {carry.name}")
    return [sides[0] | sides[1]]


def _gemm(q: Question) -> list[Carries]:
    flipped = [bool(q.node.attributes.get_int(name, 0)) for name in ("transA", "transB")]
    q.require_same_for_all(1, 2)
    q.require_apart(q.carries(), {0 if flipped[0] else 1}, "adds")
    return [frozenset(Carry(carry.name, 0, carry.inner) for carry in q.carries())]


def _images(q: Question) -> list[Carries]:
    """What computes each image of a batch by itself."""
    q.require_same_for_all()
    q.require_apart(q.carries(), range(1, len(q.shape())), "mixes")
    return [q.carries()]


def _batch_norm(q: Question) -> list[Carries]:
    if q.node.attributes.get_int("training_mode", 0):
        raise MixedError("finds a mean of all")
    q.require_same_for_all()
    q.require_apart(q.carries(), {1}, "has scales")
    return [q.carries()]


def _rows(default: int) -> Rule:
    """What mixes along one axis, and may have others' constants."""

    def rule(q: Question) -> list[Carries]:
        q.require_same_for_all()
        q.require_apart(q.carries(), {q.axis(default)}, "mixes")
        return [q.carries()]

    return rule


def _normalized(q: Question) -> list[Carries]:
    q.require_same_for_all()
    q.require_apart(q.carries(), range(q.axis(-1), len(q.shape())), "mixes")
    return [q.carries()]


def _cumulative(q: Question) -> list[Carries]:
    """From the first part on, what comes behind is not seen."""
    axis = q.numbers(1)
    assert axis is not None
    if q.node.attributes.get_int("reverse", 0):
        q.require_apart(q.carries(), {int(axis[0]) % len(q.shape())}, "adds from the end")
    if any(carry.axis == int(axis[0]) % len(q.shape()) and not is_one(carry.inner) for carry in q.carries()):
        raise MixedError("adds over parts")
    if any(carry.axis == int(axis[0]) % len(q.shape()) for carry in q.carries()):
        _require_outermost(q, int(axis[0]) % len(q.shape()))
    return [q.carries()]


def _require_outermost(q: Question, axis: int) -> None:
    """Raise MixedError where an axis holds more than one dimension."""
    for carry in q.carries():
        if carry.axis == axis and str(q.shape()[axis]) != carry.name:
            raise MixedError(f"reads several parts along {carry.name}")


def _reduced(q: Question) -> list[Carries]:
    given = q.numbers(1) if q.given(1) else q.node.attributes.get_ints("axes")
    axes = range(len(q.shape())) if given is None or not len(given) else [int(axis) % len(q.shape()) for axis in given]
    return [_without(q, axes)]


def _searched(q: Question) -> list[Carries]:
    return [_without(q, [q.axis(0)])]


def _without(q: Question, axes: Sequence[int]) -> Carries:
    """The carries of the first operand, of which these axes are reduced."""
    q.require_apart(q.carries(), axes, "reduces")
    keeps = q.node.attributes.get_int("keepdims", 1)
    return frozenset(
        Carry(carry.name, carry.axis - (0 if keeps else sum(axis < carry.axis for axis in axes)), carry.inner)
        for carry in q.carries()
    )


def _chosen(q: Question) -> list[Carries]:
    """Gather: indices choose whole parts around the axis; along it, only places that count in every call."""
    axis, indices = q.axis(0), len(q.shape(1))
    found = {Carry(carry.name, axis + carry.axis, carry.inner) for carry in q.carries(1)}
    for carry in q.carries(0):
        if carry.axis == axis:
            places = q.numbers(1)
            assert places is not None
            _require_outermost(q, axis)
            if places.size and not 0 <= places.min() <= places.max() < least_of(q.shape()[axis]):
                raise MixedError(f"reads places that may be behind the end of {carry.name}")
        else:
            found.add(Carry(carry.name, carry.axis - (carry.axis > axis) * (1 - indices), carry.inner))
    return [frozenset(found)]


def _joined(q: Question) -> list[Carries]:
    q.require_apart(q.carries(), {q.axis(0)}, "joins")
    if any(q.carries(place) != q.carries() for place in _places(q)):
        raise MixedError("joins operands that lie otherwise")
    return [q.carries()]


def _divided(q: Question) -> list[Carries]:
    q.require_same_for_all()
    q.require_apart(q.carries(), {q.axis(0)}, "divides")
    return [q.carries()]


def _sliced(q: Question) -> list[Carries]:
    """Along other axes; or the first rows of a table, one for each part."""
    starts, steps = q.numbers(1), q.numbers(4)
    assert starts is not None
    axes = q.numbers(3) if q.given(3) else range(len(starts))
    assert axes is not None
    cut = [int(axis) % len(q.shape()) for axis in axes]
    q.require_apart(q.carries(), cut, "cuts")
    found = set(q.carries())
    for place, axis in enumerate(cut):
        if made := q.of_size(axis, q.result()[axis]):
            if starts[place] < 0 or (steps is not None and steps[place] < 1):
                raise MixedError("counts from the end")
            found |= made
    return [frozenset(found)]


def _expanded(q: Question) -> list[Carries]:
    shape, result = q.shape(), q.result()
    found = set(_from_right(q.carries(), len(shape), len(result)))
    for axis, size in enumerate(result):
        own = axis - len(result) + len(shape)
        if own < 0 or is_one(shape[own]):
            found |= q.of_size(axis, size)
    return [frozenset(found)]


def _made(q: Question) -> list[Carries]:
    """Of nothing but sizes: each element is the same, or tells its place."""
    if q.node.op_type == "Range":
        q.require_same_for_all()
        q.numbers(0)
        q.numbers(2)
    return [NONE.union(*(q.of_size(axis, size) for axis, size in enumerate(q.result())))]


def _padded(q: Question) -> list[Carries]:
    pads, axes = q.numbers(1), q.numbers(3)
    assert pads is not None
    places = [int(axis) % len(q.shape()) for axis in (range(len(q.shape())) if axes is None else axes)]
    touched = {axis for place, axis in enumerate(places) if pads[place] or pads[place + len(places)]}
    q.require_same_for_all()
    q.require_apart(q.carries(), touched, "pads")
    return [q.carries()]


def _resized(q: Question) -> list[Carries]:
    """By constant scales, which are 1 along what is carried."""
    scales, axes = q.numbers(2), q.node.attributes.get_ints("axes")
    if scales is None or not scales.size:
        raise MixedError("has no constant scales")
    if q.node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise MixedError("crops")
    places = [axis % len(q.shape()) for axis in axes or range(len(q.shape()))]
    q.require_apart(q.carries(), {axis for axis, scale in zip(places, scales, strict=True) if scale != 1}, "resizes")
    return [q.carries()]


def _triangle(q: Question) -> list[Carries]:
    q.require_same_for_all()
    if any(str(q.shape()[carry.axis]) != carry.name for carry in q.carries() if carry.axis >= len(q.shape()) - 2):
        raise MixedError("reads several parts")
    return [q.carries()]


def _tiled(q: Question) -> list[Carries]:
    times = q.numbers(1)
    assert times is not None
    q.require_apart(q.carries(), {axis for axis, count in enumerate(times) if count != 1}, "repeats")
    return [q.carries()]


def _one_hot(q: Question) -> list[Carries]:
    q.require_same_for_all()
    rank = len(q.result())
    axis = q.node.attributes.get_int("axis", -1) % rank
    return [frozenset(Carry(carry.name, carry.axis + (carry.axis >= axis), carry.inner) for carry in q.carries())]


def _determinant(q: Question) -> list[Carries]:
    q.require_apart(q.carries(), range(len(q.shape()) - 2, len(q.shape())), "mixes")
    return [q.carries()]


def _recurrent(q: Question) -> list[Carries]:
    """Sequences of a batch stay apart. A forward recurrence sees no later step; but its last state is behind the end."""
    if q.node.attributes.get_int("layout", 0):
        raise MixedError("has batches first")
    q.require_same_for_all(1, 2, 3, 7)
    x, states = q.carries(0), (q.carries(4), q.carries(5), q.carries(6))
    steps = frozenset(carry for carry in x if carry.axis == 0)
    direction = q.node.attributes.get_string("direction", "forward")
    later = [value for value in q.node.outputs[1:] if value.name and (value.uses() or value.is_graph_output())]
    if steps and (direction != "forward" or later):
        raise MixedError(f"goes along {next(iter(steps)).name} to its end")
    q.require_apart(x, {2}, "mixes")
    batch = {(carry.name, carry.inner) for carry in x if carry.axis == 1}
    for carries, axis, place in zip(states, (0, 1, 1), (4, 5, 6), strict=True):
        if q.given(place) and {(carry.name, carry.inner) for carry in carries if carry.axis == axis} != batch:
            raise MixedError("reads states that lie otherwise")
        if any(carry.axis != axis for carry in carries):
            raise MixedError("mixes states")
    sequences, last = (frozenset(Carry(name, axis, inner) for name, inner in batch) for axis in (2, 1))
    return [sequences | steps, *[last] * (len(q.node.outputs) - 1)]


_MAKERS = ("ConstantOfShape", "Expand", "Range", "Slice")  # of axes whose sizes constants of sizes tell
_SHAPES = {  # the operands by which sizes tell shapes
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Range": (1,),
    "Reshape": (1,),
    "Slice": (2,),
}
_OF_IMAGES = """
    AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization
    InstanceNormalization LRN LpPool MaxPool SpaceToDepth"""
_REDUCED = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"), _shown),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _scaled),
    **dict.fromkeys(_OF_IMAGES.split(), _images),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax", "TopK"), _rows(-1)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalized),
    **dict.fromkeys(("ArgMax", "ArgMin"), _searched),
    **{f"Reduce{name}": _reduced for name in _REDUCED.split()},
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("ConstantOfShape", "Range"), _made),
    "BatchNormalization": _batch_norm,
    "Concat": _joined,
    "CumSum": _cumulative,
    "Det": _determinant,
    "Expand": _expanded,
    "Gather": _chosen,
    "Gemm": _gemm,
    "MatMul": _product,
    "OneHot": _one_hot,
    "Pad": _padded,
    "Resize": _resized,
    "Slice": _sliced,
    "Split": _divided,
    "Tile": _tiled,
    "Transpose": _transposed,
    "Trilu": _triangle,
}
