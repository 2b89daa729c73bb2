"""`prefuse quantize`, and `compile` with precision="int8", as users call them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
import torch
from click.testing import CliRunner
from prefuse.compiler.cli import cli
from prefuse.compiler.debugging.oracle import relative_error
from prefuse.compiler.ir.assignments.pairs import keeps_pairs
from prefuse.runtime.errors import InputError, OptionError
from prefuse.runtime.executor import CompiledModel

from .models import batches, feed_forward, residual_network


def run(*arguments: str | Path) -> tuple[str, str]:
    """Standard output and errors of a verb that succeeds."""
    result = CliRunner().invoke(cli, ["quantize", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(residual_network(), path)
    np.savez(tmp_path / "data.npz", x=np.stack([batch["x"] for batch in batches(residual_network(), 8)]))
    return path


def test_quantize(model: Path, tmp_path: Path) -> None:
    """The file that is written is one that ONNX Runtime runs, with the error that was reported."""
    output = tmp_path / "q.onnx"
    text, _ = run(model, "--calibration", tmp_path / "data.npz", "-o", output, "--json")
    said = json.loads(text)
    assert said["is_held_out"]
    assert [unit["format"] for unit in said["units"]] == ["float32", *["int8"] * 7]
    assert "3 channels" in said["units"][0]["reason"]
    held_out = [batch for number, batch in enumerate(batches(residual_network(), 8)) if number % 4 == 3]
    sessions = [onnxruntime.InferenceSession(str(path)) for path in (model, output)]
    expected, found = (np.stack([session.run(None, batch)[0] for batch in held_out]) for session in sessions)
    assert said["error"] == pytest.approx(relative_error(found, expected), rel=0.05)
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(output).graph.initializer}
    assert sum(kind == onnx.TensorProto.INT8 for name, kind in weights.items() if name.endswith("_int8")) == 7


def test_quantize_within_an_error(model: Path, tmp_path: Path) -> None:
    text, _ = run(model, "--calibration", tmp_path / "data.npz", "-o", tmp_path / "q.onnx", "--max-error", "0.004")
    assert "too much damage" in text
    assert "stay float" in text
    assert "on held-out batches" in text


def test_quantize_without_data(model: Path, tmp_path: Path) -> None:
    _, errors = run(model, "-o", tmp_path / "q.onnx")
    assert "no calibration data" in errors
    assert "random inputs" in errors


def test_quantize_refuses(model: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[str | Path], type[Exception]]] = [
        (["--calibration", tmp_path / "gone.npz", "-o", tmp_path / "q.onnx"], InputError),
        (["-o", tmp_path / "q.txt"], OptionError),
        (["-o", tmp_path / "gone" / "q.onnx"], OptionError),
    ]
    for arguments, kind in cases:
        with pytest.raises(kind):
            run(model, *arguments)


def relative(found: object, expected: object) -> float:
    return relative_error(np.asarray(found), np.asarray(expected))


def test_compile_in_int8(tmp_path: Path) -> None:
    """A program of 8-bit products from a float model; what stays float says why; the cache knows the data by their bytes."""
    model = residual_network()
    data = batches(model, 4)
    net = prefuse.compile(model, precision="int8", calibration=data, cache=tmp_path, threads=2)
    assert isinstance(net, CompiledModel)
    (batch,) = batches(model, 1, seed=7)
    expected = prefuse.compile(model, cache=False)(**batch)
    error = relative(net(**batch), expected)
    assert 1e-4 < error < 3e-2
    assert any("was not quantized" in remark and "3 channels" in remark for remark in net.remarks)
    seen: list[str] = []
    again = prefuse.compile(
        model, precision="int8", calibration=iter(data), cache=tmp_path, threads=2, progress=lambda stage, _: seen.append(stage)
    )
    assert not any("calibrating" in stage for stage in seen)
    assert relative(again(**batch), expected) == error
    prefuse.compile(
        model, precision="int8", calibration=data[1:], cache=tmp_path, threads=2, progress=lambda stage, _: seen.append(stage)
    )
    assert any("calibrating" in stage for stage in seen)


def test_compile_a_module_and_symbolic_shapes() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    data = [torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    net = prefuse.compile(module, precision="int8", calibration=data, cache=False)
    with torch.no_grad():
        assert 1e-4 < relative(net(data[0]), module(data[0])) < 3e-2
    model = feed_forward("N")
    dynamic = prefuse.compile(model, precision="int8", calibration=batches(model, 3, rows=5), cache=False)
    for rows in (4, 1):
        (batch,) = batches(model, 1, rows=rows)
        assert 1e-4 < relative(dynamic(**batch), prefuse.compile(model, cache=False)(**batch)) < 3e-2


def test_compile_without_data() -> None:
    with pytest.warns(UserWarning, match="no calibration data"):
        prefuse.compile(feed_forward(), precision="int8", cache=False)


def test_bad_calibration() -> None:
    model = feed_forward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OptionError, match="for float32, which needs none"):
            prefuse.compile(model, calibration=batches(model, 1))
        with pytest.raises(InputError, match="there are no batches"):
            prefuse.compile(model, precision="int8", calibration=[], cache=False)
        with pytest.raises(InputError, match="int given"):
            prefuse.compile(model, precision="int8", calibration=3)
        with pytest.raises(InputError, match="NaN or infinities"):
            prefuse.compile(model, precision="int8", calibration=[np.full((2, 7, 32), np.nan, np.float32)], cache=False)
        with pytest.raises(OptionError, match="not quantized"):
            prefuse.compile(model, precision="int8", calibration=batches(model, 1), target="cuda:sm_75")
        with pytest.raises(OptionError, match="prefuse quantize"):
            prefuse.tune(model, precision="int8")


def test_rows_need_no_data(tmp_path: Path) -> None:
    """By the command line and by `compile`: no warning of ranges, and rows whatever their sizes."""
    path, output = tmp_path / "net.onnx", tmp_path / "q.onnx"
    onnx.save(feed_forward(), path)
    text, errors = run(path, "--activations", "rows", "-o", output, "--json")
    assert "ranges of activations" not in errors
    assert "the error is measured on random inputs" in errors
    assert {unit["format"] for unit in json.loads(text)["units"]} == {"int8-rows"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = prefuse.compile(path, precision="int8-rows", cache=False, threads=2)
    (batch,) = batches(feed_forward(), 1, seed=7)
    expected = prefuse.compile(path, cache=False)(**batch)
    assert 1e-4 < relative(net(**batch), expected) < 3e-2
    scaled = {name: array * np.float32(1000) for name, array in batch.items()}
    assert relative(net(**scaled), prefuse.compile(path, cache=False)(**scaled)) < 3e-2


def test_weights_are_those_of_the_target(tmp_path: Path) -> None:
    """Without dot products of bytes they are smaller, whatever machine quantizes."""
    onnx.save(feed_forward(), tmp_path / "net.onnx")
    weights = {}
    for target in ("cpu:avx2", "cpu:avx512vnni"):
        run(tmp_path / "net.onnx", "--activations", "rows", "-o", tmp_path / "q.onnx", "--target", target)
        tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "q.onnx").graph.initializer}
        weights[target] = [tensor for name, tensor in sorted(tensors.items()) if tensor.dtype == np.int8 and tensor.ndim == 2]
    smaller, free = weights.values()
    assert len(smaller) == len(free) > 0
    assert any(not np.array_equal(one, other) for one, other in zip(smaller, free, strict=True))
    assert all(keeps_pairs(one, 0) for one in smaller)


def test_rows_and_convolutions(tmp_path: Path) -> None:
    """Convolutions stay float without data, and say so; with data they have ranges of tensors."""
    model = residual_network()
    alone = prefuse.compile(model, precision="int8-rows", cache=False, threads=2)
    assert isinstance(alone, CompiledModel)
    assert "images have no rows with scales of their own (calibration data would give ranges of tensors)" in alone.report()
    both = prefuse.compile(model, precision="int8-rows", calibration=batches(model, 4), cache=False, threads=2)
    assert isinstance(both, CompiledModel)
    assert "images have no rows" not in both.report()


def test_compile_verb_quantizes(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "net.prefuse"
    for more in (["int8", "--calibration", str(tmp_path / "data.npz")], ["int8-rows"]):
        arguments = ["compile", str(model), "-o", str(output), "--no-cache", "--json", "--precision", *more]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        remarks = json.loads(result.stdout)["remarks"]
        assert any("was not quantized" in remark for remark in remarks)
        assert any("images have no rows" in remark for remark in remarks) == (more[0] == "int8-rows")
    with pytest.raises(OptionError, match="data given for float32"):
        CliRunner().invoke(cli, ["compile", str(model), "--calibration", "data.npz"], catch_exceptions=False)
