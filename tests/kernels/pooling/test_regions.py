"""RoiAlign against onnx.reference, MaxRoiPool against its definition and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil, floor
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ..harness import LEVELS, Case, check, check_in_turn, followed, operator, run, target_of

rng = np.random.default_rng(11)


def regions(count: int, reach: float) -> np.ndarray:
    """Corners within [-reach/4, reach] of regions that have an extent, but for the last."""
    first = rng.uniform(-reach / 4, reach / 2, (count, 2))
    boxes = np.concatenate([first, first + rng.uniform(0.3, reach / 2, (count, 2))], 1).astype(np.float32)
    boxes[-1, 2:] = boxes[-1, :2]
    return boxes


def align(shape: tuple[int, ...], count: int, dtype: str = "float32", **attributes: Any) -> Case:
    x = rng.standard_normal(shape).astype(dtype)
    batch = rng.integers(0, shape[0], count)
    sizes: dict[str, Any] = {"output_height": 3, "output_width": 2, "spatial_scale": 0.5, **attributes}
    boxes = regions(count, 2.0 * shape[-1]).astype(dtype)
    unit = {"float16": 2e-2, "float64": 1e-6}.get(dtype, 1e-4)
    return operator("RoiAlign", x, boxes, batch, variables=(1, 2), rtol=unit, atol=unit, template="regions", **sizes)


def aligned() -> list[Case]:
    cases = [
        align((2, 3, 7, 9), 4, mode=mode, coordinate_transformation_mode=how, sampling_ratio=ratio)
        for mode, how, ratio in product(("avg", "max"), ("half_pixel", "output_half_pixel"), (0, 2))
    ]
    return [
        *cases,
        align((1, 37, 6, 6), 2),
        align((1, 2, 1, 1), 3),
        align((1, 2, 5, 5), 3, "float64"),
        align((1, 2, 5, 5), 3, "float16", sampling_ratio=2),
        operator(
            "RoiAlign",
            np.zeros((1, 2, 4, 4), np.float32),
            np.zeros((0, 4), np.float32),
            np.zeros(0, np.int64),
            expected=[np.zeros((0, 2, 3, 3), np.float32)],
            output_height=3,
            output_width=3,
        ),
    ]


def channels_last() -> list[Case]:
    """Many samples of many channels, which are laid out channels-last; and, last, too few samples to pay for it."""
    cases = [
        align((2, 37, 5, 7), 4, dtype, mode=mode) for dtype, mode in product(("float16", "float32", "float64"), ("avg", "max"))
    ]
    return [*cases, align((1, 1030, 3, 6), 2, sampling_ratio=2), align((1, 37, 20, 20), 1)]


def max_pool(x: np.ndarray, boxes: np.ndarray, shape: tuple[int, int], scale: float) -> np.ndarray:
    """Fast R-CNN's pooling, with float32 borders as in its authors' code."""
    out = np.zeros((len(boxes), x.shape[1], *shape), x.dtype)
    one = np.float32(1)
    for number, (batch, *corners) in enumerate(boxes):
        left, top, right, bottom = (floor(np.float32(corner) * np.float32(scale) + np.float32(0.5)) for corner in corners)
        sides = []
        for first, last, count, extent in ((top, bottom, shape[0], x.shape[2]), (left, right, shape[1], x.shape[3])):
            size = np.float32(max(last - first + 1, 1)) / np.float32(count)
            begins = [min(max(floor(np.float32(i) * size) + first, 0), extent) for i in range(count)]
            ends = [min(max(ceil((np.float32(i) + one) * size) + first, 0), extent) for i in range(count)]
            sides.append(list(zip(begins, ends, strict=True)))
        for (i, (y0, y1)), (j, (x0, x1)) in product(enumerate(sides[0]), enumerate(sides[1])):
            if y1 > y0 and x1 > x0:
                out[number, :, i, j] = x[int(batch), :, y0:y1, x0:x1].max((1, 2))
    return out


def pooled() -> list[Case]:
    cases = []
    sizes = (
        ((2, 3, 7, 9), (2, 3), 0.5),
        ((1, 19, 6, 6), (4, 1), 1.0),
        ((1, 1, 1, 5), (3, 3), 0.25),
        ((2, 530, 5, 6), (2, 2), 1.0),
    )
    for shape, size, scale in sizes:
        x = rng.standard_normal(shape).astype(np.float32)
        batch = rng.integers(0, shape[0], (5, 1)).astype(np.float32)
        boxes = np.concatenate([batch, regions(5, 10.0 / scale)], 1)
        expected = [max_pool(x, boxes, size, scale)]
        cases.append(
            operator(
                "MaxRoiPool",
                x,
                boxes,
                variables=(1,),
                expected=expected,
                template="regions",
                pooled_shape=size,
                spatial_scale=scale,
            )
        )
    return cases


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [aligned, channels_last, pooled], ids=lambda make: make.__name__)
def test_regions(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


def test_followers() -> None:
    check([followed(case) for case in (*aligned()[:2], *channels_last()[2:4], pooled()[0])], target_of("avx2"))


def test_threads_and_runs_are_bitwise_the_same() -> None:
    x, boxes, batch = rng.standard_normal((2, 40, 19, 21)).astype(np.float32), regions(60, 40.0), rng.integers(0, 2, 60)
    sizes: dict[str, Any] = {"output_height": 5, "output_width": 7, "spatial_scale": 0.5}
    one, other = (operator("RoiAlign", x, boxes, batch, variables=(1, 2), **sizes) for _ in range(2))
    run([one], target_of("avx2"))
    run([other], target_of("avx2", threads=2))
    assert one.got[0].tobytes() == other.got[0].tobytes()


def test_max_roi_pool_is_what_onnx_runtime_computes() -> None:
    (case, *_) = pooled()
    (op,) = case.group.ops
    node = onnx.helper.make_node("MaxRoiPool", ["x0", "x1"], ["y0"], **op.attributes)
    ports = [onnx.helper.make_tensor_value_info(name, 1, array.shape) for name, array in case.arrays.items()]
    out = onnx.helper.make_tensor_value_info("y0", 1, case.expected[0].shape)
    graph = onnx.helper.make_graph([node], "one", ports, [out])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    np.testing.assert_array_equal(session.run(None, dict(case.arrays))[0], case.expected[0])


def test_corners_and_images_out_of_range_read_the_operand_alone() -> None:
    """And end: a region of a billion pixels has samples without number, of which few lie near the image."""
    x = rng.uniform(1, 2, (1, 2, 4, 4)).astype(np.float32)
    boxes = np.array(
        [[0, 0, 1e9, 1e9], [-1e9, -1e9, 1e9, 1e9], [np.nan] * 4, [0, 0, np.inf, 3], [-np.inf, 0, 2, 3], [3e38, 0, -3e38, 9]],
        np.float32,
    )
    images = np.array([0, 0, 0, 7, -3, 2**40])
    expected = [np.zeros((6, 2, 2, 2), np.float32)]
    cases = [
        operator("RoiAlign", x, boxes, images, variables=(1, 2), expected=expected, output_height=2, output_width=2, mode=mode)
        for mode in ("avg", "max")
    ]
    with_images = np.concatenate([images[:, None].astype(np.float32), boxes], 1)
    cases.append(operator("MaxRoiPool", x, with_images, variables=(1,), expected=expected, pooled_shape=(2, 2)))
    run(cases, target_of("avx2"))
    for case in cases:
        finite = case.got[0][np.isfinite(case.got[0])]
        assert (finite >= 0).all()
        assert (finite <= 2).all()
