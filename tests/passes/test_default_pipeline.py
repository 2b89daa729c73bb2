"""The default graph pipeline as a whole, on the example models and on random networks.

What it makes, with every group inlined, computes what the model did; the passes that only outline give back the very same
nodes; and on their own result the fusing passes change nothing, each alone and all of them in a row, and neither does the whole.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplementedByRuntime
from prefuse.compiler.debugging.oracle import Arrays, random_inputs, relative_error, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.functions import inline_all
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, Pass, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES, without_fusion
from prefuse.examples.models import MODELS
from prefuse.passes.fusion.fuse_rows.columns import is_by_column
from prefuse.runtime.target import Target
from prefuse.tests.models.exports import Exports
from prefuse.tests.models.network_strategies import networks
from prefuse.tests.sample import examples, sample_number

_TARGET = Target.parse("cpu:avx512")  # whatever machine this runs on
_PASSES = [one for one in parse_pipeline(DEFAULT_PIPELINE, PASSES) if isinstance(one, Pass)]
_FUSING = [one for one in _PASSES if one.name not in without_fusion(DEFAULT_PIPELINE).split(",")]
_OUTLINING = ("fuse-gather", "fuse-rows", "fuse-epilogue", "merge-groups", "fuse-reorders")
_TOLERANCE = 1e-5  # relative, of the 2-norm
_NETWORKS = examples(100)  # others each day


def assert_stable(model: ir.Model, passes: list[Pass]) -> None:
    """Passes change nothing, and say so."""
    text = print_model(model)
    records = run_pipeline(model, passes, Context(_TARGET), verify=False)
    assert print_model(model) == text
    assert not [record.name for record in records if record.changed]


def run_whole_pipeline(model: ir.Model) -> None:
    """The default pipeline, with all that holds of the passes between."""
    for one in _PASSES:
        nodes = inlined_nodes(model) if _only_outlines(one, model) else None
        run_pipeline(model, [one], Context(_TARGET))
        assert nodes is None or inlined_nodes(model) == nodes, one.name
        if one in _FUSING:
            assert_stable(model, [one])
    assert_stable(model, _FUSING)
    assert_stable(model, _PASSES)


def _only_outlines(one: Pass, model: ir.Model) -> bool:
    """Whether a pass leaves the nodes of a model what they are; fuse-rows spells products by one column as sums."""
    spells = one.name == "fuse-rows" and any(is_by_column(node) for node in model.graph)
    return one.name in _OUTLINING and not spells


def inlined_nodes(model: ir.Model) -> list[str]:
    """The nodes of a model without groups, as text in any order."""
    return sorted(line for line in print_model(inlined(model)).splitlines() if not line.lstrip().startswith("const "))


def inlined(model: ir.Model) -> ir.Model:
    copy = model.clone()
    inline_all(copy)
    return copy


def results(model: ir.Model, inputs: Arrays) -> Arrays:
    """By ONNX Runtime, or onnx.reference for what that lacks."""
    try:
        return run_model(model, inputs)
    except NotImplementedByRuntime:
        return run_model(model, inputs, "reference")


def assert_pipeline_keeps(model: ir.Model) -> None:
    inputs = random_inputs(model)
    expected = results(model, inputs)
    assume(all(np.isfinite(array).all() for array in expected.values()))
    run_whole_pipeline(model)
    found = results(inlined(model), inputs)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert relative_error(found[name], array) <= _TOLERANCE, name


@pytest.mark.parametrize("name", MODELS)
def test_example_models(name: str, exports: Exports) -> None:
    assert_pipeline_keeps(import_model(exports(name).path))


@pytest.mark.daily
@settings(
    max_examples=_NETWORKS, deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking a network takes minutes
)  # fmt: skip
@seed(sample_number())
@given(networks())
def test_random_networks(model: ir.Model) -> None:
    assert_pipeline_keeps(model)
