"""Weights that a GPU program copies beside its kernels, on a driver that runs in every order that a program leaves open."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import prefuse
import pytest
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.gpu.driver import Handle, Work
from prefuse.runtime.gpu.library_driver import LibraryDriver
from prefuse.runtime.gpu_device import GpuDevice
from prefuse.runtime.plan import COMPUTE, Copy, Plan, Wait, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.models.chains import chain_input, product_chain

from ..sample import every
from .simulator import FakeGpu

ORDERS = (*range(4), 11, 12, 13)


@pytest.fixture
def limited(simulated_gpu: FakeGpu) -> CompiledModel:
    net = prefuse.compile(product_chain(), target="cuda:sm_90", cache=False, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    simulated_gpu.declare(net.plan)
    return net


@pytest.fixture
def answer(simulated_gpu: FakeGpu) -> np.ndarray:
    result = prefuse.compile(product_chain(), target="cuda:sm_90", cache=False)(chain_input())
    assert isinstance(result, np.ndarray)
    return result


def without(plan: Plan, number: int) -> Plan:
    """The plan without its step `number`."""
    return replace(plan, steps=tuple(step for index, step in enumerate(plan.steps) if index != number))


def test_the_same_bits_in_every_order(simulated_gpu: FakeGpu, limited: CompiledModel, answer: np.ndarray) -> None:
    """A plan without one of its waits is refused by the checker; a graph needs none, as its edges come from the bytes.

    The other orders tomorrow.
    """
    assert any(isinstance(step, Copy) and step.stream != COMPUTE for step in limited.plan.steps)
    for order in every(2, ORDERS):
        simulated_gpu.order(order)
        for _ in range(3):
            np.testing.assert_array_equal(limited(chain_input()), answer)
    waits = [index for index, step in enumerate(limited.plan.steps) if isinstance(step, Wait)]
    assert len(waits) > 3
    assert all(check_plan(without(limited.plan, number)) for number in waits)


def test_an_edge_less_is_noticed(simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever edge of the graph is forgotten: the driver reports a race whatever the order, and so whenever bits are wrong."""
    columns = 128
    net = prefuse.compile(product_chain(columns=columns), target="cuda:sm_90", cache=False, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    simulated_gpu.declare(net.plan)
    add = LibraryDriver.add
    edges = [0, -1]  # counted, and the one that is left out

    def forgetful(self: LibraryDriver, graph: Handle, work: Work, after: Sequence[Handle]) -> Handle:
        numbers = range(edges[0], edges[0] + len(after))
        edges[0] += len(after)
        return add(self, graph, work, [one for one, number in zip(after, numbers, strict=True) if number != edges[1]])

    monkeypatch.setattr(LibraryDriver, "add", forgetful)
    answer = np.asarray(net(chain_input(columns)))
    count = edges[0]
    assert count > 6
    raced = 0
    tried = every(2, range(count))
    for left_out in tried:
        simulated_gpu.order(ORDERS[left_out % len(ORDERS)])
        edges[:] = [0, left_out]
        got = np.asarray(CompiledModel(net.program, GpuDevice("cuda", lambda: simulated_gpu.driver))(chain_input(columns)))
        has_raced = "none waits for the other" in simulated_gpu.races()
        assert has_raced or np.array_equal(got, answer)
        raced += has_raced
    between_copies = sum(isinstance(step, Copy) for step in net.plan.steps) - 1  # kept in order, though their bytes are apart
    assert raced >= len(tried) - between_copies


def test_the_device_holds_no_more_than_the_limit_and_gives_it_back(simulated_gpu: FakeGpu, tmp_path: Path) -> None:
    at_first = simulated_gpu.held()
    limited = prefuse.compile(product_chain(), target="cuda:sm_90", cache=False, memory_limit="60%")
    assert isinstance(limited, CompiledModel)
    check_damaged(limited, tmp_path)
    before, *_ = simulated_gpu.held()
    context = limited.context()
    context(chain_input())
    x = y = 3 * 256 * 4
    assert simulated_gpu.held()[0] - before <= planned_bytes(limited.plan) + x + y + 3 * 256
    assert simulated_gpu.held()[1] >= limited.plan.space("storage").size_bytes
    del context, limited
    gc.collect()  # as in test_device.py
    assert simulated_gpu.held() == at_first


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
