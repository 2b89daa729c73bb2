"""What fits within a limit fits within a larger one, too; and an error names no more than a step needs."""

from __future__ import annotations

import pytest
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.passes.plan.schedule_prefetch import SchedulePrefetch
from prefuse.runtime.errors import MemoryLimitError
from prefuse.runtime.hardware.memory_limit import MemoryLimit
from prefuse.runtime.plan import Plan, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.target import Target

from .skip_plans import SIZE_BYTES, skips


def within(limit: int, plan: Plan) -> Plan:
    context = Context(Target.parse("cpu:avx2", threads=1), memory_limit=MemoryLimit(limit))
    placed = PlanMemory(effort="quick").run(plan, context)
    return SchedulePrefetch(min_bytes=SIZE_BYTES // 4, repeats=False).run(placed, context)


@pytest.mark.parametrize("activations", [64, 68])
def test_many_small_activations_leave_where_nothing_else_keeps_within_the_limit(activations: int) -> None:
    """68 are more than 64 of a limit's parts that are worth a copy."""
    limit = activations * SIZE_BYTES
    found = within(limit, skips(72))
    assert planned_bytes(found) <= limit
    assert not check_plan(found)


def test_an_error_names_what_a_step_needs_when_all_have_left() -> None:
    with pytest.raises(MemoryLimitError, match=r"at least 1.09 MiB: y0 needs that at once") as error:
        within(68 * SIZE_BYTES, skips(72, 69 * SIZE_BYTES))
    assert error.value.least_bytes == 70 * SIZE_BYTES
