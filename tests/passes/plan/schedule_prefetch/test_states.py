"""Programs with states within a limit: a state and what renews it are the same bytes."""

from __future__ import annotations

from unittest import mock

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.runtime.errors import DeviceError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import STATES, planned_bytes
from prefuse.tests.models.chains import COLUMNS, LINKS, ROWS

_STATE_ROWS = 1024
_STATE_BYTES = _STATE_ROWS * COLUMNS * 4


def summing_chain() -> ir.Model:
    """A chain of products beside the sum of what all calls have given, a state that takes as many bytes as four weights."""
    rng = np.random.default_rng(5)
    links = [f"p{i} = MatMul(h{i}, w{i})  h{i + 1} = Relu(p{i})" for i in range(LINKS)]
    row, state = f"float[{ROWS},{COLUMNS}]", f"float[{_STATE_ROWS},{COLUMNS}]"
    ports = f"({row} h0, {state} new, {state} sum) => ({row} h{LINKS}, {state} next)"
    text = f'<ir_version: 8, opset_import: ["": 18]> main {ports} {{ next = Add(sum, new)  {"  ".join(links)} }}'
    arrays = {f"w{i}": rng.standard_normal((COLUMNS, COLUMNS), np.float32) for i in range(LINKS)}
    return ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in arrays.items()])


def test_a_state_counts_once() -> None:
    limit = 8 * _STATE_BYTES // 5  # less than two of it
    free, net = (
        prefuse.compile(summing_chain(), states={"next": "sum"}, threads=2, memory_limit=most, cache=False)
        for most in (None, limit)
    )
    assert isinstance(free, CompiledModel)
    assert isinstance(net, CompiledModel)
    assert net.plan.space(STATES).size_bytes == _STATE_BYTES
    assert planned_bytes(net.plan) <= limit
    rng = np.random.default_rng(6)
    x, new = rng.standard_normal((ROWS, COLUMNS), np.float32), rng.standard_normal((_STATE_ROWS, COLUMNS), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(net(x, new), free(x, new))
    np.testing.assert_array_equal(net.states["sum"], free.states["sum"])
    refusal = RuntimeError("can't start new thread")
    with mock.patch("threading.Thread.start", side_effect=refusal), pytest.raises(DeviceError):  # before anything has run
        net(x, new)
    np.testing.assert_array_equal(net.states["sum"], free.states["sum"])
