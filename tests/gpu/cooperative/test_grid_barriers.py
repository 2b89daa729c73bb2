"""Blocks that wait for each other: on the simulators in several orders, and by cooperative launches of both drivers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from prefuse.compiler.lowering.gpu.device_module import cuda_source, function_symbol
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.codegen.grids import DeviceFunction
from prefuse.runtime.gpu.cuda_driver import CudaDriver
from prefuse.runtime.gpu.driver import Driver, DriverError, KernelLaunch
from prefuse.runtime.gpu.graph import Graph
from prefuse.runtime.gpu.hip_driver import HipDriver
from prefuse.runtime.gpu.simulated_driver import SimulatedDriver
from prefuse.runtime.target import Target
from tvm import tirx

from ..simulator import CUDA, ORDERS, RDNA, ROCM, SimulatedFaultError, compile_simulation, fake_driver_library, simulated_cubin

BLOCKS, THREADS, ROUNDS = 5, 64, 7


def ring(*, has_barrier: bool = True, missing: int = 0) -> DeviceFunction:
    """A grid that sets numbers, and one whose blocks each take twice their neighbour's and one, in rounds.

    `missing`: how many blocks come to no barrier.
    """
    builder = GpuBuilder()
    numbers = builder.parameter("numbers", 2 * BLOCKS, "float32")
    with builder.chunks(BLOCKS, BLOCKS) as i:
        builder.store(numbers, i, tirx.Cast("float32", i))
    with builder.blocks(BLOCKS, THREADS) as (block, thread):
        shared = builder.shared(THREADS, "float32")
        with builder.loop(ROUNDS, name="round") as turn:
            old = builder.bind(tirx.floormod(turn, 2) * BLOCKS)
            neighbour = builder.bind(tirx.floormod(block + 1, BLOCKS))
            builder.store(shared, thread, numbers[old + neighbour])
            builder.barrier()
            with builder.when(tirx.EQ(thread, THREADS - 1)):
                builder.store(numbers, BLOCKS - old + block, shared[0] * 2.0 + 1.0)
            if has_barrier:
                with builder.when(block < BLOCKS - missing):
                    builder.grid_barrier()
            builder.barrier()
    return builder.function()


def expected() -> np.ndarray:
    numbers = np.arange(BLOCKS, dtype=np.float32)
    for _ in range(ROUNDS):
        numbers = np.roll(numbers, -1) * 2 + 1
    return numbers


def result(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers.reshape(2, BLOCKS)[ROUNDS % 2])


def loaded(function: DeviceFunction, folder: Path, target: Target) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_simulation({"k": function}, folder, target)))
    library.sim_fault.restype = ctypes.c_char_p
    return library


def run(function: DeviceFunction, library: ctypes.CDLL, order: int) -> np.ndarray:
    """What the grids leave, one after the other."""
    library.sim_order(order)
    numbers, counter = np.full(2 * BLOCKS, np.nan, np.float32), np.zeros(1, np.int32)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (numbers, counter)]
    places = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in pointers))
    for one in function.launches:
        if getattr(library, f"sim_{function_symbol('k', one.function)}")(one.blocks, one.threads, 0, places):
            raise SimulatedFaultError(library.sim_fault().decode())
    assert counter[0] << 1 == 0
    return result(numbers)


@pytest.mark.parametrize("target", [CUDA, ROCM, RDNA], ids=str)
def test_blocks_see_what_others_wrote_before_a_barrier(target: Target, tmp_path: Path) -> None:
    function = ring()
    assert [one.is_cooperative for one in function.launches] == [False, True]
    library = loaded(function, tmp_path, target)
    for order in ORDERS:
        np.testing.assert_array_equal(run(function, library, order), expected())


@pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
def test_a_missing_barrier_gives_wrong_numbers(target: Target, tmp_path: Path) -> None:
    function = ring(has_barrier=False)
    assert not np.array_equal(run(function, loaded(function, tmp_path, target), 0), expected())


@pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
def test_blocks_that_nobody_releases_are_a_fault(target: Target, tmp_path: Path) -> None:
    function = ring(missing=1)
    library = loaded(function, tmp_path, target)
    for order in ORDERS:
        with pytest.raises(SimulatedFaultError, match="wait for each other for ever"):
            run(function, library, order)


def test_device_code_has_fences_around_the_arrival() -> None:
    source = cuda_source({"k": ring()}, CUDA)
    body = source[source.index("void prefuse_grid_barrier(") :]
    places = [body.index(one) for one in ("__syncthreads", "__threadfence", "atomicAdd", "volatile", "__nanosleep")]
    assert places == sorted(places)
    assert "__restrict__" not in source  # no load may be moved across a barrier


def works(driver: Driver, path: Path, stream: int, *, is_cooperative: bool) -> tuple[list[KernelLaunch], int]:
    """The two grids as a driver launches them, and the address of their numbers."""
    function = ring()
    binary = path.read_bytes() if isinstance(driver, SimulatedDriver) else simulated_cubin(path)
    module = driver.load(binary)
    addresses = [driver.allocate(8 * BLOCKS), driver.allocate(4)]
    zero = np.zeros(1, np.int32)
    driver.copy_in(addresses[1], zero.ctypes.data, zero.nbytes, stream)
    driver.synchronize(stream)
    cells = (ctypes.c_uint64 * 2)(*addresses)
    made = []
    for one in function.launches:
        found = driver.function(module, function_symbol("k", one.function), 0)
        together = one.is_cooperative and is_cooperative
        made.append(KernelLaunch.of(found, (one.blocks, one.threads, 0), cells, "ring", (), together))
    return made, addresses[0]


def copied(driver: Driver, address: int, stream: int) -> np.ndarray:
    numbers = np.empty(2 * BLOCKS, np.float32)
    pinned = driver.allocate_host(numbers.nbytes)
    driver.copy_out(pinned, address, numbers.nbytes, stream)
    driver.synchronize(stream)
    ctypes.memmove(numbers.ctypes.data, pinned, numbers.nbytes)
    driver.free_host(pinned)
    return result(numbers)


@pytest.fixture(params=["cuda", "hip", "simulated"])
def driver(request: pytest.FixtureRequest) -> Driver:
    if request.param == "simulated":
        return SimulatedDriver()
    path = fake_driver_library(request.param)
    return CudaDriver(path) if request.param == "cuda" else HipDriver((path,))


def test_launches_are_cooperative(driver: Driver, tmp_path: Path) -> None:
    with driver.active():
        stream = driver.new_stream()
        made, address = works(driver, compile_simulation({"k": ring()}, tmp_path), stream, is_cooperative=True)
        for one in made:
            driver.launch(one, stream)
        np.testing.assert_array_equal(copied(driver, address, stream), expected())
        if not driver.graphs_cooperate:
            Graph(driver, made, [(), (0,)]).launch(stream)
            with pytest.raises(DriverError, match="719"):
                driver.synchronize(stream)
            ctypes.CDLL(fake_driver_library("hip")).fake_mend()
            return
        graph = Graph(driver, made, [(), (0,)])
        for _ in range(2):
            graph.launch(stream)
            np.testing.assert_array_equal(copied(driver, address, stream), expected())
            graph.update([1])
        driver.free_stream(stream)


def test_a_launch_that_does_not_say_so_fails(tmp_path: Path) -> None:
    driver = SimulatedDriver()
    made, _ = works(driver, compile_simulation({"k": ring()}, tmp_path), 0, is_cooperative=False)
    driver.launch(made[0], 0)
    with pytest.raises(DriverError, match="not cooperative"):
        driver.launch(made[1], 0)
