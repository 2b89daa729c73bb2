"""Random models with control flow: the passes keep their results, and so does the whole compiler, in stages where it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
from hypothesis import HealthCheck, given, seed, settings
from prefuse.compiler.debugging.oracle import Arrays, random_inputs, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target
from prefuse.tests.models.structured_models import structured_models
from prefuse.tests.sample import sample_number

UNROLLED, REST = "canonicalize,unroll-loops", "eliminate-dead,merge-equal,decompose,canonicalize,merge-equal,eliminate-dead"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much]


def run(model: ir.Model, pipeline: str) -> bool:
    """Run a pipeline, verifying after each pass; whether the last pass changed the model."""
    return run_pipeline(model, parse_pipeline(pipeline, PASSES), Context(Target.parse("cpu")))[-1].changed


def assert_equal_results(found: Callable[[Arrays], np.ndarray], model: ir.Model) -> None:
    """For inputs that take several ways through the model."""
    for number in (0, 1):
        inputs = random_inputs(model, number)
        np.testing.assert_allclose(found(inputs), run_model(model, inputs)["y"], rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=SLOW)
@seed(sample_number())
@given(model=structured_models())
def test_passes_keep_results(model: ir.Model) -> None:
    """And a second walk finds nothing to do."""
    infer_facts(model)
    original = model.clone()
    run(model, UNROLLED)
    text = print_model(model)
    assert not run(model, "unroll-loops")
    assert print_model(model) == text
    run(model, REST)
    assert_equal_results(lambda inputs: run_model(model, inputs)["y"], original)


@settings(max_examples=4, deadline=None, database=None, suppress_health_check=SLOW)
@seed(sample_number())
@given(model=structured_models())
def test_programs_give_the_results(model: ir.Model) -> None:
    """The passes in stages, where a run decides."""
    program: Callable[..., Any] = prefuse.compile(ir.to_proto(model), cache=False)
    assert_equal_results(lambda inputs: program(*inputs.values()), model)


def test_types_that_unrolling_tells_are_used_at_once() -> None:
    """What a loop that stays carries has no known shape; a Scan that is unrolled tells it."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    main (float[2] x, float[2,2] matrix, bool run) => (float[2] y)
    <int64 n = {2}, bool yes = {1}, float[2] zero = {0, 0}, int64[1] rows = {0}> {
      v, z = Loop (n, yes, x) <body = l (int64 k, bool c, float[2] a) => (bool go, float[2] b, float[2] s) {
        q = If (run) <then_branch = t () => (float[2] p) { p = Neg (x) }, else_branch = e () => (float[2] o) { o = Abs (x) }>
        go = Identity (c)  b = Add (x, zero)  s = Add (x, zero)
      }>
      r = ReduceSum <keepdims = 0> (z, rows)
      d = Add (v, r)
      w, u = Scan (d, matrix) <num_scan_inputs = 1, body = s (float[2] a, float[2] m) => (float[2] b, float[2] t) {
        b = Add (a, zero)  t = Add (d, zero)
      }>
      g = ReduceSum <keepdims = 0> (u, rows)
      y = Add (w, g)
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_facts(model)
    assert run(model, UNROLLED)
    assert not run(model, "unroll-loops")
