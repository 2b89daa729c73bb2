"""The Plan: one order of execution with every byte placed, the only thing the runtime reads.

A Plan is data. It is printed and parsed by `plan_text`, checked by `plan_checker`, written by the scheduler and by the plan
passes, and turned into one native program by lowering. Lifetimes are half-open intervals of step indices: a buffer written
first by step 3 and read last by step 5 lives in [3, 6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

import ml_dtypes  # noqa: F401  (registers bfloat16, float8 and int4 with NumPy)
import numpy as np

from .gpu.tensor_maps import TensorMap
from .memory.regions import Region as Region
from .streaming.storage import PAGE as PAGE
from .symbolic.shapes import hinted
from .symbolic.sizes import Dim, Size, greatest_of

FORMAT_VERSION = 5
ARENA, CONSTANTS, STATES, BARRIERS, CALLER = "arena", "constants", "state", "barriers", "caller"  # that the compiler makes
EVENTS = "events"  # of the table of addresses: where the semaphores lie on which streams meet
VECTOR_ALIGNMENT = 16  # bytes whose multiples operands and results of a GPU's kernels begin at
DIMENSIONS = ".dimensions"  # the caller's buffer of the sizes that a call decides: an int32 for each of a Plan's dims
ALIGNMENT = 64  # bytes; one cache line and one AVX-512 register
SHARED = "shared"  # the space of constants at addresses of their own, which other programs may read, too: they have no offsets
STORAGE = "storage"  # the space of constants that stay in the program's file until a Copy brings them
SCRATCH = "scratch"  # the space, in a temporary file of each context, of activations that are out of memory for a while
COMPUTE = 0  # the stream of the kernels
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Type of a dense row-major tensor. `dtype` is a NumPy or ml_dtypes name such as "float32" or "bfloat16".

    A dimension is a number, or a Size where a call decides it; `size_bytes` is then the most that it takes.

    Numbers of less than a byte lie one a byte, as in NumPy's arrays; or, `is_packed`, side by side, the first in the lowest bits,
    and what is left of the last byte is zero.
    """

    shape: tuple[int, ...]  # of SizeLike
    dtype: str
    is_packed: bool = False

    def __post_init__(self) -> None:
        assert not self.is_packed or self.dtype in _PACKED_BITS, f"{self.dtype} lies in whole bytes"

    @property
    def elements(self) -> int:
        """A SizeLike."""
        return prod(self.shape)

    @property
    def is_symbolic(self) -> bool:
        """Whether a call decides a dimension."""
        return any(isinstance(dim, Size) for dim in self.shape)

    @property
    def largest(self) -> TensorType:
        """The type of numbers alone, each the most that a call can decide."""
        return replace(self, shape=tuple(map(greatest_of, self.shape))) if self.is_symbolic else self

    @property
    def hinted(self) -> TensorType:
        """The type where the sizes are their hints."""
        return replace(self, shape=hinted(self.shape)) if self.is_symbolic else self

    @property
    def bits(self) -> int:
        """That one element takes in memory."""
        return _PACKED_BITS[self.dtype] if self.is_packed else 8 * np.dtype(self.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        return greatest_of(self.bytes_of(self.elements))

    def bytes_of(self, elements: int) -> int:
        """Of so many elements side by side."""
        return -(-elements * self.bits // 8)

    @property
    def storage(self) -> str:
        """The type of an element, and how many share a byte where several do: "int4_x2"."""
        return f"{self.dtype}_x{8 // self.bits}" if self.is_packed else self.dtype

    def __str__(self) -> str:
        return f"{self.storage}[{','.join(map(str, self.shape))}]"


PACKED_TYPES = {TensorType((), dtype, True).storage: dtype for dtype in _PACKED_BITS}  # by what Plans write


class Role(StrEnum):
    """Who owns the bytes of a buffer, and for how long."""

    INPUT = "input"  # the caller's memory, read-only during a call
    OUTPUT = "output"  # the caller's memory, written during a call
    CONSTANT = "constant"  # shared by all contexts, never written
    ACTIVATION = "activation"  # in the context's arena, written by a step
    WORKSPACE = "workspace"  # in the arena, private to one step
    STATE = "state"  # the context's, kept from call to call: what one call leaves there, the next one reads
    BARRIER = "barrier"  # the context's, private to one step, whose blocks meet there: zeros before the first call
    SLOT = "slot"  # in the arena: a weight on its way from one call to the next, for which it is copied there


ARENA_ROLES = (Role.ACTIVATION, Role.WORKSPACE, Role.SLOT)
LASTING_ROLES = (Role.STATE, Role.BARRIER)  # of what is kept between calls, in spaces of their own


@dataclass(frozen=True, slots=True)
class Space:
    """A memory of one device. `size_bytes` is what the plan uses of it, `capacity_bytes` the hard bound (None: unbounded)."""

    name: str
    size_bytes: int = 0
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous bytes. `offset` is None until plan-memory has placed it; INPUT and OUTPUT buffers never have one, nor have
    those in the space SHARED.

    A STATE buffer is what a call finds, and no step writes it; or it `renews` such a buffer: then it is what the call leaves for
    the next one, in the same bytes, and every step that reads the old value is before those that write the new one. A SLOT buffer
    is likewise what a call finds, or `renews` such a buffer with the same weight for the next call. Between calls all streams
    have come to their ends.
    """

    name: str
    role: Role
    size_bytes: int
    space: str
    offset: int | None = None
    renews: str | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """A dimension whose size a run decides: `buffer`, of the caller, then holds it as one int64."""

    axis: int
    buffer: str


@dataclass(frozen=True, slots=True)
class Sized:
    """A dimension whose size a call decides: `text` is an expression of the Plan's dims (size_text.py)."""

    axis: int
    text: str


@dataclass(frozen=True, slots=True)
class Port:
    """A model input or output: its name for the user, its type, and the buffer that holds it.

    An output may have `extents`: then `type` and the buffer are the largest that a run can need, and the result is what lies
    before the extent of each of these axes. A port may have `sizes`: then `type` and the buffer are the largest that a call can
    give or take, and each call has its own.
    """

    name: str
    type: TensorType
    buffer: str
    extents: tuple[Extent, ...] = ()
    sizes: tuple[Sized, ...] = ()

    @property
    def type_text(self) -> str:
        """The type for people: "int64[2,<=12]" where a run decides the second dimension."""
        bounded, named = {extent.axis for extent in self.extents}, {sized.axis: sized.text for sized in self.sizes}
        dims = (named.get(axis) or (f"<={dim}" if axis in bounded else str(dim)) for axis, dim in enumerate(self.type.shape))
        return f"{self.type.storage}[{','.join(dims)}]"


@dataclass(frozen=True, slots=True)
class State:
    """What a context keeps from call to call: its name for the user, its type, and the buffer that holds it when a call begins.

    `initial` is the constant that it is before the first call; None: zeros.
    """

    name: str
    type: TensorType
    buffer: str
    initial: str | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """One launch on a GPU: a function of the device code, `blocks` blocks of `threads` threads, all in one dimension.

    The function takes the kernel's pointers, then `scalars`, each an int32, then tensor maps. A block has `shared_bytes` of
    shared memory beside the function's arrays of fixed size. Blocks of a cooperative launch wait for each
    other: all of them run at once.
    """

    function: str
    blocks: int
    threads: int
    scalars: tuple[int, ...] = ()
    shared_bytes: int = 0
    maps: tuple[TensorMap, ...] = ()
    is_cooperative: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A native function of the program. `arguments` counts its pointers: reads, then writes, then scratch.

    `template` names the kernel template that made it; `flops` and `bytes_moved` are its two floors, for reports, and `multiplies`
    what the machine multiplies at once: vectors of "float32", pairs of "bfloat16", or tiles, of which "tiles1", "tiles3" and
    "tiles6" make so many products for one.
    On a GPU a kernel is `grids`, run one after the other; elsewhere it has none.
    """

    symbol: str
    template: str
    arguments: int
    flops: int = 0
    bytes_moved: int = 0
    grids: tuple[Grid, ...] = ()
    multiplies: str = "float32"


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel. `inplace` pairs (write index, read index) may share their address: the kernel reads before it writes."""

    kernel: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    scratch: tuple[Region, ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    stream: int = 0
    label: str = ""  # the group this launch computes, for people


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a region to another of the same size, maybe in another space, asynchronously on `stream`."""

    source: Region
    destination: Region
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """Mark the point that `stream` has reached, as `event`."""

    event: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold `stream` until `event` has been reached."""

    event: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """An operator that the host computes (`function` names it), with everything before it on `stream` complete."""

    function: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    stream: int = 0


Step = Launch | Copy | Record | Wait | Host


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole program. Names are unique within their kind; steps refer to them by name.

    It serves all sizes that its `dims` can be; buffers have room for the largest, at fixed places, of which others take a part.
    """

    target: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    spaces: tuple[Space, ...]
    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    steps: tuple[Step, ...]
    version: int = FORMAT_VERSION
    states: tuple[State, ...] = ()
    dims: tuple[Dim, ...] = ()

    @property
    def counts(self) -> tuple[str, ...]:
        """The buffers that hold the outputs' extents, each once: what a program writes beside its outputs."""
        return tuple(dict.fromkeys(extent.buffer for port in self.outputs for extent in port.extents))

    @property
    def memories(self) -> tuple[str, ...]:
        """The spaces whose addresses a program for the CPU takes, in this order, before those of `shared` and `parameters`."""
        is_streamed = any(space.name in (STORAGE, SCRATCH) for space in self.spaces)
        return (ARENA, CONSTANTS, *((STATES,) if self.states else ()), *((EVENTS,) if is_streamed else ()))

    @property
    def shared(self) -> tuple[str, ...]:
        """The constants at addresses of their own, in the order in which a program takes these, after those of its memories."""
        return tuple(buffer.name for buffer in self.buffers if buffer.space == SHARED)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The caller's buffers in the order in which a program takes their addresses: inputs, outputs, counts, dimensions."""
        dimensions = (DIMENSIONS,) if self.dims else ()
        return (*(port.buffer for port in self.inputs + self.outputs), *self.counts, *dimensions)

    @property
    def weights_bytes(self) -> int:
        """What the constants take that are in memory as long as the program is."""
        return sum(space.size_bytes for space in self.spaces if space.name in (CONSTANTS, SHARED))

    def space(self, name: str) -> Space:
        return next(space for space in self.spaces if space.name == name)


def step_reads(step: Step) -> tuple[Region, ...]:
    """Regions that a step reads. Scratch is written before it is read, so it counts as a write."""
    match step:
        case Launch() | Host():
            return step.reads
        case Copy():
            return (step.source,)
        case _:
            return ()


def step_writes(step: Step) -> tuple[Region, ...]:
    """Regions that a step writes, its scratch included."""
    match step:
        case Launch():
            return step.writes + step.scratch
        case Host():
            return step.writes
        case Copy():
            return (step.destination,)
        case _:
            return ()


def planned_bytes(plan: Plan) -> int:
    """What a program takes with one context: its weights in memory, its states, and all that lies in the arena."""
    places = {buffer.space for buffer in plan.buffers if buffer.role in (Role.CONSTANT, *LASTING_ROLES, *ARENA_ROLES)}
    return sum(space.size_bytes for space in plan.spaces if space.name in places and space.name not in (STORAGE, SCRATCH))


def limit_of(plan: Plan) -> int | None:
    """The bytes that a program may take with this Plan; None without a limit."""
    bounds = [space.capacity_bytes - space.size_bytes for space in plan.spaces if space.capacity_bytes is not None]
    return planned_bytes(plan) + sum(bounds) if bounds else None
