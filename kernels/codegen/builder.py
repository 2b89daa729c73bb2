"""A builder of TIR loop nests: templates write them statement by statement, with no schedule in between.

All buffers are flat; a template computes its own offsets, so one pointer may have any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import floordiv, mod
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType

from ...runtime.hardware.machine import LINE_BYTES, Machine
from ...runtime.plan import ALIGNMENT
from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SymbolicSizeError, greatest_of, hint_of
from ..cost.memory import parallel_work
from ..formats.bfloat16 import is_rounding, rounded
from ..formats.minifloat import is_coded
from ..groups.configuration import Choice, Configuration
from .cache_lines import bytes_to_line
from .dimensions import lower_size, symbolic_offset, table_of_kernel
from .work_stealing import Shares

Expr: TypeAlias = Any  # a tirx expression or a Python number; tvm ships no types
Buffer: TypeAlias = Any
Index: TypeAlias = tuple[Expr, ...]
T = TypeVar("T")


_MOST_ELEMENTS = 2**31 - 1  # of a buffer, which 32-bit indices reach


class LargeWorkspaceError(Exception):
    """A kernel needs more scratch than its indices can reach."""


class KernelBuilder:
    """Collects the statements of one kernel: a private function of raw pointers (operands, outputs, one workspace).

    With `is_grid` an iteration of a parallel loop is a GPU thread, so that each should compute one element.
    """

    is_grid = False
    integer_bits = 128  # of the widest integers that the target's compiler supports

    def __init__(
        self, machine: Machine, threads: int, *, has_bfloat16: bool = False, configuration: Configuration | None = None
    ) -> None:
        self.machine = machine
        self.vector_bytes = machine.vector_bytes
        self.has_bfloat16 = has_bfloat16  # whether the CPU has instructions that round to bfloat16
        self.threads = threads
        self.choices: list[Choice] = []
        self.work = 0  # scalar operations of the longest loop that may be parallel
        self.tiles = ""  # Kernel.multiplies of the Plan, for kernels that use AMX
        self._configuration = configuration
        self._asked: dict[str, int] = {}  # how often a choice of each name was made
        self.workspace_bytes = 0
        self.barrier_bytes = 0  # of blocks that meet, on GPUs
        self._blocks: list[list[Any]] = [[]]
        self._parameters: dict[str, tuple[Any, Any]] = {}
        self._retyped: dict[tuple[str, str], tuple[Any, Any]] = {}  # parameters as other types: pointer, buffer
        self._workspace = pointer_to("workspace", "uint8")
        self._views: list[tuple[Any, Any, int]] = []
        self._lane: tuple[Any, int, list[Any]] | None = None  # of the vectorised loop around: variable, lanes, its allocations

    def lanes(self, dtype: str) -> int:
        return self.vector_bytes // max(np.dtype(dtype).itemsize, 1)

    def choose(self, name: str, options: Mapping[str, T]) -> T:
        """One of the legal options, by their names: the one that the configuration names, else the first.

        A kernel that decides the same several times, as for several products, has "tile", "tile 2" and so on. Where there is a
        configuration, if only an empty one, `choices` tells what could be chosen otherwise.
        """
        self._asked[name] = self._asked.get(name, 0) + 1
        name = name if self._asked[name] == 1 else f"{name} {self._asked[name]}"
        taken = next(iter(options))
        if self._configuration is not None:
            wanted = self._configuration.get(name, taken)
            taken = wanted if wanted in options else taken
            if len(options) > 1:
                self.choices.append(Choice(name, tuple(options), taken))
        return options[taken]

    # Parameters -------------------------------------------------------------------------------------------------------

    def parameter(self, name: str, elements: int, dtype: str) -> Buffer:
        """The flat buffer of a pointer parameter; the same one for each call with the same name.

        With another type than at first (such as 32-bit pairs of bfloat16) it is a view of the same memory.
        """
        dtype = "uint8" if is_coded(dtype) else dtype
        elements = greatest_of(elements)
        if name not in self._parameters:
            pointer = pointer_to(f"p{len(self._parameters)}", dtype)
            buffer = tirx.decl_buffer((max(elements, 1),), dtype, name=f"b{len(self._parameters)}", layout=None)
            self._parameters[name] = (pointer, buffer)
        pointer, buffer = self._parameters[name]
        if str(buffer.dtype) == dtype:
            return buffer
        if (name, dtype) not in self._retyped:
            view = tirx.decl_buffer((max(elements, 1),), dtype, name=f"v{len(self._retyped)}", layout=None)
            self._retyped[name, dtype] = (pointer, view)
        return self._retyped[name, dtype][1]

    def order_parameters(self, names: Sequence[str]) -> None:
        """Settle the calling order."""
        self._parameters = {name: self._parameters[name] for name in names}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def load_dimensions(self) -> None:
        """Take the table of dimensions as a parameter, if the kernel has named a dimension that a call decides."""
        if (table := table_of_kernel()) is not None:
            self.parameter(table.name, table.count, "int32")

    def workspace(self, elements: int, dtype: str) -> Buffer:
        """Scratch bytes of the arena, private to the kernel and cache-line aligned; the planner places them.

        Of a size that a call decides there are as many as it ever needs. Raises LargeWorkspaceError where there are too many.
        """
        elements = max(greatest_of(elements), 1)
        if elements > _MOST_ELEMENTS:
            raise LargeWorkspaceError(f"scratch of {elements} elements is more than 32-bit indices can reach")
        buffer = tirx.decl_buffer((elements,), dtype, name=f"w{len(self._views)}", layout=None)
        self._views.append((buffer, dtype, self.workspace_bytes))
        self.workspace_bytes += -(-elements * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        return buffer

    # Statements -------------------------------------------------------------------------------------------------------

    def emit(self, statement: Any) -> None:
        self._blocks[-1].append(statement)

    @contextmanager
    def loop(self, extent: Expr, kind: str = "serial", name: str = "i") -> Iterator[Expr]:
        """A loop from 0; one of extent 1 leaves no trace. Kinds: serial, unrolled, vectorized, parallel."""
        if isinstance(extent, int) and extent == 1:
            yield tirx.const(0, "int32")
            return
        variable = tirx.Var(name, "int32")
        self._blocks.append([])
        outer, allocations = self._lane, list[Any]()
        if kind == "vectorized":
            self._lane = (variable, int(extent), allocations)
        yield variable
        body = self._close()
        self._lane = outer
        for allocation in allocations:
            self.emit(allocation)
        self.emit(tirx.For(variable, tirx.const(0, "int32"), int32_of(extent), tirx.ForKind[kind.upper()], body))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        """Statements that run only where a scalar condition holds."""
        self._blocks.append([])
        yield
        self.emit(tirx.IfThenElse(condition, self._close(), None))

    def threads_for(self, work: int) -> int:
        """The number of threads that pay on this many scalar operations."""
        work = hint_of(work)
        self.work = max(self.work, work)
        return self.threads if work >= parallel_work(self.machine) else 1

    @contextmanager
    def chunks(self, extent: int, work: int) -> Iterator[Expr]:
        """A loop over [0, extent), its iterations dealt to the threads in contiguous runs (`work_stealing`)."""
        if isinstance(extent, Size):
            with self.dynamic_chunks(self.bind(lower_size(extent)), work) as i:
                yield i
            return
        threads = min(self.threads_for(work), max(extent, 1))
        shares = Shares(self, threads, extent, work)
        with (
            self.loop(threads, "parallel", "thread") as thread,
            shares.of(thread) as (begin, end),
            self.loop(end - begin if threads > 1 else extent, name="chunk") as i,
        ):
            yield self.bind(begin + i)

    @contextmanager
    def dynamic_chunks(self, extent: Expr, work: int) -> Iterator[Expr]:
        """The same over an extent known only as an expression; `work` is that of the largest."""
        threads = self.threads_for(work)
        shares = Shares(self, threads, extent, work)
        with (
            self.loop(threads, "parallel", "thread") as thread,
            shares.of(thread) as (begin, end),
            self.loop(end - begin, name="chunk") as i,
        ):
            yield self.bind(begin + i)

    @contextmanager
    def while_true(self, condition: Expr) -> Iterator[None]:
        """Statements that run again and again as long as a scalar condition holds, which they change through a buffer."""
        self._blocks.append([])
        yield
        self.emit(tirx.While(condition, self._close()))

    def vector_loop(self, extent: Expr, lanes: int, body: Callable[[Expr], None]) -> None:
        """`body(i)` for i in [0, extent): whole vectors first, what is left one by one."""
        if isinstance(extent, Size):
            self.dynamic_vector_loop(0, lower_size(extent), lanes, body)
            return
        whole = extent // lanes
        if whole:
            with self.loop(whole, name="v") as block, self.loop(lanes, "vectorized", "lane") as lane:
                body(block * lanes + lane)
        if extent - whole * lanes:
            with self.loop(extent - whole * lanes, name="tail") as i:
                body(i + whole * lanes)

    def dynamic_vector_loop(self, begin: Expr, end: Expr, lanes: int, body: Callable[[Expr], None]) -> None:
        """The same between bounds known only as expressions."""
        if isinstance(begin, int) and isinstance(end, int):
            self.vector_loop(end - begin, lanes, lambda i: body(begin + i))
            return
        count = self.bind(tirx.max(end - begin, 0))
        whole = self.bind(tirx.floordiv(count, lanes))
        with self.loop(whole, name="v") as block, self.loop(lanes, "vectorized", "lane") as lane:
            body(begin + block * lanes + lane)
        with self.loop(count - whole * lanes, name="tail") as i:
            body(begin + whole * lanes + i)

    def overlapping_vector_loop(self, begin: Expr, end: Expr, lanes: int, body: Callable[[Expr], None]) -> None:
        """As `dynamic_vector_loop`, but the remainder is part of a last whole vector that overlaps the one before it.

        So `body` runs more than once for some elements: it must not read what it writes.
        """
        if lanes == 1 or (isinstance(begin, int) and isinstance(end, int)):
            self.dynamic_vector_loop(begin, end, lanes, body)
            return
        count = self.bind(tirx.max(end - begin, 0))
        blocks = self.bind(tirx.Select(count >= lanes, tirx.floordiv(count + (lanes - 1), lanes), 0))
        with self.loop(blocks, name="v") as block:
            first = self.bind(tirx.min(begin + block * lanes, end - lanes))
            with self.loop(lanes, "vectorized", "lane") as lane:
                body(first + lane)
        with self.loop(self.bind(tirx.Select(count < lanes, count, 0)), name="tail") as i:
            body(begin + i)

    def store(self, buffer: Buffer, offset: Expr, value: Expr) -> None:
        if is_rounding(value):
            value = rounded(value.value, self.name, has_instruction=self.has_bfloat16)
        self.emit(tirx.BufferStore(buffer, value, [int32_of(offset)]))

    def prefetch(self, element: Expr, *, is_near: bool = True) -> None:
        """Prefetch the cache line of an element into L1, or only into L2 unless `is_near`. Never faults, wherever the line is."""
        # llvm.prefetch: read; locality 3 (L1) or 2 (L2); data
        how = (tirx.const(word, "int32") for word in (0, 3 if is_near else 2, 1))
        self.emit(tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(element), *how)))

    def bind(self, value: Expr, name: str = "t") -> Expr:
        """Name a loop bound or an offset outside of vectorised loops."""
        value = lower_size(value) if isinstance(value, Size) else value
        if isinstance(value, int | tirx.Var | tirx.IntImm):
            return value
        variable = tirx.Var(name, value.ty)
        self.emit(tirx.Bind(variable, value))
        return variable

    def name(self, value: Expr) -> Expr:
        """Name an element's intermediate result so that it is computed once, inside a vectorised loop too.

        A register-sized local array, not a TIR binding: the simplifier would inline a binding, and the code would grow
        exponentially. LLVM turns the array into a register.
        """
        if isinstance(value, tirx.Var | tirx.FloatImm | tirx.IntImm):
            return value
        lane, lanes, allocations = self._lane or (tirx.const(0, "int32"), 1, self._blocks[-1])
        buffer = tirx.decl_buffer((lanes,), str(value.ty), name="t", scope="local", layout=None)
        allocations.append(tirx.AllocBuffer(buffer, {"disable_lower_builtin": tirx.const(True, "bool")}))
        self.emit(tirx.BufferStore(buffer, value, [lane]))
        return buffer[lane]

    def masked(self, condition: Expr, element: Expr, otherwise: Expr) -> Expr:
        """`element` where a condition holds, else `otherwise`; `element` is loaded in any case.

        TVM assumes that a branch of a Select is computed only where its condition holds, and simplifies away what keeps indices
        of loads in it in bounds elsewhere. So the loaded value is named before.
        """
        return tirx.Select(condition, self.name(element), otherwise)

    def local(self, elements: int, dtype: str, name: str = "acc") -> Buffer:
        """A small array on the stack; with constant indices only, LLVM keeps it in registers.

        Raises SymbolicSizeError where a call decides how large it is.
        """
        if isinstance(elements, Size):
            raise SymbolicSizeError(f"an array of {elements} elements has no place on the stack")
        buffer = tirx.decl_buffer((elements,), dtype, name=name, scope="local", layout=None)
        self.emit(tirx.AllocBuffer(buffer, {"disable_lower_builtin": tirx.const(True, "bool")}))
        return buffer

    def aligned_local(self, elements: int, dtype: str, name: str = "acc") -> tuple[Buffer, Expr]:
        """A small array on the stack for what is stored and loaded as whole vectors, and its first element, which begins a cache
        line: LLVM aligns a stack to 16 bytes, and three in four of vectors of 64 bytes would lie across two lines."""
        item_bytes = np.dtype(dtype).itemsize
        if self.is_grid:
            return self.local(elements, dtype, name), 0
        buffer = self.local(elements + LINE_BYTES // item_bytes, dtype, name)
        shift = tirx.const(item_bytes.bit_length() - 1, "int32")
        return buffer, self.bind(bytes_to_line(buffer[0]) >> shift)

    # The end ----------------------------------------------------------------------------------------------------------

    def function(self, *, aliased: bool = False) -> Any:
        """The finished PrimFunc. It returns int32 0, as a private function with a parallel region must.

        `aliased` says that an output may take the memory of an operand, so that LLVM must not assume otherwise.
        """
        statements = [*self._declarations(), *self._dimensions(), *self._blocks[0]]
        body: Any = tirx.SeqStmt([*statements, tirx.Return(tirx.const(0, "int32"))])
        for key, value in (("device_id", 0), ("device_type", 1)):  # nothing else tells a private function its device
            body = tirx.AttrStmt(tvm.ir.StringImm("default"), key, tirx.const(value, "int32"), body)
        function = tirx.PrimFunc(self._pointers(), body, ret_type=PrimType("int32"))
        return function.with_attr("tirx.noalias", not aliased).with_attr("s_tir", True)

    def inline(self, function: Any, names: Sequence[str], workspace_bytes: int) -> None:
        """Emit the body of a finished kernel, whose pointers are the parameters of these names, and the workspace, if any."""
        self.workspace_bytes = max(self.workspace_bytes, workspace_bytes)
        pointers = [self._parameters[name][0] for name in names] + [self._workspace] * (workspace_bytes > 0)
        for variable, pointer in zip(function.params, pointers, strict=True):
            self.emit(tirx.Bind(variable, tirx.reinterpret(variable.ty, pointer)))
        body = function.body
        while isinstance(body, tirx.AttrStmt):
            body = body.body
        *statements, result = body.seq
        assert isinstance(result, tirx.Return), "a kernel ends with its result"
        for statement in statements:
            self.emit(statement)

    def _dimensions(self) -> list[Any]:
        """Loads of the dimensions that a call decides, and what is computed of them: through memory, so that TVM copies no
        expression, and LLVM keeps it in registers."""
        if (table := table_of_kernel()) is None:
            return []
        dimensions = self._parameters[table.name][1]
        head = [tirx.Bind(variable, dimensions[tirx.const(place, "int32")]) for place, variable in table.places]
        if table.sizes:
            self._blocks.append([])
            dtypes = dict.fromkeys(str(variable.ty) for variable, _ in table.sizes)
            room = {dtype: self.local(len(table.sizes), dtype, "sizes") for dtype in dtypes}
            for place, (variable, value) in enumerate(table.sizes):
                sizes = room[str(variable.ty)]
                self.store(sizes, place, value)
                self.emit(tirx.Bind(variable, sizes[tirx.const(place, "int32")]))
            head += self._blocks.pop()
        return head

    def _pointers(self) -> list[Any]:
        """The function's parameters: pointers in calling order, then the workspace if it has bytes."""
        pointers = [pointer for pointer, _ in self._parameters.values()]
        return [*pointers, self._workspace] if self.workspace_bytes else pointers

    def _declarations(self) -> list[Any]:
        """The statements that declare every buffer in memory over its pointer."""
        head: list[Any] = [tirx.DeclBuffer(buffer, data=pointer) for pointer, buffer in self._parameters.values()]
        for (_, dtype), (pointer, buffer) in self._retyped.items():
            seen = pointer_to("view", dtype)
            head += [tirx.Bind(seen, tirx.reinterpret(seen.ty, pointer)), tirx.DeclBuffer(buffer, data=seen)]
        for buffer, dtype, offset in self._views:
            byte = tirx.decl_buffer((max(self.workspace_bytes, 1),), "uint8", name="bytes", layout=None)
            head.append(tirx.DeclBuffer(byte, data=self._workspace))
            pointer = pointer_to("view", dtype)
            head.append(tirx.Bind(pointer, tirx.reinterpret(pointer.ty, tirx.address_of(byte[offset]))))
            head.append(tirx.DeclBuffer(buffer, data=pointer))
        return head

    def _close(self) -> Any:
        body = self._blocks.pop()
        if not body:
            return tirx.Evaluate(tirx.const(0, "int32"))
        return body[0] if len(body) == 1 else tirx.SeqStmt(body)


def row_major(index: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """Flat offset of an index."""
    if any(isinstance(extent, Size) for extent in shape):
        return symbolic_offset(index, shape)
    offset: Expr = 0
    for i, extent in zip(index, shape, strict=True):
        offset = offset * extent + i if not is_one(extent) else offset
    return offset


def unravel(offset: Expr, shape: Sequence[int]) -> Index:
    """Index of a flat offset, which is not negative."""
    index: list[Expr] = []
    is_known = isinstance(offset, int | Size)
    for extent in reversed(shape[1:]):
        if is_one(extent):
            index.append(0)
            continue
        # Of a divisor that TVM does not know to be positive it would look at the signs.
        truncates = isinstance(extent, Size) and not is_known
        divide, remainder = (tirx.truncdiv, tirx.truncmod) if truncates else (tirx.floordiv, tirx.floormod)
        divide, remainder = (floordiv, mod) if is_known else (divide, remainder)
        index.append(remainder(offset, extent))
        offset = divide(offset, extent)
    return (offset, *reversed(index)) if shape else ()


def broadcast_index(index: Index, shape: Sequence[int], source: Sequence[int]) -> Index:
    """The index in a value of shape `source` for an index in `shape`, by NumPy's broadcasting rule."""
    tail = index[len(index) - len(source) :]
    return tuple(0 if is_one(extent) else i for i, extent in zip(tail, source, strict=True))


def pointer_to(name: str, dtype: str) -> Any:
    return tirx.Var(name, PointerType(PrimType(dtype)))


def int32_of(value: Expr) -> Expr:
    """A number, a size or an expression as an expression: what TVM wants as a subscript."""
    if isinstance(value, Size):
        return lower_size(value)
    return tirx.const(value, "int32") if isinstance(value, int) else value
