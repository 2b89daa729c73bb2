"""Mixture of experts: every expert computes every row, and the router's weights, zero but for the best, add them up.

Shapes: R rows, E experts, H hidden size, I inner size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .activations import Results
from .call import Call, RefusedNodeError

_SIMPLE = {"relu": "Relu", "silu": "Swish", "identity": "Identity"}


def mixture_of_experts(call: Call) -> Results:
    """The sum over the best experts of weight * fc2(activation(fc1(x)) * fc3(x)), of the shape of the input."""
    if call.integer("use_sparse_mixer", 0):
        raise RefusedNodeError("attribute use_sparse_mixer is not taken")
    x = call.input(0)
    rows = call.op("Reshape", x, [1, -1, call.size(x, call.rank(x) - 1)])
    inner = _linear(call, rows, call.input(2), call.optional(3))
    gate = call.optional(6)
    third = None if gate is None else _linear(call, rows, gate, call.optional(7))
    outer = _linear(call, _activated(call, inner, third), call.input(4), call.optional(5))
    weights = call.op("Unsqueeze", call.op("Transpose", _routing(call, call.input(1)), perm=[1, 0]), [2])
    total = call.op("ReduceSum", call.op("Mul", outer, weights), [0], keepdims=0)
    return (call.op("Reshape", total, call.op("Shape", x)),)


def _linear(call: Call, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
    """[E, R, out] of x [1 or E, R, in] and a weight [E, out, in]"""
    y = call.op("MatMul", x, call.op("Transpose", weight, perm=[0, 2, 1]))
    return y if bias is None else call.op("Add", y, call.op("Unsqueeze", bias, [1]))


def _routing(call: Call, logits: ir.Value) -> ir.Value:
    """[R, E]: the softmax of the logits at the best k experts, and 0 elsewhere."""
    count, best = call.size(logits, 1), call.integer("k", 1)
    values, indices = call.ops(2, "TopK", call.op("Softmax", logits, axis=-1), np.array([best]), axis=-1)
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
