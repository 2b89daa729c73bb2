"""Programs with recurrences on simulated GPUs: grids, calls in turn, contexts, and what a call that failed leaves."""

from __future__ import annotations

import ctypes
from pathlib import Path
from unittest import mock

import numpy as np
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.errors import DeviceError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.gpu.driver import DriverError
from prefuse.runtime.gpu.simulated_driver import SimulatedDriver
from prefuse.runtime.plan import BARRIERS, Launch, Role

from ..simulator import need_compiler


class Layers(torch.nn.Module):
    """Two layers of both directions, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = torch.nn.GRU(6, 20, num_layers=2, bidirectional=True)
        self.last = torch.nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.recurrent(x)[0])
        return result


def example() -> tuple[torch.nn.Module, torch.Tensor]:
    return Layers().eval(), torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(1))


def compiled(target: str) -> CompiledModel:
    need_compiler()
    module, x = example()
    net = prefuse.compile(module, (x,), target=target, cache=False)
    assert isinstance(net, SpecializedModel)
    net(x)
    (program,) = net.programs
    assert isinstance(program, CompiledModel)
    return program


@pytest.mark.parametrize("target", ["cuda-sim", "rocm-sim"])
def test_a_layer_is_one_grid(target: str, tmp_path: Path) -> None:
    """Its blocks meet at a counter of the context, call after call, also of a program that was read from a file."""
    module, x = example()
    program = compiled(target)
    plan = program.plan
    kernels = {kernel.symbol: kernel for kernel in plan.kernels}
    launched = [kernels[step.kernel] for step in plan.steps if isinstance(step, Launch)]
    assert [len(one.grids) for one in launched if one.template == "gpu_recurrent"] == [1, 1]
    assert [buffer.space for buffer in plan.buffers if buffer.role is Role.BARRIER] == [BARRIERS] * 2
    program.save(tmp_path / "program.prefuse")
    wanted = module(x).detach().numpy()
    for one in (program, prefuse.load(tmp_path / "program.prefuse")):
        context, other = one.context(), one.context()
        first = np.asarray(context(x))
        np.testing.assert_allclose(first, wanted, atol=1e-5)
        for again in (context(x), other(x), context(x)):
            np.testing.assert_array_equal(np.asarray(again), first)


def test_a_call_after_one_that_failed() -> None:
    """Blocks may have come to a barrier and not have left it when a call failed."""
    module, x = example()
    program = compiled("cuda-sim")
    allocated: list[int] = []
    allocate = SimulatedDriver.allocate

    def noted(self: SimulatedDriver, size_bytes: int) -> int:
        address = allocate(self, size_bytes)
        allocated.extend([address] if size_bytes == program.plan.space(BARRIERS).size_bytes else [])
        return address

    with mock.patch.object(SimulatedDriver, "allocate", noted):
        context = program.context()
        context(x)
    with mock.patch.object(SimulatedDriver, "launch_graph", side_effect=DriverError("failed", 1)), pytest.raises(DeviceError):
        context(x)
    assert allocated
    for address in allocated:
        ctypes.memset(address, 0x7F, 4)
    np.testing.assert_allclose(np.asarray(context(x)), module(x).detach().numpy(), atol=1e-5)
