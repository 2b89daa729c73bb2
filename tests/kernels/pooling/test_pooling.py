"""Pooling over one to three spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType

from ..harness import LEVELS, Case, check, check_in_turn, followed, operator, target_of

rng = np.random.default_rng(3)


def pool(kind: str, shape: tuple[int, ...], dtype: str = "float32", **attributes: Any) -> Case:
    data = (rng.standard_normal(shape) * 20).astype(dtype)
    unit = {"float16": 2e-2, "float32": 1e-5}.get(dtype, 1e-13)
    return operator(f"{kind}Pool", data, rtol=unit, atol=unit, template="pooling", **attributes)


def plane(kind: str) -> list[Case]:
    return [
        pool(kind, (2, 3, 13, 37), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        pool(kind, (1, 5, 40, 40), kernel_shape=(2, 2), strides=(2, 2)),
        pool(kind, (2, 2, 9, 50), kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
        pool(kind, (1, 2, 11, 23), kernel_shape=(3, 2), strides=(3, 5), pads=(0, 1, 2, 1)),
        pool(kind, (1, 2, 20, 71), kernel_shape=(2, 3), strides=(1, 3)),
        pool(kind, (1, 3, 7, 7), kernel_shape=(7, 7)),
        pool(kind, (1, 1, 6, 5), kernel_shape=(2, 2), strides=(2, 2), ceil_mode=1),
        pool(kind, (1, 2, 10, 19), kernel_shape=(3, 3), strides=(2, 2), auto_pad="SAME_UPPER"),
        same_lower(kind),
        *(between_windows(kind, mode) for mode in ("SAME_UPPER", "SAME_LOWER")),
        pool(kind, (1, 2, 12, 33), kernel_shape=(3, 3), dilations=(2, 3)),
    ]


def same_lower(kind: str) -> Case:
    """onnx.reference pads MaxPool on the wrong side here, so the expected values come from explicit padding."""
    padded = pool(kind, (1, 2, 10, 18), kernel_shape=(2, 3), strides=(1, 2), pads=(1, 1, 0, 0))
    attributes: dict[str, Any] = {"kernel_shape": (2, 3), "strides": (1, 2), "auto_pad": "SAME_LOWER"}
    return operator(f"{kind}Pool", padded.arrays["x0"], expected=padded.expected, rtol=1e-5, atol=1e-5, **attributes)


def between_windows(kind: str, mode: str) -> Case:
    """Strides leap over elements, so that nothing is padded; ONNX Runtime and onnx.reference would cut elements off."""
    plain = pool(kind, (1, 2, 6, 40), kernel_shape=(1, 2), strides=(3, 4))
    attributes: dict[str, Any] = {"kernel_shape": (1, 2), "strides": (3, 4), "auto_pad": mode}
    return operator(f"{kind}Pool", plain.arrays["x0"], expected=plain.expected, rtol=1e-5, atol=1e-5, **attributes)


def maximum() -> list[Case]:
    spoilt = rng.standard_normal((1, 2, 8, 40)).astype(np.float32)
    spoilt[0, 0, 3, 5] = np.nan
    spoilt[0, 1] = -np.inf
    windows = np.lib.stride_tricks.sliding_window_view(spoilt, (2, 2), (2, 3)).max((-1, -2))
    nan = operator("MaxPool", spoilt, kernel_shape=(2, 2), expected=[windows])
    typed = [
        pool("Max", (1, 2, 9, 70), dtype, kernel_shape=(3, 3), strides=(2, 2))
        for dtype in ("int8", "uint8", "float64", "float16")
    ]
    return [*plane("Max"), nan, *typed]


def average() -> list[Case]:
    padded: dict[str, Any] = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1), "count_include_pad": 1}
    return [*plane("Average"), pool("Average", (1, 2, 9, 31), **padded), pool("Average", (1, 2, 8, 30), ceil_mode=1, **padded),
            pool("Average", (1, 2, 8, 30), "float16", **padded)]  # fmt: skip


def norms() -> list[Case]:
    return [pool("Lp", (1, 3, 8, 20), kernel_shape=(2, 2), strides=(2, 2), p=p) for p in (1, 2, 3)]


def ranks() -> list[Case]:
    cases = []
    for kind in ("Max", "Average"):
        cases += [
            pool(kind, (2, 3, 2050), kernel_shape=(3,), strides=(2,), pads=(1, 1)),
            pool(kind, (1, 2, 1500), kernel_shape=(4,)),
        ]
        cases += [pool(kind, (1, 2, 5, 6, 19), kernel_shape=(2, 3, 3), strides=(1, 2, 2), pads=(0, 1, 1, 1, 0, 1))]
    return cases


def long_windows() -> list[Case]:
    """Windows that are combined in loops: along columns, with and without shuffles, and along rows, some in the padding."""
    cases = []
    for kind in ("Max", "Average"):
        cases += [
            pool(kind, (1, 2, 500), kernel_shape=(300,), strides=(3,), pads=(150, 149)),
            pool(kind, (1, 2, 800), kernel_shape=(270,), strides=(70,), dilations=(2,)),
            pool(kind, (1, 1, 300, 9), kernel_shape=(280, 1)),
        ]
    for length in (65, 257):
        rows: dict[str, Any] = {"kernel_shape": (length, 2), "pads": (3, 0, 30, 1)}
        average = pool("Average", (1, 1, length + 5, 21), **rows)
        data = average.arrays["x0"]  # of whose greatest elements onnx.reference finds none
        padded = np.pad(data, ((0, 0), (0, 0), (3, 30), (0, 1)), constant_values=-np.inf)
        greatest = np.lib.stride_tricks.sliding_window_view(padded, (length, 2), (2, 3)).max((-1, -2))
        cases += [average, operator("MaxPool", data, expected=[greatest], **rows)]
    return cases


ALL = (maximum, average, norms, ranks, long_windows)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_alone(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["Max", "Average"])
def test_with_followers(kind: str, level: str) -> None:
    check_in_turn([followed(case) for case in plane(kind)], level)


def test_far_strides_take_no_more_stack_than_near_ones() -> None:
    check([pool("Max", (1, 1, 1 << 22), kernel_shape=(2,), strides=(4096,))], target_of("avx2"))  # in one row: 16 MiB


def test_what_strides_leap_over_takes_no_stack() -> None:
    data = rng.standard_normal((1, 1, 500_300)).astype(np.float32)
    expected = [np.stack([data[..., :300].max(-1), data[..., 500_000:].max(-1)], -1)]
    check([operator("MaxPool", data, kernel_shape=(300,), strides=(500_000,), expected=expected)], target_of("avx2"))


def test_long_windows_are_compiled_at_once() -> None:
    """As one expression, 2048 elements took 16 seconds, 8192 minutes."""
    case = pool("Average", (1, 1, 8192), kernel_shape=(8000,), strides=(96,))
    start = process_time()
    check([case], target_of("avx2"))
    assert process_time() - start < 10


def test_long_windows_are_counted_at_once() -> None:
    """Element by element of all windows it took minutes."""
    group = pool("Average", (1, 1, 1000), kernel_shape=(1024,), pads=(512, 511)).group
    kind = TensorType((1, 1, 1_000_000), "float32")
    large = replace(group, types=dict.fromkeys(group.types, kind))
    start = process_time()
    assert isinstance(build_kernel(large, target_of("avx2")), BuiltKernel)
    assert process_time() - start < 20
