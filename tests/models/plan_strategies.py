"""Random Plans for property tests, and a simulation that says what is wrong with one by executing it on named bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

import networkx as nx
from hypothesis import strategies as st
from prefuse.runtime.plan import (
    Buffer,
    Copy,
    Extent,
    Host,
    Kernel,
    Launch,
    Plan,
    Port,
    Record,
    Region,
    Role,
    Space,
    State,
    Step,
    TensorType,
    Wait,
    step_reads,
    step_writes,
)

SPACES = (Space("caller"), Space("constants"), Space("arena"), Space("device"), Space("state"))


@dataclass
class _Draft:
    """A plan under construction. `writers` are the steps, as indices into `steps`, that wrote each readable buffer."""

    draw: st.DrawFn
    streams: int
    buffers: dict[str, Buffer] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    writers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    events: int = 0

    def buffer(self, role: Role, size_bytes: int, space: str) -> Region:
        name = f"{role}{len(self.buffers)}"
        self.buffers[name] = Buffer(name, role, size_bytes, space)
        return Region(name, 0, size_bytes)

    def stream(self) -> int:
        return self.draw(st.integers(0, self.streams - 1))

    def wait_for(self, reads: tuple[Region, ...], stream: int) -> None:
        """Order the writers of what is read next on `stream` before it."""
        for region in reads:
            for index in self.writers[region.buffer]:
                if self.steps[index].stream != stream:
                    self.steps.append(Record(self.events, self.steps[index].stream))
                    self.steps.append(Wait(self.events, stream))
                    self.events += 1

    def add(self, step: Step) -> None:
        self.wait_for(step_reads(step), step.stream)
        self.steps.append(step)
        for region in step_reads(step):
            self.readers.setdefault(region.buffer, []).append(len(self.steps) - 1)
        for region in step_writes(step):
            self.writers.setdefault(region.buffer, []).append(len(self.steps) - 1)

    def wait_for_readers(self, name: str, stream: int) -> None:
        """Order what has read a buffer before what is written next on `stream`."""
        for index in self.readers.get(name, ()):
            if self.steps[index].stream != stream:
                self.steps.append(Record(self.events, self.steps[index].stream))
                self.steps.append(Wait(self.events, stream))
                self.events += 1


@st.composite
def plans(draw: st.DrawFn, max_streams: int = 3) -> Plan:
    """A right plan without offsets: launches, copies and host steps on some streams, ordered where they need it."""
    draft = _Draft(draw, draw(st.integers(1, max_streams)))
    sizes = st.integers(1, 300)
    inputs = [draft.buffer(Role.INPUT, 4 * draw(sizes), "caller") for _ in range(draw(st.integers(1, 2)))]
    values = inputs + [draft.buffer(Role.CONSTANT, draw(sizes), "constants") for _ in range(draw(st.integers(0, 2)))]
    values += [_state(draft, draw(sizes), values[len(inputs) :]) for _ in range(draw(st.integers(0, 3)))]
    draft.writers.update((value.buffer, []) for value in values)
    for _ in range(draw(st.integers(1, 12))):
        values.append(_produce(draft, values))
    for state in draft.states:
        _renew(draft, state, values)
    outputs = [_output(draft, value) for value in draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))]
    extents = [(Extent(0, _count(draft, values).buffer),) if draw(st.booleans()) else () for _ in outputs]
    return Plan(
        target="cpu:avx2,threads=1",
        inputs=tuple(Port(r.buffer, TensorType((r.size_bytes // 4,), "float32"), r.buffer) for r in inputs),
        outputs=tuple(
            Port(r.buffer, TensorType((r.size_bytes,), "uint8"), r.buffer, found)
            for r, found in zip(outputs, extents, strict=True)
        ),
        spaces=SPACES,
        buffers=tuple(draft.buffers.values()),
        kernels=tuple(draft.kernels),
        steps=tuple(draft.steps),
        states=tuple(draft.states),
    )


def _state(draft: _Draft, size_bytes: int, constants: list[Region]) -> Region:
    """A state that a call finds, at first zero or one of the constants."""
    found = draft.buffer(Role.STATE, size_bytes, "state")
    equal = [constant.buffer for constant in constants if constant.size_bytes == size_bytes and "constant" in constant.buffer]
    initial = draft.draw(st.sampled_from([None, *equal]))
    draft.states.append(State(found.buffer, TensorType((size_bytes,), "uint8"), found.buffer, initial))
    return found


def _renew(draft: _Draft, state: State, values: list[Region]) -> None:
    """Maybe give a state a new value, after all readers of the old one: by launches in place, or from other values."""
    size_bytes = state.type.size_bytes
    kind = draft.draw(st.sampled_from(["keep", "in place", "parts in place", "launch"]))
    if kind == "keep":
        return
    old = Region(state.buffer, 0, size_bytes)
    made = Region(f"new {state.buffer}", 0, size_bytes)
    draft.buffers[made.buffer] = Buffer(made.buffer, Role.STATE, size_bytes, "state", renews=state.buffer)
    others = tuple(value for value in values if value != old)  # where there are states, there is an input, too
    half = size_bytes // 2 if kind == "parts in place" else 0
    for offset, count in ((0, half), (half, size_bytes - half)) if half else ((0, size_bytes),):
        part = Region(made.buffer, offset, count)
        reads = (*((Region(state.buffer, offset, count),) if "in place" in kind else ()), others[-1])
        symbol, stream = f"k{len(draft.kernels)}", draft.stream()
        draft.kernels.append(Kernel(symbol, "elementwise", len(reads) + 1))
        draft.wait_for_readers(state.buffer, stream)
        draft.add(Launch(symbol, reads, (part,), (), ((0, 0),) if "in place" in kind else (), stream))
    values[values.index(old)] = made


def _produce(draft: _Draft, values: list[Region]) -> Region:
    """Add one step, or two for a buffer written in halves or by columns, that make a new value."""
    draw = draft.draw
    reads = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    space = draw(st.sampled_from(["arena", "arena", "device"]))
    match draw(st.sampled_from(["launch", "launch", "launch", "halves", "columns", "copy", "host"])):
        case "copy":
            made = draft.buffer(Role.ACTIVATION, reads[0].size_bytes, space)
            draft.add(Copy(reads[0], made, draft.stream()))
        case "host":
            made = draft.buffer(Role.ACTIVATION, draw(st.integers(1, 300)), space)
            draft.add(Host("NonZero", reads, (made,), draft.stream()))
        case "halves":
            half = draw(st.one_of(st.integers(1, 300), st.just(reads[0].size_bytes), st.sampled_from([64, 128])))
            made = draft.buffer(Role.ACTIVATION, 2 * half, space)
            for offset in draw(st.sampled_from([(0, half), (half, 0)])):
                is_in_place = half == reads[0].size_bytes and reads.count(reads[0]) == 1
                _launch(draft, reads, Region(made.buffer, offset, half), ((0, 0),) if is_in_place else ())
            values.append(Region(made.buffer, draw(st.sampled_from([0, half])), half))
        case "columns":
            rows, left, right = (draw(st.integers(low, high)) for low, high in ((2, 9), (1, 40), (1, 40)))
            made = draft.buffer(Role.ACTIVATION, rows * (left + right), space)
            for begin, width in draw(st.permutations([(0, left), (left, right)])):
                _launch(draft, reads, Region(made.buffer, begin, rows * width, rows, left + right), ())
        case _:
            made = draft.buffer(Role.ACTIVATION, reads[0].size_bytes, space)
            _launch(draft, reads, made, ((0, 0),) if reads.count(reads[0]) == 1 else ())
    return made


def _launch(draft: _Draft, reads: tuple[Region, ...], write: Region, inplace: tuple[tuple[int, int], ...]) -> None:
    scratch: tuple[Region, ...] = ()
    if draft.draw(st.booleans()):
        scratch = (draft.buffer(Role.WORKSPACE, draft.draw(st.integers(1, 300)), "arena"),)
    symbol = f"k{len(draft.kernels)}"
    draft.kernels.append(Kernel(symbol, "elementwise", len(reads) + 1 + len(scratch)))
    draft.add(Launch(symbol, reads, (write,), scratch, inplace, draft.stream(), label=f"group {symbol}"))


def _output(draft: _Draft, value: Region) -> Region:
    made = draft.buffer(Role.OUTPUT, value.size_bytes, "caller")
    draft.add(Copy(value, made, draft.stream()))
    return made


def _count(draft: _Draft, values: list[Region]) -> Region:
    """A step that writes how much of an output there is."""
    made = draft.buffer(Role.OUTPUT, 8, "caller")
    draft.add(Host("Count", (draft.draw(st.sampled_from(values)),), (made,), draft.stream()))
    return made


def simulated_faults(plan: Plan) -> list[str]:
    """What goes wrong when a plan runs: steps that may run in either order and touch the same bytes, and reads of wrong bytes.

    Every byte of every space holds the name of the buffer and the index of the byte that was last written there.
    """
    return [*_races(plan), *_wrong_reads(plan)]


def _races(plan: Plan) -> Iterator[str]:
    order = nx.DiGraph()
    order.add_nodes_from(range(len(plan.steps)))
    last: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        if step.stream in last:
            order.add_edge(last[step.stream], index)
        last[step.stream] = index
        if isinstance(step, Record):
            recorded[step.event] = index
        if isinstance(step, Wait):
            order.add_edge(recorded[step.event], index)
    after = {index: nx.descendants(order, index) for index in order}
    for first, second in combinations(range(len(plan.steps)), 2):
        if second not in after[first]:
            reads, writes = zip(*(_touched(plan, index) for index in (first, second)), strict=True)
            if writes[0] & (reads[1] | writes[1]) or writes[1] & reads[0]:
                yield f"steps {first} and {second} race"


def _touched(plan: Plan, index: int) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Addresses that a step reads, and those that it writes."""

    def addresses(regions: tuple[Region, ...]) -> set[tuple[str, int]]:
        return {place for region in regions for place, _ in _bytes(plan, region)}

    return addresses(step_reads(plan.steps[index])), addresses(step_writes(plan.steps[index]))


def _bytes(plan: Plan, region: Region) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Address and identity of each byte of a region."""
    buffer = next(buffer for buffer in plan.buffers if buffer.name == region.buffer)
    space = buffer.name if buffer.offset is None else f"space {buffer.space}"
    starts = [region.offset + row * region.pitch for row in range(region.rows)]
    for index in (start + byte for start in starts for byte in range(region.size_bytes // region.rows)):
        yield (space, (buffer.offset or 0) + index), (buffer.name, index)


def _wrong_reads(plan: Plan) -> Iterator[str]:
    memory: dict[tuple[str, int], tuple[str, int]] = {}
    for buffer in plan.buffers:
        if buffer.role in (Role.INPUT, Role.CONSTANT) or (buffer.role is Role.STATE and buffer.renews is None):
            memory.update(_bytes(plan, Region(buffer.name, 0, buffer.size_bytes)))
    for number, step in enumerate(plan.steps):
        for region in step_reads(step):
            if any(memory.get(place) != identity for place, identity in _bytes(plan, region)):
                yield f"step {number} reads wrong bytes of {region.buffer}"
        for region in step_writes(step):
            memory.update(_bytes(plan, region))
    for name in (*(port.buffer for port in plan.outputs), *plan.counts):
        size_bytes = next(buffer.size_bytes for buffer in plan.buffers if buffer.name == name)
        if any(memory.get(place) != identity for place, identity in _bytes(plan, Region(name, 0, size_bytes))):
            yield f"output {name} is not written"
    left = {state.buffer: state.buffer for state in plan.states}
    left.update((buffer.renews, buffer.name) for buffer in plan.buffers if buffer.renews is not None)
    for name in left.values():
        size_bytes = next(buffer.size_bytes for buffer in plan.buffers if buffer.name == name)
        if any(memory.get(place) != identity for place, identity in _bytes(plan, Region(name, 0, size_bytes))):
            yield f"state {name} is not left for the next call"
