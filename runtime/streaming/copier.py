"""The streams of a Plan beside the kernels': threads that wait for events, copy, and record events, once a call."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import ProgramFileError
from ..plan import COMPUTE, STORAGE, Copy, Plan, Record, Role, Wait
from .events import Events, waits_of
from .storage import Storage


@dataclass(frozen=True, slots=True)
class _Wait:
    event: int


@dataclass(frozen=True, slots=True)
class _Post:
    events: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    """Of a constant in the file to a place in the arena."""

    step: int
    stored: int
    offset: int
    size_bytes: int


_Operation: TypeAlias = _Wait | _Post | _Read


@dataclass(frozen=True, slots=True)
class CopyTime:
    """When a copy of a call began and ended, by `time.perf_counter_ns`."""

    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """What the streams beside the kernels' do in each call, and how many events there are."""

    operations: tuple[tuple[_Operation, ...], ...] = ()
    events: int = 0


def copy_streams(plan: Plan) -> CopyStreams:
    """Prepare the streams of a sound Plan.

    Raises:
        ProgramFileError: they do what no thread beside the kernels can.
    """
    waits = waits_of(plan)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    streams: dict[int, list[_Operation]] = {}
    for index, step in enumerate(plan.steps):
        if step.stream == COMPUTE:
            continue
        operations = streams.setdefault(step.stream, [])
        if isinstance(step, Wait):
            operations.append(_Wait(waits.number(index)))
        elif isinstance(step, Record):
            operations.append(_Post(tuple(waits.of_event(step.event))))
        else:
            source, place = (
                (buffers[step.source.buffer], buffers[step.destination.buffer]) if isinstance(step, Copy) else (None, None)
            )
            if source is None or place is None or source.space != STORAGE or place.role is not Role.ACTIVATION:
                what = f"step {index} on stream {step.stream} is no copy from the program's file"
                raise ProgramFileError("plan", what, "compile the model again")
            assert isinstance(step, Copy)
            stored, offset = (source.offset or 0) + step.source.offset, (place.offset or 0) + step.destination.offset
            operations.append(_Read(index, stored, offset, step.source.size_bytes))
    return CopyStreams(tuple(map(tuple, streams.values())), len(waits.by_step))


class Copier:
    """The copies of one context: fills its arena beside each of its calls."""

    def __init__(self, streams: CopyStreams, storage: Storage, arena: memoryview) -> None:
        self._streams = streams
        self._storage = storage
        self._arena = arena
        self.events = Events(streams.events)
        self._calls: list[_Call] = []  # one, but after a call that was interrupted while it waited for its threads

    def run(self, compute: Callable[[], None]) -> Sequence[CopyTime]:
        """Call the kernels' stream with the others beside it.

        Raises:
            ProgramFileError: a copy failed. The kernels ran to their end on zeros, and what they wrote means nothing.
        """
        self._finish()
        call = _Call(self._storage, self._arena, self.events)
        self._calls.append(call)
        try:
            call.start(self._streams)
            compute()
        except BaseException:
            call.stop(self._streams)
            raise
        finally:
            self._finish()
        if call.failure is not None:
            raise call.failure
        self._storage.check_unchanged()
        return sorted(call.times, key=lambda one: one.begin_ns)

    def _finish(self) -> None:
        """Wait for the threads of the last call, and forget it."""
        for call in self._calls:
            for thread in call.threads:
                thread.join()
            if call.is_stopped:  # events that nobody waited for are still posted
                self.events.reset()
        self._calls.clear()


@dataclass(slots=True)
class _Call:
    """The threads of one call, when they copied what, and why they could not."""

    storage: Storage
    arena: memoryview
    events: Events
    threads: list[threading.Thread] = field(default_factory=list)
    times: list[CopyTime] = field(default_factory=list)
    failure: Exception | None = None
    is_stopped: bool = False

    def start(self, streams: CopyStreams) -> None:
        for operations in streams.operations:
            thread = threading.Thread(target=self._run, args=(operations,), name="prefuse-copies", daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self, streams: CopyStreams) -> None:
        """Let the threads end although the kernels do not run."""
        self.is_stopped = True
        for operations in streams.operations:
            for operation in operations:
                if isinstance(operation, _Wait):
                    self.events.post(operation.event)

    def _run(self, operations: Sequence[_Operation]) -> None:
        for operation in operations:
            if isinstance(operation, _Wait):
                self.events.wait(operation.event)
            elif isinstance(operation, _Post):
                for event in operation.events:
                    self.events.post(event)
            elif not self.is_stopped:
                self._read(operation)

    def _read(self, operation: _Read) -> None:
        memory = self.arena[operation.offset : operation.offset + operation.size_bytes]
        begin = time.perf_counter_ns()
        if self.failure is None:
            try:
                self.storage.read(operation.stored, memory)
            except Exception as error:
                self.failure = error
        if self.failure is not None:  # kernels read on: let them find no index that points anywhere else
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, len(memory))
        self.times.append(CopyTime(operation.step, begin, time.perf_counter_ns()))
