"""Tuning a small model from end to end, and what compilations make of findings. Nothing here asserts a time."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
import torch
from onnx import numpy_helper, parser
from prefuse.compiler.cli import main
from prefuse.compiler.programs.options import Options, parse_options
from prefuse.compiler.programs.tuning_database import Finding, Section, add_findings, read_database
from prefuse.compiler.tuning import tuner
from prefuse.compiler.tuning.measuring import Trial, _Comparison, measure
from prefuse.compiler.tuning.tuner import problems_of, tune_model
from prefuse.compiler.tuning.worker import Times, Worker, measure_apart
from prefuse.kernels.formats.format import BF16_DOT, plain
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.errors import CompileError, OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.hardware.machine import core_of
from prefuse.runtime.plan import Launch
from prefuse.runtime.target import host_cpu_model
from prefuse.tests.kernels.harness import target_of

TEXT = """<ir_version: 8, opset_import: ["": 18]> main (float[33,70] x) => (float[33,50] y)
  <float[70,90] v, float[90,50] w> {
  h = MatMul(x, v)
  r = Relu(h)
  y = MatMul(r, w)
}"""
RNG = np.random.default_rng(3)
X = RNG.standard_normal((33, 70)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))
    model = parser.parse_model(TEXT)
    for name, shape in (("v", (70, 90)), ("w", (90, 50))):
        model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name))
    onnx.save(model, tmp_path / "two.onnx")
    return tmp_path / "two.onnx"


@pytest.fixture
def options() -> Options:
    return parse_options("cpu:avx2", "float32", {"threads": 1, "tuning": False})


class Table:
    """In the place of a worker: another order of loops is twice as fast; after some trials, interrupted."""

    trials = 1000

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, trial: Trial) -> Times:
        if not Table.trials:
            raise KeyboardInterrupt
        Table.trials -= 1
        return tuple(50.0 if "order" in one else 100.0 for one in trial.configurations)


def load(path: Path) -> ir.Model:
    return ir.load(path)


def test_a_model_is_tuned(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real measurements: the file holds findings of the problems that had their turn, and compilation takes them."""
    database = tmp_path / "found.json"
    arguments = ["--seconds", "2", "--threads", "1", "--database", str(database), "--json"]
    monkeypatch.setattr("sys.argv", ["prefuse", "tune", str(path), *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    output = capsys.readouterr().out
    assert exit_info.value.code == 0, output
    problems = json.loads(output)["problems"]
    (findings,) = read_database(database).values()
    assert problems
    assert {one["problem"] for one in problems} == set(findings)
    assert all(finding.time_us > 0 for finding in findings.values())
    net = compiled(path, database)
    assert np.asarray(net(X)).tobytes() == run(path, False).tobytes()
    assert sum("as measured" in line for line in net.remarks) == sum(bool(one.configuration) for one in findings.values())


def run(path: Path, tuning: object) -> np.ndarray:
    return np.asarray(prefuse.compile(path, target="cpu:avx2", threads=1, tuning=tuning, cache=False)(X))


def test_findings_are_kept_and_not_looked_for_again(
    path: Path, tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "found.json"
    monkeypatch.setattr(tuner, "Worker", Table)

    def tune(**how: Any) -> dict[str, bool]:
        found = tune_model(load(path), options, seconds=60, database=database, **how)
        assert all("order" in one.finding.configuration for one in found)
        return {one.problem.text: one.is_new for one in found}

    monkeypatch.setattr(Table, "trials", 11)  # in the middle of the second problem
    with pytest.raises(KeyboardInterrupt):
        tune()
    (first,) = read_database(database).values()
    assert len(first) == 1
    monkeypatch.setattr(Table, "trials", 1000)
    second = tune()
    assert sorted(second.values()) == [False, True]
    content = database.read_bytes()
    assert not any(tune().values())
    assert all(tune(again=True).values())
    assert database.read_bytes() == content


def test_kernels_too_short_for_the_clock_are_left_as_they_are(
    path: Path, tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All take no time at all: nothing beats anything, neither now nor when it goes on from what was found."""

    class Instant(Table):
        def measure(self, trial: Trial) -> Times:
            return (0.0,) * len(trial.configurations)

    monkeypatch.setattr(tuner, "Worker", Instant)
    for again in (False, True):
        found = tune_model(load(path), options, seconds=60, database=tmp_path / "found.json", again=again)
        assert [one.is_new for one in found] == [True, True]
        assert not any(one.finding.configuration for one in found)


def test_the_last_share_is_all_that_is_left() -> None:
    """Also where it is nothing beside the first one, which must not be subtracted from both."""
    problems = [tuner.Problem(text, None, "", 0, 1, 1.0) for text in "ab"]  # type: ignore[arg-type]
    end = monotonic() + 60
    (_, first), (_, last) = tuner.shares({problems[0]: 1e9, problems[1]: 1e-12}, end)
    assert first == pytest.approx(end, abs=1e-3)
    assert last == pytest.approx(end, abs=1e-3)


def test_python_tunes_as_the_command_line_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "Worker", Table)
    stages: list[str] = []
    found = prefuse.tune(path, target="cpu:avx2", threads=1, progress=lambda stage, _: stages.append(stage))
    assert [one.problem.template for one in found] == ["matmul", "matmul"]
    assert (stages[0], stages[-1]) == ("finding groups", "done")
    net = prefuse.compile(path, target="cpu:avx2", threads=1)
    assert isinstance(net, CompiledModel)
    assert sum("as measured" in line for line in net.remarks) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "no time"),
        ({"seconds": "1"}, "no time"),
        ({"random": True}, "random: is no option here"),
        ({"weights": "int3"}, "unknown weights"),
        ({"database": 3}, "no file"),
        ({"target": "cuda:sm_90"}, "cannot be tuned"),
        ({"progress": 3}, "cannot be called"),
    ],
)
def test_wrong_arguments(path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        prefuse.tune(path, **arguments)


def test_a_module_must_be_exported_first() -> None:
    with pytest.raises(CompileError, match=r"no shapes; tune torch\.export"):
        prefuse.tune(torch.nn.Identity())


def test_the_machine_must_have_what_the_target_needs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: frozenset(["fma"]))
    with pytest.raises(CompileError, match="this CPU lacks avx2"):
        prefuse.tune(path, target="cpu:avx2")


def test_symbolic_dimensions_are_refused(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> main (float[N] x) => (float[N] y) { y = Relu(x) }""")
    with pytest.raises(CompileError, match="symbolic dimensions"):
        prefuse.tune(model)


def test_a_model_without_choices_has_nothing_to_tune(path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> main (float[4] x) => (float[4] y) { y = Relu(x) }"""
    assert prefuse.tune(parser.parse_model(text), target="cpu:avx2") == ()


def test_a_search_that_ran_out_of_time_goes_on(
    path: Path, tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "Worker", Table)
    database = tmp_path / "found.json"
    found = tune_model(load(path), options, seconds=1e-3, database=database)
    assert not any(one.finding.is_complete for one in found)
    found = tune_model(load(path), options, seconds=60, database=database)
    assert all(one.finding.is_complete and one.is_new and one.finding.tried == () for one in found)


def compiled(path: Path, database: Path) -> CompiledModel:
    net = prefuse.compile(path, target="cpu:avx2", threads=1, tuning=database)
    assert isinstance(net, CompiledModel)
    return net


def test_a_finding_decides_and_is_told(path: Path, tmp_path: Path, options: Options) -> None:
    problems, constant_bytes = problems_of(load(path), options)
    assert [one.template for one in problems] == ["matmul", "matmul"]
    assert constant_bytes == 4 * (70 * 90 + 90 * 50)
    legal, odd = tmp_path / "legal.json", tmp_path / "odd.json"
    section = Section.here(options.target, options.precision)

    def found(configuration: Mapping[str, str]) -> dict[str, Finding]:
        return {problems[0].text: Finding(configuration, 1.0, 2.0, True)}

    add_findings(legal, section, found({"tile": "2x1"}))
    add_findings(odd, section, found({"tile": "2000x1", "colour": "red"}))
    own = run(path, False)
    nets = [compiled(path, legal), compiled(path, odd)]
    assert [np.asarray(net(X)).tobytes() for net in nets] == [own.tobytes()] * 2
    remarks = [[line for line in net.remarks if line.startswith("tuning")] for net in nets]
    assert [len(lines) for lines in remarks] == [1, 1]
    assert "as measured: tile=2x1" in remarks[0][0]
    assert "ignored" not in remarks[0][0]
    assert "tile=2000x1 ignored: not one of" in remarks[1][0]
    assert "colour=red ignored" in remarks[1][0]


def test_one_database_gives_one_program(path: Path, tmp_path: Path, options: Options) -> None:
    """A program is taken from the cache as long as the database says the same for its target and precision."""
    database, programs = tmp_path / "found.json", tmp_path / "cache"
    problem = problems_of(load(path), options)[0][0].text
    section = Section.here(options.target, options.precision)

    def count() -> int:
        compiled(path, database)
        return len(list(programs.glob("*.prefuse")))

    add_findings(database, section, {problem: Finding({"tile": "2x1"}, 1.0, 2.0, True)})
    assert count() == 1
    add_findings(database, section, {problem: Finding({"tile": "2x1"}, 1.5, 2.0, True)})
    add_findings(
        database, Section("another", str(options.target), "float32"), {problem: Finding({"tile": "1x1"}, 1.0, 2.0, True)}
    )
    assert count() == 1
    add_findings(database, section, {problem: Finding({"tile": "3x1"}, 1.0, 2.0, True)})
    assert count() == 2


def test_a_lost_process_costs_what_is_to_blame(path: Path, options: Options) -> None:
    group = problems_of(load(path), options)[0][0].group
    configurations: tuple[dict[str, str], ...] = ({}, {"tile": "1x1"}, {"tile": "bad"}, {"tile": "2x1"})
    trial = Trial(group, options.target, configurations, 0, 0.0)

    def attempt(one: Trial) -> Times | None:
        return None if {"tile": "bad"} in one.configurations else (2.0,) * len(one.configurations)

    assert measure_apart(trial, attempt) == (2.0, 2.0, None, 2.0)
    assert measure_apart(trial, lambda _: None) == (None,) * 4


def test_results_stored_narrow_agree_up_to_their_rounding() -> None:
    """One format multiplies pairs, the other number by number: rounded to bfloat16, some results differ by a unit."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        main (bfloat16[133,270] x, bfloat16[270,150] w) => (bfloat16[133,150] y) { y = MatMul(x, w) }""")
    (problem,), _ = problems_of(model, Options(target_of("avx512bf16"), "float32"))
    formats = (BF16_DOT, plain("bfloat16", "bfloat16", "float32"))
    trial = Trial(problem.group, target_of("avx512bf16"), tuple({"format": one.name} for one in formats), 0, 0.01)
    assert None not in measure(trial)


def test_a_process_that_ends_is_replaced(path: Path, options: Options) -> None:
    group = problems_of(load(path), options)[0][0].group
    legal = Trial(group, options.target, ({}, {"tile": "2x1"}, {"tile": "2000x1"}), 1 << 20, 0.0)
    with Worker() as worker:
        broken = Trial(group, options.target, (3,), 0, 0.0)  # type: ignore[arg-type]
        assert worker.measure(broken) == (None,)
        own, other, illegal = worker.measure(legal)
    assert own is not None
    assert other is not None
    assert illegal is None


def test_another_processor_is_not_timed_here(path: Path) -> None:
    core = "haswell" if core_of(host_cpu_model()) != "haswell" else "zen3"
    options = parse_options(f"cpu:avx2,machine={core}", "float32", {"threads": 1, "tuning": False})
    with pytest.raises(CompileError, match=f"a {core} cannot be timed on this machine"):
        tune_model(load(path), options, seconds=1.0, database=path.with_name("found.json"))


def test_each_launch_reads_another_copy_of_the_weights(path: Path, options: Options) -> None:
    """Kernels that pack alike would find in the caches what the one before them has read."""
    group = problems_of(load(path), options)[0][0].group
    trial = Trial(group, options.target, ({}, {"order": "n"}, {}), 1 << 20, 0.0)
    kernels = {number: build_kernel(group, options.target) for number in range(3)}
    program = _Comparison(trial, {number: one for number, one in kernels.items() if isinstance(one, BuiltKernel)})
    launches = [step for step in program.net.plan.steps if isinstance(step, Launch) and step.label]
    read = [[region.buffer for region in step.reads if ":" in region.buffer] for step in launches]
    assert program.copies > 1
    assert all(read)
    assert all(one != other for one, other in pairwise(read))


def test_a_worker_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(OptionError, match="the process that measures kernels does not start"), Worker():
        pass
