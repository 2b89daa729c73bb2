"""Random small models, compiled whole, against onnx.reference: from an arena of garbage, on inputs at odd addresses."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import onnx_ir as ir
import prefuse
from hypothesis import HealthCheck, given, reject, settings
from prefuse.compiler.oracle import random_inputs, relative_error, run_model
from prefuse.runtime.executor import CompiledModel, arena_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.models.program_strategies import programs

# By default the same programs at every run; a number asks for as many new ones.
EXAMPLES = int(os.environ.get("PREFUSE_TEST_EXAMPLES", "100"))


def misaligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins one element after a cache line, where there is room for elements at all."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run_poisoned(net: CompiledModel, inputs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The model's outputs, computed in an arena full of 0xAB."""
    context = net.context()
    arena = context._device.allocate(arena_bytes(net.plan))
    ctypes.memset(arena.address, 0xAB, arena_bytes(net.plan))
    context._invocation = context._executable.bind(arena)
    result = context(*inputs)
    assert isinstance(result, np.ndarray | tuple)
    return result if isinstance(result, tuple) else (result,)


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize="PREFUSE_TEST_EXAMPLES" not in os.environ, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(programs())
def test_compiled_programs_agree_with_the_reference(model: ir.Model) -> None:
    inputs = random_inputs(model)
    try:
        with np.errstate(all="ignore"):
            expected = list(run_model(model, inputs, "reference").values())
    except (IndexError, ValueError):
        reject()  # an operator that has no meaning on an empty tensor
    net = prefuse.compile(model, cache=False)
    if not isinstance(net, CompiledModel):
        reject()  # a branch that the data decide
    assert not check_plan(net.plan)
    arrays = [misaligned(inputs[port.name]) for port in net.inputs]
    first, second = run_poisoned(net, arrays), run_poisoned(net, [a.copy() for a in arrays])
    for port, one, two, wanted in zip(net.outputs, first, second, expected, strict=True):
        assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape), port.name
        assert one.tobytes() == two.tobytes(), f"{port.name} depends on the arena"
        tolerance = 1e-5 if one.dtype.kind == "f" else 0.0
        assert relative_error(one, wanted) <= tolerance, port.name
