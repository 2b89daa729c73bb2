"""GroupQueryAttention: rotation, a cache that is written at a place of each row, windows, caps and sinks.

Shapes: B batch, S queries, P rows of the past cache, T the total length, C = max(P, T) rows of the present one, H heads,
G heads of keys and values, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ...ir.constants import scalar_constant
from .activations import Results
from .attention import merged_heads, scale_attribute, split_heads
from .call import Call, RefusedNodeError
from .masks import ascending
from .rotary import rising_positions

_INT64 = int(ir.DataType.INT64)
_PLAIN_TEXT = ("k_quant_type", "v_quant_type")
_PLAIN_NUMBERS = ("sliding_window_cache", "qk_output", "kv_cache_bit_width")


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Valid keys of each row before the new ones [B], and of all rows the largest number of keys in all, a scalar."""

    past: ir.Value
    total: ir.Value


def group_query_attention(call: Call) -> Results:
    """Outputs [B, S, H * D] and the caches [B, G, C, D] with the new keys and values written behind the valid ones."""
    _refuse_special(call)
    q, k, v = _operands(call)
    lengths = _lengths(call, q)
    q, k = _rotated(call, q, k, lengths)
    width = call.size(q, 1) * call.size(v, 3)
    past_key, past_value = call.optional(3), call.optional(4)
    present_key = _written(call, past_key, k, lengths)
    present_value = _written(call, past_value, v, lengths)
    sink, smooth = call.optional(11), call.integer("smooth_softmax", -1) == 1
    attend = _attend_with_sink if sink is not None or smooth else _attend
    y = attend(call, q, present_key, present_value, lengths)
    return merged_heads(call, y, width), present_key, present_value


def _refuse_special(call: Call) -> None:
    for name in _PLAIN_TEXT:
        if call.text(name, "NONE") != "NONE":
            raise RefusedNodeError("a quantized cache is not taken")
    for name in _PLAIN_NUMBERS:
        if call.integer(name, 0):
            raise RefusedNodeError(f"attribute {name} is not taken")


def _operands(call: Call) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries [B, H, S, D], keys and values [B, G, S, D], normalized where there are weights for that."""
    heads, groups = call.integer("num_heads"), call.integer("kv_num_heads")
    q, k, v = call.input(0), call.optional(1), call.optional(2)
    if k is None or v is None:
        size = call.size(q, 2) // (heads + 2 * groups)
        q, k, v = call.ops(3, "Split", q, [heads * size, groups * size, groups * size], axis=-1)
    q, k, v = split_heads(call, q, heads), split_heads(call, k, groups), split_heads(call, v, groups)
    q_weight, k_weight, epsilon = call.optional(14), call.optional(15), call.number("qk_norm_epsilon", 1e-6)
    if q_weight is not None and k_weight is not None:
        q = call.op("RMSNormalization", q, q_weight, axis=-1, epsilon=epsilon)
        k = call.op("RMSNormalization", k, k_weight, axis=-1, epsilon=epsilon)
    return q, k, v


def _lengths(call: Call, q: ir.Value) -> _Lengths:
    """A first prompt (more than one query, as many as there are keys in all) has no past, whatever its rows' lengths are."""
    rows = call.op("Reshape", call.op("Cast", call.input(5), to=_INT64), [-1])
    total = call.op("Reshape", call.op("Cast", call.input(6), to=_INT64), np.zeros(0, np.int64))
    queries = call.op("Squeeze", call.op("Shape", q, start=2, end=3), [0])
    one = call.constant_int(1)
    past = call.op("Sub", call.op("Add", rows, one), queries)
    is_first = call.op("And", call.op("Equal", queries, total), call.op("Greater", queries, one))
    return _Lengths(call.op("Where", is_first, call.constant_int(0), past), total)


def _rotated(call: Call, q: ir.Value, k: ir.Value, lengths: _Lengths) -> tuple[ir.Value, ir.Value]:
    cos, sin, positions = call.optional(7), call.optional(8), call.optional(9)
    interleaved = call.integer("rotary_interleaved", 0)
    if not call.integer("do_rotary", 0):
        return q, k
    if cos is None or sin is None:
        raise RefusedNodeError("has do_rotary without tables")
    if positions is None:
        positions = rising_positions(call, q, 2, call.op("Unsqueeze", lengths.past, [1]))
    width = 2 * call.size(cos, 1)
    size = 0 if width == call.size(q, 3) else width
    q, k = (
        call.op("RotaryEmbedding", x, cos, sin, positions, interleaved=interleaved, rotary_embedding_dim=size) for x in (q, k)
    )
    return q, k


def _written(call: Call, past: ir.Value | None, new: ir.Value, lengths: _Lengths) -> ir.Value:
    """The cache [B, G, C, D] with the new rows behind the valid ones of each row of the batch."""
    if past is None or not call.is_filled(past):
        return new
    rows, total = call.dimension(past, 2), scalar_constant(call.input(6))
    if rows is not None and total is not None:
        padded = call.op("Pad", past, [0, int(total) - rows], None, [2]) if total > rows else past
    else:
        length = call.op("Squeeze", call.op("Shape", past, start=2, end=3), [0])
        more = call.op("Max", call.op("Sub", lengths.total, length), call.constant_int(0))
        pads = call.op("Concat", np.zeros(1, np.int64), call.op("Unsqueeze", more, [0]), axis=0)
        padded = call.op("Pad", past, pads, None, [2])
    return call.op("TensorScatter", padded, new, lengths.past, axis=2)


def _attend(call: Call, q: ir.Value, k: ir.Value, v: ir.Value, lengths: _Lengths) -> ir.Value:
    queries = call.op("Shape", q, start=2, end=3)
    return call.op(
        "Attention",
        q,
        k,
        v,
        call.optional(10),
        None,
        None,
        call.op("Add", lengths.past, queries),
        is_causal=call.integer("causal", 1),
        left_window_size=_left_window(call),
        softcap=call.number("softcap", 0.0),
        **scale_attribute(call),
    )


def _attend_with_sink(call: Call, q: ir.Value, k: ir.Value, v: ir.Value, lengths: _Lengths) -> ir.Value:
    """One more key of zeros, whose score is the sink and whose value is zero: it only takes part in the sum of the softmax."""
    zero = [call.op("Pad", one, [0, 1], None, [2]) for one in (k, v)]
    sink, heads = call.optional(11), call.size(q, 1)
    score = (
        call.op("Reshape", sink, [1, heads, 1, 1])
        if sink is not None
        else call.constant(np.zeros((1, heads, 1, 1), call.dtype(q).numpy()))
    )
    bias = _seen_bias(call, q, k, lengths)
    if (extra := call.optional(10)) is not None:
        bias = call.op("Add", bias, extra)
    shape = call.op("Concat", call.op("Shape", q, start=0, end=3), [1], axis=0)
    rows = call.op("Expand", bias, call.op("Concat", call.op("Shape", q, start=0, end=3), [1], axis=0))
    bias = call.op("Concat", rows, call.op("Expand", score, shape), axis=3)
    return call.op("Attention", q, *zero, bias, softcap=call.number("softcap", 0.0), **scale_attribute(call))


def _seen_bias(call: Call, q: ir.Value, k: ir.Value, lengths: _Lengths) -> ir.Value:
    """0 for the keys that a query sees and minus infinity for others, [B, 1, S, C]."""
    steps = ascending(call, call.op("Shape", q, start=2, end=3))
    last = call.op("Add", call.op("Reshape", lengths.past, [-1, 1, 1, 1]), call.op("Unsqueeze", steps, [1]))
    if not call.integer("causal", 1):
        ends = call.op("Add", lengths.past, call.op("Shape", q, start=2, end=3))
        last = call.op("Sub", call.op("Reshape", ends, [-1, 1, 1, 1]), call.constant_int(1))
    keys = ascending(call, call.op("Shape", k, start=2, end=3))
    is_seen = call.op("LessOrEqual", keys, last)
    if (window := _left_window(call)) >= 0:
        first = call.op("Sub", last, call.constant_int(window))
        is_seen = call.op("And", is_seen, call.op("GreaterOrEqual", keys, first))
    lowest = float(ml_dtypes.finfo(call.dtype(q).numpy()).min)
    return call.op("Where", is_seen, call.like(q, 0.0), call.like(q, lowest))


def _left_window(call: Call) -> int:
    """Keys before a query's own that it sees; -1: all."""
    size = call.integer("local_window_size", -1)
    return size - 1 if size > 0 else -1
