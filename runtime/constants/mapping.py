"""Files mapped into memory without a file number of their own: Python's `mmap` keeps one open as long as the mapping."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

import numpy as np

_MADV_WILLNEED, _MADV_POPULATE_READ = 3, 22  # of linux/mman.h; Python names not all of them
_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    library.mmap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    library.madvise.argtypes = (pointer, size, number)
    return library


def map_file(file: int, size_bytes: int) -> np.ndarray:
    """The first bytes of an open file, read-only, from an address that is a multiple of the page size on.

    The file may be closed, renamed or deleted afterwards; it must not become shorter.

    Raises:
        OSError: it cannot be mapped.
    """
    if not size_bytes:
        return np.empty(0, np.uint8)
    address = _libc().mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _libc().madvise(address, size_bytes, _MADV_WILLNEED)  # a hint: the first call needs all of it
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, size_bytes).atexit = False  # a thread may still be in a call
    found = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    found.flags.writeable = False
    return found


def page_in(array: np.ndarray) -> None:
    """Have mapped bytes in memory, and known to this process, so that the first call waits for none of them.

    Linux can since 5.14; elsewhere the first call is slower.
    """
    if array.nbytes:
        behind = array.ctypes.data % mmap.PAGESIZE
        _libc().madvise(array.ctypes.data - behind, array.nbytes + behind, _MADV_POPULATE_READ)
