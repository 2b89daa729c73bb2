"""Products on AMD's matrix unit, simulated: every operand and edge, exact to the format; and faults that must be found."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu import rocm_compiler
from prefuse.kernels.codegen import amdgcn
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.cost.gpu_product import MmaTile, ProductSize, stage_bytes, tiled_products
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.linalg import matmul_mma_gpu
from prefuse.kernels.microkernels import gpu_pipelined_product
from prefuse.kernels.microkernels.gpu_mfma import LaneFragments
from prefuse.kernels.microkernels.gpu_part_layout import PackParts, PartLayout
from prefuse.kernels.microkernels.packing import PackPanels
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.hardware.gpu import gpu_machine
from prefuse.runtime.plan import TensorType
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

from ...kernels.harness import Case, build
from ...sample import dealt, every
from ..simulator import ROCM, SimulatedFaultError, check, compile_simulation, run_case
from ..test_mma_products import batched, followed_by_more, numbers, of_any_size, product, transposed

FAMILIES = (of_any_size, transposed, batched, followed_by_more)
BY_16, BY_32 = (32, 64, 16, 32), (64, 64, 32, 32)  # tiles whose warps have sums in blocks of 16 x 16, and of 32 x 32


def by_unit(cases: Sequence[Case]) -> list[Case]:
    """The cases on the matrix unit, also where another template would be as fast."""
    wanted = {TEMPLATE: "gpu_mma_matmul"}
    return [replace(one, group=replace(one.group, configuration={**one.group.configuration, **wanted})) for one in cases]


@pytest.mark.parametrize("shape", [BY_16, BY_32], ids=str)
@pytest.mark.parametrize("cases", FAMILIES)
def test_products(
    cases: Callable[[], list[Case]], shape: tuple[int, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case by one of the shapes today, by the other one tomorrow."""
    monkeypatch.setattr(gpu_product, "_WAVEFRONT_SHAPES", (shape,))
    today = dealt(cases(), [case.label for case in cases()], shape, [BY_16, BY_32])
    check(by_unit(today), tmp_path, ROCM)


def mixed() -> list[Case]:
    """A float32 by bfloat16, exact and rounded; several parts of k, split among blocks."""
    narrow = numbers(70, 40, dtype="bfloat16")
    wide = numbers(37, 70)
    exact = wide.astype(np.float64) @ narrow.astype(np.float64)
    case = product(wide, narrow.astype(np.float32))
    types = {**case.group.types, "x1": TensorType(narrow.shape, "bfloat16")}
    operands = [narrow if array.shape == narrow.shape else array for array in case.arrays.values()]
    arrays = dict(zip(case.arrays, operands, strict=True))
    one = replace(case, group=replace(case.group, types=types), arrays=arrays)
    assert case.expected[0].shape == exact.shape
    return [one, replace(one, group=replace(one.group, constants=frozenset(["x1"])))]


def test_operands_of_two_types(tmp_path: Path) -> None:
    check(by_unit(mixed()), tmp_path, ROCM)


def test_precisions(tmp_path: Path) -> None:
    """float32 is multiplied as it is, unless a precision allows to round it to bfloat16."""
    a, b = numbers(20, 300), numbers(300, 66)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    promises: tuple[tuple[Precision, float], ...] = (("float32", 4e-7), ("float32-fast", 4e-7), ("bfloat16", 4e-3))
    cases = by_unit([product(a, b, precision=precision, error=error) for precision, error in promises])
    check(cases, tmp_path, ROCM)
    errors = [float(np.linalg.norm(case.got[0] - exact) / np.linalg.norm(exact)) for case in cases]
    assert max(errors[:2]) < 3e-7 < 5e-4 < errors[2] < 4e-3


def test_k_is_split_in_order(tmp_path: Path) -> None:
    """One row by many columns, k in several blocks: the same bits in every order of threads."""
    (case,) = by_unit([product(numbers(1, 2000, dtype="bfloat16"), numbers(2000, 70, dtype="bfloat16"), constant=True)])
    assert len(build(case, ROCM).function.launches) == 2
    check([case], tmp_path, ROCM)


@pytest.mark.parametrize(("kind", "bits"), [("float32", 32), ("bfloat16", 16)])
def test_every_tile_that_is_offered(kind: str, bits: int, tmp_path: Path) -> None:
    """By a product of more than one part of k, and more than one tile each way."""
    size = ProductSize(1, 300, 300, 100, item_bytes=bits // 8)
    ways = {str(way.tile): way for way in tiled_products(size, gpu_machine("gfx942")) if way.splits == 1}
    assert len(ways) >= 9
    for name, way in every(3, list(ways.items())):
        m, n = way.tile.rows + 3, way.tile.columns + 5
        if way.tile.rows * way.tile.columns > 128 * 64:
            continue  # their code is the same, and takes long here
        case = product(numbers(m, 100, dtype=kind), numbers(100, n, dtype=kind))
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        check([replace(case, group=replace(case.group, configuration={TEMPLATE: "gpu_mma_matmul", "tile": name}))], folder, ROCM)


BLOCK = {TEMPLATE: "gpu_mma_matmul", "tile": "64x64x64/32x32*2"}


def deep(*, along_k: bool = True) -> Case:
    """Nine parts of k in one block, more than there are stages; B is contiguous along k, or along its columns."""
    b = (64, 64 * 9) if along_k else (64 * 9, 64)
    case = product(numbers(64, 64 * 9, dtype="bfloat16"), numbers(*b, dtype="bfloat16"), transB=int(along_k))
    return replace(case, group=replace(case.group, configuration=BLOCK))


def no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)


def lost_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM's own barrier, which does not wait for what was stored to LDS."""
    monkeypatch.setattr(rocm_compiler, "_with_waiting_barriers", lambda module: module)


def stage_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part more is under way than there is room for."""
    monkeypatch.setattr(gpu_pipelined_product._Block, "ahead", property(lambda self: self.tile.stages))


def rows_not_swizzled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wavefronts read as if rows lay in order."""
    place = LaneFragments._chunk
    monkeypatch.setattr(LaneFragments, "_chunk", lambda self, number: place(self, number ^ self._swizzle))


def wrong_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of each instruction change places."""
    multiply = amdgcn.Mfma.__call__
    monkeypatch.setattr(amdgcn.Mfma, "__call__", lambda self, first, second, sums: multiply(self, second, first, sums))


def wrong_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk of B the second half comes first."""
    take = LaneFragments.numbers

    def taken(self: LaneFragments, slot: int, block: int, part: int) -> object:
        return take(self, slot, block, 1 - part if self._registers.name.startswith("b") else part)

    monkeypatch.setattr(LaneFragments, "numbers", taken)


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_barrier, "with no barrier between|what nobody wrote"),
        (lost_wait, "a barrier that does not wait for accesses of LDS"),
        (stage_freed_early, "another thread"),
        (rows_not_swizzled, "Not equal to tolerance"),
        (wrong_fragments, "Not equal to tolerance"),
        (wrong_half, "Not equal to tolerance"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault) as found:
        check([deep()], tmp_path, ROCM)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


@pytest.mark.parametrize("along_k", [True, False])
def test_no_bank_is_met_twice(along_k: bool, tmp_path: Path) -> None:
    """Of accesses of 16 bytes: what is stored to LDS, and what lanes load of rows along k."""
    case = deep(along_k=along_k)
    kernel = build(case, ROCM)
    library = ctypes.CDLL(str(compile_simulation({"k": kernel.function}, tmp_path, ROCM)))
    library.sim_fault.restype = ctypes.c_char_p
    case.got = run_case(library, "k", case, kernel)
    case.check()
    counts, conflicts = (ctypes.c_double * 7)(), (ctypes.c_double * 7)()
    library.sim_statistics(counts, conflicts)
    loads, stores, instructions = counts[0], counts[2], counts[3]
    assert (conflicts[0], conflicts[2]) == (1.0, 1.0)
    assert instructions == 9 * 64 // 8 * 4  # 8 of k, in each of four wavefronts
    assert stores == 9 * 2 * 64 * 64 // 8
    per_lane = 9 * 4 * (1 if along_k else 4.5)  # chunks, or one and eight numbers
    assert loads == 256 * 2 * per_lane


def test_packed_parts_of_float32() -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16):
        w = numbers(70, 20).astype(dtype)
        layout = PartLayout(16, 32, 1, True, chunk=4)
        pack = PackParts(PackPanels((70, 20), (1, 0), 0, 1, 16), layout)
        packed, kind = pack(w), pack.packed_type(TensorType(w.shape, str(w.dtype)))
        assert (packed.shape, str(packed.dtype)) == (kind.shape, kind.dtype) == ((1, 2, 3, 1, 512), "float32")
        for k, n in ((0, 0), (33, 7), (69, 19), (64, 16)):
            place = layout.place(n % 16, k % 32 // 4) * 4 + k % 4
            assert packed[0, n // 16, k // 32, 0, place] == w[k, n].astype(np.float32)


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_predicted_share_of_the_peak(item_bytes: int) -> None:
    size, machine = ProductSize(1, 4096, 4096, 4096, item_bytes=item_bytes), gpu_machine("gfx942")
    rate = machine.half_flops if item_bytes == 2 else machine.float_flops
    best = tiled_products(size, machine)[0]
    assert size.flops / best.clocks / rate / machine.multiprocessors > 0.7


def test_two_blocks_of_a_compute_unit() -> None:
    """A deep stage where two blocks have room, or beside a flatter one; a tile has four wavefronts at most."""
    machine = gpu_machine("gfx942")
    for size in (ProductSize(1, 4096, 4096, 4096), ProductSize(1, 512, 512, 512, item_bytes=4)):
        tiles = {way.tile for way in tiled_products(size, machine)}
        for tile in tiles:
            used = tile.stages * stage_bytes(tile, size)
            assert tile.threads <= 256
            assert used <= machine.block_bytes
            has_room = 2 * used <= machine.block_bytes
            assert has_room or tile.depth * size.item_bytes == 64 or replace(tile, depth=tile.depth // 2) in tiles
    assert MmaTile(128, 128, 64, 64, 32, 2, 64).threads == 256


def test_it_takes_what_the_matrix_unit_multiplies() -> None:
    plain = product(numbers(8, 8), numbers(8, 8)).group
    refused = matmul_mma_gpu.plan(plain, Target("rocm", "gfx1030"))
    assert isinstance(refused, Refusal)
    assert refused.reason == "rocm:gfx1030 has no v_mfma or v_wmma of bfloat16"
    assert not isinstance(matmul_mma_gpu.plan(plain, Target("rocm", "gfx90a")), Refusal)
