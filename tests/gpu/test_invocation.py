"""Calls on a GPU that does everything as late as it may: graphs, streams of torch, staging, faults of every entry point."""

from __future__ import annotations

import ctypes
import gc
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from onnx import ModelProto, numpy_helper, parser
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.errors import ArenaMemoryError, DeviceError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.gpu.cuda_driver import CudaDriver
from prefuse.runtime.gpu.driver import DriverError
from prefuse.runtime.gpu.entry_points import ENTRY_POINTS
from prefuse.runtime.gpu.hip_driver import HipDriver
from prefuse.runtime.gpu.library_driver import LibraryDriver
from prefuse.runtime.gpu_device import GpuDevice
from prefuse.runtime.gpu_invocation import CHECK, GpuInvocation
from prefuse.runtime.target import Target

from .simulator import FakeGpu, fake_driver_library, simulate

ORDERS = (*range(4), 21, 22)
TEXT = """
<ir_version: 10, opset_import: ["": 21]>
main (float[6,8] x) => (float[6,8] y, float[6,8] z, float[6,8] same) <float[8,8] w, float[8,8] v> {
  a = MatMul(x, w)
  b = MatMul(x, v)
  e = Softmax(a)
  f = Softmax(b)
  g = Add(e, f)
  y = MatMul(g, w)
  z = MatMul(e, v)
  same = Identity(x)
}
"""


def branches() -> ModelProto:
    """Two branches that meet, and a copy of the input."""
    model = parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((8, 8), dtype=np.float32), name) for name in "wv"]
    model.graph.initializer.extend(weights)
    return model


def compiled(gpu: FakeGpu) -> CompiledModel:
    net = prefuse.compile(branches(), target="cuda:sm_90", cache=False)
    assert isinstance(net, CompiledModel)
    gpu.declare(net.plan)
    return net


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((6, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def expected() -> Callable[[int], Sequence[np.ndarray]]:
    """The results on the CPU for the input of a seed."""
    net = prefuse.compile(branches(), target="cpu", cache=False)
    assert isinstance(net, CompiledModel)
    return lambda seed: run(net, seed)


def check(results: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)


def run(net: Callable[..., Any], seed: int) -> list[np.ndarray]:
    """All results for the input of a seed."""
    return [np.asarray(one) for one in net(drawn(seed))]


class OnDevice:
    """Arrays on the fake device for the parameters of a program, and calls with them."""

    def __init__(self, gpu: FakeGpu, net: CompiledModel) -> None:
        self._gpu = gpu
        self._ports = (*net.plan.inputs, *net.plan.outputs)
        with gpu.driver.active():
            self.places = [gpu.driver.allocate(port.type.size_bytes) for port in self._ports]

    def set_input(self, array: np.ndarray) -> None:
        ctypes.memmove(self.places[0], array.ctypes.data, array.nbytes)

    def results(self) -> list[np.ndarray]:
        """What lies there now, whether it is finished or not."""
        pairs = [(port.type, at) for port, at in zip(self._ports, self.places, strict=True)][1:]
        return [np.array((ctypes.c_float * kind.elements).from_address(at)).reshape(kind.shape) for kind, at in pairs]


def test_one_graph_whose_branches_may_run_side_by_side(
    simulated_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is one launch of a graph; in no order do its nodes meet in the same bytes, and some run in another order."""
    net = compiled(simulated_gpu)
    monkeypatch.delattr(LibraryDriver, "launch")
    for order in ORDERS:
        simulated_gpu.order(order)
        for seed in range(3):
            check(run(net, seed), expected(seed))
    assert simulated_gpu.races() == ""


def test_calls_in_a_stream_of_torch_are_left_to_it(
    simulated_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call returns before it has run; the next one of the context, in another stream and with other memory, waits for it."""
    net = compiled(simulated_gpu)
    gpu = simulated_gpu.driver
    device = GpuDevice("cuda", lambda: gpu)
    with gpu.active():
        streams = [gpu.new_stream() for _ in range(2)]
    for order in ORDERS:
        simulated_gpu.order(order)
        invocation = device.load(net.program).bind(device.allocate(1 << 16))
        calls = [OnDevice(simulated_gpu, net) for _ in range(3)]
        for number, call in enumerate(calls):
            call.set_input(drawn(number))
            monkeypatch.setattr("prefuse.runtime.gpu_invocation.stream_of_torch", lambda number=number: streams[number % 2])
            invocation(*call.places)
        with gpu.active():
            for stream in streams:
                gpu.synchronize(stream)
        for number, call in enumerate(calls):
            check(call.results(), expected(number))
    assert simulated_gpu.races() == ""


@pytest.mark.parametrize("fault", ["wait", "wait_here", "stream", "copy_out"])
def test_planted_faults_are_found_every_time(
    simulated_gpu: FakeGpu, fault: str, expected: Callable[[int], Sequence[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing event, a graph changed in flight, a wrong stream, memory used before it is copied out."""
    net = compiled(simulated_gpu)
    gpu = simulated_gpu.driver
    device = GpuDevice("cuda", lambda: gpu)
    with gpu.active():
        streams = [gpu.new_stream() for _ in range(2)]
    if fault in ("wait", "wait_here"):
        monkeypatch.setattr(LibraryDriver, fault, lambda *a: None)
    for order in ORDERS:
        simulated_gpu.order(order)
        if fault == "stream":
            real = LibraryDriver.copy_out
            monkeypatch.setattr(LibraryDriver, "copy_out", lambda self, a, b, n, s, real=real: real(self, a, b, n, streams[0]))
        if fault == "copy_out":
            monkeypatch.setattr(LibraryDriver, "synchronize", lambda *a: None)
        if fault in ("stream", "copy_out"):
            got = run(net.context(), 0)
            said = simulated_gpu.races()
            is_wrong = any(not np.allclose(a, b, 1e-5, 1e-6) for a, b in zip(got, expected(0), strict=True))
            assert said if fault == "stream" else is_wrong
            continue
        invocation = device.load(net.program).bind(device.allocate(1 << 16))
        for number in range(2):
            call = OnDevice(simulated_gpu, net)
            call.set_input(drawn(number))
            monkeypatch.setattr("prefuse.runtime.gpu_invocation.stream_of_torch", lambda number=number: streams[number % 2])
            if fault == "wait" and number:  # the same memory: the graph need not change, which waits, too
                monkeypatch.setattr(GpuInvocation, "_settle", lambda self: None)
            invocation(*call.places)
        assert simulated_gpu.races()
    monkeypatch.undo()
    simulated_gpu.mend()
    simulated_gpu.races()


def test_many_threads_in_random_orders(simulated_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]]) -> None:
    net = compiled(simulated_gpu)
    wanted = [expected(seed) for seed in range(8)]
    failures: list[str] = []

    def work(seed: int) -> None:
        try:
            for number in range(100):
                simulated_gpu.order(seed * 100 + number)
                check(run(net, seed), wanted[seed])
        except BaseException as error:
            failures.append(f"{seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failures == []
    assert simulated_gpu.races() == ""


def test_every_failing_entry_point_has_a_name(
    simulated_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]], tmp_path: Path
) -> None:
    """Whatever fails, at its first call or a later one: one error that names it, nothing is held, and the next call is right."""
    at_first = simulated_gpu.held()
    program = compiled(simulated_gpu).program
    failed = {}
    for name, entry in ENTRY_POINTS.items():
        for after in (0, 1, 2):
            net = CompiledModel(program)
            simulated_gpu.fail(entry.cuda, after, 1)
            try:
                for _ in range(2):
                    check(run(net, 1), expected(1))
            except DeviceError as error:
                failed[entry.cuda] = str(error)
            simulated_gpu.mend()
            check(run(net, 2), expected(2))
            del net
            if name.startswith("free") or name == "unload":  # what cannot be given back stays
                at_first = simulated_gpu.held()
            assert simulated_gpu.held() == at_first, (name, after)
    assert all(f"{symbol}: CUDA_ERROR_OF_TEST (1)" in text for symbol, text in failed.items())
    called = {"allocate", "allocate_host", "load", "function", "new_stream", "new_event", "synchronize", "copy_in", "copy_out"}
    called |= {"new_graph", "add_kernel", "instantiate", "launch_graph"}
    assert {ENTRY_POINTS[name].cuda for name in called} <= failed.keys()


@pytest.mark.parametrize("api", ["cuda", "hip"])
def test_an_absent_entry_point_has_a_name(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a driver that is older than what is called."""

    class Old:
        def __init__(self, library: ctypes.CDLL, absent: str) -> None:
            self._library, self._absent = library, absent

        def __getattr__(self, name: str) -> object:
            if name == self._absent:
                raise AttributeError(name)
            return getattr(self._library, name)

    real, path = ctypes.CDLL, fake_driver_library(api)
    for entry in ENTRY_POINTS.values():
        absent = getattr(entry, api)
        monkeypatch.setattr("ctypes.CDLL", lambda name, absent=absent: Old(real(name), absent))
        with pytest.raises(DriverError, match=f"has no {absent}, which (CUDA 12.0|ROCm 6.0) and newer have"):
            CudaDriver(path) if api == "cuda" else HipDriver((path,))


def test_too_little_memory_says_how_much_there_is(simulated_gpu: FakeGpu) -> None:
    net = compiled(simulated_gpu)
    simulated_gpu.fail("cuMemAlloc_v2", 0, 2)
    with pytest.raises(ArenaMemoryError, match=r"on the GPU: \d+ of its \d+ bytes are free; .* memory_limit="):
        run(net, 0)
    simulated_gpu.fail("cuMemHostAlloc", 0, 2)
    with pytest.raises(ArenaMemoryError, match="no pinned memory for 192 bytes of x on the host"):
        run(net, 0)


def test_a_kernel_that_fails_is_named_when_asked_for(simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails while it runs; the error shows at the next wait and stays, as on a GPU."""
    net = compiled(simulated_gpu)
    run(net, 0)
    for code in (700, 709, 710):  # an illegal address, a context that was destroyed, an assert of the kernel
        simulated_gpu.break_kernel(code)
        for _ in range(2):
            with pytest.raises(DeviceError, match=rf"set {CHECK}=1 to learn which kernel it is; no call of this process"):
                run(net, 0)
        simulated_gpu.mend()
    monkeypatch.setenv(CHECK, "1")
    simulated_gpu.fail("cuLaunchKernel", 2, 700)
    with pytest.raises(DeviceError, match=r"step \d+, .*: .*, \d+ blocks of \d+ threads: cuLaunchKernel"):
        run(compiled(simulated_gpu), 0)
    simulated_gpu.mend()


def test_checked_calls_give_the_same(
    simulated_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK, "1")
    check(run(compiled(simulated_gpu), 4), expected(4))


def test_each_step_has_a_time(simulated_gpu: FakeGpu) -> None:
    """Events of the driver between the steps; the double's clock counts a microsecond an operation."""
    at_first = simulated_gpu.held()
    net = compiled(simulated_gpu)
    profile = net.profile(drawn(0), runs=3)
    assert len(profile.steps) == len(net.plan.steps)
    assert all(step.time_us >= 1 for step in profile.steps)
    assert profile.time_us == pytest.approx(sum(step.time_us for step in profile.steps), rel=0.01)
    del net, profile
    gc.collect()  # as in test_device.py
    assert simulated_gpu.held() == at_first


def test_steps_of_a_call_that_is_left_to_torch_have_times(simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors lie on the GPU: the call does not wait, but its times do."""
    net = compiled(simulated_gpu)
    gpu = simulated_gpu.driver
    device = GpuDevice("cuda", lambda: gpu)
    with gpu.active():
        stream = gpu.new_stream()
    monkeypatch.setattr("prefuse.runtime.gpu_invocation.stream_of_torch", lambda: stream)
    profile = device.load(net.program).bind_profile(device.allocate(1 << 16))
    call = OnDevice(simulated_gpu, net)
    call.set_input(drawn(0))
    row = (ctypes.c_int64 * (3 + len(net.plan.steps)))()
    profile(*call.places, ctypes.addressof(row))
    assert all(later - one >= 1000 for one, later in itertools.pairwise(row[2:]))


def test_a_graph_that_could_not_be_changed_is_changed_by_the_next_call(
    simulated_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]]
) -> None:
    """Whatever part of it has other addresses, those of a call are given to it again."""
    net = compiled(simulated_gpu)
    device = GpuDevice("cuda", lambda: simulated_gpu.driver)
    invocation = device.load(net.program).bind(device.allocate(1 << 16))
    one, other = (OnDevice(simulated_gpu, net) for _ in range(2))
    one.set_input(drawn(0))
    other.set_input(drawn(1))
    invocation(*one.places)
    for after in range(3):
        simulated_gpu.fail("cuGraphExecKernelNodeSetParams_v2", after, 1)
        with pytest.raises(DeviceError):
            invocation(*other.places)
        simulated_gpu.mend()
        one.set_input(drawn(after))
        invocation(*one.places)
        check(one.results(), expected(after))


@pytest.fixture
def amd_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    """The same double with HIP's names."""
    path = fake_driver_library("hip")
    gpu = FakeGpu(HipDriver((path,)), path)
    simulate(monkeypatch, tmp_path, gpu.driver)
    return gpu


def on_amd(net: CompiledModel) -> CompiledModel:
    """The program as one for an AMD GPU, its code that of the simulator."""
    header = struct.pack("<4sBBBBB7xHHI24xI12x", b"\x7fELF", 2, 1, 1, 0x40, 4, 2, 224, 1, 0x04C)
    plan = replace(net.plan, target="rocm:gfx942")
    return CompiledModel(replace(net.program, plan=plan, library=header + net.program.library[64:]))


def test_programs_for_amd_run(amd_gpu: FakeGpu, expected: Callable[[int], Sequence[np.ndarray]], tmp_path: Path) -> None:
    """Through HIP: from a file, in every order, on several contexts; and all that was taken is given back."""
    at_first = amd_gpu.held()
    net = on_amd(compiled(amd_gpu))
    path = tmp_path / "amd.prefuse"
    net.save(path)
    loaded = prefuse.load(path)
    for order in ORDERS:
        amd_gpu.order(order)
        for one in (net, loaded, net.context()):
            check(run(one, order), expected(order))
    assert amd_gpu.races() == ""
    assert len(net.profile(drawn(0), runs=2).steps) == len(net.plan.steps)
    del net, loaded, one
    assert amd_gpu.held() == at_first


def test_a_device_and_errors_of_others_stay(amd_gpu: FakeGpu) -> None:
    """The thread's device is that from before, and no failure that was handled is left for torch to find."""
    library = ctypes.CDLL(fake_driver_library("hip"))
    library.hipSetDevice(1)
    run(on_amd(compiled(amd_gpu)), 0)
    found = ctypes.c_int()
    library.hipGetDevice(ctypes.byref(found))
    assert (found.value, library.hipPeekAtLastError()) == (1, 0)
    amd_gpu.fail("hipMalloc", 0, 1)
    with pytest.raises(DriverError), amd_gpu.driver.active():
        amd_gpu.driver.allocate(1)
    assert library.hipPeekAtLastError() == 0


def test_the_library_that_torch_has_is_taken() -> None:
    """Whatever the loader would find by its name, which for this one is nothing."""
    assert fake_driver_library("hip")
    ctypes.CDLL(fake_driver_library("hip"))
    assert HipDriver(("libhip.so",)).version() == "ROCm 6.2"


def test_layers_whose_blocks_meet_run_on_amd(amd_gpu: FakeGpu) -> None:
    """HIP launches no node of a graph cooperatively: such programs are launched step by step, all others by a graph."""
    module, x = two_layers(), torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1))
    specialized = prefuse.compile(module, (x,), target="cuda:sm_90", cache=False)
    assert isinstance(specialized, SpecializedModel)
    program = specialized.specialize(x)
    assert isinstance(program, CompiledModel)
    net = on_amd(program)
    for order in ORDERS:
        amd_gpu.order(order)
        np.testing.assert_allclose(np.asarray(net(x.numpy())), module(x).numpy(), atol=1e-5)


def two_layers() -> torch.nn.Module:
    """Of both directions."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = torch.nn.GRU(6, 20, num_layers=2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.recurrent(x)[0]
            return y

    torch.manual_seed(0)
    return Layers().eval().requires_grad_(False)


def test_the_installed_amd_gpu_is_the_default(amd_gpu: FakeGpu) -> None:
    assert Target.parse("rocm") == Target("rocm", "gfx942")
    assert amd_gpu.driver.version() == "ROCm 6.2"


def test_no_amd_driver() -> None:
    with pytest.raises(DriverError, match="no AMD driver"):
        HipDriver(("libamdhip64-that-is-not-there.so",))
