"""Each day another part of ONNX's conformance suite, and cases once wrong; `python -m tests.conformance` runs the whole."""

from __future__ import annotations

import os
from typing import TypeGuard

import pytest

from ..sample import every
from . import cases as judging
from .cases import SOUND, UNLIKE, Result, cases, run_cases

_STRIDE = 72  # of the suite's cases in order; ten seconds
_ONCE_WRONG = (
    "attention_3d_causal_bf16",
    "bitshift_left_int32_negative_shift",
    "bitshift_right_int32_shift_ge_width",
    "bitshift_right_int8_shift_ge_width",
    "cast_FLOAT16_to_FLOAT8E5M2",
    "cast_FLOAT8E4M3FNUZ_to_FLOAT16",
    "cast_FLOAT8E5M2_to_FLOAT16",
    "cast_FLOAT_to_FLOAT4E2M1",
    "cast_FLOAT_to_FLOAT8E5M2FNUZ",
    "cast_e8m0_FLOAT_to_FLOAT8E8M0",
    "cast_no_saturate_FLOAT16_to_FLOAT8E5M2",
    "causal_conv_with_state_silu_fp16",
    "clip_inbounds",
    "convtranspose_output_shape",
    "logsoftmax_axis_0_expanded",
    "mod_float32_mixed_sign_fmod_0",
    "mod_float_edge_cases_fmod_0_float16",
    "resize_downsample_sizes_cubic_antialias",
    "roialign_mode_max",
    "rotary_embedding_expanded",
    "rotary_embedding_no_position_ids_interleaved_expanded",
    "scan_sum",
    "sce_mean_3d_expanded",
    "sce_mean_no_weight_ii_4d_log_prob_expanded",
    "spacetodepth_crd_mode_example",
)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    """Of today's part, and of the cases once wrong those that tests of this run ask for."""
    asked = [item.callspec.params["name"] for item in request.session.items if item.path == request.path and is_case(item)]
    chosen = dict.fromkeys([*every(_STRIDE, list(cases("node"))), *(f"test_{name}" for name in asked)])
    return {result.name.removeprefix("test_"): result for result in run_cases(list(chosen), processes=2, timeout_s=30)}


def is_case(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and hasattr(item, "callspec")


@pytest.mark.daily
def test_every_case_passes(results: dict[str, Result]) -> None:
    """None is refused, either, so that a lost operator is noticed."""
    assert not [result for result in results.values() if result.outcome not in SOUND]


@pytest.mark.parametrize("name", _ONCE_WRONG)
def test_what_was_once_wrong_passes(name: str, results: dict[str, Result]) -> None:
    assert results[name].outcome == "pass", results[name].detail


@pytest.mark.parametrize("name", [name.removeprefix("test_") for name in UNLIKE])
def test_numbers_that_the_text_does_not_have_are_not_ours(name: str, results: dict[str, Result]) -> None:
    assert results[name].outcome == "unlike", results[name].detail


def test_a_crash_costs_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "judge", lambda name: os._exit(3) if name == "test_abs" else ("pass", "", None))
    found = {result.name: result for result in run_cases(["test_abs", "test_acos"], processes=1, timeout_s=30)}
    assert (found["test_abs"].outcome, found["test_abs"].detail) == ("crash", "exit code 3")
    assert (found["test_acos"].outcome, found["test_acos"].operator) == ("pass", "Acos")
