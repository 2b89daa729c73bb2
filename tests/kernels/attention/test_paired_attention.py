"""Attention whose products multiply pairs of bfloat16 numbers; against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.attention import attention
from prefuse.kernels.attention.pattern import attention_of
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.kernels.template.kernel import new_builder
from prefuse.runtime.precision import Precision
from tvm import tirx

from ..harness import Case, check, run, target_of
from .attention_cases import attend, guarded, masked, packed_projections

LEVEL = "avx512bf16"
_UNIT = 4e-2  # of results of about 1: eight bits of every operand


def paired(case: Case, precision: Precision = "bfloat16") -> Case:
    return replace(case, group=replace(case.group, precision=precision), rtol=0.0, atol=_UNIT, got=[])


def cases() -> list[Case]:
    """Keys, queries and values of odd numbers; heads of one and of several vectors of pairs, and of a part of one."""
    blind = np.zeros((70, 40))
    blind[::3] = -np.inf
    return [
        attend((1, 2, 64, 64, 64, 64)),
        attend((2, 1, 37, 71, 20, 45)),
        attend((1, 2, 17, 33, 80, 3)),
        attend((1, 1, 13, 9, 6, 64)),
        attend((1, 2, 70, 40, 16, 16), score_step=masked(np.where(np.tri(70, 40), 0.0, -np.inf))),
        attend((1, 1, 70, 40, 16, 16), score_step=masked(blind), weight_step=guarded),
        packed_projections(),
    ]


def test_attention() -> None:
    check([paired(case) for case in cases()], target_of(LEVEL))


def test_keys_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CACHE_SHARE", 1 / 64)
    check([paired(attend((1, 2, 70, 201, 16, 24)))], target_of(LEVEL))


def test_scratch_holds_all_rows_of_a_block() -> None:
    """Of 33 to 48 keys, and each 64 more, rows of words were longer than a thread had room for, and lay in another thread's."""
    target = target_of(LEVEL)
    for keys in range(1, 130):
        form = attention_of(paired(attend((1, 1, 48, keys, 16, 16))).group)
        assert not isinstance(form, Refusal)
        kernel = attention._Kernel(form, new_builder(target), target)
        rows = kernel._scratch(tirx.const(0, "int32"), 1, kernel.block_rows).rows
        for lines in (rows.line(kernel.key_block), rows.exponential_rows(kernel.key_block)):
            assert kernel.block_rows * lines.pitch <= lines.buffer.shape[0], keys


def test_infinite_values_stay_in_their_column() -> None:
    """The last key of an odd number has no neighbour, and what stands for it must not meet the infinity."""
    case = attend((1, 1, 5, 33, 16, 16))
    _, _, values = (name for name, array in case.arrays.items() if array.ndim == 3)
    case.arrays[values][0, 32, 3] = np.inf
    case.expected[0][..., 3] = np.inf
    check([paired(case)], target_of(LEVEL))


@pytest.mark.parametrize(
    ("sizes", "precision", "level", "pairs"),
    [
        ((1, 1, 16, 16, 16, 16), "bfloat16", "avx512bf16", True),
        ((1, 1, 16, 16, 16, 16), "float32", "avx512bf16", False),
        ((1, 1, 16, 16, 16, 16), "bfloat16", "avx512", False),
        ((1, 1, 16, 16, 15, 16), "bfloat16", "avx512bf16", False),
        ((1, 1, 2, 16, 16, 16), "bfloat16", "avx512bf16", False),
    ],
)
def test_choice(sizes: tuple[int, int, int, int, int, int], precision: Precision, level: str, pairs: bool) -> None:
    built = build_kernel(paired(attend(sizes), precision).group, target_of(level))
    assert isinstance(built, BuiltKernel)
    assert ("prefuse_bfloat16_dot" in str(built.function)) == pairs


def test_repeated_runs_give_the_same_bits() -> None:
    first = paired(cases()[1])
    second = replace(first, got=[])
    run([first], target_of(LEVEL))
    run([second], target_of(LEVEL, threads=2))
    np.testing.assert_array_equal(first.got[0], second.got[0])
