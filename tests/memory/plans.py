"""The checker of Plans beside two calls carried out on named bytes: no false alarm on right plans, and no wrong mutant passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.runtime.plan import SCRATCH, Plan, Role
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.target import Target
from prefuse.tests.models.plan_strategies import plans

from .mutants import MUTATIONS
from .streamed_plans import streamed_plan
from .two_calls import faults_of_two_calls

_OF_A_KIND = 3  # mutants of a plan


def judge_streamed_plan(task: tuple[int, int], mutants: int = _OF_A_KIND) -> Counter[str]:
    """Count what was seen of the streamed plan of a seed and a number, and of some mutants of each kind; faults say so."""
    plan, counts = streamed_plan(*task), Counter[str]()
    if plan is None:
        return Counter({"limits too small": 1})
    name = f"plan {task[0]}:{task[1]}"
    counts["streamed plans"] += 1
    counts["of which activations leave"] += any(buffer.space == SCRATCH for buffer in plan.buffers)
    counts["with slots"] += any(buffer.role is Role.SLOT for buffer in plan.buffers)
    counts.update(f"FAULT false alarm: {name}: {fault}" for fault in check_plan(plan))
    counts.update(f"FAULT: {name}: {fault}" for fault in faults_of_two_calls(plan))
    for kind, mutant in _mutants(plan, np.random.default_rng(task), mutants):
        if check_plan(mutant):
            counts[f"{kind}: refused"] += 1
        elif faults := list(faults_of_two_calls(mutant)):
            counts[f"FAULT unnoticed: {name} {kind}: {faults[0]}"] += 1
        else:
            counts[f"{kind}: still right"] += 1
    return counts


def _mutants(plan: Plan, rng: np.random.Generator, count: int) -> Iterator[tuple[str, Plan]]:
    for mutate in MUTATIONS:
        found = [mutant for mutant in mutate(plan) if mutant != plan]
        for index in rng.permutation(len(found))[:count]:
            yield mutate.__name__.replace("_", " "), found[index]


def judge_planned_plans(task: tuple[int, int]) -> Counter[str]:
    """Plans of up to three streams, states, halves and copies, as hypothesis draws so many of them with a seed: each is right
    once its memory is planned."""
    counts, context = Counter[str](), Context(Target.parse("cpu:avx2", threads=1))
    number, examples = task

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(number)
    @given(plans())
    def judge(plan: Plan) -> None:
        counts["plans of several streams" if len({step.stream for step in plan.steps}) > 1 else "plans of one stream"] += 1
        counts.update(f"FAULT false alarm: seed {number}: {fault}" for fault in check_plan(PlanMemory().run(plan, context)))

    judge()
    return counts
