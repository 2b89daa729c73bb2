"""Whether the states of a Plan are declared rightly: each kept where nothing else lies, and renewed by one buffer at most.

That a state's old value is read before the new one is written, `plan_checker` decides, which knows the order of the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from .plan import Buffer, Plan, Role

Found = tuple[str, str]  # where, and what is wrong there


def state_faults(plan: Plan) -> Iterator[Found]:
    """What is wrong with the states of a plan and with their buffers, apart from steps."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    kinds = {"state": (state.name for state in plan.states), "state of buffer": (state.buffer for state in plan.states)}
    for kind, names in kinds.items():
        yield from ((f"{kind} {name}", f"{count} have this name") for name, count in Counter(names).items() if count > 1)
    yield from _ports(plan, buffers)
    yield from _renewals(plan, buffers)
    yield from _places(plan)


def _ports(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Found]:
    """Each state has a buffer of its size, what it is at first is a constant of that size, and each such buffer is of a state."""
    for state in plan.states:
        where, buffer = f"state {state.name}", buffers.get(state.buffer)
        if buffer is None or buffer.role is not Role.STATE or buffer.renews is not None:
            yield where, f"its buffer {state.buffer} is no state buffer that a call finds"
        elif state.type.size_bytes != buffer.size_bytes:
            yield where, f"{state.type} has {state.type.size_bytes} bytes, its buffer {buffer.size_bytes}"
        if state.initial is not None:
            first = buffers.get(state.initial)
            if first is None or first.role is not Role.CONSTANT or first.size_bytes != state.type.size_bytes:
                yield where, f"what it is at first, {state.initial}, is no constant of {state.type.size_bytes} bytes"
    held = {state.buffer for state in plan.states}
    for buffer in plan.buffers:
        if buffer.role is Role.STATE and buffer.renews is None and buffer.name not in held:
            yield f"buffer {buffer.name}", "no state of the program is in it"


def _renewals(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Found]:
    """A buffer that renews a state is its only one, and has its bytes."""
    renewed: dict[str, str] = {}
    for buffer in plan.buffers:
        if buffer.renews is None:
            continue
        where, old = f"buffer {buffer.name}", buffers.get(buffer.renews)
        if buffer.role is not Role.STATE:
            yield where, f"{buffer.role} renews {buffer.renews}, which a state alone does"
        if old is None or old.role is not Role.STATE or old.renews is not None:
            yield where, f"it renews {buffer.renews}, which is no state that a call finds"
        elif (old.space, old.offset, old.size_bytes) != (buffer.space, buffer.offset, buffer.size_bytes):
            yield where, f"it does not have the bytes of {buffer.renews}, which it renews"
        if (other := renewed.setdefault(buffer.renews, buffer.name)) != buffer.name:
            yield where, f"it renews {buffer.renews}, as {other} does"


def _places(plan: Plan) -> Iterator[Found]:
    """States keep their bytes between calls: they share them with nothing, and their spaces hold nothing else."""
    for space in plan.spaces:
        inside = [buffer for buffer in plan.buffers if buffer.space == space.name]
        if len({buffer.role is Role.STATE for buffer in inside}) > 1:
            yield f"space {space.name}", "it holds states, which are kept between calls, and other buffers"
    kept = [(buffer.space, buffer.offset, buffer) for buffer in plan.buffers if buffer.role is Role.STATE and buffer.size_bytes]
    placed = sorted(((name, offset, b) for name, offset, b in kept if offset is not None and b.renews is None), key=_start)
    for (name, offset, first), (other, start, second) in pairwise(placed):
        if name == other and offset + first.size_bytes > start:
            yield f"space {name}", f"states {first.name} and {second.name} share bytes"


def _start(place: tuple[str, int, Buffer]) -> tuple[str, int]:
    return place[:2]
