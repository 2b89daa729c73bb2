"""The simulator finds what it must: races, whatever the order of threads, copies that nobody waited for, wrong addresses."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu.device_module import cuda_source
from prefuse.compiler.lowering.gpu.simulator import library as simulator_library
from prefuse.compiler.lowering.gpu.simulator.library import simulated_library, simulated_source
from prefuse.kernels.codegen import ptx
from prefuse.kernels.codegen.builder import Expr
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.template.contract import BuiltKernel, Operand
from prefuse.runtime.errors import CompileError
from prefuse.runtime.target import Target
from tvm import tirx

from ..kernels import harness
from .simulator import CUDA, check, compile_simulation

WARP = 32
THREADS = 64
KINDS = ("ldmatrix", "cp.async", "st.shared", "mma", "shuffle", "bulk copy", "wgmma")


@dataclass
class Simulated:
    """A kernel of one grid on the simulator."""

    library: ctypes.CDLL
    size: tuple[int, int, int]

    def __call__(self, *arrays: np.ndarray, order: int = 0) -> str:
        """Run it; what it did wrong, or nothing."""
        cells = (ctypes.c_uint64 * len(arrays))(*(a.ctypes.data for a in arrays))
        places = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cells) + 8 * i for i in range(len(cells))))
        self.library.sim_order(order)
        code = self.library.sim_k_0(*self.size, places)
        fault = bytes(self.library.sim_fault()).decode()
        assert (code == 719) == bool(fault)
        return fault

    def statistics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Instructions of each kind, and their wavefronts a phase."""
        counts, conflicts = (ctypes.c_double * len(KINDS))(), (ctypes.c_double * len(KINDS))()
        self.library.sim_statistics(counts, conflicts)
        return dict(zip(KINDS, counts, strict=True)), dict(zip(KINDS, conflicts, strict=True))


def simulate(builder: GpuBuilder, folder: Path, target: Target = CUDA) -> Simulated:
    function = builder.function()
    library = ctypes.CDLL(str(compile_simulation({"k": function}, folder, target)))
    library.sim_fault.restype = ctypes.c_char_p
    (one,) = function.launches
    return Simulated(library, (one.blocks, one.threads, one.shared_bytes))


def turned(write: Callable[[Expr], Expr], *, first: bool, second: bool) -> GpuBuilder:
    """Blocks that turn their elements around by way of shared memory, twice; with the barriers that are wanted."""
    builder = GpuBuilder()
    x, y = (builder.parameter(name, 4 * THREADS, "float32") for name in "xy")
    with builder.blocks(2, THREADS) as (block, thread):
        tile = builder.shared(THREADS, "float32")
        with builder.loop(2) as i:
            begin = builder.bind((block * 2 + i) * THREADS)
            builder.store(tile, write(thread), x[begin + thread])
            if first:
                builder.barrier()
            builder.store(y, begin + thread, tile[THREADS - 1 - thread])
            if second:
                builder.barrier()
    return builder


def test_races_are_found_in_any_order(tmp_path: Path) -> None:
    """Which side of a race is reported depends on the order; that it is does not."""
    x = np.arange(4 * THREADS, dtype=np.float32)
    expected = x.reshape(4, THREADS)[:, ::-1].reshape(-1)
    for first, second in ((True, True), (False, True), (True, False)):
        folder = tmp_path / f"{first}{second}"
        folder.mkdir()
        run = simulate(turned(lambda thread: thread, first=first, second=second), folder)
        for order in range(4):
            y = np.zeros_like(x)
            fault = run(x, y, order=order)
            if first and second:
                assert fault == ""
                np.testing.assert_array_equal(y, expected)
            else:
                assert re.match("(reads|overwrites) what (another thread|nobody)", fault)


def test_reads_of_what_nobody_wrote_and_stores_to_one_place(tmp_path: Path) -> None:
    x, y = np.zeros(4 * THREADS, np.float32), np.zeros(4 * THREADS, np.float32)
    fault = simulate(turned(lambda thread: tirx.floordiv(thread, 2), first=True, second=True), tmp_path)(x, y)
    assert fault.startswith(
        "overwrites what another thread wrote, with no barrier between at shared byte 0, by thread 1 of block 0"
    )
    (tmp_path / "half").mkdir()
    builder = GpuBuilder()
    y_buffer = builder.parameter("y", THREADS, "float32")
    with builder.blocks(1, THREADS) as (_, thread):
        tile = builder.shared(THREADS, "float32")
        with builder.when(thread < 40):
            builder.store(tile, thread, tirx.const(1.0, "float32"))
        builder.barrier()
        builder.store(y_buffer, thread, tile[thread])
    assert simulate(builder, tmp_path / "half")(y).startswith("reads what nobody wrote at shared byte 160, by thread 40")


def test_threads_that_miss_a_barrier(tmp_path: Path) -> None:
    builder = GpuBuilder()
    y = builder.parameter("y", THREADS, "float32")
    with builder.blocks(1, THREADS) as (_, thread):
        with builder.when(thread < 40):
            builder.barrier()
        builder.store(y, thread, tirx.const(1.0, "float32"))
    assert simulate(builder, tmp_path)(np.zeros(THREADS, np.float32)).startswith("some threads of a block miss a barrier")


def warp_sum(lanes: int) -> GpuBuilder:
    """The sum over a warp, given to all of its lanes; `lanes` of them take part."""
    builder = GpuBuilder()
    x, y = (builder.parameter(name, THREADS, "float32") for name in "xy")
    with builder.blocks(1, THREADS) as (_, thread):
        lane = builder.bind(tirx.floormod(thread, WARP))
        total = builder.name(x[thread])
        with builder.when(lane < lanes):
            for distance in (16, 8, 4, 2, 1):
                total = builder.name(total + builder.shuffle(total, builder.bind(lane ^ distance)))
            builder.store(y, thread, total)
    return builder


def test_shuffles(tmp_path: Path) -> None:
    x, y = np.arange(THREADS, dtype=np.float32), np.zeros(THREADS, np.float32)
    run = simulate(warp_sum(WARP), tmp_path)
    assert run(x, y) == ""
    np.testing.assert_array_equal(y, np.repeat(x.reshape(2, WARP).sum(1), WARP))
    assert run.statistics()[0]["shuffle"] == 10
    (tmp_path / "some").mkdir()
    assert simulate(warp_sum(20), tmp_path / "some")(x, y).startswith("lanes of a warp miss a collective instruction")


@dataclass(frozen=True)
class Product:
    """16 x 16 by 16 x 8, in one warp: copied to shared memory 16 bytes at a time, loaded as fragments, multiplied."""

    kind: ptx.Half = "bf16"
    has_wait: bool = True
    has_barrier: bool = True
    is_swizzled: bool = True
    shift: int = 0  # bytes by which the rows of B lie wrong
    shared_bytes: int = 2048

    def build(self) -> GpuBuilder:
        builder = GpuBuilder()
        a, b = builder.parameter("a", 256, "uint16"), builder.parameter("b", 128, "uint16")
        c = builder.parameter("c", 128, "float32")
        with builder.blocks(1, WARP) as (_, lane):
            shared = builder.dynamic_shared(self.shared_bytes, "uint8")
            base = builder.bind(ptx.shared_address(shared))
            row, half = builder.bind(tirx.floordiv(lane, 2)), builder.bind(tirx.floormod(lane, 2))
            builder.do(ptx.copy_async(base + self._place(row, half), a[lane * 8]))
            valid = tirx.Cast("uint32", tirx.Select(lane < 16, 16, 0))
            builder.do(ptx.copy_async(base + self._place(lane + 32, 0), b[tirx.floormod(lane, 16) * 8], valid))
            builder.do(ptx.commit_copies())
            if self.has_wait:
                builder.do(ptx.wait_for_copies(0))
            if self.has_barrier:
                builder.barrier()
            words = builder.local(8, "uint32", "fragments")
            registers = [words[tirx.const(i, "int32")] for i in range(8)]
            top, column = tirx.floormod(lane, 16), tirx.floordiv(lane, 16)
            builder.do(ptx.load_fragments(registers[:4], base + self._place(top, column)))
            row_of_b = tirx.floormod(lane, 16) + 32
            builder.do(
                ptx.load_fragments(registers[4:], base + self._place(row_of_b, 0) + self._word(self.shift), transposed=True)
            )
            sums = builder.local(4, "float32")
            cells = [sums[tirx.const(i, "int32")] for i in range(4)]
            for i in range(4):
                builder.store(sums, i, tirx.const(0.0, "float32"))
            builder.do(ptx.multiply(cells, registers[:4], registers[4:6], self.kind))
            for i in range(4):
                place = (tirx.floordiv(lane, 4) + i // 2 * 8) * 8 + tirx.floormod(lane, 4) * 2 + i % 2
                builder.store(c, place, cells[i])
        return builder

    def _place(self, row: Expr, half: Expr) -> Expr:
        """Rows of 32 bytes, A's and then B's; of four neighbours, halves of the first alone would share banks."""
        shifted = half ^ tirx.floormod(tirx.floordiv(row, 4), 2) if self.is_swizzled else half
        return tirx.Cast("uint32", row * 32 + shifted * 16)

    def _word(self, value: int) -> Expr:
        return tirx.const(value, "uint32")


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_the_matrix_unit(kind: ptx.Half, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    narrow = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    a, b = (rng.standard_normal(shape).astype(narrow) for shape in ((16, 16), (16, 8)))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    run = simulate(Product(kind).build(), tmp_path)
    for order in range(4):
        c = np.full((16, 8), np.nan, np.float32)
        assert run(a, b, c, order=order) == ""
        np.testing.assert_allclose(c, expected, rtol=1e-6, atol=1e-6)
    counts, conflicts = run.statistics()
    assert (counts["mma"], counts["ldmatrix"], counts["cp.async"]) == (4, 8, 4 * 2 * WARP)
    assert conflicts["ldmatrix"] == 1.0


@pytest.mark.parametrize(
    ("product", "found"),
    [
        (Product(has_wait=False), "reads what a copy under way writes"),
        (Product(has_barrier=False), "reads what another thread wrote, with no barrier between"),
        (Product(shift=8), "ldmatrix of a row that does not begin at a multiple of 16 bytes"),
        (Product(shared_bytes=768), "an access outside of shared memory"),
    ],
)
def test_faults_of_copies_and_fragments(product: Product, found: str, tmp_path: Path) -> None:
    run = simulate(product.build(), tmp_path)
    a, b, c = np.zeros(256, np.uint16), np.zeros(128, np.uint16), np.zeros(128, np.float32)
    for order in range(3):
        assert run(a, b, c, order=order).startswith(found)


def test_bank_conflicts_are_a_number(tmp_path: Path) -> None:
    """Eight rows of 32 bytes, one half of each: two lanes a bank, unless neighbours' halves are exchanged."""
    run = simulate(Product(is_swizzled=False).build(), tmp_path)
    assert run(np.zeros(256, np.uint16), np.zeros(128, np.uint16), np.zeros(128, np.float32)) == ""
    assert run.statistics()[1]["ldmatrix"] == 2.0


def test_what_it_does_not_know_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = cuda_source({"k": Product().build().function()}, CUDA)
    with pytest.raises(CompileError, match=r"does not know the instruction 'mma.sync.aligned.m16n8k8"):
        simulated_source(source.replace("m16n8k16", "m16n8k8"))
    monkeypatch.setattr(simulator_library, "find_compiler", lambda: "")
    with pytest.raises(CompileError, match=r"simulator: it needs g\+\+"):
        simulated_library(source + "//")


def test_vectors_of_16_bytes() -> None:
    """Loads and stores of four neighbours are one access each, where the offset is a multiple of four."""
    builder = GpuBuilder()
    x, y = (builder.parameter(name, 4 * THREADS, "float32") for name in "xy")
    with builder.blocks(1, THREADS) as (_, thread), builder.vector(4) as lane:
        builder.store(y, thread * 4 + lane, x[thread * 4 + lane] * tirx.const(2.0, "float32"))
    source = cuda_source({"k": builder.function()}, CUDA)
    assert "*(float4*)(p1 + " in source
    assert "*(float4*)(p0 + " in source


@pytest.mark.parametrize(("spoils", "fault"), [("x", "writes to its operands"), ("y", "Not equal to tolerance")])
def test_what_memory_held_counts(spoils: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands stay as they are, and an output that is not written is no zero."""
    builder = GpuBuilder()
    x, y = (builder.parameter(name, THREADS, "float32") for name in "xy")
    with builder.blocks(1, THREADS) as (_, thread):
        if spoils == "x":
            builder.store(y, thread, -x[thread])
            builder.store(x, thread, tirx.const(7.0, "float32"))
        with builder.when(thread > 0):
            builder.store(y, thread, -x[thread])
    made = BuiltKernel("made", builder.function(), (Operand("x0"),))
    monkeypatch.setattr(harness, "build_kernel", lambda group, target: made)
    with pytest.raises(AssertionError, match=fault):
        check([harness.operator("Neg", np.arange(THREADS, dtype=np.float32), atol=1e-6)], tmp_path)


def test_a_module_without_kernels() -> None:
    """What only views its inputs has none."""
    assert simulated_source("typedef int nothing;\n").splitlines()[0] == '#include "cudasim.h"'


def test_shared_bytes_of_a_launch() -> None:
    (one,) = Product().build().function().launches
    assert one.shared_bytes == 2048
