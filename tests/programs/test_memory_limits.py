"""Random graphs within random limits: the bits of the unlimited program, and never more bytes than they may take."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.runtime.errors import MemoryLimitError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import COMPUTE, SCRATCH, Copy, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.report import size
from prefuse.tests.sample import examples, sample_number

EXAMPLES = examples(100) // 10
PIPELINE = DEFAULT_PIPELINE.replace("schedule-prefetch", "schedule-prefetch{min-bytes=1}")
ON_DEMAND = PIPELINE.replace("min-bytes=1", "min-bytes=1,on-demand=true")


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


@pytest.mark.daily
def test_limited_programs_give_the_same_bits() -> None:
    """Most of them within less than the whole; for a limit that is too little the error names one that is not."""
    limited = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(sample_number())
    @given(graphs(), st.floats(0.4, 0.95), st.booleans())
    def judge(model: ir.Model, share: float, on_demand: bool) -> None:
        limited.append(is_limited(model, share, ON_DEMAND if on_demand else PIPELINE))

    judge()
    assert sum(limited) >= len(limited) / 2


def within(model: ir.Model, limit: int, pipeline: str) -> CompiledModel | MemoryLimitError:
    """The program within a limit, or what refuses it."""
    try:
        net = prefuse.compile(model, threads=2, cache=False, memory_limit=limit, pipeline=pipeline)
    except MemoryLimitError as error:
        return error
    assert isinstance(net, CompiledModel)
    return net


def is_limited(model: ir.Model, share: float, pipeline: str) -> bool:
    """Compare a program within a share of its memory, or more where that is too little, with that without a limit; whether it
    has less than all."""
    free = prefuse.compile(model, threads=2, cache=False)
    assert isinstance(free, CompiledModel)
    total = planned_bytes(free.plan)
    limit = max(int(share * total), 1)
    net = within(model, limit, pipeline)
    if isinstance(net, MemoryLimitError):
        assert size(limit) in net.what
        assert net.least_bytes > limit
        limit = net.least_bytes
        net = within(model, limit, pipeline)
    assert isinstance(net, CompiledModel), net
    assert check_plan(net.plan) == ()
    assert planned_bytes(net.plan) <= limit
    moves = any(isinstance(step, Copy) and step.stream != COMPUTE for step in net.plan.steps)
    assert moves or limit >= total
    if any(space.name == SCRATCH for space in net.plan.spaces):
        event("activations leave")
    x = np.random.default_rng(1).integers(0, 50, free.inputs[0].type.shape)
    expected = free(x)
    for _ in range(3):
        np.testing.assert_array_equal(net(x), expected)
    return moves
