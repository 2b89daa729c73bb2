"""Memory between two pages that nobody may read or write, so that a kernel which leaves its buffers ends at once."""

from __future__ import annotations

import ctypes
import mmap
from math import ceil

import numpy as np
from prefuse.runtime.plan import ALIGNMENT

_NO_ACCESS = 0  # PROT_NONE
_LIBC = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Aligned bytes of the value `fill`: right behind a page without access, or `at_end` right before one.

    Bytes that alignment or the size of pages leaves between are to stay as they were, which `is_untouched` says.
    """

    def __init__(self, size: int, fill: int, *, at_end: bool) -> None:
        pages = max(ceil(size / mmap.PAGESIZE), 1)
        whole = np.frombuffer(mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE), np.uint8)  # which keeps the mapping
        for page in (0, pages + 1):
            address = ctypes.c_void_p(whole.ctypes.data + page * mmap.PAGESIZE)
            if _LIBC.mprotect(address, mmap.PAGESIZE, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "no page could be guarded")
        self._fill = fill
        self._usable = whole[mmap.PAGESIZE : -mmap.PAGESIZE]
        self._usable[:] = fill
        self._begin = (self._usable.size - size) // ALIGNMENT * ALIGNMENT if at_end else 0
        self.bytes = self._usable[self._begin : self._begin + size]

    @property
    def address(self) -> int:
        return int(self._usable.ctypes.data) + self._begin

    def is_untouched(self) -> bool:
        around = (self._usable[: self._begin], self._usable[self._begin + self.bytes.size :])
        return all(bool((part == self._fill).all()) for part in around)
