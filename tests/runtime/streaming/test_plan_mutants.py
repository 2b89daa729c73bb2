"""Plans of streamed programs with one thing wrong: the checker refuses each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import prefuse
import pytest
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import PAGE, STORAGE, Copy, Plan
from prefuse.runtime.plan_checker import check_plan

from ...memory.mutants import (
    with_broken_seams,
    with_direct_reads,
    with_earlier_copies,
    with_kept_bytes,
    with_later_copies,
    with_less_capacity,
    with_resident_scratch,
    with_shared_scratch,
    with_shared_seams,
    with_shifted_slots,
    with_short_copies,
    with_swapped_slots,
    without_events,
)


@pytest.fixture(scope="module")
def plan(limited_file: Path) -> Plan:
    net = prefuse.load(limited_file)
    assert isinstance(net, CompiledModel)
    assert check_plan(net.plan) == ()
    return net.plan


@pytest.fixture(scope="module")
def spilled_plan(spilled_file: Path) -> Plan:
    net = prefuse.load(spilled_file)
    assert isinstance(net, CompiledModel)
    assert check_plan(net.plan) == ()
    return net.plan


@pytest.mark.parametrize(
    "mutate",
    [
        without_events,
        with_earlier_copies,
        with_later_copies,
        with_swapped_slots,
        with_shifted_slots,
        with_short_copies,
        with_less_capacity,
        with_direct_reads,
        with_broken_seams,
        with_shared_seams,
    ],
    ids=lambda function: function.__name__,
)
def test_mutants_are_refused(plan: Plan, mutate: object) -> None:
    assert callable(mutate)
    mutants = list(mutate(plan))
    assert mutants
    unnoticed = [number for number, mutant in enumerate(mutants) if mutant != plan and not check_plan(mutant)]
    assert unnoticed == []


@pytest.mark.parametrize(
    "mutate",
    [
        without_events,
        with_earlier_copies,
        with_later_copies,
        with_shifted_slots,
        with_short_copies,
        with_less_capacity,
        with_shared_scratch,
        with_kept_bytes,
        with_resident_scratch,
    ],
    ids=lambda function: function.__name__,
)
def test_mutants_of_activations_that_leave_are_refused(spilled_plan: Plan, mutate: object) -> None:
    assert callable(mutate)
    mutants = list(mutate(spilled_plan))
    assert mutants
    unnoticed = [number for number, mutant in enumerate(mutants) if mutant != spilled_plan and not check_plan(mutant)]
    assert unnoticed == []


def test_a_part_of_a_stored_constant_is_not_copied(plan: Plan) -> None:
    """Its checksum is that of the whole."""
    sizes = {buffer.name: buffer.size_bytes for buffer in plan.buffers if buffer.space == STORAGE}
    index = next(i for i, step in enumerate(plan.steps) if isinstance(step, Copy) and step.source.buffer in sizes)
    copy = plan.steps[index]
    assert isinstance(copy, Copy)
    size = sizes[copy.source.buffer] - PAGE
    for offset in (0, PAGE):
        source, destination = (replace(region, offset=offset, size_bytes=size) for region in (copy.source, copy.destination))
        part = replace(copy, source=source, destination=destination)
        faults = check_plan(replace(plan, steps=(*plan.steps[:index], part, *plan.steps[index + 1 :])))
        assert any("it copies a part of" in fault.what for fault in faults)
