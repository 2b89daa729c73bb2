"""Kernels and programs on the simulators, in several orders of threads; and a driver library that launches them."""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from prefuse.compiler.lowering.gpu.device_module import cuda_source, function_symbol, wavefront_threads
from prefuse.compiler.lowering.gpu.rocm_compiler import rocm_ir
from prefuse.compiler.lowering.gpu.simulator.library import find_compiler, simulated_library, simulated_rocm_library
from prefuse.kernels.codegen.grids import DeviceFunction
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.gpu.cuda_driver import CudaDriver
from prefuse.runtime.gpu.driver import Driver, KernelLaunch
from prefuse.runtime.gpu.hip_driver import HipDriver
from prefuse.runtime.gpu.simulated_driver import encode_simulated
from prefuse.runtime.plan import Launch, Plan
from prefuse.runtime.target import Target

from ..kernels.harness import POISONS, Case, build, operands_of
from ..sample import dealt

HERE = Path(__file__).parent
CUDA, ROCM, RDNA = Target("cuda", "sm_90"), Target("rocm", "gfx942"), Target("rocm", "gfx1100")
ORDERS = (0, 1, 2)  # threads forwards, backwards, and warps at random
_GUARD_BYTES = 256


class SimulatedFaultError(AssertionError):
    """What a kernel did that no kernel may."""


def need_compiler() -> str:
    """g++, or the test is skipped."""
    return find_compiler() or pytest.skip("the simulator needs g++, which is absent")


def compile_simulation(kernels: Mapping[str, DeviceFunction], folder: Path, target: Target = CUDA) -> Path:
    """A library with a function sim_NAME(blocks, threads, shared bytes, arguments) for each, and a number count_NAME of these."""
    need_compiler()
    library = folder / "kernels.so"
    if target.kind == "rocm":
        library.write_bytes(simulated_rocm_library(rocm_ir(kernels, target), wavefront_threads(target)))
    else:
        library.write_bytes(simulated_library(cuda_source(kernels, target)))
    return library


@cache
def fake_driver_library(api: str = "cuda") -> str:
    """Path of a libcuda.so.1, or of a libamdhip64.so where `api` is "hip", whose device is the simulator."""
    folder = mkdtemp(prefix="prefuse-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / f"lib{api}.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", *(["-DHIP"] if api == "hip" else [])]
    subprocess.run([need_compiler(), *flags, str(HERE / "fake_gpu.cpp"), "-o", str(library), "-ldl"], check=True)
    return str(library)


class FakeGpu:
    """What tests ask of the library of a driver."""

    def __init__(self, driver: CudaDriver | HipDriver, path: str) -> None:
        self.driver = driver
        self._library = ctypes.CDLL(path)
        for name in ("fake_bytes", "fake_pinned_bytes", "fake_objects"):
            getattr(self._library, name).restype = ctypes.c_long
        self._library.fake_races.restype = ctypes.c_char_p

    def order(self, number: int) -> None:
        """Which operation goes first where several may; see fake_gpu.cpp."""
        self._library.fake_order(number)

    def fail(self, function: str, after: int = 0, code: int = 719) -> None:
        """Let a call of an entry point fail once, after so many that go well."""
        self._library.fake_fail(function.encode(), ctypes.c_long(after), code)

    def mend(self) -> None:
        """Forget failures that are due, and those that make all calls fail."""
        self._library.fake_mend()

    def break_kernel(self, code: int = 700) -> None:
        """Ask for something that fails when it runs."""
        self._library.fake_break_kernel(code)

    def held(self) -> tuple[int, int, int]:
        """Bytes of the device, pinned bytes, and streams, events, graphs and modules."""
        return self._library.fake_bytes(), self._library.fake_pinned_bytes(), self._library.fake_objects()

    def races(self) -> str:
        """What touched the same bytes unordered, since this was asked last."""
        return str(self._library.fake_races().decode())

    def declare(self, plan: Plan) -> None:
        """Tell which bytes the kernels of a plan touch."""
        grids = {kernel.symbol: kernel.grids for kernel in plan.kernels}
        for step in plan.steps:
            if not isinstance(step, Launch):
                continue
            regions = [(one.size_bytes, False) for one in step.reads]
            regions += [(one.size_bytes, True) for one in step.writes + step.scratch]
            sizes = (ctypes.c_size_t * len(regions))(*(size for size, _ in regions))
            writes = (ctypes.c_int * len(regions))(*(is_written for _, is_written in regions))
            for grid in grids[step.kernel]:
                self._library.fake_declare(grid.function.encode(), len(regions), sizes, writes)


def simulated_cubin(library: Path, architecture: int = 90) -> bytes:
    """What the fake driver takes for a cubin: the header of one, and the path of a library of `compile_simulation`."""
    header = struct.pack("<4sBBBBB7xHHI24xI12x", b"\x7fELF", 2, 1, 1, 0x41, 8, 2, 190, 1, architecture << 8)
    return header + str(library).encode() + b"\0"


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    """Programs for CUDA are compiled for the simulator and run on it, through the driver's real binding, without a race."""
    gc.collect()  # programs of earlier tests give their memory back now, and not while a test counts it
    path = fake_driver_library()
    gpu = FakeGpu(CudaDriver(path), path)
    simulate(monkeypatch, tmp_path, gpu.driver)
    yield gpu
    gpu.order(0)
    assert gpu.races() == ""


def simulate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Driver) -> None:
    """Let compilations make code for the simulator, and the machine's GPU be that of a driver."""
    counter = itertools.count()

    def build_device_code(kernels: Mapping[str, DeviceFunction], target: Target) -> bytes:
        folder = tmp_path / f"device{next(counter)}"
        folder.mkdir()
        return simulated_cubin(compile_simulation(kernels, folder))

    monkeypatch.setattr("prefuse.compiler.lowering.program.build_device_code", build_device_code)
    monkeypatch.setattr("prefuse.runtime.gpu.installed._driver", lambda kind: driver)


def check(cases: Sequence[Case], folder: Path, target: Target = CUDA) -> None:
    """Every case gives what it must, whatever the order of threads and what memory held, and writes to its outputs alone."""
    if not cases:
        return
    kernels = [build(case, target) for case in cases]
    functions = {f"k{i}": kernel.function for i, kernel in enumerate(kernels)}
    library = ctypes.CDLL(str(compile_simulation(functions, folder, target)))
    library.sim_fault.restype = ctypes.c_char_p
    for order, poison in zip(ORDERS, itertools.cycle(POISONS), strict=False):
        library.sim_order(order)
        for number, (case, kernel) in enumerate(zip(cases, kernels, strict=True)):
            for pair in (None, *kernel.inplace):
                case.got = run_case(library, f"k{number}", case, kernel, pair, poison)
                case.check()


def check_in_turn(cases: Sequence[Case], folder: Path, target: Target = CUDA) -> None:
    """Every case has a kernel; every other one is compiled today, and gives what it must, and the others tomorrow."""
    chosen = dealt(cases, [case.label for case in cases], True, (True, False))
    compiled = {id(case) for case in chosen}
    for case in cases:
        if id(case) not in compiled:
            build(case, target)
    if chosen:
        check(chosen, folder, target)


def run_case(
    library: ctypes.CDLL,
    symbol: str,
    case: Case,
    kernel: BuiltKernel,
    shared: tuple[int, int] | None = None,
    poison: int = POISONS[0],
) -> list[np.ndarray]:
    """What a kernel writes into memory full of poison; of a `shared` pair, the output lies in the memory of the operand."""
    inputs = [_guarded(array, poison) for array in operands_of(case, kernel)]
    sizes = [case.group.types[name].size_bytes for name in case.group.outputs]
    outputs = [_guarded(np.full(size, poison, np.uint8), poison) for size in sizes]
    if shared is not None:
        outputs[shared[0]] = inputs[shared[1]]
    kept = [(array, array.copy()) for array in inputs if all(array is not out for out in outputs)]
    scratch = [_guarded(np.full(kernel.workspace_bytes, poison, np.uint8), poison)] if kernel.workspace_bytes else []
    scratch += [_guarded(np.zeros(kernel.barrier_bytes, np.uint8), poison)] if kernel.barrier_bytes else []
    pointers = [array.ctypes.data + _GUARD_BYTES for array in (*inputs, *outputs, *scratch)]
    for grid in kernel.function.launches:
        cells = (ctypes.c_uint64 * (len(pointers) + len(grid.scalars)))(*pointers, *grid.scalars)
        one = KernelLaunch.of(0, (grid.blocks, grid.threads, grid.shared_bytes), cells, case.label, grid.maps)
        one.encode_maps(encode_simulated)
        launch = getattr(library, f"sim_{function_symbol(symbol, grid.function)}")
        if launch(one.blocks, one.threads, one.shared_bytes, one.places):
            raise SimulatedFaultError(f"{case.label}: {library.sim_fault().decode()}")
    for array in (*inputs, *outputs, *scratch):
        edges = np.concatenate([array[:_GUARD_BYTES], array[array.size - _GUARD_BYTES :]])
        assert (edges == poison).all(), f"{case.label}: writes beyond a buffer"
    assert all(np.array_equal(array, before) for array, before in kept), f"{case.label}: writes to its operands"
    return [
        out[_GUARD_BYTES : out.size - _GUARD_BYTES]
        .view(case.group.types[name].dtype)
        .reshape(case.group.types[name].shape)
        .copy()
        for name, out in zip(case.group.outputs, outputs, strict=True)
    ]


def _guarded(array: np.ndarray, poison: int) -> np.ndarray:
    """The array's bytes with poison on both sides."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = np.full(content.size + 2 * _GUARD_BYTES, poison, np.uint8)
    whole[_GUARD_BYTES : _GUARD_BYTES + content.size] = content
    return whole
