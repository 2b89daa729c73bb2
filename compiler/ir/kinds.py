"""What fusion needs to know of an operator: its kind, on one lattice.

The table is also the list of operators that lowering knows; what is absent is expanded by `decompose` or handed to TVM's
importer. A kind bounds what may be fused: an operator joins a group as a follower when it is at most BROADCAST, and anchors
one when it is at least INJECTIVE.
"""

from __future__ import annotations

from enum import IntEnum

import onnx_ir as ir

from ...runtime.precision import holds_sums
from .constants import scalar_constant
from .matching import static_shape
from .stored_weights import is_stored_weights


class Kind(IntEnum):
    """From most to least fusable."""

    ELEMENTWISE = 0  # output[i] depends on input[i] alone
    BROADCAST = 1  # the same with NumPy broadcasting between inputs
    OPERAND = 2  # a Cast (with zero points or scales, DequantizeLinear) to float32 that its readers' kernels do in their loads
    INJECTIVE = 3  # output[i] reads one element of an input at a computed place, or none
    VIEW = 4  # the same bytes under another shape: no kernel at all
    REDUCTION = 5  # output[i] reads a row or a window
    OUTPUT_FUSABLE = 6  # a matrix product or convolution, whose tile store takes an epilogue
    OPAQUE = 7  # nothing is known


_OPERATORS: dict[Kind, str] = {
    Kind.ELEMENTWISE: """
        Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish
        IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt
        Swish Tan Tanh ThresholdedRelu""",
    Kind.BROADCAST: """
        Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Clip DequantizeLinear Div Equal Greater GreaterOrEqual
        Less LessOrEqual Max Mean Min Mod Mul Or PRelu Pow Sub Sum Where Xor""",
    Kind.INJECTIVE: """
        Bernoulli BitCast Concat DepthToSpace Dropout Expand Gather GatherElements GatherND OneHot Pad RandomNormal
        RandomNormalLike RandomUniform RandomUniformLike ReverseSequence Slice SpaceToDepth Split TensorScatter Tile Transpose
        Trilu""",
    Kind.VIEW: "Flatten Identity Reshape Squeeze Unsqueeze",
    Kind.REDUCTION: """
        ArgMax ArgMin AveragePool Col2Im GlobalAveragePool GlobalMaxPool GridSample GroupNormalization InstanceNormalization
        LayerNormalization LogSoftmax LpPool MaxPool MaxRoiPool RMSNormalization ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
        ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Resize RoiAlign Softmax""",
    Kind.OUTPUT_FUSABLE: "Conv ConvTranspose Gemm MatMul",
    Kind.OPAQUE: """
        Compress CumProd CumSum Det GRU LSTM LinearAttention Multinomial NonMaxSuppression NonZero RNN ScatterElements ScatterND
        TopK Unique""",
}
KIND_OF_OPERATOR: dict[str, Kind] = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}


_IMAGE_RANKS = (3, 4, 5)  # of signals, images and volumes
_POOLS = ("AveragePool", "MaxPool")
_NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_FLOAT = ir.DataType.FLOAT
_WIDENING = ("Cast", "DequantizeLinear")


def is_known(node: ir.Node) -> bool:
    """Whether lowering has its own way of computing this operator."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in KIND_OF_OPERATOR:
        return False
    return node.op_type != "DequantizeLinear" or _is_offset(node) or is_stored_weights(node)


def _is_offset(node: ir.Node) -> bool:
    """Whether a DequantizeLinear takes a zero point from 8-bit numbers, and scales by 1: the operand of a product of integers."""
    x = node.inputs[0]
    return x is not None and x.dtype in _BYTES and scalar_constant(node.inputs[1]) == 1.0 and node.outputs[0].dtype == _FLOAT


def kind_of(node: ir.Node) -> Kind:
    """The kind of a node; OPAQUE where nothing is known of it."""
    if not is_known(node):
        return Kind.OPAQUE
    return Kind.OPERAND if node.op_type in _WIDENING and _is_operand(node) else KIND_OF_OPERATOR[node.op_type]


def _is_operand(cast: ir.Node) -> bool:
    """Whether products or one pooling alone read a Cast to float32 from a narrow type, or one pointwise node an image that was
    rounded to it."""
    source, result = cast.inputs[0], cast.outputs[0]
    if is_stored_weights(cast):
        return True
    if source is not None and source.dtype in _BYTES:
        return _is_byte_operand(cast)
    if source is None or source.dtype not in _NARROW or result.dtype != ir.DataType.FLOAT or result.is_graph_output():
        return False
    kinds = [KIND_OF_OPERATOR.get(reader.op_type, Kind.OPAQUE) for reader in result.consumers()]
    if kinds and all(kind is Kind.OUTPUT_FUSABLE for kind in kinds):
        return True
    is_image = source.shape is not None and len(source.shape) in _IMAGE_RANKS
    if not is_image or len(kinds) != 1:
        return False
    is_pooled = result.consumers()[0].op_type in _POOLS
    return is_pooled or (kinds[0] <= Kind.BROADCAST and _is_rounding(source.producer()))


def _is_byte_operand(widening: ir.Node) -> bool:
    """Whether products of two operands of 8 bits alone read what makes float32 of one."""
    result = widening.outputs[0]
    readers = result.consumers()
    if not readers or result.is_graph_output() or result.dtype != _FLOAT:
        return False
    return all(_multiplies_bytes(reader) and all(one is not result for one in reader.inputs[2:]) for reader in readers)


def _multiplies_bytes(product: ir.Node) -> bool:
    """Whether kernels multiply the 8-bit numbers that both operands of a product are made of (`read_narrow` of kernels): they
    subtract one zero point of each, of convolutions that of the image alone, and 32 bits hold the sums. One of a value that both
    operands are made of."""
    if KIND_OF_OPERATOR.get(product.op_type) is not Kind.OUTPUT_FUSABLE:
        return False
    a, b = (_widening_of(value) for value in product.inputs[:2])
    if a is None or b is None:
        return False
    zeros = [one.inputs[2] if len(one.inputs) > 2 else None for one in (a, b)]
    if any(zero is not None and static_shape(zero) != () for zero in zeros):
        return False
    if zeros[1] is not None and product.op_type in ("Conv", "ConvTranspose"):
        return False
    if a.inputs[0] is b.inputs[0] and zeros[0] is not zeros[1]:
        return False
    shapes = [static_shape(one.inputs[0]) for one in (a, b)]
    if not shapes[0] or not shapes[1]:
        return False
    is_wide = zeros[1] is not None or b.inputs[0] is None or b.inputs[0].dtype == ir.DataType.UINT8
    is_turned = product.attributes.get_int("transA", 0) != 0
    return holds_sums(product.op_type, shapes[0], shapes[1], is_turned=is_turned, is_wide=is_wide)


def _widening_of(value: ir.Value | None) -> ir.Node | None:
    """What makes float32 of 8-bit numbers, less a zero point if there is one."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type not in _WIDENING or not is_known(producer):
        return None
    source = producer.inputs[0]
    is_byte = source is not None and source.dtype in _BYTES
    return producer if is_byte and (producer.op_type == "Cast" or _is_offset(producer)) else None


def _is_rounding(node: ir.Node | None) -> bool:
    if node is None or node.op_type != "Cast" or node.domain != "":
        return False
    source = node.inputs[0]
    return source is not None and source.dtype == ir.DataType.FLOAT


def takes_followers(node: ir.Node | None) -> bool:
    """Whether a node has one output and a kernel that computes the pointwise nodes which follow it, too."""
    return node is not None and len(node.outputs) == 1 and kind_of(node) not in (Kind.OPERAND, Kind.VIEW, Kind.OPAQUE)


def is_pointwise(node: ir.Node) -> bool:
    """Whether a group may take this node as a follower of its anchor."""
    return kind_of(node) <= Kind.BROADCAST
