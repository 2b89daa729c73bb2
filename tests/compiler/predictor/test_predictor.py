"""Predictions from times that are made up: what is measured, what is estimated, what both become; and memory, which is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import numpy_helper, parser
from prefuse.compiler.driver import PlannedModel, plan_model
from prefuse.compiler.estimates.launches import predicted_us
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.predictor.coldness import USUAL
from prefuse.compiler.predictor.isolated import IsolatedRun, Timing
from prefuse.compiler.predictor.prediction import Memory, Prediction
from prefuse.compiler.predictor.predictor import TURNS, Predictor
from prefuse.compiler.programs.options import Options, parse_options
from prefuse.compiler.programs.run_database import Place, Run, add_runs, known_runs
from prefuse.runtime.errors import OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.hardware.machine import core_of
from prefuse.runtime.plan import Role
from prefuse.runtime.target import Target, host_cpu_model
from prefuse.tests.models.exports import Exports

TWICE = """<ir_version: 8, opset_import: ["": 18]> main (float[33,64] x) => (float[33,64] y)
  <float[64,64] v, float[64,64] w, float[64,64] u> {
  h = MatMul(x, v)
  s = Softmax(h)
  g = MatMul(s, w)
  t = Softmax(g)
  y = MatMul(t, u)
}"""
NEAR, FAR = 10.0, 30.0


def model() -> ir.Model:
    found = parser.parse_model(TWICE)
    for number, name in enumerate("vwu"):
        array = np.random.default_rng(number).standard_normal((64, 64)).astype(np.float32)
        found.graph.initializer.append(numpy_helper.from_array(array, name))
    return import_model(found)


@pytest.fixture
def options() -> Options:
    return parse_options("cpu:avx2", "float32", {"threads": 1, "tuning": False, "pipeline": "canonicalize,plan-memory"})


@pytest.fixture
def planned(options: Options) -> PlannedModel:
    return plan_model(model(), options)


class Clock:
    """In the place of a process that measures: products take 10 to 30 us, Softmax 1 us; what is `lost` gives no time."""

    def __init__(self, lost: tuple[str, ...] = ()) -> None:
        self.asked: list[IsolatedRun] = []
        self.lost = lost

    def __call__(self, run: IsolatedRun) -> Timing | None:
        self.asked.append(run)
        (name,) = {op.op_type for op in run.group.ops}
        return None if name in self.lost else Timing(NEAR, FAR) if name == "MatMul" else Timing(1.0, 1.0)


def times(found: Prediction) -> dict[str, tuple[float, str]]:
    return {step.label: (step.time_us, step.source) for step in found.steps}


def test_equal_kernels_are_measured_once(planned: PlannedModel, options: Options, tmp_path: Path) -> None:
    """Three products and two Softmax of equal shapes; later predictors know them from the file."""
    clock = Clock()
    predictor = Predictor(options.target, tmp_path / "runs.json", clock)
    first = predictor.predict(planned, "twice", options.precision)
    assert [run.group.ops[0].op_type for run in clock.asked] == ["MatMul", "Softmax"] * TURNS
    again = Clock()
    second = Predictor(options.target, tmp_path / "runs.json", again).predict(planned, "twice", options.precision)
    assert again.asked == []
    assert Predictor(options.target, tmp_path / "runs.json").predict(planned, "twice", options.precision) == first == second
    assert [step.source for step in first.steps] == ["measured"] * 5
    assert first.shares["measured"] == pytest.approx(1.0)


def test_what_is_measured_again_is_the_shorter_time(planned: PlannedModel, options: Options, tmp_path: Path) -> None:
    """Each kernel once more, not once for each graph."""
    path, place = tmp_path / "runs.json", Place.here(options.target)
    Predictor(options.target, path, Clock()).predict(planned, "twice", options.precision)
    before = known_runs(path, place).runs
    add_runs(path, place, {key: Run(run.template, 2 * run.near_us, run.far_us / 2, 1.0) for key, run in before.items()})
    clock = Clock()
    predictor = Predictor(options.target, path, clock, again=True)
    found = [predictor.predict(planned, "twice", options.precision) for _ in range(2)]
    assert len(clock.asked) == 2 * TURNS
    assert found[0] == found[1]
    assert {(step.near_us, step.far_us) for step in found[0].steps} == {(NEAR, FAR / 2), (1.0, 0.5)}


def test_a_program_that_stays_in_the_caches_is_near(planned: PlannedModel, options: Options, tmp_path: Path) -> None:
    found = Predictor(options.target, tmp_path / "runs.json", Clock()).predict(planned, "twice", options.precision)
    assert [step.time_us for step in found.steps] == [NEAR, 1.0, NEAR, 1.0, NEAR]
    assert [step.begin_us for step in found.steps] == [0.0, 10.0, 11.0, 21.0, 22.0]
    assert found.latency_us == 32.0
    assert found.critical_path == found.steps
    assert {(step.near_us, step.far_us) for step in found.steps} == {(NEAR, FAR), (1.0, 1.0)}


def test_far_constants_take_the_share_of_this_machine(options: Options, tmp_path: Path) -> None:
    """A table of 64 MiB is read between two products, which a core's caches do not hold."""
    text = TWICE.replace("y = MatMul(t, u)", "p = MatMul(t, u)\n z = MatMul(p, big)\n y = MatMul(z, back)")
    text = text.replace("float[64,64] u>", "float[64,64] u, float[64,262144] big, float[262144,64] back>")
    found = parser.parse_model(text)
    for name, shape in {**dict.fromkeys("vwu", (64, 64)), "big": (64, 1 << 18), "back": (1 << 18, 64)}.items():
        found.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    planned = plan_model(import_model(found), options)
    predictor = Predictor(options.target, tmp_path / "runs.json", Clock())
    assert (predictor.coldness, predictor.is_fitted) == (USUAL, False)
    usual = predictor.predict(planned, "far", options.precision).steps[0].time_us
    predictor.keep_coldness(0.5)
    assert (predictor.coldness, predictor.is_fitted) == (0.5, True)
    fitted = predictor.predict(planned, "far", options.precision).steps[0].time_us
    assert NEAR < fitted < usual <= FAR
    assert (fitted - NEAR) / (usual - NEAR) == pytest.approx(0.5 / USUAL)
    assert Predictor(options.target, tmp_path / "runs.json").coldness == 0.5


def test_without_a_clock_the_cost_model_counts(planned: PlannedModel, options: Options, tmp_path: Path) -> None:
    predicted = predicted_us(planned.lowered, options.target)
    found = Predictor(options.target, tmp_path / "runs.json").predict(planned, "twice", options.precision)
    assert times(found) == {label: (time_us, "estimate") for label, time_us in predicted.items()}
    assert found.latency_us == pytest.approx(sum(predicted.values()))
    assert found.shares == {"measured": 0.0, "scaled": 0.0, "estimate": pytest.approx(1.0)}


def test_estimates_are_scaled_by_their_template(planned: PlannedModel, options: Options, tmp_path: Path) -> None:
    """Other products took 1.5, 2 and 9 times what was expected of them: these are thought to take twice as long. No other
    normalization was measured. What another cost model expected of products says nothing."""
    path, place = tmp_path / "runs.json", Place.here(options.target)
    same, cold = Predictor(options.target, path).estimator, 100 * 3.0
    runs = {f"p{ratio}": Run("matmul", 100 * ratio, 100 * ratio, 100.0, same) for ratio in (1.5, 2.0, 9.0)}
    old = {f"old{number}": Run("matmul", cold, cold, 100.0, estimator) for number, estimator in enumerate(["", "other"] * 3)}
    add_runs(path, place, runs | old)
    predicted = list(predicted_us(planned.lowered, options.target).values())
    found = Predictor(options.target, path).predict(planned, "twice", options.precision)
    assert [step.source for step in found.steps] == ["scaled", "estimate"] * 2 + ["scaled"]
    assert [step.time_us for step in found.steps[::2]] == pytest.approx([2 * time_us for time_us in predicted[::2]])


def test_what_cannot_be_measured_is_estimated(planned: PlannedModel, options: Options, tmp_path: Path) -> None:
    predictor = Predictor(options.target, tmp_path / "runs.json", Clock(lost=("MatMul",)))
    found = predictor.predict(planned, "twice", options.precision)
    assert [step.source for step in found.steps] == ["estimate", "measured"] * 2 + ["estimate"]


def test_other_code_is_another_kernel(options: Options, tmp_path: Path) -> None:
    """Of one problem, by another configuration: what was measured of the first says nothing of the second."""
    problem, keys = "MatMul(float32[33,64],const float32[64,64])->float32[33,64]", []
    for tile in ("1x1", "2x1"):
        configured = replace(options, configurations={problem: {"tile": tile}})
        (item, *_) = plan_model(model(), configured).lowered
        keys.append(Predictor(options.target, tmp_path / "runs.json").key_of(item))
    assert [key.rpartition(" ")[0] for key in keys] == [problem] * 2
    assert keys[0] != keys[1]


def test_another_machine_is_estimated(options: Options, tmp_path: Path) -> None:
    """Whatever was measured here."""
    core = "haswell" if core_of(host_cpu_model()) == "zen3" else "zen3"
    target = Target.parse(f"cpu:avx2,machine={core}", 1)
    elsewhere = replace(options, target=target)
    planned = plan_model(model(), elsewhere)
    path = tmp_path / "runs.json"
    Predictor(options.target, path, Clock()).predict(planned, "twice", "float32")
    assert known_runs(path, Place.here(options.target)).runs
    found = Predictor(target, path).predict(planned, "twice", "float32")
    assert (found.is_elsewhere, found.machine) == (True, core)
    assert {step.source for step in found.steps} == {"estimate"}
    with pytest.raises(OptionError, match=f"of a {core} cannot be measured on this machine"):
        Predictor(target, path, Clock())


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="what a program for cuda:sm_90 takes is not estimated"):
        Predictor(Target.parse("cuda:sm_90"), tmp_path / "runs.json")


def test_levels_that_this_machine_lacks_are_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: frozenset(["fma"]))
    assert Predictor(Target.parse("cpu:avx2", 1), tmp_path / "runs.json").is_elsewhere


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lenet5", "resnet18", "gpt2", "gru-seq2seq"])
def test_memory_is_that_of_the_compiled_program(exports: Exports, name: str, precision: str, tmp_path: Path) -> None:
    path = exports(name).path
    arguments = {"target": "cpu:avx2", "precision": precision, "threads": 2}
    found = prefuse.predict(path, database=tmp_path / "runs.json", **arguments).memory  # type: ignore[arg-type]
    net = prefuse.compile(path, cache=False, **arguments)  # type: ignore[arg-type]
    assert isinstance(net, CompiledModel)
    spaces = {space.name: space.size_bytes for space in net.plan.spaces}
    workspaces = [buffer.size_bytes for buffer in net.plan.buffers if buffer.role is Role.WORKSPACE]
    assert found == Memory(net.plan.weights_bytes, spaces["arena"], max(workspaces, default=0))
    assert found.total_bytes == net.plan.weights_bytes + spaces["arena"]
    assert found.weights_bytes > 0
    onnx.checker.check_model(path)  # nobody has changed it


def test_kernels_are_measured_for_the_target_that_they_are_written_for(
    planned: PlannedModel, options: Options, tmp_path: Path
) -> None:
    """A program that hardly uses a tile unit is written without it."""
    clock, vectors = Clock(), Target.parse("cpu:avx512", 1)
    moved = replace(planned, kernels=replace(planned.kernels, target=vectors))
    Predictor(options.target, tmp_path / "runs.json", clock).measure(moved)
    assert {run.target for run in clock.asked} == {vectors}
