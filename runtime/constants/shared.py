"""A constant that several programs read, known by its content: what it was made of, and how it was packed.

A process has each of them in memory once, as long as somebody holds it: specialisations of a model, a program that was loaded
twice, and models with weights in common share them. Programs in a cache share them on disk, too: each is a file beside theirs,
with a `Checksum` at its end. Its bytes do not begin at the start of a page, but at a cache line of it that the content decides:
weights at equal places in their pages compete for the same sets of L1 (GPT-2 in bfloat16 took 5% longer).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from ..files.checksum import Checksum
from ..streaming.storage import large_pages, read_into
from .mapping import map_file

LEAST_BYTES = 1 << 16  # smaller constants lie side by side in each program
LEAST_SHARED_BYTES = 1 << 12  # the same where it is known that other programs read them
SUFFIX = ".constant"
_CONTENT = re.compile(r"[0-9a-f]{64}")
_ALIGNMENT = 64  # bytes; of the Plan
_PAGE_BYTES = 4096
_CHECKSUM_BYTES = 64  # at the end of a file, in hexadecimal


class ConstantError(Exception):
    """A constant that is not where a program looks for it, or not what was written: its file, and what is wrong."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SharedConstant:
    """The bytes of one constant, as kernels read them: read-only, aligned as a Plan asks for."""

    content: str
    data: np.ndarray


# By their contents: those in pages of a file, and those in memory of their own.
_mapped: WeakValueDictionary[str, SharedConstant] = WeakValueDictionary()
_copied: WeakValueDictionary[str, SharedConstant] = WeakValueDictionary()


def alive(content: str, size_bytes: int, *, is_copied: bool = False) -> SharedConstant | None:
    """The constant if this process has it; `is_copied` asks for one in memory of its own, in large pages."""
    found = _copied.get(content) or (None if is_copied else _mapped.get(content))
    return found if found is not None and found.data.size == size_bytes else None


def share(content: str, data: np.ndarray, *, is_copied: bool = False) -> SharedConstant:
    """Make bytes known to whoever looks for the constant from now on; gives the one that is known already, if any."""
    assert data.ctypes.data % _ALIGNMENT == 0
    known = alive(content, data.size, is_copied=is_copied)
    return known or (_copied if is_copied else _mapped).setdefault(content, SharedConstant(content, data))


def load(folder: Path, sizes: Mapping[str, int], *, is_copied: bool = False) -> dict[str, SharedConstant]:
    """Constants by their contents, of these sizes in bytes: those of this process, else from the files of a folder.

    Raises:
        ConstantError: one is not there, or damaged; what is damaged is removed.
    """
    known = {content: alive(content, size, is_copied=is_copied) for content, size in sizes.items()}
    found = {content: constant for content, constant in known.items() if constant is not None}
    missing = {content: size for content, size in sizes.items() if content not in found}
    read = _copies(folder, missing) if is_copied else {content: _map(folder, content, size) for content, size in missing.items()}
    return found | {content: share(content, data, is_copied=is_copied) for content, data in read.items()}


def is_content(name: object) -> bool:
    """Whether a text is of the kind that names a constant's content: a digest of 32 bytes in hexadecimal."""
    return isinstance(name, str) and _CONTENT.fullmatch(name) is not None


def path_of(folder: Path, content: str) -> Path:
    """The file of a constant."""
    return folder / f"{content}{SUFFIX}"


def write(folder: Path, content: str, data: memoryview) -> None:
    """Write the file of a constant, whole or not at all. Raises OSError."""
    temporary = folder / f".{content}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    checksum = Checksum()
    checksum.update(data)
    try:
        with open(temporary, "xb") as file:
            file.write(bytes(_lead(content)))
            file.write(data)
            file.write(checksum.hexdigest().encode())
        temporary.replace(path_of(folder, content))
    finally:
        temporary.unlink(missing_ok=True)


class ConstantPool:
    """The constants of programs that are being built, held until they are loaded.

    Those of a temporary program that this process has are written to no file.
    """

    def __init__(self, *, is_temporary: bool = False) -> None:
        self.is_temporary = is_temporary
        self._held: dict[str, SharedConstant] = {}

    def provide(self, folder: Path, content: str, size_bytes: int, make: Callable[[], np.ndarray]) -> None:
        """Have a constant ready for a program in a folder, made only if it is nowhere.

        Raises:
            OSError: its file cannot be written.
        """
        known = alive(content, size_bytes)
        if known is not None and self.is_temporary:
            self._held[content] = known
            return
        if os.path.exists(path_of(folder, content)):
            with suppress(ConstantError):
                self._held.update(load(folder, {content: size_bytes}))
                return
        data = make() if known is None else known.data
        write(folder, content, np.asarray(data, order="C").reshape(-1).view(np.uint8).data)


def touch(folder: Path, contents: Iterable[str], now_ns: int) -> None:
    """Say that files have been used, for eviction."""
    for content in contents:
        path = path_of(folder, content)
        with suppress(OSError):
            os.utime(path, ns=(now_ns, path.stat().st_mtime_ns))


def _map(folder: Path, content: str, size_bytes: int) -> np.ndarray:
    """The checked bytes of a constant's file."""
    path = path_of(folder, content)
    try:
        with open(path, "rb") as file:
            expected = _expected(path, file.fileno(), content, size_bytes)
            data = map_file(file.fileno(), _lead(content) + size_bytes)[_lead(content) :]
    except OSError as error:
        raise ConstantError(str(path), f"a constant of the program cannot be read: {error.strerror or error}") from error
    _check(path, data, expected)
    return data


def _copies(folder: Path, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The bytes of constants, side by side in one piece of memory: of those in mapped files, else read and checked."""
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()))
    memory = large_pages(ends[-1]) if sizes else memoryview(b"")
    block = np.frombuffer(memory, np.uint8)
    block.flags.writeable = False
    found = {}
    for (content, size), start in zip(sizes.items(), [0, *ends], strict=False):
        found[content], place = block[start : start + size], memory[start : start + size]
        if (known := alive(content, size)) is not None:  # of a temporary program, perhaps without a file
            place[:] = known.data.data
            continue
        path = path_of(folder, content)
        try:
            with open(path, "rb") as file:
                expected = _expected(path, file.fileno(), content, size)
                read_into(place, file.fileno(), _lead(content))
        except (OSError, EOFError) as error:
            raise ConstantError(str(path), f"a constant of the program cannot be read: {error}") from error
        _check(path, found[content], expected)
    return found


def _lead(content: str) -> int:
    """Bytes of a constant's file before its own."""
    return int(content[:4], 16) % (_PAGE_BYTES // _ALIGNMENT) * _ALIGNMENT


def _expected(path: Path, file: int, content: str, size_bytes: int) -> str:
    """The checksum at the end of a constant's file. Raises ConstantError if the file has another size, and removes it."""
    if (found := os.fstat(file).st_size) != (end := _lead(content) + size_bytes) + _CHECKSUM_BYTES:
        path.unlink(missing_ok=True)
        raise ConstantError(str(path), f"{found} bytes, of a constant of {size_bytes} and its checksum")
    return os.pread(file, _CHECKSUM_BYTES, end).decode(errors="replace")


def _check(path: Path, data: np.ndarray, expected: str) -> None:
    """Raise ConstantError if bytes have another checksum, and remove the file."""
    checksum = Checksum()
    checksum.update(data.data)
    if checksum.hexdigest() != expected:
        path.unlink(missing_ok=True)
        raise ConstantError(str(path), "a constant of the program is not what was written")
