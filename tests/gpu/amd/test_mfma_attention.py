"""Attention on AMD's matrix unit, simulated: sizes that divide nothing, masks, views, types; and faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefuse.kernels.attention import attention_mma_gpu
from prefuse.kernels.attention.attention_mma_block import AttentionBlock
from prefuse.kernels.microkernels.gpu_mfma import MfmaUnit
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.target import Target

from ...kernels.attention.attention_cases import attend
from ...kernels.harness import Case, build
from ...sample import dealt
from ..simulator import ROCM, SimulatedFaultError, check
from ..test_attention import of_halves, of_tiles, with_hidden_keys, with_scales
from .test_mfma_products import lost_wait, no_barrier, rows_not_swizzled, wrong_fragments

FAMILIES = (of_tiles, of_halves, with_scales, with_hidden_keys)
SHAPES = ((16, 1), (16, 2), (32, 1), (32, 4))  # queries of a wavefront, and wavefronts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cases", FAMILIES)
def test_attention(
    cases: Callable[[], list[Case]], shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case by one of the shapes today, by the next one tomorrow."""
    monkeypatch.setattr(attention_mma_gpu._Attention, "shape", shape)
    made = [replace(one, template="gpu_mma_attention") for one in cases()]
    check(dealt(made, [one.label for one in made], shape, SHAPES), tmp_path, ROCM)


def keys_of_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values a lane has eight neighbours along keys, and of scores two times four."""
    make = MfmaUnit.fragments
    monkeypatch.setattr(MfmaUnit, "fragments", lambda self, *rest, is_a, with_sums=False: make(self, *rest, is_a=is_a))


def maxima_of_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that have sums of the same row do not tell each other."""
    monkeypatch.setattr(MfmaUnit, "row_lanes", ())


def keys_over_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first keys are stored where queries lie before these have been read."""
    begin = AttentionBlock._load_queries

    def load(self: AttentionBlock, reader: Any, step: int) -> None:
        if step == 0:
            self._finish(self.base)
        begin(self, reader, step)

    monkeypatch.setattr(AttentionBlock, "_load_queries", load)


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_barrier, "with no barrier between|what nobody wrote"),
        (lost_wait, "a barrier that does not wait for accesses of LDS"),
        (keys_over_queries, "another thread"),
        (rows_not_swizzled, "Not equal to tolerance"),
        (wrong_fragments, "Not equal to tolerance"),
        (keys_of_another_order, "Not equal to tolerance"),
        (maxima_of_a_lane, "Not equal to tolerance"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_mma_gpu._Attention, "shape", (16, 2))
    mutate(monkeypatch)
    case = replace(attend((1, 1, 32, 130, 64, 32), "bfloat16"), template="gpu_mma_attention")
    with pytest.raises(AssertionError, match=fault) as found:
        check([case], tmp_path, ROCM)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


def test_deep_heads_fit_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128 in float32 fill all LDS that a block has; those of 16 bits leave room for another block."""
    monkeypatch.setattr(attention_mma_gpu._Attention, "shape", (32, 4))
    check(
        [replace(attend((1, 1, 130, 40, 128, 128), dtype), template="gpu_mma_attention") for dtype in ("float32", "float16")],
        tmp_path,
        ROCM,
    )


def test_blocks_for_every_compute_unit() -> None:
    """Many queries: four wavefronts of 32 in a block; few: one of 16."""
    for batch, queries, rows, warps in ((8, 512, 32, 4), (4, 512, 32, 2), (2, 512, 16, 2), (1, 128, 16, 1)):
        kernel = build(replace(attend((batch, 12, queries, 8, 8, 8)), template="gpu_mma_attention"), ROCM)
        (grid,) = kernel.function.launches
        assert (grid.blocks, grid.threads) == (batch * 12 * queries // (rows * warps), 64 * warps)


def test_it_needs_a_matrix_unit() -> None:
    refused = attention_mma_gpu.plan(attend((1, 2, 9, 11, 8, 8)).group, Target("rocm", "gfx1030"))
    assert isinstance(refused, Refusal)
    assert refused.reason == "rocm:gfx1030 has no v_mfma or v_wmma of bfloat16"
