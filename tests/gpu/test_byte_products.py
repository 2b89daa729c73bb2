"""Products of bytes on the matrix units, simulated by the instructions' documented layouts: exact; faults that must be found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.kernels.codegen import ptx
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.cost.gpu_product import ProductSize, tiled_products
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.linalg import matmul_mma_gpu
from prefuse.kernels.microkernels import gpu_mfma
from prefuse.kernels.registry import candidates
from prefuse.kernels.template.contract import Refusal
from prefuse.kernels.template.values import read_narrow
from prefuse.runtime.hardware.gpu import gpu_machine
from prefuse.runtime.target import Target

from ..kernels.convolution.channels_last_cases import channels_last
from ..kernels.formats.test_int8 import case_of, convolution_case, extremes
from ..kernels.harness import Case, build
from ..sample import dealt, every
from .simulator import CUDA, ROCM, SimulatedFaultError, check

BOTH = pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
KINDS = (("uint8", None), ("uint8", 128), ("uint8", 255), ("int8", None), ("int8", -128))
SMALL = {"cuda": ((16, 64, 16, 16), (64, 64, 32, 32)), "rocm": ((32, 64, 16, 32), (64, 64, 32, 32))}


def product(a: np.ndarray, b: np.ndarray, zero: int | None = None, tile: str = "") -> Case:
    """A MatMul of bytes, less a zero point, by constant ones, on the matrix unit."""
    case = case_of("MatMul", a, b, zero, (a.astype(np.int64) - (zero or 0)) @ b.astype(np.int64))
    configuration = {TEMPLATE: "gpu_mma_matmul", **({"tile": tile} if tile else {})}
    return replace(case, group=replace(case.group, configuration=configuration), template="gpu_mma_matmul")


def of_kind(dtype: str, zero: int | None) -> list[Case]:
    """m, n and k of one, odd, and beyond tiles; rows that 16 bytes divide, and such as they do not; batches."""
    sizes = ((5, 16, 17), (33, 77, 50), (1, 3, 9), (3, 1, 1), (7, 1030, 40), (40, 256, 66))
    cases = [product(extremes(dtype, m, k), extremes("int8", k, n), zero) for m, k, n in sizes]
    return [*cases, product(extremes(dtype, 2, 3, 6, 16), extremes("int8", 2, 1, 16, 20), zero)]


@BOTH
@pytest.mark.parametrize(("dtype", "zero"), every(2, KINDS))
def test_products(dtype: str, zero: int | None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks of 16 x 16 sums, and of 32 x 32, which AMD has."""
    cases = of_kind(dtype, zero)
    shapes = SMALL[target.kind]
    for number, shape in enumerate(shapes):
        monkeypatch.setattr(gpu_product, "_SHAPES" if target.kind == "cuda" else "_WAVEFRONT_SHAPES", (shape,))
        folder = tmp_path / str(number)
        folder.mkdir()
        check(dealt(cases, [case.label for case in cases], shape, list(shapes)), folder, target)


@BOTH
def test_every_tile_that_is_offered(target: Target, tmp_path: Path) -> None:
    size = ProductSize(1, 300, 300, 300, item_bytes=1)
    ways = {str(way.tile): way.tile for way in tiled_products(size, gpu_machine(target.level)) if way.splits == 1}
    assert len(ways) >= 9
    small = [(name, tile) for name, tile in ways.items() if tile.rows * tile.columns <= 128 * 64]
    for name, tile in every(4, small):
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        a, b = extremes("uint8", tile.rows + 3, 300), extremes("int8", 300, tile.columns + 5)
        check([product(a, b, 7, name)], folder, target)


@BOTH
def test_k_is_split_and_sums_stay_whole(target: Target, tmp_path: Path) -> None:
    """Each piece of k leaves sums of integers, which another grid adds before the zero point is told."""
    case = product(extremes("uint8", 1, 6000), extremes("int8", 6000, 70), 200)
    assert len(build(case, target).function.launches) == 2
    check([case], tmp_path, target)


def convolutions(dtype: str, zero: int | None) -> list[Case]:
    """Channels that fill chunks and such as do not, padded and not, strided, grouped, and an image that lies channels-first."""
    shapes = ((16, 3, 1, 1, 1), (32, 1, 0, 2, 1), (32, 3, 2, 1, 2), (3, 7, 3, 2, 1), (20, 3, 1, 2, 2))
    cases = [channels_last(convolution_case(dtype, zero, *shape), template="gpu_mma_convolution") for shape in shapes]
    first = convolution_case(dtype, zero, 3, 5, 2, 1, 1)
    return [*cases, channels_last(first, template="gpu_mma_convolution", keep_first=("a",))]


@BOTH
@pytest.mark.parametrize(("dtype", "zero"), every(2, KINDS))
def test_convolutions(dtype: str, zero: int | None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is the zero point: of an image that has one a copy is multiplied, of which padding is a part."""
    monkeypatch.setattr(gpu_product, "_SHAPES" if target.kind == "cuda" else "_WAVEFRONT_SHAPES", SMALL[target.kind][:1])
    cases = convolutions(dtype, zero)
    assert len(build(cases[0], target).function.launches) == (1 if zero is None else 2)
    check(cases, tmp_path, target)


def deep() -> Case:
    """Nine parts of k in one block, more than there are stages."""
    return product(extremes("uint8", 64, 128 * 9), extremes("int8", 128 * 9, 64), 3)


def wrong_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third fragments of A change places."""
    multiply, order = ptx.multiply_bytes, (0, 2, 1, 3)
    monkeypatch.setattr(ptx, "multiply_bytes", lambda sums, a, b, kind: multiply(sums, [a[i] for i in order], b, kind))


def signed_for_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = ptx.multiply_bytes
    monkeypatch.setattr(ptx, "multiply_bytes", lambda sums, a, b, kind: multiply(sums, a, b, "s8"))


def no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_product, "_WAVEFRONT_SHAPES", (SMALL["rocm"][1],))
    monkeypatch.setattr("prefuse.kernels.codegen.gpu_builder.GpuBuilder.barrier", lambda self: None)


def signs_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_mfma, "_UPPER_BITS", 0)


def wrong_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk of B the second half comes first."""
    take = gpu_mfma.LaneFragments.numbers

    def taken(self: gpu_mfma.LaneFragments, slot: int, block: int, part: int) -> object:
        return take(self, slot, block, 1 - part if self._registers.name.startswith("b") else part)

    monkeypatch.setattr(gpu_mfma.LaneFragments, "numbers", taken)


@pytest.mark.parametrize(
    ("mutate", "target", "fault"),
    [
        (wrong_fragments, CUDA, "Not equal to tolerance"),
        (signed_for_unsigned, CUDA, "Not equal to tolerance"),
        (no_barrier, CUDA, "with no barrier between"),
        (no_barrier, ROCM, "with no barrier between|what nobody wrote"),
        (signs_not_turned, ROCM, "Not equal to tolerance"),
        (wrong_half, ROCM, "Not equal to tolerance"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_faults_are_found(mutate: object, target: Target, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(mutate)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault) as found:
        check([deep()], tmp_path, target)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


def test_what_it_does_not_multiply() -> None:
    case = product(extremes("uint8", 4, 16), extremes("int8", 16, 8))
    computed = replace(case.group, constants=frozenset())
    for group, target, reason in (
        (case.group, Target("rocm", "gfx90a"), "has no v_mfma of eight bytes a lane"),
        (computed, CUDA, "by constant int8 only"),
    ):
        refused = matmul_mma_gpu.plan(read_narrow(group), target)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason


@pytest.mark.parametrize("target", [Target("cuda", "sm_80"), CUDA, ROCM], ids=str)
def test_it_is_the_first_choice(target: Target) -> None:
    """Also on Hopper, whose warpgroups multiply no bytes here."""
    large = product(extremes("uint8", 256, 512), extremes("int8", 512, 256), 3)
    found, refused = candidates(replace(large.group, configuration={}), target)
    assert found[0][0] == "gpu_mma_matmul"
    assert ("multiplies no bytes" if target == CUDA else "has no wgmma") in refused["gpu_wgmma_matmul"]
