"""Transposed convolutions on the matrix unit of either maker, simulated: phases, edges, types; and faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.convolution import transposed_convolution_mma_gpu
from prefuse.kernels.convolution.transposed_phases import PackPhases
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.microkernels import gpu_window_tiles
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.target import Target
from tvm import tirx

from ..kernels.convolution.channels_last_cases import transposed
from ..kernels.harness import Case, build
from ..sample import dealt
from .simulator import CUDA, RDNA, ROCM, check

TARGETS = (CUDA, ROCM)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_product, "_SHAPES", ((16, 64, 16, 16),))
    monkeypatch.setattr(gpu_product, "_WAVEFRONT_SHAPES", ((16, 64, 16, 16),))


def case(*sizes: Any, **how: Any) -> Case:
    error = 5e-5
    return replace(transposed(*sizes, **how), template="gpu_mma_transposed", rtol=error / 10, atol=error)


def phases() -> list[Case]:
    """Phases that read alike, and such that do not; signals, volumes, groups, dilations; 16-bit floats."""
    return [
        case((1, 64, 7, 6), 40, 2, 2),
        case((2, 8, 5, 6), 20, 4, 2, 1),
        case((1, 16, 5, 4), 9, 3, 2, 1, extra=1),
        case((1, 16, 6, 5), 18, 3),
        case((1, 8, 4, 5), 16, (3, 4), (3, 2), (0, 1), extra=(2, 1)),
        case((1, 8, 6, 7), 16, 3, 2, 2, (1, 3)),
        case((2, 32, 4, 5), 24, 2, 2, group=2),
        case((1, 16, 9), 12, 16, 8, 4),
        case((1, 8, 3, 4, 2), 16, 2, 2),
        case((1, 64, 5, 6), 32, 2, 2, narrow="xw"),
        case((1, 24, 5, 4), 16, 3, 2, 1, narrow="xw"),
    ]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_phases(target: Target, tmp_path: Path) -> None:
    """Each case on one maker's unit today, on the other's tomorrow."""
    made = phases()
    check(dealt(made, [one.label for one in made], target, TARGETS), tmp_path, target)


def no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_window_tiles._Windows, "_mask", lambda self, corner: tirx.const(0xFFFFFFFF, "uint32"))


def rows_and_columns_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = PackPhases.__call__
    monkeypatch.setattr(PackPhases, "__call__", lambda self, array: pack(self, np.ascontiguousarray(array.swapaxes(2, 3))))


@pytest.mark.parametrize("mutate", [no_padding, rows_and_columns_exchanged])
def test_faults_are_found(mutate: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check([case((1, 8, 5, 6), 16, 4, 2, 1)], tmp_path, ROCM)


def test_a_grid_for_phases_that_read_alike() -> None:
    """Kernels as long as their stride are one grid of all phases; one of 3 with stride 2 has four sets of taps."""
    for kernel, grids in ((2, 1), (3, 4)):
        built = build(case((1, 64, 16, 16), 64, kernel, 2, narrow="xw"), ROCM)
        assert len(built.function.launches) == grids


def test_what_has_another_kernel() -> None:
    for one, target, reason in (
        (case((1, 64, 7, 6), 40, 2, 2), RDNA, "multiplies no float32"),
        (case((1, 6, 7, 6), 40, 2, 2), ROCM, "6 channels do not lie in whole chunks"),
        (case((1, 64, 7, 6), 40, 2, 2, keep_first=("x",)), ROCM, "64 channels do not lie in whole chunks"),
        (case((1, 64, 7, 6), 40, 2, 2, is_constant=False), ROCM, "its weights are not constant"),
        (case((1, 8, 4, 4), 8, 1, 5), ROCM, "some phases of output positions are the bias alone"),
        (case((1, 8, 4, 4), 8, 16, 2, 7), ROCM, "more than 24 taps"),
    ):
        refused = transposed_convolution_mma_gpu.plan(one.group, target)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason
