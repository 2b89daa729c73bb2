"""The states of one session: memory that a program reads and writes, and that lasts from call to call."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from .archive import COPY_AGAIN, check_members, new_archive, write_member
from .device import Arena, Device
from .errors import InputError, ProgramFileError
from .interchange import as_array
from .plan import STATES, Buffer, State
from .program_file import CONTENTS, SHARED_CONSTANTS, Program

_HEADER = "states.json"  # the member that says of which program the states are, and what types they have
_FORMAT = 2
_LARGEST_HEADER_BYTES = 1 << 16  # of an array in NumPy's file
CACHE_RANK = 4  # of keys and values: [batch, heads, rows, width]


class States(Mapping[str, np.ndarray]):
    """Arrays by name: as the last call has left them, zeros or what the model says before the first.

    What is read is a copy; what is set is copied. One thread at a time may have a session: while another calls it, all of this
    but `glance` raises InputError.
    """

    def __init__(self, program: Program, device: Device) -> None:
        """`program` has states. Their memory is taken when it is first needed."""
        self.lock = threading.Lock()  # held during a call
        self._program = program
        self._device = device
        self._states = {state.name: state for state in program.plan.states}
        self._buffers: Mapping[str, Buffer] = {buffer.name: buffer for buffer in program.plan.buffers}
        self._memory: Arena | None = None
        self._lost: set[str] = set()  # what a call that failed has left in no known state

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"States({', '.join(f'{state.name}: {state.type}' for state in self._states.values())})"

    def __getitem__(self, name: str) -> np.ndarray:
        """A copy of a state. Raises KeyError for a name that no state has, InputError during a call, or after one that failed."""
        state = self._states[name]
        with self._held():
            self.require(name)
            return self._array(state)

    def __setitem__(self, name: str, value: object) -> None:
        """Give a state another value.

        Raises:
            InputError: no such state, an array of another type or shape, or another thread is calling the session.
        """
        array = self._checked(self._state(name), value)
        with self._held():
            self._set(self._states[name], array)
            self._lost.discard(name)

    def glance(self, name: str) -> np.ndarray:
        """A copy of a state as it is in memory, at any time: nobody waits, and a call of another thread may be writing it."""
        return self._array(self._states[name])

    def lose(self) -> None:
        """A call has failed while it may have been renewing states: none is used again before it is set, reset or loaded."""
        self._lost = set(self._states)

    def require(self, *names: str) -> None:
        """Raise InputError if a state, by default any, was lost."""
        if lost := self._lost.intersection(names or self._states):
            what = f"lost in a call that failed: {', '.join(sorted(lost))}"
            raise InputError("states", what, "reset them, set them, or load what was saved: session.states.reset()")

    def reset(self, name: str | None = None) -> None:
        """Make a state, or all, what they were before the first call. Raises InputError."""
        names = self._states if name is None else (self._state(name).name,)
        with self._held():
            for one in names:
                self._reset(self._states[one])
                self._lost.discard(one)

    def save(self, path: str | os.PathLike[str], more: Mapping[str, bytes] | None = None) -> None:
        """Write all states to an .npz file, whole or not at all; NumPy reads it, bfloat16 and its like as unsigned integers.

        Args:
            path: of the file.
            more: further members of it, by their names.

        Raises:
            ProgramFileError: the file cannot be written.
            InputError: another thread is calling the session.
        """
        types = {state.name: str(state.type) for state in self._states.values()}
        header = {"format": _FORMAT, "program": self.digest, "states": types}
        with self._held(), new_archive(Path(path)) as archive:
            self.require()
            write_member(archive, _HEADER, json.dumps(header).encode())
            for state in self._states.values():
                content = io.BytesIO()
                np.save(content, _plain(self._array(state)), allow_pickle=False)
                write_member(archive, f"{state.name}.npy", content.getvalue())
            for name, member in (more or {}).items():
                write_member(archive, name, member)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        any_program: bool = False,
        check: Callable[[Mapping[str, np.ndarray]], str] = lambda states: "",
    ) -> None:
        """Set all states from a file that `save` wrote; none is changed if one cannot be.

        Args:
            any_program: whether the states of another program are taken, too, if names, types and shapes are the same.
            check: says what is wrong with the states of a file; empty if nothing is.

        Raises:
            ProgramFileError: no such file, a corrupt one, or the states of another program.
            InputError: another thread is calling the session.
        """
        arrays = self._read(Path(path), any_program=any_program)
        if fault := check(arrays):
            raise ProgramFileError(str(path), fault, COPY_AGAIN)
        with self._held():
            for name, array in arrays.items():
                self._set(self._states[name], array)
                self._lost.discard(name)

    @property
    def digest(self) -> str:
        """What tells the program apart from others: the hash of those of its plan, code and weights, in any file.

        Of weights that programs share, which are in its file or in others, it is the contents that count.
        """
        manifest = self._program.manifest
        hashes = manifest.get("sha256")
        members = hashes.items() if isinstance(hashes, dict) else ()
        kept = {name: one for name, one in members if name != SHARED_CONSTANTS and not name.endswith(" header")}
        return hashlib.sha256(json.dumps([kept, manifest.get(CONTENTS)], sort_keys=True).encode()).hexdigest()

    @property
    def layout(self) -> tuple[tuple[State, int | None], ...]:
        """What programs must have in common to have one session: names, types and places."""
        return tuple((State(s.name, s.type, ""), self._buffers[s.buffer].offset) for s in self._states.values())

    def memory(self) -> Arena:
        """The memory, which the first to ask for it has allocated and set. Raises ArenaMemoryError.

        Zeros are not written to what is zero: of long caches, pages are provided as a text reaches them.
        """
        if self._memory is None:
            self._memory = self._device.allocate(self._program.plan.space(STATES).size_bytes, self._head_bytes())
            for state in self._states.values():
                if state.initial is not None or not self._device.gives_zeros:
                    self._reset(state)
        return self._memory

    def _head_bytes(self) -> int:
        """Of the largest cache [batch, heads, rows, width], which texts fill row by row, the bytes of a head; 0 without any."""
        kinds = [state.type for state in self._states.values() if len(state.type.shape) == CACHE_RANK]
        return max((kind.size_bytes // max(kind.shape[0] * kind.shape[1], 1) for kind in kinds), default=0)

    def _state(self, name: str) -> State:
        if name not in self._states:
            near = get_close_matches(name, self._states, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"the states are {', '.join(self._states)}"
            raise InputError(f"state {name!r}", "the model has no such state", fix)
        return self._states[name]

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self.lock.acquire(blocking=False):
            raise InputError("states", "another thread is calling their session", "give each thread its own: model.context()")
        try:
            yield
        finally:
            self.lock.release()

    def _array(self, state: State) -> np.ndarray:
        """A copy of a state."""
        kind = state.type
        content = self.memory().read(self._buffers[state.buffer].offset or 0, kind.size_bytes)
        array: np.ndarray = content.view(kind.dtype).reshape(kind.shape)
        return array

    def _set(self, state: State, array: np.ndarray) -> None:
        """Write an array, of any bytes, to a state's memory."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.memory().write(self._buffers[state.buffer].offset or 0, content)

    def _reset(self, state: State) -> None:
        if state.initial is None:
            self._set(state, np.zeros(state.type.size_bytes, np.uint8))
            return
        start, constants = self._buffers[state.initial].offset or 0, self._program.constants
        self._set(state, constants[start : start + state.type.size_bytes])

    def _checked(self, state: State, value: object) -> np.ndarray:
        where = f"state {state.name!r}"
        array = as_array(value, where)
        if (array.dtype, array.shape) != (np.dtype(state.type.dtype), state.type.shape):
            given = f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
            raise InputError(where, f"{given} given, it is {state.type}", f"give an array that is {state.type}")
        return array

    def _read(self, path: Path, *, any_program: bool) -> dict[str, np.ndarray]:
        try:
            with zipfile.ZipFile(path) as archive:
                check_members(archive, (_HEADER,))
                header = json.loads(archive.read(_HEADER))
                if header["format"] != _FORMAT:
                    raise ProgramFileError(str(path), f"states in format {header['format']}, not {_FORMAT}", "save them again")
                self._check_origin(path, header, any_program=any_program)
                found = {name: _loaded(archive, state) for name, state in self._states.items()}
        except FileNotFoundError as error:
            raise ProgramFileError(str(path), "no such file", "check the path") from error
        except OSError as error:
            raise ProgramFileError(str(path), f"cannot be read: {error.strerror or error}", "check the path") from error
        except (zipfile.BadZipFile, zlib.error, ValueError, LookupError, TypeError, EOFError, RuntimeError, MemoryError) as error:
            if isinstance(error, ProgramFileError):
                where = str(path) if error.where == str(path) else f"{path}: {error.where}"
                raise ProgramFileError(where, error.what, error.fix) from error
            raise ProgramFileError(str(path), f"no sound file of states ({error})", "give one that states.save wrote") from error
        for name, state in self._states.items():
            plain = _plain(np.empty(0, state.type.dtype)).dtype
            if found[name].dtype != plain or found[name].shape != state.type.shape:
                what = f"state {name!r} is {found[name].dtype}{list(found[name].shape)}, not {state.type}"
                raise ProgramFileError(str(path), what, "give a file that states.save wrote")
        return {name: array.view(self._states[name].type.dtype) for name, array in found.items()}

    def _check_origin(self, path: Path, header: Mapping[str, object], *, any_program: bool) -> None:
        own = {state.name: str(state.type) for state in self._states.values()}
        if header["states"] != own:
            listed = ", ".join(f"{name} {kind}" for name, kind in own.items())
            raise ProgramFileError(str(path), f"it holds other states than {listed}", "load it with the program that wrote it")
        if header["program"] != self.digest and not any_program:
            fix = "load it with the program that wrote it, or with any_program=True"
            raise ProgramFileError(str(path), "it holds the states of another program", fix)


def _loaded(archive: zipfile.ZipFile, state: State) -> np.ndarray:
    """The array of a state. Raises ValueError for a member that is none of its size, and what NumPy raises."""
    info = archive.getinfo(f"{state.name}.npy")
    if info.file_size > state.type.size_bytes + _LARGEST_HEADER_BYTES:
        raise ValueError(f"{info.filename} has {info.file_size} bytes, the state {state.type.size_bytes}")
    array = np.load(io.BytesIO(archive.read(info)), allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{info.filename} is no array")
    return array


def _plain(array: np.ndarray) -> np.ndarray:
    """The same bytes as NumPy's files know them: of a type of its own, or as unsigned integers."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
