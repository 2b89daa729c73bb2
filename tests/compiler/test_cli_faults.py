"""Faults on the command line: one line that says where, what, and what to do."""

import shlex
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from .terminal import Terminal, cli_cache, model, prefuse_cli

__all__ = ["cli_cache", "model", "prefuse_cli"]


def test_what_onnxruntime_cannot_run_is_a_fault_of_the_model(prefuse_cli: Terminal, tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 24]> main (bfloat16[2,4] x) => (bfloat16[2,4] y) { y = Swish(x) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    for verb in (["run", "--repeat", 1, "--compare", "onnxruntime"], ["bisect"]):
        assert "cannot run it" in prefuse_cli(*verb, tmp_path / "m.onnx", status=1)
    prefuse_cli("bisect", tmp_path / "m.onnx", "--engine", "reference", "--tolerance", 1e-2)


def test_outputs_of_any_names_are_written(prefuse_cli: Terminal, tmp_path: Path) -> None:
    graph = "main (float[2] self) => (float[2] file, float[2] args) { file = Neg(self) args = Abs(self) }"
    text = f'<ir_version: 8, opset_import: ["": 18]> {graph}'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    prefuse_cli("run", tmp_path / "m.onnx", "--repeat", 1, "-o", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["args"], abs(found["file"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.npz", "m.onnx"]


def test_inputs_of_types_that_numpy_has_no_name_for(prefuse_cli: Terminal, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> main (bfloat16[3] x) => (float[3] y) { y = Cast <to = 1> (x) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.array([1, -2, 3], ml_dtypes.bfloat16))
    prefuse_cli("run", tmp_path / "m.onnx", "--inputs", tmp_path / "x.npz", "--repeat", 1, "-o", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["y"], np.array([1, -2, 3], np.float32))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["copile"], 2, "did you mean 'compile'"),
        (["run", "absent.onnx"], 1, "no such file"),
        (["run", "absent.prefuse"], 1, "no such file"),
        (["compile", "x.prefuse"], 1, "compile needs a model"),
        (["run", "x.prefuse", "--compare", "onnxruntime"], 1, "needs a model"),
        (["run", "{model}", "--inputs", "absent.npz"], 1, "No such file"),
        (["run", "{model}", "--inputs", "{model}"], 1, "is no .npz file"),
        (["compile", "{model}", "--database", "absent.json"], 1, "give a file of prefuse tune"),
        (["compile", "{model}", "--target", "cpux"], 1, "unknown target"),
        (["compile", "{model}", "-o", "/no/such/folder/x.prefuse"], 1, "give the path of a file"),
        (["compile", "."], 1, "Is a directory"),
        (["run", "{model}", "-o", "/no/such/folder/x.npz"], 1, "give the path of a file"),
        (["run", "{model}", "-o", "/proc/x.npz"], 1, "cannot be written"),
        (["opt", "{model}", "--pipeline", "fuse-epilog"], 1, "did you mean 'fuse-epilogue'"),
        (["opt", "{model}", "-o", "x.json"], 1, "write .onnx or .txt"),
        (["opt", "{model}", "--start", "nothing"], 1, "nothing"),
        (["opt", "{model}", "--start", "²"], 1, "²"),
        (["opt", "{model}", "--pipeline", 'fuse-epilogue{{max-ops="\\q"}}'], 1, "is no string of JSON"),
        (["run", "{model}", "--seed", "-1"], 2, "is not in the range x>=0"),
        (["run", "{model}", "--shape", "x=²"], 2, "is not NAME=SIZE"),
        (["compile", "{model}", "--dims", "T=²"], 2, "is not NAME=LEAST"),
        (["compile", "{model}", "--target", "cpu,threads=²"], 1, "unknown target"),
        (["compile", "{model}", "--target", "cpu,threads=2", "--threads", "4"], 1, "give one of them"),
        (["compile", "{model}", "--bits", "plan.json", "--precision", "bfloat16"], 1, "leave out one of them"),
        (["compile", "{model}", "--bits", "absent.json"], 1, "cannot be read"),
    ],
)
def test_faults(prefuse_cli: Terminal, model: Path, arguments: list[str], status: int, message: str) -> None:
    arguments = [argument.format(model=model) for argument in arguments]
    assert message in prefuse_cli(*arguments, status=status)
    if status == 1:
        error = prefuse_cli.json(*arguments, status=1)["error"]
        assert message in f"{error['what']}; {error['fix']}"


def test_options_are_named_as_they_were_given(prefuse_cli: Terminal, model: Path) -> None:
    assert "error: --memory-limit: '2x': unknown unit" in prefuse_cli("compile", model, "--memory-limit", "2x", status=1)
    assert prefuse_cli.json("compile", model, "--threads=0", status=1)["error"]["where"] == "--threads"


@pytest.mark.parametrize(
    ("redirection", "status", "message"), [(">/dev/full", 1, "No space left"), (">&-", 0, ""), ("|true", 0, "")]
)
def test_results_that_cannot_be_printed(model: Path, redirection: str, status: int, message: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m prefuse inspect {shlex.quote(str(model))} {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert message in done.stderr if message else not done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["why-not", "{model}", "zz", "y"], 1, "the model has no such node"),
        (["why-not", "{model}", "y"], 2, "SECOND"),
        (["why-not", "x.prefuse", "a", "b"], 1, "why-not needs a model"),
        (["explain", "{model}", "Relu#3"], 1, "name a node, an output"),
        (["explain", "x.prefuse", "a"], 1, "explain needs a model"),
        (["explain", "absent.onnx", "a"], 1, "no such file"),
        (["profile", "x.prefuse", "--compare", "none"], 1, "--compare needs a model"),
        (["profile", "{model}", "--compare", "fuse-epilog"], 1, "did you mean 'fuse-epilogue'"),
        (["profile", "{model}", "--trace", "/no/such/folder/t.json"], 1, "give the path of a file"),
        (["profile", "{model}", "--target", "cuda:sm_90"], 1, "run the program on a machine with an NVIDIA GPU"),
        (["profile", "{model}", "--runs", "0"], 2, "--runs"),
        (["predict", "x.prefuse"], 1, "predict needs a model"),
        (["predict", "{model}", "--target", "cuda:sm_90"], 1, "is not estimated"),
    ],
)
def test_faults_of_questions(prefuse_cli: Terminal, model: Path, arguments: list[str], status: int, message: str) -> None:
    test_faults(prefuse_cli, model, arguments, status, message)
