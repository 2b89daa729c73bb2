"""Convolutions on the matrix unit, simulated: every geometry, image and edge, exact to the format; faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.codegen import ptx
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.convolution import convolution_mma_gpu
from prefuse.kernels.convolution.channels_last_form import channels_last_form
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.groups.group import Op
from prefuse.kernels.microkernels import gpu_window_tiles
from prefuse.kernels.microkernels.gpu_window_tiles import ImageWindows, PackTaps
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target
from tvm import tirx

from ..kernels.convolution.channels_last_cases import convolution, joined, of_several_results
from ..kernels.harness import Case
from .simulator import check, check_in_turn

SMALL = (16, 64, 16, 16)  # the quickest to simulate


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_product, "_SHAPES", (SMALL,))


def case(*sizes: Any, **how: Any) -> Case:
    """With the error that float32 sums have, or that of narrow operands, which are exact."""
    made = convolution(*sizes, **how)
    error = 4e-2 if "y" in how.get("narrow", "") else 5e-5
    return replace(made, template="gpu_mma_convolution", rtol=error / 10, atol=error)


def float16(made: Case) -> Case:
    """The same with operands of float16, which are exact."""
    narrow = {name: one for name, one in made.group.types.items() if one.dtype == "bfloat16"}
    types = {**made.group.types, **{name: replace(one, dtype="float16") for name, one in narrow.items()}}
    arrays = {n: a.astype(np.float32).astype(np.float16) if n in narrow else a for n, a in made.arrays.items()}
    return replace(made, group=replace(made.group, types=types), arrays=arrays)


def in_place() -> list[Case]:
    """Images whose channels fill chunks of 16 bytes: padded, strided, dilated, grouped, signals and volumes."""
    return [
        case((1, 16, 7, 6), 24, 1),
        case((2, 40, 7, 6), 33, 3, 1, 1),
        case((1, 64, 9, 8), 16, 3, 2, (0, 1, 1, 0)),
        case((1, 8, 11, 10), 18, 3, 1, 2, 2),
        case((2, 32, 6, 5), 20, 3, 1, 1, group=2),
        case((1, 8, 9, 9), 16, 5, 1, 2),
        case((2, 16, 30), 10, 7, 3, 3),
        case((1, 8, 5, 4, 6), 12, (3, 2, 2), (1, 1, 2), 1),
    ]


def narrow() -> list[Case]:
    return [
        case((1, 64, 7, 6), 40, 3, 1, 1, narrow="xw"),
        case((2, 24, 6, 5), 16, 1, 2, narrow="xwry"),
        case((1, 8, 9, 9), 33, 3, 2, 1, narrow="xwy"),
        float16(case((1, 32, 7, 7), 24, 3, 1, 1, narrow="xw")),
        case((1, 3, 13, 12), 16, 5, 2, 2, narrow="xw"),
        case((1, 3, 9, 8), 16, 3, 1, 1, narrow="xw"),
        case((1, 20, 9, 8), 16, 3, 1, 1, narrow="xw", group=2),
    ]


def copied_first() -> list[Case]:
    """Few channels, odd ones, channels-first images, more taps than a mask has bits."""
    return [
        case((1, 3, 16, 15), 24, 7, 2, 3),
        case((2, 1, 12, 11), 16, 5, 1, 2),
        case((1, 12, 7, 6), 20, 3, 1, 1),
        case((1, 10, 7, 6), 12, 3, 1, 1, group=2),
        case((2, 16, 6, 7), 18, 3, 2, 1, keep_first=("x",)),
        case((1, 3, 8, 8), 16, 4, 4, keep_first=("x",)),
        case((1, 8, 9, 8), 10, 7, 1, 3),
        case((1, 4, 40), 10, 9, 1, 4, 2),
    ]


def of_other_forms() -> list[Case]:
    return [
        joined(case((1, 16, 5, 6), 20, 3, 1, 1)),
        joined(case((1, 16, 5, 6), 19, 3, 1, 1)),
        of_several_results(case((2, 8, 6, 5), 14, 3, 1, 1)),
        case((1, 8, 6, 6), 16, 3, 1, 1, narrow="r"),
    ]


def as_truths(made: Case) -> Case:
    """Whether results are not 0."""
    *body, tail = made.group.ops
    (before,), (out,) = tail.inputs, tail.outputs
    types = {name: replace(made.group.types[name], dtype="bool") for name in (before, out)}
    types = {**made.group.types, ".truth": types[before], out: types[out]}
    ops = (*body, Op("Cast", (before,), (".truth",), {"to": 9}), replace(tail, inputs=(".truth",)))
    return replace(made, group=replace(made.group, ops=ops, types=types), expected=[made.expected[0] != 0])


def depthwise() -> list[Case]:
    """Vectors of one, two, four and eight channels, strips at edges, signals and volumes, truth values."""
    how: dict[str, Any] = {"template": "gpu_depthwise"}
    return [
        replace(one, **how)
        for one in (
            case((2, 16, 7, 6), 16, 3, 1, 1, group=16),
            case((1, 6, 9, 11), 6, 5, 2, 2, group=6),
            case((1, 5, 8, 7), 5, 3, 1, 2, 2, group=5),
            case((1, 12, 3, 2), 12, 3, 1, 1, group=12),
            case((1, 24, 6, 9), 24, 3, 2, 1, group=24, narrow="xw"),
            case((1, 4, 6, 9), 4, 3, 1, 1, group=4, narrow="xwry"),
            case((2, 8, 30), 8, 7, 1, 3, group=8),
            case((1, 4, 5, 4, 6), 4, (3, 2, 2), (1, 1, 2), 1, group=4),
            joined(case((1, 8, 5, 6), 8, 3, 1, 1, group=8)),
            as_truths(case((1, 8, 5, 6), 8, 3, 1, 1, group=8)),
        )
    ]


@pytest.mark.parametrize("cases", [in_place, narrow, copied_first, of_other_forms, depthwise])
def test_convolutions(cases: Callable[[], list[Case]], small_tiles: None, tmp_path: Path) -> None:
    check_in_turn(cases(), tmp_path)


def no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tap is read, also one beyond the image."""
    monkeypatch.setattr(gpu_window_tiles._Windows, "_mask", lambda self, corner: tirx.const(0xFFFFFFFF, "uint32"))


def taps_of_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed with rows and columns of windows exchanged."""
    pack = PackTaps.__call__
    monkeypatch.setattr(PackTaps, "__call__", lambda self, array: pack(self, np.ascontiguousarray(array.swapaxes(2, 3))))


def no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)


def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "wait_for_copies", lambda left: tirx.const(0, "int32"))


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_padding, "Not equal to tolerance"),
        (taps_of_another_order, "Not equal to tolerance"),
        (no_barrier, "with no barrier between"),
        (no_wait, "reads what a copy under way writes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None],
    fault: str,
    small_tiles: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault):
        check([case((1, 64, 6, 6), 16, 3, 1, 1, narrow="xw")], tmp_path)


def test_packed_taps_are_what_windows_multiply() -> None:
    """Joined taps of a row are neighbours, each with its channels and zeros; others begin at multiples of 8."""
    weights = np.arange(5 * 3 * 2 * 3, dtype=np.float32).reshape(5, 3, 2, 3) + 1
    for joins, run in ((True, 16), (False, 8)):
        pack = PackTaps(weights.shape, 1, 4 if joins else run, run, joins, 4)
        packed = pack(weights)
        kind = pack.packed_type(TensorType(weights.shape, "float32"))
        assert packed.shape == kind.shape == (1, 2, 2 * run if joins else 6 * run, 4)
        for out, channel, y, x in ((0, 0, 0, 0), (4, 2, 1, 2), (3, 1, 0, 1)):
            k = y * run + x * 4 + channel if joins else (y * 3 + x) * run + channel
            assert packed[0, out // 4, k, out % 4] == weights[out, channel, y, x]
        assert np.count_nonzero(packed) == weights.size


def test_which_images_are_read_in_place() -> None:
    """Channels that fill chunks and taps that a mask has bits for; a 3-channel stem has the taps of a row as one of k."""
    target = Target("cuda", "sm_90")
    kinds = {
        ((1, 64, 9, 9), 3): None,
        ((1, 8, 20, 20), 7): (False, 8),
        ((1, 12, 9, 9), 3): (False, 16),
        ((1, 3, 9, 9), 3): (True, 4),
    }
    for (shape, kernel), expected in kinds.items():
        form = channels_last_form(case(shape, 16, kernel, 1, kernel // 2).group)
        assert not isinstance(form, Refusal)
        kernel_of = convolution_mma_gpu.MmaConvolution(form, target)
        copied = kernel_of.copied
        assert (copied and (copied.joins, copied.pitch)) == expected
        assert isinstance(kernel_of.windows, ImageWindows)


def test_it_takes_what_the_matrix_unit_multiplies() -> None:
    depthwise_one = case((1, 8, 6, 6), 8, 3, 1, 1, group=8).group
    plain = case((1, 8, 6, 6), 8, 3, 1, 1)
    for group, target, reason in (
        (plain.group, Target("cuda", "sm_75"), "cuda:sm_75 has no mma.sync"),
        (plain.group, Target("rocm", "gfx1030"), "rocm:gfx1030 has no v_mfma"),
        (plain.group, Target("rocm", "gfx1100"), "multiplies no float32"),
        (depthwise_one, Target("cuda", "sm_90"), "one channel a group"),
        (replace(plain.group, constants=frozenset("b")), Target("cuda", "sm_90"), "its weights are not constant"),
        (case((0, 8, 6, 6), 8, 3, 1, 1).group, Target("cuda", "sm_90"), "nothing to multiply"),
    ):
        refused = convolution_mma_gpu.plan(group, target)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason
