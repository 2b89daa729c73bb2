"""Scans by blocks of threads on the simulators: vectors, single elements, several turns, both directions, strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.reduction import scan_gpu
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.target import Target

from ...kernels.harness import Case
from ...kernels.reduction.test_scan import scan
from ...sample import dealt
from ..simulator import CUDA, RDNA, ROCM, check

rng = np.random.default_rng(17)


def by_blocks(case: Case) -> Case:
    return replace(case, group=replace(case.group, configuration={TEMPLATE: "gpu_scan"}), template="gpu_scan")


def cases() -> Iterator[Case]:
    for length, exclusive, reverse in product((64, 77, 1000, 4100), (0, 1), (0, 1)):
        x = rng.integers(0, 9, (2, length)).astype(np.float32)  # whose sums are exact
        yield scan("CumSum", x, 1, exclusive, reverse)
    for dtype, rtol in (("float64", 1e-13), ("float16", 1e-3), (ml_dtypes.bfloat16, 8e-3), ("float32", 1e-5)):
        yield scan("CumSum", rng.uniform(0.5, 1.5, (3, 200)).astype(dtype), -1, reverse=1, rtol=rtol)
    for number, dtype in enumerate(("int32", "int64", "uint32", "uint64")):
        x = rng.integers(1, 1000, (2, 120, 3)).astype(dtype)  # products wrap
        yield scan("CumProd", x, 1, exclusive=number % 2, reverse=number // 2)
        yield scan("CumSum", x[:, :, 0], -1, exclusive=number // 2, reverse=number % 2)
    yield scan("CumSum", rng.integers(0, 9, (300, 5)).astype(np.float32), 0, exclusive=1)
    special = rng.integers(0, 9, 300).astype(np.float32)
    special[[100, 200]] = np.inf, -np.inf
    with np.errstate(all="ignore"):
        yield scan("CumSum", special, 0)


@pytest.mark.parametrize("target", [CUDA, ROCM, RDNA], ids=str)
def test_scans(target: Target, tmp_path: Path) -> None:
    made = [by_blocks(case) for case in cases()]
    check(dealt(made, [f"{case.label} {i}" for i, case in enumerate(made)], target, [CUDA, ROCM, RDNA]), tmp_path, target)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (scan("CumProd", np.ones((2, 100), np.float32), 1), "products of floats are multiplied in order"),
        (scan("CumSum", np.ones((2, 20), np.float32), 1), "a thread for each line does better"),
        (scan("CumSum", np.ones((100, 1 << 14), np.float32), 0), "a thread for each line does better"),
        (scan("CumSum", np.ones((0, 100), np.float32), 1), "a thread for each line does better"),
    ],
)
def test_what_threads_scan_alone(case: Case, reason: str) -> None:
    refused = scan_gpu.build(case.group, CUDA)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason
