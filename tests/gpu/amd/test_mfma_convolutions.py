"""Convolutions on AMD's matrix unit, simulated: every geometry, image and edge; faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.kernels.convolution import convolution_mma_gpu
from prefuse.kernels.convolution.channels_last_form import channels_last_form
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.microkernels.gpu_mfma import RegisterCopies
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.target import Target

from ...kernels.harness import Case
from ...sample import dealt, every
from ..simulator import ROCM, SimulatedFaultError, check
from ..test_mma_convolutions import (
    case,
    copied_first,
    depthwise,
    in_place,
    narrow,
    no_padding,
    of_other_forms,
    taps_of_another_order,
)
from .test_mfma_products import BY_16, BY_32, lost_wait, no_barrier, rows_not_swizzled, stage_freed_early, wrong_fragments

FAMILIES = (in_place, narrow, copied_first, of_other_forms)


@pytest.mark.parametrize("shape", [BY_16, BY_32], ids=str)
@pytest.mark.parametrize("cases", FAMILIES)
def test_convolutions(
    cases: Callable[[], list[Case]], shape: tuple[int, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case by one of the shapes today, by the other one tomorrow."""
    monkeypatch.setattr(gpu_product, "_WAVEFRONT_SHAPES", (shape,))
    made = cases()
    check(dealt(made, [one.label for one in made], shape, [BY_16, BY_32]), tmp_path, ROCM)


def test_depthwise(tmp_path: Path) -> None:
    check([*every(2, depthwise())], tmp_path, ROCM)


def neighbours_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are taken whole."""
    begin = RegisterCopies.begin
    monkeypatch.setattr(RegisterCopies, "begin", lambda self, *rest: begin(self, *rest[:5]))


def beside_nan() -> Case:
    """A stem with a column of NaN. What lies behind the numbers of a tap is multiplied by zeros, and 0 x NaN is NaN."""
    made = case((1, 3, 9, 12), 16, 3, 2, 1, narrow="xw")
    x, (y,) = made.arrays["x"].copy(), made.expected
    reached = np.arange(6) == 3
    x[:, :, 6] = np.nan
    return replace(made, arrays={**made.arrays, "x": x}, expected=[np.where(reached[:, None], np.nan, y)])


def test_what_lies_behind_a_tap_is_not_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_product, "_WAVEFRONT_SHAPES", (BY_16,))
    check([beside_nan()], tmp_path, ROCM)
    (folder := tmp_path / "mutant").mkdir()
    neighbours_as_numbers(monkeypatch)
    with pytest.raises(AssertionError, match="nan location mismatch"):
        check([beside_nan()], folder, ROCM)


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_padding, "Not equal to tolerance"),
        (taps_of_another_order, "Not equal to tolerance"),
        (no_barrier, "with no barrier between|what nobody wrote"),
        (lost_wait, "a barrier that does not wait for accesses of LDS"),
        (stage_freed_early, "another thread"),
        (rows_not_swizzled, "Not equal to tolerance"),
        (wrong_fragments, "Not equal to tolerance"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_product, "_WAVEFRONT_SHAPES", (BY_16,))
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault) as found:
        check([case((1, 64, 6, 6), 16, 3, 1, 1, narrow="xw")], tmp_path, ROCM)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


def test_chunks_of_float32() -> None:
    """AMD multiplies float32 itself: four channels fill 16 bytes; rounded to bfloat16 it takes eight."""
    for shape, kernel, expected in (((1, 4, 9, 9), 3, None), ((1, 6, 9, 9), 3, (False, 8)), ((1, 3, 9, 9), 3, (True, 4))):
        form = channels_last_form(case(shape, 16, kernel, 1, kernel // 2).group)
        assert not isinstance(form, Refusal)
        found = convolution_mma_gpu.MmaConvolution(form, ROCM)
        assert (found.kind, found.chunk, found.terms) == ("f32", 4, 1)
        assert (found.copied and (found.copied.joins, found.copied.pitch)) == expected
        assert found.windows.valid == found.windows.run


def test_it_needs_a_matrix_unit() -> None:
    refused = convolution_mma_gpu.plan(case((1, 8, 6, 6), 8, 3, 1, 1).group, Target("rocm", "gfx1030"))
    assert isinstance(refused, Refusal)
    assert refused.reason == "rocm:gfx1030 has no v_mfma or v_wmma of bfloat16"
