"""Sums of thousands of products are made of blocks: in one chain their error would grow with their length."""

from __future__ import annotations

import pytest
from prefuse.compiler.oracle import relative_error

from .channels_last_cases import convolution
from .harness import Case, run, target_of
from .test_matmul import product


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (product((3, 9216), (9216, 40), followers=False), 1e-6),  # 1.8e-6 in one chain
        (convolution((1, 512, 6, 6), 32, 3, 1, 1), 6e-7),  # 1.1e-6 in one chain
    ],
    ids=["product", "convolution"],
)
def test_errors(case: Case, bound: float) -> None:
    run([case], target_of("avx2"))
    assert relative_error(case.got[0], case.expected[0]) < bound
