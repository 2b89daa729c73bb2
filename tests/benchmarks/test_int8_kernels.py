"""The peaks that kernels are held against, and which turns count."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.benchmarks import int8_kernels
from prefuse.benchmarks.int8_kernels import Precision, Problem, measure, peak_program
from prefuse.compiler.lowering.roofline import TILE_ROUNDS, TILE_SUMS
from prefuse.runtime.target import AMX_EMULATED

from ..kernels.harness import target_of


@pytest.mark.parametrize(("precision", "depth"), [("int8", 64), ("bfloat16", 32)])
def test_the_peak_of_tiles(precision: Precision, depth: int) -> None:
    """Every product that is counted is made: a word of one 1 (bytes), or of 1.0 and 1.0 (bfloat16), by itself, 16 times."""
    peak, macs = peak_program(precision, target_of(AMX_EMULATED, threads=1))
    assert macs == TILE_SUMS * TILE_ROUNDS * 16 * 16 * depth
    word = 1 if precision == "int8" else 0x3F803F80
    sums = np.asarray(peak(np.full(peak.plan.inputs[0].type.shape, word, np.int32)))
    assert sums[:256].tolist() == [TILE_ROUNDS * 16 * (1 if precision == "int8" else 2)] * 256


def test_only_turns_at_the_best_peak_count(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, times = iter([10.0, 10.0, 10.0, 25.0, 10.5, 10.5]), iter([100.0, 900.0, 110.0])
    monkeypatch.setattr(int8_kernels, "_peak_us", lambda peak: next(peaks))
    monkeypatch.setattr(int8_kernels.Bench, "time_us", lambda bench: next(times))
    (found,) = measure([Problem(16, 64, 16)], target_of("avx2", threads=1), "int8", turns=3)
    assert found.time_us == 105.0
    assert found.quiet == pytest.approx(2 / 3)


def test_padding_is_no_work() -> None:
    """3x3 of 14x14: 40 taps along a side are inside, of 42."""
    assert Problem(14, 2, 3, 3).macs == 2 * 3 * 40**2
    assert Problem(14, 2, 3, 3).padded_macs == 2 * 3 * 42**2
    assert Problem(14, 2, 3, 1).macs == Problem(14, 2, 3, 1).padded_macs == 2 * 3 * 14**2
    assert Problem(5, 2, 3).macs == Problem(5, 2, 3).padded_macs == 30
