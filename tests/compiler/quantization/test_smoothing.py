"""Scales moved into weights: the same function, and less error where channels differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from onnx import numpy_helper
from prefuse.compiler.debugging.oracle import relative_error, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.quantization.formats import quantize_channels, unsigned_affine
from prefuse.compiler.quantization.histogram import ChannelMoments
from prefuse.compiler.quantization.quantizer import Settings, calibrate
from prefuse.compiler.quantization.smoothing import best_scales, equal_ranges
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

from .models import SAME, batches, built, feed_forward

CPU = Target("cpu", "avx512vnni", 1)  # whose weights have all of 8 bits


def product_error(x: np.ndarray, w: np.ndarray, scales: np.ndarray) -> float:
    """The relative error of x W with both rounded to 8 bits, its scales moved."""
    divided, scaled = (x / scales).astype(np.float32), (w * scales[:, None]).astype(np.float32)
    rounded = unsigned_affine(divided.min(), divided.max()).rounded(divided)
    exact = x.astype(np.float64) @ w
    return float(
        np.linalg.norm(rounded.astype(np.float64) @ quantize_channels(scaled, 1).dequantize() - exact) / np.linalg.norm(exact)
    )


def moments_of(x: np.ndarray) -> ChannelMoments:
    found = ChannelMoments(x.shape[1])
    found.add(x)
    return found


def test_channels_of_different_sizes() -> None:
    """A few channels are 50 times as large as the others: most of the error goes."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(500, 64)).astype(np.float32)
    x[:, :3] *= 50
    w = generator.normal(size=(64, 40)).astype(np.float32)
    exponent, scales = best_scales(moments_of(x), [w[:, :16], w[:, 16:]])
    assert scales is not None
    assert 0.0 < exponent < 1.0
    assert product_error(x, w, scales) < 0.5 * product_error(x, w, np.ones(64))


def test_equal_channels_stay() -> None:
    generator = np.random.default_rng(1)
    x, w = generator.uniform(-1, 1, (500, 64)).astype(np.float32), generator.uniform(-1, 1, (64, 40)).astype(np.float32)
    assert best_scales(moments_of(x), [w])[1] is None


def test_many_columns() -> None:
    """Of very many columns some tell enough."""
    generator = np.random.default_rng(3)
    x, w = generator.normal(size=(300, 16)).astype(np.float32), generator.normal(size=(16, 9_000)).astype(np.float32)
    x[:, :2] *= 40
    _, scales = best_scales(moments_of(x), [w])
    assert scales is not None
    assert product_error(x, w, scales) < 0.6 * product_error(x, w, np.ones(16))


def test_empty_channels() -> None:
    """Channels that are always zero, or have no weights, keep the scale 1; where all are, nothing is moved."""
    x, w = np.random.default_rng(2).normal(size=(99, 6)).astype(np.float32), np.ones((6, 5), np.float32)
    x[:, 0] *= 100
    x[:, 2], w[3] = 0, 0
    _, scales = best_scales(moments_of(x), [w])
    assert scales is not None
    assert scales[[2, 3]].tolist() == [1.0, 1.0]
    assert np.isfinite(scales).all()
    assert best_scales(moments_of(0 * x), [w])[1] is None


@pytest.mark.parametrize("is_read_by_others", [False, True])
def test_the_model_stays_the_same(is_read_by_others: bool) -> None:
    """Into the normalization's gain and bias where the product alone reads it; by a multiplication beside it else."""
    width = 32
    nodes = [("LayerNormalization", "x gain shift", "n"), ("MatMul", "n w", "m")]
    nodes.append(("Add", "m n", "y") if is_read_by_others else ("Relu", "m", "y"))
    model = built(nodes, [2, 9, width], {"gain": (width,), "shift": (width,), "w": (width, width)})
    gain = np.random.default_rng(4).normal(size=width).astype(np.float32)
    gain[:2] *= 60
    data = batches(model, 16)
    model.graph.initializer[0].raw_data = gain.tobytes()
    found = calibrate(import_model(model), data, CPU)
    assert list(found.smoothed) == ["n"]
    operators = [node.op_type for node in found.model.graph]
    assert operators.count("Mul") == is_read_by_others
    (batch,) = batches(model, 1, seed=5)
    expected = run_model(import_model(model), batch)["y"]
    assert relative_error(run_model(found.model, batch)["y"], expected) < 1e-6
    plain = calibrate(import_model(model), data, CPU, Settings(is_smooth=False))
    errors = [relative_error(run_model(one.place(one.uniform()), batch)["y"], expected) for one in (found, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_units_of_one_tensor_share_its_scales() -> None:
    model = feed_forward()
    found = calibrate(import_model(model), batches(model, 3), CPU)
    assert set(found.smoothed) <= {"n", "g"}


def mobile_network(*, has_pool: bool = False, has_sum: bool = False) -> onnx.ModelProto:
    """A convolution whose channels are of sizes 1 to 100, a depthwise one of 16 results for 8 channels, one of 3x3, one of 1x1;
    with a pool beside the third, or a sum in front of it."""
    nodes: list[Sequence[Any]] = [
        ("Conv", "x w0", "c0"),
        ("Relu", "c0", "r0"),
        ("Conv", "r0 w1", "c1", {**SAME, "group": 8}),
        ("Relu", "c1", "r1"),
        ("Conv", "r1 w2", "c2", SAME),
    ]
    if has_sum:
        nodes[3:4] = [("Conv", "x w4", "c4"), ("Add", "c1 c4", "s1"), ("Relu", "s1", "r1")]
    nodes += [("GlobalAveragePool", "r1", "g"), ("Add", "c2 g", "y")] if has_pool else [("Conv", "c2 w3", "y")]
    shapes: dict[str, tuple[int, ...]] = {"w0": (8, 4, 1, 1), "w1": (16, 1, 3, 3), "w2": (16, 16, 3, 3), "w3": (4, 16, 1, 1)}
    shapes |= {"w4": (16, 4, 1, 1)} if has_sum else {}
    model = built(nodes, [1, 4, 10, 9], shapes)
    sizes = {"w0": np.geomspace(1, 100, 8), "w1": np.repeat(1 / np.geomspace(1, 100, 8), 2) * np.geomspace(1, 40, 16)}
    for tensor in model.graph.initializer:
        if tensor.name in sizes:
            array = numpy_helper.to_array(tensor) * sizes[tensor.name].reshape(-1, 1, 1, 1)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
    return model


def test_convolutions() -> None:
    """Depthwise and others: the same function, most of the error goes, and no launch more."""
    model = mobile_network()
    data, (batch,) = batches(model, 8), batches(model, 1, seed=5)
    expected = run_model(import_model(model), batch)["y"]
    found, plain = (calibrate(import_model(model), data, CPU, Settings(is_smooth=smooth)) for smooth in (True, False))
    assert {"r0", "r1"} <= found.smoothed.keys() <= {"r0", "r1", "c2"}
    assert found.smoothed["r0"] == 1.0
    assert relative_error(run_model(found.model, batch)["y"], expected) < 1e-6
    graphs = [one.place(one.uniform()) for one in (found, plain)]
    errors = [relative_error(run_model(graph, batch)["y"], expected) for graph in graphs]
    assert errors[0] < 0.6 * errors[1]
    nets = [prefuse.compile(graph, cache=False, threads=1) for graph in graphs]
    assert all(isinstance(net, CompiledModel) for net in nets)
    assert len({len(net.plan.steps) for net in nets}) == 1
    assert relative_error(np.asarray(nets[0](**batch)), expected) < 0.6 * errors[1]


def test_a_transposed_convolution() -> None:
    """Its weights have the channels that are divided first."""
    nodes: list[Sequence[Any]] = [
        ("Conv", "x w0", "c"),
        ("Relu", "c", "r"),
        ("ConvTranspose", "r w1", "y", {"strides": [2, 2]}),
    ]
    model = built(nodes, [1, 4, 6, 6], {"w0": (8, 4, 1, 1), "w1": (8, 5, 2, 2)})
    array = numpy_helper.to_array(model.graph.initializer[0]) * np.geomspace(1, 200, 8).reshape(-1, 1, 1, 1)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array.astype(np.float32), "w0"))
    data, (batch,) = batches(model, 8), batches(model, 1, seed=5)
    expected = run_model(import_model(model), batch)["y"]
    found, plain = (calibrate(import_model(model), data, CPU, Settings(is_smooth=smooth)) for smooth in (True, False))
    assert "r" in found.smoothed
    assert relative_error(run_model(found.model, batch)["y"], expected) < 1e-6
    errors = [relative_error(run_model(one.place(one.uniform()), batch)["y"], expected) for one in (found, plain)]
    assert errors[0] < errors[1]


def test_images_that_others_read_stay() -> None:
    """They would be stored twice; and sums lie in 8 bits with one of their operands."""
    for model in (mobile_network(has_pool=True), mobile_network(has_sum=True)):
        found = calibrate(import_model(model), batches(model, 4), CPU)
        assert "r0" in found.smoothed
        assert "r1" not in found.smoothed


def test_hardly_seen_channels_are_not_as_fine_as_others() -> None:
    """A range of a 1,000th is given that of a 64th, and one of zeros, too."""
    x = np.random.default_rng(6).uniform(-1, 1, (200, 4)).astype(np.float32) * np.array([1, 1e-3, 0, 0.1], np.float32)
    exponent, scales = equal_ranges(moments_of(x), [np.ones((4, 1, 9), np.float32)])
    assert exponent == 1.0
    assert scales is not None
    np.testing.assert_allclose(scales / scales[0], [1, 1 / 64, 1 / 64, 0.1], rtol=0.05)
    assert equal_ranges(moments_of(0 * x), [np.ones((4, 1, 9), np.float32)])[1] is None
