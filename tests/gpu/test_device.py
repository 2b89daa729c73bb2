"""Whole programs on the CUDA device: the driver is a C library of the test, its GPU the simulator."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import prefuse
import prefuse.backend as backend
import pytest
import torch
from onnx import TensorProto, parser
from prefuse.runtime.errors import ArenaMemoryError, DeviceError, InputError, OptionError, ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.gpu.cuda_driver import CudaDriver
from prefuse.runtime.gpu.driver import DriverError
from prefuse.runtime.gpu_device import GpuDevice
from prefuse.runtime.plan import Copy
from prefuse.runtime.target import Target

from .simulator import FakeGpu, fake_driver_library

TEXT = """
<ir_version: 10, opset_import: ["": 21]>
main (float[3,8] x) => (float[3,5] y, float[3,8] same, float[15] flat)
<float[8,5] w, float[5] b> {
  h = MatMul(x, w)
  a = Add(h, b)
  y = Softmax(a)
  same = Identity(x)
  flat = Flatten_shape(y)
}
"""


def small_model() -> onnx.ModelProto:
    """A product with an epilogue, a normalization, an output that is an input, and one that is another output's view."""
    model = parser.parse_model(TEXT.replace("flat = Flatten_shape(y)", "s = Constant<value_ints=[15]>() flat = Reshape(y, s)"))
    rng = np.random.default_rng(0)
    for name, shape in (("w", (8, 5)), ("b", (5,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, dtype=np.float32), name))
    return model


def expected(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(one) for one in onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})]


def run(net: object, x: object) -> list[Any]:
    """All outputs of a call."""
    assert callable(net)
    return list(net(x))


def compiled() -> CompiledModel:
    """The small model for the simulated GPU."""
    net = prefuse.compile(small_model(), target="cuda:sm_90", cache=False)
    assert isinstance(net, CompiledModel)
    return net


def inputs() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)


def test_a_program_runs_and_survives_its_file(simulated_gpu: FakeGpu, tmp_path: Path) -> None:
    model = small_model()
    net = compiled()
    assert any(isinstance(step, Copy) for step in net.plan.steps)
    assert all(kernel.grids for kernel in net.plan.kernels)
    path = tmp_path / "net.prefuse"
    net.save(path)
    x = inputs()
    for program in (net, prefuse.load(path)):
        for _ in range(2):
            for got, want in zip(run(program, x), expected(model, x), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5)


def test_torch_tensors_give_torch_tensors(simulated_gpu: FakeGpu) -> None:
    model, x = small_model(), inputs()
    y, *_ = run(compiled(), torch.from_numpy(x))
    assert isinstance(y, torch.Tensor)
    np.testing.assert_allclose(y.numpy(), expected(model, x)[0], rtol=1e-5)


def test_addresses_on_the_device_are_used_where_they_are(simulated_gpu: FakeGpu) -> None:
    """Memory of the driver in, memory of the driver out: nothing is staged."""
    model, x = small_model(), inputs()
    net = compiled()
    device = GpuDevice("cuda", lambda: simulated_gpu.driver)
    invocation = device.load(net._program).bind(device.allocate(1 << 16))
    sizes = [port.type.size_bytes for port in (*net.plan.inputs, *net.plan.outputs)]
    with simulated_gpu.driver.active():
        places = [simulated_gpu.driver.allocate(size) for size in sizes]
        simulated_gpu.driver.copy_in(places[0], x.ctypes.data, x.nbytes, 0)
        simulated_gpu.driver.synchronize(0)
    before = simulated_gpu.held()[:2]
    invocation(*places)
    assert simulated_gpu.held()[:2] == before
    y = np.ctypeslib.as_array((ctypes.c_float * 15).from_address(places[1])).reshape(3, 5)
    np.testing.assert_allclose(y, expected(model, x)[0], rtol=1e-5)


def test_addresses_between_vectors_are_copied(simulated_gpu: FakeGpu) -> None:
    """Kernels load 16 bytes at once: what a caller has at other addresses of the device is copied, and so are results."""
    model, x = small_model(), inputs()
    net = compiled()
    gpu = simulated_gpu.driver
    device = GpuDevice("cuda", lambda: gpu)
    invocation = device.load(net._program).bind(device.allocate(1 << 16))
    sizes = [port.type.size_bytes for port in (*net.plan.inputs, *net.plan.outputs)]
    with gpu.active():
        places = [gpu.allocate(size + 4) + 4 for size in sizes]
        gpu.copy_in(places[0], x.ctypes.data, x.nbytes, 0)
        gpu.synchronize(0)
    for _ in range(2):
        invocation(*places)
        y = np.ctypeslib.as_array((ctypes.c_float * 15).from_address(places[1])).reshape(3, 5)
        np.testing.assert_allclose(y, expected(model, x)[0], rtol=1e-5)
        y.fill(0)


def test_memory_of_the_device_is_freed(simulated_gpu: FakeGpu) -> None:
    before = simulated_gpu.held()[:2]
    net = compiled()
    net(inputs())
    assert simulated_gpu.held()[:2] > before
    del net
    gc.collect()  # TVM keeps exceptions of its choice of instructions, and with them the frames of the compiler, in a cycle
    assert simulated_gpu.held()[:2] == before


def test_threads_share_the_program(simulated_gpu: FakeGpu) -> None:
    model = small_model()
    net = compiled()
    failures: list[str] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((3, 8), dtype=np.float32)
        results = [run(net, x)[0] for _ in range(5)]
        failures.extend(f"seed {seed}" for y in results if not np.allclose(y, expected(model, x)[0], rtol=1e-5))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures


def test_types_that_numpy_lacks(simulated_gpu: FakeGpu) -> None:
    x = np.linspace(-3, 3, 24).astype(ml_dtypes.bfloat16).reshape(4, 6)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "x"], ["h"]), onnx.helper.make_node("Relu", ["h"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", TensorProto.BFLOAT16, x.shape)],
        [onnx.helper.make_tensor_value_info("y", TensorProto.BFLOAT16, x.shape)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    net = prefuse.compile(model, target="cuda:sm_90", cache=False)
    assert isinstance(net, CompiledModel)
    got = np.asarray(net(x))
    np.testing.assert_array_equal(got.astype(np.float32), np.maximum((x + x).astype(np.float32), 0))


def test_without_a_driver(tmp_path: Path, simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling, writing, reading and reporting need no GPU; a call says that there is none."""

    def absent(kind: str) -> CudaDriver:
        raise DriverError("this machine has no NVIDIA driver")

    monkeypatch.setattr("prefuse.runtime.gpu.installed._driver", absent)
    path = tmp_path / "net.prefuse"
    compiled().save(path)
    net = prefuse.load(path)
    assert "for cuda:sm_90" in net.report()
    with pytest.raises(DeviceError, match="no NVIDIA driver; run the program on a machine with an NVIDIA GPU"):
        net(inputs())
    with pytest.raises(OptionError, match=r'"cuda" is the GPU of this machine: .*name one, as in "cuda:sm_90"'):
        Target.parse("cuda")


def test_the_installed_gpu_is_the_default(simulated_gpu: FakeGpu) -> None:
    assert Target.parse("cuda") == Target("cuda", "sm_90")


def test_kernels_of_few_threads_are_reported_as_slow(simulated_gpu: FakeGpu) -> None:
    """A product along a long axis, whose order matters, has a thread for each of its three rows."""
    text = """<ir_version: 10, opset_import: ["": 26]> main (float[3,600000] x) => (float[3,600000] y) <int64 a = {1}> {
      y = CumProd(x, a)
    }"""
    slow = prefuse.compile(parser.parse_model(text), target="cuda:sm_90", cache=False)
    assert isinstance(slow, CompiledModel)
    assert "CumProd at y: scan for 1.8 MFLOP in grids of at most 32 threads" in slow.report()
    assert "slow paths: none" in compiled().report()


def test_onnx_backend_interface(simulated_gpu: FakeGpu) -> None:
    model, x = small_model(), inputs()
    assert backend.supports_device("CUDA")
    y, *_ = backend.prepare(model, "CUDA:0").run([x])
    np.testing.assert_allclose(y, expected(model, x)[0], rtol=1e-5)


def test_a_torch_module(simulated_gpu: FakeGpu) -> None:
    """Compiled at its first call, its tensors on the CPU."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 70), torch.nn.GELU(), torch.nn.LayerNorm(70)).eval()
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((5, 6), dtype=np.float32))
    y = prefuse.compile(module, target="cuda:sm_90", cache=False)(x)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, module(x).detach(), rtol=1e-4, atol=1e-5)


def test_no_driver_library() -> None:
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        CudaDriver("libcuda-that-is-not-there.so")


def test_a_binary_that_the_gpu_cannot_run(simulated_gpu: FakeGpu, tmp_path: Path) -> None:
    net = compiled()
    for library in tmp_path.glob("device*/kernels.so"):
        library.unlink()
    with pytest.raises(ProgramFileError, match=r"compiled for cuda:sm_90, which this GPU \(cuda:sm_90\) cannot run"):
        net(inputs())


def test_a_failed_launch(simulated_gpu: FakeGpu) -> None:
    net = compiled()
    net(inputs())
    simulated_gpu.fail("cuGraphLaunch", code=2)
    with pytest.raises(DeviceError, match=r"cuGraphLaunch: CUDA_ERROR_OF_TEST"):
        net(inputs())
    net(inputs())


def test_a_gpu_too_small_for_blocks_that_wait_for_each_other(simulated_gpu: FakeGpu) -> None:
    """Which the driver refuses, and goes on."""
    net = compiled()
    simulated_gpu.fail("cuGraphLaunch", code=720)
    with pytest.raises(DeviceError, match="fewer multiprocessors than the GPU of its architecture"):
        net(inputs())
    net(inputs())


def test_too_little_memory(simulated_gpu: FakeGpu) -> None:
    with pytest.raises(ArenaMemoryError, match="no memory for 2199023255552 bytes of activations on the GPU"):
        GpuDevice("cuda", lambda: simulated_gpu.driver).allocate(1 << 41)


def test_tensors_elsewhere_are_refused(simulated_gpu: FakeGpu) -> None:
    net = compiled()
    with pytest.raises(InputError, match="on meta"):
        net(torch.empty(3, 8, device="meta"))


def test_the_fake_driver_is_strict() -> None:
    """Frees and allocates only inside of a context, copies only between both sides: mistakes of the device show."""
    driver = CudaDriver(fake_driver_library())
    with pytest.raises(DriverError):
        driver.allocate(4)
    with driver.active():
        place = driver.allocate(4)
        with pytest.raises(DriverError):
            driver.copy_in(place, place, 4, 0)
        with pytest.raises(DriverError):
            driver.copy_out(inputs().ctypes.data, place, 8, 0)
        driver.free(place)
