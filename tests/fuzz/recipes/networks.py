"""Matrix products, recurrent operators, and quantized arithmetic."""

from __future__ import annotations

import numpy as np

from ..draft import DOUBLE, FLOAT, INT8, INT32, UINT8, Draft

_EQUATIONS = (  # an ellipsis stands for b
    "ij,jk->ik", "bij,bjk->bik", "ij->ji", "ij->", "ii->i", "ii", "i,j->ij", "...ij,...jk->...ik", "bhqd,bhkd->bhqk", "ij,ij->i",
    "ijk->jik", "ij,jk,kl->il", "i,i->", "ij,kj", "bij,kj->bik",
)  # fmt: skip


def matmul(b: Draft) -> None:
    x = b.tensor(b.dtype("MatMul"), 1, 4)
    dtype, shape = b.types[x]
    n = b.pick([1, 2, 5, 7, 16, 17, 33])
    ahead = tuple(b.pick([1, size]) for size in shape[:-2])
    rows = shape[-1]
    y = b.fresh(dtype, b.pick([(rows,), (rows, n), (*ahead, rows, n), (3, *[1] * (len(shape) - 2), rows, n)]), 0.5)
    (product,) = b.op("MatMul", x, y)
    if b.chance(0.4):
        b.op("Relu", b.op("Add", product, b.like(product) if product in b.types else product)[0])


def gemm(b: Draft) -> None:
    dtype = b.dtype("Gemm", kinds="f")
    m, k, n = (b.pick([0, 1, 2, 5, 7, 16, 33]) for _ in range(3))
    trans_a, trans_b = b.integer(0, 1), b.integer(0, 1)
    x = b.fresh(dtype, (k, m) if trans_a else (m, k), 0.1)
    y = b.fresh(dtype, (n, k) if trans_b else (k, n), 0.6)
    c = [b.fresh(dtype, b.pick([(n,), (m, n), (1, n), (m, 1), (1,), ()]))] if b.chance(0.7) else []
    b.op("Gemm", x, y, *c, transA=trans_a, transB=trans_b, alpha=b.pick([None, 0.5, -2.0]), beta=b.pick([None, 0.0, 1.5]))


def einsum(b: Draft) -> None:
    equation = b.pick(_EQUATIONS)
    sizes = {letter: b.pick([1, 2, 3, 5, 7]) for letter in "bdhijklq"}
    dtype = b.pick([FLOAT, FLOAT, DOUBLE, INT32])
    terms = equation.replace("...", "b").split("->")[0].split(",")
    operands = [b.fresh(dtype, tuple(sizes[letter] for letter in term)) for term in terms]
    b.op("Einsum", *operands, equation=equation)


def attention(b: Draft) -> None:
    """Products, a scale, a mask and Softmax, as exporters write them."""
    n, h, q, k, d = b.integer(1, 2), b.integer(1, 3), b.integer(1, 9), b.integer(1, 9), b.integer(1, 8)
    query, key, value = (b.fresh(FLOAT, (n, h, rows, d), 0.1) for rows in (q, k, k))
    (turned,) = b.op("Transpose", key, perm=[0, 1, 3, 2])
    (scores,) = b.op("MatMul", query, turned)
    (scaled,) = b.op("Div", scores, b.value(np.array(d**0.5, np.float32), 1.0))
    if b.chance(0.5):
        mask = np.where(b.rng.random((1, 1, q, k)) < 0.2, np.float32(-1e9), np.float32(0)).astype(np.float32)
        (scaled,) = b.op("Add", scaled, b.value(mask))
    (weights,) = b.op("Softmax", scaled, axis=-1)
    b.op("MatMul", weights, value)


def recurrent(b: Draft) -> None:
    op_type, gates = b.pick([("RNN", 1), ("GRU", 3), ("LSTM", 4)])
    steps, batch, width, hidden = b.integer(1, 4), b.integer(1, 3), b.integer(1, 5), b.integer(1, 5)
    direction = b.pick(["forward", "reverse", "bidirectional"])
    ways = 2 if direction == "bidirectional" else 1
    layout = int(b.since(14) and b.chance(0.2))
    x = b.finite(FLOAT, (batch, steps, width) if layout else (steps, batch, width), 0.0)
    weights = [b.finite(FLOAT, (ways, gates * hidden, size), 0.8) for size in (width, hidden)]
    optional = [b.finite(FLOAT, (ways, 2 * gates * hidden), 0.8) if b.chance(0.6) else ""]
    if not layout and b.chance(0.5):
        optional += [b.value(b.rng.integers(1, steps + 1, batch).astype(np.int32)) if b.chance(0.5) else ""]
        optional += [b.finite(FLOAT, (ways, batch, hidden)) for _ in range(1 if op_type != "LSTM" else 2)]
    extra = {"linear_before_reset": b.integer(0, 1)} if op_type == "GRU" else {}
    outputs = 3 if op_type == "LSTM" else 2
    b.op(
        op_type, x, *weights, *optional, hidden_size=hidden, direction=direction, layout=layout or None, outputs=outputs, **extra
    )


def quantize(b: Draft) -> None:
    x = b.finite(FLOAT, b.shape(1, 4), 0.1)
    shape = b.shape_of(x)
    dtype = b.pick([INT8, UINT8])
    axis = b.axis(len(shape)) if b.chance(0.5) else None
    size = () if axis is None else (shape[axis],)
    scale = b.value((b.rng.random(size) + 0.05).astype(np.float32), 0.8)
    zero = b.value(b.rng.integers(0, 9, size).astype(dtype), 0.8)
    (q,) = b.op("QuantizeLinear", x, scale, zero, axis=axis)
    if b.chance(0.7):
        b.op("DequantizeLinear", q, scale, zero, axis=axis)


def dequantize(b: Draft) -> None:
    dtype = b.pick([INT8, UINT8, INT32])
    x = b.fresh(dtype, b.shape(0, 4))
    scale = b.value(np.array(b.rng.random() + 0.05, np.float32), 0.8)
    b.op("DequantizeLinear", x, scale, *([b.value(np.array(3, dtype))] if dtype != np.int32 else []))


def dynamic(b: Draft) -> None:
    b.op("DynamicQuantizeLinear", b.finite(FLOAT, b.shape(nonempty=True), 0.1), outputs=3)


def integer_product(b: Draft) -> None:
    m, k, n = b.integer(1, 9), b.integer(1, 17), b.integer(1, 9)
    kinds = [b.pick([INT8, UINT8]) for _ in range(2)]
    x, y = b.fresh(kinds[0], (m, k), 0.1), b.fresh(kinds[1], (k, n), 0.6)
    zeros = [b.value(np.array(b.integer(0, 5), kind), 0.8) for kind in kinds]
    if b.chance(0.5):
        b.op("MatMulInteger", x, y, *zeros[: b.integer(0, 2)])
        return
    scales = [b.value(np.array(b.rng.random() * 0.2 + 0.05, np.float32), 0.8) for _ in range(3)]
    to = b.value(np.array(b.integer(0, 5), kinds[0]), 0.8)
    b.op("QLinearMatMul", x, scales[0], zeros[0], y, scales[1], zeros[1], scales[2], to)


def mlp(b: Draft) -> None:
    """Layers of a network with one of many activations."""
    width = b.integer(1, 20)
    x = b.fresh(FLOAT, (b.integer(1, 5), width), 0.0)
    for _ in range(b.integer(1, 3)):
        (x,) = b.op("MatMul", x, b.fresh(FLOAT, (width, width), 1.0))
        (x,) = b.op("Add", x, b.fresh(FLOAT, (width,), 1.0))
        (x,) = b.op(b.pick(["Relu", "Tanh", "Sigmoid", "Softplus", "HardSwish", "LeakyRelu"]), x)


RECIPES = [
    matmul, matmul, gemm, einsum, attention, recurrent, recurrent, quantize, dequantize, dynamic, integer_product, mlp,
]  # fmt: skip
