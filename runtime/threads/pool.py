"""A pool of worker threads for each thread that calls programs, and for each number of threads that these were compiled for.

A parallel region of a kernel is as many tasks as there are threads. Each thread runs its own, which finds in its caches what that
of the region before has left there, and then what tasks of others nobody has begun; the calling thread then waits for those that
others have begun. So a worker that is late, for its core is busy with another process, delays nothing: what it would have
computed, others do (`kernels/codegen/work_stealing.py`). Workers look for a new region for about a millisecond after the last,
then sleep in the kernel (futex). Their code and the caller's are part of every library with regions
(`kernels/codegen/thread_pool.py`).
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from ..hardware.machine import LINE_BYTES

# Functions of a library with parallel regions; their names change with the words, for a file may bring those of another prefuse.
LAUNCH, USE_POOL, WORK = FUNCTIONS = "prefuse_launch_2", "prefuse_use_pool_2", "prefuse_work_2"
PARALLEL = "__TVMBackendParallelLaunch"  # such a library's pointer to what launches a region

# The words of a pool, zeros in the beginning; what one thread writes often is on a cache line of its own.
FUNCTION, CLOSURE, THREADS = 0, 8, 16  # what runs a task of the last region, and its argument; int32: tasks of every region
REGION = 20  # int32: the last region's number, written behind the others of this line; what workers sleep on
ROUNDING = 24  # int32: the caller's control word of vector arithmetic (MXCSR), by which all tasks of a region round
DONE = 64  # int32: its tasks that are done
SLEEPERS = 128  # int32: workers that sleep, or are about to
STOP = 132  # int32: not 0 ends the workers
TASKS = 192  # a line for each task, the first that of the calling thread:
BEGUN = 0  # int32: the last region in which a thread has begun it
NUMBER, POOL = 8, 16  # int32: the task's; the pool's address. A worker is given the address of the line of its own task

FUTEX_WAIT, FUTEX_WAKE = 128, 129  # of linux/futex.h, within one process
SYS_FUTEX = 202  # of x86-64
_ALL = 2**31 - 1
# Python's handlers belong to its own threads; but what a thread's own instruction raises is handled there, or ends the process.
_FAULTS = {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
_HANDLED = signal.valid_signals() - _FAULTS
_STOP_SECONDS = 2e-4  # between looks for whether a worker has ended


class Library(Protocol):
    """A library in memory, as long as this object is, and functions of it by their names."""

    @property
    def functions(self) -> Mapping[str, Callable[..., object]]: ...


class ThreadPool:
    """Workers for regions of `threads` tasks, of which the calling thread runs one. They end with this object, or at exit."""

    def __init__(self, threads: int, code: Library) -> None:
        """Start them; they run functions of `code`. A warning tells where the system gives the process fewer."""
        size = TASKS + threads * LINE_BYTES
        self.address = _libc().aligned_alloc(LINE_BYTES, size)  # not Python's, which would take it back at exit beside a call
        if not self.address:
            raise MemoryError(f"{size} bytes for {threads} threads")
        ctypes.memset(self.address, 0, size)
        _word(self.address + THREADS).value = threads
        self._workers = list[ctypes.c_ulong]()
        self._process = os.getpid()
        weakref.finalize(self, _give_back, self.address, self._workers, self._process, code).atexit = False
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # asks alone: Ctrl-C may be raised as soon as the mask is another
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            for task in range(1, threads):
                if error := self._start(task, code):
                    what = f"the system starts no more threads ({os.strerror(error)})"
                    fix = "use fewer, or raise the limit of processes (ulimit -u)"
                    warnings.warn(f"{what}: calls of this one run on {task} of {threads}; {fix}", RuntimeWarning, stacklevel=2)
                    break
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        _live[id(self)] = self  # not before: at exit another thread stops those that are here

    def _start(self, task: int, code: Library) -> int:
        """Start the worker of a task, known before it runs, for Ctrl-C may be raised behind any statement. Gives the error."""
        worker, line = ctypes.c_ulong(), self.address + TASKS + task * LINE_BYTES
        _word(line + NUMBER).value = task
        ctypes.c_int64.from_address(line + POOL).value = self.address
        self._workers.append(worker)
        error: int = _libc().pthread_create(ctypes.byref(worker), None, code.functions[WORK], line)
        if error:
            self._workers.pop()
        return error

    def stop(self) -> None:
        """End the workers. Calls go on without them."""
        if self._process == os.getpid():
            _stop(self.address, self._workers)


_live: weakref.WeakValueDictionary[int, ThreadPool] = weakref.WeakValueDictionary()


@atexit.register
def _stop_all() -> None:
    """At exit nothing may run code that is about to be unloaded."""
    for reference in _live.valuerefs():  # a list that is made at once, beside threads that make pools
        if (pool := reference()) is not None:
            pool.stop()


def _stop(address: int, workers: list[ctypes.c_ulong]) -> None:
    """End workers, and wait until none runs any more. One without a number has not been started."""
    _word(address + STOP).value = 1
    while workers:
        while workers[-1].value and _libc().pthread_tryjoin_np(workers[-1], None):
            _libc().syscall(SYS_FUTEX, ctypes.c_void_p(address + REGION), FUTEX_WAKE, _ALL)
            time.sleep(_STOP_SECONDS)
        workers.pop()


def _give_back(
    address: int,
    workers: list[ctypes.c_ulong],
    process: int,
    code: Library,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """End the workers of a pool that is gone, then give back its memory, and only then `code`. A forked process has none of its
    parent's; while Python ends, a thread may still be in a call."""
    if is_finalizing() or process != os.getpid():
        return
    _stop(address, workers)
    _libc().free(address)


class PoolUser:
    """A library whose regions run on the calling thread's pool of `threads` threads, or on none, where it has no regions."""

    _numbers = itertools.count(1)

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._use = library.functions.get(USE_POOL)
        self._number = next(self._numbers)

    @property
    def needs_threads(self) -> bool:
        """Whether the library has regions."""
        return self._use is not None

    def enter(self) -> None:
        """Let the calling thread call functions of the library next."""
        if self._use is not None and _own.library != self._number:
            self._use(ctypes.c_void_p(_pool(self._threads, self._library).address))
            _own.library = self._number


class _Own(threading.local):
    """What belongs to a thread: the number of the library that it entered last, and its pools by their threads."""

    def __init__(self) -> None:
        self.library = 0
        self.pools: dict[int, ThreadPool] = {}


_own = _Own()
_workers_code: list[Library] = []  # the library whose code all workers run: it stays


def _pool(threads: int, library: Library) -> ThreadPool:
    """The calling thread's pool."""
    if threads not in _own.pools:
        if not _workers_code:
            _workers_code.append(library)
        _own.pools[threads] = ThreadPool(threads, _workers_code[0])
    return _own.pools[threads]


def _forget() -> None:
    """In a forked process, where the parent's workers are not: the next call makes others."""
    _own.library = 0
    _own.pools.clear()


os.register_at_fork(after_in_child=_forget)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p
    libc.pthread_create.argtypes = [pointer, pointer, pointer, pointer]
    libc.pthread_tryjoin_np.argtypes = [ctypes.c_ulong, pointer]
    libc.aligned_alloc.argtypes, libc.aligned_alloc.restype = [ctypes.c_size_t, ctypes.c_size_t], pointer
    libc.free.argtypes, libc.free.restype = [pointer], None
    libc.syscall.argtypes = [ctypes.c_long, pointer, ctypes.c_int, ctypes.c_int]
    return libc


def _word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)
