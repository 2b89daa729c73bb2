"""Zip files whose members are stored as they are: written whole or not at all, read and mapped in place, also in one another.

Members of weights are in the format of safetensors, whose data begins at a multiple of 64 bytes in the file.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import io
import json
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np

from .errors import DeviceError, ProgramFileError, ScratchFileError
from .files.checksum import Checksum
from .files.whole_file import is_special, whole_file
from .plan import ALIGNMENT, PAGE, TensorType
from .streaming.storage import in_memory

CONSTANTS = "constants.safetensors"
MANIFEST = "manifest.json"  # the member with the hashes of the others
RECOMPILE = "compile the model again"
COPY_AGAIN = "the file is corrupt or cut short; copy it again or compile the model again"
NOT_OURS = "give a file that prefuse wrote"
LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, name length, extra length
ZIP64_BYTES = 20  # what Python adds to the local header of a member of unknown size
_DATE = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal contents are equal files
_ALIGN_FIELD = 0xD935  # the extra field by which Android's zipalign moves a member
_LARGEST_TEXT_BYTES = 1 << 26  # thirty times the plan of a model of 5,000 nodes
_SAFETENSORS_DTYPES = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class Section(io.RawIOBase):
    """Bytes [start, start + size_bytes) of an open file, as a file that can only be read. The file's own position is lost."""

    def __init__(self, file: IO[bytes], start: int, size_bytes: int) -> None:
        self._file = file
        self.start = start
        self.size_bytes = size_bytes
        self._position = 0

    @classmethod
    def whole(cls, file: IO[bytes]) -> Section:
        """All of a file."""
        return cls(file, 0, os.fstat(file.fileno()).st_size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    @property
    def name(self) -> str:
        """Of the whole file, for people."""
        return str(getattr(self._file, "name", "program file"))

    def fileno(self) -> int:
        """The number of the whole file."""
        return self._file.fileno()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size_bytes}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, f"position {position} in a file")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.size_bytes - self._position, 0)
        self._file.seek(self.start + self._position)
        content = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(content)
        return content


@contextmanager
def new_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """An archive to write members to, which appears at `path` when it is complete; else whatever is there stays.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    if is_special(path):
        raise ProgramFileError(str(path), "cannot be written: it is a device or a pipe", "give the path of a file")
    with writing(path), whole_file(path) as temporary, open(temporary, "xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            yield archive
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong in writing a file becomes a ProgramFileError that names it."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise ProgramFileError(str(path), what, "check the folder, its space and rights") from error


def write_member(archive: zipfile.ZipFile, name: str, content: bytes) -> str:
    """Write a member. Returns its sha256."""
    write_pieces(archive, name, (content,))
    return hashlib.sha256(content).hexdigest()


def write_pieces(archive: zipfile.ZipFile, name: str, pieces: Iterable[memoryview | bytes]) -> None:
    """Write a member piece by piece."""
    with archive.open(zipfile.ZipInfo(name, _DATE), "w", force_zip64=True) as member:
        for piece in pieces:
            member.write(piece)


@contextmanager
def archive_member(archive: zipfile.ZipFile, name: str) -> Iterator[zipfile.ZipFile]:
    """An archive to write members to, which is itself a member of `archive`, so that what it aligns is aligned in both."""
    file = archive.fp
    assert file is not None
    info = zipfile.ZipInfo(name, _DATE)
    start = file.tell() + LOCAL_HEADER.size + len(name.encode()) + ZIP64_BYTES + 4
    padding = -start % PAGE  # the most that a member of it is aligned to
    info.extra = struct.pack("<HH", _ALIGN_FIELD, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as member, zipfile.ZipFile(member, "w", zipfile.ZIP_STORED) as inner:
        yield inner


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever is wrong with a file that is read becomes a ProgramFileError that names the file."""
    try:
        yield
    except ProgramFileError as error:
        where = error.where if error.where.startswith(str(path)) else f"{path}: {error.where}"  # one reader may call another
        raise ProgramFileError(where, error.what, error.fix) from error
    except (DeviceError, ScratchFileError):  # RuntimeErrors that are no fault of the file
        raise
    except FileNotFoundError as error:
        raise ProgramFileError(str(path), "no such file", "check the path") from error
    except OSError as error:
        raise ProgramFileError(
            str(path), f"cannot be read: {error.strerror or error}", "check the path and its permissions"
        ) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, LookupError, struct.error) as error:
        raise ProgramFileError(str(path), f"not a sound program file ({error})", COPY_AGAIN) from error


def check_members(archive: zipfile.ZipFile, texts: Iterable[str]) -> None:
    """Check that members are stored as they are from the first byte on, and that `texts` are of a sane size.

    So nothing can grow while it is read, and an archive that is cut short is not taken for one that is a member of it.

    Raises:
        ProgramFileError: a member is not.
    """
    if min((info.header_offset for info in archive.infolist()), default=0):
        raise ProgramFileError("archive", "it does not begin with its first member", COPY_AGAIN)
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise ProgramFileError(info.filename, "the member is compressed or encrypted", NOT_OURS)
        if info.filename in texts and info.file_size > _LARGEST_TEXT_BYTES:
            raise ProgramFileError(info.filename, f"{info.file_size} bytes of text", NOT_OURS)


def member_section(section: Section, info: zipfile.ZipInfo) -> Section:
    """The bytes of a stored member of the archive that `section` is.

    Raises:
        ProgramFileError: they are not inside it.
    """
    section.seek(info.header_offset)
    signature, name_length, extra_length = LOCAL_HEADER.unpack(section.read(LOCAL_HEADER.size))
    start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
    if signature != b"PK\x03\x04" or start + info.file_size > section.size_bytes:
        raise ProgramFileError(info.filename, "the member is not where it should be", COPY_AGAIN)
    return Section(section._file, section.start + start, info.file_size)


def manifest_text(manifest: Mapping[str, object]) -> bytes:
    """The member of a manifest, equal for equal ones."""
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def parse_manifest(content: bytes, kind: str, number: int) -> tuple[dict[str, object], dict[str, object]]:
    """A manifest and the hashes in it. `kind` is what the archive should hold, `number` the format of it that is read here.

    Raises:
        ProgramFileError: it is the manifest of something else, or of another format.
    """
    manifest = json.loads(content)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), dict):
        raise ProgramFileError(MANIFEST, f"not the manifest of {kind}", COPY_AGAIN)
    if manifest.get("format") != number:
        what = f"{kind} of format {manifest.get('format')!r}; this prefuse reads format {number}"
        raise ProgramFileError(MANIFEST, what, f"{RECOMPILE} with prefuse {version('prefuse')}")
    return manifest, manifest["sha256"]


def check_hash(name: str, found: str, hashes: Mapping[str, object]) -> None:
    """Raise ProgramFileError unless `found` is the hash of `name` in the manifest."""
    if hashes.get(name) != found:
        raise ProgramFileError(name, "its hash is not the one in the manifest", COPY_AGAIN)


@cache
def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# -------------------------------------------------------------------------------------------------- members of weights


@dataclass(frozen=True, slots=True)
class ConstantSource:
    """A constant to write: its buffer's name, its type, its offset in the Plan, and how to get its elements when they are due:
    of a packed type, its bytes.
    """

    name: str
    type: TensorType
    offset: int
    load: Callable[[], np.ndarray]


def write_constants(
    archive: zipfile.ZipFile,
    header: bytes,
    data: Iterable[memoryview | bytes],
    name: str = CONSTANTS,
    alignment: int = ALIGNMENT,
) -> dict[str, str]:
    """Write a member of weights, whose data is aligned in the file. Returns its hashes for the manifest."""
    file = archive.fp
    assert file is not None
    start = file.tell() + LOCAL_HEADER.size + len(name) + ZIP64_BYTES + 8  # 8 bytes of length
    header = header.rstrip(b" ")
    header += b" " * (-(start + len(header)) % alignment)
    header = struct.pack("<Q", len(header)) + header
    checksum = Checksum()
    write_pieces(archive, name, _constants_member(header, data, checksum))
    return {_header(name): hashlib.sha256(header).hexdigest(), name: checksum.hexdigest()}


def _header(name: str) -> str:
    """The name under which the header of a member has a hash of its own: it says where the weights lie."""
    return f"{name} header"


def _constants_member(header: bytes, data: Iterable[memoryview | bytes], checksum: Checksum) -> Iterator[memoryview | bytes]:
    """The bytes of the member; those of the data are added to the checksum."""
    yield header
    for piece in data:
        checksum.update(piece)
        yield piece


def constants_header(sources: Sequence[ConstantSource], size_bytes: int) -> bytes:
    """The header of safetensors. The format allows no gaps, so that padding between constants is a tensor too."""
    entries: dict[str, object] = {"__metadata__": {"format": "prefuse"}}
    position = 0

    def fill(end: int) -> None:
        if end > position:
            entries[f"padding {position}"] = {"dtype": "U8", "shape": [end - position], "data_offsets": [position, end]}

    for source in sources:
        fill(source.offset)
        position = source.offset + source.type.size_bytes
        dtype = _SAFETENSORS_DTYPES.get(source.type.storage)
        shape = list(source.type.shape) if dtype else [source.type.size_bytes]
        entries[source.name] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [source.offset, position]}
    fill(size_bytes)
    return json.dumps(entries, separators=(",", ":")).encode()


def constants_data(sources: Sequence[ConstantSource], size_bytes: int) -> Iterator[memoryview | bytes]:
    """The constants' bytes in the order of their offsets, with zeros between them."""
    position = 0
    for source in sources:
        assert source.offset >= position, f"constant {source.name} overlaps the one before it"
        array = np.asarray(source.load(), order="C")
        kind = source.type
        stored = ("uint8", kind.size_bytes) if kind.is_packed else (kind.dtype, kind.elements)
        assert (array.dtype.name, array.size) == stored, f"constant {source.name} is no {kind}"
        yield bytes(source.offset - position)
        yield array.reshape(-1).view(np.uint8).data
        position = source.offset + source.type.size_bytes
    yield bytes(size_bytes - position)


def map_constants(
    section: Section, info: zipfile.ZipInfo, hashes: Mapping[str, object], *, is_copied: bool = False
) -> tuple[bytes, np.ndarray]:
    """The safetensors header, without its length, and the data after it as bytes mapped from the file; or `is_copied` to memory.

    Raises:
        ProgramFileError: header or data are not those of the manifest, or not where they should be.
    """
    header, data = constants_section(section, info, hashes)
    if not data.size_bytes:
        return header, np.empty(0, np.uint8)
    if is_copied:
        constants = in_memory(data.fileno(), data.start, data.size_bytes)
    else:
        first_page = data.start - data.start % mmap.ALLOCATIONGRANULARITY
        end = data.start + data.size_bytes
        mapped = mmap.mmap(section.fileno(), end - first_page, access=mmap.ACCESS_READ, offset=first_page)
        with suppress(OSError):  # only a hint: read ahead, the first call needs them all
            mapped.madvise(mmap.MADV_WILLNEED)
        constants = np.frombuffer(mapped, np.uint8, data.size_bytes, data.start - first_page)
    _check_constants(info.filename, constants, hashes)
    return header, constants


def constants_section(section: Section, info: zipfile.ZipInfo, hashes: Mapping[str, object]) -> tuple[bytes, Section]:
    """The header of a member of weights, without its length, and where its data lies."""
    member = member_section(section, info)
    prefix = member.read(8)
    length = int.from_bytes(prefix, "little")
    data, size = member.start + 8 + length, info.file_size - 8 - length
    if size < 0 or data % ALIGNMENT:
        raise ProgramFileError(info.filename, "the weights are not where they should be", COPY_AGAIN)
    header = member.read(length)
    check_hash(_header(info.filename), hashlib.sha256(prefix + header).hexdigest(), hashes)
    return header, Section(section._file, data, size)


def _check_constants(name: str, constants: np.ndarray, hashes: Mapping[str, object]) -> None:
    checksum = Checksum()
    checksum.update(constants.data)
    check_hash(name, checksum.hexdigest(), hashes)
