"""What is predicted of programs within a memory limit."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import COMPUTE, STORAGE, planned_bytes
from prefuse.runtime.report import size, speakable_bytes
from prefuse.tests.models.chains import product_chain


def test_memory_is_that_of_the_program_and_copies_run_beside_kernels() -> None:
    found = prefuse.predict(product_chain(), threads=2, memory_limit="60%")
    net = prefuse.compile(product_chain(), threads=2, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    assert found.memory.total_bytes == planned_bytes(net.plan)
    assert found.memory.stored_bytes == net.plan.space(STORAGE).size_bytes
    copies = [step for step in found.steps if step.stream != COMPUTE and step.time_us]
    assert copies
    assert found.copies_us == pytest.approx(sum(step.time_us for step in copies))
    longer = max(found.compute_us, found.copies_us)
    assert longer <= found.latency_us < found.compute_us + found.copies_us
    stalled = sum(step.stall_us for step in found.steps if step.stream == COMPUTE)
    assert stalled + found.tail_us == pytest.approx(found.latency_us - found.compute_us)
    last = max(step.begin_us + step.time_us for step in copies)
    assert found.tail_us == pytest.approx(max(last - max(s.begin_us + s.time_us for s in found.steps if s.stream == COMPUTE), 0))


def test_without_a_limit_nothing_waits() -> None:
    found = prefuse.predict(product_chain(), threads=2)
    assert found.memory.stored_bytes == 0
    assert found.stalls == ()
    assert found.tail_us == pytest.approx(0)


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ("1KiB", "at least 2.* needs that at once"),
        ("0B", "leaves no memory"),
        (0, "leaves no memory"),
        (-5, "leaves no memory"),
        ("7 parsecs", "unknown unit 'parsecs'"),
        ("much", "is no amount of memory"),
        ("150%", "no share of the whole"),
        (True, "is no amount of memory"),
        (2.5, "is no amount of memory"),
        ("900TiB", "more than this machine has"),
    ],
)
def test_limits_that_cannot_be(limit: object, what: str) -> None:
    with pytest.raises(CompileError, match=what):
        prefuse.predict(product_chain(), threads=2, memory_limit=limit)


def test_a_limit_for_a_program_of_few_bytes() -> None:
    """Copies are of whole pages: within a limit it would take more than without, which was given as what it needs at least."""
    body = "h = MatMul(x, v) r = Relu(h) y = MatMul(r, w)"
    text = f"g (float[4,64] x) => (float[4,64] y) {{ {body} }}"
    model, random = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'), np.random.default_rng(0)
    for name in "vw":
        weight = random.standard_normal((64, 64)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    whole = prefuse.predict(model, threads=1).memory.total_bytes
    with pytest.raises(CompileError, match=r"no less by copies: .* would need") as error:
        prefuse.compile(model, threads=1, memory_limit="50%", cache=False)
    assert f"{size(speakable_bytes(whole))} would do" in str(error.value)
