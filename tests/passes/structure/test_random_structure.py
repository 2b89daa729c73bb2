"""Random models with control flow: the passes keep their results, and so does the whole compiler, in stages where it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import prefuse
from hypothesis import HealthCheck, given, settings
from prefuse.compiler.debugging.oracle import Arrays, random_inputs, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target
from prefuse.tests.models.structured_models import structured_models

UNROLLED, REST = "canonicalize,unroll-loops", "eliminate-dead,merge-equal,decompose,canonicalize,merge-equal,eliminate-dead"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much]


def run(model: ir.Model, pipeline: str) -> bool:
    """Run a pipeline, verifying after each pass; whether the last pass changed the model."""
    return run_pipeline(model, parse_pipeline(pipeline, PASSES), Context(Target.parse("cpu")))[-1].changed


def assert_equal_results(found: Callable[[Arrays], np.ndarray], model: ir.Model) -> None:
    """For inputs that take several ways through the model."""
    for seed in (0, 1):
        inputs = random_inputs(model, seed)
        np.testing.assert_allclose(found(inputs), run_model(model, inputs)["y"], rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
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


@settings(max_examples=4, deadline=None, suppress_health_check=SLOW)
@given(model=structured_models())
def test_programs_give_the_results(model: ir.Model) -> None:
    """The passes in stages, where a run decides."""
    program: Callable[..., Any] = prefuse.compile(ir.to_proto(model), cache=False)
    assert_equal_results(lambda inputs: program(*inputs.values()), model)
