"""Pools that round their size up: a window that would start in the padding after the input is none, in every opset.

ONNX's inference counts it before opset 22; ONNX Runtime, torch and the text of opset 22 do not.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import prefuse
import pytest
from onnx import parser

rng = np.random.default_rng(29)


@pytest.mark.parametrize("opset", [13, 18, 21, 22])
def test_no_window_starts_beyond_the_input(opset: int) -> None:
    x = rng.standard_normal((1, 2, 6, 7)).astype(np.float32)
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]>
        main (float[1,2,6,7] x) => (float[A,B,C,D] y, float[A,B,C,D] z, float[A,B,C,D] w) {{
            y = MaxPool<kernel_shape=[1, 2], strides=[2, 2], ceil_mode=1>(x)
            p = AveragePool<kernel_shape=[1, 3], strides=[2, 3], ceil_mode=1>(x)
            z = Relu(p)
            w = MaxPool<kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[1, 1, 1, 1]>(x) }}"""
    )
    found = prefuse.compile(model, cache=False)(x)
    assert isinstance(found, tuple)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)
