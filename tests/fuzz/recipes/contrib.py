"""Operators of com.microsoft, which ONNX Runtime's optimizers and quantizers leave in models."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draft import FLOAT, INT8, INT32, UINT8, Draft, NotPossibleError, Shape


def _known(b: Draft, min_rank: int, max_rank: int) -> tuple[str, Shape]:
    """A float32 value with elements."""
    x = b.tensor(FLOAT, min_rank, max_rank, nonempty=True)
    if x not in b.types:
        raise NotPossibleError("no shape")
    return x, b.shape_of(x)


def _scale(b: Draft) -> str:
    return b.value(np.array(b.rng.random() * 0.2 + 0.05, np.float32), 0.9)


def _zero(b: Draft, dtype: np.dtype) -> str:
    return b.value(np.array(b.integer(0, 5), dtype), 0.9)


def _quantized(b: Draft, dtype: np.dtype, shape: Shape) -> tuple[str, str, str]:
    return b.fresh(dtype, shape, 0.1), _scale(b), _zero(b, dtype)


def gelu(b: Draft) -> None:
    x, shape = _known(b, 1, 4)
    op_type = b.pick(["Gelu", "QuickGelu", "FastGelu", "BiasGelu"])
    bias = [b.fresh(FLOAT, shape[-1:])] if op_type == "BiasGelu" or (op_type == "FastGelu" and b.chance(0.5)) else []
    b.contrib(op_type, x, *bias, results=[(FLOAT, shape)], alpha=b.pick([None, 1.5]) if op_type == "QuickGelu" else None)


def skip_norm(b: Draft) -> None:
    """A sum, its normalization, and the sum itself where it is asked for."""
    op_type = b.pick(["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
    x, shape = _known(b, 3, 3)
    row = shape[-1:]
    more = [b.fresh(FLOAT, row)] * (op_type == "SkipLayerNormalization")
    bias = b.fresh(FLOAT, row) if b.chance(0.5) else ""
    results: list[tuple[np.dtype, Shape] | None] = [(FLOAT, shape)]
    if b.chance(0.5):
        results += [None, None, (FLOAT, shape)]
    b.contrib(op_type, x, b.fresh(FLOAT, shape), b.fresh(FLOAT, row), *more, bias, results=results, epsilon=1e-3)


def fused_product(b: Draft) -> None:
    batch, m, k, n = b.integer(1, 3), *(b.pick([1, 3, 8, 17]) for _ in range(3))
    trans_a, trans_b = b.integer(0, 1), b.integer(0, 1)
    x = b.fresh(FLOAT, (batch, k, m) if trans_a else (batch, m, k), 0.1)
    y = b.fresh(FLOAT, (batch, n, k) if trans_b else (batch, k, n), 0.5)
    alpha = b.pick([None, 0.5, -2.0])
    b.contrib("FusedMatMul", x, y, results=[(FLOAT, (batch, m, n))], transA=trans_a, transB=trans_b, alpha=alpha)


def fused_conv(b: Draft) -> None:
    groups = b.integer(1, 2)
    inside, outside, size = groups * b.integer(1, 4), groups * b.integer(1, 9), b.integer(3, 9)
    x, weight = b.fresh(FLOAT, (1, inside, size, size), 0.05), b.finite(FLOAT, (outside, inside // groups, 3, 3), 0.9)
    result = (1, outside, size, size)
    addend = [b.fresh(FLOAT, (outside,), 0.9), b.fresh(FLOAT, result)] if b.chance(0.4) else []
    kind = b.pick(["Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid"])
    given = {"LeakyRelu": [0.1], "HardSigmoid": [0.2, 0.5]}.get(kind)
    attributes: dict[str, Any] = {"activation": kind, "activation_params": given, "group": groups, "pads": [1, 1, 1, 1]}
    b.contrib("FusedConv", x, weight, *addend, results=[(FLOAT, result)], **attributes)


def fused_gemm(b: Draft) -> None:
    m, k, n = (b.pick([1, 3, 8, 17]) for _ in range(3))
    x, y, c = b.fresh(FLOAT, (m, k), 0.1), b.fresh(FLOAT, (k, n), 0.8), b.fresh(FLOAT, (n,), 0.8)
    b.contrib("FusedGemm", x, y, c, results=[(FLOAT, (m, n))], activation=b.pick(["Relu", "Tanh", "LeakyRelu"]), alpha=0.5)


def rotary(b: Draft) -> None:
    batch, steps, heads, size = b.integer(1, 2), b.integer(1, 5), b.integer(1, 3), 2 * b.integer(1, 5)
    x = b.fresh(FLOAT, (batch, steps, heads * size), 0.0)
    places = b.value(b.rng.integers(0, 9, (batch, steps))) if b.chance(0.6) else b.value(np.array([b.integer(0, 3)]))
    tables = [b.fresh(FLOAT, (9, size // 2), 0.8) for _ in range(2)]
    shape = (batch, steps, heads * size)
    b.contrib("RotaryEmbedding", x, places, *tables, results=[(FLOAT, shape)], interleaved=b.integer(0, 1), num_heads=heads)


def quantized_elements(b: Draft) -> None:
    """8-bit numbers in and out, each with a scale and zero point."""
    op_type = b.pick(["QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax"])
    # Of unsigned numbers ONNX Runtime's QLinearSoftmax, the only one to ask, gives 0 for a probability of 1, which is 256 of 256.
    dtype = INT8 if op_type == "QLinearSoftmax" else b.pick([INT8, UINT8])
    shape = b.shape(1, 4, nonempty=True)
    first, to = _quantized(b, dtype, shape), (_scale(b), _zero(b, dtype))
    if op_type in ("QLinearAdd", "QLinearMul"):
        other = tuple(1 if b.chance(0.3) else size for size in shape)[b.integer(0, len(shape) - 1) :]
        b.contrib(op_type, *first, *_quantized(b, dtype, other), *to, results=[(dtype, shape)])
    elif op_type == "QLinearSoftmax":
        grid = b.value(np.array(1 / 256, np.float32), 1.0), b.value(np.array(-128, dtype), 1.0)
        b.contrib(op_type, *first, *grid, results=[(dtype, shape)], axis=b.axis(len(shape)), opset=b.opset)
    else:
        b.contrib(op_type, *first, *to, results=[(dtype, shape)], alpha=0.1 if op_type == "QLinearLeakyRelu" else None)


def quantized_join(b: Draft) -> None:
    dtype = b.pick([INT8, UINT8])
    shape = b.shape(1, 3, nonempty=True)
    axis, parts, length = b.integer(0, len(shape) - 1), list[str](), 0
    for _ in range(b.integer(1, 3)):
        size = b.integer(1, 5)
        parts += _quantized(b, dtype, (*shape[:axis], size, *shape[axis + 1 :]))
        length += size
    result = (*shape[:axis], length, *shape[axis + 1 :])
    b.contrib("QLinearConcat", _scale(b), _zero(b, dtype), *parts, results=[(dtype, result)], axis=axis)


def quantized_pool(b: Draft) -> None:
    dtype, shape = b.pick([INT8, UINT8]), (b.integer(1, 2), b.integer(1, 5), b.integer(1, 6), b.integer(1, 6))
    x, to = _quantized(b, dtype, shape), (_scale(b), _zero(b, dtype))
    b.contrib("QLinearGlobalAveragePool", *x, *to, results=[(dtype, (*shape[:2], 1, 1))], channels_last=0)


def quantized_gemm(b: Draft) -> None:
    m, k, n = (b.pick([1, 3, 8, 17]) for _ in range(3))
    x, weight = _quantized(b, UINT8, (m, k)), (b.fresh(INT8, (k, n), 1.0), _scale(b), b.value(np.array(0, INT8), 1.0))
    bias = b.value(b.rng.integers(-90, 90, n).astype(INT32), 1.0) if b.chance(0.6) else ""
    b.contrib("QGemm", *x, *weight, bias, _scale(b), _zero(b, UINT8), results=[(UINT8, (m, n))], transB=0)


def float_of_integers(b: Draft) -> None:
    m, k, n = (b.pick([1, 3, 8, 17]) for _ in range(3))
    weight = b.fresh(b.pick([INT8, UINT8]), (k, n), 0.9)
    dtype = b.types[weight][0]
    bias = [b.fresh(FLOAT, (n,), 0.9)] if b.chance(0.5) else []
    if b.chance(0.5):
        x = b.finite(FLOAT, (m, k), 0.0)
        b.contrib("DynamicQuantizeMatMul", x, weight, _scale(b), _zero(b, dtype), *bias, results=[(FLOAT, (m, n))])
        return
    kind = b.pick([UINT8, dtype])
    x = b.fresh(kind, (m, k), 0.0)
    zeros = _zero(b, kind), _zero(b, dtype)
    b.contrib("MatMulIntegerToFloat", x, weight, _scale(b), _scale(b), *zeros, *bias, results=[(FLOAT, (m, n))])


def low_bits(b: Draft) -> None:
    """Weights of 4 bits in blocks of a column, two in a byte."""
    m, n, blocks, size = b.integer(1, 5), b.integer(1, 20), b.integer(1, 3), b.pick([16, 32])
    k = blocks * size
    weight = b.value(b.rng.integers(0, 256, (n, blocks, size // 2)).astype(UINT8), 1.0)
    scales = b.value((b.rng.random(n * blocks) * 0.1 + 0.01).astype(FLOAT), 1.0)
    zeros = [b.value(b.rng.integers(0, 256, n * ((blocks + 1) // 2)).astype(UINT8), 1.0)] if b.chance(0.5) else []
    x = b.finite(FLOAT, (m, k), 0.0)
    b.contrib("MatMulNBits", x, weight, scales, *zeros, results=[(FLOAT, (m, n))], K=k, N=n, bits=4, block_size=size)


RECIPES = [
    gelu, gelu, skip_norm, fused_product, fused_conv, fused_gemm, rotary, quantized_elements, quantized_join, quantized_pool,
    quantized_gemm, float_of_integers, low_bits,
]  # fmt: skip
