"""Operators with a state from call to call that ONNX took over from ONNX Runtime."""

from __future__ import annotations

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
