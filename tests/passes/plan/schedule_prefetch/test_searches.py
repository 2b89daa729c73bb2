"""How long a limit is searched for that nothing can be packed within: a random graph of 25 nodes had taken over five minutes."""

from __future__ import annotations

from dataclasses import replace

import prefuse
import pytest
from prefuse.passes.plan import schedule_prefetch
from prefuse.passes.plan.packing import Packing
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.runtime.errors import MemoryLimitError
from prefuse.runtime.plan import ARENA, Plan
from prefuse.tests.models.chains import product_chain

MOST_LIMITS = 8  # that are tried until an error names one that would do


class Wide(PlanMemory):
    """Packs with 4 KiB more than there are, but knows bounds that are within any limit."""

    searches = 0
    room = 0  # of the quick packing before

    def place(self, plan: Plan) -> tuple[Plan, dict[str, Packing]]:
        Wide.searches += self.effort != "quick"
        placed, packings = super().place(plan)
        Wide.room = plan.space(ARENA).capacity_bytes or Wide.room
        wide = [replace(s, size_bytes=(Wide.room or s.size_bytes) + 4096) if s.name == ARENA else s for s in placed.spaces]
        return replace(placed, spaces=tuple(wide)), {name: replace(one, bound_bytes=0) for name, one in packings.items()}


def test_long_searches_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_prefetch, "PlanMemory", Wide)
    with pytest.raises(MemoryLimitError):
        prefuse.compile(product_chain(6, 256), threads=2, cache=False, memory_limit="50%")
    assert 0 < Wide.searches <= MOST_LIMITS * schedule_prefetch._SEARCHES, "and not three for each of twenty schedules of each"
