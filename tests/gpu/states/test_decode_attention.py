"""Attention of a few queries on simulated GPUs: parts of the keys that divide nothing, masks, views, types; against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.kernels.attention import attention_decode_gpu
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.target import Target

from ...kernels.attention.attention_cases import (
    Tape,
    attend,
    chosen,
    grouped_queries,
    guarded,
    halved_and_guarded,
    scaled,
    scaled_keys,
    shared_keys,
    turned_values,
)
from ...kernels.harness import Case, build
from ...sample import dealt
from ..simulator import CUDA, RDNA, ROCM, SimulatedFaultError, check

TEMPLATE = "gpu_decode_attention"
WAYS = [(target, steps) for target in (CUDA, ROCM, RDNA) for steps in (1, 2, 0)]


def of_few_queries() -> list[Case]:
    """One part and several, keys that divide none, rows of any length, queries that read the same keys."""
    sizes = [(1, 1, 1, 1, 1, 1), (1, 2, 1, 130, 64, 40), (2, 1, 3, 70, 20, 24), (1, 1, 8, 300, 5, 131), (1, 2, 2, 257, 256, 200)]
    return [*map(attend, sizes), shared_keys(1), shared_keys(2), turned_values(1), grouped_queries(1), grouped_queries(2)]


def of_few_halves() -> list[Case]:
    keep = np.arange(200) < 70
    sizes = [(1, 3, 1, 200, 64, 64), (2, 1, 2, 200, 96, 128)]

    def kept(tape: Tape, x: str) -> str:
        return chosen(keep, -1e4)(tape, scaled(0.1)(tape, x))

    cases = [attend(size, dtype, kept) for size in sizes for dtype in ("float16", "bfloat16")]
    return [*cases, grouped_queries(1, key_step=scaled_keys), grouped_queries(1, key_step=scaled(0.3))]


def of_parts_that_are_hidden() -> list[Case]:
    """Keys that no query sees: at the end, at the begin, between, and all of them; by -inf and by numbers."""
    places, cases = np.arange(300), []
    for keep in (places < 70, places > 200, (places < 3) | (places > 250), places < 0):
        steps = [chosen(keep, otherwise) for otherwise in (-np.inf, float(np.finfo(np.float32).min))]
        cases += [attend((1, 2, 2, 300, 8, 8), score_step=step) for step in steps]
        cases.append(attend((1, 2, 1, 300, 8, 8), score_step=chosen(keep, -np.inf), weight_step=guarded))
    by_query = np.arange(300) < np.array([[5], [290], [0], [64]])
    return [*cases, attend((2, 1, 4, 300, 8, 8), score_step=chosen(by_query, -np.inf))]


def taken(case: Case) -> Case:
    """By the template, whatever others would take."""
    return replace(case, template=TEMPLATE, group=replace(case.group, configuration={"template": TEMPLATE}))


def in_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of so many steps of keys; of as many as are fast for 0."""
    if steps:
        monkeypatch.setattr(attention_decode_gpu._Decode, "keys", property(lambda self: steps * self.shape.step))


@pytest.mark.parametrize(("target", "steps"), WAYS, ids=str)
@pytest.mark.parametrize("cases", [of_few_queries, of_few_halves, of_parts_that_are_hidden])
def test_attention_of_few_queries(
    cases: Callable[[], list[Case]], target: Target, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case in one of the ways today, in the next one tomorrow."""
    in_steps(steps, monkeypatch)
    made = [taken(one) for one in cases()]
    check(dealt(made, [f"{one.label} {i}" for i, one in enumerate(made)], (target, steps), WAYS), tmp_path, target)


@pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
def test_a_missing_barrier_is_found(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)
    case = taken(attend((1, 1, 2, 130, 16, 16)))
    with pytest.raises(SimulatedFaultError, match=r"no barrier between|what nobody wrote|another thread"):
        check([case], tmp_path, target)


def test_parts_are_for_few_heads_of_many_keys() -> None:
    """A second grid is worth its launch where one block of a head would read for long; queries that share keys share a block."""
    blocks = {}
    for name, case in {
        "few keys": attend((1, 12, 1, 96, 64, 64), "bfloat16"),
        "many keys": attend((1, 12, 1, 1024, 64, 64), "bfloat16"),
        "many heads": attend((64, 12, 1, 128, 64, 64), "bfloat16"),
        "shared": grouped_queries(1),
    }.items():
        blocks[name] = [grid.blocks for grid in build(replace(case, template=TEMPLATE), CUDA).function.launches]
    assert blocks["few keys"] == [12]
    assert blocks["many heads"] == [64 * 12]
    assert blocks["shared"] == [2 * 2]
    first, second = blocks["many keys"]
    assert (first >= 96, second) == (True, 12)


def test_what_are_not_few() -> None:
    cases = {
        "9 queries": attend((1, 1, 9, 11, 8, 8)),
        "float64": attend((1, 1, 1, 11, 8, 8), "float64"),
        "of 264": attend((1, 1, 1, 11, 264, 8)),
        "from each probability": attend((1, 2, 2, 11, 8, 8), weight_step=halved_and_guarded),
    }
    for reason, case in cases.items():
        refused = attention_decode_gpu.plan(case.group, CUDA)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason
