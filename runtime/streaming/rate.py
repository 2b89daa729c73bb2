"""How fast weights come from the file system that holds programs, and what that takes of kernels: what copies from a program's
file are planned with."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from .storage import CHUNK_BYTES, reopened

_FILE_BYTES = 128 << 20
_TURNS = 5
_PAIRS = 5  # of turns without reads and beside them
_PAIR_SECONDS = 0.25  # of each turn: hosts ration processors in periods of 0.1 s, so that what one turn takes the next one lacks


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A file that is open for reads past the page cache, and memory in large pages for all of it."""

    number: int
    memory: memoryview

    def read(self, is_over: Callable[[], bool] = lambda: False) -> int:
        """Read the file in pieces, until it is over; how many bytes. Raises OSError."""
        position = 0
        while position < len(self.memory) and not is_over():
            count = os.preadv(self.number, [self.memory[position : position + CHUNK_BYTES]], position)
            if not count:
                raise OSError("the file ends too early")
            position += count
        return position


@contextmanager
def sample_file(folder: Path, size_bytes: int = _FILE_BYTES) -> Iterator[SampleFile | None]:
    """A file in a folder, made for this. None where the file system reads through the page cache, whose speed says little of the
    disk's.

    Raises:
        OSError: no such file can be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for begin in range(0, size_bytes, CHUNK_BYTES):
        view[begin : begin + CHUNK_BYTES] = os.urandom(len(view[begin : begin + CHUNK_BYTES]))  # which no disk can shrink
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(view)
        file.flush()
        os.fsync(file.fileno())
        direct, is_direct = reopened(file.fileno(), is_aligned=True)
        try:
            yield SampleFile(direct, view) if is_direct else None
        finally:
            os.close(direct)


def read_rates(file: SampleFile) -> list[float]:
    """Bytes a nanosecond (GB/s) of reading a file, of several turns. Raises OSError."""
    return [_rate(file) for _ in range(_TURNS)]


def _rate(file: SampleFile) -> float:
    begin = time.perf_counter_ns()
    return file.read() / (time.perf_counter_ns() - begin)


def cores_taken(file: SampleFile, work: Callable[[], object], threads: int) -> list[float]:
    """Cores that reading a file takes from work that has all of them, `threads`: of several turns.

    Reads past the page cache cost the processes of this system little, but those of a host that makes them may run on its cores.
    """
    found = []
    for _ in range(_PAIRS):
        alone = _seconds_of(work)
        with _reading(file):
            beside = _seconds_of(work)
        found.append(threads * (beside / alone - 1))
    return found


def _seconds_of(work: Callable[[], object]) -> float:
    """Of one of many calls in a row."""
    begin, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < _PAIR_SECONDS or not calls:
        work()
        calls += 1
    return spent / calls


@contextmanager
def _reading(file: SampleFile) -> Iterator[None]:
    """Meanwhile a thread reads the file, again and again."""
    is_over, has_begun = Event(), Event()

    def read() -> None:
        with suppress(OSError):  # which whoever measures its rate hears of
            while not is_over.is_set():
                has_begun.set()
                file.read(is_over.is_set)
        has_begun.set()

    thread = Thread(target=read, name="prefuse-reads", daemon=True)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
