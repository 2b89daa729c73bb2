"""Rotary position embeddings."""

from __future__ import annotations

import numpy as np
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


def multimodal_rotary_embedding(call: Call) -> Results:
    """Rotation whose angles are of three positions (time, height, width) [3, B, S], each for a section of the head."""
    x, positions, cos, sin = (call.input(position) for position in range(4))
    sections = call.integers("mrope_section")
    width = call.size(cos, 1)
    if sections is None or len(sections) != 3 or sum(sections) != width:
        raise RefusedNodeError("its mrope_section does not fit the tables")
    if call.number("scale", 1.0) != 1.0 or call.integer("is_packed_batching", 0):
        raise RefusedNodeError("attributes scale and is_packed_batching are not taken")
    heads, size = call.integer("num_heads", 0), call.integer("rotary_embedding_dim", 0)
    heads = heads or (call.size(x, 2) // (2 * width) if call.rank(x) == 3 else 0)
    streams = np.array(_streams(sections, bool(call.integer("mrope_layout", 0))))
    chosen = [_angles(call, table, positions, streams) for table in (cos, sin)]
    attributes = {"interleaved": call.integer("interleaved", 0), "rotary_embedding_dim": size}
    return (call.op("RotaryEmbedding", x, *chosen, num_heads=heads if call.rank(x) == 3 else 0, **attributes),)


def _streams(sections: tuple[int, ...], is_interleaved: bool) -> list[int]:
    """Which of the three positions each column of the tables is for."""
    if not is_interleaved:
        return [stream for stream, count in enumerate(sections) for _ in range(count)]
    columns = [0] * sum(sections)
    for stream in (1, 2):
        for column in range(stream, min(3 * sections[stream], len(columns)), 3):
            columns[column] = stream
    return columns


def _angles(call: Call, table: ir.Value, positions: ir.Value, streams: np.ndarray) -> ir.Value:
    """[B, S, columns]: each column of the table at the position of its stream."""
    rows = call.op("Gather", table, positions, axis=0)
    split = call.ops(3, "Split", rows, axis=0, num_outputs=3)
    first, *others = (call.op("Squeeze", one, [0]) for one in split)
    for stream, other in enumerate(others, 1):
        first = call.op("Where", streams == stream, other, first)
    return first


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
