"""Programs of a few microseconds: whether threads are woken for them."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from onnx import TensorProto, helper, numpy_helper
from prefuse.runtime.executor import CompiledModel


def chain(products: int, rows: int) -> onnx.ModelProto:
    """Products by 64x64 matrices with a Tanh behind each, so that none joins the next."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for number in range(products):
        weights.append(numpy_helper.from_array(rng.standard_normal((64, 64), np.float32) / 8, f"w{number}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{number}"], [f"h{number}"]))
        nodes.append(helper.make_node("Tanh", [f"h{number}"], [value := f"y{number}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 64]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize(
    ("products", "rows", "are_woken"),
    [
        (2, 32, False),  # 16,000 operations each: worth a region, but not the waking of a thread
        (30, 32, True),
        (2, 128, True),  # 64,000 each
    ],
)
def test_threads_of_short_programs(products: int, rows: int, are_woken: bool) -> None:
    model = chain(products, rows)
    nets = [prefuse.compile(model, target="cpu:avx2", threads=threads, cache=False) for threads in (1, 2)]
    x = np.random.default_rng(1).standard_normal((rows, 64), np.float32)
    alone, shared = (np.asarray(net(x)) for net in nets)
    np.testing.assert_array_equal(alone, shared)
    net = nets[1]
    assert isinstance(net, CompiledModel)
    assert (b"TVMBackendParallelLaunch" in net.program.library) == are_woken
