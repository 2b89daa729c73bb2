"""Reference engines, the error measure, and the search for the pass that breaks a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from prefuse.compiler.debugging.oracle import BisectResult, Engine, bisect_pipeline, random_inputs, relative_error, run_model
from prefuse.compiler.engines import onnxruntime_session
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import fuse_into_function
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.rewriter import replace_node
from prefuse.compiler.pipeline import Context, Pass
from prefuse.runtime.target import Target
from prefuse.tests.models.random_models import random_models

ENGINES: tuple[Engine, ...] = ("onnxruntime", "reference")


def model_of(text: str) -> ir.Model:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]>\n{text}')
    infer_facts(model)
    return model


def test_inputs_are_legal_and_repeatable() -> None:
    model = model_of(
        """main (float[N,M] x, float16[M] h, int64[N] i, bool[3] b, float[5,4] table) => (y, z) {
          y = Gather(table, i)
          c = Cast<to = 6>(i)
          z = Gather<axis = 1>(x, c)
        }"""
    )
    inputs = random_inputs(model, seed=3)
    assert {name: (array.shape, array.dtype.name) for name, array in inputs.items()} == {
        "x": ((2, 3), "float32"),
        "h": ((3,), "float16"),
        "i": ((2,), "int64"),
        "b": ((3,), "bool"),
        "table": ((5, 4), "float32"),
    }
    again = random_inputs(model, seed=3)
    assert all(np.array_equal(inputs[name], again[name]) for name in inputs)
    assert not np.array_equal(inputs["x"], random_inputs(model, seed=4)["x"])
    for engine in ENGINES:
        run_model(model, inputs, engine)


@given(random_models())
@settings(max_examples=15, deadline=None)
def test_engines_agree(model: ir.Model) -> None:
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "reference")
    for optimize in (False, True):
        actual = run_model(model, inputs, optimize=optimize)
        assert list(actual) == list(expected)
        assert all(relative_error(actual[name], array) < 1e-4 for name, array in expected.items())


def test_weights_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("main (float[2] x) => (y) <float[2] w = {1, 2}> { y = Add(x, w) }")
    inputs, before = random_inputs(model), print_model(model)
    expected = run_model(model, inputs)["y"]
    monkeypatch.setattr(onnxruntime_session, "_MAX_PROTO_BYTES", 1)
    assert np.array_equal(run_model(model, inputs)["y"], expected)
    assert print_model(model) == before
    assert isinstance(model.graph.initializers["w"].const_value, ir.TensorProtocol)
    assert np.array_equal(run_model(model, inputs)["y"], expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_in_a_file_of_their_own(engine: Engine, tmp_path: Path) -> None:
    model = model_of("main (float[2] x) => (y) <float[2] w = {1, 2}> { y = Add(x, w) }")
    ir.save(model, tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
    loaded = ir.load(tmp_path / "model.onnx")
    assert isinstance(loaded.graph.initializers["w"].const_value, ir.ExternalTensor)
    inputs = random_inputs(model)
    assert np.array_equal(run_model(loaded, inputs, engine)["y"], run_model(model, inputs, engine)["y"])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_newest_file_format_runs(engine: Engine) -> None:
    model = ir.from_onnx_text('<ir_version: 14, opset_import: ["": 26]>\nmain (float[2] x) => (float[2] y) { y = Neg(x) }')
    inputs = random_inputs(model)
    assert np.array_equal(run_model(model, inputs, engine)["y"], -inputs["x"])
    assert model.ir_version == 14


def test_relative_error() -> None:
    inf, nan = float("inf"), float("nan")

    def error(actual: object, expected: object) -> float:
        return relative_error(np.asarray(actual), np.asarray(expected))

    assert error([3.0, 4.0], [3.0, 4.0]) == 0
    assert error([0.0, 5.5], [0.0, 5.0]) == pytest.approx(0.1)
    assert error([1.0, inf, nan], [1.0, inf, nan]) == 0
    assert error([2.0, inf], [1.0, inf]) == 1
    assert error([1.0, 2.0], [1.0, inf]) == inf
    assert error([nan], [1.0]) == inf
    assert error([[1.0]], [1.0]) == inf
    assert error([0.5], [0.0]) == 0.5
    assert error([True, False], [True, False]) == 0
    assert error([], []) == 0
    assert error(["a", "b"], np.array(["a", "b"], object)) == 0
    assert error(["a", "b"], ["a", "c"]) == inf


@dataclass(frozen=True)
class FuseFirst(Pass):
    """A correct pass: outlines the first three nodes."""

    name: ClassVar[str] = "fuse-first"

    def run(self, model: ir.Model, context: Context) -> bool:
        fuse_into_function(model, list(model.graph)[:3], "group")
        return True


@dataclass(frozen=True)
class Spoil(Pass):
    """A wrong pass: turns each Mul into an Add, or crashes."""

    name: ClassVar[str] = "spoil"
    crash: bool = False

    def run(self, model: ir.Model, context: Context) -> bool:
        if self.crash:
            raise RuntimeError("out of order")
        for node in list(model.graph):
            if node.op_type == "Mul":
                new = ir.node("Add", node.inputs)
                replace_node(model, node, [new], new.outputs)
        return True


@pytest.mark.parametrize("engine", ENGINES)
def test_bisect(engine: Engine) -> None:
    model = model_of(
        """main (float[2,4] x) => (y) {
          a = Relu(x)  b = Tanh(a)  c = Neg(b)
          d = Mul(c, x)  e = Sigmoid(d)  y = Neg(e)
        }"""
    )
    before, inputs, context = print_model(model), random_inputs(model), Context(Target.parse("cpu"))
    assert bisect_pipeline(model, [FuseFirst(), FuseFirst()], context, inputs, engine=engine) == BisectResult()
    found = bisect_pipeline(model, [FuseFirst(), Spoil(), FuseFirst()], context, inputs, engine=engine)
    assert (found.pass_name, found.position, found.tensor, found.failure) == ("spoil", 1, "d", None)
    assert found.error > 1e-2
    crashed = bisect_pipeline(model, [FuseFirst(), Spoil(crash=True)], context, inputs, engine=engine)
    assert (crashed.pass_name, crashed.position, crashed.failure) == ("spoil", 1, "out of order")
    assert print_model(model) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_sequences_have_a_name_for_each_item(engine: Engine) -> None:
    model = model_of(
        "main (float[5] x) => (seq(float[N]) q) { k = Constant<value_int = 2>() q = SplitToSequence<axis = 0>(x, k) }"
    )
    found = run_model(model, {"x": np.arange(5, dtype=np.float32)}, engine)
    assert {name: array.shape for name, array in found.items()} == {"q[0]": (2,), "q[1]": (2,), "q[2]": (1,)}
