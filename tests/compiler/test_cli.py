"""The command line, through the function that the script calls."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import parser
from prefuse.compiler.cli.common import CompileArguments
from prefuse.compiler.pipeline import Context, Pass
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.runtime.fit_file import Fit
from prefuse.runtime.target import Target, host_cpu_flags

from .terminal import STATIC, Terminal, cli_cache, model, prefuse_cli

__all__ = ["cli_cache", "model", "prefuse_cli"]

DYNAMIC = STATIC.replace("[2,4]", "[N,4]")


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(DYNAMIC), tmp_path / "d.onnx")
    return tmp_path / "d.onnx"


def test_compile_then_run(prefuse_cli: Terminal, model: Path, tmp_path: Path) -> None:
    program, arrays = tmp_path / "m.prefuse", tmp_path / "out.npz"
    assert "compiled in" in prefuse_cli("compile", model, "-o", program)
    x, b = np.ones((2, 4), np.float32), np.arange(-2, 2, dtype=np.float32)
    np.savez(tmp_path / "in.npz", x=x, b=b)
    found = prefuse_cli.json("run", program, "--inputs", tmp_path / "in.npz", "-o", arrays)
    assert found["outputs"] == {"y": {"shape": [2, 4], "dtype": "float32", "relative_error": None}}
    np.testing.assert_array_equal(np.load(arrays)["y"], np.maximum(x + b, 0))
    np.testing.assert_array_equal(prefuse.load(program)(x, b), np.maximum(x + b, 0))


def test_run_compares_with_onnxruntime(prefuse_cli: Terminal, model: Path) -> None:
    assert "0.00e+00" in prefuse_cli("run", model, "--compare", "onnxruntime", "--repeat", 2)
    prefuse_cli("run", model, "--compare", "onnxruntime", "--repeat", 2, "--tolerance", -1, status=1)


def test_errors_are_judged_by_the_precision(prefuse_cli: Terminal, model: Path) -> None:
    said = prefuse_cli("run", model, "--compare", "onnxruntime", "--repeat", 1, "--tolerance", -1, status=1)
    assert "y differs by 0.0e+00, more than --tolerance -1" in said
    given: list[dict[str, Any]] = [{}, {"precision": "bfloat16"}, {"precision": "int8"}, {"weights": "int4"}]
    assert [CompileArguments(**one).tolerance for one in given] == [1e-4, 3e-2, 0.1, 0.1]


def test_symbolic_dimensions_need_a_shape(prefuse_cli: Terminal, dynamic: Path) -> None:
    assert "--shape NAME=SIZE" in prefuse_cli("run", dynamic, status=1)
    found = prefuse_cli.json("run", dynamic, "--shape", "x=3,4", "--repeat", 1)
    assert "[\n        3," in json.dumps(found, indent=2) or "[3, 4]" in json.dumps(found)
    assert "NAME=SIZE" in prefuse_cli("run", dynamic, "--shape", "x=a", status=2)
    assert "no such input" in prefuse_cli("run", dynamic, "--shape", "xx=3,4", status=1)


def test_opt_prints_the_graph(prefuse_cli: Terminal, dynamic: Path) -> None:
    text = prefuse_cli("opt", dynamic, "--pipeline", "canonicalize")
    assert "%y = Relu(%z) : float[N,4]" in text
    assert "Identity" not in text
    found = prefuse_cli.json("opt", dynamic)
    assert found["passes"][0]["pass"] == "canonicalize"


def test_opt_lists_passes(prefuse_cli: Terminal) -> None:
    text = prefuse_cli("opt", "--list")
    named = [line.partition("{")[0] for line in text.splitlines() if line and line[0] != " "]
    assert named == [*PASSES, f"default: {DEFAULT_PIPELINE}"]
    assert "quantize-weights{weights=none,block-size=32,min-elements=16384}" in text
    assert "Remove nodes, optional outputs" in text


def test_opt_prints_what_changed_and_how_long_it_took(prefuse_cli: Terminal, dynamic: Path) -> None:
    text = prefuse_cli("opt", dynamic, "--pipeline", "eliminate-dead,canonicalize", "--print-changed", "--time")
    assert "-    %i = Identity(%z) : float[N,4]" in text
    assert "before eliminate-dead" not in text
    assert "ms" in text


def test_opt_starts_and_stops(prefuse_cli: Terminal, dynamic: Path) -> None:
    pipeline = "canonicalize,eliminate-dead,merge-equal,decompose,canonicalize,fuse-epilogue"
    found = prefuse_cli.json("opt", dynamic, "--pipeline", pipeline, "--start", "merge-equal", "--stop", "4")
    assert [one["pass"] for one in found["passes"]] == ["merge-equal", "decompose", "canonicalize"]


def test_opt_writes_onnx_that_others_run(prefuse_cli: Terminal, model: Path, tmp_path: Path) -> None:
    prefuse_cli("opt", model, "-o", tmp_path / "opt.onnx")
    assert prefuse_cli.json("run", tmp_path / "opt.onnx", "--compare", "onnxruntime", "--repeat", 1)
    prefuse_cli("opt", tmp_path / "opt.onnx", "-o", tmp_path / "opt.txt")
    assert "prefuse." in (tmp_path / "opt.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "opt.onnx", "opt.txt"]


def test_bisect_finds_nothing_wrong(prefuse_cli: Terminal, model: Path) -> None:
    assert prefuse_cli.json("bisect", model)["pass_name"] is None


class Break(Pass):
    """A pass with a bug: Relu becomes Neg."""

    name = "break"

    def run(self, model: ir.Model, context: Context) -> bool:
        for node in model.graph:
            if node.op_type == "Relu":
                node.op_type = "Neg"
                return True
        return False


def test_bisect_names_the_pass_and_the_tensor(prefuse_cli: Terminal, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES, "break", f"{__name__}:Break")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Break.__module__])
    found = prefuse_cli.json("bisect", model, "--pipeline", "canonicalize,break,eliminate-dead", status=1)
    assert (found["pass_name"], found["position"], found["tensor"]) == ("break", 1, "y")


def test_inspect(prefuse_cli: Terminal, model: Path, tmp_path: Path) -> None:
    found = prefuse_cli.json("inspect", model)
    assert found["inputs"] == {"x": "float[2,4]", "b": "float[4]"}
    assert found["operators"]["Add"] == {"nodes": 1, "flops": 8, "bytes": 80}
    assert "every operator has a kernel" in prefuse_cli("inspect", model)
    prefuse_cli("compile", model, "-o", tmp_path / "m.prefuse")
    assert "float32[2,4]" in prefuse_cli("inspect", tmp_path / "m.prefuse")


def test_costs_of_symbolic_shapes_are_unknown(prefuse_cli: Terminal, dynamic: Path) -> None:
    assert prefuse_cli.json("inspect", dynamic)["operators"]["Add"] == {"nodes": 1, "flops": None, "bytes": None}
    assert "--shape NAME=SIZES" in prefuse_cli("inspect", dynamic)
    assert prefuse_cli.json("inspect", dynamic, "--shape", "x=2,4")["operators"]["Add"]["bytes"] == 80


def test_static_models_have_costs_and_constant_nodes_are_parameters(prefuse_cli: Terminal, tmp_path: Path) -> None:
    text = """main (float[2,4] x) => (float[2,3] y) {
        w = Constant<value = float[4,3] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>() h = MatMul(x, w) y = Relu(h) }"""
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}'), tmp_path / "m.onnx")
    found = prefuse_cli.json("inspect", tmp_path / "m.onnx")
    assert found["parameters"] == 12
    assert found["weight_bytes"] == 48
    assert found["operators"]["MatMul"]["flops"] == 2 * 2 * 4 * 3
    assert found["operators"]["Relu"] == {"nodes": 1, "flops": 6, "bytes": 48}


def test_a_model_in_stages_is_compiled_run_and_inspected(prefuse_cli: Terminal, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[4] x, int64 n, bool go, seq(float[4]) s) => (float[4] y, seq(float[4]) t) {
        y = Loop(n, go, x) <body = b (int64 i, bool c, float[4] a) => (bool d, float[4] e) { d = Identity(c) e = Neg(a) }>
        t = SequenceInsert(s, y)
    }"""
    model, program = tmp_path / "s.onnx", tmp_path / "s.prefuse"
    onnx.save(parser.parse_model(text), model)
    found = prefuse_cli.json("compile", model, "-o", program)
    assert found["size_bytes"] == program.stat().st_size
    assert "input s: sequence" in prefuse_cli("inspect", program)
    assert "input 's': a sequence cannot be made up" in prefuse_cli("run", program, status=1)
    text = text.replace(", seq(float[4]) s)", ")").replace("SequenceInsert(s, y)", "SequenceConstruct(y, x)")
    onnx.save(parser.parse_model(text), model)
    prefuse_cli("compile", model, "-o", program)
    outputs = prefuse_cli.json("run", program, "--repeat", 1)["outputs"]
    assert {name: one["shape"] for name, one in outputs.items()} == {"y": [4], "t[0]": [4], "t[1]": [4]}


def test_inspect_lists_what_cannot_be_compiled(prefuse_cli: Terminal, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 18, "x": 1]> g (float[4] x) => (float[4] y) {y = x.Odd(x)}'
    onnx.save(parser.parse_model(text), tmp_path / "n.onnx")
    assert "x.Odd" in str(prefuse_cli.json("inspect", tmp_path / "n.onnx")["unsupported"])


def test_doctor(prefuse_cli: Terminal) -> None:
    found = prefuse_cli.json("doctor")
    assert set(found) == {"machine", "gpus", "toolchains", "packages", "fit"}
    assert [one["subject"] for one in found["toolchains"]] == ["linker", "g++", "nvcc", "ld.lld"]
    assert "cpu level" in prefuse_cli("doctor")


def test_doctor_fails_where_nothing_links(prefuse_cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefuse.compiler.cli.doctor.shutil.which", lambda name: None)
    monkeypatch.setattr("prefuse.compiler.cli.doctor.find_spec", lambda name: None)
    assert "none (install binutils" in prefuse_cli("doctor", status=1)


def test_doctor_measures_shows_and_forgets(prefuse_cli: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From then on "cpu" is estimated by what was measured, until it is forgotten; nothing is measured unasked."""
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path))  # of its own: a fit would last for other tests
    fit = Fit("2026-01-02T03:04:05+00:00", {"memory_bytes": 7.5}, {"memory_bytes": 0.01}, {"ghz": "99 is not between 0.5 and 7"})
    monkeypatch.setattr("prefuse.compiler.lowering.machine_fit.fit_host", lambda target, progress: fit)
    row = Target.parse("cpu").machine
    assert prefuse_cli.json("doctor")["fit"]["in_use"] is None
    assert Target.parse("cpu").machine == row
    found = prefuse_cli.json("doctor", "--fit")["fit"]
    assert (found["in_use"]["numbers"], found["row"]["memory_bytes"]) == (fit.numbers, row.memory_bytes)
    assert Target.parse("cpu").machine == row.fitted(fit.numbers) != row
    shown = prefuse_cli("doctor")
    assert f"measured on {fit.measured}" in shown
    assert "ghz is the one that is known: 99 is not" in shown
    assert ["memory_bytes", f"{row.memory_bytes:g}", "7.5", "1.0%"] in [line.split() for line in shown.splitlines()]
    assert f"known of {row.name}" in prefuse_cli("doctor", "--forget")
    assert Target.parse("cpu").machine == row
    assert "give one of them" in prefuse_cli("doctor", "--fit", "--forget", status=1)


@pytest.mark.parametrize(("refusal", "found"), [("", "granted by the system"), ("no memory", "not granted: no memory")])
def test_doctor_says_whether_tiles_are_granted(
    prefuse_cli: Terminal, monkeypatch: pytest.MonkeyPatch, refusal: str, found: str
) -> None:
    monkeypatch.setattr("prefuse.compiler.cli.doctor.host_cpu_flags", lambda: host_cpu_flags() | {"amx_tile"})
    monkeypatch.setattr("prefuse.runtime.hardware.tile_state.refusal", lambda: refusal)
    machine = prefuse_cli.json("doctor")["machine"]
    assert [one["found"] for one in machine if one["subject"] == "AMX tiles"] == [found]


@pytest.mark.parametrize("command", [[str(Path(sys.executable).with_name("prefuse"))], [sys.executable, "-m", "prefuse"]])
def test_the_script_starts_fast_and_explains_itself(command: list[str]) -> None:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert "Usage: prefuse" in done.stdout
    assert all(verb in done.stdout for verb in ("compile", "run", "opt", "bisect", "inspect", "doctor"))


# ------------------------------------------------------------------------------------------- asking why


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """A product whose result two others read."""
    text = """<ir_version: 8, opset_import: ["": 18]> main (float[N,8] x, float[8,8] w) => (float[N,8] y, float[N,8] z) {
        p = MatMul(x, w)
        r = Relu(p)
        y = Softmax(p)
        i = Identity(r)
        z = Softmax(i)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "b.onnx")
    return tmp_path / "b.onnx"


@pytest.fixture
def rejoined(tmp_path: Path) -> Path:
    """A product that no pass joins with its Relu: the Relu meets again what else reads the product."""
    text = """<ir_version: 8, opset_import: ["": 18]> main (float[N,8] x, float[8,8] w) => (float[N,8] z) <int64 axis = {1}> {
        p = MatMul(x, w)
        r = Relu(p)
        y = CumSum(p, axis)
        i = Identity(r)
        z = Add(i, y)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "r.onnx")
    return tmp_path / "r.onnx"


def test_profile(prefuse_cli: Terminal, branched: Path, tmp_path: Path) -> None:
    arguments = ("profile", branched, "--shape", "x=4,8", "--runs", 2, "--threads", 1)
    text = prefuse_cli(*arguments)
    assert all(part in text for part in ("roofline", "GFLOP/s", "measured now on 1 thread:", "normalization"))
    assert "alone: " in text
    found = prefuse_cli.json(*arguments, "--trace", tmp_path / "t.json")
    assert found["calls"] == 2
    assert found["limits"]["flops_per_second"] > 0
    assert all(step["time_us"] > 0 and step["roofline"] > 0 for step in found["steps"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * len(found["steps"])


def test_groups_are_named_by_their_anchors(prefuse_cli: Terminal, tmp_path: Path) -> None:
    """Neither the first nor the last of its nodes says what a group is; exporters' names are long."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
    main (float[4,8] x, float[8] s) => (float[4,8] y) {
        a = Abs(x)
        n = LayerNormalization(a, s)
        y = Tanh(n)
    }""")
    names = [f"/encoder/layers.11/attention/output/{kind}" for kind in ("Abs", "LayerNorm", "Tanh")]
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    onnx.save(model, tmp_path / "n.onnx")
    arguments = ("profile", tmp_path / "n.onnx", "--runs", 1, "--threads", 1)
    (step,) = prefuse_cli.json(*arguments)["steps"]
    anchor_first = [names[1], names[0], names[2]]
    assert (step["label"], step["group"]["source"]) == ("+".join(anchor_first), ", ".join(anchor_first))
    assert f"{names[1]} and 2 more" in prefuse_cli(*arguments)


def test_profile_tells_of_a_machine_that_changed(prefuse_cli: Terminal, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefuse.compiler.cli import profile
    from prefuse.runtime.profile import Limits

    moments = iter([Limits(490e9, 30e9), Limits(250e9, 30e9), Limits(490e9, 30e9), Limits(480e9, 30e9)])
    monkeypatch.setattr(profile, "measure", lambda net: next(moments))
    arguments = ("profile", model, "--runs", 1, "--threads", 1)
    text = prefuse_cli(*arguments)
    assert "limits: 490 GFLOP/s, 30.0 GB/s" in text
    assert "the limits before and after the calls differ by 49%" in text
    assert "differ by" not in prefuse_cli(*arguments)


def test_profile_predicts_at_the_clock_of_the_run(prefuse_cli: Terminal, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that grants 0.8 of the clock that the row has makes everything 1.25 times as long."""
    from prefuse.compiler.cli import profile
    from prefuse.runtime.profile import Limits
    from prefuse.runtime.target import Target

    rate = Target.parse("cpu:avx2,machine=zen3").machine.flops_per_second
    assert rate == 2 * 2 * 8 * 3.4e9
    arguments = ("profile", model, "--runs", 1, "--target", "cpu:avx2,machine=zen3", "--threads", 2)
    for speed, differs in ((0.8, True), (1.01, False)):
        limits = Limits(2 * speed * rate, 30e9)
        monkeypatch.setattr(profile, "measure", lambda net, limits=limits: limits)
        assert ("at this run's clock (multiply-adds at 0.80 of the fitted rate)" in prefuse_cli(*arguments)) == differs
        found = prefuse_cli.json(*arguments)
        assert found["speed"] == pytest.approx(speed)
        assert found["predicted_now_us"] == pytest.approx(found["predicted_us"] / speed)
        assert found["predicted_us"] > 0


def test_profile_compares_pipelines(prefuse_cli: Terminal, model: Path) -> None:
    arguments = ("profile", model, "--runs", 2, "--threads", 1, "--compare", "none")
    assert "steps of none" in prefuse_cli(*arguments)
    found = prefuse_cli.json(*arguments)
    (other,) = found["compared"]
    assert (len(found["steps"]), len(other["steps"])) == (1, 2)
    (group,) = other["groups"]
    assert (group["first"], group["second"]) == (["z+y"], ["z", "y"])
    assert group["bytes_moved"] == [80, 144]
    assert all(time > 0 for time in group["time_us"])


def test_profile_of_a_program(prefuse_cli: Terminal, model: Path, tmp_path: Path) -> None:
    program = tmp_path / "p.prefuse"
    prefuse_cli("compile", model, "-o", program)
    assert "compile the model with profile=True, or --profile" in prefuse_cli("profile", program, status=1)
    prefuse_cli("compile", model, "-o", program, "--profile")
    assert prefuse_cli.json("profile", program, "--runs", 1)["calls"] == 1


def test_compile_prints_remarks(prefuse_cli: Terminal, rejoined: Path, tmp_path: Path) -> None:
    arguments = ("compile", rejoined, "--shape", "x=4,8", "-o", tmp_path / "r.prefuse")
    said = "fuse-epilogue: Relu not fused with MatMul: %p is also read by CumSum, and CumSum is not pointwise"
    assert prefuse_cli(*arguments).count(said) < prefuse_cli(*arguments, "--remarks").count(said)
    assert said in prefuse_cli.json(*arguments)["remarks"]


def test_why_not(prefuse_cli: Terminal, branched: Path, rejoined: Path) -> None:
    text = prefuse_cli("why-not", rejoined, "MatMul#0", "r", "--shape", "x=4,8")
    assert "it was refused" in text
    assert "%p is also read by CumSum" in text
    found = prefuse_cli.json("why-not", branched, "y", "z", "--shape", "x=4,8", "--pipeline", "canonicalize,fuse-epilogue")
    assert (found["first"], found["together"], found["path"]) == ("y", False, [])
    assert "no path" in found["summary"]


def test_explain(prefuse_cli: Terminal, rejoined: Path) -> None:
    text = prefuse_cli("explain", rejoined, "%i", "--shape", "x=4,8")
    assert "removed: %r takes the place of its result" in text
    (found,) = prefuse_cli.json("explain", rejoined, "MatMul#0", "--shape", "x=4,8")["nodes"]
    assert found["placements"][0]["template"] == "matmul"
    assert any("not fused with MatMul" in reason for reason in found["rejections"])
