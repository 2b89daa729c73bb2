"""Programs with states on GPUs: kept in the GPU's memory, renewed by each call, as the CPU's programs have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import prefuse
import pytest
from onnx import parser
from prefuse.runtime.errors import DeviceError, InputError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan_checker import check_plan

from ...programs.test_states import HEAD, WAYS
from ..simulator import FakeGpu, need_compiler

NAMES = ("in place", "swapped", "shifted", "both the new state and an output", "no inputs")


def compiled(name: str, target: str) -> CompiledModel:
    body, pairs, _ = WAYS[name]
    model = parser.parse_model(HEAD + body)
    net = prefuse.compile(model, states=pairs, target=target, cache=False)
    assert isinstance(net, CompiledModel)
    assert check_plan(net.plan) == ()
    return net


def called(net: CompiledModel, session: object, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    assert callable(session)
    found = session(**{name: inputs[name] for name in net.input_names})
    return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_renewed(name: str, simulated_gpu: FakeGpu, tmp_path: Path) -> None:
    """On the driver double, which reports operations on the same bytes that nothing orders: three calls of two sessions."""
    net, right = compiled(name, "cuda:sm_90"), compiled(name, "cpu")
    rng = np.random.default_rng(3)
    sessions = [(net.context(), right.context()) for _ in range(2)]
    for call in range(3):
        for one, wanted in sessions:
            inputs = {port.name: rng.standard_normal(port.type.shape, dtype=np.float32) for port in net.inputs}
            for got, want in zip(called(net, one, inputs), called(right, wanted, inputs), strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"call {call}")
            for state in one.states:
                np.testing.assert_array_equal(one.states[state], wanted.states[state])
    first = sessions[0][0]
    first.states.save(tmp_path / "kept.npz")
    kept = {state: first.states[state] for state in first.states}
    first.states.reset()
    assert not any(first.states[state].any() for state in first.states)
    first.states.load(tmp_path / "kept.npz")
    for state, array in kept.items():
        np.testing.assert_array_equal(first.states[state], array)
        first.states[state] = array + 1
        np.testing.assert_array_equal(first.states[state], array + 1)


@pytest.mark.parametrize("target", ["cuda-sim", "rocm-sim"])
def test_on_the_simulators(target: str) -> None:
    need_compiler()
    net, right = compiled("in place", target), compiled("in place", "cpu")
    x = np.arange(64, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(net(x)), np.asarray(right(x)))
    np.testing.assert_array_equal(net.states["a"], 3 * x)


def test_a_failed_call_loses_them(simulated_gpu: FakeGpu) -> None:
    net = compiled("in place", "cuda:sm_90")
    x = np.ones(64, np.float32)
    net(x)
    simulated_gpu.fail("cuGraphLaunch")
    with pytest.raises(DeviceError):
        net(x)
    with pytest.raises(InputError, match="lost in a call that failed: a"):
        net.states["a"]
