"""Small models to quantize, and data for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from prefuse.compiler.frontend.importer import import_model


def built(
    nodes: Sequence[Sequence[Any]],
    x: Sequence[int | str],
    weights: Mapping[str, tuple[int, ...]],
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    """A model of float32 `x`; nodes are (operator, inputs, outputs, attributes), names apart by spaces; weights are random."""
    generator = np.random.default_rng(0)
    arrays = {name: (generator.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in weights.items()}
    graph = helper.make_graph(
        [helper.make_node(op, ins.split(), outs.split(), **(rest[0] if rest else {})) for op, ins, outs, *rest in nodes],
        "main",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


SAME = {"pads": [1, 1, 1, 1]}


def residual_network() -> onnx.ModelProto:
    """A pool, a block with an identity and one with a convolution beside it, and a classifier.

    No integer kernel takes the stem, of 3 channels and windows of one pixel.
    """
    nodes: list[Sequence[Any]] = [
        ("Conv", "x w0 b0", "c0"),
        ("Relu", "c0", "r0"),
        ("MaxPool", "r0", "p0", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Conv", "p0 w1 b1", "c1", SAME),
        ("Relu", "c1", "r1"),
        ("Conv", "r1 w2 b2", "c2", SAME),
        ("Add", "c2 p0", "s2"),
        ("Relu", "s2", "r2"),
        ("Conv", "r2 w3 b3", "c3", SAME),
        ("Relu", "c3", "r3"),
        ("Conv", "r3 w7", "c7"),
        ("Conv", "r2 w4", "c4"),
        ("Add", "c7 c4", "s3"),
        ("Relu", "s3", "r4"),
        ("Conv", "r4 w5 b5", "c5"),
        ("GlobalAveragePool", "c5", "g"),
        ("Flatten", "g", "f"),
        ("Gemm", "f w6 b6", "y", {"transB": 1}),
    ]
    weights: dict[str, tuple[int, ...]] = {
        "w0": (8, 3, 1, 1),
        "w1": (8, 8, 3, 3),
        "w2": (8, 8, 3, 3),
        "w3": (8, 8, 3, 3),
        "w4": (8, 8, 1, 1),
    }
    weights |= {"w5": (12, 8, 1, 1), "w6": (5, 12), "w7": (8, 8, 1, 1)}
    biases = {f"b{number}": (weights[f"w{number}"][0],) for number in (0, 1, 2, 3, 5, 6)}
    return built(nodes, [2, 3, 12, 12], {**weights, **biases})


def feed_forward(rows: int | str = 7, width: int = 32) -> onnx.ModelProto:
    """A normalization, two matrix products with a Gelu between, and the sum with what came in."""
    nodes = [
        ("LayerNormalization", "x gain shift", "n"),
        ("MatMul", "n w1", "m1"),
        ("Add", "m1 b1", "a1"),
        ("Relu", "a1", "g"),
        ("MatMul", "g w2", "m2"),
        ("Add", "m2 x", "y"),
    ]
    weights = {"gain": (width,), "shift": (width,), "w1": (width, 3 * width), "b1": (3 * width,), "w2": (3 * width, width)}
    return built(nodes, [2, rows, width], weights)


def batches(model: onnx.ModelProto | ir.Model, count: int, seed: int = 0, rows: int = 5) -> list[dict[str, np.ndarray]]:
    """Normal inputs `x`; symbolic dimensions are `rows`."""
    graph = import_model(model)
    (value,) = graph.graph.inputs
    assert value.shape is not None
    shape = [dim if isinstance(dim, int) else rows for dim in value.shape]
    generator = np.random.default_rng(seed)
    return [{"x": generator.standard_normal(shape).astype(np.float32)} for _ in range(count)]
