"""Recurrences whose state goes from call to call, which ONNX took over from ONNX Runtime, and its LSTM of 8-bit weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .activations import Results
from .call import Call, RefusedNodeError


def linear_attention(call: Call) -> Results:
    """ONNX's LinearAttention; the state is that after the last token."""
    if call.integer("state_window", 0):
        raise RefusedNodeError("attribute state_window is not taken")
    attributes = call.forwarded("chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule")
    q, k, v = (call.input(position) for position in range(3))
    return call.ops(2, "LinearAttention", q, k, v, *(call.optional(position) for position in (3, 4, 5)), **attributes)


def causal_convolution(call: Call) -> Results:
    """ONNX's CausalConvWithState: one dimension, channels first, without dilation."""
    plain = {"state_window": 0, "channels_last": 0, "dilation": 1, "ndim": 1}
    for name, value in plain.items():
        if call.integer(name, value) != value:
            raise RefusedNodeError(f"attribute {name} is not taken")
    operands = call.input(0), call.input(1), call.optional(2), call.optional(3)
    return call.ops(2, "CausalConvWithState", *operands, **call.forwarded("activation"))


def dynamic_quantize_lstm(call: Call) -> Results:
    """LSTM of constant weights of 8-bit integers, whose inputs and states stay floats.

    ONNX Runtime quantizes these at every step, by the range of as many rows of the batch as one of its threads has; so its own
    results change with the number of threads by as much as they differ from these.
    """
    attributes = call.forwarded("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size")
    attributes |= call.forwarded("input_forget")
    w, r = (_dequantized_lines(call, position, parameters) for position, parameters in ((1, 8), (2, 10)))
    return call.ops(3, "LSTM", call.input(0), w, r, *(call.optional(position) for position in range(3, 8)), **attributes)


def _dequantized_lines(call: Call, position: int, parameters: int) -> ir.Value:
    """Weights [directions, inputs, gates] as floats [directions, gates, inputs]; a scale and zero point a direction or column."""
    weights, scale, zero = (call.known(call.input(at), f"input {at}") for at in (position, parameters, parameters + 1))
    scale, zero = (one.astype(np.float32).reshape(len(weights), 1, -1) for one in (scale, zero))
    return call.constant(np.ascontiguousarray(((weights.astype(np.float32) - zero) * scale).transpose(0, 2, 1)))
