"""Mixture of experts: every expert computes every row, and the router's weights, zero but for the best, add them up.

Shapes: R rows, E experts, H hidden size, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .activations import Results
from .call import Call, RefusedNodeError
from .low_bit import dequantized

_SIMPLE = {"relu": "Relu", "silu": "Swish", "identity": "Identity"}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A product of each expert: the weight [E, out, in] and the bias [E, out]."""

    weight: ir.Value
    bias: ir.Value | None


def mixture_of_experts(call: Call) -> Results:
    """The sum over the best experts of weight * fc2(activation(fc1(x)) * fc3(x)), of the shape of the input."""
    first, second = (_Layer(call.input(position), call.optional(position + 1)) for position in (2, 4))
    third = call.optional(6)
    return _mixture(call, None, first, second, None if third is None else _Layer(third, call.optional(7)))


def quantized_mixture_of_experts(call: Call) -> Results:
    """`mixture_of_experts` whose weights are of 2, 4 or 8 bits."""
    if call.text("quant_type", "int") != "int" or call.integer("weights_prepacked", -1) == 1:
        raise RefusedNodeError("weights other than plain integers are not taken")
    if call.optional(14) is None and not call.integer("normalize_routing_weights", 0):
        raise RefusedNodeError("ONNX Runtime's kernels disagree on routing weights that are not normalized")
    call.ignore("accuracy_level")  # of float32 nothing is lost
    first, second = _quantized_layer(call, 1, 2, 11), _quantized_layer(call, 2, 5, 12)
    third = None if call.optional(8) is None else _quantized_layer(call, 3, 8, 13)
    return _mixture(call, call.optional(14), first, second, third)


def _quantized_layer(call: Call, number: int, position: int, zero: int) -> _Layer:
    """The layer whose weight, scales and bias are inputs from a position on; the scales are of rows, or of blocks of them."""
    bits = call.integer(f"fc{number}_expert_weight_bits", call.integer("expert_weight_bits", 4))
    packed, scale = call.input(position), call.input(position + 1)
    outer = call.size(packed, 0), call.size(packed, 1)
    blocks = call.size(scale, 2) if call.rank(scale) == 3 else 1
    depth = call.size(packed, 2) * 8 // bits
    block = min(call.integer("block_size", 0) or depth // blocks, depth)
    if not 0 < depth <= blocks * block < depth + block:
        raise RefusedNodeError(f"its {blocks} scales of a row are not those of blocks of {block} of {depth} numbers")
    shape = (*outer, blocks)
    weight = dequantized(call, packed, scale, call.optional(zero), bits, shape, block, depth, is_padded=False)
    return _Layer(weight, call.optional(position + 2))


def _mixture(call: Call, chances: ir.Value | None, first: _Layer, second: _Layer, third: _Layer | None) -> Results:
    """`chances` are the weights of the experts that the router chooses; None: those are the router's own."""
    if call.integer("use_sparse_mixer", 0):
        raise RefusedNodeError("attribute use_sparse_mixer is not taken")
    x = call.input(0)
    rows = call.op("Reshape", x, [1, -1, call.size(x, call.rank(x) - 1)])
    inner = _linear(call, rows, first)
    gate = None if third is None else _linear(call, rows, third)
    outer = _linear(call, _activated(call, inner, gate), second)
    weights = call.op("Unsqueeze", call.op("Transpose", _routing(call, call.input(1), chances), perm=[1, 0]), [2])
    total = call.op("ReduceSum", call.op("Mul", outer, weights), [0], keepdims=0)
    return (call.op("Reshape", total, call.op("Shape", x)),)


def _linear(call: Call, x: ir.Value, layer: _Layer) -> ir.Value:
    """[E, R, out] of x [1 or E, R, in]"""
    y = call.op("MatMul", x, call.op("Transpose", layer.weight, perm=[0, 2, 1]))
    return y if layer.bias is None else call.op("Add", y, call.op("Unsqueeze", layer.bias, [1]))


def _routing(call: Call, logits: ir.Value, chances: ir.Value | None) -> ir.Value:
    """[R, E]: the softmax of the logits, or other chances, at the k experts of the largest logits, and 0 elsewhere."""
    count, best = call.size(logits, 1), call.integer("k", 1)
    if chances is None:
        values, indices = call.ops(2, "TopK", call.op("Softmax", logits, axis=-1), np.array([best]), axis=-1)
    else:
        _, indices = call.ops(2, "TopK", logits, np.array([best]), axis=-1)
        values = call.op("GatherElements", chances, indices, axis=1)
    if call.integer("normalize_routing_weights", 0):
        values = call.op("Div", values, call.op("ReduceSum", values, [1], keepdims=1))
    is_chosen = call.op("Equal", call.op("Unsqueeze", indices, [2]), np.arange(count))
    spread = call.op("Where", is_chosen, call.op("Unsqueeze", values, [2]), call.like(values, 0.0))
    return call.op("ReduceSum", spread, [1], keepdims=0)


def _activated(call: Call, inner: ir.Value, third: ir.Value | None) -> ir.Value:
    name, fusion = call.text("activation_type", "relu"), call.integer("swiglu_fusion", 0)
    alpha, beta, limit = (
        call.number("activation_alpha", 1.0),
        call.number("activation_beta", 0.0),
        call.number("swiglu_limit", 0.0),
    )
    if name in _SIMPLE or name == "gelu":
        y = call.op(_SIMPLE[name], inner) if name in _SIMPLE else call.op("Gelu", inner, approximate="tanh")
        return y if third is None else call.op("Mul", y, third)
    if name != "swiglu":
        raise RefusedNodeError(f"activation_type {name} is not taken")
    gate, linear = (inner, third) if third is not None else _halves(call, inner, fusion)
    if linear is None:
        raise RefusedNodeError("has swiglu without a second product")
    if limit > 0:
        gate = call.op("Min", gate, call.like(gate, limit))
        linear = call.op("Clip", linear, call.like(linear, -limit), call.like(linear, limit))
    return call.op("Mul", call.op("Swish", gate, alpha=alpha), call.op("Add", linear, call.like(linear, beta)))


def _halves(call: Call, inner: ir.Value, fusion: int) -> tuple[ir.Value, ir.Value | None]:
    """The gate and the linear part of fused products [E, R, 2 * I]: alternating (1), or one behind the other (2)."""
    if fusion == 1:
        pairs = call.op("Reshape", inner, [0, 0, call.size(inner, 2) // 2, 2])
        gate, linear = (call.op("Squeeze", one, [3]) for one in call.ops(2, "Split", pairs, axis=3, num_outputs=2))
        return gate, linear
    if fusion == 2:
        gate, linear = call.ops(2, "Split", inner, axis=2, num_outputs=2)
        return gate, linear
    return inner, None
