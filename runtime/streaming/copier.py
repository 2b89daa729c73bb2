"""Streams beside the kernels': threads that wait for events, copy, and record events, once a call."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from .events import Events
from .scratch import Scratch
from .storage import Storage


@dataclass(frozen=True, slots=True)
class Await:
    """Go on when an event has been posted."""

    event: int


@dataclass(frozen=True, slots=True)
class Post:
    """Let those that await events go on."""

    events: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read the constant at `stored` of the file into the arena at `offset`; `step` is the number of the copy for people."""

    step: int
    stored: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Write the bytes at `offset` of the arena to the context's scratch file at `stored`; `step` as of Fetch."""

    step: int
    stored: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Return:
    """Read what has been written at `stored` of the scratch file into the arena at `offset`; `step` as of Fetch."""

    step: int
    stored: int
    offset: int
    size_bytes: int


Move: TypeAlias = Fetch | Leave | Return
Operation: TypeAlias = Await | Post | Move


@dataclass(frozen=True, slots=True)
class CopyTime:
    """When a copy of a call began and ended, by `time.perf_counter_ns`."""

    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """What the streams beside the kernels' do in each call, how many events there are, and what of a call is for the next one.

    A call finds in its slots what the one before it has copied `for_next`.
    """

    operations: tuple[tuple[Operation, ...], ...] = ()
    events: int = 0
    for_next: tuple[Fetch, ...] = ()


class ThreadError(Exception):
    """The system gives no thread for copies."""


class Copier:
    """The copies of one context: fills its arena beside each of its calls.

    `storage` is where weights come from, None where there are none; `scratch` where activations are that leave the arena.
    """

    def __init__(self, streams: CopyStreams, storage: Storage | None, arena: memoryview, scratch: Scratch | None = None) -> None:
        self._streams = streams
        self._storage = storage
        self._scratch = scratch
        self._arena = arena
        self.events = Events(streams.events)
        self._is_primed = False  # whether the slots hold what the last call has copied for this one
        self._calls: list[_Call] = []  # one, but after a call that was interrupted while it waited for its threads

    def run(self, compute: Callable[[], object]) -> Sequence[CopyTime]:
        """Call the kernels' stream with the others beside it.

        Raises:
            StorageError: a copy failed. The kernels ran to their end on zeros, and what they wrote means nothing. What this call
                finds in slots, and cannot be trusted after one that failed, is read anew.
            ThreadError: there is no thread for the copies, and nothing ran.
            ScratchError: the same, of a copy from or to the scratch file; or there is no room for it, and nothing ran.
        """
        self._finish()
        if self._scratch is not None:
            self._scratch.provide()
        self._prime()
        call = _Call(self.move, self._arena, self.events)
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
        if self._storage is not None:
            self._storage.check_unchanged()
        self._is_primed = True
        return sorted(call.times, key=lambda one: one.begin_ns)

    def move(self, move: Move) -> None:
        """Make one copy. Raises StorageError."""
        memory = self._arena[move.offset : move.offset + move.size_bytes]
        match move:
            case Fetch():
                assert self._storage is not None
                self._storage.read(move.stored, memory)
            case Leave():
                assert self._scratch is not None
                self._scratch.write(move.stored, memory)
            case Return():
                assert self._scratch is not None
                self._scratch.read(move.stored, memory)

    def _prime(self) -> None:
        """Fill the slots, unless the last call has; until this one is over nothing is known of them."""
        if not self._is_primed:
            for fetch in self._streams.for_next:
                self.move(fetch)
        self._is_primed = False

    def _finish(self) -> None:
        """Wait for the threads of the last call, and forget it."""
        for call in self._calls:
            for thread in call.threads:
                thread.join()
            if call.is_stopped or call.failure is not None:  # events that nobody waited for may still be posted
                self.events.reset()
        self._calls.clear()


@dataclass(slots=True)
class _Call:
    """The threads of one call, when they copied what, and why they could not."""

    move: Callable[[Move], None]
    arena: memoryview
    events: Events
    threads: list[threading.Thread] = field(default_factory=list)
    times: list[CopyTime] = field(default_factory=list)
    failure: BaseException | None = None
    is_stopped: bool = False

    def start(self, streams: CopyStreams) -> None:
        for operations in streams.operations:
            thread = threading.Thread(target=self._run, args=(operations,), name="prefuse-copies", daemon=True)
            try:
                thread.start()  # in which Ctrl-C may be raised, when it runs already or before
            except RuntimeError as error:
                raise ThreadError(str(error)) from error
            self.threads.append(thread)

    def stop(self, streams: CopyStreams) -> None:
        """Let the threads end although the kernels do not run."""
        self.is_stopped = True
        for operations in streams.operations:
            for operation in operations:
                if isinstance(operation, Await):
                    self.events.post(operation.event)

    def _run(self, operations: Sequence[Operation]) -> None:
        self.threads.append(threading.current_thread())
        if self.is_stopped:  # looked at behind the line above: whoever stops a call waits for a thread, or it does nothing
            return
        done = 0
        try:
            for done in range(len(operations)):
                self._do(operations[done])
        except BaseException as error:  # of any kind: the kernels wait for what comes next
            self.failure = self.failure or error
            self._abandon(operations[done:])

    def _do(self, operation: Operation) -> None:
        if isinstance(operation, Await):
            self.events.wait(operation.event)
        elif isinstance(operation, Post):
            for event in operation.events:
                self.events.post(event)
        elif not self.is_stopped:
            self._carry_out(operation)

    def _abandon(self, operations: Sequence[Operation]) -> None:
        """Let the kernels run to their end without copies."""
        for operation in operations:
            if isinstance(operation, Post):
                self._do(operation)
            elif not isinstance(operation, Await | Leave):
                with suppress(Exception):
                    self._clear(operation)

    def _carry_out(self, operation: Move) -> None:
        begin = time.perf_counter_ns()
        if self.failure is None:
            try:
                self.move(operation)
            except BaseException as error:
                self.failure = error
        if self.failure is not None and not isinstance(operation, Leave):
            self._clear(operation)
        self.times.append(CopyTime(operation.step, begin, time.perf_counter_ns()))

    def _clear(self, move: Move) -> None:
        """Zeros where a copy was to come. Kernels read on: let them find no index that points anywhere else."""
        memory = self.arena[move.offset : move.offset + move.size_bytes]
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, len(memory))
