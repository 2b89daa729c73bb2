"""Convolutions of values that lie channels-last; against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.convolution.channels_last_form import channels_last_form
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import Refusal

from ..harness import LEVELS, Case, check, check_in_turn, target_of, type_of
from .channels_last_cases import convolution, joined, of_several_results, pooling, transposed


def plain() -> list[Case]:
    """Channels and positions that do not divide a tile, windows with strides and holes."""
    return [
        convolution((1, 64, 7, 7), 64, 1),
        convolution((2, 17, 13, 11), 33, 1),
        convolution((2, 1, 9, 10), 17, 3, 1, 1),
        convolution((1, 3, 30, 27), 9, 7, 2, 3),
        convolution((1, 17, 14, 14), 64, 3, 1, 1),
        convolution((2, 64, 7, 9), 17, 3, 2, 1),
        convolution((1, 8, 9, 9), 5, 1, 2),
        convolution((1, 8, 9, 9), 5, 1, 1, (1, 0, 2, 0)),
        convolution((1, 4, 19, 19), 6, 3, 1, 2, 2),
        convolution((1, 16, 12, 15), 40, (2, 3), (2, 1), (0, 1, 2, 3), (1, 2)),
        convolution((3, 5, 1, 1), 7, 1),
        convolution((2, 8, 1, 1), 32, 1),
        convolution((3, 8, 1, 5), 32, 1),
        convolution((1, 4, 1, 1), 3, 1, 10, (5, 5, 0, 0)),
        convolution((1, 3, 2, 3), 5, (2, 3)),
        convolution((1, 300, 5, 5), 3, 1),
        convolution((0, 2, 8, 8), 3, 3),
        convolution((0, 2, 8, 8), 3, 1),
        convolution((1, 17, 13, 13), 24, 3, 1, 1, dtype="float64"),
        convolution((1, 16, 8, 8), 6, 3, 1, 1, dtype="float16"),
    ]


def grouped() -> list[Case]:
    return [
        convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2),
        convolution((1, 64, 9, 9), 68, 3, 1, 1, group=4),
        convolution((1, 6, 8, 8), 12, 1, group=3),
        convolution((2, 17, 13, 13), 17, 3, 1, 1, group=17),
        convolution((1, 64, 14, 15), 64, 5, 2, 2, group=64),
        convolution((1, 32, 12, 12), 32, 3, 1, (0, 1, 2, 0), 2, group=32),
        convolution((1, 16, 3, 3), 16, 7, 1, 3, group=16),
        convolution((1, 20, 5, 37), 20, (3, 11), 1, (1, 5, 1, 5), group=20),
        convolution((2, 33, 4, 23), 33, (2, 9), 2, (0, 7, 1, 8), group=33),
        convolution((1, 17, 6, 19), 17, (3, 5), 1, (1, 6, 1, 5), (1, 3), group=17),
        convolution((2, 12, 5, 4), 12, 9, 1, 4, group=12),
        convolution((2, 40, 8, 8), 40, 2, group=40),
        convolution((1, 20, 9, 9), 20, 3, 1, 1, group=20, dtype="float64"),
    ]


def volumes() -> list[Case]:
    """Three spatial dimensions: what holds for two, and lines that lie in planes."""
    return [
        convolution((1, 16, 5, 6, 7), 33, 3, 1, 1),
        convolution((2, 3, 6, 9, 8), 17, (3, 5, 4), (1, 2, 2), (1, 2, 1, 1, 0, 2)),
        convolution((1, 8, 9, 5, 7), 5, (2, 1, 3), 1, (2, 0, 1, 0, 0, 1), (3, 1, 2)),
        convolution((2, 64, 2, 3, 3), 70, 1),
        convolution((1, 12, 4, 4, 6), 9, 1, (2, 1, 3)),
        convolution((1, 8, 1, 2, 1), 16, 3, 1, 1),
        convolution((1, 6, 4, 5, 5), 4, 3, 2, 1, group=2),
        convolution((1, 20, 4, 6, 9), 20, 3, 1, 1, group=20),
        convolution((2, 33, 5, 4, 8), 33, (1, 3, 5), (1, 2, 1), (0, 1, 2, 0, 1, 2), group=33),
        convolution((1, 3, 4, 9, 9), 20, (3, 7, 7), (1, 2, 2), (1, 3, 3, 1, 3, 3), keep_first=("x",)),
        convolution((1, 5, 3, 4, 5), 8, 3, 1, 1, dtype="float64"),
        convolution((1, 6, 3, 4, 9), 16, 3, 1, 1, narrow="xw"),
        convolution((0, 4, 3, 4, 5), 8, 3, 1, 1),
        *_of_a_run([convolution((1, 4, 5, 5, 5), 9, 3, 2, 1)]),
    ]


def signals() -> list[Case]:
    """One spatial dimension: a line of positions, whose transposes are their own inverses."""
    return [
        convolution((1, 64, 37), 70, 3, 2),
        convolution((2, 17, 29), 33, 5, 1, (4, 0)),
        convolution((2, 20, 31), 9, 3, 1, (8, 0), 4),
        convolution((1, 48, 19), 20, 3, 1, (12, 6), 6),
        convolution((3, 12, 9), 40, 1),
        convolution((1, 1, 50), 33, 10, 5, keep_first=("x",)),
        convolution((2, 6, 23), 18, 4, 3, 2, keep_first=("x",)),
        convolution((2, 6, 11), 4, 3, 2, 1, group=2),
        convolution((1, 40, 45), 40, 9, 1, 4, group=40),
        convolution((2, 17, 6), 17, 7, 2, 3, group=17),
        convolution((1, 5, 1), 8, 3, 1, 1),
        convolution((1, 10, 21), 12, 3, 1, 1, dtype="float64"),
        convolution((1, 6, 17), 16, 3, 1, 1, narrow="xw"),
        convolution((2, 34, 14), 20, 2, 2, narrow="xwry"),
        convolution((0, 4, 5), 8, 3, 1, 1),
        *_of_a_run([convolution((1, 4, 15), 9, 3, 2, 1)]),
    ]


def over_padding() -> list[Case]:
    """Taps that only meet padding, of lines and of stretches of a line; all of those of some lines, too."""
    return [
        convolution((2, 40, 9, 19), 24, 3, 1, (4, 12, 4, 12), (4, 12)),
        convolution((2, 33, 7, 8), 20, 5, 2, (2, 3, 3, 2)),
        convolution((1, 36, 4, 30), 17, (3, 4), (3, 1), (5, 9, 6, 9), (1, 6)),
        convolution((1, 34, 6, 5), 9, 3, 1, (2, 7, 8, 1), 3, keep_first=("x",)),
        convolution((2, 64, 5, 6), 12, (3, 1), 1, (1, 0, 1, 0)),
        convolution((2, 66, 7, 5), 10, 3, 1, 1, group=2),
        convolution((1, 64, 5, 6), 12, 3, 1, 2, 2, narrow="xw"),
        convolution((1, 32, 2, 3, 9), 20, 3, 1, (1, 1, 4, 1, 1, 4), (1, 1, 4)),
    ]


def from_first() -> list[Case]:
    """The input lies channels-first."""
    return [
        convolution((1, 3, 37, 33), 20, 7, 2, 3, keep_first=("x",)),
        convolution((2, 1, 12, 13), 33, 3, keep_first=("x",)),
        convolution((2, 4, 9, 9), 17, 1, keep_first=("x",)),
        convolution((2, 32, 1, 1), 8, 1, keep_first=("x",)),
        convolution((2, 3, 9, 8), 16, 3, 1, (1, 0, 0, 2), keep_first=("x",)),
    ]


def crowded() -> list[Case]:
    """Positions that would lie a multiple of 4 KiB apart, in the copy of the image a line more."""
    return [
        convolution((2, 1024, 3, 17), 20, (1, 3), 1, (0, 1, 0, 1)),
        convolution((1, 1024, 4, 5), 34, (2, 1), (2, 1), (1, 0, 1, 2), group=2),
        convolution((1, 1024, 19), 17, 2, 1, 1),
        convolution((1, 1024, 2, 3, 5), 9, (2, 1, 1), 1, (1, 0, 1, 0, 1, 0)),
        convolution((1, 512, 5, 6), 8, 2, 1, 1, dtype="float64"),
        convolution((1, 1024, 3, 7), 8, (1, 2), 1, (0, 1, 0, 1), dtype="float16"),
        convolution((1, 1024, 3, 5), 8, (1, 2), 1, (0, 1, 0, 1), narrow="xw"),
        convolution((1, 2048, 3, 5), 8, (1, 2), 1, (0, 1, 0, 1), narrow="xw"),
        convolution((1, 2047, 3, 5), 33, (1, 2), 1, (0, 1, 0, 1), narrow="xw"),
        _clipped(convolution((1, 1024, 3, 9), 8, (1, 2), 1, (0, 1, 0, 1))),
        *_of_a_run([convolution((1, 1024, 2, 9), 8, (1, 2), 1, (0, 1, 0, 1))]),
    ]


def clipped() -> list[Case]:
    """Clip, whose bounds are constants inside the group and no inputs of it."""
    cases = [convolution((1, 16, 9, 9), 24, 3, 1, 1), convolution((1, 32, 9, 9), 32, 3, 2, 1, group=32)]
    return [_clipped(case) for case in cases]


def _clipped(case: Case) -> Case:
    bounds = {".low": np.zeros((), np.float32), ".high": np.array(1.5, np.float32)}
    ops = [replace(op, op_type="Clip", inputs=(*op.inputs, *bounds)) if op.op_type == "Relu" else op for op in case.group.ops]
    types = {**case.group.types, **{name: type_of(bound) for name, bound in bounds.items()}}
    group = replace(case.group, ops=tuple(ops), types=types, literals=bounds)
    return replace(case, group=group, expected=[np.minimum(case.expected[0], 1.5)], label=f"{case.label} Clip")


def of_a_run() -> list[Case]:
    """Weights that are not constant: packed by the kernel."""
    return _of_a_run([convolution((1, 16, 13, 13), 24, 3, 1, 1), convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2)])


def _of_a_run(cases: list[Case]) -> list[Case]:
    return [replace(case, group=replace(case.group, constants=frozenset())) for case in cases]


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_joined_with_others(threads: int) -> None:
    cases = [
        convolution((2, 8, 6, 7), 20, 3, 1, 1),
        convolution((1, 16, 9, 9), 16, 3, 1, 1, group=16),
        transposed((2, 16, 5, 6), 24, 2, 2),
        transposed((1, 8, 5, 6), 7, 3, 2, 1),
        pooling("MaxPool", (1, 17, 9, 9), kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
        convolution((2, 8, 3, 4, 5), 20, 3, 1, 1),
        convolution((2, 8, 9), 20, 3, 1, 1),
        transposed((2, 16, 6), 24, 2, 2),
        transposed((2, 16, 2, 3, 5), 24, 2, 2),
    ]
    check([joined(case) for case in cases], target_of("avx2", threads))


@pytest.mark.parametrize("case", [convolution((2, 8, 6, 7), 20, 3, 1, 1), transposed((2, 16, 5, 6), 24, 2, 2)])
def test_groups_have_several_results(case: Case) -> None:
    target = target_of("avx2")
    several = of_several_results(case)
    check([several], target)
    before, after = several.got
    np.testing.assert_array_equal(np.maximum(before, 0), after)
    assert (before < 0).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "cases",
    [
        plain,
        grouped,
        signals,
        volumes,
        over_padding,
        clipped,
        crowded,
        from_first,
        of_a_run,
    ],
)
def test_convolutions(cases: Any, level: str) -> None:
    check_in_turn(cases(), level)


def test_odd_channels_in_pairs_lie_apart() -> None:
    check(crowded(), target_of("avx512bf16", 2))


def test_work_is_shared_among_threads() -> None:
    cases = [
        convolution((1, 64, 30, 29), 70, 1),
        convolution((1, 32, 23, 21), 66, 3, 1, 1),
        convolution((1, 200, 7, 7), 300, 3, 1, 1),
        convolution((1, 64, 40, 40), 64, 3, 1, 1, group=64),
        convolution((1, 20, 5, 11, 9), 66, 3, 1, 1),
        convolution((1, 40, 5, 17, 9), 40, 3, 1, 1, group=40),
        transposed((1, 64, 30, 29), 70, 2, 2),
        transposed((1, 64, 19, 17), 40, 4, 2, 1),
        pooling("MaxPool", (1, 64, 33, 33), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        convolution((1, 64, 300), 66, 5, 1, 2),
        convolution((1, 64, 331), 64, 9, 1, 4, group=64),
        convolution((2, 64, 90), 64, 31, 2, 15, group=64),
        transposed((1, 64, 130), 40, 4, 2, 1),
        transposed((1, 64, 5, 9, 7), 40, 2, 2),
        transposed((1, 20, 5, 9, 7), 36, 3, 2, 1),
        pooling("MaxPool", (1, 64, 633), kernel_shape=(3,), strides=(2,), pads=(1, 1)),
    ]
    check(cases, target_of("avx2", 3))


def test_other_groups_are_refused() -> None:
    """Each for the reason that its form is not this one."""
    case = convolution((1, 8, 5, 5), 8, 1)
    *rest, tail = case.group.ops
    turned = replace(tail, attributes={"perm": (0, 3, 2, 1)})
    assert isinstance(channels_last_form(replace(case.group, ops=(*rest, turned))), Refusal)
    built = build_kernel(replace(case.group, ops=(*rest, turned)), target_of("avx2"))
    assert isinstance(built, tuple)
    assert ("convolution_channels_last", "its values do not lie channels-last") in built
    integers = {name: replace(kind, dtype="int16") for name, kind in case.group.types.items()}
    built = build_kernel(replace(case.group, types=integers), target_of("avx2"))
    assert isinstance(built, tuple)
    assert ("convolution_channels_last", "no convolution of int16") in built
