"""Activations that are computed again where memory is too small for them to wait, instead of copied out and in."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.passes.plan.schedule_prefetch.objects import Objects
from prefuse.passes.plan.schedule_prefetch.recomputed import recomputed
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import SCRATCH, Copy, Launch, Plan, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.target import Target

from .skip_plans import SIZE_BYTES, skips

ROWS, COLUMNS = 256, 1024
TEXT = f"""<ir_version: 8, opset_import: ["": 17]> main (float[{ROWS},{COLUMNS}] x) => (float[{ROWS},{COLUMNS}] y) {{
  a = BODY
  u = MatMul(a, w0)
  v = MatMul(u, w1)
  s = Softmax(v)
  t = Transpose(s)
  c = MatMul(t, s)
  z = ReduceMax<axes=[1], keepdims=1>(c)
  f = Reshape(z, one)
  y = Add(a, f)
}}"""


def model(body: str = "Tanh(x)") -> ir.Model:
    rng = np.random.default_rng(0)
    arrays = {"w0": rng.standard_normal((COLUMNS, 16), np.float32), "w1": rng.standard_normal((16, COLUMNS), np.float32)}
    arrays |= {"one": np.array([1, COLUMNS], np.int64)}
    tensors = [ir.tensor(array, name=name) for name, array in arrays.items()]
    return ir.from_onnx_text(TEXT.replace("BODY", body), initializers=tensors)


def compiled(graph: ir.Model, **options: object) -> CompiledModel:
    net = prefuse.compile(graph, threads=2, cache=False, **options)  # type: ignore[arg-type]
    assert isinstance(net, CompiledModel)
    return net


def repeated(net: CompiledModel) -> int:
    """How many launches a call has beyond one of each."""
    labels = [step.label for step in net.plan.steps if isinstance(step, Launch)]
    return len(labels) - len(set(labels))


def spills(net: CompiledModel) -> bool:
    spaces = {buffer.name: buffer.space for buffer in net.plan.buffers}
    return any(spaces[step.source.buffer] == SCRATCH for step in net.plan.steps if isinstance(step, Copy))


@pytest.mark.parametrize("limit", ["92%"])
def test_what_is_cheap_is_computed_again(limit: str) -> None:
    free, net = compiled(model()), compiled(model(), memory_limit=limit)
    assert not check_plan(net.plan)
    assert planned_bytes(net.plan) <= float(limit[:-1]) / 100 * planned_bytes(free.plan)
    assert (repeated(free), repeated(net), spills(net)) == (0, 1, False)
    x = np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(net(x), free(x))
    assert any("1 launches run again" in text for text in net.report().splitlines())
    found = prefuse.predict(model(), threads=2, memory_limit=limit)
    assert [step.label.split("+")[0].split(" ")[0] for step in found.repeated] == ["a"]
    assert not prefuse.predict(model(), threads=2).repeated


def test_nothing_is_tried_where_all_launches_that_may_be_repeated_are_too_few() -> None:
    context, tried = Context(Target.parse("cpu:avx2", threads=1)), list[Plan]()

    def needs(plan: Plan) -> list[int]:
        return Objects(plan, context, 1, None).problem(0).step_bytes()

    def place(plan: Plan) -> Plan:
        tried.append(plan)
        return PlanMemory(effort="quick").place(plan)[0]

    for depth, is_tried in ((80, True), (200, False)):
        plan = PlanMemory(effort="quick").run(skips(depth), context)
        assert recomputed(plan, 16 * SIZE_BYTES, needs, place, {}) is None
        assert bool(tried) == is_tried
        assert len(tried) < 64
        tried.clear()
