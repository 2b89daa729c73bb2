"""On random models every graph pass, and the default pipeline, keeps the results and finds nothing more to do the second time."""

import onnx_ir as ir
import pytest
from hypothesis import given, settings
from prefuse.compiler.ir.functions import inline_all
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.oracle import Arrays, random_inputs, relative_error, run_model
from prefuse.compiler.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.compiler.pipeline import Context, Pass, parse_pipeline, run_pipeline
from prefuse.runtime.target import Target
from prefuse.tests.random_models import random_models

CONTEXT = Context(Target.parse("cpu"))
GRAPH_PASSES = sorted(name for name in PASSES if isinstance(parse_pipeline(name, PASSES)[0], Pass))
TOLERANCE = 1e-5  # folding and reciprocals round differently, and a Softmax of small differences enlarges that


def assert_same(actual: Arrays, expected: Arrays) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert relative_error(actual[name], array) <= TOLERANCE, name


@pytest.mark.parametrize("pipeline", [*GRAPH_PASSES, DEFAULT_PIPELINE])
@given(model=random_models())
@settings(max_examples=40, deadline=None)
def test_results_are_kept(pipeline: str, model: ir.Model) -> None:
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "reference")
    passes = parse_pipeline(pipeline, PASSES)

    run_pipeline(model, passes, CONTEXT)

    assert_same(run_model(model, inputs, "reference"), expected)
    text = print_model(model)
    again = run_pipeline(model, passes, CONTEXT)
    assert print_model(model) == text
    assert not any(record.changed for record in again)
    inline_all(model)
    verify_model(model)
    assert_same(run_model(model, inputs, "reference"), expected)
