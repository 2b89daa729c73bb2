"""Compiled programs on disk, shared by all processes of a user.

Each program is one `.prefuse` file named by its key; constants that several of them may read are files of their own, named by
their contents (`runtime/constants`). Files appear whole, by renaming. A lock per key lets one process
compile while the others wait. A cache that cannot be used is no error: the program is built in a temporary folder, with one
warning.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ...runtime.constants.shared import path_of, touch
from ...runtime.errors import ProgramFileError
from ...runtime.files.user_folder import locked
from ...runtime.program_file import Program, read_program
from ...runtime.temporary_folder import temporary_folder

_DEPENDENCIES = ("apache-tvm", "onnx", "onnx-ir", "numpy")
_ABANDONED_SECONDS = 24 * 3600  # a temporary file this old belongs to nobody

_ENTRY = re.compile(r"[0-9a-f]{64}\.(prefuse|constant|object|json)")  # a user may name a folder with files of his own
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\..*\.tmp")

Build = Callable[[Path], None]  # writes a program to the path it is given


class ProgramCache:
    """A folder of programs, and of notes on what becomes which, bounded in size: those used longest ago go first."""

    def __init__(self, folder: Path, limit_bytes: int = 16 << 30) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._has_warned = False

    def find(self, key: str) -> Program | None:
        """The program of `key` if it is here."""
        return self._read(self.folder / f"{key}.prefuse")

    def load(self, key: str, build: Build) -> Program:
        """The program of `key`, built if it is not here. Processes and threads that ask for one key at a time build it once."""
        path = self.folder / f"{key}.prefuse"
        if (program := self._read(path)) is not None:
            return program
        if not self._is_writable():
            return build_uncached(build)
        with self._lock(key):
            if (program := self._read(path)) is not None:
                return program
            try:
                build(path)
            except ProgramFileError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                self._warn(str(error.__cause__.strerror))
                return build_uncached(build)
            program = read_program(path)
            self._touch_constants(program)
            self._evict({path, *(path_of(self.folder, one.content) for one in program.shared.values())})
            return program

    def state(self) -> str:
        """How full the cache is, or why it cannot be used, in a few words."""
        if not self._is_writable():
            return "cannot be written"
        files = [(size, path.suffix) for _, size, path in self._files(_ENTRY) if path.suffix != ".json"]
        total, programs = sum(size for size, _ in files), sum(suffix == ".prefuse" for _, suffix in files)
        return f"{programs} programs, {total / 2**30:.2f} of {self._limit_bytes / 2**30:.0f} GiB"

    def note(self, key: str) -> Mapping[str, object] | None:
        """What `write_note` stored; None if nothing, or what is no longer as it was stored."""
        path = self.folder / f"{key}.json"
        try:
            digest, _, content = path.read_bytes().partition(b"\n")
            found = json.loads(content) if digest == _digest(content) else None
            _touch(path)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_note(self, key: str, content: Mapping[str, object]) -> None:
        """Store a small JSON object behind its hash; where that fails, nothing is stored."""
        temporary = self.folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            text = json.dumps(content).encode()
            temporary.write_bytes(_digest(text) + b"\n" + text)
            temporary.replace(self.folder / f"{key}.json")
        except OSError:
            return
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _read(self, path: Path) -> Program | None:
        """The program at `path`; None if there is none. One that this machine or version cannot use is removed."""
        if not os.path.exists(path):
            return None
        try:
            program = read_program(path)
        except ProgramFileError:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        _touch(path)
        self._touch_constants(program)
        return program

    def _touch_constants(self, program: Program) -> None:
        """Say that the constants of a program are in use, later than itself: so it goes before they do."""
        touch(self.folder, {one.content for one in program.shared.values()}, time.time_ns())

    def _is_writable(self) -> bool:
        """Whether a file can be made in the folder, which is made if need be; warns if not."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(b"?")
                file.flush()
        except OSError as error:
            self._warn(error.strerror or str(error))
            return False
        return True

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self.folder}: cannot be used as a cache: {reason}; compiling without one", stacklevel=2)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the lock of a key. Its file exists only while somebody holds it or waits for it."""
        path = self.folder / f".{key}.lock"
        with locked(path):
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # while it is held: whoever waits for it sees that, and makes another

    def _files(self, pattern: re.Pattern[str]) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of our own files whose names match, oldest first."""
        found = []
        for path in self.folder.iterdir():
            if pattern.fullmatch(path.name):
                with suppress(OSError):  # another process has just removed it
                    status = path.stat()
                    found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
        return sorted(found)

    def _evict(self, keep: Collection[Path]) -> None:
        """Remove abandoned temporary files, and programs and constants from the oldest on until the rest are within the limit."""
        for used, _, path in self._files(_TEMPORARY):
            if time.time() - used > _ABANDONED_SECONDS:
                with suppress(OSError):
                    path.unlink()
        files = self._files(_ENTRY)
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._limit_bytes:
                break
            if path not in keep:
                with suppress(OSError):
                    path.unlink()
                    total -= size


def build_uncached(build: Build) -> Program:
    """Build a program that only this process keeps: its file is gone as soon as it is mapped."""
    with temporary_folder() as folder:
        path = folder / "program.prefuse"
        build(path)
        return read_program(path)


@cache
def compiler_version() -> str:
    """What a program depends on beside its model and options: the versions of the dependencies, and what our own files hold."""
    return _version_of(Path(__file__).parents[2])


def _version_of(root: Path) -> str:
    digest = hashlib.sha256()
    for name in _DEPENDENCIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for folder in ("compiler", "passes", "kernels", "runtime"):
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".ll", ".json")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _touch(path: Path) -> None:
    """Say that a file has been used, for eviction, and not that it has been changed, which who reads it would look into."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
