"""Sums of thousands of products are made of blocks: in one chain their error would grow with their length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefuse.compiler.debugging.oracle import relative_error
from torch.nn import functional

from ..convolution.channels_last_cases import convolution
from ..harness import Case, operator, run, target_of
from ..symbolic import Dim, Domain, built_for, run_at, sized
from .test_matmul import product


def channels_first(*shapes: tuple[int, ...]) -> Case:
    """Of an image by weights."""
    generator = np.random.default_rng(5)
    x, w = (generator.standard_normal(shape, np.float32) for shape in shapes)
    exact = functional.conv2d(torch.from_numpy(x).double(), torch.from_numpy(w).double()).numpy()
    return operator("Conv", x, w, expected=[exact.astype(np.float32)], template="convolution")


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (product((3, 9216), (9216, 40), followers=False), 1e-6),  # 1.8e-6 in one chain
        (product((9, 1536), (1536, 40), followers=False), 6e-7),  # 6.6e-7 in one chain
        (product((9, 1999), (1999, 40), followers=False), 6e-7),  # 7.4e-7 in one chain
        (product((3, 12011), (12011, 40), followers=False), 6e-7),  # 2.0e-6 in one chain
        (convolution((1, 512, 6, 6), 32, 3, 1, 1), 6e-7),  # 1.1e-6 in one chain
        (convolution((1, 2048, 6, 6), 32, 1), 7e-7),  # 8.3e-7 in one chain
        (channels_first((1, 512, 7, 7), (8, 512, 3, 3)), 6e-7),  # 1.4e-6 in one chain
    ],
    ids=[
        "product",
        "odd product",
        "prime product",
        "long prime product",
        "channels-last",
        "channels-last of one position",
        "channels-first",
    ],
)
def test_errors(case: Case, bound: float) -> None:
    run([case], target_of("avx2"))
    assert relative_error(case.got[0], case.expected[0]) < bound


def test_lengths_that_a_call_decides() -> None:
    target, domain = target_of("avx2"), Domain((Dim("K", 1, 4096),), {"K": 100})
    points = {k: (product((9, k), (k, 40), constants=""), {"K": k}) for k in (1, 100, 511, 512, 1024, 1999, 4096)}
    kernel = built_for(sized(points[100][0], {"a": (9, "K"), "b": ("K", 40)}, domain), target)
    run_at(kernel, target, domain, points)
