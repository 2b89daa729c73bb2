"""Weights are read, packed and written one after the other: compiling a model takes little more memory than they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.tests.sample import every

_LAYERS, _WIDTH = 8, 1024  # 4 MiB of weights each
_LIMIT = 2.5  # bytes of memory for a byte of weights, beyond what any model takes

# Peaks are those of the process itself: ru_maxrss begins with that of the process that started it, which holds far more.
_CHILD = """
import sys, prefuse
from prefuse.tests.memory.child import resident

def peak_bytes(path):
    prefuse.compile(path, cache=False)
    return resident("VmHWM")

first = peak_bytes(sys.argv[1])
print(peak_bytes(sys.argv[2]) - first)
"""


def products(path: Path, layers: int, width: int, *, scaled: bool) -> int:
    """Save a chain of matrix products, perhaps with columns `scaled`, weights in a file of their own; return their bytes."""
    generator = np.random.default_rng(0)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4, width]))
    weights, nodes, value = [], [], x
    for layer in range(layers):
        tensor = ir.Tensor(generator.standard_normal((width, width), np.float32), name=f"w{layer}")
        kind = ir.TensorType(tensor.dtype)
        weights.append(ir.Value(name=tensor.name, type=kind, shape=ir.Shape(tensor.shape), const_value=tensor))
        nodes.append(ir.node("MatMul", [value, weights[-1]], name=f"product{layer}"))
        if scaled:
            nodes[-1].outputs[0].name = f"p{layer}"
            scale = ir.tensor(generator.uniform(0.5, 1.5, width).astype(np.float32), name=f"s{layer}")
            weights.append(ir.Value(name=scale.name, type=kind, shape=ir.Shape([width]), const_value=scale))
            nodes.append(ir.node("Mul", [nodes[-1].outputs[0], weights[-1]], name=f"scaled{layer}"))
        value = nodes[-1].outputs[0]
        value.name = f"v{layer}"
    value.type, value.shape = x.type, x.shape
    graph = ir.Graph([x], [value], nodes=nodes, initializers=weights, opset_imports={"": 21}, name="products")
    ir.save(ir.Model(graph, ir_version=10), path, external_data=f"{path.name}.data")
    return layers * width * width * 4


@pytest.mark.parametrize("scaled", every(2, [False, True]))
def test_memory_is_in_proportion_to_the_weights(tmp_path: Path, scaled: bool) -> None:
    """Also where each weight is folded with a scale."""
    small, large = tmp_path / "small.onnx", tmp_path / "large.onnx"
    products(small, 1, 64, scaled=scaled)
    weight_bytes = products(large, _LAYERS, _WIDTH, scaled=scaled)
    child = [sys.executable, "-c", _CHILD, str(small), str(large)]
    result = subprocess.run(child, capture_output=True, text=True, check=True)
    assert 0.5 * weight_bytes <= int(result.stdout) <= _LIMIT * weight_bytes
