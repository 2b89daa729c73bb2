"""Random whole programs: the models of `strategies` with more element types, runtime indices, empty tensors and odd outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from prefuse.runtime.errors import InvalidModelError
from prefuse.tests.models.strategies import MOVES, Builder, Move, Shape, shape_of

_OPSETS = (13, 17, 18, 21, 23)
_SHAPES: tuple[Shape, ...] = (
    (), (1,), (7,), (3, 5), (1, 6), (17, 33), (2, 1, 3), (2, 3, 4), (1, 2, 4, 4), (2, 4, 5, 7), (1, 3, 8, 8), (0,), (2, 0, 3),
)  # fmt: skip
_MAX_ELEMENTS = 1200


def _batched_matmul(b: Builder) -> ir.Value | None:
    """A product of two values of the model."""
    value = b.value(min_rank=2)
    return value and b.add("MatMul", [value, b.add("Transpose", [value], perm=_swapped(len(shape_of(value))))])


def _vector_matmul(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None:
        return None
    vector = b.floats(shape_of(value)[-1:])
    return b.add("MatMul", [value, vector])


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _windowed_convolution(b: Builder) -> ir.Value | None:
    """Strides, pads, dilations, groups, followed by a pointwise chain."""
    value = b.value(min_rank=4)
    if value is None or min(shape_of(value)) == 0 or min(shape_of(value)[2:]) < 3:
        return None
    channels = shape_of(value)[1]
    window = b.draw(st.sampled_from([(1, 1), (3, 3), (3, 1), (2, 2)]))
    attributes: dict[str, Any] = {
        "kernel_shape": window,
        "strides": b.draw(st.sampled_from([(1, 1), (2, 2), (1, 2)])),
        "pads": b.draw(st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0)])),
    }
    if b.draw(st.booleans()):  # without groups, of which the reference makes something else
        return b.add("ConvTranspose", [value, b.floats((channels, 2, *window)), b.floats((2,))], **attributes)
    group = b.draw(st.sampled_from([1, channels]))
    outputs = group * b.draw(st.sampled_from([1, 3, 17]))
    weight, bias = b.floats((outputs, channels // group, *window)), b.floats((outputs,))
    result = b.add("Conv", [value, weight, bias], group=group, **attributes)
    return b.add("Relu", [b.add("Mul", [result, b.floats((outputs, 1, 1))])]) if b.draw(st.booleans()) else result


def _windowed_pool(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=4)
    if value is None or min(shape_of(value)) == 0 or min(shape_of(value)[2:]) < 3:
        return None
    op_type = b.draw(st.sampled_from(["AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"]))
    if op_type.startswith("Global"):
        return b.add(op_type, [value])
    attributes: dict[str, Any] = {
        "kernel_shape": (3, 2),
        "strides": b.draw(st.sampled_from([(1, 1), (2, 2)])),
        "pads": b.draw(st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1)])),
    }
    if op_type == "AveragePool":
        attributes["count_include_pad"] = b.draw(st.integers(0, 1))
    return b.add(op_type, [value], **attributes)


def _reduce_axes(b: Builder) -> ir.Value | None:
    """Several axes, or all of them."""
    value = b.value(min_rank=2)
    if value is None or 0 in shape_of(value):
        return None
    rank = len(shape_of(value))
    axes = b.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    op_type = b.draw(st.sampled_from(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceL1", "ReduceLogSumExp"]))
    reduced = b.over_axes(op_type, value, tuple(axes), 13 if op_type == "ReduceSum" else 18, keepdims=1)
    return b.add("Sub", [value, reduced]) if b.draw(st.booleans()) else reduced


def _layer_norm(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=2)
    if value is None or b.opset < 17 or 0 in shape_of(value):
        return None
    axis = b.draw(st.integers(1, len(shape_of(value)) - 1))
    scale = b.floats(shape_of(value)[axis:])
    result = b.add("LayerNormalization", [value, scale, b.floats(shape_of(value)[axis:])], axis=axis)
    return b.add("Add", [result, value]) if b.draw(st.booleans()) else result


def _softmax_with_mask(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=2)
    if value is None or 0 in shape_of(value):
        return None
    scaled = b.add("Mul", [value, b.scalar(0.5)])
    return b.add("Softmax", [b.add("Add", [scaled, b.floats(shape_of(value)[-1:])])], axis=b.axis(value))


def _gather_rows(b: Builder) -> ir.Value | None:
    """Indices computed at run time."""
    value = b.value(min_rank=2)
    if value is None or 0 in shape_of(value):
        return None
    distinct = b.add("Add", [value, b.floats(shape_of(value)[-1:])])  # equal values might round differently
    indices = b.add("ArgMax", [distinct], axis=-1, keepdims=0)
    return b.add("Gather", [b.floats((shape_of(value)[-1], 3)), indices], axis=b.draw(st.sampled_from([0, -2])))


def _compare(b: Builder) -> ir.Value | None:
    """Flags, logic, and back."""
    value = b.value()
    if value is None:
        return None
    above = b.add(b.draw(st.sampled_from(["Greater", "LessOrEqual"])), [value, b.scalar(0.2468)])
    below = b.add("Less", [value, b.scalar(0.7531)])
    flags = b.add(b.draw(st.sampled_from(["And", "Or", "Xor"])), [above, below])
    if b.draw(st.booleans()):
        return b.add("Cast", [flags], to=int(ir.DataType.FLOAT))
    return b.add("Where", [b.add("Not", [flags]), value, b.scalar(0.0, 2.0)])


def _integers(b: Builder) -> ir.Value | None:
    """Through integer arithmetic and back."""
    value = b.value()
    if value is None:
        return None
    kinds = [ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT16, *([ir.DataType.INT8] if b.opset >= 14 else [])]
    kind = b.draw(st.sampled_from(kinds))
    clipped = b.add("Clip", [value, scalar(b, -8.0), scalar(b, 8.0)])
    scaled = b.add("Round", [b.add("Add", [clipped, scalar(b, 0.1234)])])  # off the halves, where rounding jumps
    whole = b.add("Cast", [scaled], to=int(kind))
    doubled = b.add("Add", [whole, whole])
    return b.add("Cast", [doubled], to=int(ir.DataType.FLOAT))


def _shape_arithmetic(b: Builder) -> ir.Value | None:
    """Reshape to a shape that takes several operators to compute."""
    value = b.value(min_rank=2)
    if value is None or 0 in shape_of(value):
        return None
    dims = b.add("Shape", [value])
    head = b.add("Slice", [dims, b.ints(0), b.ints(2), b.ints(0)])
    tail = b.over_axes("ReduceProd", b.add("Slice", [dims, b.ints(2), b.ints(9), b.ints(0)]), (0,), 18, keepdims=1)
    return b.add("Reshape", [value, b.add("Concat", [b.add("Mul", [head, b.ints(1, 1)]), tail], axis=0)])


def _depth_to_space(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=4)
    if value is None or shape_of(value)[1] % 4 or 0 in shape_of(value):
        return None
    return b.add("DepthToSpace", [value], blocksize=2, mode=b.draw(st.sampled_from(["DCR", "CRD"])))


def _gather_elements(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=1)
    if value is None or 0 in shape_of(value):
        return None
    axis = b.axis(value)
    indices = np.random.default_rng(b.count).integers(-shape_of(value)[axis], shape_of(value)[axis], shape_of(value))
    return b.add("GatherElements", [value, b.constant(indices)], axis=axis)


def _triangle(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=2)
    return value and b.add("Trilu", [value], upper=b.draw(st.integers(0, 1))) if b.opset >= 14 else None


def _merge(b: Builder) -> ir.Value | None:
    """Concatenation of values of the model, one of them perhaps twice."""
    value = b.value(min_rank=1)
    if value is None or np.prod(shape_of(value)) > _MAX_ELEMENTS // 3:
        return None
    active = b.add("Tanh", [value])
    return b.add("Concat", [value, active, *([active] if b.draw(st.booleans()) else [])], axis=b.axis(value))


def _pieces(b: Builder) -> ir.Value | None:
    """Parts of a vector and what is computed of them, joined and joined again, in whatever order, one perhaps twice."""
    value = b.value(min_rank=1)
    size = 0 if value is None else int(np.prod(shape_of(value)))
    if value is None or not 2 <= size <= _MAX_ELEMENTS // 8:
        return None
    flat = b.add("Reshape", [value, b.ints(-1)])
    cut = b.draw(st.integers(1, size - 1))
    pool = [flat, b.add("Tanh", [flat]), b.add("Slice", [flat, b.ints(cut), b.ints(size), b.ints(0)])]
    pool.append(b.add("Gather", [pool[1], b.ints(cut - 1, cut)], axis=0))
    pool.append(b.add("Neg", [pool[2]]))
    pool.append(b.add("Unsqueeze", [b.add("Gather", [flat, b.constant(np.array(-1, np.int64))], axis=0), b.ints(0)]))
    for _ in range(b.draw(st.integers(1, 4))):
        parts = b.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
        if sum(np.prod(shape_of(part)) for part in parts) <= _MAX_ELEMENTS:
            pool.append(b.add(b.draw(st.sampled_from(["Sin", "Identity"])), [b.add("Concat", parts, axis=0)]))
            if b.draw(st.booleans()):
                pool.append(b.add("Abs", [b.draw(st.sampled_from(pool))]))
    if b.draw(st.booleans()):  # in whose order depends on how the parts lie
        parts = b.draw(st.lists(st.sampled_from(pool), min_size=2, max_size=3))
        joined = b.add("Concat", parts, axis=0)
        return b.add("MatMul", [joined, b.floats((shape_of(joined)[0], 3))])
    return pool[-1]


def _parallel_products(b: Builder) -> ir.Value | None:
    """Products of one value by constants, with biases and activations or none, and what reads them: rows, attention, a sum."""
    value = b.value(min_rank=2)
    if value is None or 0 in shape_of(value):
        return None
    depth, columns = shape_of(value)[-1], b.draw(st.sampled_from([1, 3, 8]))
    branches = []
    active = b.draw(st.booleans())
    for _ in range(b.draw(st.integers(2, 4))):
        result = b.add("MatMul", [value, b.floats((depth, columns))])
        if b.draw(st.booleans()):
            result = b.add("Add", [result, b.floats((columns,))])
        branches.append(b.add("Relu", [result]) if active else result)
    match b.draw(st.sampled_from(["attention", "rows", "sum", "joined"])):
        case "attention":
            keys = b.add("Transpose", [branches[1]], perm=_swapped(len(shape_of(value))))
            queries = b.add("Mul", [branches[0], scalar(b, 0.25)]) if b.draw(st.booleans()) else branches[0]
            return b.add("MatMul", [b.add("Softmax", [b.add("MatMul", [queries, keys])], axis=-1), branches[-1]])
        case "rows":
            return b.add("Sub", [b.add("Softmax", [branches[0]], axis=-1), b.add("Softmax", [branches[-1]], axis=-1)])
        case "sum":
            return b.add("Sum", branches)
        case _:
            return b.add("Concat", branches[::-1], axis=b.draw(st.sampled_from([-1, 0])))


def _joined_product(b: Builder) -> ir.Value | None:
    """A product of values side by side, one of them perhaps twice."""
    value = b.value(min_rank=2)
    if value is None or 0 in shape_of(value) or np.prod(shape_of(value)) > _MAX_ELEMENTS // 3:
        return None
    parts = [value, b.add("Tanh", [value]), *([value] if b.draw(st.booleans()) else [])]
    depth = len(parts) * shape_of(value)[-1]
    if len(shape_of(value)) == 4 and b.draw(st.booleans()):
        joined = b.add("Concat", parts, axis=1)
        return b.add("Conv", [joined, b.floats((2, shape_of(joined)[1], 3, 1)), b.floats((2,))], pads=(1, 0, 1, 0))
    joined = b.add("Concat", parts, axis=-1)
    if len(shape_of(value)) == 2 and b.draw(st.booleans()):
        return b.add("Gemm", [joined, b.floats((2, depth)), b.floats((2,))], transB=1)
    return b.add("Add", [b.add("MatMul", [joined, b.floats((depth, 2))]), b.floats((2,))])


def _residual(b: Builder) -> ir.Value | None:
    """A value read again behind a view of it."""
    value = b.value(min_rank=1)
    if value is None:
        return None
    flat = b.add("Reshape", [value, b.ints(-1)]) if 0 not in shape_of(value) else b.add("Identity", [value])
    active = b.add(b.draw(st.sampled_from(["Relu", "Exp", "Sigmoid"])), [b.add("Clip", [flat, None, scalar(b, 3.0)])])
    return b.add("Add", [active, flat])


EXTRA_MOVES: tuple[Move, ...] = (
    _batched_matmul, _vector_matmul, _windowed_convolution, _windowed_convolution, _windowed_pool, _reduce_axes, _reduce_axes,
    _layer_norm, _softmax_with_mask, _gather_rows, _compare, _integers, _shape_arithmetic, _depth_to_space, _gather_elements,
    _triangle, _merge, _residual, _residual, _pieces, _pieces,
    _parallel_products, _parallel_products, _joined_product, _joined_product,
)  # fmt: skip


def scalar(b: Builder, number: float) -> ir.Value:
    return b.constant(np.array(number, np.float32))


@st.composite
def programs(draw: st.DrawFn, max_moves: int = 12) -> ir.Model:
    """A model with one to three inputs, of which an output may be a result, an input, a constant, or a view of any of them."""
    return random_program(draw, (*MOVES, *EXTRA_MOVES), _SHAPES, (4, max_moves))


def random_program(draw: st.DrawFn, moves: Sequence[Move], shapes: Sequence[Shape], counts: tuple[int, int]) -> ir.Model:
    """A model of so many of these moves, at least and at most, with inputs of these shapes."""
    opset = draw(st.sampled_from(_OPSETS))
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="main")
    builder = Builder(draw, opset, ir.Model(graph, ir_version=10))
    for number, shape in enumerate(draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=3))):
        value = ir.Value(name=f"x{number}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph.inputs.append(value)
        builder.pool.append(value)
    made = []
    for move in draw(st.lists(st.sampled_from(moves), min_size=counts[0], max_size=counts[1])):
        try:
            result = move(builder)
        except InvalidModelError:  # the last node has no meaning on an empty tensor
            graph.remove(graph[-1], safe=True)
            continue
        if result is not None and _is_float(result) and np.prod(shape_of(result)) <= _MAX_ELEMENTS:
            builder.pool.append(result)
            made.append(result)
    inner = [v for node in graph for v in node.outputs if v.dtype is not None and v.shape is not None and v.shape.is_static()]
    outputs = [made[-1]] if made else []
    kinds = st.sampled_from(["made", "inner", "input", "constant", "alias", "reshaped"])
    outputs += [_output(draw, builder, kind, made, inner) for kind in draw(st.lists(kinds, max_size=3))]
    graph.outputs.extend(dict.fromkeys(outputs or [_output(draw, builder, "alias", made, inner)]))
    return builder.model


def _output(draw: st.DrawFn, b: Builder, kind: str, made: list[ir.Value], inner: list[ir.Value]) -> ir.Value:
    if kind == "inner" and inner:  # flags, integers and halves too
        return draw(st.sampled_from(inner))
    if kind == "made" and made:
        return draw(st.sampled_from(made))
    if kind == "constant":
        return b.floats((2, 3))
    if kind == "input":
        return b.pool[0]
    value = draw(st.sampled_from(b.pool))
    if kind == "reshaped" and 0 not in shape_of(value):
        return b.add("Reshape", [value, b.ints(1, -1)])
    return b.add("Identity", [value])


def _is_float(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT and value.shape is not None and value.shape.is_static()
