"""What of a program lies where and when, and what runs beside what: for `prefuse memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from ...runtime.plan import ARENA_ROLES, COMPUTE, SCRATCH, STORAGE, Copy, Launch, Plan, Role, step_reads, step_writes
from ...runtime.profile import Profile
from ...runtime.report import size
from .prediction import Prediction

Kind: TypeAlias = Literal["activation", "workspace", "weight"]
KINDS: tuple[Kind, ...] = ("activation", "workspace", "weight")  # a weight that is in the arena while it is read


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A buffer in the arena: bytes [offset, offset + size_bytes), from its first step to its last, in microseconds and steps."""

    name: str
    kind: Kind
    offset: int
    size_bytes: int
    begin_us: float
    end_us: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that a stream does: a kernel, a copy, or nothing, as it waits for the other."""

    label: str
    kind: Literal["kernel", "copy", "stall"]
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class MemoryView:
    """A placed Plan with the times that are predicted of it, and with those of a call if it was measured."""

    plan: Plan
    prediction: Prediction
    limit_bytes: int | None = None
    profile: Profile | None = None

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """The buffers of a context, in the order of their first steps."""
        spans: dict[str, tuple[int, int]] = {}
        copied: set[str] = set()
        buffers = {buffer.name: buffer for buffer in self.plan.buffers}
        for index, step in enumerate(self.plan.steps):
            for region in step_reads(step) + step_writes(step):
                spans[region.buffer] = spans.get(region.buffer, (index, index))[0], index
            if isinstance(step, Copy) and buffers[step.source.buffer].space == STORAGE:
                copied.add(step.destination.buffer)
        for buffer in (
            buffers[name] for name in spans if buffers[name].role is Role.SLOT
        ):  # from the call before, or to the next
            first, last = spans[buffer.name]
            spans[buffer.name] = (0, last) if buffer.renews is None else (first, len(self.plan.steps) - 1)
            copied.add(buffer.name)
        found, steps = [], self.prediction.steps
        for name, (first, last) in spans.items():
            buffer = buffers[name]
            if buffer.role in ARENA_ROLES and buffer.offset is not None and buffer.space != SCRATCH:
                kind: Kind = "weight" if name in copied else "workspace" if buffer.role is Role.WORKSPACE else "activation"
                begin, end = steps[first].begin_us, steps[last].begin_us + steps[last].time_us
                found.append(Rectangle(name, kind, buffer.offset, buffer.size_bytes, begin, end, first, last))
        return tuple(sorted(found, key=lambda one: one.first))

    @property
    def arena_bytes(self) -> int:
        return self.prediction.memory.arena_bytes

    @cached_property
    def bound_bytes(self) -> int:
        """The most bytes that live at one step, in the order of the steps: no packing is smaller on one stream."""
        return int(self._live.max(initial=0))

    @cached_property
    def _live(self) -> np.ndarray:
        """The bytes that live at each step."""
        live = np.zeros(len(self.plan.steps) + 1, np.int64)
        for one in self.rectangles:
            live[one.first] += one.size_bytes
            live[one.last + 1] -= one.size_bytes
        return np.cumsum(live)

    @cached_property
    def peak(self) -> tuple[int, tuple[Rectangle, ...]]:
        """The step at which most bytes live, and what lives there, the largest first."""
        step = int(self._live.argmax())
        there = (one for one in self.rectangles if one.first <= step <= one.last)
        return step, tuple(sorted(there, key=lambda one: -one.size_bytes))

    @cached_property
    def predicted(self) -> tuple[Bar, ...]:
        """What both streams do, as predicted."""
        found = []
        for one in self.prediction.steps:
            if one.stall_us > 0:
                found.append(Bar(f"before {one.label}", "stall", one.begin_us - one.stall_us, one.begin_us))
            if one.time_us > 0:
                kind: Literal["kernel", "copy"] = "kernel" if one.stream == COMPUTE else "copy"
                found.append(Bar(one.label, kind, one.begin_us, one.begin_us + one.time_us))
        return tuple(bar for bar in found if bar.kind != "stall" or bar.end_us > bar.begin_us)

    @cached_property
    def measured(self) -> tuple[Bar, ...]:
        """What both streams did in the call of median length; nothing if none was measured."""
        if self.profile is None:
            return ()
        stamps, copies = self.profile.stamps_ns, self.profile.copies
        lengths = stamps[:, -1] - stamps[:, 0]
        call = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
        begin = int(stamps[call, 0])
        found = []
        for index, step in enumerate(self.plan.steps):
            start, end = ((int(stamps[call, index + place]) - begin) / 1e3 for place in (0, 1))
            if step.stream == COMPUTE and isinstance(step, (Launch, Copy)):
                found.append(Bar(step.label if isinstance(step, Launch) else "copy", "kernel", start, end))
            elif step.stream == COMPUTE:
                found.append(Bar(f"step {index}", "stall", start, end))
        for copy in copies[call] if copies else ():
            step = self.plan.steps[copy.step]
            label = step.destination.buffer if isinstance(step, Copy) else ""
            found.append(Bar(label, "copy", (copy.begin_ns - begin) / 1e3, (copy.end_ns - begin) / 1e3))
        return tuple(found)

    def sentences(self) -> list[str]:
        """What is to be said of it."""
        memory, found = self.prediction.memory, self.prediction
        text = f"{size(memory.weights_bytes)} of weights stay in memory, each context takes {size(self.arena_bytes)} more; "
        text += f"no order of bytes in the arena takes less than {size(self.bound_bytes)}"
        lines = [text]
        if self.limit_bytes is not None:
            lines.append(f"together {size(memory.total_bytes)} of the {size(self.limit_bytes)} that are allowed")
        if memory.stored_bytes:
            stored = {buffer.name for buffer in self.plan.buffers if buffer.space == STORAGE}
            copies = (step.source for step in self.plan.steps if isinstance(step, Copy))
            copied = sum(source.size_bytes for source in copies if source.buffer in stored)
            lines.append(f"{size(memory.stored_bytes)} of weights stay in the file; a call copies {size(copied)} of them")
        if away := self._away_bytes():
            lines.append(f"a call writes {size(away)} of activations to a scratch file and reads them back later")
        text = f"{found.latency_us / 1e3:.3f} ms are predicted: {found.compute_us / 1e3:.3f} ms of kernels"
        if found.copies_us:
            stalls = sum(step.stall_us for step in found.steps if step.stream == COMPUTE) + found.tail_us
            text += f", {stalls / 1e3:.3f} ms of waiting for copies, which take {found.copies_us / 1e3:.3f} ms"
        lines.append(text)
        if self.profile is not None:
            waits = _seconds(self.measured, "stall")
            lines.append(f"{self.profile.time_us / 1e3:.3f} ms are measured, {waits / 1e3:.3f} ms of them waiting")
        if self.prediction.steps:
            step, there = self.peak
            lines.append(f"most lives at {self.prediction.steps[step].label}: {size(sum(one.size_bytes for one in there))}")
        return lines

    def _away_bytes(self) -> int:
        """What a call writes to its scratch file."""
        outside = {buffer.name for buffer in self.plan.buffers if buffer.space == SCRATCH}
        return sum(region.size_bytes for step in self.plan.steps for region in step_writes(step) if region.buffer in outside)


def _seconds(bars: Sequence[Bar], kind: str) -> float:
    return sum(bar.end_us - bar.begin_us for bar in bars if bar.kind == kind)
