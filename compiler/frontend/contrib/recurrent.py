"""Recurrences whose state goes from call to call, which ONNX took over from ONNX Runtime, and its LSTM of 8-bit weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...ir.stored_weights import ROW_BITS
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
    """LSTM of constant weights of 8-bit integers. Where these are symmetric, inputs and states are rounded to 8 bits, too, each
    row by its own range; else they stay floats.

    ONNX Runtime quantizes all inputs by one range, and states at every step by that of as many rows of the batch as one of its
    threads has; so its own results change with the number of threads by as much as they differ from these.
    """
    attributes = call.forwarded("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size")
    attributes |= call.forwarded("input_forget")
    w, r = (_dequantized_lines(call, position, parameters) for position, parameters in ((1, 8), (2, 10)))
    results = call.ops(3, "LSTM", call.input(0), w, r, *(call.optional(position) for position in range(3, 8)), **attributes)
    call.annotate(results[0], ROW_BITS, "8")
    return results


def _dequantized_lines(call: Call, position: int, parameters: int) -> ir.Value:
    """Weights [directions, inputs, gates] as [directions, gates, inputs]; a scale and zero point a direction or column.

    They stay integers, with a scale for each line, if all zero points are in the middle of the type.
    """
    weights, scale, zero = (call.known(call.input(at), f"input {at}") for at in (position, parameters, parameters + 1))
    lines, middle = weights.astype(np.int16).transpose(0, 2, 1), 128 if weights.dtype == np.uint8 else 0
    scale, zero = (one.reshape(len(weights), -1, 1) for one in (scale.astype(np.float32), zero.astype(np.int16)))
    if (zero == middle).all():
        scales = np.ascontiguousarray(np.broadcast_to(scale, (*lines.shape[:2], 1)))
        numbers = call.constant(np.ascontiguousarray(lines - middle).astype(np.int8))
        return call.op("DequantizeLinear", numbers, scales, axis=2, block_size=max(lines.shape[2], 1))
    return call.constant(np.ascontiguousarray((lines - zero).astype(np.float32) * scale))
