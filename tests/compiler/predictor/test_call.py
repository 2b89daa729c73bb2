"""`prefuse.predict` and the predictor of a command: arguments, and the process that measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import parser
from prefuse.compiler.debugging.comparison import match_steps
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.predictor import call
from prefuse.compiler.predictor.calibration import ProgramRun
from prefuse.compiler.predictor.isolated import IsolatedRun, Timing
from prefuse.compiler.predictor.predictor import Predictor
from prefuse.compiler.programs.options import parse_options
from prefuse.runtime.errors import CompileError
from prefuse.runtime.plan import TensorType

TEXT = """<ir_version: 8, opset_import: ["": 18]> main (float[33,70] x, float[70,50] w) => (float[33,50] y) {
  h = MatMul(x, w)
  y = Softmax(h)
}"""


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))
    onnx.save(parser.parse_model(TEXT), tmp_path / "two.onnx")
    return tmp_path / "two.onnx"


class Process:
    """In the place of one that measures."""

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, question: IsolatedRun | ProgramRun) -> Timing | float:
        return Timing(5.0, 7.0) if isinstance(question, IsolatedRun) else 100.0


def test_kernels_are_measured_where_that_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's share is fitted first, once."""
    fitted: list[Predictor] = []

    def fit(predictor: Predictor, ask: object) -> None:
        fitted.append(predictor)
        predictor.keep_coldness(0.5)

    monkeypatch.setattr(call, "Worker", Process)
    monkeypatch.setattr(call, "fit_coldness", fit)
    stages: list[str] = []
    own = prefuse.predict(path, target="cpu:avx2", threads=1)
    found = prefuse.predict(path, target="cpu:avx2", threads=1, measure=True, progress=lambda stage, _: stages.append(stage))
    assert (own.is_fitted, {step.source for step in own.steps}) == (False, {"estimate"})
    assert (found.is_fitted, {step.source for step in found.steps}) == (True, {"measured"})
    assert (found.name, found.latency_us) == ("two", 10.0)
    assert stages[-1] == "done"
    assert prefuse.predict(path, target="cpu:avx2", threads=1, measure=True) == found
    assert len(fitted) == 1
    assert prefuse.predict(onnx.load(path), target="cpu:avx2", threads=1).latency_us == 10.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"thread": 1}, "did you mean 'threads'"),
        ({"profile": True}, "profile: is no option here"),
        ({"weights": "int3"}, "unknown weights"),
        ({"measure": 1}, "measure.*neither True nor False"),
        ({"again": "yes"}, "again.*neither True nor False"),
        ({"database": 3}, "no file"),
        ({"target": "cuda:sm_90"}, "is not estimated"),
        ({"target": "cpu:avx2,machine=zen99"}, "no processor"),
        ({"progress": 3}, "cannot be called"),
        ({"precision": "float31"}, "unknown precision"),
    ],
)
def test_wrong_arguments(path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        prefuse.predict(path, **arguments)


def test_weights_of_few_bits_take_less_memory() -> None:
    graph = "main (float[4,256] x) => (float[4,256] y) { y = MatMul(x, w) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {graph}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((256, 256), np.float32), "w"))
    plain, packed = prefuse.predict(model), prefuse.predict(model, weights="int8")
    assert packed.memory.weights_bytes < plain.memory.weights_bytes / 3


def test_a_module_must_be_exported_first() -> None:
    with pytest.raises(CompileError, match=r"no shapes; give torch\.export"):
        prefuse.predict(torch.nn.Identity())


def test_symbolic_dimensions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(call, "predictor_for", lambda *_, **__: pytest.fail("measures"))
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> main (float[N] x) => (float[N] y) { y = Relu(x) }""")
    with pytest.raises(CompileError, match="symbolic dimensions"):
        prefuse.predict(model)


def test_all_faults_of_a_model_are_those_of_a_compilation() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> main (float[4] x) => (float[4] y) { y = Nothing(x) }""")
    with pytest.raises(CompileError, match="Nothing"):
        prefuse.predict(model)


CONVERSIONS = [
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "uint8"),
    ("int8", "float32"),
]


@pytest.mark.parametrize(("kind", "wanted"), CONVERSIONS)
def test_conversions_of_one_value(kind: str, wanted: str) -> None:
    options = parse_options("cpu:avx2", "float32", {"threads": 1, "tuning": False})
    with call.predictor_for(options, measure=False) as predictor:
        small, large = (call.predict_conversion(TensorType((rows, 512), kind), wanted, options, predictor) for rows in (64, 512))
    assert len(small.steps) == len(large.steps) == 1
    assert 0 < 4 * small.latency_us < large.latency_us
    assert small.steps[0].bytes_moved >= 64 * 512 * (np.dtype(kind).itemsize + np.dtype(wanted).itemsize)


@pytest.mark.parametrize(("kind", "wanted", "message"), [("int8", "uint8", "no scales"), ("float32", "int4", "or to int4")])
def test_conversions_that_there_are_not(kind: str, wanted: str, message: str) -> None:
    options = parse_options("cpu:avx2", "float32", {"threads": 1, "tuning": False})
    with call.predictor_for(options, measure=False) as predictor, pytest.raises(CompileError, match=message):
        call.predict_conversion(TensorType((4,), kind), wanted, options, predictor)


def test_graphs_that_differ_little_share_kernels(path: Path) -> None:
    """And stand side by side by the nodes that they were imported with."""
    options = parse_options("cpu:avx2", "float32", {"threads": 1, "tuning": False})
    narrow = TEXT.replace("MatMul(x, w)", "MatMul(n, w)").replace("h =", "b = Cast<to = 16>(x)\n n = Cast<to = 1>(b)\n h =")
    with call.predictor_for(options, measure=False) as predictor:
        graphs = [import_model(parser.parse_model(text)) for text in (TEXT, narrow)]
        first, second = (call.predict_graph(graph, options, predictor, "two") for graph in graphs)
        assert len(predictor.kernels) == 4  # two products and a Cast; Softmax is the same
    matches = [match for match in match_steps(first, second) if match.first]
    assert [(len(match.first), len(match.second)) for match in matches] == [(1, 1), (1, 1)]
    assert matches[1].first[0].time_us == matches[1].second[0].time_us
