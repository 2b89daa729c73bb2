"""Operators on images: convolutions, pools, and what samples them."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np

from ..draft import DOUBLE, FLOAT, INT8, UINT8, Draft


class _Window(TypedDict, total=False):
    auto_pad: str | None
    pads: list[int] | None
    strides: list[int] | None
    dilations: list[int] | None


def _window(b: Draft, kernel: list[int], *, dilated: bool = True) -> _Window:
    """Attributes that a convolution or a pool has; pads are less than the window, as runtimes want."""
    rank = len(kernel)
    auto = b.pick([None, None, None, "SAME_UPPER", "VALID", "NOTSET"])
    plain = auto in (None, "NOTSET")
    limit = min(kernel) if auto == "SAME_UPPER" else 3  # references take negative padding where strides leap, in pools only
    return {
        "auto_pad": auto,
        "pads": [b.integer(0, size - 1) for size in kernel * 2] if plain and b.chance(0.6) else None,
        "strides": [b.integer(1, limit) for _ in range(rank)] if b.chance(0.6) else None,
        "dilations": [b.integer(1, 2) for _ in range(rank)] if dilated and auto != "SAME_UPPER" and b.chance(0.4) else None,
    }


def _ceil_mode(b: Draft) -> int | None:
    """Only where ONNX's inference, which declares the outputs, does not count a window beyond the input."""
    return b.pick([None, 0, 1]) if b.since(22) else None


def _sizes(b: Draft, rank: int) -> tuple[list[int], tuple[int, ...]]:
    """A window, and an image that holds it when it is dilated by two."""
    kernel = [b.pick([1, 2, 3, 3]) for _ in range(rank)]
    return kernel, tuple(2 * size + b.integer(0, 5) for size in kernel)


def conv(b: Draft) -> None:
    rank, groups = b.pick([1, 2, 2, 2, 3]), b.pick([1, 1, 2, 3])
    kernel, image = _sizes(b, rank)
    inside, outside = groups * b.integer(1, 3), groups * b.integer(1, 5)
    if b.chance(0.2):
        groups = inside = outside = b.integer(2, 9)
    x = b.fresh(FLOAT, (b.integer(0, 3) if b.chance(0.2) else 1, inside, *image), 0.05)
    weight = b.finite(FLOAT, (outside, inside // groups, *kernel), 0.8)
    bias = [b.fresh(FLOAT, (outside,), 0.8)] if b.chance(0.5) else []
    (y,) = b.op("Conv", x, weight, *bias, group=groups, kernel_shape=kernel if b.chance(0.6) else None, **_window(b, kernel))
    if b.chance(0.4):
        b.op(b.pick(["Relu", "Sigmoid", "HardSwish"]), y)


def conv_transpose(b: Draft) -> None:
    rank, groups = b.pick([1, 2, 2, 3]), b.pick([1, 1, 2])
    kernel, image = _sizes(b, rank)
    inside, outside = groups * b.integer(1, 3), b.integer(1, 4)
    window = _window(b, kernel)
    strides = window["strides"] or [1] * rank
    # With both, ONNX's text and its inference give different sizes.
    has_extra = window["auto_pad"] != "SAME_UPPER" and b.chance(0.3)
    extra = [b.integer(0, stride - 1) for stride in strides] if has_extra else None
    x = b.fresh(FLOAT, (1, inside, *image), 0.05)
    bias = [b.fresh(FLOAT, (groups * outside,), 0.8)] if b.chance(0.5) else []
    b.op(
        "ConvTranspose", x, b.finite(FLOAT, (inside, outside, *kernel), 0.8), *bias, group=groups, output_padding=extra, **window
    )


def conv_integer(b: Draft) -> None:
    kernel, image = _sizes(b, 2)
    x = b.fresh(UINT8, (1, 2, *image), 0.0)
    weight = b.fresh(b.pick([UINT8, INT8]), (3, 2, *kernel), 0.8)
    zeros = [b.value(np.array(b.integer(0, 5), b.types[name][0]), 0.8) for name in (x, weight)]
    if b.chance(0.5):
        b.op("ConvInteger", x, weight, *zeros[: b.integer(0, 2)], **_window(b, kernel))
        return
    scales = [b.value(np.array(b.rng.random() * 0.2 + 0.05, np.float32), 0.9) for _ in range(3)]
    to = b.value(np.array(4, np.uint8), 0.9)
    bias = [b.value(b.rng.integers(-50, 50, 3).astype(np.int32), 0.9)] if b.chance(0.5) else []
    b.op("QLinearConv", x, scales[0], zeros[0], weight, scales[1], zeros[1], scales[2], to, *bias, **_window(b, kernel))


def max_pool(b: Draft) -> None:
    kernel, image = _sizes(b, b.pick([1, 2, 2, 3]))
    dtype = b.dtype("MaxPool")
    window = _window(b, kernel)
    x = b.finite(dtype, (b.integer(1, 2), b.integer(1, 3), *image), 0.1)
    b.op("MaxPool", x, kernel_shape=kernel, ceil_mode=_ceil_mode(b), outputs=b.pick([1, 1, 2]), **window)


def average_pool(b: Draft) -> None:
    kernel, image = _sizes(b, b.pick([1, 2, 2, 3]))
    x = b.fresh(FLOAT, (b.integer(1, 2), b.integer(1, 3), *image), 0.1)
    window = _window(b, kernel, dilated=b.since(19))
    b.op("AveragePool", x, kernel_shape=kernel, ceil_mode=_ceil_mode(b), count_include_pad=b.integer(0, 1), **window)


def lp_pool(b: Draft) -> None:
    kernel, image = _sizes(b, b.pick([1, 2]))
    x = b.finite(FLOAT, (1, b.integer(1, 3), *image), 0.1)
    b.op("LpPool", x, kernel_shape=kernel, p=b.integer(1, 3), **_window(b, kernel, dilated=False))


def global_pool(b: Draft) -> None:
    op_type = b.pick(["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
    b.op(op_type, b.finite(FLOAT, b.shape(3, 5, nonempty=True), 0.1))


def resize(b: Draft) -> None:
    rank = b.pick([1, 2, 2])
    shape = (b.integer(1, 2), b.integer(1, 3), *(b.integer(1, 6) for _ in range(rank)))
    dtype = b.pick([FLOAT, FLOAT, FLOAT, UINT8, DOUBLE])
    mode = b.pick(["nearest", "linear", "cubic"]) if dtype == FLOAT and rank == 2 else b.pick(["nearest", "linear"])
    places = b.pick(["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
    nearest = b.pick(["round_prefer_floor", "floor", "ceil", "round_prefer_ceil"]) if mode == "nearest" else None
    is_rounded = dtype == UINT8 and mode != "nearest"  # weights of few bits, so that a half is one to everyone
    if is_rounded:
        places = b.pick(["half_pixel", "asymmetric"])
    if is_rounded or b.chance(0.5):
        scales: list[float] = [0.5, 1, 2, 4] if is_rounded else [0.5, 1, 1.5, 2, 3]
        how = [b.value(np.array([1, 1, *(b.pick(scales) for _ in range(rank))], np.float32), 1.0)]
    else:
        how = ["", b.ints(*shape[:2], *(b.integer(1, 9) for _ in range(rank)))]
    antialias = b.integer(0, 1) if b.since(18) and mode != "nearest" and not is_rounded and b.chance(0.3) else None
    attributes: dict[str, Any] = {"coordinate_transformation_mode": places, "nearest_mode": nearest, "antialias": antialias}
    b.op("Resize", b.finite(dtype, shape, 0.05), "", *how, mode=mode, **attributes)


def grid_sample(b: Draft) -> None:
    n, c = b.integer(1, 2), b.integer(1, 3)
    x = b.finite(FLOAT, (n, c, b.integer(1, 6), b.integer(1, 6)), 0.05)
    grid = b.value(b.rng.uniform(-1.3, 1.3, (n, b.integer(1, 5), b.integer(1, 5), 2)).astype(np.float32))
    names = ["linear", "nearest", "cubic"] if b.since(20) else ["bilinear", "nearest", "bicubic"]
    padding = b.pick(["zeros", "border", "reflection"])
    b.op("GridSample", x, grid, mode=b.pick(names), padding_mode=padding, align_corners=b.integer(0, 1))


def roi_align(b: Draft) -> None:
    n = b.integer(1, 2)
    x = b.finite(FLOAT, (n, b.integer(1, 3), b.integer(2, 9), b.integer(2, 9)), 0.0)
    count = b.integer(1, 4)
    corners = b.rng.random((count, 2)) * 4
    boxes = np.concatenate([corners, corners + b.rng.random((count, 2)) * 4 + 0.5], -1).astype(np.float32)
    attributes: dict[str, Any] = {
        "output_height": b.integer(1, 3),
        "output_width": b.integer(1, 3),
        "sampling_ratio": b.integer(1, 2),
    }
    places = b.pick(["half_pixel", "output_half_pixel"]) if b.since(16) else None
    inputs = [x, b.value(boxes), b.value(b.rng.integers(0, n, count))]
    b.op("RoiAlign", *inputs, mode=b.pick(["avg", "max"]), coordinate_transformation_mode=places, **attributes)


def columns(b: Draft) -> None:
    kernel = [b.integer(1, 2), b.integer(1, 3)]
    image = [size + b.integer(0, 3) for size in kernel]
    places = (image[0] - kernel[0] + 1) * (image[1] - kernel[1] + 1)
    x = b.fresh(FLOAT, (b.integer(1, 2), b.integer(1, 3) * kernel[0] * kernel[1], places), 0.05)
    b.op("Col2Im", x, b.ints(*image), b.ints(*kernel))


RECIPES = [
    conv, conv, conv, conv_transpose, conv_transpose, conv_integer, max_pool, max_pool, average_pool, average_pool, lp_pool,
    global_pool, resize, resize, resize, grid_sample, roi_align, columns,
]  # fmt: skip
