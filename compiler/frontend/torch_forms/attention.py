"""The ONNX form of torch's attention: torch's exporter has one for four dimensions, in which a query that its mask leaves no key
gets the mean of all values, or NaN by a mask of -inf; torch gives it zeros."""

from __future__ import annotations

from typing import Any


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Softmax(query [..., L, E] x key^T [..., S, E] * scale + mask) x value [..., S, V]: [..., L, V].

    Leading dimensions are broadcast; with `enable_gqa` each of the key's heads (dimension -3) is that of several of the query's.
    A mask [..., L, S] of booleans says which keys a query sees, one of numbers is added; without any key a result is 0.
    Nothing is dropped: programs do not train.
    """
    import onnx_ir as ir
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
    from onnxscript.onnx_opset import opset18 as op

    ranks = [len(operand.shape) for operand in (query, key, value)]
    is_narrow = query.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = ir.DataType.DOUBLE if query.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    has_form = not is_narrow and (scale is None or (scale > 0 and wide == ir.DataType.FLOAT))  # the exporter takes its root
    if set(ranks) == {4} and attn_mask is None and has_form:
        return aten_scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated(operand, rank, query) for operand, rank in zip((key, value), ranks[1:], strict=True))
    turned = op.Transpose(key, perm=[*range(ranks[1] - 2), ranks[1] - 1, ranks[1] - 2])
    if scale is None:
        root = op.Reciprocal(op.Sqrt(op.Cast(_extent(query, ranks[0], -1), to=wide)))
    else:
        root = op.Constant(value=ir.tensor(float(scale), wide))
    if query.dtype == ir.DataType.BFLOAT16:  # a scaled query would be rounded once more: 2.5 times the error
        scores = op.Mul(op.Cast(op.MatMul(query, turned), to=wide), root)
    else:  # which keeps the products of float16 within its range
        scaled = op.Mul(op.Cast(query, to=wide) if is_narrow else query, root)  # most scales are 0.2% off in a narrow type
        scores = op.MatMul(op.CastLike(scaled, query) if is_narrow else scaled, turned)
    if is_causal:
        rows, columns = _extent(query, ranks[0], -2), _extent(key, ranks[1], -2)
        hidden = op.Expand(_float(float("-inf")), op.Concat(rows, columns, axis=0))
        causal = op.Trilu(hidden, op.Constant(value_int=1), upper=1)
        return _weighed(op.Softmax(op.Add(scores, op.CastLike(causal, scores)), axis=-1), value)
    if attn_mask is None:
        return _weighed(op.Softmax(scores, axis=-1), value)
    zero = op.CastLike(_float(0.0), scores)
    if _is_boolean(attn_mask):
        attn_mask = op.Where(attn_mask, zero, op.CastLike(_float(float("-inf")), scores))
    shares = op.Softmax(op.Add(scores, op.CastLike(attn_mask, scores)), axis=-1)
    return _weighed(op.Where(op.IsNaN(shares), zero, shares), value)


def _weighed(shares: Any, value: Any) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    return op.MatMul(op.CastLike(shares, value), value)


def _repeated(operand: Any, rank: int, query: Any) -> Any:
    """[..., heads, S, E] with each head as often as it is one of the query's."""
    from onnxscript.onnx_opset import opset18 as op

    heads, of_query = _extent(operand, rank, -3), _extent(query, len(query.shape), -3)
    times = op.Div(of_query, heads)
    shape, spread = op.Shape(operand), op.Unsqueeze(operand, [-3])
    before, after = op.Slice(shape, [0], [-3]), op.Slice(shape, [-2], [rank])
    return op.Reshape(
        op.Expand(spread, op.Concat(before, heads, times, after, axis=0)), op.Concat(before, of_query, after, axis=0)
    )


def _extent(operand: Any, rank: int, axis: int) -> Any:
    """A dimension, as one number [1]."""
    from onnxscript.onnx_opset import opset18 as op

    return op.Shape(operand, start=rank + axis, end=rank + axis + 1)


def _float(number: float) -> Any:
    from onnxscript.onnx_opset import opset18 as op

    return op.Constant(value_float=number)


def _is_boolean(mask: Any) -> bool:
    import onnx_ir as ir

    return bool(getattr(mask, "dtype", None) == ir.DataType.BOOL)
