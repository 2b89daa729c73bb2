"""Rotary position embeddings."""

from __future__ import annotations

import onnx_ir as ir

from .activations import Results
from .call import Call, RefusedNodeError
from .masks import ascending


def rotary_embedding(call: Call) -> Results:
    """ONNX's RotaryEmbedding; positions [B, S], or the first of them [1]."""
    x, positions, cos, sin = (call.input(position) for position in range(4))
    if call.number("scale", 1.0) != 1.0 or call.integer("is_packed_batching", 0):
        raise RefusedNodeError("attributes scale and is_packed_batching are not taken")
    size, heads = call.integer("rotary_embedding_dim", 0), call.integer("num_heads", 0)
    axis = call.rank(x) - 2
    width = 2 * call.size(cos, 1)
    if call.rank(x) == 3 and not heads:
        heads = call.size(x, 2) // width
    if call.rank(positions) == 1:
        positions = rising_positions(call, x, axis, positions)
    is_whole = call.size(x, axis + 1) // (heads if call.rank(x) == 3 else 1) == width
    if size not in (0, width):
        raise RefusedNodeError("rotary_embedding_dim does not fit the tables")
    return (
        call.op(
            "RotaryEmbedding",
            x,
            cos,
            sin,
            positions,
            interleaved=call.integer("interleaved", 0),
            num_heads=heads if call.rank(x) == 3 else 0,
            rotary_embedding_dim=0 if is_whole else width,
        ),
    )


def gemma_rotary_embedding(call: Call) -> Results:
    """x * cos(angles) + rotated x * sin(angles), for queries and keys whose rotated forms are inputs."""
    angles, q, q_rotated, k, k_rotated = (call.input(position) for position in range(5))
    cos, sin = (
        call.op("Cast", call.op("Unsqueeze", call.op(name, angles), [1]), to=int(call.dtype(q))) for name in ("Cos", "Sin")
    )
    return tuple(
        call.op("Add", call.op("Mul", x, cos), call.op("Mul", rotated, sin)) for x, rotated in ((q, q_rotated), (k, k_rotated))
    )


def rising_positions(call: Call, x: ir.Value, axis: int, first: ir.Value) -> ir.Value:
    """first + 0 ... S - 1 for each row, [B, S]; `axis` is that of S in x, and `first` has shape [1] or [B, 1]."""
    steps = ascending(call, call.op("Shape", x, start=axis, end=axis + 1))
    rows = call.op("Add", call.op("Cast", first, to=int(ir.DataType.INT64)), call.op("Unsqueeze", steps, [0]))
    sizes = call.op("Concat", call.op("Shape", x, start=0, end=1), call.op("Shape", x, start=axis, end=axis + 1), axis=0)
    return call.op("Expand", rows, sizes)
