"""keep-weights: constant weights of few bits stay what they are, one DequantizeLinear before each product that reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ...compiler.ir.assignments.stored_form import BITS, StoredForm
from ...compiler.ir.constants import add_constant, constant_array, constant_tensor
from ...compiler.ir.facts import infer_node
from ...compiler.ir.matching import is_constant, static_shape
from ...compiler.ir.names import fresh_name
from ...compiler.ir.rewriter import Rejection, apply_rules, copy_source, drop_unused_constants, graph_of, remove_nodes
from ...compiler.ir.stored_weights import PRODUCTS, form_of, is_stored_weights, k_axis_of, product_fault
from ...compiler.pipeline import Context, Pass
from .widened_products import NARROW, Widened

_SIGNED = {
    ir.DataType.UINT2: ir.DataType.INT2,
    ir.DataType.UINT4: ir.DataType.INT4,
    ir.DataType.UINT8: ir.DataType.INT8,
}


@dataclass(frozen=True)
class KeepWeights(Pass):
    """Bring weights that lie as integers to the form in which kernels of products read them.

    Before:  d = DequantizeLinear<axis=1, block_size=32>(w, s, z);  t = Transpose(d);  y = MatMul(x, t)
    After:   d = DequantizeLinear<axis=0, block_size=32>(w_turned, s_turned);  y = MatMul(x, d)

    Constants are transposed, and not computed before they are read. One scale for all becomes one for each column; zero points
    that are all in the middle of an unsigned type, as they are in most models, make signed weights without zero points. What
    several products read is dequantized before each of them. Products in float16 and bfloat16 become such of float32 rows between
    Casts. Legal for constants of 2, 4 and 8 bits with scales of columns, or of blocks along k that are whole words, in the type
    of the rows. All other weights are made floats by decompose.
    """

    name: ClassVar[str] = "keep-weights"

    def run(self, model: ir.Model, context: Context) -> bool:
        if context.target.is_gpu:
            return False
        return apply_rules(model, [_Products(self.name)], context)


@dataclass(frozen=True, slots=True)
class _Products:
    """Products whose right operand is dequantized, perhaps behind a Transpose."""

    name: str

    def match(self, node: ir.Node) -> _Found | Rejection | None:
        if node.op_type not in PRODUCTS or node.domain != "":
            return None
        turn, scaling = _source(node.inputs[1])
        if scaling is None or not is_constant(scaling.inputs[0]) or node.inputs[0] is node.inputs[1]:
            return None
        kind, k_axis = node.outputs[0].dtype, k_axis_of(node)
        kind = kind if kind in NARROW else ir.DataType.FLOAT
        form = form_of(scaling, kind)
        reason = form if isinstance(form, str) else product_fault(node, kind)
        if isinstance(form, StoredForm) and not reason:
            form = (form.turned() if turn is not None and len(form.shape) == 2 else form).by_columns(k_axis)
            reason = form.fault(k_axis)
        if reason:
            return Rejection(f"weights of {node.op_type} become floats: {reason}", (node, scaling))
        assert isinstance(form, StoredForm)
        found = _Found(node, turn, scaling, form)
        return found if turn is not None or not is_stored_weights(scaling) or found.zero_change() else None


def _source(value: ir.Value | None) -> tuple[ir.Node | None, ir.Node | None]:
    """The Transpose of a matrix, or None, and the DequantizeLinear that make a value."""
    turn, producer = None, None if value is None else value.producer()
    if producer is not None and producer.op_type == "Transpose" and producer.domain == "" and producer.inputs[0] is not None:
        is_matrix = len(static_shape(producer.inputs[0]) or ()) == 2
        if not is_matrix or tuple(producer.attributes.get_ints("perm", (1, 0))) != (1, 0):
            return None, None
        turn, producer = producer, producer.inputs[0].producer()
    is_scaling = producer is not None and producer.op_type == "DequantizeLinear" and producer.domain == ""
    return turn, producer if is_scaling else None


@dataclass(frozen=True, slots=True)
class _Found:
    """A product, the Transpose of its weights where there is one, what dequantizes them, and the form that they are to have."""

    product: ir.Node
    turn: ir.Node | None
    scaling: ir.Node
    form: StoredForm

    def zero_change(self) -> str:
        """What becomes of zero points: "" nothing; "none" where all are 0; "signed" where all are the middle of their range."""
        zero = constant_array(self.scaling.inputs[2] if len(self.scaling.inputs) > 2 else None)
        if zero is None:
            return ""
        numbers = zero.astype(np.int16)
        if not numbers.any():
            return "none"
        middle = 1 << (BITS[self.form.dtype] - 1)
        return "signed" if self.form.dtype in _SIGNED and bool((numbers == middle).all()) else ""

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        weights, scale, zero = (*self.scaling.inputs, None)[:3]
        assert weights is not None
        assert scale is not None
        change, is_turned = self.zero_change(), self.turn is not None
        operands = [self._weights(model, weights, is_signed=change == "signed"), self._scales(model, scale)]
        if zero is not None and not change:
            operands.append(self._scales(model, zero))
        attributes = {"axis": self.form.axis, **({"block_size": self.form.block} if self.form.block else {})}
        made = ir.node("DequantizeLinear", operands, attributes, version=self.scaling.version)
        copy_source((self.scaling,), made)
        graph_of(self.product).insert_before(self.product, made)
        made.outputs[0].name = fresh_name(model, f"{self.product.outputs[0].name}_weights")
        infer_node(made, model)
        changed = Widened(model).multiply(self.product, made.outputs[0])
        for old in (self.turn, self.scaling) if is_turned else (self.scaling,):
            if old is not None and not old.outputs[0].uses() and not old.outputs[0].is_graph_output():
                remove_nodes([old])
        drop_unused_constants(model, [value for value in (weights, scale, zero) if value is not None])
        return [made, *changed]

    def _weights(self, model: ir.Model, weights: ir.Value, *, is_signed: bool) -> ir.Value:
        is_turned = self.turn is not None
        if not is_turned and not is_signed:
            return weights
        tensor, dtype = constant_tensor(weights), self.form.dtype
        assert tensor is not None
        result = _SIGNED[dtype] if is_signed else dtype
        middle = 1 << (BITS[dtype] - 1)

        def read() -> np.ndarray:
            numbers = tensor.numpy().T if is_turned else tensor.numpy()
            return (numbers.astype(np.int16) - middle).astype(result.numpy()) if is_signed else np.ascontiguousarray(numbers)

        return _lazy(model, read, result, self.form.shape, f"{weights.name}{'_turned' * is_turned}{'_signed' * is_signed}")

    def _scales(self, model: ir.Model, value: ir.Value) -> ir.Value:
        """Scales or zero points in the shape that the form asks for."""
        tensor = constant_tensor(value)
        assert tensor is not None
        dtype = ir.DataType.FLOAT if tensor.dtype in NARROW else tensor.dtype
        is_one, shape = tensor.size == 1, self.form.scales
        is_placed = tuple(tensor.shape.numpy()) == shape and (self.turn is None or len(shape) == 1)
        if is_placed and dtype == tensor.dtype:
            return value

        def read() -> np.ndarray:
            numbers = tensor.numpy().astype(dtype.numpy(), copy=False)
            if is_placed:
                return numbers
            return np.full(shape, numbers.reshape(()), numbers.dtype) if is_one else np.ascontiguousarray(numbers.T)

        return _lazy(model, read, dtype, shape, f"{value.name}_placed")


def _lazy(model: ir.Model, read: Callable[[], np.ndarray], dtype: ir.DataType, shape: tuple[int, ...], name: str) -> ir.Value:
    tensor = ir.LazyTensor(lambda: ir.tensor(read(), dtype=dtype), dtype=dtype, shape=ir.Shape(shape))
    return add_constant(model, tensor, name)
