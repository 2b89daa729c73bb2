"""The operations that a graph's nodes are said to do are those that the Plan says of their kernels."""

from __future__ import annotations

import onnx
import prefuse
import pytest
from prefuse.compiler.estimates.cost import bytes_of, flops_of
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.executor import CompiledModel

_HEADER = '<ir_version: 10, opset_import: ["": 21]>\n'
_SAME = "main (float[6,100] x) => (float[6,100] y) {{ y = {0}(x) }}"
_ROWS = "main (float[6,100] x) => (float[6,1] y) <int64[1] axes = {{1}}> {{ y = {0}(x, axes) }}"


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (_SAME.format("Relu"), 600),
        (_SAME.format("Exp"), 12 * 600),
        (_SAME.format("Softmax"), 16 * 600),
        (_ROWS.format("ReduceMean"), 2 * 600),
        (_ROWS.format("ReduceLogSumExp"), 20 * 600),
        ("main (float[6,100] x) => (int64[6,1] y) { y = ArgMax<axis=1>(x) }", 3 * 600),
        ("main (float[6,100] x, float[100] s) => (float[6,100] y) { y = LayerNormalization(x, s) }", 6 * 600),
        ("main (float[6,100] x, float[100,50] w) => (float[6,50] y) { y = MatMul(x, w) }", 2 * 6 * 100 * 50),
    ],
)
def test_a_node_costs_what_its_kernel_does(text: str, flops: int) -> None:
    model = onnx.parser.parse_model(_HEADER + text)
    assert sum(flops_of(node) for node in import_model(model).graph) == flops
    compiled = prefuse.compile(model, target="cpu:avx2", cache=False)
    assert isinstance(compiled, CompiledModel)
    assert sum(kernel.flops for kernel in compiled.plan.kernels) == flops


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("main (int64[3] i, float[50000,16] t) => (float[3,16] y) { y = Gather<axis=0>(t, i) }", 2 * 3 * 16 * 4 + 3 * 8),
        ("main (int64[3,1] i, float[50000,16] t) => (float[3,16] y) { y = GatherND(t, i) }", 2 * 3 * 16 * 4 + 3 * 8),
        ("main (float[6,100] x, float[100,50] w) => (float[6,50] y) { y = MatMul(x, w) }", 4 * (600 + 5000 + 300)),
    ],
)
def test_a_node_reads_of_a_table_what_it_takes(text: str, size_bytes: int) -> None:
    model = onnx.parser.parse_model(_HEADER + text)
    assert sum(bytes_of(node) for node in import_model(model).graph) == size_bytes
