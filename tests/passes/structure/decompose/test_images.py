"""Bodies of BatchNormalization, DeformConv, EyeLike, GlobalLpPool and MaxUnpool, compiled, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch

from .expanding import evaluate, expanded, one_node, operators

rng = np.random.default_rng(19)


def computed(model: onnx.ModelProto, *arrays: np.ndarray) -> np.ndarray:
    return np.asarray(prefuse.compile(model, cache=False)(*arrays))


def deformed(
    x: np.ndarray,
    weights: np.ndarray,
    offset: np.ndarray,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
    offset_group: int,
) -> np.ndarray:
    """A deformable convolution of any rank, element by element (ONNX DeformConv)."""
    rank, kernel, places = x.ndim - 2, weights.shape[2:], offset.shape[2:]
    taps = int(np.prod(kernel))
    moves = offset.reshape(x.shape[0], offset_group, taps, rank, *places)
    masks = np.ones((x.shape[0], offset_group, taps, *places)) if mask is None else mask.reshape(-1, offset_group, taps, *places)
    columns = np.zeros((x.shape[0], x.shape[1], taps, *places))
    for image, channel, (tap, at), place in product(
        range(x.shape[0]), range(x.shape[1]), enumerate(np.ndindex(*kernel)), np.ndindex(*places)
    ):
        own = channel // (x.shape[1] // offset_group)
        steps = zip(place, strides, at, dilations, pads[:rank], moves[(image, own, tap, slice(None), *place)], strict=True)
        where = [o * s + t * d - p + move for o, s, t, d, p, move in steps]
        total = 0.0
        for corner in product((0, 1), repeat=rank):
            cell = [int(np.floor(w)) + c for w, c in zip(where, corner, strict=True)]
            if all(0 <= c < n for c, n in zip(cell, x.shape[2:], strict=True)):
                total += float(np.prod([1 - abs(w - c) for w, c in zip(where, cell, strict=True)])) * x[(image, channel, *cell)]
        columns[(image, channel, tap, *place)] = total * masks[(image, own, tap, *place)]
    apart = columns.reshape(x.shape[0], group, -1, int(np.prod(places)))
    rows = weights.reshape(group, weights.shape[0] // group, -1)
    result = (rows @ apart).reshape(x.shape[0], weights.shape[0], *places)
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


@pytest.mark.parametrize(
    ("shape", "kernel", "places", "more"),
    [
        ((2, 4, 5, 7), (3, 2), (3, 4), {"pads": [1, 0, 1, 1], "strides": [2, 2], "group": 2, "offset_group": 2}),
        ((1, 2, 6, 7), (2, 2), (4, 5), {"dilations": [2, 2]}),
        ((1, 2, 9), (3,), (7,), {}),
        ((1, 2, 3, 4, 5), (2, 2, 2), (2, 3, 4), {"offset_group": 2}),
        ((1, 1, 1, 1), (1, 1), (1, 1), {}),
    ],
)
def test_deform_conv(shape: tuple[int, ...], kernel: tuple[int, ...], places: tuple[int, ...], more: dict[str, Any]) -> None:
    rank, group = len(kernel), int(more.get("group", 1))
    own = int(more.get("offset_group", 1)) * int(np.prod(kernel))
    arrays = [
        rng.standard_normal(shape),
        rng.standard_normal((4, shape[1] // group, *kernel)),
        rng.uniform(-2, 2, (shape[0], own * rank, *places)),
        rng.standard_normal(4),
        rng.uniform(0, 1, (shape[0], own, *places)),
    ]
    arrays = [array.astype(np.float32) for array in arrays]
    defaults: dict[str, Any] = {
        "strides": [1] * rank,
        "pads": [0] * (2 * rank),
        "dilations": [1] * rank,
        "group": 1,
        "offset_group": 1,
    }
    inputs: dict[str, np.ndarray] = dict(zip("xwobm", arrays, strict=True))
    got = computed(one_node("DeformConv", inputs, kernel_shape=kernel, **more), *arrays)
    expected = deformed(*(array.astype(np.float64) for array in arrays), **{**defaults, **more})
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "kernel", "more"),
    [
        ((2, 4, 3, 2), (5, 6), {"stride": (5, 4), "groups": 2}),
        ((1, 3, 7), (36,), {"stride": 17, "padding": 9, "output_padding": 2}),
        ((1, 2, 3, 3), (3, 3), {"stride": (6, 3), "dilation": (2, 1), "padding": (1, 0)}),
        ((1, 2, 3, 3), (2, 3), {"stride": (5, 4), "output_padding": (2, 1)}),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_conv_transpose_of_many_phases(
    shape: tuple[int, ...], kernel: tuple[int, ...], more: dict[str, Any], has_bias: bool
) -> None:
    """Which the convolution template refuses; fewer phases stay. An infinite element reaches its own outputs only."""
    rank, groups = len(kernel), more.get("groups", 1)
    x, weights, bias = torch.randn(shape), torch.randn(shape[1], 3, *kernel), torch.randn(3 * groups)
    x.view(-1)[1] = torch.inf
    transpose = torch.nn.functional.conv_transpose1d if rank == 1 else torch.nn.functional.conv_transpose2d
    expected = transpose(x.double(), weights.double(), bias.double() if has_bias else None, **more)

    def each(name: str, default: int) -> list[int]:
        value = more.get(name, default)
        return [value] * rank if isinstance(value, int) else list(value)

    inputs = {"x": x.numpy(), "c_w": weights.numpy()} | ({"c_b": bias.numpy()} if has_bias else {})
    attributes: dict[str, Any] = {"strides": each("stride", 1), "dilations": each("dilation", 1), "group": groups}
    attributes |= {"pads": each("padding", 0) * 2, "output_padding": each("output_padding", 0)}
    model = one_node("ConvTranspose", inputs, **attributes)
    assert "Col2Im" in operators(expanded(model))
    np.testing.assert_allclose(computed(model, x.numpy()), expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("attributes", "begin", "ends"),
    [
        ({"auto_pad": "SAME_UPPER"}, (0, 0), (15, 12)),
        ({"auto_pad": "SAME_LOWER"}, (1, 1), (16, 13)),
        ({"auto_pad": "VALID"}, (0, 0), (16, 13)),
        ({"output_shape": [11, 10]}, (3, 2), (14, 12)),
        ({"auto_pad": "SAME_UPPER", "output_shape": [11, 10]}, (2, 1), (13, 11)),
    ],
)
def test_conv_transpose_of_many_phases_cuts(attributes: dict[str, Any], begin: tuple[int, int], ends: tuple[int, int]) -> None:
    """The sums, 16 by 13 of them, lose what is asked; the odd one at the end for SAME_UPPER, else at the beginning."""
    x, weights = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 2, 3, 3), (2, 1, 6, 5)))
    x[0, 0, 1, 1] = torch.inf
    whole = torch.nn.functional.conv_transpose2d(x, weights, stride=(5, 4)).numpy()
    model = one_node("ConvTranspose", {"x": x.numpy(), "c_w": weights.numpy()}, strides=[5, 4], **attributes)
    assert "ConvTranspose" not in operators(expanded(model))
    expected = whole[:, :, begin[0] : ends[0], begin[1] : ends[1]]
    np.testing.assert_allclose(computed(model, x.numpy()), expected, rtol=1e-12, atol=1e-12)


def test_conv_transpose_of_few_phases_stays() -> None:
    x, weights = np.zeros((1, 2, 3, 3), np.float32), np.zeros((2, 1, 4, 4), np.float32)
    assert "ConvTranspose" in operators(expanded(one_node("ConvTranspose", {"x": x, "c_w": weights}, strides=[4, 4])))


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 4, 5), "float32"), ((4, 3), "float32"), ((2, 3, 4), "float16"),
                                              ((2, 3, 4), "float64")])  # fmt: skip
def test_batch_normalization_of_statistics_of_a_run(shape: tuple[int, ...], dtype: str) -> None:
    x = rng.standard_normal(shape).astype(dtype)
    statistics = np.float32 if dtype == "float16" else x.dtype
    channels = [rng.uniform(0.5, 2, 3).astype(statistics) for _ in range(4)]
    model = one_node("BatchNormalization", dict(zip("xsbmv", [x, *channels], strict=True)), epsilon=0.01)
    got = computed(model, x, *channels)
    scale, bias, mean, variance = (c.astype(np.float64).reshape(-1, *[1] * (len(shape) - 2)) for c in channels)
    expected = scale * (x.astype(np.float64) - mean) / np.sqrt(variance + 0.01) + bias
    assert got.dtype == x.dtype
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "attributes"), [((3, 5), {}), ((5, 3), {"k": 2}), ((4, 4), {"k": -3, "dtype": 9}),
                                                   ((2, 3), {"k": 7, "dtype": 10})])  # fmt: skip
def test_eye_like(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    inputs = {"x": np.zeros(shape, np.int8)}
    model = one_node("EyeLike", inputs, **attributes)
    made = expanded(model)
    assert "EyeLike" not in operators(made)
    for a, b in zip(evaluate(made, inputs), evaluate(model, inputs), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize(("order", "dtype"), [(1, "float32"), (2, "float16"), (3, "float32"), (5, "float64")])
def test_global_lp_pool(order: int, dtype: str) -> None:
    x = rng.standard_normal((2, 3, 4, 5)).astype(dtype)
    got = computed(one_node("GlobalLpPool", {"x": x}, p=order), x)
    expected = (np.abs(x.astype(np.float64)) ** order).sum((2, 3), keepdims=True) ** (1 / order)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=1e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize(
    ("extents", "pads", "sizes"), [((4, 6), [0, 0, 0, 0], None), ((4, 6), [0, 0, 0, 0], (5, 8)), ((3, 5), [0, 1, 1, 0], None)]
)
def test_max_unpool(extents: tuple[int, int], pads: list[int], sizes: tuple[int, int] | None) -> None:
    x = rng.standard_normal((2, 1, 2, 3)).astype(np.float32)
    places = rng.permutation(2 * extents[0] * extents[1])[: x.size].reshape(x.shape)
    whole = np.zeros((2, 1, *extents), np.float32)
    whole.reshape(-1)[places.ravel()] = x.ravel()
    inputs: dict[str, np.ndarray] = {"x": x, "i": places}
    expected = whole
    if sizes is not None:
        inputs["c_s"] = np.array([2, 1, *sizes])
        expected = np.zeros((2, 1, *sizes), np.float32)
        expected[:, :, : extents[0], : extents[1]] = whole
    model = one_node("MaxUnpool", inputs, kernel_shape=[2, 2], strides=[2, 2], pads=pads)
    np.testing.assert_array_equal(computed(model, x, places), expected)


def test_a_large_eye_is_left_alone() -> None:
    """Its rows and columns would be constants; and so is a deformable convolution of four dimensions."""
    assert "EyeLike" in operators(expanded(one_node("EyeLike", {"x": np.zeros((65000, 1000), np.int8)})))
    x, weights = np.zeros((1, 1, 2, 2, 2, 2), np.float32), np.zeros((1, 1, 1, 1, 1, 1), np.float32)
    model = one_node("DeformConv", {"x": x, "w": weights, "o": np.zeros((1, 4, 2, 2, 2, 2), np.float32)})
    assert "DeformConv" in operators(expanded(model))
