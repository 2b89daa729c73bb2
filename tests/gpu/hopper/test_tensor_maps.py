"""Programs whose kernels copy by tensor maps: from the compiler through a file to a call, by a driver and by the simulator."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
from onnx import ModelProto, numpy_helper, parser
from prefuse.kernels.cost.estimate import Estimate
from prefuse.kernels.linalg.matmul_wgmma_gpu import WgmmaProduct
from prefuse.runtime.errors import DeviceError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.gpu.tensor_maps import EncodedMaps, TensorMap
from prefuse.runtime.gpu_device import GpuDevice
from prefuse.runtime.plan import Launch
from prefuse.runtime.plan_checker import check_plan

from ..simulator import FakeGpu, need_compiler

ENCODE = "cuTensorMapEncodeTiled"
TEXT = """
<ir_version: 10, opset_import: ["": 21]>
main (float16[70,72] x, float16[72,16] v) => (float16[70,16] y, float16[70,16] z) <float16[72,72] w> {
  a = MatMul(x, w)
  b = Relu(a)
  y = MatMul(b, v)
  z = MatMul(x, v)
}
"""


def products() -> ModelProto:
    """Products of an input by a constant, of what comes of it by another input, and of both inputs."""
    model = parser.parse_model(TEXT)
    weights = np.random.default_rng(0).integers(-2, 3, (72, 72)).astype(np.float16)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Small integers, all of whose sums float16 has."""
    rng = np.random.default_rng(seed)
    return rng.integers(-1, 2, (70, 72)).astype(np.float16), rng.integers(-1, 2, (72, 16)).astype(np.float16)


def check(results: Any, seed: int) -> None:
    x, v = (one.astype(np.float64) for one in drawn(seed))
    w = np.random.default_rng(0).integers(-2, 3, (72, 72)).astype(np.float64)
    for got, exact in zip(results, (np.maximum(x @ w, 0) @ v, x @ v), strict=True):
        np.testing.assert_array_equal(np.asarray(got), exact.astype(np.float16))


@pytest.fixture
def by_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size are predicted to take no time by warpgroups."""
    monkeypatch.setattr(WgmmaProduct, "estimate", lambda self: Estimate(1.0, self.size.flops, unit="tile", is_parallel=False))


def compiled(target: str) -> CompiledModel:
    net = prefuse.compile(products(), target=target, cache=False)
    assert isinstance(net, CompiledModel)
    assert {kernel.template for kernel in net.plan.kernels} == {"gpu_wgmma_matmul"}
    maps = {kernel.symbol: len(kernel.grids[0].maps) for kernel in net.plan.kernels}
    assert [maps[step.kernel] for step in net.plan.steps if isinstance(step, Launch)] in ([1, 2, 2], [2, 1, 2])
    assert check_plan(net.plan) == ()
    return net


def test_a_program_of_the_simulator(by_warpgroups: None, tmp_path: Path) -> None:
    """As compiled, and read from a file."""
    need_compiler()
    net = compiled("cuda-sim")
    net.save(tmp_path / "products.prefuse")
    read = prefuse.load(tmp_path / "products.prefuse")
    for seed in range(2):
        check(net(*drawn(seed)), seed)
        check(read(*drawn(seed)), seed)


def test_a_program_by_the_driver(by_warpgroups: None, simulated_gpu: FakeGpu) -> None:
    """Maps are encoded for the memory of each context; where the driver refuses one, it is named, and the next call is right."""
    net = compiled("cuda:sm_90")
    simulated_gpu.declare(net.plan)
    for order in range(4):
        simulated_gpu.order(order)
        check(net(*drawn(order)), order)
    for after in range(5):
        again = CompiledModel(net.program)
        simulated_gpu.fail(ENCODE, after, 1)
        with pytest.raises(DeviceError, match=f"{ENCODE}: CUDA_ERROR_OF_TEST"):
            again(*drawn(0))
        check(again(*drawn(1)), 1)


def test_memory_of_the_caller_is_seen_where_it_is(
    by_warpgroups: None, simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph learns the addresses of each call: maps are encoded again."""
    net, gpu = compiled("cuda:sm_90"), simulated_gpu.driver
    simulated_gpu.declare(net.plan)
    device = GpuDevice("cuda", lambda: gpu)
    ports = (*net.plan.inputs, *net.plan.outputs)
    with gpu.active():
        stream = gpu.new_stream()
        calls = [[gpu.allocate(port.type.size_bytes) for port in ports] for _ in range(3)]
    monkeypatch.setattr("prefuse.runtime.gpu_invocation.stream_of_torch", lambda: stream)
    invocation = device.load(net.program).bind(device.allocate(1 << 16))
    for seed, places in enumerate((*calls, calls[0])):
        for array, place in zip(drawn(seed), places, strict=False):
            ctypes.memmove(place, array.ctypes.data, array.nbytes)
        invocation(*places)
        with gpu.active():
            gpu.synchronize(stream)
        results = [np.ctypeslib.as_array((ctypes.c_uint16 * (70 * 16)).from_address(at)).copy() for at in places[2:]]
        check(tuple(one.view(np.float16).reshape(70, 16) for one in results), seed)


def test_maps_are_encoded_when_their_operand_has_moved() -> None:
    """Each at a multiple of 64 bytes; those that have not moved are not encoded again."""
    maps = EncodedMaps((TensorMap(1, 2, (8,), (), (8,)), TensorMap(0, 2, (8,), (), (8,))))
    assert all(address % 64 == 0 for address in maps.addresses)
    seen: list[tuple[int, int]] = []
    for cells, expected in (((16, 32), [(1, 32), (0, 16)]), ((16, 32), []), ((16, 48), [(1, 48)])):
        seen.clear()
        maps.encode((ctypes.c_uint64 * 2)(*cells), lambda one, address, to: seen.append((one.argument, address)))
        assert seen == expected
