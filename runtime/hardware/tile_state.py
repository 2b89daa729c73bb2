"""The permission to use AMX tile registers, which Linux grants to a process that asks for it.

The 8 KiB of a thread's tiles are saved with its other registers only for processes that asked; without permission, the first
instruction on a tile is an illegal one. It is granted to all threads at once, those that run already among them.
See "Using XSTATE features in user space applications" in the Linux kernel's documentation.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from functools import cache

_ARCH_PRCTL = 158  # the number of the system call on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18


@cache
def refusal() -> str:
    """Ask the system for tile registers, once a process; why it does not grant them, "" if it does."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"{platform.system()} on {platform.machine()} has no such permission"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA)) == 0:
        return ""
    reason = ctypes.get_errno()
    if reason == errno.ENOSPC:  # of a handler that runs while tiles hold something, 8 KiB more than without them
        return "a thread's alternate signal stack is too small for tile registers: ask before it is set up, or make it larger"
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): {os.strerror(reason)}"
