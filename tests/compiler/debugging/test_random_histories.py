"""Any question about any random program has an answer."""

from __future__ import annotations

import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from prefuse.compiler.debugging.compilation import trace_compilation
from prefuse.compiler.debugging.explanation import explain
from prefuse.compiler.debugging.why_not import why_not
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.target import Target
from prefuse.tests.models.program_strategies import programs


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_every_node_has_a_history_and_every_pair_an_answer(model: ir.Model) -> None:
    found = trace_compilation(import_model(model), Target.parse("cpu"))
    names = [node.name for node in found.history.snapshots[0].nodes]
    for name in names:
        (one,) = explain(found, name)
        assert one.placements or one.failure or one.events[-1].change == "removed"
        assert all(line.strip() for line in one.lines())
    for first, second in zip(names, [*names[1:], *names[:1]], strict=True):
        answer = why_not(found, first, second)
        assert not (answer.together and answer.path)
        assert all(line.strip() for line in answer.lines())
