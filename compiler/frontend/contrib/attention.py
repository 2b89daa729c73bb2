"""Attention with the projection, masks and states that ONNX Runtime keeps in one node, as ONNX's Attention.

Shapes: B batch, S queries, L new keys, P past keys, T = P + L, H heads, D head size, E hidden size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .activations import Results
from .call import Call, RefusedNodeError
from .masks import Mask, causal_bias, mask_bias
from .quantized import scaled_product

_PLAIN_ATTRIBUTES = {"do_rotary": 0, "past_present_share_buffer": 0, "output_qk": 0}


def attention(call: Call) -> Results:
    """Queries, keys and values in one projection of the input; outputs [B, S, E] and the states [2, B, H, T, D]."""
    x, weights, bias = call.input(0), call.input(1), call.optional(2)
    projected = call.op("MatMul", x, weights)
    projected = projected if bias is None else call.op("Add", projected, bias)
    call.ignore("rotary_embedding_dim")
    sizes = call.integers("qkv_hidden_sizes") or (call.size(weights, 1) // 3,) * 3
    return self_attention(call, projected, sizes, mask=call.optional(3), past=call.optional(4), extra=call.optional(5))


def quantized_attention(call: Call) -> Results:
    """`attention` whose input and weights are 8-bit integers, each with a scale and a zero point."""
    x, weights, bias = call.input(0), call.input(1), call.input(2)
    product = call.op("MatMulInteger", x, weights, call.optional(6), call.optional(7))
    projected = scaled_product(call, product, call.input(3), call.input(4))
    sizes = (call.size(weights, 1) // 3,) * 3
    return self_attention(call, call.op("Add", projected, bias), sizes, mask=call.optional(5), past=call.optional(8), extra=None)


def self_attention(
    call: Call,
    projected: ir.Value,
    sizes: tuple[int, ...],
    *,
    mask: ir.Value | None,
    past: ir.Value | None,
    extra: ir.Value | None,
) -> Results:
    """Attention of [B, S, queries + keys + values], and the states of keys and values in one tensor."""
    refuse_special(call)
    q, k, v = call.ops(3, "Split", projected, list(sizes), axis=-1)
    heads, past_key, past_value = call.integer("num_heads"), None, None
    if past is not None:
        halves = call.ops(2, "Split", past, axis=0, num_outputs=2)
        past_key, past_value = (call.op("Squeeze", half, [0]) for half in halves)
    y, present_key, present_value = attend(call, q, k, v, heads, past_key, past_value, mask, extra, call.is_asked(1))
    if present_key is None or present_value is None:
        return (y,)
    states = [call.op("Unsqueeze", state, [0]) for state in (present_key, present_value)]
    return y, call.op("Concat", *states, axis=0)


def multi_head_attention(call: Call) -> Results:
    """Queries, keys and values from separate inputs or packed; outputs [B, S, E] and both states [B, H, T, D]."""
    refuse_special(call)
    heads = call.integer("num_heads")
    q, k, v = _unpacked(call, call.input(0), call.optional(1), call.optional(2))
    q, k, v = _biased(call, q, k, v, call.optional(3))
    states = call.optional(6), call.optional(7)
    return attend(call, q, k, v, heads, *states, call.optional(4), call.optional(5), call.is_asked(1) or call.is_asked(2))


def decoder_masked_attention(call: Call) -> Results:
    """`multi_head_attention` of one query, with its inputs in another order."""
    refuse_special(call)
    heads, q, k, v = call.integer("num_heads"), call.input(0), call.optional(1), call.optional(2)
    bias = call.optional(10)
    if k is None or v is None:
        sizes = [call.size(q, 2) // 3] * 3
        q, k, v = call.ops(3, "Split", q, sizes, axis=-1)
    q, k, v = _biased(call, q, k, v, bias)
    states = call.optional(5), call.optional(6)
    return attend(call, q, k, v, heads, *states, call.optional(3), call.optional(4), call.is_asked(1) or call.is_asked(2))


def attend(
    call: Call,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    heads: int,
    past_key: ir.Value | None,
    past_value: ir.Value | None,
    mask: ir.Value | None,
    extra: ir.Value | None,
    has_states: bool,
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """Attention of [B, S, E] or [B, H, S, D] operands: the result [B, S, E], and keys and values with the past before them.

    `mask` is the operator's, of whatever form; `extra` is added to the scores.
    """
    q, k, v = (_by_heads(call, one, heads) for one in (q, k, v))
    size, is_causal = call.size(v, 3), bool(call.integer("unidirectional", 0))
    is_square = q.shape is not None and k.shape is not None and q.shape[2] == k.shape[2]
    rows, columns = call.dimension(q, 2), call.dimension(k, 2)
    if is_causal and rows is not None and columns is not None and rows not in (1, columns):
        raise RefusedNodeError("ONNX Runtime's kernels disagree on causal attention to more or fewer new keys than queries")
    if past_key is not None and past_value is not None:
        k, v = (call.op("Concat", past, new, axis=2) for past, new in ((past_key, k), (past_value, v)))
    elif past_key is not None or past_value is not None:
        raise RefusedNodeError("has only one of both past states")
    bias = mask_bias(call, q, k, Mask(mask, call.number("mask_filter_value", -10000.0), is_causal))
    if extra is not None:
        bias = extra if bias is None else call.op("Add", bias, extra)
    is_plain = mask is None and past_key is None and is_square  # then ONNX's own causal mask is meant
    if is_causal and mask is None and not is_plain:
        causal = causal_bias(call, q, k, call.like(q, 0.0))
        bias = causal if bias is None else call.op("Add", bias, causal)
    y = call.op("Attention", q, k, v, bias, **scale_attribute(call), is_causal=int(is_causal and is_plain))
    y = merged_heads(call, y, heads * size)
    return (y, k, v) if has_states else (y, None, None)


def scale_attribute(call: Call) -> dict[str, float]:
    """The scale of the scores, where it is not the default 1 / sqrt(D), which 0 stands for."""
    scale = call.number("scale", 0.0)
    return {"scale": scale} if scale else {}


def refuse_special(call: Call) -> None:
    """Refuse attributes that ask for more than attention."""
    for name, plain in _PLAIN_ATTRIBUTES.items():
        if call.integer(name, plain) != plain:
            raise RefusedNodeError(f"attribute {name} is not taken")


def split_heads(call: Call, x: ir.Value, heads: int) -> ir.Value:
    """[B, S, H * D] as [B, H, S, D]"""
    return call.op("Transpose", call.op("Reshape", x, [0, 0, heads, call.size(x, 2) // heads]), perm=[0, 2, 1, 3])


def merged_heads(call: Call, x: ir.Value, width: int) -> ir.Value:
    """[B, H, S, D] as [B, S, H * D], which is the width"""
    return call.op("Reshape", call.op("Transpose", x, perm=[0, 2, 1, 3]), [0, 0, width])


def _by_heads(call: Call, x: ir.Value, heads: int) -> ir.Value:
    return x if call.rank(x) == 4 else split_heads(call, x, heads)


def _unpacked(call: Call, q: ir.Value, k: ir.Value | None, v: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Three operands; of [B, S, H, 3, D], or of [B, S, E] and [B, L, H, 2, D], all those with heads are [B, H, S, D]."""
    if k is None and call.rank(q) == 5:
        q, k, v = _unpacked_heads(call, q, 3)
    elif k is not None and call.rank(k) == 5:
        k, v = _unpacked_heads(call, k, 2)
    if k is None or v is None:
        raise RefusedNodeError("has neither keys and values nor packed queries")
    return q, k, v


def _unpacked_heads(call: Call, packed: ir.Value, count: int) -> tuple[ir.Value, ...]:
    parts = call.ops(count, "Split", packed, axis=3, num_outputs=count)
    return tuple(call.op("Transpose", call.op("Squeeze", part, [3]), perm=[0, 2, 1, 3]) for part in parts)


def _biased(call: Call, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The operands with their parts of the bias; those that come by heads, from a cache, have theirs already."""
    if bias is None:
        return q, k, v
    if call.rank(q) == 4:
        heads, size = call.size(q, 1), call.size(q, 3)
        parts = call.op("Reshape", bias, np.array([3, heads, 1, size]))
        halves = [call.op("Squeeze", part, [0]) for part in call.ops(3, "Split", parts, axis=0, num_outputs=3)]
        q, k, v = (call.op("Add", one, part) for one, part in zip((q, k, v), halves, strict=True))
        return q, k, v
    width, total = call.size(q, 2), call.size(bias, 0)
    parts3 = call.ops(3, "Split", bias, [width, width, total - 2 * width], axis=0)
    q = call.op("Add", q, parts3[0])
    if call.rank(k) == 3:
        k, v = call.op("Add", k, parts3[1]), call.op("Add", v, parts3[2])
    return q, k, v
