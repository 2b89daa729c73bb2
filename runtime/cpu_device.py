"""Programs on the CPU: one native function on the caller's pool of threads, arenas in anonymous memory."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from . import native
from .constants.mapping import page_in
from .device import Arena
from .errors import ArenaMemoryError, CompileError, DeviceError, OptionError, ProgramFileError, ScratchFileError
from .hardware import tile_state
from .plan import SCRATCH
from .program_file import Program
from .streaming.copier import Copier, CopyTime, ThreadError
from .streaming.scratch import Scratch, ScratchError
from .streaming.storage import StorageError
from .streams import copy_streams
from .target import Target
from .temporary_folder import temporary_folder, write_temporary
from .threads.pool import FUNCTIONS, LAUNCH, PARALLEL, WORK, PoolUser

MAIN = "prefuse_main"  # takes an array of int64 addresses: of the plan's memories and parameters
PROFILE = "prefuse_profile"  # and the address of the stamps; only in programs that are compiled to be profiled
CLOCK_WORDS = 2  # of an int64 each, before the counters: struct timespec, seconds and nanoseconds
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # of linux/mman.h, which Python does not name
_LEAST_HUGE_PART_BYTES = 4 * _HUGE_PAGE_BYTES  # of parts whose first rows may take a huge page each: a quarter of all
_READY_ARENA_BYTES = 32 << 20  # up to which all pages are provided at once, in some milliseconds that a first call would take


class CpuArena:
    """Anonymous memory, page-aligned, zero until written; a page of a large one is provided when it is first touched.

    `part_bytes` is as in `Device.allocate`: where the beginnings of parts are all of its large pages, or most, these are small.
    """

    def __init__(self, size_bytes: int, part_bytes: int = 0) -> None:
        try:
            self._memory = mmap.mmap(-1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared has no huge pages
        except (OSError, OverflowError, ValueError) as error:
            what = f"no memory for {size_bytes} bytes of activations"
            raise ArenaMemoryError("arena", what, "free memory, use fewer contexts at once or a smaller batch") from error
        with suppress(OSError):  # hints, which not every kernel takes
            if size_bytes > _READY_ARENA_BYTES and mmap.PAGESIZE < part_bytes < _LEAST_HUGE_PART_BYTES:
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # which the system may give unasked
            elif size_bytes >= _HUGE_PAGE_BYTES:
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            if size_bytes <= _READY_ARENA_BYTES:
                self._memory.madvise(_MADV_POPULATE_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def memory(self) -> memoryview:
        """Its bytes, to write to."""
        return memoryview(self._memory)

    def read(self, offset: int, size_bytes: int) -> np.ndarray:
        return np.frombuffer(self._memory, np.uint8, size_bytes, offset).copy()

    def write(self, offset: int, content: np.ndarray) -> None:
        np.frombuffer(self._memory, np.uint8, content.size, offset)[:] = content


class CpuInvocation:
    """The table of addresses of one caller of one host function."""

    def __init__(
        self, executable: CpuExecutable, function: Callable[..., object], arena: Arena, states: Arena | None, parameters: int
    ) -> None:
        self._executable = executable
        self._arena, self._states = arena, states
        self.copier = executable.copier(arena)
        memories = [arena.address, executable.constants_address] + ([] if states is None else [states.address])
        memories += [] if self.copier is None else [self.copier.events.address]
        memories += executable.shared_addresses
        self._first = len(memories)
        self._table = (ctypes.c_int64 * (self._first + parameters))(*memories)
        self._argument = ctypes.byref(self._table)  # made once, so that a call converts nothing
        self._enter = executable.pool_user.enter
        self._function = function
        self.copies: Sequence[CopyTime] = ()  # of the last call
        self._has_begun = False  # whether its kernels have

    def set_up(self, *addresses: int) -> tuple[Callable[..., object], int, int]:
        """Prepare a call that native code makes in this thread: the function, the address of its table, and that in the table
        of the first of `addresses`."""
        assert self.copier is None, "weights are copied beside the call"
        self._enter()
        self._table[self._first :] = addresses  # type: ignore[call-overload]
        start = ctypes.addressof(self._table)
        return self._function, start, start + self._first * ctypes.sizeof(ctypes.c_int64)

    def __call__(self, *addresses: int) -> None:
        self._enter()
        self._table[self._first :] = addresses  # type: ignore[call-overload]  # typeshed asks for a list; a tuple costs no copy
        if self.copier is None:
            self._function(self._argument)
        else:
            self._has_begun = False
            try:
                self.copies = self.copier.run(self._compute)
            except (StorageError, ThreadError) as error:
                told = _told(error)
                told.is_before_run = not self._has_begun
                raise told from error

    def _compute(self) -> None:
        self._has_begun = True
        self._function(self._argument)


def _told(error: StorageError | ThreadError) -> CompileError:
    """What a user is told of copies that failed."""
    if isinstance(error, ThreadError):
        fix = "allow more processes and threads (ulimit -u, or the container's limit), or leave the memory limit out"
        return DeviceError("threads", f"none can be started for the copies of a memory limit ({error})", fix)
    kind = ScratchFileError if isinstance(error, ScratchError) else ProgramFileError
    return kind(error.where, error.what, error.fix)


class CpuExecutable:
    """A program's library, loaded, and the address of its constants."""

    def __init__(self, program: Program) -> None:
        self._constants = program.constants  # keeps the mapping alive
        self.constants_address = program.constants.ctypes.data
        self._shared = [program.shared[name].data for name in program.plan.shared]
        self.shared_addresses = [constant.ctypes.data for constant in self._shared]
        target = Target.parse(program.plan.target)
        if target.level == "amx" and (refusal := tile_state.refusal()):
            fix = 'run it where the system allows AMX (Linux 5.16 or newer), or compile the model with target="cpu:avx512"'
            raise DeviceError(str(target), f"the system does not let this process use AMX tiles ({refusal})", fix)
        self._parameters = len(program.plan.parameters)
        self._storage, self._streams = program.storage, copy_streams(program.plan)
        self._scratch_bytes = sum(space.size_bytes for space in program.plan.spaces if space.name == SCRATCH)
        self._folder = program.folder
        self._library = load_library(program.library, (MAIN, PROFILE))
        if MAIN not in self._library.functions:
            raise ProgramFileError("library.so", f"it has no function {MAIN}", "compile the model again")
        if PARALLEL.encode() in program.library and WORK not in self._library.functions:
            raise ProgramFileError(
                "library.so", "it is of an earlier prefuse, whose threads were TVM's", "compile the model again"
            )
        self.pool_user = PoolUser(self._library, target.threads)

    def copier(self, arena: Arena) -> Copier | None:
        """What fills an arena beside its calls; None where nothing is to be copied."""
        if not self._streams.operations:
            return None
        assert isinstance(arena, CpuArena)
        return Copier(self._streams, self._storage, arena.memory, self._scratch())

    def _scratch(self) -> Scratch | None:
        """A file for one context, beside the program's, for the temporary folder may be in memory, or else there."""
        if not self._scratch_bytes:
            return None
        return Scratch([*([] if self._folder is None else [self._folder]), Path(tempfile.gettempdir())], self._scratch_bytes)

    def bind(self, arena: Arena, states: Arena | None = None) -> CpuInvocation:
        return CpuInvocation(self, self._library.functions[MAIN], arena, states, self._parameters)

    def bind_profile(self, arena: Arena, states: Arena | None = None) -> CpuInvocation:
        if PROFILE not in self._library.functions:
            fix = "compile the model with profile=True, or --profile"
            raise OptionError("profile", "the program has no counters", fix)
        return CpuInvocation(self, self._library.functions[PROFILE], arena, states, self._parameters + 1)


class CpuDevice:
    """The machine's CPU."""

    torch_devices = frozenset(["cpu"])
    gives_zeros = True

    def load(self, program: Program) -> CpuExecutable:
        for memory in (program.constants, *(constant.data for constant in program.shared.values())):
            page_in(memory)
        return CpuExecutable(program)

    def allocate(self, size_bytes: int, part_bytes: int = 0) -> CpuArena:
        return CpuArena(size_bytes, part_bytes)


def load_library(content: bytes, names: Sequence[str]) -> native.Library:
    """Load native code with functions of these names, through a file that is gone when this returns. Raises ProgramFileError."""
    with temporary_folder() as folder:
        path = folder / "library.so"
        write_temporary(path, content)
        try:
            return native.Library(path, (*names, *FUNCTIONS), {PARALLEL: LAUNCH})
        except native.NativeError as error:
            fix = f"compile the model again; if {folder.parent} is mounted noexec, set TMPDIR to another folder"
            raise ProgramFileError("library.so", f"cannot be loaded ({error})", fix) from error
