"""Folding: nodes whose inputs are all constant become constants, computed by `onnx.reference`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ....compiler.ir.assignments.stored_form import BITS
from ....compiler.ir.constants import constant_array, constant_tensor
from ....compiler.ir.facts import has_static_type
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import is_constant, is_read, static_shape
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.scopes import subgraphs_of
from ....runtime.symbolic.shapes import is_symbolic
from ....runtime.symbolic.sizes import greatest_of
from ..determinism import is_deterministic
from .narrow_floats import rounded_results, widened_operands
from .scope import Replacement, Rule, Scope

# Operators whose result is bounded by their inputs although its shape depends on their values.
_BOUNDED = frozenset({"Compress", "NonZero", "Unique"})
# Operators that NumPy computes at about the speed of memory, so that weights of any size may go through them: weights that torch
# normalizes or divides by their spectral norm, scales, quantization by hand.
_NORMS = frozenset({"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"})
_ARITHMETIC = frozenset({"Abs", "Add", "Cast", "Clip", "Div", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Round"})
_FAST = _NORMS | _ARITHMETIC | {"MatMul", "Sign", "Sqrt", "Sub", "Where"}
# Operators whose time is not bounded by the bytes they read and write, or that `onnx.reference` computes element by element.
_SLOW = frozenset(
    {"AffineGrid", "Col2Im", "Conv", "ConvInteger", "ConvTranspose", "DFT", "DeformConv", "GridSample", "MaxRoiPool"}
)
_SLOW |= {"MaxUnpool", "MelWeightMatrix", "NonMaxSuppression", "QLinearConv", "Resize", "RoiAlign", "STFT", "Upsample"}
_SLOW_BYTES = 16 * 1024  # of the operands and results of those that are computed all the same
_MOST_STEP = 64  # of the pads, strides and dilations of those: the reference makes the padded image
_MOST_PRODUCTS = {"Einsum": 1 << 28, "Gemm": 1 << 33, "MatMul": 1 << 33}  # multiplications
# Operators that `onnx.reference` gets wrong below an opset: softmax by its newest meaning, batch normalisation as in training.
_MISREAD_BELOW = {"BatchNormalization": 14, "Hardmax": 13, "Softmax": 13}
# At any opset: pools with unequal padding, recurrent operators with lengths, LRN of more channels than images, indices out of
# range, logarithms of what is 0 in a softmax, sums of infinite powers, the scale of zeros alone, zero points of rows.
_MISREAD = frozenset({"AveragePool", "GRU", "LRN", "LSTM", "LpPool", "MaxPool", "RNN", "SequenceInsert"}) | {
    "DynamicQuantizeLinear",
    "GatherElements",
    "LogSoftmax",
    "MatMulInteger",
    "QLinearMatMul",
    "ReduceLogSumExp",
}
# With these attributes (name, default, value that is misread): distinct values in order of appearance, norms of signed numbers.
_MISREAD_WITH = {"LpNormalization": ("p", 2, 1), "Unique": ("sorted", 1, 0)}

_MOST_QUOTIENT = 2.0**30  # of what QuantizeLinear divides: with a zero point added it is within int32


def lift_constant(node: ir.Node, scope: Scope) -> Replacement | None:
    """Constant nodes become initializers, what is computed lazily too. Strings and sparse tensors stay as they are."""
    tensor = constant_tensor(node.outputs[0])
    contents = tensor if isinstance(tensor, ir.LazyTensor) else constant_array(node.outputs[0])
    return None if contents is None else _as_constant(node, [contents], scope)


def fold_shape(node: ir.Node, scope: Scope) -> Replacement | None:
    """Shape and Size of a value whose dimensions are known numbers."""
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    if node.op_type == "Size":
        dims = static_shape(value)
        is_known = dims is not None and not is_symbolic(dims)
        return _as_constant(node, [np.array(prod(dims or ()), np.int64)], scope) if is_known else None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(value.shape))
    chosen = value.shape.dims[slice(start, end)]
    return _as_constant(node, [np.array(chosen, np.int64)], scope) if all(isinstance(dim, int) for dim in chosen) else None


def fold_gathered_dimension(node: ir.Node, scope: Scope) -> Replacement | None:
    """Gather of known dimensions out of a Shape whose other dimensions may be symbolic."""
    shape = node.inputs[0].producer() if node.inputs[0] is not None else None
    indices = constant_array(node.inputs[1])
    if shape is None or shape.op_type != "Shape" or indices is None or "start" in shape.attributes or "end" in shape.attributes:
        return None
    value = shape.inputs[0]
    if value is None or value.shape is None or not all(-len(value.shape) <= index < len(value.shape) for index in indices.flat):
        return None
    dims = [value.shape.dims[index] for index in indices.flat]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    return _as_constant(node, [np.array(dims, np.int64).reshape(indices.shape)], scope)


def fold(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """Compute a deterministic node of constant inputs, unless the result would bloat the model."""
    if not _is_computable(node, scope):
        return None
    arrays = [(value, constant_array(value)) for value in node.inputs]
    inputs = {str(value.name): array for value, array in arrays if value is not None and array is not None}
    input_bytes = sum(array.nbytes for array in inputs.values())
    output_bytes = sum(_size_bytes(output) for output in node.outputs)
    if not _is_worthwhile(node, input_bytes, output_bytes, scope):
        return Rejection(f"{node.op_type} not folded: {output_bytes} bytes from {input_bytes}", (node,))
    results = _evaluate(node, inputs, scope)
    if isinstance(results, Rejection):
        return results
    scope.budget_bytes -= max(0, output_bytes - input_bytes)
    scope.folded.append(node.op_type)
    return _as_constant(node, results, scope)


def _is_computable(node: ir.Node, scope: Scope) -> bool:
    """Whether all that a node computes is known before it runs. Identity is no computation: it names an output of the graph."""
    inputs = [value for value in node.inputs if value is not None]
    if node.domain != "" or node.op_type == "Identity" or not inputs or not all(is_constant(value) for value in inputs):
        return False
    if inputs[0].dtype in BITS and (node.op_type == "DequantizeLinear" or kind_of(node) is Kind.OPERAND):
        return False  # weights of few bits stay what they are: passes and kernels read them so, decompose all others
    if any(True for _ in subgraphs_of(node)) or not is_deterministic(node, scope.model):
        return False
    return all(output.name == "" or _is_bounded(node, output) for output in node.outputs)


def _is_worthwhile(node: ir.Node, input_bytes: int, output_bytes: int, scope: Scope) -> bool:
    """Whether the result is no larger than the inputs or small, and comes fast: on large ones only what is fast."""
    if output_bytes > input_bytes and output_bytes > min(scope.fold_limit_bytes, scope.budget_bytes):
        return False
    if node.op_type in _SLOW and not _is_short(node, input_bytes + output_bytes):
        return False
    if node.op_type in _MOST_PRODUCTS and _products(node) > _MOST_PRODUCTS[node.op_type]:
        return False
    is_fast = kind_of(node) in (Kind.INJECTIVE, Kind.VIEW) or node.op_type in _FAST
    return is_fast or input_bytes + output_bytes <= scope.fold_limit_bytes


def _is_short(node: ir.Node, size_bytes: int) -> bool:
    """Whether an operator that may be slow is not, on operands and results of so many bytes."""
    steps = [number for name in ("pads", "strides", "dilations") for number in node.attributes.get_ints(name, ())]
    return size_bytes <= _SLOW_BYTES and max(steps, default=0) <= _MOST_STEP


def _products(node: ir.Node) -> int:
    """The multiplications of a product, at least: of an Einsum all places of its letters at once, as the reference goes through
    them."""
    shapes = [static_shape(value) or () for value in node.inputs if value is not None]
    if node.op_type != "Einsum":
        depth = shapes[0][0 if node.attributes.get_int("transA", 0) else -1] if shapes[0] else 1
        return greatest_of(prod(static_shape(node.outputs[0]) or ())) * greatest_of(depth)
    equation = node.attributes.get_string("equation", "").replace(" ", "").split("->")[0]
    if "..." in equation:
        return prod(map(greatest_of, chain.from_iterable(shapes)))
    extents: dict[str, int] = {}
    for term, shape in zip(equation.split(","), shapes, strict=False):
        for letter, extent in zip(term, shape, strict=False):
            extents[letter] = max(extents.get(letter, 1), greatest_of(extent))
    return prod(extents.values())


def _is_bounded(node: ir.Node, output: ir.Value) -> bool:
    return has_static_type(output) or node.op_type in _BOUNDED


def _size_bytes(output: ir.Value) -> int:
    dims = static_shape(output)
    if output.name == "" or dims is None or output.dtype is None or output.dtype == ir.DataType.STRING:
        return 0
    return greatest_of(prod(dims)) * int(np.ceil(output.dtype.itemsize))


def is_misread(node: ir.Node, opset: int) -> bool:
    """Whether `onnx.reference` computes another function for this operator than ONNX defines."""
    if node.op_type == "ConvTranspose":  # uses one group's weights for all
        return node.attributes.get_int("group", 1) > 1
    if node.op_type == "Erf":  # of float32's digits
        return node.outputs[0].dtype == ir.DataType.DOUBLE
    if node.op_type == "OneHot":  # on less off, plus off
        return node.outputs[0].dtype is None or node.outputs[0].dtype.is_floating_point()
    if node.op_type == "QuantizeLinear":  # saturates after a cast to int32
        return not _is_within_int32(node)
    if node.op_type == "Resize":  # to one element reads before the first; of a length by scales aligns no whole one
        by_scales = ("align_corners", "tf_crop_and_resize") if len(node.inputs) < 4 else ()
        misread_modes = ("pytorch_half_pixel", *by_scales)
        return node.attributes.get_string("coordinate_transformation_mode", "half_pixel") in misread_modes
    if node.op_type == "ScatterElements":  # forgets NaN
        return node.attributes.get_string("reduction", "none") in ("max", "min")
    attribute, default, misread = _MISREAD_WITH.get(node.op_type, ("", 0, 1))
    misread_here = node.attributes.get_int(attribute, default) == misread
    return misread_here or opset < _MISREAD_BELOW.get(node.op_type, 0) or node.op_type in _MISREAD


def _is_within_int32(node: ir.Node) -> bool:
    """Whether the quotients of a QuantizeLinear are known to be small. Of blocks the least scale is taken for all."""
    x, scale = (constant_array(value) for value in node.inputs[:2])
    if x is None or scale is None:
        return False
    axis, scales = node.attributes.get_int("axis", 1), np.abs(scale.astype(np.float64))
    if scale.ndim == 1 and scale.size > 1 and -x.ndim <= axis < x.ndim:
        scales = scales.reshape(-1, *[1] * (x.ndim - 1 - axis % x.ndim))
    else:
        scales = scales.min(initial=np.inf)
    return bool((np.abs(x) < _MOST_QUOTIENT * scales).all())


def _evaluate(node: ir.Node, inputs: dict[str, np.ndarray], scope: Scope) -> list[np.ndarray] | Rejection:
    """Run one node; a Rejection where the reference cannot, or contradicts what inference says of the result."""
    if is_misread(node, scope.opset):
        return Rejection(f"{node.op_type} not folded: onnx.reference computes another function", (node,))
    outputs = [output for output in node.outputs if output.name != ""]
    names, inputs = [str(output.name) for output in outputs], widened_operands(node, inputs)
    imports = [onnx.helper.make_opsetid("", scope.opset)]
    function = onnx.helper.make_function("prefuse", "folded", list(inputs), names, [ir.serde.serialize_node(node)], imports)
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(function).run(None, inputs, attributes={})
    except Exception as error:  # the reference raises whatever NumPy does where it lacks a type or an index is out of range
        return Rejection(f"{node.op_type} not folded: {type(error).__name__}: {error}", (node,))
    arrays = rounded_results(outputs, [np.asarray(result) for result in results])
    for array, output in zip(arrays, outputs, strict=True):
        expected = static_shape(output)
        if output.dtype is None or array.dtype != output.dtype.numpy() or (expected is not None and array.shape != expected):
            return Rejection(f"{node.op_type} not folded: the reference made {array.dtype.name}{list(array.shape)}", (node,))
    return arrays


def _as_constant(node: ir.Node, arrays: Sequence[np.ndarray | ir.LazyTensor], scope: Scope) -> Replacement:
    """The node's outputs as initializers."""
    found = iter(arrays)
    pairs = [(output, None if output.name == "" else next(found)) for output in node.outputs]
    values = [scope.constant(array, output.name) if array is not None and is_read(output) else None for output, array in pairs]
    return Replacement((), tuple(values), are_constants=True)


RULES: dict[str, tuple[Rule, ...]] = {
    "Constant": (lift_constant,),
    "Gather": (fold_gathered_dimension,),
    "Shape": (fold_shape,),
    "Size": (fold_shape,),
}
