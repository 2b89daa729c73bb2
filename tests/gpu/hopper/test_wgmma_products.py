"""Products by warpgroups, simulated: every operand and edge, many tiles a block, exact to the format; faults that are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.kernels.codegen import ptx_hopper
from prefuse.kernels.cost.gpu_product import ProductSize, tiled_products
from prefuse.kernels.cost.gpu_warpgroup_product import WarpgroupTile, part_clocks, warpgroup_ways
from prefuse.kernels.linalg import matmul_mma_gpu, matmul_wgmma_gpu
from prefuse.kernels.microkernels.gpu_tile_copies import Tile
from prefuse.kernels.template.contract import Candidate, Refusal
from prefuse.runtime.hardware.gpu import GpuMachine, gpu_machine
from prefuse.runtime.target import Target
from tvm import tirx

from ...kernels.harness import Case, operator
from ..simulator import CUDA, SimulatedFaultError, check, check_in_turn
from ..test_mma_products import numbers, product

SMALL = "64x64x64*3"
TEMPLATE = "gpu_wgmma_matmul"


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper of two multiprocessors with room for few stages, so that a block has several tiles, and goes around the ring."""

    def machine(level: str) -> GpuMachine:
        return replace(gpu_machine(level), multiprocessors=2, block_bytes=50 << 10)

    monkeypatch.setattr(matmul_mma_gpu, "gpu_machine", machine)


def by_warpgroups(case: Case, tile: str = SMALL) -> Case:
    configuration = {"template": TEMPLATE, "tile": tile}
    return replace(case, group=replace(case.group, configuration=configuration), template=TEMPLATE)


def of_any_size() -> list[Case]:
    """m of one, odd and beyond a tile; n and k of odd numbers where the operand is a constant, else multiples of eight."""
    sizes = ((1, 8, 8), (70, 72, 200), (130, 136, 72))
    ragged = ((1, 1, 8), (65, 131, 136), (3, 70, 64))
    return [
        by_warpgroups(product(numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype), constant=constant))
        for constant, some in ((False, sizes), (True, ragged))
        for (m, n, k), dtype in zip(some, ("bfloat16", "float16", "bfloat16"), strict=True)
    ]


def transposed() -> list[Case]:
    m, n, k = 72, 80, 136
    cases = []
    for left, right, dtype, constant in ((0, 1, "bfloat16", False), (1, 0, "float16", False), (1, 1, "bfloat16", True)):
        a, b = (k, m) if left else (m, k), (n, k) if right else (k, n)
        operands = numbers(*a, dtype=dtype), numbers(*b, dtype=dtype)
        cases.append(by_warpgroups(product(*operands, transA=left, transB=right, constant=constant)))
    return cases


def batched() -> list[Case]:
    return [
        by_warpgroups(product(numbers(2, 3, 9, 72, dtype="bfloat16"), numbers(2, 1, 72, 24, dtype="bfloat16"))),
        by_warpgroups(product(numbers(3, 66, 16, dtype="float16"), numbers(3, 16, 10, dtype="float16"), constant=True)),
    ]


def of_all_tiles() -> list[Case]:
    """Both consumers, every width, and k in pieces; what follows the product, where sums are stored in pairs and one by one."""
    operands = numbers(130, 264, dtype="bfloat16"), numbers(264, 200, dtype="bfloat16")
    tiles = ("128x64x64*2", "64x128x64*2", "64x16x64*4", "64x64x64*3 in 2", "64x32x64*4 in 3")
    return [by_warpgroups(product(*operands, constant=number % 2 == 0), tile) for number, tile in enumerate(tiles)]


def followed_by_more() -> list[Case]:
    """Scales and a bias, where sums are stored in pairs, and one by one."""
    cases = []
    for n in (34, 33):
        a, b, c = numbers(19, 40, dtype="float16"), numbers(n, 40, dtype="float16"), numbers(n, dtype="float16")
        expected = 0.5 * a.astype(np.float64) @ b.T.astype(np.float64) + 2 * c.astype(np.float64)
        rounded = [expected.astype(np.float16)]
        case = operator("Gemm", a, b, c, expected=rounded, transB=1, alpha=0.5, beta=2.0, rtol=2e-3, atol=4e-3)
        cases.append(by_warpgroups(replace(case, group=replace(case.group, constants=frozenset(["x1"])))))
    return cases


@pytest.mark.parametrize("cases", [of_any_size, transposed, batched, of_all_tiles, followed_by_more])
def test_products(cases: Callable[[], list[Case]], small_machine: None, tmp_path: Path) -> None:
    check_in_turn(cases(), tmp_path)


def nothing(*_: object) -> object:
    return tirx.const(0, "int32")


def no_fence_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_hopper, "fence_warpgroup", nothing)


def no_fence_of_mbarriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_hopper, "fence_mbarriers", nothing)


def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_hopper, "wait", nothing)


def fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of A alone are waited for."""
    arrive = ptx_hopper.arrive_and_expect
    monkeypatch.setattr(ptx_hopper, "arrive_and_expect", lambda mbarrier, size_bytes: arrive(mbarrier, size_bytes // 2))


def more_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive = ptx_hopper.arrive_and_expect
    monkeypatch.setattr(ptx_hopper, "arrive_and_expect", lambda mbarrier, size_bytes: arrive(mbarrier, size_bytes + 16))


def stage_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one group of products more is under way."""
    wait = ptx_hopper.wait_for_products
    monkeypatch.setattr(ptx_hopper, "wait_for_products", lambda left: wait(left + 1))


def wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second 16 of k are taken for the third."""
    step = Tile.step
    monkeypatch.setattr(Tile, "step", lambda self, number: step(self, min(number + number % 2, 3)))


def wrong_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    described = ptx_hopper.descriptor
    monkeypatch.setattr(ptx_hopper, "descriptor", lambda at, leading, stride: described(at, leading=leading, stride=stride // 2))


READS_EARLY = "wgmma reads what (a copy under way writes|nobody wrote|is not known to be written)"


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_fence_of_products, "wgmma behind accesses of its registers, with no wgmma.fence between"),
        (no_fence_of_mbarriers, "a copy completes on an mbarrier whose initialisation is not fenced"),
        (no_waits, f"{READS_EARLY}|overwrites what|more arrivals"),
        (fewer_bytes, f"{READS_EARLY}|waits for ever"),
        (more_bytes, "waits for ever at an mbarrier"),
        (stage_freed_early, "overwrites what (the matrix unit still reads|another thread read)"),
        (wrong_step, "Not equal to tolerance"),
        (wrong_distance, "Not equal to tolerance"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], fault: str, small_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = by_warpgroups(product(numbers(64, 64 * 5, dtype="bfloat16"), numbers(64 * 5, 64, dtype="bfloat16")))
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault) as found:
        check([case], tmp_path)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


def test_it_takes_what_copies_can_bring() -> None:
    half = product(numbers(64, 64, dtype="bfloat16"), numbers(64, 64, dtype="bfloat16")).group
    for group, target, reason in (
        (half, Target("cuda", "sm_80"), "cuda:sm_80 has no wgmma"),
        (half, Target("cuda", "sm_100"), "cuda:sm_100 has no wgmma"),
        (product(numbers(8, 8), numbers(8, 8)).group, CUDA, "sums of several"),
        (product(numbers(8, 9, dtype="float16"), numbers(9, 8, dtype="float16")).group, CUDA, "x0 has no rows of whole 16 bytes"),
    ):
        refused = matmul_wgmma_gpu.plan(group, target)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason
    assert isinstance(matmul_wgmma_gpu.plan(half, CUDA), Candidate)


@pytest.mark.parametrize(
    ("size", "share"),
    [
        (ProductSize(1, 4096, 4096, 4096), 0.85),
        (ProductSize(1, 8192, 8192, 1024), 0.75),
        (ProductSize(1, 64 * 128, 3072, 768), 0.6),
        (ProductSize(1, 64 * 128, 768, 3072), 0.6),
    ],
)
def test_predicted_share_of_the_peak(size: ProductSize, share: float) -> None:
    """Of the dense rate; faster than with operands in registers."""
    machine = gpu_machine("sm_90")
    best = warpgroup_ways(size, machine)[0]
    assert size.flops / best.clocks / (machine.warpgroup_flops * machine.multiprocessors) > share
    assert best.clocks < tiled_products(size, machine)[0].clocks


@pytest.mark.parametrize(("n", "k"), [(768, 768), (2304, 768), (3072, 768), (768, 3072)])
def test_few_rows_need_no_second_grid(n: int, k: int) -> None:
    """Those of a BERT of 128 tokens: narrow tiles are as fast as pieces of k, and one launch. Where the second operand lies along
    lines there are none."""
    size, machine = ProductSize(1, 128, n, k), gpu_machine("sm_90")
    assert warpgroup_ways(size, machine)[0].splits == 1
    assert all(way.tile.columns >= 64 for way in warpgroup_ways(size, machine, 64))


def test_units_of_the_widest_tile() -> None:
    """The matrix unit takes as long as shared memory: two groups of 64 rows read 256 columns each."""
    clocks = part_clocks(WarpgroupTile(128, 256, 4), gpu_machine("sm_90"))
    assert clocks["matrix unit"] == clocks["shared memory"] == 1024
    assert max(clocks.values()) == 1024
