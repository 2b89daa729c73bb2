"""From a loop nest to grids of GPU threads.

Each parallel loop of the nest, at any depth of serial loops and conditions, becomes a grid with a thread for each iteration; what
lies between them becomes grids of a single thread. A serial loop around grids is run by the host: its variable is a parameter
of theirs. Grids of one kernel run one after the other, each sees what those before it wrote to memory. Registers end with
their grid, so that the statements which computed them are repeated in every later grid of their block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range
from tvm.ir.expr import TensorLoad

from ...runtime.gpu.tensor_maps import TensorMap

BLOCK_THREADS = 256  # the most that TVM compiles ROCm kernels for
_WARP_THREADS = 32
GRID_BARRIER = "prefuse_grid_barrier"  # of device code: what all blocks of a grid wait at
SAME_ADDRESS = "prefuse_same_address"  # of device code: whether two arrays are one, as int32
_MAX_LAUNCHES = 4096  # of one kernel: a longer loop is not for the host


class UncutError(Exception):
    """Why a loop nest cannot be cut into grids."""


@dataclass(frozen=True)
class GridLaunch:
    """A grid: the number of its function, its size, the values of the host's loops around it, the bytes of shared memory
    that a block asks for beside arrays of fixed size, the tensor maps that its function takes, and whether all blocks run at
    once, as they wait for each other."""

    function: int
    blocks: int
    threads: int
    scalars: tuple[int, ...] = ()
    shared_bytes: int = 0
    maps: tuple[TensorMap, ...] = ()
    is_cooperative: bool = False


@dataclass(frozen=True)
class DeviceFunction:
    """A kernel as grids that run in order. Each function takes the kernel's pointers, its int32 scalars, and its tensor maps."""

    functions: tuple[Any, ...]  # tirx.PrimFunc
    launches: tuple[GridLaunch, ...]


@dataclass(frozen=True)
class _Repeat:
    """Launches that the host repeats."""

    times: int
    items: tuple[_Item, ...]


_Item: TypeAlias = GridLaunch | _Repeat


@dataclass(frozen=True)
class _Around:
    """What encloses a statement: the host's loop variables, conditions, and the statements that compute its registers."""

    variables: tuple[Any, ...] = ()
    conditions: tuple[Any, ...] = ()
    registers: tuple[Any, ...] = ()


def thread_extent(tag: str, variable: Any, extent: int, body: Any) -> Any:
    """`body` run by `extent` threads or blocks, numbered by `variable`."""
    axis = tirx.IterVar(Range.from_min_extent(0, extent), variable, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(axis, "thread_extent", tirx.const(extent, "int32"), body)


def cut_into_grids(
    head: Sequence[Any],
    body: Sequence[Any],
    pointers: Sequence[Any],
    *,
    noalias: bool,
    maps: Sequence[tuple[Any, TensorMap]] = (),
) -> DeviceFunction:
    """The grids of the statements `body`, whose buffers the statements `head` declare over `pointers`; `maps` have variables.

    Raises:
        UncutError: a grid is in a loop whose extent is known at run time only, registers hold what cannot be computed again, or
            the host would launch more than 4096 grids.
    """
    cutter = _Cutter(list(head), list(pointers), noalias, _written([*body], of_registers=False), maps)
    launches = tuple(_unrolled(cutter.cut(body, _Around()), ()))
    if len(launches) > _MAX_LAUNCHES:
        raise UncutError(f"it takes {len(launches)} launches, more than {_MAX_LAUNCHES}")
    return DeviceFunction(tuple(cutter.functions), launches)


def _unrolled(items: Sequence[_Item], scalars: tuple[int, ...]) -> Iterator[GridLaunch]:
    for item in items:
        if isinstance(item, GridLaunch):
            yield replace(item, scalars=scalars)
        else:
            for i in range(item.times):
                yield from _unrolled(item.items, (*scalars, i))


@dataclass
class _Cutter:
    """The functions made so far; `memory` names the buffers that the nest writes."""

    head: list[Any]
    pointers: list[Any]
    noalias: bool
    memory: frozenset[str]
    maps: Sequence[tuple[Any, TensorMap]]
    functions: list[Any] = field(default_factory=list)

    def cut(self, statements: Sequence[Any], around: _Around) -> tuple[_Item, ...]:
        items: list[_Item] = []
        registers: list[Any] = []  # statements so far that write nothing but registers
        pending: list[Any] = []  # statements since the last grid
        mixed = False  # whether a statement so far wrote registers and memory
        for statement in _flat(statements):
            if not _has_grid(statement):
                pending.append(statement)
                if not _written([statement], of_registers=False):
                    registers.append(statement)
                else:
                    mixed = mixed or bool(_written([statement], of_registers=True) - _allocated(statement))
                continue
            if mixed:
                raise UncutError("what one grid leaves in registers is needed by the next")
            items += self._single_thread(pending, around)
            pending = list(registers)
            inside = replace(around, registers=(*around.registers, *self._repeatable(registers)))
            items += self._grids(statement, inside)
        return (*items, *self._single_thread(pending, around))

    def _repeatable(self, statements: Sequence[Any]) -> Sequence[Any]:
        if _read(statements) & self.memory:
            raise UncutError("registers hold what memory held before a grid wrote it")
        return statements

    def _single_thread(self, statements: Sequence[Any], around: _Around) -> Iterator[_Item]:
        """One thread for statements without a grid, if they have an effect."""
        if _written(statements, of_registers=False):
            body = tirx.SeqStmt([*statements, tirx.Evaluate(tirx.const(0, "int32"))])
            yield self._function(thread_extent("blockIdx.x", tirx.Var("block", "int32"), 1, _one_thread(body)), 1, 1, around)

    def _grids(self, statement: Any, around: _Around) -> tuple[_Item, ...]:
        """The launches of a statement that holds grids."""
        if _is_blocks(statement):
            blocks, threads = int(statement.value), int(statement.body.value)
            return (self._function(statement, blocks, threads, around),)
        if isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL:
            return (self._parallel(statement, around),)
        if isinstance(statement, tirx.For) and isinstance(statement.extent, tirx.IntImm):
            inside = replace(around, variables=(*around.variables, statement.loop_var))
            return (_Repeat(int(statement.extent), self.cut([statement.body], inside)),)
        if isinstance(statement, tirx.IfThenElse) and statement.else_case is None:
            self._repeatable([statement.condition])
            inside = replace(around, conditions=(*around.conditions, statement.condition))
            return self.cut([statement.then_case], inside)
        raise UncutError("a grid lies in a loop whose length only a run knows")

    def _parallel(self, loop: Any, around: _Around) -> GridLaunch:
        if not isinstance(loop.extent, tirx.IntImm):
            raise UncutError("only a run knows how many threads there are")
        extent = int(loop.extent)
        threads = min(BLOCK_THREADS, -(-extent // _WARP_THREADS) * _WARP_THREADS)
        blocks = -(-extent // threads)
        if blocks * threads >= 2**31:
            raise UncutError(f"{extent} threads are more than 32-bit numbers count")
        block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
        number = block * tirx.const(threads, "int32") + thread
        body: Any = tirx.SeqStmt([tirx.Bind(loop.loop_var, number), loop.body])
        if blocks * threads != extent:
            body = tirx.IfThenElse(number < tirx.const(extent, "int32"), body, None)
        grid = thread_extent("blockIdx.x", block, blocks, thread_extent("threadIdx.x", thread, threads, body))
        return self._function(grid, blocks, threads, around)

    def _function(self, grid: Any, blocks: int, threads: int, around: _Around) -> GridLaunch:
        """The function of one grid, inside of whose threads registers are computed again and conditions tested."""
        inner = grid.body
        body = inner.body
        for condition in reversed(around.conditions):
            body = tirx.IfThenElse(condition, body, None)
        body = tirx.SeqStmt([*around.registers, body]) if around.registers else body
        whole = tirx.AttrStmt(grid.node, grid.attr_key, grid.value, tirx.AttrStmt(inner.node, inner.attr_key, inner.value, body))
        used = [(variable, one) for variable, one in self.maps if _names(whole, variable)]
        parameters = [*self.pointers, *around.variables, *(variable for variable, _ in used)]
        function = tirx.PrimFunc(parameters, tirx.SeqStmt([*self.head, whole]))
        function = function.with_attr("tirx.noalias", self.noalias).with_attr("s_tir", True)
        self.functions.append(tvm_ffi.get_global_func("s_tir.RenewDefs")(function))
        shared_bytes, maps = _dynamic_shared_bytes(body), tuple(one for _, one in used)
        number, waits = len(self.functions) - 1, _waits_for_blocks(body)
        return GridLaunch(number, blocks, threads, shared_bytes=shared_bytes, maps=maps, is_cooperative=waits)


def _names(statement: Any, variable: Any) -> bool:
    """Whether a statement has a variable."""
    return any(one.same_as(variable) for one in _collected([statement], tirx.Var))


def _one_thread(body: Any) -> Any:
    return thread_extent("threadIdx.x", tirx.Var("thread", "int32"), 1, body)


def _is_blocks(statement: Any) -> bool:
    return isinstance(statement, tirx.AttrStmt) and statement.attr_key == "thread_extent"


def _flat(statements: Sequence[Any]) -> Iterator[Any]:
    for statement in statements:
        if isinstance(statement, tirx.SeqStmt):
            yield from _flat(list(statement.seq))
        else:
            yield statement


def _has_grid(statement: Any) -> bool:
    match statement:
        case tirx.SeqStmt():
            return any(_has_grid(part) for part in statement.seq)
        case tirx.For():
            return bool(statement.kind == tirx.ForKind.PARALLEL) or _has_grid(statement.body)
        case tirx.IfThenElse():
            return _has_grid(statement.then_case) or (statement.else_case is not None and _has_grid(statement.else_case))
        case _:
            return _is_blocks(statement)


def _written(statements: Sequence[Any], *, of_registers: bool) -> frozenset[str]:
    """Names of the local arrays, or of the buffers in memory, that the statements write."""
    stores = _collected(statements, tirx.BufferStore)
    return frozenset(s.buffer.name for s in stores if (s.buffer.scope() == "local") == of_registers)


def _read(statements: Sequence[Any]) -> frozenset[str]:
    """Names of the buffers in memory that the statements read."""
    sources = [load.source for load in _collected(statements, TensorLoad)]
    return frozenset(source.name for source in sources if source.scope() != "local")


def _allocated(statement: Any) -> frozenset[str]:
    """Names of the local arrays that live inside the statement only."""
    return frozenset(one.buffer.name for one in _collected([statement], tirx.AllocBuffer))


def _waits_for_blocks(body: Any) -> bool:
    """Whether a statement has a barrier of all blocks."""
    calls = _collected([body], tvm.ir.Call)
    return any(isinstance(one.args[0], tvm.ir.StringImm) and one.args[0].value == GRID_BARRIER for one in calls if len(one.args))


def _dynamic_shared_bytes(body: Any) -> int:
    """Bytes of the array whose size a launch tells; a grid has one at most."""
    arrays = [one.buffer for one in _collected([body], tirx.AllocBuffer) if one.buffer.scope() == "shared.dyn"]
    assert len(arrays) <= 1, "a grid has one dynamic shared array"
    return sum(int(one.shape[0]) * np.dtype(str(one.dtype)).itemsize for one in arrays)


def _collected(statements: Sequence[Any], kind: type) -> list[Any]:
    found: list[Any] = []
    for statement in statements:
        tvm_ffi.structural_walk(statement, (kind, found.append))
    return found
