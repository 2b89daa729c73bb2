"""TopK by blocks of threads on the simulators, against a stable sort: ties, NaN, infinities, strides, whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.sorting import topk_gpu
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.target import Target

from ...kernels.harness import Case
from ...kernels.sorting.test_topk import topk
from ...sample import dealt
from ..simulator import CUDA, RDNA, ROCM, SimulatedFaultError, check

rng = np.random.default_rng(18)


def by_blocks(case: Case) -> Case:
    return replace(case, group=replace(case.group, configuration={TEMPLATE: "gpu_topk"}), template="gpu_topk")


def cases() -> Iterator[Case]:
    for length, k in ((64, 1), (77, 76), (100, 100), (513, 8), (1000, 300), (2100, 5)):
        x = rng.standard_normal((2, length)).astype(np.float32)
        yield topk(np.concatenate([x, np.round(x), np.zeros_like(x[:1]), np.full_like(x[:1], np.nan)]), k)
        yield topk(np.where(x > 0.5, np.inf, x), k, largest=0)
    for number, dtype in enumerate(("int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", ml_dtypes.bfloat16)):
        x = rng.integers(0, 90, (2, 130)).astype(dtype)  # many ties
        yield topk(x, 40, largest=number % 2)
    words = (topk(np.full((1, 90), x, np.int32), 40, largest=way) for x in (-(2**31), 2**31 - 1) for way in (0, 1))
    yield from words
    special = np.array([0.0, -0.0, np.inf, np.nan, -np.inf, 1e-45, -1e-45, np.nan, 0.0, -np.nan] * 9, np.float32)
    yield from (topk(special, k, largest=way) for k, way in ((4, 1), (89, 0)))
    yield topk(rng.standard_normal((2, 3, 70, 5)).astype(np.float32), 6, axis=2)
    yield topk(rng.standard_normal((90, 7)).astype(np.float32), 4, axis=0, largest=0, sorted=0)


@pytest.mark.parametrize("target", [CUDA, ROCM, RDNA], ids=str)
def test_topk(target: Target, tmp_path: Path) -> None:
    made = [by_blocks(case) for case in cases()]
    check(dealt(made, [f"{case.label} {i}" for i, case in enumerate(made)], target, [CUDA, ROCM, RDNA]), tmp_path, target)


def test_a_missing_barrier_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = by_blocks(topk(rng.standard_normal((1, 100)).astype(np.float32), 9))
    check([case], tmp_path)
    whole = GpuBuilder.barrier
    count = 0

    def one_less(builder: GpuBuilder) -> None:
        nonlocal count
        count += 1
        if count != left_out:
            whole(builder)

    for left_out in (1, 8, 9, 10, 17, 18, 19, 28):  # first and last of counting, scanning, gathering and sorting
        count = 0
        monkeypatch.setattr(GpuBuilder, "barrier", one_less)
        folder = tmp_path / str(left_out)
        folder.mkdir()
        with pytest.raises(SimulatedFaultError, match=r"barrier between|nobody"):
            check([case], folder)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (topk(np.ones((2, 100)), 5), "keys of 8 bytes"),
        (topk(np.ones((2, 5000), np.float32), 4097), "shared memory holds 4096 entries, not 4097"),
        (topk(np.ones((2, 20), np.float32), 5), "a thread for each row does better"),
        (topk(np.ones((2, 100), np.float32), 0), "a thread for each row does better"),
    ],
)
def test_what_threads_select_alone(case: Case, reason: str) -> None:
    refused = topk_gpu.build(case.group, CUDA)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


@pytest.mark.parametrize("length", [1 << 30, (1 << 30) + 1])
def test_a_key_and_a_place_are_an_entry(length: int) -> None:
    case = topk(np.ones((1, 100), np.float32), 5)
    types = {
        name: replace(kind, shape=(1, length) if name == case.group.inputs[0] else kind.shape)
        for name, kind in case.group.types.items()
    }
    built = topk_gpu.build(replace(case.group, types=types), CUDA)
    assert isinstance(built, Refusal) == (length > 1 << 30)
