"""Finds races of a kernel's threads without waiting for them to happen: the tasks of its parallel regions run one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad, Var

_SYMBOL = "__TVMBackendParallelLaunch"  # the library's pointer to the function that runs the tasks of a region


class _Region(ctypes.Structure):
    """TVMParallelGroupEnv of tvm/runtime/c_backend_api.h, which each task is given."""

    _fields_ = (("sync_handle", ctypes.c_void_p), ("tasks", ctypes.c_int32))


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Region), ctypes.c_void_p)


class RaceDetector:
    """The parallel regions of a library that TVM has loaded, to be run task by task on the calling thread."""

    def __init__(self, library: Path) -> None:
        """Find the library's pointer to what runs regions on threads; one without parallel regions has none."""
        self._library = ctypes.CDLL(str(library))  # the very one in memory, as long as it is there
        try:
            self._launch: Any = ctypes.c_void_p.in_dll(self._library, _SYMBOL)
        except ValueError:
            self._launch = None

    @contextmanager
    def tasks_apart(self, memory: Sequence[np.ndarray], read_back: Collection[int], tasks: int) -> Iterator[Sequence[str]]:
        """In the context each task of a region finds the memory as the region found it; what all wrote is there behind it.

        So a task that reads what another one writes computes something else than it does on threads. The list that this gives has
        a line for each buffer in which two tasks wrote to one byte what is not the same in the end, or what they may read again
        while the other one has something else there.

        Args:
            memory: the bytes of all buffers that the library may write.
            read_back: the positions of those that a region both writes and reads.
            tasks: in how many a region is divided.
        """
        found: list[str] = []

        def launch(task: Any, region: Any, data: int) -> None:
            before, merged = ([part.copy() for part in memory] for _ in range(2))
            written = [np.zeros(part.size, bool) for part in memory]
            for number in range(tasks):
                for part, old in zip(memory, before, strict=True):
                    part[:] = old
                task(number, region, data)
                for position, part in enumerate(memory):
                    changed = part != before[position]
                    shared = changed & written[position]
                    if position not in read_back:  # the last store of each writer is the same
                        shared &= part != merged[position]
                    if shared.any():
                        found.append(f"{shared.sum()} bytes of buffer {position} have two writers, first byte {shared.argmax()}")
                    np.copyto(merged[position], part, where=changed)
                    written[position] |= changed
            for part, new in zip(memory, merged, strict=True):
                part[:] = new

        with self._launched_by(launch, tasks):
            yield found

    @contextmanager
    def tasks_backwards(self, _: Sequence[np.ndarray], tasks: int) -> Iterator[Sequence[str]]:
        """In the context the last task of a region runs first, and each sees what those behind it wrote."""

        def launch(task: Any, region: Any, data: int) -> None:
            for number in reversed(range(tasks)):
                task(number, region, data)

        with self._launched_by(launch, tasks):
            yield ()

    @contextmanager
    def _launched_by(self, launch: Any, tasks: int) -> Iterator[None]:
        if self._launch is None:
            yield
            return

        def called(task: int, data: int, _: int) -> int:
            launch(_TASK(task), ctypes.byref(_Region(None, tasks)), data)
            return 0

        kept, pool = _LAUNCH(called), self._launch.value
        self._launch.value = ctypes.cast(kept, ctypes.c_void_p).value
        try:
            yield
        finally:
            self._launch.value = pool


def read_back(function: Any) -> frozenset[int]:
    """The positions of the parameters of a kernel whose memory one of its parallel loops both writes and reads."""
    memory: dict[Any, int] = {pointer: position for position, pointer in enumerate(function.params)}  # and of buffers there
    both: set[int] = set()

    def declare(statement: Any) -> None:
        if isinstance(statement, tirx.DeclBuffer):
            memory[statement.buffer] = memory[statement.data]
        elif isinstance(statement.value, Call):  # perhaps a pointer of another type into the same memory
            pointers = {memory[one] for one in statement.value.args if isinstance(one, Var) and one in memory}
            for position in pointers | _touched(statement.value, TensorLoad, memory):
                memory[statement.var] = position

    def visit(loop: Any) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            both.update(_touched(loop, tirx.BufferStore, memory) & _touched(loop, TensorLoad, memory))

    tvm_ffi.structural_walk(function.body, ((tirx.Bind, tirx.DeclBuffer), declare))
    tvm_ffi.structural_walk(function.body, (tirx.For, visit))
    return frozenset(both)


def _touched(node: Any, kind: type, memory: Mapping[Any, int]) -> set[int]:
    """Where the buffers of the loads, or of the stores, in a statement or an expression lie."""
    found: set[int] = set()

    def visit(one: Any) -> None:
        buffer = one.source if isinstance(one, TensorLoad) else one.buffer
        if buffer in memory:
            found.add(memory[buffer])

    tvm_ffi.structural_walk(node, (kind, visit))
    return found
