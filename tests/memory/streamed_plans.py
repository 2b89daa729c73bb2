"""Random Plans that schedule-prefetch has given a limit, without models or kernels, from a seed and a number."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.passes.plan.schedule_prefetch import SchedulePrefetch
from prefuse.runtime.errors import CompileError
from prefuse.runtime.hardware.memory_limit import MemoryLimit
from prefuse.runtime.plan import (
    Buffer,
    Copy,
    Kernel,
    Launch,
    Plan,
    Port,
    Region,
    Role,
    Space,
    State,
    Step,
    TensorType,
    planned_bytes,
)
from prefuse.runtime.target import Target

_UNIT = 64  # bytes: all sizes are multiples of it
_TARGET = Target.parse("cpu:avx2", threads=1)


def streamed_plan(seed: int, number: int) -> Plan | None:
    """A Plan within a limit, with copies on a second stream; None where no limit that was tried would do."""
    rng = np.random.default_rng([seed, number])
    draft = _Draft(rng)
    context = Context(_TARGET, step_us={f"step {index}": float(rng.exponential(3)) for index in range(100)})
    plan = PlanMemory(effort="quick", inplace=bool(rng.random() < 0.8)).run(draft.plan(), context)
    least = SchedulePrefetch(on_demand=bool(rng.random() < 0.15), min_bytes=1, repeats=bool(rng.random() < 0.7))
    for share in np.sort(rng.uniform(0.2, 0.97, 6)):
        context.memory_limit, context.limit_bytes = MemoryLimit(size_bytes=max(int(share * planned_bytes(plan)), 1)), None
        try:
            found = least.run(plan, context)
        except CompileError:
            continue
        if any(isinstance(step, Copy) and step.stream for step in found.steps):
            return found
    return None


@dataclass
class _Draft:
    """A Plan on one stream under construction: launches that read weights, activations of any age and states."""

    rng: np.random.Generator
    buffers: dict[str, Buffer] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def plan(self) -> Plan:
        rng = self.rng
        size = _UNIT * int(rng.choice([1, 60, 128, 700]))
        x = self._buffer("x", Role.INPUT, size, "caller")
        weights = [self._buffer(f"w{n}", Role.CONSTANT, self._size(), "constants") for n in range(int(rng.integers(2, 12)))]
        found = [self._buffer(f"s{n}", Role.STATE, self._size(), "state") for n in range(int(rng.integers(0, 3)))]
        self.states = [State(one.buffer, TensorType((one.size_bytes,), "uint8"), one.buffer) for one in found]
        values, kept = [x], list(found)
        for number in range(int(rng.integers(2, 14))):
            reads = [values[-1 - int(rng.integers(min(len(values), 3)))]]
            reads += [weights[int(rng.integers(len(weights)))]] if rng.random() < 0.7 else []
            reads += [kept[int(rng.integers(len(kept)))]] if kept and rng.random() < 0.3 else []
            reads += [values[int(rng.integers(len(values)))]] if rng.random() < 0.3 else []
            values.append(self._value(number, list(dict.fromkeys(reads)), size))
        for old in found:
            if rng.random() < 0.7:
                self._renew(old, values[-1])
        y = self._buffer("y", Role.OUTPUT, values[-1].size_bytes, "caller")
        self.steps.append(Copy(values[-1], y))
        ports = [Port(one.buffer, TensorType((one.size_bytes,), "uint8"), one.buffer) for one in (x, y)]
        spaces = (Space("caller"), Space("constants"), Space("arena"), Space("state"))
        buffers = tuple(self.buffers.values())
        steps, kernels, states = tuple(self.steps), tuple(self.kernels), tuple(self.states)
        return Plan(str(_TARGET), (ports[0],), (ports[1],), spaces, buffers, kernels, steps, states=states)

    def _size(self) -> int:
        return _UNIT * int(self.rng.choice([1, 60, 64, 65, 128, 200, 640, 1300]))

    def _buffer(self, name: str, role: Role, size_bytes: int, space: str) -> Region:
        self.buffers[name] = Buffer(name, role, size_bytes, space)
        return Region(name, 0, size_bytes)

    def _value(self, number: int, reads: list[Region], size: int) -> Region:
        """What a launch makes, or two of them, each a half of it."""
        size = size if self.rng.random() < 0.7 else self._size()
        if self.rng.random() < 0.2:
            made = self._buffer(f"a{number}", Role.ACTIVATION, 2 * size, "arena")
            for offset in self.rng.permutation([0, size]):
                self._launch(reads, Region(made.buffer, int(offset), size))
            return made if self.rng.random() < 0.5 else Region(made.buffer, int(self.rng.choice([0, size])), size)
        if self.rng.random() < 0.15:  # by columns of some rows
            rows, left, right = int(self.rng.integers(2, 7)), *(_UNIT * int(one) for one in self.rng.integers(1, 40, 2))
            made = self._buffer(f"a{number}", Role.ACTIVATION, rows * (left + right), "arena")
            for begin, width in self.rng.permutation([(0, left), (left, right)]):
                self._launch(reads, Region(made.buffer, int(begin), rows * int(width), rows, left + right))
            return made
        made = self._buffer(f"a{number}", Role.ACTIVATION, size, "arena")
        self._launch(reads, made)
        return made

    def _launch(self, reads: list[Region], write: Region) -> None:
        number = len(self.kernels)
        scratch = [self._buffer(f"t{number}", Role.WORKSPACE, self._size(), "arena")] if self.rng.random() < 0.3 else []
        may_be_in_place = reads[0].size_bytes == write.size_bytes and write.rows == 1
        inplace = ((0, 0),) if may_be_in_place and self.rng.random() < 0.6 else ()
        self.kernels.append(Kernel(f"k{number}", "elementwise", len(reads) + 1 + len(scratch)))
        self.steps.append(Launch(f"k{number}", tuple(reads), (write,), tuple(scratch), inplace, 0, f"step {len(self.steps)}"))

    def _renew(self, old: Region, value: Region) -> None:
        """A new value for a state; its readers have all been, and the launch may read the old one in place."""
        made = Region(f"new {old.buffer}", 0, old.size_bytes)
        self.buffers[made.buffer] = Buffer(made.buffer, Role.STATE, old.size_bytes, "state", renews=old.buffer)
        reads, inplace = ((old, value), ((0, 0),)) if self.rng.random() < 0.5 else ((value,), ())
        self.kernels.append(Kernel(f"k{len(self.kernels)}", "elementwise", len(reads) + 1))
        self.steps.append(Launch(self.kernels[-1].symbol, reads, (made,), (), inplace, 0, f"step {len(self.steps)}"))
