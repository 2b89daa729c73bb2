"""The checker finds no fault in right plans and rejects every mutant that a simulation shows to be wrong."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.runtime.memory.regions import close_pairs
from prefuse.runtime.plan import (
    ALIGNMENT,
    Buffer,
    Copy,
    Extent,
    Grid,
    Host,
    Kernel,
    Launch,
    Plan,
    Port,
    Record,
    Region,
    Role,
    Space,
    Step,
    TensorType,
    Wait,
    step_reads,
    step_writes,
)
from prefuse.runtime.plan_checker import check_plan, plan_faults
from prefuse.runtime.symbolic.dims import Dim
from prefuse.runtime.target import Target
from prefuse.tests.models.plan_strategies import plans, simulated_faults
from prefuse.tests.scaling import assert_scales

BYTES = 256
KIND = TensorType((64,), "float32")


def planned(plan: Plan) -> Plan:
    return PlanMemory().run(plan, Context(Target.parse("cpu:avx2", threads=1)))


def whole(name: str) -> Region:
    return Region(name, 0, BYTES)


def with_buffer(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(plan, buffers=tuple(replace(b, **changes) if b.name == name else b for b in plan.buffers))


def with_launch(plan: Plan, index: int, **changes: Any) -> Plan:
    step = plan.steps[index]
    assert isinstance(step, Launch)
    return with_step(plan, index, replace(step, **changes))


def with_step(plan: Plan, index: int, *steps: Step) -> Plan:
    return replace(plan, steps=(*plan.steps[:index], *steps, *plan.steps[index + 1 :]))


def example() -> Plan:
    """Stream 1 copies weights w into p while stream 0 computes; then both meet.

    0: h = k(x)      1: p = copy w (stream 1)   2: record 0 (stream 1)   3: wait 0   4: g = two(h, p) with scratch s   5: y = k(g)
    """
    roles = {"x": Role.INPUT, "y": Role.OUTPUT, "w": Role.CONSTANT, "s": Role.WORKSPACE}
    spaces = {"x": ("caller", None), "y": ("caller", None), "w": ("constants", 0)}
    places = {"h": 0, "p": 256, "g": 512, "s": 768}
    return Plan(
        target="cpu:avx2,threads=1",
        inputs=(Port("x", KIND, "x"),),
        outputs=(Port("y", KIND, "y"),),
        spaces=(Space("caller"), Space("constants", 256), Space("arena", 1024, 1024)),
        buffers=tuple(
            Buffer(name, roles.get(name, Role.ACTIVATION), BYTES, *spaces.get(name, ("arena", places.get(name))))
            for name in "xywhpgs"
        ),
        kernels=(Kernel("k", "elementwise", 2), Kernel("two", "elementwise", 4)),
        steps=(
            Launch("k", (whole("x"),), (whole("h"),)),
            Copy(whole("w"), whole("p"), stream=1),
            Record(0, stream=1),
            Wait(0),
            Launch("two", (whole("h"), whole("p")), (whole("g"),), (whole("s"),), inplace=((0, 0),)),
            Launch("k", (whole("g"),), (whole("y"),)),
        ),
    )


def test_example_is_right() -> None:
    assert check_plan(example()) == ()
    assert simulated_faults(example()) == []


MUTANTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "dropped wait": (lambda p: with_step(p, 3), "step 3: it reads byte 0 of p, which no step before it has written"),
    "dropped record": (lambda p: with_step(p, 2), "step 2: it waits for event 0, which no earlier step records"),
    "record too early": (lambda p: with_step(with_step(p, 2), 1, Record(0, 1), p.steps[1]), "step 4: it reads byte 0 of p"),
    "event recorded twice": (lambda p: with_step(p, 2, p.steps[2], p.steps[2]), "step 3: event 0 is recorded a second time"),
    "dropped launch": (lambda p: with_step(p, 0), "step 3: it reads byte 0 of h"),
    "dropped copy": (lambda p: with_step(p, 1), "step 3: it reads byte 0 of p"),
    "dropped last step": (lambda p: with_step(p, 5), "output y: byte 0 is never written"),
    "partial write": (
        lambda p: with_step(p, 1, Copy(Region("w", 0, 255), Region("p", 0, 255), 1)),
        "step 4: it reads byte 255 of p",
    ),
    "shifted offset": (lambda p: with_buffer(p, "p", offset=192), "space arena: h and p share bytes while both are in use"),
    "overlap inside a step": (
        lambda p: with_buffer(p, "g", offset=320),
        "step 4: its write 0 and read 1 share bytes of space arena",
    ),
    "shifted in-place": (lambda p: with_buffer(p, "g", offset=64), "step 4: its write 0 and read 0 share bytes of space arena"),
    "scratch on data": (lambda p: with_buffer(p, "s", offset=512), "step 4: two of its writes share bytes of space arena"),
    "misaligned": (lambda p: with_buffer(p, "p", offset=260), f"buffer p: its offset 260 is not a multiple of {ALIGNMENT}"),
    "outside the space": (lambda p: with_buffer(p, "s", offset=832), "buffer s: it ends at 1088; space arena has 1024 bytes"),
    "no offset": (lambda p: with_buffer(p, "h", offset=None), "buffer h: it has no offset"),
    "offset of the caller": (lambda p: with_buffer(p, "x", offset=0), "buffer x: input belongs to the caller and has an offset"),
    "unknown space": (lambda p: with_buffer(p, "h", space="disk"), "buffer h: its space disk does not exist"),
    "constant in the arena": (lambda p: with_buffer(p, "w", space="arena"), "space arena: it holds constants"),
    "small buffer": (lambda p: with_buffer(p, "h", size_bytes=255), "step 0: bytes [0, 256) are not inside h, which has 255"),
    "small output": (lambda p: with_buffer(p, "y", size_bytes=320), "output y: float32[64] has 256 bytes, its buffer 320"),
    "over capacity": (
        lambda p: replace(p, spaces=(*p.spaces[:2], Space("arena", 1024, 1023))),
        "space arena: 1024 bytes are more than its capacity 1023",
    ),
    "duplicate buffer": (lambda p: replace(p, buffers=(*p.buffers, p.buffers[0])), "buffer x: 2 have this name"),
    "duplicate kernel": (lambda p: replace(p, kernels=(*p.kernels, p.kernels[0])), "kernel k: 2 have this name"),
    "shared port buffer": (lambda p: replace(p, inputs=(*p.inputs, Port("z", KIND, "x"))), "port of buffer x: 2 have this name"),
    "port of wrong role": (lambda p: replace(p, inputs=(Port("x", KIND, "h"),)), "input x: its buffer h is no input buffer"),
    "buffer without port": (lambda p: replace(p, inputs=()), "buffer x: no input of the program is in it"),
    "unknown kernel": (lambda p: with_launch(p, 0, kernel="q"), "step 0: its kernel q does not exist"),
    "unknown buffer": (lambda p: with_launch(p, 0, reads=(whole("q"),)), "step 0: buffer q does not exist"),
    "wrong arity": (lambda p: with_launch(p, 0, kernel="two"), "step 0: kernel two takes 4 arguments, not 2"),
    "unequal copy": (lambda p: with_step(p, 1, Copy(whole("w"), Region("p", 0, 128), 1)), "step 1: it copies 256 bytes to 128"),
    "write to an input": (lambda p: with_step(p, 0, Copy(whole("w"), whole("x"))), "step 0: it writes x, which is input"),
    "write to a constant": (lambda p: with_step(p, 0, Copy(whole("x"), whole("w"))), "step 0: it writes w, which is constant"),
    "workspace as data": (lambda p: with_step(p, 5, Copy(whole("s"), whole("y"))), "step 5: s is a workspace, used as data"),
    "data as scratch": (lambda p: with_launch(p, 4, scratch=(whole("y"),)), "step 4: y is no workspace"),
    "shared workspace": (lambda p: with_step(p, 4, p.steps[4], p.steps[4]), "step 5: workspace s belongs to step 4"),
    "bad in-place pair": (
        lambda p: with_launch(p, 4, inplace=((0, 2),)),
        "step 4: in-place pair 0=2 names no",
    ),
    "race": (
        lambda p: with_step(p, 0, p.steps[0], Copy(whole("x"), whole("p"))),
        "step 2: its use of p is not ordered with that of step 1",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name: str) -> None:
    mutate, fault = MUTANTS[name]
    faults = [str(found) for found in check_plan(mutate(example()))]
    assert any(fault in found for found in faults), faults


def with_barrier(plan: Plan) -> Plan:
    """The same with a barrier in place of the workspace."""
    spaces = (*plan.spaces, Space("barriers", 2 * BYTES))
    return with_buffer(replace(plan, spaces=spaces), "s", role=Role.BARRIER, space="barriers", offset=0)


def test_barriers_are_scratch_of_one_step_that_is_kept() -> None:
    plan = with_barrier(example())
    assert check_plan(plan) == ()
    another = Buffer("t", Role.BARRIER, BYTES, "barriers", 128)
    for mutant, fault in (
        (with_step(plan, 5, Copy(whole("s"), whole("y"))), "step 5: s is a barrier, used as data"),
        (with_step(plan, 4, plan.steps[4], plan.steps[4]), "step 5: barrier s belongs to step 4"),
        (with_buffer(plan, "h", space="barriers", offset=256), "space barriers: it holds barriers, which are kept between calls"),
        (replace(plan, buffers=(*plan.buffers, another)), "space barriers: barriers s and t share bytes"),
    ):
        assert any(fault in str(found) for found in check_plan(mutant)), fault


def joined() -> Plan:
    """Two values written side by side into c, a Concat in place, then one of them and all of c read.

    0: c[:256] = k(x)      1: c[256:] = copy x      2: y = two(c[256:], c) with scratch s
    """
    part, rest, all_of = Region("c", 0, BYTES), Region("c", BYTES, BYTES), Region("c", 0, 2 * BYTES)
    plan = example()
    kept = tuple(buffer for buffer in plan.buffers if buffer.name in "xys")
    return replace(
        plan,
        buffers=(*kept, Buffer("c", Role.ACTIVATION, 2 * BYTES, "arena", 0)),
        steps=(
            Launch("k", (whole("x"),), (part,)),
            Copy(whole("x"), rest),
            Launch("two", (rest, all_of), (whole("y"),), (whole("s"),)),
        ),
    )


def copied_to(offset: int) -> Plan:
    return with_step(joined(), 1, Copy(whole("x"), Region("c", offset, BYTES)))


def test_parts_of_a_buffer_are_right() -> None:
    assert check_plan(joined()) == ()
    assert simulated_faults(joined()) == []


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (copied_to(0), "step 1: it overwrites byte 0 of c, which is of step 0"),
        (copied_to(64), "step 1: it overwrites byte 64 of c, which is of step 0"),
        (copied_to(64), "step 2: it reads byte 320 of c, which no step before it has written"),
        (copied_to(320), "step 1: bytes [320, 576) are not inside c, which has 512"),
        (with_step(joined(), 1), "step 1: it reads byte 256 of c, which no step before it has written"),
        (
            with_launch(joined(), 2, writes=(Region("c", 0, BYTES),)),
            "step 2: its write 0 and read 1 share bytes of space arena",
        ),
        (with_launch(joined(), 0, reads=(Region("c", 128, BYTES),)), "step 0: its write 0 and read 0 share bytes"),
    ],
)
def test_wrong_parts_are_rejected(plan: Plan, fault: str) -> None:
    faults = [str(found) for found in check_plan(plan)]
    assert any(fault in found for found in faults), faults


def columns(*regions: Region) -> Plan:
    """A buffer of 4 rows of 128 bytes, whose columns are of several launches, and which a last one reads."""
    kept = tuple(buffer for buffer in example().buffers if buffer.name in "xy")
    launches = [Launch("k", (whole("x"),), (region,)) for region in regions]
    return replace(
        example(),
        buffers=(*kept, Buffer("c", Role.ACTIVATION, 512, "arena", 0)),
        steps=(*launches, Launch("k", (Region("c", 0, 512),), (whole("y"),))),
    )


LEFT, RIGHT = Region("c", 0, 160, 4, 128), Region("c", 40, 352, 4, 128)
TURNED = Kernel("k", "gpu_matmul", 2, grids=(Grid("k", 1, 32),))


def test_columns_of_a_buffer_are_right() -> None:
    assert check_plan(columns(LEFT, RIGHT)) == ()
    assert check_plan(columns(RIGHT, LEFT)) == ()
    assert simulated_faults(columns(RIGHT, LEFT)) == []


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (columns(LEFT), "step 1: it reads byte 0 of c, which no step before it has written"),
        (columns(LEFT, replace(RIGHT, offset=44, size_bytes=336)), "step 2: it reads byte 0 of c, which no step"),
        (columns(LEFT, replace(RIGHT, offset=36, size_bytes=368)), "step 1: it overwrites byte 36 of c, which is of step 0"),
        (columns(LEFT, replace(RIGHT, rows=2, size_bytes=176)), "step 2: it reads byte 0 of c, which no step"),
        (columns(LEFT, RIGHT, Region("c", 296, 8)), "step 2: it overwrites byte 296 of c, which is of step 1"),
        (columns(LEFT, replace(RIGHT, pitch=144)), "step 1: bytes [40, 560) are not inside c, which has 512"),
        (columns(LEFT, replace(RIGHT, pitch=80)), "step 1: rows of 88 bytes lie 80 bytes apart"),
        (columns(LEFT, replace(RIGHT, rows=0)), "step 1: 352 bytes from 40 on are no 0 equal rows"),
        (with_step(columns(LEFT, RIGHT), 1, Copy(RIGHT, RIGHT)), "step 1: rows of c have a pitch, which kernels of CPUs alone"),
        (replace(columns(LEFT, RIGHT), kernels=(TURNED,)), "step 0: rows of c have a pitch, which kernels of CPUs alone"),
    ],
)
def test_wrong_columns_are_rejected(plan: Plan, fault: str) -> None:
    faults = [str(found) for found in check_plan(plan)]
    assert any(fault in found for found in faults), faults


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_moved_columns_are_rejected(plan: Plan, data: st.DataObject) -> None:
    right = planned(plan)
    launches = [(at, step) for at, step in enumerate(right.steps) if isinstance(step, Launch) and step.writes[0].rows > 1]
    assume(launches)
    at, step = data.draw(st.sampled_from(launches))
    region = step.writes[0]
    field = data.draw(st.sampled_from(["offset", "pitch", "rows"]))
    moved = replace(region, **{field: max(getattr(region, field) + data.draw(st.sampled_from([-2, -1, 1, 2])), 0)})
    assume(moved.rows > 0 and moved.size_bytes % moved.rows == 0)
    mutant = with_launch(right, at, writes=(moved,))
    assert check_plan(mutant) or not simulated_faults(mutant)


def bounded(plan: Plan, *extents: Extent, size_bytes: int = 8, role: Role = Role.OUTPUT) -> Plan:
    """The plan with these extents on its output, and a last step that writes 8 bytes of n."""
    return replace(
        plan,
        outputs=(replace(plan.outputs[0], extents=extents),),
        buffers=(*plan.buffers, Buffer("n", role, size_bytes, "caller")),
        steps=(*plan.steps, Host("Count", (whole("x"),), (Region("n", 0, 8),))),
    )


def test_extents_are_right() -> None:
    assert check_plan(bounded(example(), Extent(0, "n"))) == ()


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (with_step(bounded(example(), Extent(0, "n")), 6), "extent n: byte 0 is never written"),
        (bounded(example(), Extent(1, "n")), "output y: its extents are of the axes [1], it has 1"),
        (bounded(example(), Extent(0, "n"), Extent(0, "n")), "output y: its extents are of the axes [0, 0], it has 1"),
        (bounded(example(), Extent(0, "n"), size_bytes=16), "output y: its extent n is no output buffer of 8 bytes"),
        (bounded(example(), Extent(0, "n"), role=Role.INPUT), "output y: its extent n is no output buffer of 8 bytes"),
        (bounded(example(), Extent(0, "q")), "output y: its extent q is no output buffer of 8 bytes"),
        (bounded(example(), Extent(0, "y")), "port of buffer y: 2 have this name"),
        (bounded(example()), "buffer n: no output of the program is in it"),
        (
            replace(bounded(example(), Extent(0, "n")), inputs=(Port("x", KIND, "x", (Extent(0, "n"),)),)),
            "input x: an input has no extents",
        ),
    ],
)
def test_wrong_extents_are_rejected(plan: Plan, fault: str) -> None:
    faults = [str(found) for found in check_plan(plan)]
    assert any(fault in found for found in faults), faults


def test_in_place_needs_the_pair() -> None:
    in_place = with_buffer(example(), "g", offset=0)
    assert check_plan(in_place) == ()
    assert check_plan(with_launch(in_place, 4, inplace=()))


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_shifted_offsets_are_rejected(plan: Plan, data: st.DataObject) -> None:
    right = planned(plan)
    buffer = data.draw(st.sampled_from([b for b in right.buffers if b.offset is not None] or [right.buffers[0]]))
    assume(buffer.offset is not None)
    mutant = with_buffer(right, buffer.name, offset=ALIGNMENT * data.draw(st.integers(0, 20)))
    assert check_plan(mutant) or not simulated_faults(mutant)


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_dropped_steps_and_waits_are_rejected(plan: Plan, data: st.DataObject) -> None:
    right = planned(plan)
    index = data.draw(st.integers(0, len(right.steps) - 1))
    assume(not isinstance(right.steps[index], Record))
    mutant = with_step(right, index)
    assert check_plan(mutant) or not simulated_faults(mutant)


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_shortened_lifetimes_are_rejected(plan: Plan, data: st.DataObject) -> None:
    """Memory planned as if one step did not read one of its buffers is wrong for the plan in which it does."""
    readers = [index for index, step in enumerate(plan.steps) if isinstance(step, Launch) and len(step.reads) > 1]
    assume(readers)
    index = data.draw(st.sampled_from(readers))
    step = plan.steps[index]
    assert isinstance(step, Launch)
    forgetful = planned(with_launch(plan, index, reads=step.reads[:1]))
    offsets = {buffer.name: buffer.offset for buffer in forgetful.buffers}
    assume(
        all(
            b.name in offsets
            for s in plan.steps
            for r in step_reads(s) + step_writes(s)
            for b in plan.buffers
            if b.name == r.buffer
        )
    )
    buffers = tuple(replace(buffer, offset=offsets[buffer.name]) for buffer in plan.buffers if buffer.name in offsets)
    mutant = replace(forgetful, buffers=buffers, steps=plan.steps)
    assert check_plan(mutant) or not simulated_faults(mutant)


def right(plan: Plan) -> None:
    assert check_plan(plan) == ()


def test_buffers_in_the_same_two_places_take_near_linear_time() -> None:
    def prepared(launches: int) -> Callable[[], None]:
        names = ["x", *(f"h{i}" for i in range(launches)), "y"]
        buffers = [Buffer(n, Role.ACTIVATION, BYTES, "arena", BYTES * (i % 2)) for i, n in enumerate(names[1:-1])]
        ports = Buffer("x", Role.INPUT, BYTES, "caller"), Buffer("y", Role.OUTPUT, BYTES, "caller")
        steps = tuple(Launch("k", (whole(a),), (whole(b),)) for a, b in pairwise(names))
        return partial(right, replace(example(), buffers=(*ports, *buffers), steps=steps))

    assert_scales(prepared, 1000, 4000, 10)


def test_many_streams_are_a_fault() -> None:
    plan = example()
    records = tuple(Record(event, stream=event) for event in range(1, 20))
    assert "its steps are on 20 streams" in str(check_plan(replace(plan, steps=(*plan.steps, *records)))[0])


def test_many_readers_of_one_place_take_linear_time() -> None:
    """On two streams, of a constant, which nobody writes."""
    plan = example()
    reads = tuple(Launch("k", (whole("w"),), (whole(f"o{index}"),)) for index in range(3000))
    outputs = tuple(Buffer(f"o{index}", Role.ACTIVATION, BYTES, "arena", 1024 + 256 * index) for index in range(3000))
    spaces = (*plan.spaces[:2], Space("arena", 1024 + 256 * 3000, 1024 + 256 * 3000))
    many = replace(plan, steps=(*plan.steps, *reads), buffers=(*plan.buffers, *outputs), spaces=spaces)
    calls = 0

    def pairs(items: Sequence[tuple[Region, object]]) -> Iterator[tuple[object, object]]:
        nonlocal calls
        for pair in close_pairs(items):
            calls += 1
            yield pair

    with mock.patch("prefuse.runtime.plan_checker.close_pairs", pairs):
        assert check_plan(many) == ()
    assert calls < 20_000


def test_many_writes_of_a_step_take_linear_time() -> None:
    def prepared(count: int) -> Callable[[], None]:
        plan, end = example(), 1024 + 64 * count
        parts = tuple(Region("o", 64 * index, 64) for index in range(count))
        buffers = (*plan.buffers, Buffer("o", Role.ACTIVATION, 64 * count, "arena", 1024))
        steps = (*plan.steps, Host("Split", (Region("x", 0, 64),) * count, parts))
        return partial(right, replace(plan, steps=steps, buffers=buffers, spaces=(*plan.spaces[:2], Space("arena", end, end))))

    assert_scales(prepared, 4000, 16_000, 10)


def test_the_first_of_many_faults_is_found_at_once() -> None:
    """3,000 values in one place, all in use at once, are 4.5 million faults; a reader of files wants one."""
    plan = example()
    buffers = (*plan.buffers, *(Buffer(f"o{index}", Role.ACTIVATION, BYTES, "arena", 1024) for index in range(3000)))
    writes = tuple(Launch("k", (whole("x"),), (whole(f"o{index}"),)) for index in range(3000))
    reads = tuple(Host("Read", (whole(f"o{index}"),), ()) for index in range(3000))
    spaces = (*plan.spaces[:2], Space("arena", 1024 + BYTES, 1024 + BYTES))
    crowded = replace(plan, steps=(*plan.steps, *writes, *reads), buffers=buffers, spaces=spaces)
    tracemalloc.start()
    try:
        assert "share bytes while both are in use" in str(next(plan_faults(crowded)))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_dimension_is_the_size_of_an_input() -> None:
    plan = replace(example(), dims=(Dim("T", 1, 9),))
    assert any("dimension T: no axis of an input has its size" in str(fault) for fault in check_plan(plan))
