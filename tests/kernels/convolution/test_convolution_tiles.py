"""Convolutions on the tile unit: strides in phases, dilations, ragged channels and rows; against torch in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.convolution import convolution_tiles, implicit_gemm_amx
from prefuse.kernels.convolution.amx_input import TiledImage
from prefuse.kernels.cost import amx as tile_costs
from prefuse.kernels.cost.amx import BlockWalk
from prefuse.kernels.microkernels import amx_blocks
from prefuse.kernels.registry import build_kernel, candidates
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import AMX_EMULATED
from prefuse.tests.sample import dealt, every

from ..expressions.test_prologues import computed, exact, laid_last, normal
from ..harness import Case, check, run, target_of, type_of
from ..microkernels.amx_emulator import AMX, emulator, running_amx
from .channels_last_cases import convolution, joined, transposed

__all__ = ["emulator"]
UNITS: dict[Precision, float] = {"float32": 1e-6, "float32-fast": 1.2e-5, "bfloat16": 6e-3}


@pytest.fixture(autouse=True)
def tiles_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small convolutions, too, for which vectors are faster."""
    monkeypatch.setattr(implicit_gemm_amx, "tile_convolution_cycles", lambda *sizes, **how: -1e9)  # less than bytes take


def tiled(case: Case, precision: Precision = "float32-fast") -> Case:
    """The case, which must be computed on tiles."""
    is_transposed = any(op.op_type == "ConvTranspose" for op in case.group.ops)
    template = "transposed_convolution_tiles" if is_transposed else "convolution_tiles"
    atol = UNITS[precision] * float(np.abs(case.expected[0]).max(initial=0))
    group = replace(case.group, precision=precision)
    return replace(case, group=group, template=template, rtol=0.0, atol=atol, got=[])


def convolutions() -> list[Case]:
    return [
        convolution((1, 40, 7, 9), 33, 3, 1, 1),
        convolution((2, 20, 9, 8), 18, 3, 2, 1),
        convolution((1, 33, 6, 5), 40, 1),
        convolution((1, 3, 13, 12), 20, (7, 5), (2, 3), (3, 2, 1, 2), keep_first=("x",)),
        convolution((1, 5, 12, 14), 17, 3, (2, 1), 2, (2, 3)),
        convolution((1, 3, 9, 1), 20, 3, (1, 8), (1, 9, 1, 0), keep_first=("x",)),  # of rows that are padding alone
        convolution((3, 64, 7, 7), 64, 1, 2),
        convolution((2, 1, 3, 3), 1, 3),
        convolution((1, 8, 4, 4), 5, 2, 3, (0, 1, 2, 0)),
    ]


def grouped() -> list[Case]:
    """Groups of whole tiles of channels, and of less."""
    return [
        convolution((1, 64, 6, 9), 64, 3, 1, 1, group=2),
        convolution((2, 60, 7, 5), 54, 3, 2, 1, group=3),
        convolution((1, 64, 5, 8), 32, 1, group=2),
    ]


def signals() -> list[Case]:
    return [
        convolution((2, 40, 37), 33, 3, 2),
        convolution((1, 20, 70), 40, 5, 1, (8, 8), 4),
        convolution((1, 48, 33), 48, 8, 1, 4, group=3),
        convolution((1, 3, 50), 33, 10, 5, keep_first=("x",)),
    ]


def volumes() -> list[Case]:
    return [
        convolution((1, 20, 3, 6, 7), 33, 3, 1, 1),
        convolution((2, 3, 5, 9, 8), 17, (3, 5, 4), (1, 2, 2), (1, 2, 1, 1, 0, 2)),
        convolution((1, 33, 5, 5, 7), 5, (2, 1, 3), 2, (2, 0, 1, 0, 0, 1), (3, 1, 2)),
        convolution((2, 64, 2, 3, 3), 70, 1),
    ]


def transposed_cases() -> list[Case]:
    """Kernels as long as their strides, shorter and longer, of one to three dimensions."""
    return [
        transposed((2, 40, 7, 6), 33, 2, 2),
        transposed((1, 33, 4, 5), 20, 3, 2, 1, extra=1),
        transposed((1, 20, 5, 4), 40, 4, 2, 1, keep_first=("x",)),
        transposed((1, 6, 7, 9), 18, 3, (1, 2), 1, (2, 1)),
        transposed((1, 64, 5, 3), 40, 3, 2, 1, group=2),
        transposed((1, 40, 13), 33, 16, 8, 4),
        transposed((2, 33, 3, 2, 5), 20, 2, 2),
        transposed((1, 20, 2, 4, 3), 18, (3, 4, 3), 2, 1),
    ]


def some_of_every_kind() -> Sequence[Case]:
    """A half of them today, the other one tomorrow."""
    return every(2, [*convolutions(), grouped()[1], signals()[1], volumes()[1], *transposed_cases()[:2]])


@pytest.mark.parametrize("precision", UNITS)
@pytest.mark.parametrize("cases", [convolutions, grouped, signals, volumes, transposed_cases])
def test_convolutions(cases: Callable[[], list[Case]], precision: Precision) -> None:
    """Each in one precision a day, in the next one tomorrow; behind the last one it rests for a day."""
    chosen = dealt(cases(), [case.label for case in cases()], precision, (*UNITS, "rest"))
    check([tiled(case, precision) for case in chosen], target_of(AMX_EMULATED))


def test_blocks_in_a_pipeline_have_the_bits_of_blocks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for least in (10**6, 0):
        monkeypatch.setattr(amx_blocks, "LEAST_STEPS", least)
        check(cases := [tiled(case) for case in some_of_every_kind()], target_of(AMX_EMULATED))
        results.append(cases)
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one.got[0], two.got[0], one.label)


def test_bfloat16() -> None:
    """Rounded operands: only the additions round. A half of the cases today, the other one tomorrow."""
    cases = []
    in_place = [convolution((2, 64, 5, 7), 40, 1), convolution((1, 32, 8, 4), 33, 1), transposed((2, 64, 2, 5, 7), 40, 2, 2)]
    in_place += [convolution((2, 64, 6, 9), 40, 3), convolution((1, 32, 3, 6, 7), 33, (2, 3, 3)), convolution((2, 64, 45), 40, 5)]
    in_place += [transposed((1, 32, 8, 9), 33, 3, 1, 2)]
    others = [grouped()[0], signals()[0], volumes()[1], *transposed_cases()[:2]]
    for case in every(2, [*convolutions()[:2], joined(convolutions()[2]), joined(transposed_cases()[0]), *in_place, *others]):
        arrays = {name: array.astype(ml_dtypes.bfloat16) if name in "xw" else array for name, array in case.arrays.items()}
        rounded = {name: array.astype(np.float32) for name, array in arrays.items()}
        plain = replace(case, arrays=rounded, template="", got=[])
        run([plain], target_of("avx512"))
        types = dict(case.group.types) | {name: type_of(arrays[name]) for name in "xw"}
        if ".x.first" in types:
            types[".x.first"] = replace(types[".x.first"], dtype="bfloat16")
        cases.append(tiled(replace(case, arrays=arrays, expected=plain.got, group=replace(case.group, types=types)), "bfloat16"))
    check([replace(case, atol=case.atol / 1000) for case in cases], target_of(AMX_EMULATED))


def test_results_are_joined_with_others() -> None:
    check([tiled(joined(case)) for case in (convolutions()[0], transposed_cases()[0])], target_of(AMX_EMULATED))


def test_an_image_that_the_kernel_computes() -> None:
    raw, scale = normal(2, 5, 9, 18), normal(5, 1, 1)
    plain = exact("Conv", computed(raw, scale), normal(7, 5, 3, 3), pads=[1, 1, 1, 1])
    case = laid_last(plain, raw, scale, "convolution_tiles")
    check([tiled(replace(case, group=replace(case.group, constants=case.group.constants | {"x1"})))], target_of(AMX_EMULATED))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_bands_of_rows_have_the_bits_of_whole_images(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that divide the image and do not, several images, phases of strides, products of different heights, zero points."""
    cases = [*convolutions()[:5], grouped()[1], signals()[1], transposed_cases()[1], joined(transposed_cases()[0])]
    check(whole := [tiled(case) for case in every(3 - rows % 2, cases)], target_of(AMX_EMULATED))
    asked = []

    def some(image: TiledImage, *_: object) -> int:
        asked.append(image)
        return rows

    monkeypatch.setattr(implicit_gemm_amx, "band_rows", some)
    check(bands := [replace(case, got=[]) for case in whole], target_of(AMX_EMULATED))
    assert len(asked) == len(bands)
    for one, two in zip(whole, bands, strict=True):
        np.testing.assert_array_equal(one.got[0], two.got[0], one.label)


def test_large_images_are_copied_in_bands() -> None:
    """Beside weights that stay in L2; small images, wide rows and large weights leave no room."""

    def rows(height: int, width: int, images: int = 1, weights_bytes: int = 1 << 17) -> int:
        source = TensorType((images, 64, height - 2, width - 2), "float32")
        image = TiledImage(source, (1, 1, 1), (0, 1, 1), (1, 1, 1), (1, height, width), terms=3)
        return implicit_gemm_amx.band_rows(image, height - 2, weights_bytes, AMX)

    def room(found: int, width: int) -> int:
        return (found + 2) * width * 64 * 3 * 2 + (1 << 17)

    l2 = AMX.machine.l2.size_bytes
    assert rows(30, 30) == rows(60, 150) == 0
    assert 0 < room(rows(400, 150), 150) <= 0.75 * l2
    assert rows(400, 150, weights_bytes=l2) == rows(400, 4000) == 0


@pytest.mark.parametrize("by_panel", [False, True])
def test_orders_of_blocks(by_panel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights or positions outermost; fewer blocks a panel than it has lines a step, and more."""
    monkeypatch.setattr(BlockWalk, "goes_by_panel", lambda *_: by_panel)
    cases = convolution((2, 40, 9, 9), 70, 3, 1, 1), transposed((2, 40, 3, 5, 4), 70, 2, 2), convolution((1, 64, 70, 33), 40, 1)
    check([tiled(case) for case in cases], target_of(AMX_EMULATED))


def test_positions_of_2_kib_are_set_apart() -> None:
    """512 channels of two terms: rows of tiles would fall on two sets of the first cache."""
    check([tiled(convolution((1, 512, 3, 4), 20, 1))], target_of(AMX_EMULATED))


def test_infinities_stay_in_their_windows() -> None:
    case = tiled(convolution((1, 6, 9, 10), 7, 3, 1, 1))
    clean = replace(case, got=[])
    odd = dict(case.arrays)
    odd["x"] = odd["x"].copy()
    odd["x"][0, 4, 5, 2] = np.inf
    case = replace(case, arrays=odd)
    run([case, clean], target_of(AMX_EMULATED))
    window = np.zeros(clean.got[0].shape, bool)
    window[0, 3:6, 4:7] = True
    np.testing.assert_allclose(case.got[0][~window], clean.got[0][~window], 0.0, case.atol)
    assert not np.isnan(case.got[0]).any()
    assert set(np.unique(case.got[0][window])) == {0.0, np.inf}  # after Relu


def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None) -> None:
    cases = [tiled(case) for case in some_of_every_kind()]
    run(cases, target_of(AMX_EMULATED))
    loops = [case.got[0] for case in cases]
    with running_amx(emulator) as counts:
        check(cases, AMX)
    assert counts is None or counts["tdpbf16ps"] > counts["tileloadd"] > counts["tilezero"] == counts["tilestored"] > 0
    for case, expected in zip(cases, loops, strict=True):
        np.testing.assert_array_equal(case.got[0], expected, case.label)


def test_choice_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit_gemm_amx, "tile_convolution_cycles", tile_costs.tile_convolution_cycles)

    def template(case: Case, precision: Precision = "float32-fast") -> str:
        built = build_kernel(replace(case.group, precision=precision), AMX)
        assert isinstance(built, BuiltKernel)
        return built.template

    large = convolution((1, 128, 28, 28), 128, 3, 1, 1)
    assert template(convolution((1, 256, 28, 28), 128, 1)) == template(large, "bfloat16") == "convolution_tiles"
    assert template(large) == template(convolution((1, 256, 14, 14), 256, 3, 1, 1)) == "convolution_tiles"
    rivals, _ = candidates(replace(large.group, precision="float32-fast"), AMX)
    assert [name for name, _ in rivals] == ["convolution_tiles", "winograd_channels_last", "convolution_channels_last"]
    first = convolution((1, 128, 28, 28), 128, 3, 1, 1, keep_first=("x",))  # which Winograd's tiles do not read
    assert template(first) == "convolution_tiles"
    assert template(convolution((1, 3, 56, 56), 16, 3, 1, 1)) == "convolution_channels_last"  # 9 of 32 values of k
    assert template(convolution((1, 3, 56, 56), 64, 7, 2, 3)) == "convolution_tiles"  # 21 of them
    assert template(convolution((1, 3, 224, 224), 256, 16, 16)) == "convolution_tiles"  # 48 of 64: an image in patches
    for case, reason in (
        (convolution((1, 64, 14, 14), 64, 3, 1, 1, dtype="float64"), "no convolution of float64 and float64 as float64"),
        (replace(large, group=replace(large.group, constants=frozenset("bs"))), "weights that change"),
    ):
        refusal = convolution_tiles.plan(case.group, AMX)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
