"""The forms of mask that ONNX Runtime's attention takes, as what is added to the scores.

Shapes: B batch, S queries, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import onnx_ir as ir

from .call import Call, RefusedNodeError


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask input, what is added where it is 0, and whether queries see later keys.

    A mask is 1 for keys that take part, of shape [B, T] or [B, S, T]; or the ends of the rows [B], or those and then their
    starts [2 B]. Later keys get the lowest number of the type, as ONNX Runtime has it; the last query is at the last key.
    """

    tensor: ir.Value | None
    filter_value: float
    is_causal: bool


def mask_bias(call: Call, q: ir.Value, k: ir.Value, mask: Mask) -> ir.Value | None:
    """What is added to the scores of q [B, H, S, D] and k [B, H, T, D], broadcastable to [B, H, S, T]; None without a mask."""
    if mask.tensor is None:
        return None
    is_kept = _is_kept(call, q, k, mask.tensor)
    bias = call.op("Where", is_kept, call.like(q, 0.0), call.like(q, mask.filter_value))
    return causal_bias(call, q, k, bias) if mask.is_causal else bias


def _is_kept(call: Call, q: ir.Value, k: ir.Value, mask: ir.Value) -> ir.Value:
    """Whether a key takes part, with four dimensions."""
    rank = call.rank(mask)
    if rank == 1:
        return _is_between(call, q, k, mask)
    if rank not in (2, 3):
        raise RefusedNodeError(f"a mask of {rank} dimensions is not taken")
    positive = call.op("Greater", mask, call.like(mask, 0))
    return call.op("Unsqueeze", positive, [1, 2] if rank == 2 else [1])


def _is_between(call: Call, q: ir.Value, k: ir.Value, mask: ir.Value) -> ir.Value:
    """Whether a key lies before the end of its row and, where there are starts, not before that."""
    batch = None if q.shape is None else q.shape[0]
    length = None if mask.shape is None else mask.shape[0]
    position = call.op("Cast", _positions(call, k), to=int(call.dtype(mask)))
    if length is not None and length == batch:
        return call.op("Less", position, call.op("Reshape", mask, [-1, 1, 1, 1]))
    if not isinstance(batch, int) or length != 2 * batch:
        raise RefusedNodeError(f"a mask of shape [{length}] for a batch of {batch} is not taken")
    ends, starts = call.ops(2, "Split", mask, axis=0, num_outputs=2)
    before = call.op("Less", position, call.op("Reshape", ends, [-1, 1, 1, 1]))
    return call.op("And", before, call.op("GreaterOrEqual", position, call.op("Reshape", starts, [-1, 1, 1, 1])))


def causal_bias(call: Call, q: ir.Value, k: ir.Value, bias: ir.Value) -> ir.Value:
    """The bias, and the lowest number for keys after the query."""
    lowest = float(ml_dtypes.finfo(call.dtype(q).numpy()).min)
    queries, keys = (call.op("Shape", x, start=2, end=3) for x in (q, k))
    row = call.op("Add", ascending(call, queries), call.op("Sub", keys, queries))
    is_seen = call.op("LessOrEqual", _positions(call, k), call.op("Unsqueeze", row, [1]))
    return call.op("Where", is_seen, bias, call.like(q, lowest))


def _positions(call: Call, k: ir.Value) -> ir.Value:
    """0 ... T - 1"""
    return ascending(call, call.op("Shape", k, start=2, end=3))


def ascending(call: Call, count: ir.Value) -> ir.Value:
    """0 ... count - 1, for a count of shape [1]"""
    return call.op("Range", call.constant_int(0), call.op("Squeeze", count, [0]), call.constant_int(1))
