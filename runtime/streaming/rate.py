"""How fast weights come from the file system that holds programs: what copies from a program's file are planned with."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from .storage import CHUNK_BYTES, reopened

_FILE_BYTES = 128 << 20
_TURNS = 5


def read_rates(folder: Path, size_bytes: int = _FILE_BYTES) -> list[float]:
    """Bytes a nanosecond (GB/s) of reading a file in a folder, made for this, past the page cache: of several turns.

    Nothing where the file system reads through the cache, whose speed says little of the disk's.

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
            return [_rate(direct, view) for _ in range(_TURNS)] if is_direct else []
        finally:
            os.close(direct)


def _rate(file: int, memory: memoryview) -> float:
    begin, position = time.perf_counter_ns(), 0
    while position < len(memory):
        count = os.preadv(file, [memory[position : position + CHUNK_BYTES]], position)
        if not count:
            raise OSError("the file ends too early")
        position += count
    return position / (time.perf_counter_ns() - begin)
