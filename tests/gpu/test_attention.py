"""Attention in one GPU kernel, on the simulator: sizes that divide no block, masks, views around it, types; against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.kernels.attention import attention_decode_gpu, attention_mma_gpu
from prefuse.kernels.codegen.builder import Buffer
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.template.contract import Candidate, Refusal
from prefuse.runtime.hardware.gpu import gpu_machine
from prefuse.runtime.target import Target

from ..kernels.attention.attention_cases import (
    attend,
    chosen,
    flat_heads,
    grouped_queries,
    guarded,
    guarded_by,
    halved_and_guarded,
    inverted,
    masked,
    one_matrix,
    packed_projections,
    parts_of_wider_rows,
    replaced,
    scaled,
    scaled_keys,
    shared_keys,
    split_projections,
    truncated,
    turned_values,
    widened,
)
from ..kernels.harness import Case, build
from .simulator import CUDA, ROCM, SimulatedFaultError, check, check_in_turn


def of_sizes() -> list[Case]:
    """One query, one key, several blocks of both, depths of 1 and of more than shared memory holds."""
    sizes = [(1, 1, 1, 1, 1, 1), (2, 3, 1, 70, 8, 8), (1, 2, 17, 33, 64, 40), (1, 1, 70, 37, 20, 24), (2, 1, 3, 7, 5, 1)]
    return [attend(size) for size in [*sizes, (1, 1, 9, 10, 128, 131), (1, 1, 3, 5, 700, 12)]]


def with_masks() -> list[Case]:
    random, cases = np.random.default_rng(3), []
    for shape in [(2, 3, 17, 21), (2, 1, 1, 21), (17, 21), (17, 1), (1,)]:
        cases.append(attend((2, 3, 17, 21, 8, 8), score_step=masked(random.standard_normal(shape))))
        cases.append(attend((2, 3, 17, 21, 8, 8), score_step=chosen(random.random(shape) < 0.5, -100.0)))
    return cases


def without_keys() -> list[Case]:
    """Rows that see no key in a block, or in none: NaN, or what the guard says."""
    keep = np.tril(np.ones((19, 43), bool), -2)
    late = np.triu(np.ones((19, 43), bool), 23)  # nothing in the first blocks
    bare = [attend((1, 2, 19, 43, 8, 8), score_step=chosen(mask, -np.inf)) for mask in (keep, late)]
    assert np.isnan(bare[0].expected[0][:, :2]).all()
    steps = (guarded, guarded_by(0.25), halved_and_guarded, replaced)
    return [*bare, *(attend((1, 2, 19, 43, 8, 8), score_step=chosen(keep, -np.inf), weight_step=step) for step in steps)]


def with_views() -> list[Case]:
    cases = [packed_projections(), split_projections(), flat_heads(), one_matrix(), shared_keys(17), turned_values(17)]
    return [*cases, grouped_queries(1), grouped_queries(19, key_step=scaled_keys)]


def of_types() -> list[Case]:
    mask = np.zeros((1, 1, 17, 21))
    mask[..., 9:] = -1e4
    types = ("float64", "float16", "bfloat16")
    return [attend((2, 1, 17, 21, 8, 8), dtype, masked(mask), guarded) for dtype in types]


@pytest.mark.parametrize("cases", [of_sizes, with_masks, without_keys, with_views, of_types])
def test_attention(cases: object, tmp_path: Path) -> None:
    assert callable(cases)
    made = cases()
    for case in made:
        case.template = "gpu_attention"
        case.group = replace(case.group, configuration={"template": "gpu_attention"})
    check_in_turn(made, tmp_path)


def of_tiles() -> list[Case]:
    """Parts of keys and blocks of queries with edges, heads of any depth up to 128, neighbours that are no pairs."""
    return [attend(size) for size in ((1, 2, 17, 33, 64, 40), (2, 1, 40, 70, 20, 24), (1, 1, 8, 5, 8, 9))]


def of_halves() -> list[Case]:
    mask = np.zeros((1, 1, 17, 21))
    mask[..., 9:] = -1e4
    cases = [attend((2, 2, 17, 21, 8, 8), dtype, masked(mask), guarded) for dtype in ("float16", "bfloat16")]
    cases += [attend((1, 2, 70, 130, 64, 64), "bfloat16"), attend((1, 1, 9, 10, 128, 104), "float16")]
    return [*cases, parts_of_wider_rows(4, 9, "float16")]


def with_scales() -> list[Case]:
    cases = [grouped_queries(19, key_step=scaled(0.3)), split_projections(), flat_heads(), turned_values(17), shared_keys(17)]
    return [*cases, grouped_queries(19, key_step=truncated)]


def with_hidden_keys() -> list[Case]:
    keep, late = np.tril(np.ones((19, 83), bool), -2), np.triu(np.ones((19, 83), bool), 63)
    sizes = (1, 2, 19, 83, 8, 8)
    bare = [attend(sizes, score_step=chosen(mask, -np.inf)) for mask in (keep, late)]
    return [*bare, attend(sizes, score_step=chosen(keep, -np.inf), weight_step=guarded), *with_masks()[:2]]


@pytest.mark.parametrize("cases", [of_tiles, of_halves, with_scales, with_hidden_keys])
def test_attention_on_the_matrix_unit(cases: object, tmp_path: Path) -> None:
    assert callable(cases)
    made = cases()
    for case in made:
        case.template = "gpu_mma_attention"
        case.group = replace(case.group, configuration={"template": "gpu_mma_attention"})
    check_in_turn(made, tmp_path)


def test_a_missing_barrier_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)
    case = replace(attend((1, 1, 16, 130, 16, 16), "bfloat16"), template="gpu_mma_attention")
    with pytest.raises(SimulatedFaultError, match=r"no barrier between|a copy under way|another thread"):
        check([case], tmp_path)


def test_what_the_matrix_unit_has_no_tiles_for() -> None:
    """One query, deep heads, probabilities that are computed with, operands of several tensors: another kernel takes them."""
    random = attend((1, 2, 9, 11, 8, 8), weight_step=halved_and_guarded)
    cases = {
        "1 queries": attend((1, 2, 1, 11, 8, 8)),
        "136": attend((1, 1, 9, 11, 136, 8)),
        "from each probability": random,
        "several tensors": grouped_queries(19, key_step=scaled_keys),
        "stay 0": grouped_queries(19, key_step=inverted),
        "may not be rounded": widened(19, 33),
        "has no mma.sync": attend((1, 2, 9, 11, 8, 8)),
    }
    for reason, case in cases.items():
        target = Target("cuda", "sm_75") if "mma" in reason else Target("cuda", "sm_90")
        refused = attention_mma_gpu.plan(case.group, target)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason
        others = "gpu_decode_attention" if "1 queries" in reason else "gpu_attention"
        assert build(replace(case, template=""), target).template == others


def test_operands_of_16_bits_round_probabilities_where_the_precision_allows_it() -> None:
    group = replace(widened(19, 33).group, precision="bfloat16")
    assert isinstance(attention_mma_gpu.plan(group, CUDA), Candidate)


@pytest.mark.parametrize("level", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("sizes", [(1, 200, 70, 40, 64, 64), (1, 200, 70, 40, 128, 128), (1, 200, 20, 33, 100, 40)])
def test_stages_fit_in_the_shared_memory_of_a_block(level: str, sizes: tuple[int, int, int, int, int, int]) -> None:
    target, group = Target("cuda", level), attend(sizes).group
    kernel = build(Case(group, {}, [], template="gpu_mma_attention"), target)
    (grid,) = kernel.function.launches
    assert gpu_machine(level).block_bytes // 4 < grid.shared_bytes <= gpu_machine(level).block_bytes


def test_fewer_keys_at_once_where_shared_memory_is_short(tmp_path: Path) -> None:
    check([replace(attend((1, 1, 17, 40, 128, 100)), template="gpu_mma_attention")], tmp_path, Target("cuda", "sm_86"))


@pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
@pytest.mark.parametrize("sizes", [(1, 2, 8, 1024, 256, 256), (1, 2, 8, 1024, 1, 256), (1, 8, 1, 4096, 128, 128)])
def test_scores_and_results_of_few_queries_fit_in_static_shared_memory(
    sizes: tuple[int, int, int, int, int, int], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or another kernel takes them, as where keys are so short that a step has many."""
    used, shared = list[int](), GpuBuilder.shared

    def counted(builder: GpuBuilder, elements: int, dtype: str, name: str = "tile") -> Buffer:
        used.append(elements * np.dtype(dtype).itemsize)
        return shared(builder, elements, dtype, name)

    monkeypatch.setattr(GpuBuilder, "shared", counted)
    late = np.zeros((1, 1, 1, sizes[3]))
    planned = attention_decode_gpu.plan(attend(sizes, score_step=masked(late)).group, target)
    if isinstance(planned, Refusal):
        assert sizes[4] == 1
        return
    planned.emit()
    assert 0 < sum(used) <= 48 << 10
