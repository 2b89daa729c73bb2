"""Operators that no template takes: TVM's importer has loops for them, over buffers of several dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from prefuse.compiler import driver
from prefuse.compiler.lowering.tvm_importer import TEMPLATE

MODEL = """
<ir_version: 10, opset_import: ["": 20]>
main (float[2,3,8,7] x, float[4,3,3,3] w) => (float[2,4,6,5] y, bool[2,4,6,5] m) {
  c = Conv(x, w)
  y = Softmax<axis = 1>(c)
  m = Greater(c, y)
}
"""


def test_loops_of_tvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "build_kernel", lambda group, target: (("any", "not in this test"),))
    model = onnx.parser.parse_model(MODEL)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    program = prefuse.compile(path, pipeline="none", cache=False)
    assert {kernel.template for kernel in program.plan.kernels} == {TEMPLATE}
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(size=(2, 3, 8, 7)).astype(np.float32), "w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32)}
    expected = onnxruntime.InferenceSession(path).run(None, given)
    got = program(**given)
    assert isinstance(got, tuple)
    for found, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)
