"""ONNX's backend interface: the arguments of `prefuse.compile`, and inputs by name."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse.backend as backend
import pytest
from onnx import parser
from prefuse.runtime.errors import InputError, OptionError
from prefuse.runtime.target import Target

TEXT = (
    """<ir_version: 10, opset_import: ["": 21]> main (float[64,64] x, float[64,64] w) => (float[64,64] y) { y = MatMul(x, w) }"""
)


def test_options_are_passed_on() -> None:
    model = parser.parse_model(TEXT)
    x, w = (np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32) for seed in range(2))
    rep = backend.prepare(model, precision="float32-fast", threads=1, name="two", rtol=1e-3)
    np.testing.assert_allclose(rep.run([x, w])[0], x @ w, rtol=1e-3, atol=1e-3)
    assert rep.model.report().startswith("two ")
    with pytest.raises(OptionError, match="unknown precision"):
        backend.prepare(model, precision="float31")
    with pytest.raises(OptionError, match="did you mean 'precision'"):
        backend.prepare(model, precission="bfloat16")


def test_a_node_with_options() -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    (y,) = backend.run_node(node, [np.array([-1.0, 2.0], np.float32)], opset_version=14, threads=1)
    np.testing.assert_array_equal(y, [0, 2])
    with pytest.raises(OptionError):
        backend.run_node(node, [np.ones(2, np.float32)], thread=1)


def test_inputs_by_name() -> None:
    rep = backend.prepare(parser.parse_model(TEXT))
    x, w = np.eye(64, dtype=np.float32), np.ones((64, 64), np.float32)
    np.testing.assert_array_equal(rep.run({"w": w, "x": x})[0], w)
    with pytest.raises(InputError, match="no such input"):
        rep.run({"wrong": x})
    with pytest.raises(InputError, match="w not given"):
        rep.run({"x": x})


def test_the_first_device_alone_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.supports_device("CPU:0")
    assert not backend.supports_device("CPU:1")
    monkeypatch.setattr("prefuse.runtime.target._installed_gpu", lambda kind: "sm_90")
    assert backend.supports_device("CUDA:0")
    assert Target.parse("cuda").level == "sm_90"
    with pytest.raises(backend.UnsupportedByBackendError, match="the first GPU alone is used; use CUDA:0"):
        backend.prepare(parser.parse_model(TEXT), device="CUDA:1")
