"""Zip files whose members are stored as they are: written whole or not at all, read and mapped in place, also in one another."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import io
import json
import os
import secrets
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import ProgramFileError
from .plan import PAGE

MANIFEST = "manifest.json"  # the member with the hashes of the others
RECOMPILE = "compile the model again"
COPY_AGAIN = "the file is corrupt or cut short; copy it again or compile the model again"
NOT_OURS = "give a file that prefuse wrote"
LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, name length, extra length
ZIP64_BYTES = 20  # what Python adds to the local header of a member of unknown size
_DATE = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal contents are equal files
_ALIGN_FIELD = 0xD935  # the extra field by which Android's zipalign moves a member
_LARGEST_TEXT_BYTES = 1 << 26  # thirty times the plan of a model of 5,000 nodes


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                yield archive
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ProgramFileError(
            str(path), f"cannot be written: {error.strerror or error}", "check the folder, its space and rights"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


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
    """Whatever goes wrong in reading a file becomes a ProgramFileError that names the file."""
    try:
        yield
    except ProgramFileError as error:
        where = str(path) if error.where == str(path) else f"{path}: {error.where}"
        raise ProgramFileError(where, error.what, error.fix) from error
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


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
