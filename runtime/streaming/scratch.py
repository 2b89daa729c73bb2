"""Where activations are while they are not in memory: a temporary file of each context, past the page cache where that goes.

The file has no name, so that it is gone with the context however the process ends, and belongs to one process: after a fork the
child makes its own.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .storage import CHUNK_BYTES, PAGE, StorageError

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_FIX = "free space there, set TMPDIR to a folder on another disk, or raise the memory limit"


class ScratchError(StorageError):
    """A scratch file that cannot be made, written or read."""


class Scratch:
    """A file of `size_bytes`, made when it is first used, in the first of `folders` that takes one. One thread at a time."""

    def __init__(self, folders: Sequence[Path], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._folders = folders
        self._file: _File | None = None

    def provide(self) -> None:
        """Have the file, with room for all of its bytes. Raises ScratchError."""
        self._own()

    def write(self, offset: int, memory: memoryview) -> None:
        """Write memory, whose address and size are multiples of `PAGE`, as `offset` is. Raises ScratchError."""
        file = self._own()
        file.transfer(lambda piece, position: os.pwritev(file.number, [piece], position), offset, memory, "written")

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill memory with what has been written at `offset`. Raises ScratchError."""
        file = self._own()
        file.transfer(lambda piece, position: os.preadv(file.number, [piece], position), offset, memory, "read back")

    def _own(self) -> _File:
        """The file of this process."""
        if self._file is None or self._file.process != os.getpid():
            self._file = _made(self._folders, self.size_bytes)
        return self._file


class _File:
    """An open file without a name, which is closed with the last reference to this."""

    def __init__(self, number: int, folder: Path, *, is_direct: bool) -> None:
        self.number = number
        self.process = os.getpid()
        self._folder, self._is_direct = folder, is_direct
        weakref.finalize(self, os.close, number).atexit = False  # a thread may still be in a call

    def transfer(self, move: Callable[[memoryview, int], int], offset: int, memory: memoryview, what: str) -> None:
        """Move all bytes of memory, a piece at a time."""
        done = 0
        while done < len(memory):
            try:
                count = move(memory[done : done + CHUNK_BYTES], offset + done)
            except OSError as error:
                raise _unusable(self._folder, f"activations cannot be {what}", error) from error
            count -= count % PAGE if self._is_direct else 0  # from within a page nothing could go on
            if count == 0:
                raise _unusable(self._folder, f"activations cannot be {what}", OSError(0, "the file ends too early"))
            done += count
        if not self._is_direct:
            self._leave_cache(offset, len(memory), what)

    def _leave_cache(self, offset: int, size_bytes: int, what: str) -> None:
        """Give pages of the page cache back, which would hold what the limit is to leave free."""
        try:
            os.fdatasync(self.number)  # what is not on the disk yet, it would keep; and if it cannot be written, it is lost
        except OSError as error:
            raise _unusable(self._folder, f"activations cannot be {what}", error) from error
        with suppress(OSError, AttributeError):
            os.posix_fadvise(self.number, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def _made(folders: Sequence[Path], size_bytes: int) -> _File:
    """A file with all of its bytes, so that a full disk is found before anything runs. Raises ScratchError."""
    failure = ScratchError("scratch", "there is no folder for activations that leave memory", _FIX)
    for folder in folders:
        try:
            return _opened(folder, size_bytes)
        except OSError as error:
            failure = _unusable(folder, f"no file of {size_bytes} bytes for activations that leave memory", error)
    raise failure


def _opened(folder: Path, size_bytes: int) -> _File:
    """Raises OSError."""
    direct = _direct(folder)
    if direct is not None:
        try:
            os.posix_fallocate(direct.number, 0, max(size_bytes, 1))
        except OSError as error:
            if error.errno != errno.EINVAL:  # of the C library's writes of single bytes, where the file system cannot do it
                raise
        else:
            return direct
    with tempfile.TemporaryFile(dir=folder) as made:
        file = _File(os.dup(made.fileno()), folder, is_direct=False)
    os.posix_fallocate(file.number, 0, max(size_bytes, 1))
    return file


def _direct(folder: Path) -> _File | None:
    """A file past the page cache; None of file systems that know no files without names, or that always cache."""
    flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
    if _O_DIRECT and flags & getattr(os, "O_TMPFILE", 0):
        with suppress(OSError):
            file = _File(os.open(folder, flags | _O_DIRECT, 0o600), folder, is_direct=True)
            os.pwritev(file.number, [mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)], 0)  # some refuse only this
            return file
    return None


def _unusable(folder: Path, what: str, error: OSError) -> ScratchError:
    return ScratchError(str(folder), f"{what}: {error.strerror or error}", _FIX)
