"""Runs every tests/filecheck/<pass>/<behaviour>.onnxtxt: one model in ONNX text, a pipeline, and what must come out of it.

    # RUN: canonicalize,fuse-epilogue{max-ops=4}      the pipeline, once
    # CHECK-LABEL: graph @main                        directives of FileCheck on the text that print_model gives
    # REMARK: fuse-epilogue: Relu not fused           part of a remark or rejection that some pass must make
    # NO-REMARK: fuse-epilogue                        part of none of them
    # NOT-EXECUTED: RandomNormal differs on each run  only where executing the model cannot tell anything, with the reason
    # ENGINE: onnxruntime                             what executes the model, where onnx.reference gets it wrong
    # TOLERANCE: 2e-2 operands are rounded            relative error of a pass that rounds, with the reason

Besides, each model is verified and executed before and after the pipeline on the same random inputs, and the last pass must
find nothing more to do when it runs again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser
from prefuse.compiler.debugging.oracle import Arrays, Engine, random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*/*.onnxtxt"))
TOLERANCE = 1e-6  # folding may round once more or once less
_WORDS = {"RUN", "REMARK", "NO-REMARK", "NOT-EXECUTED", "ENGINE", "TOLERANCE"}
_WORDS |= {f"CHECK{kind}" for kind in ("", "-LABEL", "-NEXT", "-NOT", "-SAME", "-DAG", "-EMPTY")}


@dataclass(frozen=True)
class Directives:
    """What the comments of a test file ask for."""

    pipeline: str
    remarks: tuple[str, ...]
    no_remarks: tuple[str, ...]
    executed: bool
    engine: Engine
    tolerance: float


def read_directives(text: str) -> Directives:
    def all_of(key: str) -> tuple[str, ...]:
        return tuple(re.findall(rf"^#\s*{key}:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))

    words = re.findall(r"^#\s*([A-Z][A-Z-]*):", text, re.MULTILINE)
    assert not set(words) - _WORDS, "a word that nobody reads"
    assert any(word.startswith("CHECK") for word in words)
    (pipeline,) = all_of("RUN")
    assert "" not in all_of("NOT-EXECUTED"), "say why the model is not executed"
    engine: Engine = "onnxruntime" if "onnxruntime" in all_of("ENGINE") else "reference"
    tolerance = max((float(line.split()[0]) for line in all_of("TOLERANCE")), default=TOLERANCE)
    return Directives(pipeline, all_of("REMARK"), all_of("NO-REMARK"), not all_of("NOT-EXECUTED"), engine, tolerance)


def execute(model: ir.Model, inputs: Arrays, engine: Engine) -> Arrays:
    """The engine's outputs; ONNX Runtime's where the reference lacks an operator."""
    try:
        return run_model(model, inputs, engine)
    except Exception:  # it raises anything from NotImplementedError to TypeError
        return run_model(model, inputs, "onnxruntime")


def assert_same(actual: Arrays, expected: Arrays, tolerance: float = TOLERANCE) -> None:
    assert list(actual) == list(expected), "the outputs have other names or another order"
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, f"%{name} has another element type"
        assert actual[name].shape == array.shape, f"%{name} has another shape"
        error = relative_error(actual[name], array)
        assert error <= tolerance, f"%{name} differs: relative error {error:.2g}"


def assert_matches(path: Path, text: str) -> None:
    """FileCheck, whose complaint goes to stderr and so into pytest's report."""
    options = Options(str(path))
    matcher = Matcher(options, FInput("print_model", text), Parser.from_opts(options))
    assert matcher.run() == 0, f"the text does not match:\n{text}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_file(path: Path) -> None:
    text = path.read_text()
    directives = read_directives(text)
    model = ir.from_onnx_text(text)
    infer_facts(model)
    verify_model(model)
    original = model.clone()
    passes = parse_pipeline(directives.pipeline, PASSES)
    context = Context(Target.parse("cpu:avx512bf16,threads=2"))  # whatever machine this runs on

    run_pipeline(model, passes, context)

    result = print_model(model)
    assert_matches(path, result)
    said = [str(remark) for remark in context.remarks]
    for wanted in directives.remarks:
        assert any(wanted in line for line in said), f"no remark says {wanted!r}, but:\n" + "\n".join(said)
    for unwanted in directives.no_remarks:
        assert not any(unwanted in line for line in said), f"a remark says {unwanted!r}"
    if directives.executed:
        inputs = random_inputs(original)
        found, expected = (execute(one, inputs, directives.engine) for one in (model, original))
        assert_same(found, expected, directives.tolerance)
    (again,) = run_pipeline(model, passes[-1:], context)
    assert not again.changed, f"{passes[-1].name} says that it changed its own result"
    assert print_model(model) == result, f"{passes[-1].name} is not idempotent"


def test_every_folder_is_named_as_a_pass() -> None:
    assert {path.parent.name for path in FILES} <= PASSES.keys()


def test_errors_are_noticed(tmp_path: Path) -> None:
    """The harness itself: one that accepts everything would pass every other test."""
    with pytest.raises(AssertionError, match="a word that nobody reads"):
        read_directives("# RUN: canonicalize\n# CHECK: graph @main\n# CHECK-NXT: }\n")
    checks = tmp_path / "checks.onnxtxt"
    checks.write_text("# CHECK: graph @main\n# CHECK-NEXT: %y = Relu(%x)\n")
    assert_matches(checks, "graph @main {\n    %y = Relu(%x)\n}\n")
    with pytest.raises(AssertionError, match="does not match"):
        assert_matches(checks, "graph @main {\n    %y = Elu(%x)\n}\n")
    one = {"y": np.ones(3, np.float32)}
    with pytest.raises(AssertionError, match="relative error"):
        assert_same({"y": np.array([1, 1, 1.001], np.float32)}, one)
    with pytest.raises(AssertionError, match="element type"):
        assert_same({"y": np.ones(3)}, one)
    with pytest.raises(AssertionError, match="names"):
        assert_same({"z": np.ones(3, np.float32)}, one)
