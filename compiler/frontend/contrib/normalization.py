"""Normalizations, alone or with the sums before them and the activation after."""

from __future__ import annotations

import onnx_ir as ir

from .activations import Results, add_all
from .call import Call, RefusedNodeError

_SKIP_EPSILON = 1e-12


def layer_normalization(call: Call) -> Results:
    """ONNX's own, which ONNX Runtime had before ONNX did."""
    attributes = call.forwarded("axis", "epsilon", "stash_type")
    count = 3 if call.is_asked(1) or call.is_asked(2) else 1
    return call.ops(count, "LayerNormalization", call.input(0), call.input(1), call.optional(2), **attributes)


def simplified_layer_normalization(call: Call) -> Results:
    """x / rms(x) * scale; the second output is 1 / rms(x)."""
    x, axis, epsilon = call.input(0), call.integer("axis", -1), call.number("epsilon", 1e-5)
    y = call.op("RMSNormalization", x, call.input(1), axis=axis, epsilon=epsilon, **call.forwarded("stash_type"))
    return y, _inverse_rms(call, x, axis, epsilon) if call.is_asked(1) else None


def skip_layer_normalization(call: Call) -> Results:
    """LayerNormalization(input + skip + bias); the fourth output is the sum."""
    total = add_all(call, call.input(0), call.input(1), call.optional(4))
    count = 3 if call.is_asked(1) or call.is_asked(2) else 1
    epsilon = call.number("epsilon", _SKIP_EPSILON)
    y, *moments = call.ops(count, "LayerNormalization", total, call.input(2), call.optional(3), axis=-1, epsilon=epsilon)
    return (y, *(moments or (None, None)), total)


def skip_simplified_layer_normalization(call: Call) -> Results:
    """RMSNormalization(input + skip + bias); the fourth output is the sum."""
    total = add_all(call, call.input(0), call.input(1), call.optional(3))
    epsilon = call.number("epsilon", _SKIP_EPSILON)
    y = call.op("RMSNormalization", total, call.input(2), axis=-1, epsilon=epsilon)
    return y, None, _inverse_rms(call, total, -1, epsilon) if call.is_asked(2) else None, total


def embed_layer_normalization(call: Call) -> Results:
    """LayerNormalization of the sum of word, position and segment embeddings; outputs: that, the mask's length, the sum."""
    ids, segments, position_ids = call.input(0), call.optional(1), call.optional(8)
    words, places, kinds = call.input(2), call.input(3), call.optional(4)
    total = embedding_sum(
        call,
        call.op("Gather", words, ids, axis=0),
        _rows(call, places, ids) if position_ids is None else call.op("Gather", places, position_ids, axis=0),
        None if segments is None or kinds is None else call.op("Gather", kinds, segments, axis=0),
    )
    y = call.op("LayerNormalization", total, call.input(5), call.input(6), axis=-1, epsilon=call.number("epsilon", _SKIP_EPSILON))
    call.ignore("mask_index_type")
    return y, mask_length(call, ids, call.optional(7)), total


def embedding_sum(call: Call, word: ir.Value, position: ir.Value, segment: ir.Value | None) -> ir.Value:
    """The sum of the embeddings that are there."""
    return add_all(call, word, position, segment)


def mask_length(call: Call, ids: ir.Value, mask: ir.Value | None) -> ir.Value | None:
    """How many ones there are in each row of the mask, int32[batch]; zeros where there is no mask."""
    if not call.is_asked(1):
        return None
    if mask is None:
        batch = call.op("Shape", ids, start=0, end=1)
        return call.op("Expand", call.op("Cast", call.constant_int(0), to=int(ir.DataType.INT32)), batch)
    ones = call.op("Cast", call.op("Equal", mask, call.like(mask, 1)), to=int(ir.DataType.INT32))
    return call.op("ReduceSum", ones, [1], keepdims=0)


def group_norm(call: Call) -> Results:
    """GroupNormalization of channels-last data, then Swish if asked for."""
    return (_group_normalization(call, call.input(0)),)


def skip_group_norm(call: Call) -> Results:
    """GroupNormalization of x + skip + bias, channels last; the second output is the sum."""
    x, skip, is_last = call.input(0), call.input(3), call.integer("channels_last", 1)
    if call.rank(skip) == 2:
        skip = call.op("Unsqueeze", skip, [1, 2] if is_last else [2, 3])
    elif not is_last:
        raise RefusedNodeError("channels_last=0 with a skip of 4 dimensions")
    bias = call.optional(4)
    if bias is not None and not is_last:
        bias = call.op("Unsqueeze", bias, [1, 2])
    total = add_all(call, x, skip, bias)
    return _group_normalization(call, total), total


def gated_rms_norm(call: Call) -> Results:
    """RMSNormalization(x) * activation(gate), over groups of the scale's length."""
    x, scale, gate = call.input(0), call.input(1), call.input(2)
    activation, wide = call.text("activation", "silu"), int(ir.DataType.FLOAT)
    if activation not in ("silu", "swish", "sigmoid"):
        raise RefusedNodeError(f"activation {activation} is not taken")
    wide_x, wide_scale, wide_gate = (call.op("Cast", one, to=wide) for one in (x, scale, gate))
    groups = call.op("Reshape", wide_x, [*[0] * (call.rank(x) - 1), -1, call.size(scale, 0)])
    y = call.op("RMSNormalization", groups, wide_scale, axis=-1, epsilon=call.number("epsilon", 1e-5))
    opened = call.op("Sigmoid" if activation == "sigmoid" else "Swish", wide_gate)
    product = call.op("Mul", call.op("Reshape", y, call.op("Shape", x)), opened)
    return (call.op("Cast", product, to=int(call.dtype(x))),)


def branchwise_rms_norm(call: Call) -> Results:
    """RMSNormalization of each branch, with a scale for each or for all."""
    x, scale, branches = call.input(0), call.optional(1), call.integer("num_branches", 0)
    rank, wide = call.rank(x), int(ir.DataType.FLOAT)
    grouped = call.op("Reshape", x, [*[0] * (rank - 1), branches, -1]) if branches else x
    count, length = call.size(grouped, call.rank(grouped) - 2), call.size(grouped, call.rank(grouped) - 1)
    one = call.op("Expand", call.op("Cast", call.constant_int(1), to=wide), [length])
    y = call.op("RMSNormalization", call.op("Cast", grouped, to=wide), one, axis=-1, epsilon=call.number("epsilon", 1e-5))
    if scale is not None:
        parts = call.op("Reshape", scale, [-1, length]) if call.rank(scale) == 2 or call.size(scale, 0) != length else scale
        if call.rank(parts) == 2 and call.size(parts, 0) not in (1, count):
            raise RefusedNodeError("its scale does not fit the branches")
        y = call.op("Mul", y, call.op("Cast", parts, to=wide))
    narrow = call.op("Cast", y, to=int(call.dtype(x)))
    return (call.op("Reshape", narrow, call.op("Shape", x)) if branches else narrow,)


def _group_normalization(call: Call, x: ir.Value) -> ir.Value:
    is_last, activation, rank = call.integer("channels_last", 1), call.integer("activation"), call.rank(x)
    if activation not in (0, 1):
        raise RefusedNodeError(f"activation {activation} is not taken")
    kind = int(call.dtype(x))
    inner = call.op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)]) if is_last else x
    scale, bias = (call.op("Cast", call.input(position), to=kind) for position in (1, 2))
    groups, epsilon = call.integer("groups"), call.number("epsilon", 1e-5)
    y = call.op("GroupNormalization", inner, scale, bias, num_groups=groups, epsilon=epsilon)
    y.shape = None if inner.shape is None else ir.Shape(inner.shape)  # of which ONNX infers nothing
    y = call.op("Swish", y) if activation else y
    return call.op("Transpose", y, perm=[0, *range(2, rank), 1]) if is_last else y


def _inverse_rms(call: Call, x: ir.Value, axis: int, epsilon: float) -> ir.Value:
    """1 / sqrt(mean(x * x) + epsilon) over the axes from `axis` on, in float32."""
    wide = call.op("Cast", x, to=int(ir.DataType.FLOAT))
    rank = call.rank(x)
    axes = list(range(axis % rank, rank))
    mean = call.op("ReduceMean", call.op("Mul", wide, wide), axes, keepdims=1)
    return call.op("Reciprocal", call.op("Sqrt", call.op("Add", mean, call.like(mean, epsilon))))


def _rows(call: Call, table: ir.Value, ids: ir.Value) -> ir.Value:
    """The first rows of a table, as many as `ids` has columns."""
    return call.op("Slice", table, [0], call.op("Shape", ids, start=1, end=2), [0])
