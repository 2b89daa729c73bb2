"""Random small ONNX models of many operators, of every opset we take, for the property tests of graph passes.

Models are executable by `onnx.reference`, have static shapes and values without jumps: two correct evaluations that round
differently stay close. Operators are drawn as moves; a move adds a few nodes and returns the values they make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from prefuse.compiler.ir.facts import infer_node

OPSETS = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)
_MAX_ELEMENTS = 256
_SHAPES = ((), (1,), (4,), (2, 3), (1, 6), (2, 1, 3), (2, 3, 4), (1, 2, 4, 4), (2, 2, 3, 3))
_UNARY = ("Abs", "Elu", "Erf", "Identity", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Sin", "Softplus", "Tanh")
_BINARY = ("Add", "Max", "Min", "Mul", "Sub")
_VARIADIC = ("Mean", "Sum")  # the reference does not broadcast these
Shape = tuple[int, ...]


@dataclass
class Builder:
    """A model that grows by one node at a time, each with its facts."""

    draw: st.DrawFn
    opset: int
    model: ir.Model
    pool: list[ir.Value] = field(default_factory=list)  # float32 values with static shapes
    count: int = 0

    def add(self, op_type: str, inputs: Sequence[ir.Value | None], outputs: int = 1, **attributes: object) -> ir.Value:
        """Append a node and return its first output."""
        self.count += 1
        values = [ir.Value(name=f"v{self.count}_{index}") for index in range(outputs)]
        node = ir.node(op_type, inputs, attributes, outputs=values, name=f"node{self.count}")  # type: ignore[arg-type]
        self.model.graph.append(node)
        infer_node(node, self.model)
        return values[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        """A constant, as an initializer or as a Constant node."""
        self.count += 1
        tensor = ir.Tensor(np.asarray(array), name=f"c{self.count}")
        if self.draw(st.booleans()):
            return self.add("Constant", [], value=tensor)
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
        self.model.graph.register_initializer(value)
        return value

    def floats(self, shape: Shape) -> ir.Value:
        return self.constant(np.random.default_rng(self.count).uniform(-1, 1, shape).astype(np.float32))

    def scalar(self, *choices: float) -> ir.Value:
        number = np.float32(self.draw(st.sampled_from(choices)))
        return self.constant(np.full(self.draw(st.sampled_from([(), (1,)])), number))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def value(self, min_rank: int = 0, max_rank: int = 4) -> ir.Value | None:
        """Some value of a rank in bounds, or a new input where there is none."""
        fitting = [value for value in self.pool if min_rank <= len(shape_of(value)) <= max_rank]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def axis(self, value: ir.Value) -> int:
        rank = len(shape_of(value))
        return self.draw(st.integers(-rank, rank - 1))

    def over_axes(self, op_type: str, value: ir.Value, axes: tuple[int, ...], since: int, **attributes: int) -> ir.Value:
        """A node whose axes are an input from opset `since` on, and an attribute before."""
        if self.opset >= since:
            return self.add(op_type, [value, self.ints(*axes)], **attributes)
        return self.add(op_type, [value], axes=axes, **attributes)


def shape_of(value: ir.Value) -> Shape:
    assert value.shape is not None
    return tuple(value.shape.numpy())


Move = Callable[[Builder], ir.Value | None]  # None: there is nothing that the move fits


def _unary(b: Builder) -> ir.Value | None:
    value = b.value()
    return value and b.add(b.draw(st.sampled_from(_UNARY)), [value])


def _binary(b: Builder) -> ir.Value | None:
    first, second = b.value(), b.value()
    if first is None or second is None or not _broadcast(shape_of(first), shape_of(second)):
        return None
    operators = (*_BINARY, *_VARIADIC) if shape_of(first) == shape_of(second) else _BINARY
    return b.add(b.draw(st.sampled_from(operators)), [first, second])


def _with_scalar(b: Builder) -> ir.Value | None:
    value, op_type = b.value(), b.draw(st.sampled_from(["Add", "Div", "Mul", "Pow", "Sub"]))
    choices = {"Div": (1, 2, 4, 3), "Pow": (1, 2, 3)}.get(op_type, (0, 1, -1, 0.5))
    if value is None:
        return None
    pair = [value, b.scalar(*choices)]
    return b.add(op_type, pair[::-1] if op_type not in ("Div", "Pow") and b.draw(st.booleans()) else pair)


def _repeat(b: Builder) -> ir.Value | None:
    """The same computation once more, on the same value."""
    value = b.value(min_rank=1)
    return value and b.add("Sub", [b.add("Softsign", [value]), b.add("Softsign", [value])])


def _reshape(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    dims = shape_of(value)
    size = int(np.prod(dims))
    target = b.draw(st.sampled_from([dims, (-1,), (1, -1), (0, -1), (size, 1), (*dims, 1), dims[::-1]]))
    return b.add("Reshape", [value, b.ints(*target)])


def _reshape_by_arithmetic(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    first = b.add("Gather", [b.add("Shape", [value]), b.ints(0)], axis=0)
    return b.add("Reshape", [value, b.add("Concat", [first, b.ints(-1)], axis=0)])


def _change_rank(b: Builder) -> ir.Value | None:
    value = b.value(max_rank=3)
    if value is None:
        return None
    if value.shape is not None and 1 in shape_of(value) and b.draw(st.booleans()):
        return b.over_axes("Squeeze", value, (shape_of(value).index(1),), 13)
    if b.draw(st.booleans()):
        return b.over_axes("Unsqueeze", value, (b.draw(st.integers(0, len(shape_of(value)))),), 13)
    return b.add("Flatten", [value], axis=b.draw(st.integers(0, len(shape_of(value)))))


def _transpose(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    order = b.draw(st.permutations(range(len(shape_of(value)))))
    return b.add("Transpose", [value], perm=order) if b.draw(st.booleans()) else b.add("Transpose", [value])


def _expand(b: Builder) -> ir.Value | None:
    value = b.value(max_rank=3)
    target = () if value is None else (b.draw(st.sampled_from([1, 2])), *shape_of(value))
    if value is None or np.prod(target) > _MAX_ELEMENTS:
        return None
    expanded = b.add("Expand", [value, b.ints(*target)])
    return b.add("Add", [expanded, b.floats(target)]) if b.draw(st.booleans()) else expanded


def _slice(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    axis, start = b.axis(value), b.draw(st.sampled_from([0, 0, -1]))
    step = b.draw(st.sampled_from([1, 1, 2])) if start == 0 else -1
    return b.add("Slice", [value, b.ints(start), b.ints(1000 if start == 0 else -1000), b.ints(axis), b.ints(step)])


def _pad(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1, max_rank=3)
    if value is None or np.prod(shape_of(value)) > _MAX_ELEMENTS // 8:
        return None
    pads = b.draw(st.lists(st.integers(0, 1), min_size=2 * len(shape_of(value)), max_size=2 * len(shape_of(value))))
    return b.add("Pad", [value, b.ints(*pads)])


def _concat(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None or np.prod(shape_of(value)) > _MAX_ELEMENTS // 2:
        return None
    inputs: list[ir.Value | None] = [value] if b.draw(st.booleans()) else [value, b.add("Neg", [value])]
    return b.add("Concat", inputs, axis=b.axis(value))


def _split(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    axis = b.axis(value)
    length = shape_of(value)[axis]
    if length < 2:
        return None
    if b.draw(st.booleans()):
        parts = b.add("SplitToSequence", [value, b.ints(1, length - 1)], axis=axis)
        return b.add("SequenceAt", [parts, b.constant(np.array(b.draw(st.integers(-2, 1)), np.int64))])
    if b.opset < 13:
        return b.add("Split", [value], 2, axis=axis, split=(1, length - 1))
    return b.add("Split", [value, b.ints(1, length - 1)], 2, axis=axis)


def _gather(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    return value and b.add("Gather", [value, b.ints(0, -1)], axis=b.axis(value)) if _is_small(value) else None


def _tile(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None or not _is_small(value):
        return None
    repeats = [b.draw(st.integers(1, 2)), *[1] * (len(shape_of(value)) - 1)]
    return b.add("Tile", [value, b.ints(*repeats)])


def _reduce(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    op_type = b.draw(st.sampled_from(["ReduceL2", "ReduceMax", "ReduceMean", "ReduceSum", "ReduceSumSquare"]))
    since = 13 if op_type == "ReduceSum" else 18
    return b.over_axes(op_type, value, (b.axis(value),), since, keepdims=b.draw(st.integers(0, 1)))


def _softmax(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    axis = b.axis(value) if b.opset >= 13 else len(shape_of(value)) - 1  # the reference ignores the older meaning
    return b.add(b.draw(st.sampled_from(["LogSoftmax", "Softmax"])), [value], axis=axis)


def _matmul(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=2)
    return value and b.add("MatMul", [value, b.floats((shape_of(value)[-1], 3))])


def _gemm(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=2, max_rank=2)
    if value is None:
        return None
    transpose_a, transpose_b = b.draw(st.integers(0, 1)), b.draw(st.integers(0, 1))
    inner = shape_of(value)[0 if transpose_a else 1]
    weight = b.floats((3, inner) if transpose_b else (inner, 3))
    bias = [b.floats((3,))] if b.draw(st.booleans()) else []
    scale = b.draw(st.sampled_from([1.0, 0.5]))
    return b.add("Gemm", [value, weight, *bias], transA=transpose_a, transB=transpose_b, alpha=scale, beta=scale)


def _convolution(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=4)
    if value is None or min(shape_of(value)) < 1:
        return None
    weight = b.floats((2, shape_of(value)[1], 1, 1))
    return b.add("Conv", [value, weight, b.floats((2,))]) if b.draw(st.booleans()) else b.add("Conv", [value, weight])


def _pool(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=4)
    if value is None or min(shape_of(value)[2:]) < 2:
        return None
    op_type = b.draw(st.sampled_from(["AveragePool", "MaxPool"]))
    return b.add(op_type, [value], 2 if op_type == "MaxPool" else 1, kernel_shape=(2, 2))


def _normalize(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=2)
    if value is None or shape_of(value)[1] == 0:
        return None
    if b.opset >= 14 and b.draw(st.booleans()):  # before, the reference blends the statistics with those of the input
        channels = (shape_of(value)[1],)
        variance = b.constant(np.full(channels, 0.5, np.float32))
        return b.add("BatchNormalization", [value, b.floats(channels), b.floats(channels), b.floats(channels), variance])
    if b.opset >= 17:
        return b.add("LayerNormalization", [value, b.floats(shape_of(value)[-1:])])
    return b.add("MeanVarianceNormalization", [value]) if len(shape_of(value)) == 4 else None


def _cast(b: Builder) -> ir.Value | None:
    value = b.value()
    if value is None:
        return None
    if b.opset >= 15 and b.draw(st.booleans()):
        return b.add("CastLike", [value, b.floats(())])
    through = b.draw(st.sampled_from([ir.DataType.DOUBLE, ir.DataType.FLOAT]))
    return b.add("Cast", [b.add("Cast", [value], to=int(through))], to=int(ir.DataType.FLOAT))


def _dropout(b: Builder) -> ir.Value | None:
    value = b.value()
    if value is None:
        return None
    outputs = b.draw(st.integers(1, 2))
    if b.opset < 12:
        return b.add("Dropout", [value], outputs, ratio=0.5)
    mode = [b.constant(np.array(False))] if b.draw(st.booleans()) else []
    return b.add("Dropout", [value, b.constant(np.array(0.5, np.float32)), *mode], outputs)


def _where(b: Builder) -> ir.Value | None:
    first, second = b.value(), b.value()
    if first is None or second is None or not _broadcast(shape_of(first), shape_of(second)):
        return None
    pattern = b.draw(st.sampled_from([[True], [False], [True, True]]))
    shape = shape_of(first)
    condition = np.resize(pattern, shape if len(pattern) > 1 else ())
    return b.add("Where", [b.constant(condition), first, second])


def _clip(b: Builder) -> ir.Value | None:
    value, limits = b.value(), b.draw(st.sampled_from([(None, 1.0), (-1.0, None), (None, None), (0.0, 1.0)]))
    if value is None:
        return None
    bounds = [None if limit is None else b.constant(np.array(limit, np.float32)) for limit in limits]
    return b.add("Clip", [value, *bounds])


def _fill(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    tensor = ir.Tensor(np.array([b.draw(st.sampled_from([0.0, 1.0, 0.5]))], np.float32))
    filled = b.add("ConstantOfShape", [b.add("Shape", [value])], value=tensor)
    return b.add("Mul", [value, filled])


def _branch(b: Builder) -> ir.Value | None:
    """If, decided by a constant or by the data, whose branches read values from outside."""
    value = b.value()
    if value is None:
        return None
    if b.draw(st.booleans()):
        condition = b.constant(np.array(b.draw(st.booleans())))
    else:
        total = b.add("ReduceSum", [b.pool[0]], keepdims=0)
        condition = b.add("Greater", [total, b.constant(np.array(0, np.float32))])
    branches = []
    for op_type in ("Relu", "Neg"):
        b.count += 1
        first = ir.node("Tanh", [value], outputs=[ir.Value(name=f"t{b.count}")])
        last = ir.node(op_type, [first.outputs[0]], outputs=[ir.Value(name=f"b{b.count}")])
        last.outputs[0].type, last.outputs[0].shape = value.type, value.shape
        branches.append(ir.Graph([], [last.outputs[0]], nodes=[first, last], name=f"branch{b.count}"))
    return b.add("If", [condition], then_branch=branches[0], else_branch=branches[1])


MOVES: tuple[Move, ...] = (
    _unary, _unary, _binary, _binary, _binary, _with_scalar, _with_scalar, _repeat, _reshape, _reshape_by_arithmetic,
    _change_rank, _transpose, _transpose, _expand, _slice, _pad, _concat, _split, _gather, _tile, _reduce, _softmax, _matmul,
    _gemm, _convolution, _pool, _normalize, _cast, _dropout, _where, _clip, _fill, _branch,
)  # fmt: skip


@st.composite
def onnx_models(draw: st.DrawFn, max_moves: int = 10) -> ir.Model:
    """A model of some opset from 11 to 26, with shared values, shared constants, dead nodes, and outputs in the middle."""
    opset = draw(st.sampled_from(OPSETS))
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="main")
    builder = Builder(draw, opset, ir.Model(graph, ir_version=10))
    for number, shape in enumerate(draw(st.lists(st.sampled_from(_SHAPES), min_size=1, max_size=3))):
        value = ir.Value(name=f"x{number}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph.inputs.append(value)
        builder.pool.append(value)
    made = []
    for move in draw(st.lists(st.sampled_from(MOVES), min_size=1, max_size=max_moves)):
        result = move(builder)
        if result is not None and result.dtype == ir.DataType.FLOAT and result.shape is not None and result.shape.is_static():
            builder.pool.append(result)
            made.append(result)
    if not made:
        made = [builder.add("Relu", [builder.pool[0]])]
    others = draw(st.lists(st.sampled_from(made), max_size=2))
    graph.outputs.extend(dict.fromkeys([made[-1], *others]))
    return builder.model


def _broadcast(first: Shape, second: Shape) -> bool:
    try:
        return int(np.prod(np.broadcast_shapes(first, second))) <= _MAX_ELEMENTS
    except ValueError:
        return False


def _is_small(value: ir.Value | None) -> bool:
    return value is not None and int(np.prod(shape_of(value))) <= _MAX_ELEMENTS // 2
