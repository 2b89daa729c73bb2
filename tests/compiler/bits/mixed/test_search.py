"""Mixed formats end to end, on small nets: budgets are kept on held-out batches, what is wrong is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import numpy_helper
from prefuse.benchmarks.trained_nets import digits_lenet
from prefuse.compiler.api import drive
from prefuse.compiler.bits.mixed.findings import Findings
from prefuse.compiler.bits.mixed.formats import REST, narrow_roundings
from prefuse.compiler.bits.mixed.request import request_of
from prefuse.compiler.bits.mixed.search import search
from prefuse.compiler.debugging.oracle import relative_error, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.options import parse_options
from prefuse.compiler.quantization.quantizer import calibrate
from prefuse.runtime.errors import InputError, OptionError, UnsupportedModelError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target
from prefuse.tests.sample import every

from ...quantization.models import SAME, batches, built, feed_forward, residual_network


def wide() -> onnx.ModelProto:
    """Products large enough to be rounded to bfloat16."""
    return feed_forward(width=128)


def compiled(model: object, **given: Any) -> object:
    """By `prefuse.compile` in mixed formats, on one thread, kept nowhere."""
    return prefuse.compile(model, **{"precision": "mixed", "cache": False, "threads": 1, **given})


def found(model: onnx.ModelProto, max_error: float, **wanted: Any) -> Findings:
    options = parse_options("cpu", "mixed", {"threads": 1}, quantizes=True)
    return search(import_model(model), batches(model, 8), options, request_of(max_error, **wanted), drive)


def error_of(net: object, model: onnx.ModelProto, count: int = 3) -> float:
    """The largest error over inputs that nobody has seen."""
    assert isinstance(net, CompiledModel)
    unseen = batches(model, count, seed=77)
    graph = import_model(model)
    return max(relative_error(np.asarray(net(**batch)), run_model(graph, batch)["y"]) for batch in unseen)


@pytest.mark.parametrize("make", every(2, [wide, residual_network]))  # tomorrow the other one
def test_the_error_is_kept_and_nothing_of_one_format_is_better(make: Callable[[], onnx.ModelProto]) -> None:
    """At three budgets: between those of the programs of one format, and beyond all."""
    beyond = found(make(), 1.0)
    errors = {one.name: one.error for one in beyond.programs}
    assert errors["float32-fast"] <= errors["bfloat16"] < errors["int8"]
    for one in (beyond, *(found(make(), share * errors["int8"]) for share in (0.7, 0.1))):
        assert one.is_kept
        assert one.error <= one.max_error
        within = [program for program in one.programs if program.error <= one.max_error]
        assert one.chosen.time_us <= 1.01 * min(program.time_us for program in within)
        assert any(program.is_uniform for program in within)
        assert set(one.formats) == {*(unit.name for unit in one.calibrated.units), REST}
        assert all(one.formats[name] in forms for name, forms in one.table.choices.items())


def test_what_a_program_of_bfloat16_rounds_is_asked_of_the_pass() -> None:
    """Both operands of the first convolution, the image of the depthwise one, nothing of one of few multiply-adds."""
    nodes = [("Conv", "x w0", "c0"), ("Conv", "c0 w1", "c1", {**SAME, "group": 64}), ("Conv", "c1 w2", "y")]
    model = built(nodes, [1, 16, 20, 20], {"w0": (64, 16, 1, 1), "w1": (64, 1, 3, 3), "w2": (4, 64, 1, 1)})
    target = Target.parse("cpu:avx512bf16", 1)
    found = narrow_roundings(calibrate(import_model(model), batches(model, 1), target), target)
    assert list(found.values()) == ["bfloat16", "a16", "float32"]


def test_the_graph_of_a_mixture_is_onnx_with_its_error() -> None:
    """ONNX Runtime runs the graph that is compiled: its 8-bit products alone round there, and not more than in the program."""
    model = residual_network()
    one = found(model, 2e-2, bits={"*": "int8"})
    graph = one.model("bfloat16")
    (batch,) = batches(model, 1, seed=5)
    expected = run_model(import_model(model), batch)["y"]
    assert 1e-4 < relative_error(run_model(graph, batch)["y"], expected) < 4e-2
    assert "error" in graph.metadata_props["prefuse.choices"]


def test_budgets_that_nothing_keeps_end_with_the_least_error() -> None:
    """Float32 itself differs from ONNX Runtime by rounding."""
    one = found(feed_forward(), 1e-12)
    assert not one.is_kept
    assert one.error == min(program.error for program in one.programs)
    assert one.error < 1e-5
    assert "least that was reached" in "\n".join(one.sentences())


def test_models_of_integers_alone_have_no_error() -> None:
    model = built([("MatMul", "x w", "m"), ("ArgMax", "m", "y")], [4, 32], {"w": (32, 16)})
    with pytest.raises(OptionError, match="no outputs of real numbers"):
        found(model, 1e-2)


def test_the_smallest_program() -> None:
    """Weights beyond 64 KiB, which programs share, count as the others do."""
    one = found(feed_forward(width=256), 1.0, objective="size")
    assert set(one.formats.values()) <= {"int8", "int8-rows", "bfloat16", "float32-fast"}
    assert one.chosen.size_bytes == min(program.size_bytes for program in one.programs)
    assert one.chosen.size_bytes >= sum(unit.weights.size for unit in one.calibrated.units)
    assert all(one.formats[unit.name].startswith("int8") for unit in one.calibrated.units)


def test_metrics() -> None:
    def largest(outputs: list[np.ndarray], expected: list[np.ndarray]) -> float:
        return float(np.abs(outputs[0] - expected[0]).max())

    for metric, max_error in (("cosine", 1e-5), (largest, 1e-2)):
        one = found(feed_forward(), max_error, metric=metric)
        assert one.is_kept
        assert one.metric.name == (metric if isinstance(metric, str) else largest.__qualname__)


def test_compile_keeps_the_error_and_says_how(tmp_path: Path) -> None:
    """From the API: the report has the choice; the same call again searches nothing; another error does."""
    model, seen = residual_network(), list[str]()
    given: dict[str, Any] = {"calibration": batches(model, 8), "cache": tmp_path}
    net = compiled(model, max_error=2e-2, **given)
    assert error_of(net, model) <= 2e-2 * 1.1
    assert isinstance(net, CompiledModel)
    assert "bits" in net.report()
    assert "ms a call measured" in net.report()
    compiled(model, max_error=2e-2, progress=lambda stage, _: seen.append(stage), **given)
    assert not any("measuring" in stage for stage in seen)
    compiled(model, max_error=1e-3, progress=lambda stage, _: seen.append(stage), **given)
    assert any("measuring programs" in stage for stage in seen)


def test_a_trained_net() -> None:
    """LeNet on digits: the error is kept on 256 images that are neither calibrated with nor held out."""
    net = digits_lenet(epochs=6)
    options = parse_options("cpu", "mixed", {"threads": 1}, quantizes=True)
    data = [*net.calibration, *net.held_out[:4]]
    one = search(net.model, data, options, request_of(4e-3), drive)
    assert one.is_kept
    unseen = [*net.held_out[4:]]
    net_of_plan = compiled(net.model, calibration=data, bits=one.plan())
    assert isinstance(net_of_plan, CompiledModel)
    expected = [net.module(torch.from_numpy(batch["image"])).detach().numpy() for batch in unseen]
    outputs = [np.asarray(net_of_plan(**batch)) for batch in unseen]
    assert relative_error(np.concatenate(outputs), np.concatenate(expected)) <= 1.15 * 4e-3


def test_a_plan_is_compiled_as_it_says(tmp_path: Path) -> None:
    """Found, saved, given back, with a pattern over it: nothing is measured."""
    model, seen = feed_forward(), list[str]()
    one = found(model, 2e-2)
    one.plan().save(tmp_path / "plan.json")
    given: dict[str, Any] = {"calibration": batches(model, 8), "progress": lambda stage, _: seen.append(stage)}
    assert error_of(compiled(model, bits=tmp_path / "plan.json", **given), model) <= 2e-2 * 1.1
    exact = {**one.plan().units, **dict.fromkeys(one.plan().units, "float32-fast")}
    assert error_of(compiled(model, bits={"units": exact}, **given), model) < 3e-5
    assert not any("measuring" in stage for stage in seen)


def test_pinned_units_stay_and_the_others_are_searched_for() -> None:
    one = found(residual_network(), 1e-1, bits={"*": "bfloat16"})
    assert set(one.formats.values()) == {"bfloat16"}
    (name, *_) = [unit.name for unit in one.calibrated.units if not one.calibrated.fault(unit, "int8")]
    two = found(residual_network(), 1e-1, bits={name: "float32-fast"})
    assert two.formats[name] == "float32-fast"
    assert next(row.why for row in two.rows() if row.name == name) == "as the plan says"


def test_modules_and_symbolic_shapes() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
    data = [torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    net = compiled(module, calibration=data, max_error=2e-2)
    assert callable(net)
    with torch.no_grad():
        assert relative_error(np.asarray(net(data[0])), module(data[0]).numpy()) <= 2e-2 * 1.1
    model = feed_forward("N")
    dynamic = compiled(model, calibration=batches(model, 4, rows=5), max_error=2e-2)
    assert callable(dynamic)
    (batch,) = batches(model, 1, rows=5, seed=3)
    assert relative_error(np.asarray(dynamic(**batch)), run_model(import_model(model), batch)["y"]) <= 2e-2 * 1.1


def test_without_data_a_warning_says_what_is_assumed() -> None:
    with pytest.warns(UserWarning, match="no calibration data: ranges of activations are those of 8 random inputs"):
        compiled(feed_forward())


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"calibration": []}, InputError, "there are no batches"),
        ({"calibration": iter(())}, InputError, "there are no batches"),
        ({"calibration": 3}, InputError, "int given"),
        ({"calibration": [np.full((2, 7, 32), np.nan, np.float32)]}, InputError, "NaN or infinities"),
        ({"calibration": [np.zeros((2, 7, 31), np.float32)]}, InputError, "shape"),
        ({"max_error": 0}, OptionError, "max_error: 0 is no error"),
        ({"max_error": float("nan")}, OptionError, "nan is no error"),
        ({"max_error": True}, OptionError, "True is no error"),
        ({"metric": "accuracy"}, OptionError, "'accuracy' is no metric"),
        ({"objective": "speed"}, OptionError, "unknown objective 'speed'"),
        ({"bits": {"nowhere": "int8"}}, OptionError, "no unit matches"),
        ({"bits": {"*": "int3"}}, OptionError, "unknown format 'int3'"),
        ({"bits": "nowhere.json"}, OptionError, "cannot be read"),
        ({"target": "rocm:gfx1030", "threads": None}, OptionError, "not quantized"),
        ({"precision": "int8", "max_error": 1e-2}, OptionError, "max_error: 0.01 given for precision 'int8'"),
        ({"metric": lambda outputs, expected: -1.0}, OptionError, "it gave -1.0"),
    ],
)
def test_bad_input(given: dict[str, object], kind: type[Exception], message: str) -> None:
    model = feed_forward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind, match=message):
            compiled(model, **{"calibration": batches(model, 4), **given})


def test_models_of_several_programs_are_refused() -> None:
    nodes = [("NonZero", "x", "n"), ("Cast", "n", "f", {"to": 1}), ("ReduceSum", "f", "s", {"keepdims": 0})]
    model = built([*nodes, ("MatMul", "x w", "m"), ("Add", "m s", "y")], [4, 8], {"w": (8, 8)})
    with pytest.raises(UnsupportedModelError, match='precision="int8"'):
        compiled(model, calibration=batches(model, 4))


def test_a_format_that_ruins_what_is_not_held_out_may_be_taken() -> None:
    """By the error of the held-out batches. Of the program that has it no time was predicted."""
    model = built([("MatMul", "x w", "m"), ("Reciprocal", "m", "y")], [8, 16], {"w": (16, 16)})
    weights = np.abs(numpy_helper.to_array(model.graph.initializer[0])) + np.float32(0.1)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "w"))
    data = [{"x": np.abs(batch["x"]) + np.float32(0.1)} for batch in batches(model, 8)]
    data[0]["x"][0] = 1e-6  # of which int8 makes 0
    options = parse_options("cpu", "mixed", {"threads": 1}, quantizes=True)
    one = search(import_model(model), data, options, request_of(1.0, objective="size"), drive)
    assert "int8" in one.formats.values()
    assert one.predicted_us == 0
    assert one.sentences()


def test_an_input_may_have_the_name_of_an_argument() -> None:
    model = built([("MatMul", "x w", "y")], [4, 8], {"w": (8, 8)})
    model.graph.input[0].name = model.graph.node[0].input[0] = "runs"
    data = [{"runs": np.full((4, 8), number, np.float32)} for number in range(1, 9)]
    options = parse_options("cpu", "mixed", {"threads": 1}, quantizes=True)
    assert search(import_model(model), data, options, request_of(1.0), drive).is_kept
