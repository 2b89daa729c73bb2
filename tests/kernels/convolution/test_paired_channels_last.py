"""Convolutions of bfloat16 that lie channels-last: pairs of channels, and of neighbouring taps; against torch in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.convolution import convolution_channels_last
from prefuse.kernels.cost import convolution as cost
from prefuse.kernels.groups.group import Group
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel

from ..harness import LEVELS, Case, check, check_in_turn, run, target_of
from .channels_last_cases import convolution, joined, transposed

# Levels and threads: the builder deals loops to threads, whatever is in them, so that each level need not have all numbers.
DEALT = [("avx2", 1), ("avx512", 3), ("avx512bf16", 3)]


def narrow_convolutions() -> list[Case]:
    """Pairs of channels; and what has none: an odd number of them, images that lie channels-first, float32 images."""
    return [
        convolution((1, 64, 9, 9), 64, 3, pads=1, narrow="xw"),
        convolution((2, 6, 7, 5), 9, 3, 2, 1, narrow="xwr"),
        convolution((1, 32, 14, 14), 70, 1, narrow="xwry"),
        convolution((3, 18, 6, 7), 33, 1, 2, narrow="xw"),
        convolution((1, 8, 9, 9), 17, 3, 1, 2, 2, narrow="xwy"),
        convolution((1, 12, 6, 5), 21, (1, 3), narrow="xw", group=3),
        convolution((1, 2, 5, 5), 3, 2, narrow="xw"),
        convolution((1, 16, 1, 1), 40, 1, narrow="xwr"),
        convolution((0, 4, 5, 5), 3, 2, narrow="xw"),
        convolution((1, 5, 6, 7), 9, 3, 1, 1, narrow="xw"),
        convolution((1, 9, 6, 7), 12, 3, 1, 1, narrow="xw", group=3),
        convolution((1, 8, 6, 7), 9, 3, 1, 1, narrow="xw", keep_first=("x",)),
        convolution((1, 8, 6, 7), 9, 3, 1, 1, narrow="w"),
        convolution((1, 24, 6, 7), 24, 3, 1, 1, narrow="xw", group=24),
        convolution((2, 18, 23), 33, 3, 2, 1, narrow="xw"),
        convolution((1, 18, 4, 5, 6), 33, 3, 1, 1, narrow="xwry"),
        convolution((2, 6, 3, 4, 9), 17, 3, (1, 2, 2), 1, narrow="xwry"),
        convolution((1, 10, 3, 5, 6), 15, (3, 1, 1), 1, (2, 0, 0, 2, 0, 0), (2, 1, 1), group=5, narrow="xw"),
        convolution((1, 4, 3, 5, 6), 4, 3, 1, 1, group=4, narrow="xwy"),
    ]


def odd_convolutions() -> list[Case]:
    """Pairs of an odd number of channels, the last beside a zero: as whole images, over padding, in parts, as one line."""
    return [
        convolution((1, 37, 9, 11), 75, 3, 2, 1, narrow="xw"),
        convolution((2, 5, 8, 7), 40, 3, 1, 2, 2, narrow="xwr"),
        convolution((3, 33, 6, 7), 37, 1, narrow="xwry"),
        convolution((1, 33, 7, 8), 70, 1, 2, narrow="xwy"),
        convolution((2, 37, 6, 9), 33, (1, 3), 1, (0, 2, 0, 0), narrow="xw"),
        convolution((1, 63, 7, 7), 40, 7, 1, 3, narrow="xwy"),
        convolution((2, 33, 23), 40, 3, 2, 1, narrow="xw"),
        convolution((1, 5, 41), 33, 5, 1, 4, 2, narrow="xwry"),
        convolution((1, 37, 4, 5, 6), 33, 3, 1, 1, narrow="xwry"),
        convolution((2, 33, 3, 4, 9), 40, (1, 2, 3), (1, 2, 2), 1, narrow="xw"),
        convolution((1, 1, 5, 6), 64, 3, 1, 1, narrow="xw"),
        joined(convolution((1, 33, 6, 7), 40, 3, 1, 1, narrow="xw")),
    ]


def narrow_depthwise() -> list[Case]:
    """Images as words of two channels, whole vectors of them and parts; windows that overhang, skip, or are wider than lines."""
    return [
        convolution((1, 64, 9, 21), 64, 3, 1, 1, group=64, narrow="xy"),
        convolution((2, 54, 7, 20), 54, 3, 2, 1, group=54, narrow="x"),
        convolution((1, 6, 6, 19), 6, 5, 1, 2, group=6, narrow="xry"),
        convolution((1, 40, 5, 23), 40, 3, 1, 2, 2, group=40, narrow="xw"),
        convolution((1, 34, 3, 4), 34, 7, 1, 3, group=34, narrow="x"),
        convolution((1, 2, 1, 1), 2, 1, group=2, narrow="x"),
        convolution((1, 33, 6, 18), 33, 3, 1, 1, group=33, narrow="x"),
        convolution((2, 36, 45), 36, 9, 2, 4, group=36, narrow="xy"),
        convolution((1, 34, 2, 40), 34, (1, 19), 1, (0, 3, 0, 3), group=34, narrow="x"),
        convolution((1, 18, 3, 4, 17), 18, 3, 1, 1, group=18, narrow="x"),
        convolution((0, 4, 5, 5), 4, 3, group=4, narrow="x"),
        joined(convolution((1, 12, 6, 17), 12, 3, 1, 1, group=12, narrow="x")),
        replace(changing := convolution((1, 20, 6, 17), 20, 3, 1, 1, group=20, narrow="x"), group=changing_weights(changing)),
    ]


def changing_weights(case: Case) -> Group:
    """The group of a case, whose weights the kernel lays out itself."""
    return replace(case.group, constants=case.group.constants - {"w"})


def narrow_transposed() -> list[Case]:
    """Phases by pairs of channels, alone and as a copy with zeros; odd channels and wide weights go without pairs."""
    return [
        transposed((1, 64, 7, 7), 64, 2, 2, narrow="xw"),
        transposed((2, 18, 6, 5), 33, 2, 2, narrow="xw"),
        transposed((1, 8, 5, 6), 20, 4, 2, 1, narrow="xw"),
        transposed((1, 6, 4, 5), 9, (2, 3), (3, 2), (0, 1), extra=(2, 1), narrow="xw"),
        transposed((2, 12, 5, 6), 9, 3, 2, 1, group=3, narrow="xw"),
        transposed((1, 7, 6, 6), 9, 3, 2, 1, narrow="xw"),
        transposed((1, 8, 6, 6), 9, 3, 2, 1, narrow="w"),
        transposed((1, 64, 3, 2, 5), 64, 2, 2, narrow="xw"),
        transposed((2, 18, 2, 3, 5), 33, 2, 2, narrow="xw"),
        transposed((1, 6, 3, 2, 5), 9, (2, 3, 4), (3, 2, 2), (0, 1, 1), extra=(2, 1, 0), narrow="xw"),
        transposed((2, 12, 2, 3, 4), 9, 3, 2, 1, group=3, narrow="xw"),
        transposed((1, 7, 2, 3, 4), 9, 3, 2, 1, narrow="xw"),
    ]


@pytest.mark.parametrize("level", [*LEVELS, "avx512bf16"])
def test_convolutions_of_bfloat16(level: str) -> None:
    check_in_turn([*narrow_convolutions(), *narrow_transposed()], level, (*LEVELS, "avx512bf16"))


@pytest.mark.parametrize(("level", "threads"), DEALT)
def test_convolutions_of_odd_channels(level: str, threads: int) -> None:
    """What lies beside an odd channel is zero, whatever was where the image is copied to: NaN by a weight of zero is NaN."""
    check_in_turn(odd_convolutions(), level, [name for name, _ in DEALT], threads=threads)


def test_odd_channels_are_paired_where_that_pays() -> None:
    """Not where few results a position are less than the copy, nor of groups, nor where the target has no fast pairs."""
    image = (1, 37, 14, 14)
    cases = {
        True: [convolution(image, 75, 3, 2, 1, narrow="xw"), convolution(image, 64, 1, narrow="xw")],
        False: [
            convolution(image, 5, 1, narrow="xw"),
            convolution(image, 64, 1, 3, narrow="xw"),
            convolution((1, 74, 14, 14), 150, 3, 2, 1, narrow="xw", group=2),
            convolution(image, 75, 3, 2, 1, narrow="w"),
            convolution(image, 75, 3, 2, 1, narrow="xw", keep_first=("x",)),
        ],
    }
    for expected, some in cases.items():
        for case in some:
            assert _has_pairs(case, "avx512bf16") == expected, case.label
    assert not _has_pairs(cases[True][0], "avx512")


def _has_pairs(case: Case, level: str) -> bool:
    built = build_kernel(case.group, target_of(level))
    assert isinstance(built, BuiltKernel), built
    return any(",k_pack=2" in str(operand.pack) for operand in built.operands)


@pytest.mark.parametrize(("level", "threads"), DEALT)
def test_depthwise_convolutions_of_bfloat16(level: str, threads: int) -> None:
    check_in_turn(narrow_depthwise(), level, [name for name, _ in DEALT], threads=threads)


@pytest.mark.parametrize("is_by_panel", [False, True])
@pytest.mark.parametrize("level", ["avx2", "avx512bf16"])
def test_weights_that_are_asked_for_ahead(level: str, is_by_panel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that follow; or the next panel, where all positions meet one before they do the next."""
    monkeypatch.setattr(cost, "_NEAR_BYTES", 0 if is_by_panel else 1 << 20)
    monkeypatch.setattr(convolution_channels_last, "_FAR_BYTES", 0)
    monkeypatch.setattr(cost, "_PREFETCHED_BYTES", 0)
    cases = [convolution((1, 18, 7, 7), 33, 3, 1, 1), convolution((1, 18, 7, 7), 33, 3, 2, 1, narrow="xw")]
    check_in_turn([*cases, convolution((2, 34, 5, 5), 70, 1, narrow="xw")], level, ("avx2", "avx512bf16"))


@pytest.mark.parametrize(("level", "threads"), DEALT)
def test_results_are_asked_for_while_they_are_summed(level: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they are added to; whole tiles and ragged ones, also where results are channels of others."""
    monkeypatch.setattr(convolution_channels_last, "_EPILOGUE_SHARE", 0.0)
    cases = [
        convolution((2, 64, 7, 9), 70, 1),
        convolution((2, 34, 5, 6), 33, 3, 2, 1, narrow="xwry"),
        joined(convolution((2, 8, 6, 7), 20, 3, 1, 1, group=2)),
        convolution((1, 8, 3, 4, 5), 17, 3, 1, 1, narrow="xw"),
        convolution((1, 5, 21), 12, 3, 1, 1, dtype="float64"),
        convolution((0, 4, 5, 5), 8, 3, 1, 1),
    ]
    target = target_of(level, threads)
    built = build_kernel(cases[0].group, target)
    assert isinstance(built, BuiltKernel)
    assert built.function.script().count("prefetch") >= 2
    check(cases, target)


def rounded_rows() -> list[Case]:
    """Pairs of neighbouring taps: kernels of an even and of an odd width, in either layout, strided, grouped, over padding."""
    return [
        convolution((1, 3, 37, 33), 20, 7, 2, 3, keep_first=("x",), rounds="xw"),
        convolution((2, 1, 12, 13), 33, 3, keep_first=("x",), rounds="xw"),
        convolution((2, 3, 9, 8), 16, 2, 1, (1, 0, 0, 2), keep_first=("x",), rounds="xw", narrow="y"),
        convolution((2, 5, 9, 8), 16, (3, 5), 3, (1, 2, 0, 2), (2, 1), rounds="xw"),
        convolution((1, 9, 7, 6), 12, 3, 1, 1, group=3, rounds="xw"),
        convolution((1, 33, 3, 5), 9, 3, 1, 2, rounds="xw"),
        convolution((1, 3, 4, 6, 5), 9, 3, 1, 1, rounds="xw"),
        convolution((1, 1, 3, 4), 5, (2, 4), rounds="xw"),
        convolution((2, 3, 37), 20, 5, 2, 3, rounds="xw"),
    ]


def test_pairs_of_neighbouring_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_channels_last, "_LEAST_ROUNDED", 0)
    check(rounded_rows(), target_of("avx512bf16", 3))


def test_what_no_tap_reads_may_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of an odd width reads one element more, whose weight is zero."""
    monkeypatch.setattr(convolution_channels_last, "_LEAST_ROUNDED", 0)
    case = convolution((1, 1, 5, 9), 4, 3, rounds="xw", keep_first=("x",))
    spoiled = case.arrays["x"].copy()
    spoiled[..., 5:] = np.inf
    case = replace(case, arrays={**case.arrays, "x": spoiled})
    run([case], target_of("avx512bf16"))
    np.testing.assert_allclose(case.got[0][:, :, :3].astype(np.float64), case.expected[0][:, :, :3], 1e-3, 1e-3)


def test_taps_are_paired_where_that_is_exact_enough_and_pays() -> None:
    """Not in float32, nor pairs of channels, nor taps that are no neighbours, nor what is too small."""
    size = (1, 3, 64, 64)
    cases = {
        True: [convolution(size, 64, 3, rounds="xw")],
        False: [
            convolution(size, 64, 3),
            convolution((1, 4, 64, 64), 64, 3, rounds="xw"),
            convolution(size, 64, 3, 1, 0, 2, rounds="xw"),
            convolution(size, 64, (3, 1), rounds="xw"),
            convolution((1, 3, 16, 16), 64, 3, rounds="xw"),
            convolution(size, 64, 3, rounds="xw", narrow="x"),
        ],
    }

    def are_paired(case: Case, level: str) -> bool:
        built = build_kernel(case.group, target_of(level))
        assert isinstance(built, BuiltKernel), built
        return any(",rounded" in str(operand.pack) for operand in built.operands)

    for expected, some in cases.items():
        for case in some:
            assert are_paired(case, "avx512bf16") == expected, case.label
    assert not are_paired(cases[True][0], "avx512")
