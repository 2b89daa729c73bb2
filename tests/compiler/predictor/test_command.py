"""`prefuse predict`, through the function that the script calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from prefuse.compiler.cli import main
from prefuse.compiler.predictor.predictor import Predictor
from prefuse.compiler.programs.run_database import Place, Run, add_runs
from prefuse.runtime.hardware.machine import core_of
from prefuse.runtime.target import Target, host_cpu_model

TEXT = """<ir_version: 8, opset_import: ["": 18]> main (float[N,70] x, float[70,50] w) => (float[N,50] y) {
  h = MatMul(x, w)
  y = Softmax(h)
}"""
Command = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(TEXT), tmp_path / "two.onnx")
    return tmp_path / "two.onnx"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["prefuse", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        printed = capsys.readouterr()
        assert exit_info.value.code == status, printed
        return printed.out + printed.err * bool(status)

    return run


def test_nothing_is_measured_unasked(command: Command, model: Path, tmp_path: Path) -> None:
    how = (model, "--shape", "x=33,70", "--threads", 1, "--pipeline", "canonicalize,plan-memory")
    arguments = ("predict", *how, "--runs-file", tmp_path / "runs.json")
    text = command(*arguments)
    assert all(part in text for part in ("ms a call predicted", "of weights", "100% estimated", "--measure", "Critical path"))
    found = json.loads(command(*arguments, "--json"))
    program: dict[str, Any] = json.loads(command("compile", *how, "-o", tmp_path / "two.prefuse", "--json"))
    assert found["memory"]["arena_bytes"] == program["spaces"]["arena"]
    assert found["memory"]["weights_bytes"] == program["spaces"]["constants"]
    assert found["latency_us"] == pytest.approx(sum(step["time_us"] for step in found["steps"]))
    assert not (tmp_path / "runs.json").exists()


def test_each_number_has_its_source(command: Command, model: Path, tmp_path: Path) -> None:
    """A product that took three times what was expected of it: others are thought to."""
    target = Target.parse("cpu:avx2", 1)
    estimator = Predictor(target, tmp_path / "runs.json").estimator
    add_runs(tmp_path / "runs.json", Place.here(target), {"another": Run("matmul", 30.0, 30.0, 10.0, estimator)})
    how = ("--shape", "x=33,70", "--threads", 1, "--target", "cpu:avx2", "--pipeline", "canonicalize,plan-memory")
    text = command("predict", model, *how, "--runs-file", tmp_path / "runs.json")
    assert "of estimates scaled by their templates" in text
    assert "scaled" in text.splitlines()[-2]
    assert "estimate" in text.splitlines()[-1]


def test_another_machine_is_an_estimate(command: Command, model: Path) -> None:
    core = "haswell" if core_of(host_cpu_model()) == "zen3" else "zen3"
    arguments = ("predict", model, "--shape", "x=33,70", "--target", f"cpu:avx2,machine={core}")
    assert f"an estimate for a {core} core: nothing of it was measured, as this machine is another one" in command(*arguments)
    found = json.loads(command(*arguments, "--json"))
    assert (found["machine"], found["is_elsewhere"]) == (core, True)
    assert "cannot be measured on this machine" in command(*arguments, "--measure", status=1)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["x.prefuse"], 1, "predict needs a model"),
        (["{model}"], 1, "--shape NAME=SIZE"),
        (["{model}", "--shape", "x=33,70", "--target", "cuda:sm_90"], 1, "is not estimated"),
        (["{model}", "--shape", "x=33,70", "--threads", "0"], 1, "is not between 1 and 1024"),
    ],
)
def test_wrong_arguments(command: Command, model: Path, arguments: list[str], status: int, message: str) -> None:
    given = [one.replace("{model}", str(model)) for one in arguments]
    assert message in command("predict", *given, status=status)


@pytest.mark.parametrize("verb", ["predict", "memory"])
def test_what_is_quantized_is_predicted_so(command: Command, tmp_path: Path, verb: str) -> None:
    """8-bit weights are a quarter of the bytes."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        main (float[64,256] x) => (float[64,256] y) <float[256,256] w> { y = MatMul(x, w) }""")
    weights = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    sizes = [
        json.loads(command(verb, tmp_path / "m.onnx", "--precision", precision, "--json"))["memory"]["weights_bytes"]
        for precision in ("float32", "int8-rows")
    ]
    assert 0 < sizes[1] < sizes[0] / 2
