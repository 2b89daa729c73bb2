"""The loop-nest builder for GPUs: the interface of the CPU's, whose parallel loops become grids of threads.

A template written for the CPU says what may run in parallel (`chunks`, parallel loops) and what in order. Here an iteration of a
parallel loop is a thread, vectors have one lane, and `function` cuts the loop nest into grids (grids.py). So each operator of the
CPU has a GPU kernel; templates for GPUs (`*_gpu.py`) use thread blocks with shared memory (`blocks`, `shared`, `barrier`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from ...runtime.gpu.tensor_maps import TensorMap
from ...runtime.hardware.machine import gpu_thread
from ..formats.bfloat16 import is_rounding, rounded
from ..groups.configuration import Configuration
from .builder import Buffer, Expr, KernelBuilder, pointer_to
from .grids import GRID_BARRIER, SAME_ADDRESS, DeviceFunction, cut_into_grids, thread_extent
from .neighbours import side_by_side

_WARP = 32
_VECTOR_BYTES = 16
_BARRIER_BYTES = 4
_RESIDENT_THREADS = 1 << 14  # threads that a template for the CPU deals to: more than a GPU runs at once


@dataclass(frozen=True)
class Stored:
    """A store of one element that waits to become a part of a vector's."""

    buffer: Buffer
    offset: Expr
    value: Expr


class GpuBuilder(KernelBuilder):
    """Collects the statements of one group's kernel, as `KernelBuilder` does, and ends in a `DeviceFunction`."""

    is_grid = True
    integer_bits = 64

    def __init__(self, configuration: Configuration | None = None) -> None:
        super().__init__(gpu_thread(), _RESIDENT_THREADS, configuration=configuration)
        self._deferred: list[Stored] | None = None
        self._maps: list[tuple[Expr, str, TensorMap]] = []  # variable, name of the parameter, and how it is seen
        self._definitions: list[tuple[Any, Expr]] = []  # of variables that were bound
        self._block_count = 0  # of the grid being built
        self._counter: tuple[Any, Buffer] | None = None  # of blocks that meet: its pointer, and what that points to

    def lanes(self, dtype: str) -> int:
        return 1

    def threads_for(self, work: int) -> int:
        return self.threads

    @contextmanager
    def loop(self, extent: Expr, kind: str = "serial", name: str = "i") -> Iterator[Expr]:
        """As on the CPU; what would be vectorised there runs one by one."""
        with super().loop(extent, "serial" if kind == "vectorized" else kind, name) as i:
            yield i

    @contextmanager
    def chunks(self, extent: int, work: int) -> Iterator[Expr]:
        """A thread for each of [0, extent)."""
        with self.loop(extent, "parallel", "thread") as i:
            yield i

    @contextmanager
    def blocks(self, count: int, threads: int) -> Iterator[tuple[Expr, Expr]]:
        """A grid of `count` blocks of `threads` threads; yields the numbers of the block and of the thread in it."""
        block, thread = tirx.Var("block", "int32"), tirx.Var("lane", "int32")
        self._blocks.append([])
        self._block_count = count
        yield block, thread
        body = thread_extent("threadIdx.x", thread, threads, self._close())
        self.emit(thread_extent("blockIdx.x", block, count, body))

    def shared(self, elements: int, dtype: str, name: str = "tile") -> Buffer:
        """An array that the threads of a block share; undefined at first."""
        buffer = tirx.decl_buffer((elements,), dtype, name=name, scope="shared", layout=None)
        self.emit(tirx.AllocBuffer(buffer))
        return buffer

    def dynamic_shared(self, elements: int, dtype: str, name: str = "stages") -> Buffer:
        """The one array of a grid whose size a launch tells, so that it may be larger than 48 KiB; undefined at first."""
        buffer = tirx.decl_buffer((elements,), dtype, name=name, scope="shared.dyn", layout=None)
        self.emit(tirx.AllocBuffer(buffer))
        return buffer

    def tensor_map(self, name: str, seen: TensorMap) -> Expr:
        """The address of a tensor map of the parameter `name`; its number as an argument is settled at the end."""
        variable = tirx.Var(f"map{len(self._maps)}", tvm.ir.PointerType(tirx.TensorMapType()))
        self._maps.append((variable, name, seen))
        return tirx.address_of(variable)

    def do(self, call: Expr) -> None:
        """An instruction of TVM's PTX dialect (`tvm.script.tirx.ptx`) as a statement."""
        self.emit(tirx.Evaluate(call))

    @contextmanager
    def vector(self, lanes: int) -> Iterator[Expr]:
        """A loop that becomes vectors of `lanes` elements, of 16 bytes at most, which begin at multiples of their size."""
        if lanes == 1:
            yield tirx.const(0, "int32")
            return
        variable = tirx.Var("lane", "int32")
        self._blocks.append([])
        outer, allocations = self._lane, list[Any]()
        self._lane = (variable, lanes, allocations)
        yield variable
        body, self._lane = self._close(), outer
        for allocation in allocations:
            self.emit(allocation)
        self.emit(tirx.For(variable, tirx.const(0, "int32"), tirx.const(lanes, "int32"), tirx.ForKind.VECTORIZED, body))

    def bind(self, value: Expr, name: str = "t") -> Expr:
        bound = super().bind(value, name)
        if isinstance(bound, tirx.Var) and not isinstance(value, int | tirx.Var):
            self._definitions.append((bound, value))
        return bound

    def vector_count(self, dtypes: Iterable[str], extent: int) -> int:
        """How many neighbours of a row of so many elements a thread takes: of the widest of some types 16 bytes, or fewer."""
        widest = max((np.dtype(dtype).itemsize for dtype in dtypes), default=_VECTOR_BYTES)
        return gcd(max(_VECTOR_BYTES // widest, 1), extent)

    @contextmanager
    def neighbours(self, count: int) -> Iterator[Expr]:
        """Statements for each of `count` elements that lie side by side; yields the element's number.

        They are loaded and stored as vectors, as `side_by_side` says.
        """
        if count == 1:
            yield tirx.const(0, "int32")
            return
        variable = tirx.Var("lane", "int32")
        self._blocks.append([])
        outer, allocations = self._lane, list[Any]()
        self._lane = (variable, count, allocations)
        yield variable
        body, self._lane = self._blocks.pop(), outer
        for statement in (*allocations, *side_by_side(body, variable, count, self._definitions)):
            self.emit(statement)

    def store(self, buffer: Buffer, offset: Expr, value: Expr) -> None:
        if self._deferred is None:
            super().store(buffer, offset, value)
            return
        if is_rounding(value):
            value = rounded(value.value, self.name, has_instruction=False)
        self._deferred.append(Stored(buffer, offset, self.name(value)))

    @contextmanager
    def deferred_stores(self) -> Iterator[list[Stored]]:
        """What the statements inside would store, which the caller stores instead."""
        outer, self._deferred = self._deferred, list[Stored]()
        yield self._deferred
        self._deferred = outer

    def store_vector(self, elements: Sequence[Stored]) -> None:
        """Store neighbours at once: the first of them begins at a multiple of the size of all."""
        first = elements[0]
        values = self.local(len(elements), str(first.buffer.dtype), "neighbours")
        for i, one in enumerate(elements):
            super().store(values, i, one.value)
        with self.vector(len(elements)) as lane:
            super().store(first.buffer, first.offset + lane, values[lane])

    def store_neighbours(self, count: int, store: Callable[[int], None]) -> None:
        """What `store(i)` stores for each i, computed one by one: to neighbours in each buffer, as vectors of up to 16 bytes.

        The first ones begin at multiples of the size of `count` of them, or of 16 bytes. Truth values are stored one by one, as
        CUDA's vectors of them have two bytes for each.
        """
        stores = []
        for i in range(count):
            with self.deferred_stores() as one:
                store(i)
            stores.append(one)
        for neighbours in zip(*stores, strict=True):
            kind = neighbours[0].buffer.dtype
            lanes = 1 if str(kind) == "bool" else _VECTOR_BYTES * 8 // kind.bits
            for first in range(0, count, lanes):
                self.store_vector(neighbours[first : first + lanes])

    def shuffle(self, value: Expr, lane: Expr, lanes: int = _WARP) -> Expr:
        """The value that another lane has of the warp, or of the wavefront's so many lanes; all of them must be there."""
        mask = tirx.const(0xFFFFFFFF, "uint32")
        width = tirx.const(lanes, "int32")
        return self.name(tirx.call_intrin(str(value.ty), "tirx.tvm_warp_shuffle", mask, value, lane, width, width))

    def barrier(self) -> None:
        """Synchronise the threads of the block (__syncthreads): what they wrote to shared arrays is visible to all."""
        sync = tvm.ir.Op.get("tirx.tvm_storage_sync")
        self.emit(tirx.Evaluate(tvm.ir.Call(sync, [tvm.ir.StringImm("shared")], ret_ty=tvm.ir.PrimType("int32"))))

    def grid_barrier(self) -> None:
        """Synchronise all blocks of the grid, whose launch is cooperative: what they wrote to memory is visible to all.

        All threads of all blocks come to it. The kernel has a counter for it, the last of its parameters.
        """
        if self._counter is None:
            self._counter = pointer_to("barrier", "int32"), tirx.decl_buffer((1,), "int32", name="meeting", layout=None)
            self.barrier_bytes = _BARRIER_BYTES
        address = tirx.address_of(self._counter[1][0])
        self.emit(tirx.Evaluate(tirx.call_extern("void", GRID_BARRIER, address, self._block_count)))

    def is_same(self, a: Buffer, b: Buffer) -> Expr:
        """Whether two parameters are one array, as the Plan may have it of those that the kernel says (`inplace`)."""
        addresses = [tirx.address_of(one[0]) for one in (a, b)]
        return tirx.NE(tirx.call_pure_extern("int32", SAME_ADDRESS, *addresses), tirx.const(0, "int32"))

    def function(self, *, aliased: bool = False) -> DeviceFunction:
        """The grids of this kernel, in the order in which they run.

        Raises:
            UncutError: the loop nest cannot be cut into grids.
        """
        names = self.parameter_names
        maps = [(variable, replace(seen, argument=names.index(name))) for variable, name, seen in self._maps]
        return cut_into_grids(
            self._declarations(), self._blocks[0], self._pointers(), noalias=not aliased and self._counter is None, maps=maps
        )

    def _pointers(self) -> list[Any]:
        return [*super()._pointers(), *([] if self._counter is None else [self._counter[0]])]

    def _declarations(self) -> list[Any]:
        head = super()._declarations()
        return head if self._counter is None else [*head, tirx.DeclBuffer(self._counter[1], data=self._counter[0])]
