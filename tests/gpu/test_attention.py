"""Attention in one GPU kernel, on the simulator: sizes that divide no block, masks, views around it, types; against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ..kernels.attention.attention_cases import (
    attend,
    chosen,
    flat_heads,
    grouped_queries,
    guarded,
    guarded_by,
    halved_and_guarded,
    masked,
    one_matrix,
    packed_projections,
    scaled_keys,
    shared_keys,
    split_projections,
    turned_values,
)
from ..kernels.harness import Case
from .simulator import check


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
    steps = (guarded, guarded_by(0.25), halved_and_guarded)
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
    check(made, tmp_path)
