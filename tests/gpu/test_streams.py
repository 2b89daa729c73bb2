"""Weights that a GPU program copies beside its kernels, on a driver whose streams run in the worst orders that events allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import prefuse
import pytest
from prefuse.runtime.cuda_device import CudaDevice
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.hardware.cuda_driver import CudaDriver
from prefuse.runtime.plan import COMPUTE, Copy, Plan, Wait, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.models.chains import chain_input, product_chain

ORDERS = (0, 1, 2)  # as asked for, copies first, kernels first


@pytest.fixture
def limited(simulated_gpu: CudaDriver) -> CompiledModel:
    net = prefuse.compile(product_chain(), target="cuda:sm_90", cache=False, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    return net


@pytest.fixture
def answer(simulated_gpu: CudaDriver) -> np.ndarray:
    result = prefuse.compile(product_chain(), target="cuda:sm_90", cache=False)(chain_input())
    assert isinstance(result, np.ndarray)
    return result


def without(plan: Plan, number: int) -> Plan:
    """The plan without its step `number`."""
    return replace(plan, steps=tuple(step for index, step in enumerate(plan.steps) if index != number))


def test_the_same_bits_in_every_order_or_a_wait_is_missing(
    simulated_gpu: CudaDriver, limited: CompiledModel, answer: np.ndarray
) -> None:
    """Without any one of its waits the checker refuses the plan, and some order gives other bits: so would a forgetful device."""
    assert any(isinstance(step, Copy) and step.stream != COMPUTE for step in limited.plan.steps)
    for order in ORDERS:
        simulated_gpu._library.fake_order(order)
        for _ in range(3):
            np.testing.assert_array_equal(limited(chain_input()), answer)
    waits = [index for index, step in enumerate(limited.plan.steps) if isinstance(step, Wait)]
    assert len(waits) > 3
    for number in waits:
        broken = without(limited.plan, number)
        assert check_plan(broken)
        net = CompiledModel(replace(limited.program, plan=broken), CudaDevice(lambda: simulated_gpu))
        results = []
        for order in ORDERS:
            simulated_gpu._library.fake_order(order)
            results += [np.array_equal(np.asarray(net(chain_input())), answer) for _ in range(2)]
        assert not all(results)


def test_the_device_holds_no_more_than_the_limit_and_gives_it_back(simulated_gpu: CudaDriver, tmp_path: Path) -> None:
    library = simulated_gpu._library
    at_first = library.fake_bytes(), library.fake_pinned_bytes()
    limited = prefuse.compile(product_chain(), target="cuda:sm_90", cache=False, memory_limit="60%")
    assert isinstance(limited, CompiledModel)
    check_damaged(limited, tmp_path)
    before = simulated_gpu._library.fake_bytes()
    context = limited.context()
    context(chain_input())
    x = y = 3 * 256 * 4
    assert simulated_gpu._library.fake_bytes() - before <= planned_bytes(limited.plan) + x + y + 3 * 256
    assert simulated_gpu._library.fake_pinned_bytes() >= limited.plan.space("storage").size_bytes
    del context, limited
    assert (library.fake_bytes(), library.fake_pinned_bytes()) == at_first


def check_damaged(limited: CompiledModel, tmp_path: Path) -> None:
    """Weights that are not what they were are refused at the first call."""
    path = tmp_path / "limited.prefuse"
    limited.save(path)
    loaded = prefuse.load(path)
    assert isinstance(loaded, CompiledModel)
    assert loaded.program.storage is not None
    with open(path, "r+b") as file:
        file.seek(loaded.program.storage.start + 64)
        file.write(b"\xff" * 16)
    with pytest.raises(ProgramFileError, match="are not those that were written"):
        loaded(chain_input())
