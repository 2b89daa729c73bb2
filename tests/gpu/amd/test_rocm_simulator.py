"""The simulator of AMD's LLVM IR finds what it must: races, barriers that do not wait for LDS, and what it does not know."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu import rocm_compiler
from prefuse.compiler.lowering.gpu.device_module import wavefront_threads
from prefuse.compiler.lowering.gpu.rocm_compiler import rocm_ir
from prefuse.compiler.lowering.gpu.simulator import amd_ir
from prefuse.compiler.lowering.gpu.simulator import library as simulator_library
from prefuse.compiler.lowering.gpu.simulator.amd_ir import host_ir
from prefuse.compiler.lowering.gpu.simulator.library import simulated_rocm_library
from prefuse.kernels.codegen import amdgcn
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.runtime.errors import CompileError
from prefuse.runtime.target import Target
from tvm import tirx

from ..simulator import RDNA, ROCM
from ..test_simulator import THREADS, Simulated, simulate, turned

WAVE = 64


@pytest.mark.parametrize("target", [ROCM, RDNA], ids=str)
def test_races_are_found_in_any_order(target: Target, tmp_path: Path) -> None:
    x = np.arange(4 * THREADS, dtype=np.float32)
    expected = x.reshape(4, THREADS)[:, ::-1].reshape(-1)
    for first, second in ((True, True), (False, True), (True, False)):
        folder = tmp_path / f"{first}{second}"
        folder.mkdir()
        run = simulate(turned(lambda thread: thread, first=first, second=second), folder, target)
        for order in range(4):
            y = np.zeros_like(x)
            fault = run(x, y, order=order)
            if first and second:
                assert fault == ""
                np.testing.assert_array_equal(y, expected)
            else:
                assert re.match("(reads|overwrites) what (another thread|nobody)", fault)


@pytest.mark.parametrize(
    ("fence", "fault"),
    [
        ("release", "a barrier that does not wait for accesses of LDS"),
        ("acquire", "accesses LDS behind a barrier without an acquire fence"),
    ],
)
def test_barriers_without_fences(fence: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = rocm_compiler._HELPER.read_text()
    broken = helper.replace(f'  fence syncscope("workgroup") {fence}\n', "")
    assert broken != helper
    (tmp_path / "helper.ll").write_text(broken)
    monkeypatch.setattr(rocm_compiler, "_HELPER", tmp_path / "helper.ll")
    run = simulate(turned(lambda thread: thread, first=True, second=True), tmp_path, ROCM)
    x = np.zeros(4 * THREADS, np.float32)
    assert run(x, x.copy()).startswith(fault)


def test_the_barrier_that_tvm_emits_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_compiler, "_with_waiting_barriers", lambda module: module)
    run = simulate(turned(lambda thread: thread, first=True, second=True), tmp_path, ROCM)
    x = np.zeros(4 * THREADS, np.float32)
    assert run(x, x.copy()).startswith("a barrier that does not wait for accesses of LDS")


def test_threads_that_miss_a_barrier(tmp_path: Path) -> None:
    builder = GpuBuilder()
    y = builder.parameter("y", 2 * WAVE, "float32")
    with builder.blocks(1, 2 * WAVE) as (_, thread):
        with builder.when(thread < WAVE):
            builder.barrier()
        builder.store(y, thread, tirx.const(1.0, "float32"))
    assert simulate(builder, tmp_path, ROCM)(np.zeros(2 * WAVE, np.float32)).startswith("some threads of a block miss a barrier")


@pytest.mark.parametrize(("target", "lanes"), [(ROCM, 32), (ROCM, 64), (RDNA, 32)], ids=str)
def test_lanes_exchange_values(target: Target, lanes: int, tmp_path: Path) -> None:
    """ds_bpermute: the sum over 32 lanes, of which a wavefront of CDNA has two groups, or over all, given to all of them."""
    builder = GpuBuilder()
    x, y = (builder.parameter(name, 2 * WAVE, "float32") for name in "xy")
    with builder.blocks(1, 2 * WAVE) as (_, thread):
        lane = builder.bind(tirx.floormod(thread, lanes))
        total = builder.name(x[thread])
        distance = lanes // 2
        while distance:
            total = builder.name(total + builder.shuffle(total, builder.bind(lane ^ distance), lanes))
            distance //= 2
        builder.store(y, thread, total)
    run = simulate(builder, tmp_path, target)
    x_values = np.arange(2 * WAVE, dtype=np.float32)
    for order in range(3):
        y_values = np.zeros_like(x_values)
        assert run(x_values, y_values, order=order) == ""
        np.testing.assert_array_equal(y_values, np.repeat(x_values.reshape(-1, lanes).sum(1), lanes))
    assert run.statistics()[0]["shuffle"] == 3 * (lanes.bit_length() - 1) * 2 * WAVE // wavefront_threads(target)


def test_powers_of_two_and_maxima(tmp_path: Path) -> None:
    """v_exp_f32 has no numbers below the normal ones; the maximum of NaN and a number is the number."""
    builder = GpuBuilder()
    x, y, z = (builder.parameter(name, 2 * WAVE, "float32") for name in "xyz")
    with builder.blocks(1, 2 * WAVE) as (_, thread):
        builder.store(y, thread, amdgcn.exp2(x[thread]))
        builder.store(z, thread, amdgcn.maximum(x[thread], tirx.const(-1, "float32")))
    x_values = np.linspace(-140, 3, 2 * WAVE).astype(np.float32)
    x_values[:3] = np.nan, -np.inf, -126
    y_values, z_values = np.empty_like(x_values), np.empty_like(x_values)
    assert simulate(builder, tmp_path, ROCM)(x_values, y_values, z_values) == ""
    exact = np.exp2(x_values.astype(np.float64))
    np.testing.assert_allclose(y_values, np.where(x_values < -126, 0, exact), rtol=2e-7)
    np.testing.assert_array_equal(z_values, np.fmax(x_values, -1))


def one_instruction(instruction: amdgcn.Mfma, threads: int = WAVE) -> GpuBuilder:
    """D = A B for A[size, k] and B[k, size], which is stored by columns, as the ISA says who has what."""
    size, numbers = instruction.size, instruction.numbers
    k = WAVE // size * numbers
    dtype = "float32" if instruction.kind == "f32" else "uint16"
    builder = GpuBuilder()
    a, b = (builder.parameter(name, size * k, dtype) for name in "ab")
    d = builder.parameter("d", size * size, "float32")
    with builder.blocks(1, threads) as (_, lane):
        line, group = builder.bind(tirx.floormod(lane, size)), builder.bind(tirx.floordiv(lane, size))
        operands = []
        for buffer in (a, b):
            values = builder.local(numbers, dtype)
            for e in range(numbers):
                builder.store(values, e, buffer[line * k + group * numbers + e])
            first = tirx.const(0, "int32")
            operands.append(values[first if numbers == 1 else tirx.Ramp(first, tirx.const(1, "int32"), numbers)])
        sums = builder.local(instruction.sums, "float32")
        cells = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), instruction.sums)
        for r in range(instruction.sums):
            builder.store(sums, r, tirx.const(0.5, "float32"))
        builder.emit(tirx.BufferStore(sums, instruction(operands[0], operands[1], sums[cells]), [cells]))
        for r in range(instruction.sums):
            row = group * 4 + (256 // size * (r // 4) + r % 4)
            builder.store(d, row * size + line, sums[tirx.const(r, "int32")])
    return builder


@pytest.mark.parametrize("size", [32, 16])
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_the_matrix_unit(kind: amdgcn.Number, size: int, tmp_path: Path) -> None:
    instruction = amdgcn.Mfma(kind, size)
    k = WAVE // size * instruction.numbers
    narrow: Any = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[kind]
    rng = np.random.default_rng(size)
    a, b = (rng.standard_normal(shape).astype(narrow) for shape in ((size, k), (k, size)))
    expected = a.astype(np.float64) @ b.astype(np.float64) + 0.5
    run = simulate(one_instruction(instruction), tmp_path, ROCM)
    for order in range(3):
        d = np.full((size, size), np.nan, np.float32)
        assert run(a, np.ascontiguousarray(b.T), d, order=order) == ""
        np.testing.assert_allclose(d, expected, rtol=1e-6, atol=1e-6)
    assert run.statistics()[0]["mma"] == 3


def test_the_matrix_unit_needs_whole_wavefronts(tmp_path: Path) -> None:
    """All lanes take part, whatever the program does with them."""
    run = simulate(one_instruction(amdgcn.Mfma("f32", 16), 32), tmp_path, ROCM)
    x = np.zeros(256, np.float32)
    assert run(x, x, x.copy()).startswith("v_mfma of a wavefront that has lanes without threads")


def chunks_of_rows(pitch: int) -> GpuBuilder:
    """A wavefront stores 16 bytes a lane in a row, and lane l loads those of a row of `pitch` chunks of 16 bytes."""
    builder = GpuBuilder()
    x, y = (builder.parameter(name, 4 * WAVE, "float32") for name in "xy")
    with builder.blocks(1, WAVE) as (_, lane):
        tile = builder.shared(4 * WAVE * pitch, "float32")

        def run(first: Any) -> Any:
            return tirx.Ramp(first * 4, tirx.const(1, "int32"), 4)

        for row in range(pitch):
            builder.emit(tirx.BufferStore(tile, x[run(lane)], [run(lane + row * WAVE)]))
        builder.barrier()
        builder.emit(tirx.BufferStore(y, tile[run(lane * pitch)], [run(lane)]))
    return builder


@pytest.mark.parametrize(("pitch", "wavefronts"), [(1, 1.0), (2, 2.0), (8, 8.0), (9, 1.0)])
def test_bank_conflicts_are_a_number(pitch: int, wavefronts: float, tmp_path: Path) -> None:
    run = simulate(chunks_of_rows(pitch), tmp_path, ROCM)
    assert run(np.zeros(4 * WAVE, np.float32), np.zeros(4 * WAVE, np.float32)) == ""
    _, conflicts = run.statistics()
    assert conflicts["ldmatrix"] == wavefronts
    assert conflicts["st.shared"] == 1.0


def test_vectors_at_addresses_that_are_no_multiples(tmp_path: Path) -> None:
    """LLVM says what it relies on; here it relies on more than the kernel's author told it."""
    source = rocm_ir({"k": chunks_of_rows(1).function()}, ROCM)
    trusting = re.sub(r"(load <4 x float>, ptr addrspace\(1\) %\d+, align) 4", r"\1 16", source)
    assert trusting != source
    (tmp_path / "kernels.so").write_bytes(simulated_rocm_library(trusting, WAVE))
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    library.sim_fault.restype = ctypes.c_char_p
    run = Simulated(library, (1, WAVE, 0))
    memory = np.zeros(4 * WAVE + 16, np.float32)
    aligned = -memory.ctypes.data // 4 % 16  # elements up to a multiple of 64 bytes
    y = np.zeros(4 * WAVE, np.float32)
    found = run(memory[aligned + 1 : aligned + 1 + 4 * WAVE], y)
    assert found.startswith("an access of memory whose alignment does not divide its address, thread 0 of block 0")


def test_what_it_does_not_know_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = rocm_ir({"k": one_instruction(amdgcn.Mfma("f16", 32)).function()}, ROCM)
    with pytest.raises(CompileError, match=r"simulator: it does not know llvm.amdgcn.mfma.f32.4x4x4f16"):
        host_ir(source.replace("32x32x8f16(<4 x half>", "4x4x4f16(<8 x half>").replace("32x32x8f16(", "4x4x4f16("))
    lds = rocm_ir({"k": turned(lambda thread: thread, first=True, second=True).function()}, ROCM)
    for known, unknown in (
        ("store float", "store atomic float"),
        ("  store float", "  %p = addrspacecast ptr addrspace(3) %q to ptr\n  store float"),
        ("  store float", "  %p = atomicrmw add ptr addrspace(3) %q, i32 1 monotonic\n  store float"),
    ):
        with pytest.raises(CompileError, match=r"simulator: it does not know the access .*(atomic|addrspacecast)"):
            host_ir(lds.replace(known, unknown))
    monkeypatch.setattr(amd_ir, "LDS_BYTES", 4)
    with pytest.raises(CompileError, match=r"k_0 has 256 bytes of LDS, more than a block's 4"):
        host_ir(lds)
    monkeypatch.setattr(simulator_library, "find_compiler", lambda: "")
    with pytest.raises(CompileError, match=r"simulator: it needs g\+\+"):
        simulated_rocm_library(source + ";", 64)
