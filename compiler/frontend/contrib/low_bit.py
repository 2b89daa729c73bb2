"""Products with, and rows of, weights of 2, 4 and 8 bits in blocks that share a scale. They stay as small as they are."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from ...ir.constants import constant_tensor
from ...ir.stored_weights import ROW_BITS
from .activations import Results, add_all
from .call import Call, RefusedNodeError

_INT8_ROWS = 4  # the accuracy level at which rows may be rounded to int8; at all others they are float32 here
_UNSIGNED = {2: ir.DataType.UINT2, 4: ir.DataType.UINT4, 8: ir.DataType.UINT8}
# The 16 numbers of bitsandbytes' formats: FP4, and the quantiles of the normal distribution (Dettmers et al., arXiv 2305.14314).
_FP4 = (0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BNB4 = {0: (*_FP4, *(-number for number in _FP4)), 1: _NF4}


def matmul_n_bits(call: Call) -> Results:
    """a @ dequantized(b).T + bias; b is [N, blocks, bytes of a block]."""
    bits, columns, depth = call.integer("bits", 4), call.integer("N"), call.integer("K")
    if call.integer("weight_prepacked", 0):
        raise RefusedNodeError("prepacked weights are not taken")
    level = call.integer("accuracy_level", 0)
    block = call.integer("block_size")
    shape = columns, -(-depth // block)
    weight = dequantized(call, call.input(1), call.input(2), call.optional(3), bits, shape, block, depth)
    product = call.op("MatMul", call.input(0), call.op("Transpose", weight, perm=[1, 0]))
    if level == _INT8_ROWS:
        call.annotate(product, ROW_BITS, "8")
    return (add_all(call, product, call.optional(5)),)


def matmul_bnb4(call: Call) -> Results:
    """a @ w.T, or a @ w; the rows of w [N, K] are indices into 16 numbers, the first of two in the upper half of a byte."""
    x, packed, largest = call.input(0), call.input(1), call.input(2)
    columns, depth, block = call.integer("N"), call.integer("K"), call.integer("block_size")
    table, kind = _BNB4.get(call.integer("quant_type")), call.dtype(x)
    call.ignore("training_mode")
    if table is None:
        raise RefusedNodeError("its quant_type is not taken")
    flat, four = call.op("Reshape", packed, [-1, 1]), np.array(4, np.uint8)
    halves = call.op("BitShift", flat, four, direction="RIGHT"), call.op("BitwiseAnd", flat, np.array(15, np.uint8))
    indices = call.op("Cast", call.op("Concat", *halves, axis=1), to=int(ir.DataType.INT32))
    count, blocks = columns * depth, -(-columns * depth // block)
    numbers = call.op("Reshape", call.op("Gather", np.array(table, kind.numpy()), indices), [-1])
    rows = call.op("Reshape", largest, [-1, 1])
    if count % block or count % 2:
        numbers = call.op("Pad", call.op("Slice", numbers, [0], [count], [0]), [0, blocks * block - count])
    scaled = call.op("Reshape", call.op("Mul", call.op("Reshape", numbers, [-1, block]), rows), [-1])
    weight = call.op("Reshape", call.op("Slice", scaled, [0], [count], [0]), [columns, depth])
    return (call.op("MatMul", x, call.op("Transpose", weight, perm=[1, 0]) if call.integer("transB", 1) else weight),)


def gather_block_quantized(call: Call) -> Results:
    """Rows of a quantized table along `gather_axis`, dequantized after they are gathered; zeros for an index out of range."""
    indices, scale, block = call.input(1), call.input(2), call.integer("block_size", 128)
    table, bits, zero = _table(call)
    rank, places = call.rank(table), call.rank(indices)
    along, blocked = call.integer("gather_axis", 0) % rank, call.integer("quantize_axis", 1) % rank
    if along in (blocked, rank - 1) or call.size(scale, blocked) * block != call.size(table, blocked) * (
        8 // bits if blocked == rank - 1 else 1
    ):
        raise RefusedNodeError("its rows are no whole blocks, or it gathers along them")
    limit = call.like(indices, call.size(table, along))
    is_inside = call.op("And", call.op("Less", indices, limit), call.op("GreaterOrEqual", indices, call.op("Neg", limit)))
    safe = call.op("Where", is_inside, indices, call.like(indices, 0))
    rows, factors, points = (call.op("Gather", one, safe, axis=along) for one in (table, scale, zero))
    if call.dtype(call.input(0)) == ir.DataType.INT4:  # v = (code xor 8) - 8, and the zero points are 8 too large
        rows = call.op("BitwiseXor", rows, np.array(0x88, np.uint8))
    axis = blocked if blocked < along else blocked + places - 1
    y = call.op("DequantizeLinear", _split_bytes(call, rows, bits), factors, points, axis=axis, block_size=block)
    inner = rank - along - 1
    shape = call.op("Unsqueeze", is_inside, list(range(places, places + inner))) if inner else is_inside
    return (call.op("Where", shape, y, call.like(y, 0.0)),)


def dequantized(
    call: Call,
    packed: ir.Value,
    scale: ir.Value,
    zero: ir.Value | None,
    bits: int,
    shape: tuple[int, ...],
    block: int,
    depth: int | None = None,
    *,
    is_padded: bool = True,
) -> ir.Value:
    """The weight [..., blocks * block] whose rows lie packed in bytes; `shape` is that of the scales [..., blocks].
    With `depth` only so many columns of it; where it is not `is_padded`, these alone are packed.

    Zero points are floats, or integers packed along the blocks; those of rows of one block may be packed along the rows.
    """
    if bits not in _UNSIGNED:
        raise RefusedNodeError(f"weights of {bits} bits are not taken")
    count = shape[-1] * block if is_padded or depth is None else depth
    if count % block and zero is not None and call.dtype(zero).is_floating_point():
        raise RefusedNodeError("its last blocks are short, and its zero points floats")
    weight = _retyped(call, packed, bits, (*shape[:-1], count))
    scale = call.op("Reshape", scale, list(shape))
    if zero is not None and call.dtype(zero).is_floating_point():
        blocks = call.op("Reshape", call.op("Cast", weight, to=int(call.dtype(scale))), [*shape, block])
        centred = call.op("Sub", blocks, call.op("Reshape", zero, [*shape, 1]))
        scaled = call.op("Mul", centred, call.op("Reshape", scale, [*shape, 1]))
        whole = call.op("Reshape", scaled, [*shape[:-1], count])
        return whole if depth in (None, count) else call.op("Slice", whole, [0], [depth], [-1])
    weight = weight if depth in (None, count) else _first_columns(call, weight, depth)
    points = _zero_points(call, zero, bits, shape)
    return call.op("DequantizeLinear", weight, scale, points, axis=len(shape) - 1, block_size=block)


def _zero_points(call: Call, zero: ir.Value | None, bits: int, shape: tuple[int, ...]) -> ir.Value:
    """Zero points of all blocks: the middle of the range, or unpacked from rows of whole bytes."""
    kind = _UNSIGNED[bits]
    if zero is None:
        return call.constant(np.full(shape, 2 ** (bits - 1)).astype(kind.numpy()))
    count = prod(call.size(zero, axis) for axis in range(call.rank(zero)))
    is_by_row = count == prod(shape[:-1]) * -(-shape[-1] * bits // 8)  # whole bytes for each row, flattened or not
    along = shape if is_by_row else shape[:-1]  # the dimensions that are packed
    if along[-1] * bits % 8 == 0:
        return _retyped(call, zero, bits, shape)
    rows = call.known(zero, "zero_points").reshape(*along[:-1], -1)
    return call.constant(_unpacked(rows, bits)[..., : along[-1]].astype(kind.numpy()).reshape(shape))


def _first_columns(call: Call, weight: ir.Value, count: int) -> ir.Value:
    """The first columns of constant integers; nothing is read."""
    tensor = constant_tensor(weight)
    assert tensor is not None
    shape = ir.Shape((*tensor.shape.numpy()[:-1], count))
    return call.retyped(
        ir.LazyTensor(lambda: ir.tensor(tensor.numpy()[..., :count], dtype=tensor.dtype), dtype=tensor.dtype, shape=shape)
    )


def _retyped(call: Call, value: ir.Value, bits: int, shape: tuple[int, ...]) -> ir.Value:
    """The bytes of a constant as integers of fewer bits; the bytes themselves are shared, not read."""
    tensor, kind = constant_tensor(value), _UNSIGNED[bits]
    if tensor is None:
        raise RefusedNodeError("its quantized weights are no constant")
    if tensor.size * 8 != int(np.prod(shape)) * bits or tensor.dtype != ir.DataType.UINT8:
        raise RefusedNodeError(f"its weights {list(tensor.shape)} are not of shape {list(shape)} in {bits} bits")
    if isinstance(tensor, ir.ExternalTensor):
        place = tensor.location, tensor.offset, tensor.length
        return call.retyped(
            ir.ExternalTensor(*place, kind, name=str(value.name), shape=ir.Shape(shape), base_dir=tensor.base_dir)
        )
    array = tensor.numpy().reshape(-1)
    if bits == 8:
        return call.constant(array.reshape(shape))
    return call.retyped(ir.PackedTensor(array, kind, shape=ir.Shape(shape)))


def _unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """The integers in rows of bytes, low bits first, one to a byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((rows[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*rows.shape[:-1], -1)


def _table(call: Call) -> tuple[ir.Value, int, ir.Value]:
    """The table in bytes, the bits of its elements, and all its zero points, one a byte."""
    data, zero, bits = call.input(0), call.optional(3), call.integer("bits", 4)
    tensor, kind, scale = constant_tensor(data), call.dtype(data), call.input(2)
    shape = [call.size(scale, axis) for axis in range(call.rank(scale))]
    if kind == ir.DataType.UINT8 and bits in _UNSIGNED:
        middle = 2 ** (bits - 1)
        points = None if zero is None else _unpacked(call.known(zero, "zero_points"), bits)[..., : shape[-1]]
        table = data
    elif tensor is not None and kind in (ir.DataType.UINT4, ir.DataType.INT4) and call.size(data, call.rank(data) - 1) % 2 == 0:
        bits, middle = 4, 0 if kind == ir.DataType.UINT4 else 8
        points = None if zero is None else call.known(zero, "zero_points").astype(np.int32) + middle
        table = _bytes_of(call, tensor)
    else:
        raise RefusedNodeError("only tables of 2, 4 and 8 bit integers in whole bytes are taken")
    return table, bits, call.constant((np.full(shape, middle) if points is None else points).astype(np.uint8))


def _bytes_of(call: Call, tensor: ir.TensorProtocol) -> ir.Value:
    """The bytes in which the 4-bit integers of a constant lie, with half as many in the last dimension."""
    *outer, last = tensor.shape.numpy()
    shape = (*outer, last // 2)
    if isinstance(tensor, ir.ExternalTensor):
        place = tensor.location, tensor.offset, tensor.length
        return call.retyped(
            ir.ExternalTensor(*place, ir.DataType.UINT8, name=str(tensor.name), shape=ir.Shape(shape), base_dir=tensor.base_dir)
        )
    return call.constant(np.frombuffer(tensor.tobytes(), np.uint8).reshape(shape))


def _split_bytes(call: Call, packed: ir.Value, bits: int) -> ir.Value:
    """The integers in bytes, low bits first, as uint8, with more of them in the last dimension."""
    if bits == 8:
        return packed
    rank = call.rank(packed)
    byte, mask = call.op("Unsqueeze", packed, [rank]), np.array(2**bits - 1, np.uint8)
    parts = [
        call.op("BitwiseAnd", call.op("BitShift", byte, np.array(shift, np.uint8), direction="RIGHT"), mask)
        for shift in range(0, 8, bits)
    ]
    size = call.size(packed, rank - 1) * len(parts)
    return call.op("Reshape", call.op("Concat", *parts, axis=-1), [*[0] * (rank - 1), size])
