"""quantize-weights: large weights of products become integers of 8 or 4 bits with scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from ...compiler.ir.constants import add_constant, constant_tensor, derived_tensor
from ...compiler.ir.facts import infer_node
from ...compiler.ir.matching import static_shape
from ...compiler.ir.names import fresh_name
from ...compiler.ir.opset_raise import raise_obstacle, raise_opset
from ...compiler.ir.rewriter import Rejection, copy_source, drop_unused_constants, graph_of
from ...compiler.ir.stored_weights import PRODUCTS, k_axis_of, product_fault
from ...compiler.pipeline import Context, Pass, number
from ...compiler.quantization.formats import group_scales, quantize_channels, quantize_groups, signed_affine
from ...runtime.precision import Weights
from .narrow_tables import read_tables
from .widened_products import NARROW, Widened

_BITS: dict[Weights, Literal[4, 8]] = {"int4": 4, "int8": 8}
_TYPES: dict[Weights, ir.DataType] = {"int4": ir.DataType.INT4, "int8": ir.DataType.INT8}
_SINCE = {"int8": 13, "int4": 21}  # the opsets of DequantizeLinear that have them
_WORD = 8  # numbers of 4 bits in a word of weights
_CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Store constant weights of matrix products as int8 with a scale for each column, or int4 with one for each block along k.

    Before:  y = MatMul(x, w)
    After:   d = DequantizeLinear<axis=0, block_size=32>(w_int4, w_scales);  y = MatMul(x, d)

    Numbers are symmetric, -127 to 127 or -7 to 7, the nearest to w / scale; rows stay float32. A product in float16 or bfloat16
    becomes one of float32 rows between Casts, as exact as its type. Only matrices of at least `min_elements` that are no sooner
    known, as those of fewer take no time to read. Without `weights`, what the user asked for.
    """

    name: ClassVar[str] = "quantize-weights"
    weights: Weights | None = None
    block_size: int = number(32, least=_WORD, multiple=_WORD)  # of int4, along k
    min_elements: int = 1 << 14

    def run(self, model: ir.Model, context: Context) -> bool:
        wanted = self.weights or context.weights
        if wanted is None:
            return False
        fault = _fault_everywhere(self, wanted, model, context)
        if fault is not None:
            context.reject(self.name, fault)
            return False
        changed = False
        widened = Widened(model)
        for node in tuple(model.graph):
            reason = self._fault(node)
            if reason:
                context.reject(self.name, Rejection(f"weights of {node.op_type} stay as they are: {reason}", (node,)))
            elif reason is not None:
                if not changed:
                    raise_opset(model, _SINCE[wanted])
                self._quantize(model, node, wanted, widened)
                changed = True
        return changed

    def _fault(self, node: ir.Node) -> str | None:
        """Why the weights of a product stay as they are; None where a node is no product of some."""
        value = node.inputs[1] if len(node.inputs) > 1 else None
        tensor = None if value is None else constant_tensor(value)
        if node.domain != "" or tensor is None or tensor.dtype not in (ir.DataType.FLOAT, *NARROW):
            return None
        if node.op_type in _CONVOLUTIONS:
            return "no kernel of convolutions unpacks them, whose time is that of their multiply-adds"
        if node.op_type not in PRODUCTS:
            return None
        shape = static_shape(value) or ()
        if len(shape) != 2:
            return f"{len(shape)} dimensions are no matrix"
        if prod(shape) < self.min_elements:
            return f"{prod(shape)} elements are read in no time"
        reason = product_fault(node, tensor.dtype)
        return reason or ("" if _is_finite(tensor) else "they are not finite")

    def _quantize(self, model: ir.Model, node: ir.Node, wanted: Weights, widened: Widened) -> None:
        value = node.inputs[1]
        assert value is not None
        tensor = constant_tensor(value)
        assert tensor is not None
        k_axis, shape = k_axis_of(node), tuple(tensor.shape.numpy())
        block = self.block_size if wanted == "int4" else 0
        how = (wanted, k_axis, block)
        lazy = derived_tensor(how, [tensor], partial(_numbers, tensor, k_axis, block), _TYPES[wanted], shape)
        numbers = add_constant(model, lazy, f"{value.name}_{wanted}")
        if block:
            scales_shape = tuple(-(-extent // block) if d == k_axis else extent for d, extent in enumerate(shape))
        else:
            scales_shape = (shape[1 - k_axis],)
        make = partial(_scales, tensor, k_axis, block)
        lazy = derived_tensor(("scales", *how), [tensor], make, ir.DataType.FLOAT, scales_shape)
        scales = add_constant(model, lazy, f"{value.name}_scales")
        attributes = {"axis": k_axis, "block_size": block} if block else {"axis": 1 - k_axis}
        made = ir.node("DequantizeLinear", [numbers, scales], attributes)
        made.outputs[0].name = fresh_name(model, f"{value.name}_dequantized")
        copy_source((node,), made)
        graph_of(node).insert_before(node, made)
        infer_node(made, model)
        widened.multiply(node, made.outputs[0])
        if k_axis == 1:
            read_tables(model, value, numbers, made)
        drop_unused_constants(model, [value])


def _fault_everywhere(limits: QuantizeWeights, wanted: Weights, model: ir.Model, context: Context) -> Rejection | None:
    """Why no weights of the model are quantized."""
    if context.target.is_gpu:
        return Rejection(f"no kernel for {context.target} reads weights of few bits")
    if limits.block_size % _WORD or limits.block_size <= 0:
        return Rejection(f"blocks of {limits.block_size} fill no words of {_WORD}")
    return raise_obstacle(model, _SINCE[wanted])


def _numbers(tensor: ir.TensorProtocol, k_axis: int, block: int) -> np.ndarray:
    w = _wide(tensor)
    if not block:
        return quantize_channels(w, 1 - k_axis).numbers
    return quantize_groups(w, block, 4, k_axis).numbers.astype(ir.DataType.INT4.numpy())


def _scales(tensor: ir.TensorProtocol, k_axis: int, block: int) -> np.ndarray:
    w = _wide(tensor)
    return group_scales(w, block, 4, k_axis) if block else signed_affine(np.abs(w).max(axis=k_axis, initial=0.0)).scale


def _is_finite(tensor: ir.TensorProtocol) -> bool:
    w = _wide(tensor)
    return bool(np.isfinite([w.max(initial=0.0), w.min(initial=0.0)]).all())


def _wide(tensor: ir.TensorProtocol) -> np.ndarray:
    return np.asarray(tensor.numpy(), np.float32)
