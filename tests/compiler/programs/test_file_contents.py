"""Programs of ONNX files whose contents change between two compilations."""

import os
import threading
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
from onnx import numpy_helper, parser

CONSTANT = """<ir_version: 10, opset_import: ["": 21]> main (float[4] x, bool c) => (float[4] y) {
  b = Constant<value: tensor = float[4] {1, 1, 1, 1}>()
  y = Add(x, b)
}"""
BRANCH = """<ir_version: 10, opset_import: ["": 21]> main (float[4] x, bool c) => (float[4] y) {
  y = If(c) <
    then_branch = yes () => (float[4] a) <float[4] w = {1, 1, 1, 1}> { a = Add(x, w) },
    else_branch = no () => (float[4] s) { s = Sub(x, x) }
  >
}"""
INITIALIZER = """<ir_version: 10, opset_import: ["": 21]> main (float[4] x, bool c) => (float[4] y)
  <float[4] b = {1, 1, 1, 1}> { y = Add(x, b) }"""


def write(text: str, value: float, path: Path, *, is_external: bool) -> None:
    """The model with its weights, all of one value, beside it."""
    model = parser.parse_model(text)
    tensors = [*model.graph.initializer]
    for node in model.graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t] * (attribute.type == onnx.AttributeProto.TENSOR)
            tensors += attribute.g.initializer
    for tensor in tensors:
        tensor.CopyFrom(numpy_helper.from_array(np.full(4, value, np.float32), tensor.name))
        if is_external:
            (path.parent / "w.bin").write_bytes(tensor.raw_data)
            onnx.external_data_helper.set_external_data(tensor, "w.bin")
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("text", [CONSTANT, BRANCH])
def test_weights_of_attributes_and_subgraphs_in_other_files(tmp_path: Path, text: str) -> None:
    x, cache = np.zeros(4, np.float32), tmp_path / "cache"
    for value in (2.0, 3.0):
        write(text, value, tmp_path / "m.onnx", is_external=True)
        net = prefuse.compile(tmp_path / "m.onnx", cache=cache)
        np.testing.assert_array_equal(net(x, np.array(True)), np.full(4, value, np.float32))


def test_pipes_are_read_each_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for value in (2.0, 3.0):
        write(INITIALIZER, value, tmp_path / "m.onnx", is_external=False)
        content = (tmp_path / "m.onnx").read_bytes()
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True)
        writer.start()
        net = prefuse.compile(tmp_path / "pipe", cache=tmp_path / "cache")
        writer.join(60)
        np.testing.assert_array_equal(net(np.zeros(4, np.float32), np.array(True)), np.full(4, value, np.float32))
