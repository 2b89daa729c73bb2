"""Weights that stay in a program's file: read into memory when they are due, past the page cache where the system allows it.

The file is open as long as this object, so that it may be renamed or deleted. What is read for the first time is checked against
the checksum in the manifest; and so is what is read, or has been, when the file's size or times have changed.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ..files.checksum import Checksum

PAGE = 4096  # bytes; what reading past the page cache (O_DIRECT) asks of addresses, offsets and sizes

_COPY_AGAIN = "copy the file again, or compile the model again"
CHUNK_BYTES = 4 << 20  # of one read: larger ones are no faster, smaller ones disturb the threads that compute
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class StorageError(Exception):
    """A file that cannot be read, or does not hold what it should: which one, what is wrong, and what to do."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(f"{where}: {what}; {fix}")
        self.where, self.what, self.fix = where, what, fix


@dataclass(frozen=True, slots=True)
class Stored:
    """One constant in the member: its name, where it lies from its beginning, its bytes in whole pages, and their checksum."""

    name: str
    offset: int
    size_bytes: int
    checksum: str


class Storage:
    """The member of a program's file with the constants that are copied from it. Any number of threads may read."""

    def __init__(self, file: int, name: str, start: int, size_bytes: int, constants: Mapping[int, Stored]) -> None:
        """Bytes [start, start + size_bytes) of an open file that people call `name`; `constants` by their offsets in them.

        Raises:
            OSError: the file cannot be opened once more.
        """
        self.constants = constants
        self.size_bytes = size_bytes
        self.start = start
        self._name = name
        self._file, self.is_direct = reopened(file, is_aligned=start % PAGE == 0)
        weakref.finalize(self, os.close, self._file).atexit = False  # a thread may still be in a call
        self._verified: dict[int, tuple[int, int]] = {}  # the file's status before what was found right was read, by offsets
        self._state = self._status()
        self._lock = threading.Lock()

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill `memory`, whose address and size are multiples of `PAGE`, with the constant at `offset`.

        Raises:
            StorageError: the file cannot be read there, ends before, or holds something else.
        """
        stored, status = self.constants[offset], self._status()
        for begin in range(0, len(memory), CHUNK_BYTES):
            self._fill(offset + begin, memory[begin : begin + CHUNK_BYTES])
        if self._verified.get(offset) != status:
            checksum = Checksum()
            checksum.update(memory)
            self._compare(stored, checksum)
            self._verified[offset] = status

    def check_unchanged(self) -> None:
        """Raise StorageError if the file no longer holds what it did; what merely has new times is read once and compared."""
        if self._status() == self._state:
            return
        with self._lock:
            if (status := self._status()) == self._state:
                return
            for _ in self.pieces():
                pass
            self._verified = dict.fromkeys(self.constants, status)
            self._state = status

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the member, read anew, a chunk at a time. What is given is overwritten by the next one.

        Raises:
            StorageError: as `read`; of a constant that is another one behind its last piece.
        """
        memory = memoryview(mmap.mmap(-1, CHUNK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # a memory limit allows no more
        for offset in sorted(self.constants):
            stored, checksum = self.constants[offset], Checksum()
            for begin in range(0, stored.size_bytes, CHUNK_BYTES):
                piece = memory[: stored.size_bytes - begin]
                self._fill(offset + begin, piece)
                checksum.update(piece)
                yield piece
            self._compare(stored, checksum)

    def _fill(self, offset: int, memory: memoryview) -> None:
        position = self.start + offset
        filled = 0
        while filled < len(memory):
            try:
                count = os.preadv(self._file, [memory[filled:]], position + filled)
            except OSError as error:
                fix = "check the disk and its connection, or copy the file to another one"
                raise StorageError(self._name, f"weights cannot be read: {error.strerror or error}", fix) from error
            count -= count % PAGE if self.is_direct else 0  # from within a page nothing could go on
            if count == 0:
                raise StorageError(self._name, "it ends before its weights do: it has been cut short", _COPY_AGAIN)
            filled += count
        if not self.is_direct:
            with suppress(OSError, AttributeError):  # else the page cache would hold what the limit is to leave free
                os.posix_fadvise(self._file, position, len(memory), os.POSIX_FADV_DONTNEED)

    def _compare(self, stored: Stored, checksum: Checksum) -> None:
        if checksum.hexdigest() != stored.checksum:
            what = f"the weights {stored.name} are not those that were written: the file has been changed or damaged"
            raise StorageError(self._name, what, _COPY_AGAIN)

    def _status(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns


def reopened(file: int, *, is_aligned: bool) -> tuple[int, bool]:
    """The file once more, and whether reads of it go past the page cache: not from memory file systems, and some others."""
    if is_aligned and _O_DIRECT:
        with suppress(OSError):
            direct = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)  # a name may be gone by now
            if _reads(direct):
                return direct, True
            os.close(direct)
    return os.dup(file), False


def _reads(direct: int) -> bool:
    """Whether a page can be read: some file systems refuse only then."""
    try:
        os.preadv(direct, [mmap.mmap(-1, PAGE)], 0)
    except OSError:
        return False
    return True


def checksum_of(piece: memoryview | bytes) -> str:
    """The checksum of a constant as it lies in the file, in whole pages."""
    checksum = Checksum()
    checksum.update(piece)
    return checksum.hexdigest()


def whole_pages(array: np.ndarray) -> np.ndarray:
    """The bytes of a constant, filled up with zeros to whole pages."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return raw if raw.size % PAGE == 0 else np.pad(raw, (0, -raw.size % PAGE))


def in_memory(file: int, start: int, size_bytes: int) -> np.ndarray:
    """Bytes of a file in memory of their own, in large pages, read-only: nothing that happens to the file reaches them.

    Raises:
        OSError: they cannot be read.
        EOFError: the file ends before.
    """
    memory = large_pages(size_bytes)
    read_into(memory, file, start)
    found = np.frombuffer(memory, np.uint8)
    found.flags.writeable = False
    return found


def large_pages(size_bytes: int) -> memoryview:
    """Memory of zeros, in large pages where the system has them. Raises OSError."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def read_into(memory: memoryview, file: int, start: int) -> None:
    """Fill memory with the bytes of a file from `start` on, which are then no longer in the page cache.

    Raises:
        OSError: they cannot be read.
        EOFError: the file ends before.
    """
    position = 0
    while position < len(memory):
        count = os.preadv(file, [memory[position : position + CHUNK_BYTES]], start + position)
        if not count:
            raise EOFError("it ends before its weights do")
        position += count
    with suppress(OSError, AttributeError):
        os.posix_fadvise(file, start, len(memory), os.POSIX_FADV_DONTNEED)
