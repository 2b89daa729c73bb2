"""Groups as kernels get them."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from onnx import TensorProto, helper


@pytest.mark.parametrize("name", [".0", ".1", "..0"])
def test_a_model_may_name_its_values_as_groups_name_theirs(name: str) -> None:
    nodes = [helper.make_node(*one) for one in (("Exp", [name], ["h"]), ("Add", ["h", name], ["k"]), ("Tanh", ["k"], ["y"]))]
    ends = [helper.make_tensor_value_info(one, TensorProto.FLOAT, [8]) for one in (name, "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    x = np.linspace(-3, -1, 8, dtype=np.float32)
    found = np.asarray(prefuse.compile(model, cache=False)(x))
    np.testing.assert_allclose(found, np.tanh(np.exp(x) + x), rtol=1e-5)
