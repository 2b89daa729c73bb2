"""What is predicted of programs within a memory limit."""

from __future__ import annotations

import prefuse
import pytest
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import COMPUTE, STORAGE, planned_bytes
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
    assert stalled == pytest.approx(found.latency_us - found.compute_us)


def test_without_a_limit_nothing_waits() -> None:
    found = prefuse.predict(product_chain(), threads=2)
    assert found.memory.stored_bytes == 0
    assert found.stalls == ()


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
