"""Products on the matrix unit, simulated: every operand and edge, exact to the format; and faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.codegen import ptx
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.cost.gpu_product import ProductSize, tiled_products
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import matmul_mma_gpu
from prefuse.kernels.microkernels import gpu_pipelined_product
from prefuse.kernels.microkernels.gpu_mma_sync import FragmentReader
from prefuse.kernels.microkernels.gpu_part_layout import PackParts, PartLayout
from prefuse.kernels.microkernels.packing import PackPanels
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.hardware.gpu import gpu_machine
from prefuse.runtime.plan import TensorType
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target
from tvm import tirx

from ..kernels.harness import Case, followed, operator
from ..kernels.linalg.test_matmul import read_twice
from .simulator import SimulatedFaultError, check, check_in_turn

RNG = np.random.default_rng(11)
TYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SMALL = (16, 64, 16, 16)  # the quickest to simulate


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_product, "_SHAPES", (SMALL,))


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32).astype(TYPES[dtype])


def product(
    a: np.ndarray, b: np.ndarray, *, constant: bool = False, precision: Precision = "float32", error: float = 0.0, **gemm: Any
) -> Case:
    """A MatMul, or with attributes a Gemm; errors are relative to what the sums of sizes are, as float32 sums have them."""
    wide = [array.astype(np.float64) for array in (a, b)]
    if gemm:
        wide = [array.T if gemm.get(name) else array for array, name in zip(wide, ("transA", "transB"), strict=True)]
    expected, size = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    error = error or {"float32": 4e-7, "bfloat16": 4e-3, "float16": 5e-4}[str(a.dtype)]
    promised: dict[str, Any] = {"rtol": error, "atol": float(error * np.median(size)), "template": "gpu_mma_matmul"}
    case = operator("Gemm" if gemm else "MatMul", a, b, expected=[expected.astype(a.dtype)], **promised, **gemm)
    constants = frozenset(["x1"]) if constant else frozenset()
    how = {"template": "gpu_mma_matmul"}
    return replace(case, group=replace(case.group, constants=constants, precision=precision, configuration=how))


def of_any_size() -> list[Case]:
    """m, n and k of one, odd, prime, and beyond tiles in each direction; rows that 16 bytes do not divide."""
    sizes = ((1, 1, 1), (1, 70, 33), (17, 1, 5), (3, 5, 200), (37, 131, 67), (16, 64, 64), (48, 72, 136))
    return [
        product(numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype), constant=(m + n) % 2 == 0)
        for m, n, k in sizes
        for dtype in ("float32", "bfloat16", "float16")
    ]


def transposed() -> list[Case]:
    m, n, k = 24, 72, 56
    kinds = {
        (0, 1, "float32"): False,
        (1, 0, "float32"): False,
        (1, 1, "bfloat16"): False,
        (0, 1, "float16"): False,
        (1, 0, "bfloat16"): True,
        (1, 1, "float32"): True,
    }
    cases = []
    for (left, right, dtype), constant in kinds.items():
        a, b = (k, m) if left else (m, k), (n, k) if right else (k, n)
        operands = numbers(*a, dtype=dtype), numbers(*b, dtype=dtype)
        cases.append(product(*operands, transA=left, transB=right, constant=constant))
    return cases


def batched() -> list[Case]:
    return [
        product(numbers(3, 9, 21), numbers(21, 40), constant=True),
        product(numbers(2, 3, 9, 16, dtype="bfloat16"), numbers(2, 1, 16, 24, dtype="bfloat16")),
        product(numbers(4, 18, 16, dtype="float16"), numbers(4, 16, 10, dtype="float16"), constant=True),
        product(numbers(1, 4, 8), numbers(5, 8, 6)),
    ]


def followed_by_more() -> list[Case]:
    """A bias, a scale and a residual, where sums are stored in pairs, and one by one."""
    cases = [product(numbers(19, 40), numbers(40, n)) for n in (34, 33)]
    biased = operator("Gemm", numbers(30, 20), numbers(18, 20), numbers(18), transB=1, alpha=0.5, beta=2.0, rtol=1e-5, atol=1e-5)
    return [*(followed(case) for case in cases), replace(biased, template="gpu_mma_matmul")]


@pytest.mark.parametrize("cases", [of_any_size, transposed, batched, followed_by_more])
def test_products(cases: Callable[[], list[Case]], small_tiles: None, tmp_path: Path) -> None:
    check_in_turn(cases(), tmp_path)


def test_a_constant_that_the_epilogue_reads_too(small_tiles: None, tmp_path: Path) -> None:
    cases = [read_twice("Gemm"), read_twice(operands="wx"), read_twice(dtype="bfloat16")]
    name = "gpu_mma_matmul"
    check([replace(case, group=replace(case.group, configuration={"template": name}), template=name) for case in cases], tmp_path)


@pytest.mark.parametrize(("rows", "is_packed"), [(150_000, True), (180_000, False)])
def test_packed_constants_are_no_larger_than_indices_reach(rows: int, is_packed: bool) -> None:
    """Three terms of 737 million numbers are more."""
    shapes = {"x": (8, 4096), "w": (rows, 4096), "y": (8, rows)}
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    group = Group((Op("Gemm", ("x", "w"), ("y",), {"transB": 1}),), ("x", "w"), ("y",), types, frozenset("w"))
    found = matmul_mma_gpu.mma_product_of(group, Target("cuda", "sm_90"))
    assert isinstance(found, matmul_mma_gpu.MmaProduct)
    assert found.is_packed(found.product.b) is is_packed


def test_precisions(small_tiles: None, tmp_path: Path) -> None:
    """Each keeps its promise, and no more: fewer terms make larger errors, which are there."""
    a, b = numbers(20, 300), numbers(300, 66)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    promises: tuple[tuple[Precision, float], ...] = (("float32", 4e-7), ("float32-fast", 2e-5), ("bfloat16", 4e-3))
    cases = [product(a, b, precision=precision, error=error) for precision, error in promises]
    check(cases, tmp_path)
    errors = [float(np.linalg.norm(case.got[0] - exact) / np.linalg.norm(exact)) for case in cases]
    assert errors[0] < 3e-7 < errors[1] < 1e-5 < 5e-4 < errors[2] < 4e-3


def test_large_and_small_numbers(small_tiles: None, tmp_path: Path) -> None:
    """Every finite number is the sum of its terms, also one that bfloat16 would round to infinity; NaN stays NaN."""
    a = np.zeros((3, 8), np.float32)
    largest = float(np.finfo(np.float32).max)
    a[:, :3] = [[3.4e38, 1.0, 2.0**-100], [largest, -1e-30, 0.0], [np.nan, 1.0, 1.0]]
    b = np.zeros((8, 2), np.float32)
    b[:3] = [[0.5, 0.0], [0.25, 1 + 2.0**-23], [1.0, 1.0]]
    expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    case = operator("MatMul", a, b, expected=[expected], rtol=1e-6, template="gpu_mma_matmul")
    check([case], tmp_path)
    assert np.isnan(case.got[0][2]).all()


BLOCK = {"template": "gpu_mma_matmul", "tile": "16x64x64/16x16*4"}


def deep(dtype: str = "bfloat16") -> Case:
    """Nine parts of k in one block, more than there are stages."""
    case = product(numbers(16, 64 * 9, dtype=dtype), numbers(64 * 9, 64, dtype=dtype))
    return replace(case, group=replace(case.group, configuration=BLOCK))


def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "wait_for_copies", lambda left: tirx.const(0, "int32"))


def wait_for_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = ptx.wait_for_copies
    monkeypatch.setattr(ptx, "wait_for_copies", lambda left: wait(left + 1))


def no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)


def stage_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part more is under way than there is room for."""
    monkeypatch.setattr(gpu_pipelined_product._Block, "ahead", property(lambda self: self.tile.stages))


def misaligned_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = ptx.copy_async
    monkeypatch.setattr(ptx, "copy_async", lambda to, *rest: copy(to + tirx.const(4, "uint32"), *rest))


def rows_not_swizzled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps read as if rows lay in order."""
    place = FragmentReader._chunk
    monkeypatch.setattr(FragmentReader, "_chunk", lambda self, number: place(self, number ^ self._swizzle))


def wrong_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third fragments of A change places."""
    multiply = ptx.multiply
    order = (0, 2, 1, 3)
    monkeypatch.setattr(ptx, "multiply", lambda sums, a, b, kind: multiply(sums, [a[i] for i in order], b, kind))


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_wait, "reads what a copy under way writes"),
        (wait_for_one_less, "reads what a copy under way writes"),
        (no_barrier, "with no barrier between"),
        (stage_freed_early, "a copy under way|another thread"),
        (misaligned_copy, "cp.async at an address that its size does not divide"),
        (rows_not_swizzled, "Not equal to tolerance"),
        (wrong_fragments, "Not equal to tolerance"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault) as found:
        check([deep()], tmp_path)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


def test_copies_and_fragments_meet_no_bank_twice(tmp_path: Path) -> None:
    """All layouts of parts: along k and along lines, of 32 and 64 values of k."""
    for layout in (
        PartLayout(64, 64, 1, True),
        PartLayout(64, 32, 2, True),
        PartLayout(64, 32, 1, False),
        PartLayout(16, 32, 1, False),
    ):
        for first in range(0, layout.rows, 8):
            for chunk in range(layout.row_chunks):
                banks = {layout.place(row, chunk) % 8 for row in range(first, first + 8)}
                assert len(banks) == 8, layout
        places = {layout.place(row, chunk) for row in range(layout.rows) for chunk in range(layout.row_chunks)}
        assert places == set(range(layout.term_chunks))


def test_packed_parts_are_what_stages_hold() -> None:
    w = numbers(70, 20)
    layout = PartLayout(16, 32, 3, True)
    pack = PackParts(PackPanels((70, 20), (1, 0), 0, 1, 16), layout)
    packed = pack(w)
    kind = pack.packed_type(TensorType(w.shape, "float32"))
    assert (packed.shape, str(packed.dtype)) == (kind.shape, kind.dtype) == ((1, 2, 3, 3, 512), "uint16")
    for k, n in ((0, 0), (33, 7), (69, 19), (64, 16)):
        panel, line, part, inside = n // 16, n % 16, k // 32, k % 32
        place = layout.place(line, inside // 8) * 8 + inside % 8
        terms = packed[0, panel, part, :, place].view(ml_dtypes.bfloat16).astype(np.float32)
        assert terms.sum(dtype=np.float64) == w[k, n]
    assert not packed[0, 1, :, :].reshape(3, 3, 16, 4, 8)[:, :, 4:].any()


@pytest.mark.parametrize(("level", "size", "least"), [
    ("sm_90", ProductSize(1, 4096, 4096, 4096), 0.55),
    ("sm_80", ProductSize(1, 4096, 4096, 4096), 0.85),
    ("sm_90", ProductSize(1, 8192, 8192, 1024), 0.45),
])  # fmt: skip
def test_predicted_share_of_the_peak(level: str, size: ProductSize, least: float) -> None:
    """Of the matrix unit's dense rate (on Hopper that of wgmma, of which mma.sync reaches 63%)."""
    machine = gpu_machine(level)
    peak = {"sm_80": 2048, "sm_90": 4096}[level] * machine.multiprocessors
    best = tiled_products(size, machine)[0]
    assert best.tile.warp_rows == best.tile.warp_columns == 64
    assert size.flops / best.clocks / peak > least


def test_skinny_products_are_split_along_k() -> None:
    """One row by many: enough blocks to read the weights from memory at its rate."""
    best = tiled_products(ProductSize(1, 1, 768, 3072), gpu_machine("sm_90"))[0]
    assert best.tile.rows == 16
    assert best.splits * (768 // best.tile.columns) > 60


def test_it_takes_what_the_matrix_unit_multiplies() -> None:
    whole = operator("MatMul", np.ones((3, 4), np.int32), np.ones((4, 5), np.int32)).group
    plain = product(numbers(8, 8), numbers(8, 8)).group
    for group, target, reason in (
        (whole, Target("cuda", "sm_80"), "does not multiply int32"),
        (plain, Target("cuda", "sm_75"), "cuda:sm_75 has no mma.sync"),
        (plain, Target("rocm", "gfx908"), "rocm:gfx908 has no v_mfma or v_wmma of bfloat16"),
        (product(numbers(8, 0), numbers(0, 8)).group, Target("cuda", "sm_90"), "has nothing to multiply"),
    ):
        refused = matmul_mma_gpu.plan(group, target)
        assert isinstance(refused, Refusal)
        assert reason in refused.reason
