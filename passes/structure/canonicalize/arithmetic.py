"""One spelling for arithmetic: constants on the right, batch normalisation as Mul and Add, plain Gemm, Softmax by one axis."""

from __future__ import annotations

from math import frexp, prod

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from ....compiler.ir.constants import constant_array, scalar_constant
from ....compiler.ir.facts import schema_of
from ....compiler.ir.matching import input_at, is_constant, is_floating, is_read, producer_of, rank_of, static_shape
from ....compiler.ir.rewriter import operation
from .scope import Replacement, Rule, Scope, respelled, spelled

_SMALLEST_RECIPROCAL, _LARGEST_RECIPROCAL = 2.0**-14, 2.0**14  # powers of two whose reciprocal is normal in every float type
_SMALLEST_FACTOR = 2.0**-32  # of operands of a product, and of both: what numbers near 1 are times it stays normal in float32
_DEVIATIONS = 8  # from its mean, within which what a batch normalisation takes must stay inside its type when it is scaled


def constant_last(node: ir.Node, scope: Scope) -> Replacement | None:
    """A commutative operator has its constant on the right."""
    first, second = node.inputs
    if not is_constant(first) or is_constant(second):
        return None
    return respelled(node, [second, first], node.attributes)


def multiply_by_reciprocal(node: ir.Node, scope: Scope) -> Replacement | None:
    """Division by a power of two is multiplication, exactly."""
    value, divisor = node.inputs[0], scalar_constant(node.inputs[1])
    divisor_array = constant_array(node.inputs[1])
    if divisor is None or divisor_array is None or not is_floating(value) or abs(frexp(divisor)[0]) != 0.5:
        return None
    if not _SMALLEST_RECIPROCAL <= abs(divisor) <= _LARGEST_RECIPROCAL or divisor_array.dtype.itemsize < 2:
        return None
    reciprocal = (1 / divisor_array.astype(np.float64)).astype(divisor_array.dtype)
    return spelled(operation("Mul", [value, scope.constant(reciprocal, node.inputs[1].name if node.inputs[1] else None)]))


def multiply_out_power(node: ir.Node, scope: Scope) -> Replacement | None:
    """A square or a cube is multiplication."""
    value, exponent = node.inputs[0], scalar_constant(node.inputs[1])
    if exponent not in (2, 3) or value is None or (rank_of(node.inputs[1]) or 0) > (rank_of(value) or 0):
        return None
    square = operation("Mul", [value, value])
    return spelled(square) if exponent == 2 else spelled(square, operation("Mul", [square.outputs[0], value]))


def add_two(node: ir.Node, scope: Scope) -> Replacement | None:
    """Sum of two is Add."""
    return spelled(operation("Add", node.inputs)) if len(node.inputs) == 2 else None


def cast_plainly(node: ir.Node, scope: Scope) -> Replacement | None:
    """CastLike becomes Cast to the type of what it is like."""
    like = node.inputs[1]
    if like is None or like.dtype is None:
        return None
    attributes = {**node.attributes, "to": ir.AttrInt64("to", int(like.dtype))}
    return spelled(ir.Node("", "Cast", node.inputs[:1], attributes))


def cast_once(node: ir.Node, scope: Scope) -> Replacement | None:
    """Cast of a Cast that lost nothing is one Cast from the original type."""
    inner = producer_of(node.inputs[0], "Cast")
    source = None if inner is None else inner.inputs[0]
    if source is None or node.inputs[0] is None or source.dtype is None or node.inputs[0].dtype is None:
        return None
    exact = (source.dtype, node.inputs[0].dtype)
    return respelled(node, [source], node.attributes) if _is_lossless(*exact) else None


def affine_batch_normalization(node: ir.Node, scope: Scope) -> Replacement | None:
    """Batch normalisation by known statistics is x * scale + shift with one pair of numbers a channel.

    Not where these, or x * scale for the x of a channel, are too large for the type: x - mean is not.
    """
    value, rank = node.inputs[0], rank_of(node.inputs[0])
    parameters = [constant_array(parameter) for parameter in node.inputs[1:5]]
    known = [parameter.astype(np.float64) for parameter in parameters if parameter is not None]
    is_training = node.attributes.get_int("training_mode", 0) != 0 or any(is_read(output) for output in node.outputs[1:])
    if value is None or value.dtype is None or rank is None or rank < 2 or len(known) < 4 or is_training:
        return None
    weight, bias, mean, variance = known
    name, dtype, shape = node.outputs[0].name, value.dtype.numpy(), (-1, *[1] * (rank - 2))
    with np.errstate(all="ignore"):
        scale = weight / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        shift = bias - mean * scale
        largest = np.maximum(np.abs(scale), np.abs(shift)), np.abs(mean * scale) + _DEVIATIONS * np.abs(weight)
    if any((numbers > float(ml_dtypes.finfo(dtype).max)).any() for numbers in largest):
        return None
    multiply = operation("Mul", [value, scope.constant(scale.astype(dtype).reshape(shape), f"{name}_scale")])
    add = operation("Add", [multiply.outputs[0], scope.constant(shift.astype(dtype).reshape(shape), f"{name}_shift")])
    return Replacement((multiply, add), (add.outputs[0], *[None] * (len(node.outputs) - 1)))


def plain_gemm(node: ir.Node, scope: Scope) -> Replacement | None:
    """Gemm keeps only transB: transA becomes a Transpose, alpha and beta become Mul; a bias times zero is not read (BLAS)."""
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    transposes, bias = bool(node.attributes.get_int("transA", 0)), input_at(node, 2)
    scales_bias = bias is not None and beta != 1.0
    if not transposes and alpha == 1.0 and not scales_bias:
        return None
    left, right = node.inputs[:2]
    if left is None or left.dtype is None or ((alpha != 1.0 or scales_bias) and not is_floating(left)):
        return None
    dtype, name, nodes = left.dtype.numpy(), node.outputs[0].name, []

    def emit(op_type: str, inputs: list[ir.Value | None], **attributes: int | list[int]) -> ir.Value:
        nodes.append(operation(op_type, inputs, **attributes))
        return nodes[-1].outputs[0]

    if transposes:
        left = emit("Transpose", [left], perm=[1, 0])
    if beta == 0.0:
        bias = None
    if bias is not None and scales_bias:
        bias = emit("Mul", [bias, scope.constant(np.array(beta, dtype), f"{name}_beta")])
    inputs = [left, right] if bias is None or alpha != 1.0 else [left, right, bias]
    result = emit("Gemm", inputs, transB=node.attributes.get_int("transB", 0))
    if alpha != 1.0:
        result = emit("Mul", [result, scope.constant(np.array(alpha, dtype), f"{name}_alpha")])
        if bias is not None:
            emit("Add", [result, bias])
    return spelled(*nodes)


def scale_left(node: ir.Node, scope: Scope) -> Replacement | None:
    """Operands of a product that are both multiplied by a number: the left one alone is, by both, as of ONNX's Attention.

    Keys that are not scaled are read where they lie, once for all heads that share them.
    """
    left, right = map(_scaled, node.inputs)
    if left is None or right is None:
        return None
    (a, factor), (b, other) = left, right
    both = float(factor.item()) * float(other.item())
    if not _SMALLEST_FACTOR <= abs(both) <= 1 / _SMALLEST_FACTOR:
        return None
    product = operation("Mul", [a, scope.constant(np.full(factor.shape, both, factor.dtype), "scale")])
    return spelled(product, operation("MatMul", [product.outputs[0], b]))


def _scaled(value: ir.Value | None) -> tuple[ir.Value, np.ndarray] | None:
    """What a value is a multiple of by one number, and this, in float32 or float64: narrow ones would be rounded otherwise."""
    node = producer_of(value, "Mul")
    if node is None or node.inputs[0] is None:
        return None
    number, rank = constant_array(node.inputs[1]), rank_of(node.inputs[0])
    if number is None or number.size != 1 or number.ndim > (rank or 0) or number.dtype not in (np.float32, np.float64):
        return None
    return (node.inputs[0], number) if _SMALLEST_FACTOR <= abs(number.item()) <= 1 / _SMALLEST_FACTOR else None


def softmax_by_axis(node: ir.Node, scope: Scope) -> Replacement | None:
    """Softmax before opset 13 flattens its input to a matrix at `axis`: spelled out, unless `axis` is the last one anyway."""
    rank, dims = rank_of(node.inputs[0]), static_shape(node.inputs[0])
    if scope.opset >= 13 or not rank:
        return None
    axis = node.attributes.get_int("axis", 1) % rank
    if axis == rank - 1 or dims is None or 0 in dims:
        return None
    name = node.outputs[0].name
    flatten = operation("Reshape", [node.inputs[0], scope.ints([prod(dims[:axis]), prod(dims[axis:])], f"{name}_shape")])
    softmax = operation(node.op_type, flatten.outputs, axis=1)
    return spelled(flatten, softmax, operation("Reshape", [softmax.outputs[0], scope.ints(dims, f"{name}_shape")]))


def explicit_axis(node: ir.Node, scope: Scope) -> Replacement | None:
    """An axis counted from the end, given or by default, is counted from the front."""
    rank, schema = rank_of(node.inputs[0]), schema_of(node, scope.model.graph.opset_imports)
    if not rank or schema is None or "axis" not in schema.attributes:
        return None
    default = schema.attributes["axis"].default_value
    axis = node.attributes.get_int("axis", default.i if default.type == onnx.AttributeProto.INT else None)
    if axis is None or not -rank <= axis < 0:
        return None
    return respelled(node, node.inputs, {**node.attributes, "axis": ir.AttrInt64("axis", axis + rank)})


def _is_lossless(source: ir.DataType, target: ir.DataType) -> bool:
    """Whether every number of `source` is one of `target`; NumPy's word is taken, except for 64-bit integers as floats."""
    native = source.numpy().kind in "biuf" and target.numpy().kind in "biuf"
    if not native or ir.DataType.STRING in (source, target):
        return False
    if source.numpy().kind in "iu" and source.itemsize == 8 and target.is_floating_point():
        return False
    return bool(np.can_cast(source.numpy(), target.numpy(), "safe"))


_COMMUTATIVE = ("Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mul", "Or", "Xor")
_OF_ONE_AXIS = """
    ArgMax ArgMin Concat Gather GatherElements LayerNormalization RMSNormalization ScatterElements Split TopK"""

RULES: dict[str, tuple[Rule, ...]] = {
    "BatchNormalization": (affine_batch_normalization,),
    "Cast": (cast_once,),
    "CastLike": (cast_plainly,),
    "Div": (multiply_by_reciprocal,),
    "Gemm": (plain_gemm,),
    "MatMul": (scale_left,),
    "Pow": (multiply_out_power,),
    "Sum": (add_two,),
    **dict.fromkeys(_OF_ONE_AXIS.split(), (explicit_axis,)),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), (softmax_by_axis, explicit_axis)),
    **dict.fromkeys(_COMMUTATIVE, (constant_last,)),
}
