"""Random graphs within random limits: the bits of the unlimited program, and never more bytes than they may take."""

from __future__ import annotations

import os

import numpy as np
import onnx_ir as ir
import prefuse
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import COMPUTE, SCRATCH, Copy, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.report import size
from prefuse.tests.sample import sample_number

EXAMPLES = int(os.environ.get("PREFUSE_TEST_EXAMPLES", "100")) // 10
PIPELINE = DEFAULT_PIPELINE.replace("schedule-prefetch", "schedule-prefetch{min-bytes=1}")


@st.composite
def graphs(draw: st.DrawFn) -> ir.Model:
    """Products with weights of 16 to 100 KiB, some of them shared, sums, rows of a table, parts of results side by side, and
    several results. With many rows activations are most of what they take, and leave memory."""
    columns = draw(st.sampled_from([64, 96, 160]))
    weights = draw(st.integers(3, 8))
    rows = draw(st.one_of(st.integers(1, 9), st.integers(100, 700)))
    kinds = ["product", "product", "product", "sum", "relu", *(["halves"] if rows % 2 == 0 else [])]
    values, lines = ["e"], ["e = Gather(table, x)"]
    for index in range(draw(st.integers(4, 14))):
        name = f"v{index}"
        source = draw(st.sampled_from(values[-3:]))
        match draw(st.sampled_from(kinds)):
            case "product":
                lines.append(f"{name} = MatMul({source}, w{draw(st.integers(0, weights - 1))})")
            case "sum":
                lines.append(f"{name} = Add({source}, {draw(st.sampled_from(values))})")
            case "halves":
                other = draw(st.sampled_from(values))
                parts = (
                    f"{name}{half}l, {name}{half}h = Split<axis=0, num_outputs=2>({of})"
                    for half, of in (("a", source), ("b", other))
                )
                lines += [*parts, f"{name} = Concat<axis=0>({name}ah, {name}bl)"]
            case _:
                lines.append(f"{name} = Relu({source})")
        values.append(name)
    for early in draw(st.lists(st.sampled_from(values[:-1]), max_size=3)):  # which are idle until then
        lines.append(f"{values[-1]}s = Add({values[-1]}, {early})")
        values.append(f"{values[-1]}s")
    outputs = [values[-1], *draw(st.sets(st.sampled_from(values[1:-1]), max_size=1))] if len(values) > 2 else values[-1:]
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    arrays = {f"w{index}": rng.standard_normal((columns, columns), np.float32) / np.float32(columns) for index in range(weights)}
    arrays["table"] = rng.standard_normal((50, columns), np.float32)
    results = ", ".join(f"float[{rows},{columns}] {name}" for name in outputs)
    text = f'<ir_version: 8, opset_import: ["": 18]> random (int64[{rows}] x) => ({results}) {{\n' + "\n".join(lines) + "\n}"
    used = {name: array for name, array in arrays.items() if f"{name})" in text or f"({name}," in text}
    return ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in used.items()])


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@seed(sample_number())
@given(graphs(), st.floats(0.4, 0.95), st.booleans())
def test_limited_programs_give_the_same_bits(model: ir.Model, share: float, on_demand: bool) -> None:
    free = prefuse.compile(model, threads=2, cache=False)
    assert isinstance(free, CompiledModel)
    total = planned_bytes(free.plan)
    pipeline = PIPELINE.replace("min-bytes=1", "min-bytes=1,on-demand=true") if on_demand else PIPELINE
    limit, net = max(int(share * total), 1), None
    for _ in range(4):
        try:
            net = prefuse.compile(model, threads=2, cache=False, memory_limit=limit, pipeline=pipeline)
            break
        except CompileError as error:
            if error.where != "memory_limit" or size(limit) not in error.what:
                raise
            limit += (total - limit) // 2
    if net is None:
        event("too little")
        return
    assert isinstance(net, CompiledModel)
    assert check_plan(net.plan) == ()
    assert planned_bytes(net.plan) <= limit
    assert any(isinstance(step, Copy) and step.stream != COMPUTE for step in net.plan.steps)
    if any(space.name == SCRATCH for space in net.plan.spaces):
        event("activations leave")
    x = np.random.default_rng(1).integers(0, 50, free.inputs[0].type.shape)
    expected = free(x)
    for _ in range(3):
        np.testing.assert_array_equal(net(x), expected)
