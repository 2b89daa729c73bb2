"""The `.prefuse` file: one compiled program, with its weights, in one zip whose members are stored uncompressed.

    plan.txt               the Plan (plan_text)
    library.so             native code, which trusts its caller: load only files that you would run. For a GPU it is the
                           kernels alone, kernels.cubin or kernels.hsaco
    constants.safetensors  the weights; their data starts at a multiple of 64 bytes in the file and each lies there at the offset
                           that the Plan gives it, so that the file is mapped once and shared by all contexts and processes
    stored.safetensors     where a program has a memory limit: weights that it copies from the file while it runs, each from a
                           multiple of 4096 bytes in the file on, to a multiple
    manifest.json          versions, target, hashes and what the compiler reports

Everything that is data is checked before use: texts and code by their SHA-256, the weights by a `Checksum`, which adds about a
tenth of a second per gigabyte to what reading them takes anyway; those in the file when they are copied for the first time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .archive import (
    COPY_AGAIN,
    LOCAL_HEADER,
    MANIFEST,
    NOT_OURS,
    RECOMPILE,
    ZIP64_BYTES,
    Section,
    check_hash,
    check_members,
    manifest_text,
    member_section,
    new_archive,
    parse_manifest,
    reading,
    version,
    write_member,
    write_pieces,
)
from .errors import OptionError, ProgramFileError
from .files.checksum import Checksum
from .plan import ALIGNMENT, PAGE, STORAGE, Buffer, Plan, Role, TensorType
from .plan_checker import check_plan
from .plan_text import parse_plan, print_plan
from .streaming.storage import Storage, StorageError, Stored, checksum_of, in_memory, whole_pages
from .target import Target, check_binary

FORMAT = 4
PLAN, CONSTANTS, STORED = "plan.txt", "constants.safetensors", "stored.safetensors"
# The member with the native code.
CODE = {"cpu": "library.so", "cuda": "kernels.cubin", "cuda-sim": "simulated.so", "rocm": "kernels.hsaco"}
_CHECKSUMS = "stored"  # of the constants in STORED, by name, in the manifest
_MADV_POPULATE_READ = 22  # of linux/mman.h, which Python does not name
_SAFETENSORS_DTYPES = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True, slots=True)
class ConstantSource:
    """A constant to write: its buffer's name, its type, its offset in the Plan, and how to get its elements when they are due:
    of a packed type, its bytes.
    """

    name: str
    type: TensorType
    offset: int
    load: Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program. `constants` is read-only and 64-byte aligned; `constants_header` is their safetensors header.

    `storage` holds the constants that stay in the file, where there are such; `storage_header` is theirs.
    """

    plan: Plan
    library: bytes
    constants: np.ndarray
    manifest: Mapping[str, object]
    constants_header: bytes = b"{}"
    storage: Storage | None = None
    storage_header: bytes = b"{}"


def write_program(
    path: str | os.PathLike[str],
    plan: Plan,
    library: bytes,
    constants: Sequence[ConstantSource],
    manifest: Mapping[str, object],
) -> None:
    """Write a program file, or leave whatever was at `path` untouched. One constant is in memory at a time.

    Args:
        manifest: what the compiler reports, as JSON values; format, versions, target and hashes are added.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers if buffer.role is Role.CONSTANT}
    placed = {name: buffer.offset for name, buffer in buffers.items()}
    assert placed == {source.name: source.offset for source in constants}, "constants are not those of the plan"
    ordered = sorted(constants, key=lambda source: (source.offset, source.type.size_bytes))
    stored = [source for source in ordered if buffers[source.name].space == STORAGE]
    resident = [source for source in ordered if buffers[source.name].space != STORAGE]
    header, data = constants_header(resident, constants_bytes(plan)), constants_data(resident, constants_bytes(plan))
    checksums: dict[str, object] = {}
    pages = _StoredMember(constants_header(stored, stored_bytes(plan)), _stored_data(stored, checksums)) if stored else None
    with new_archive(Path(path)) as archive:
        _write_members(archive, plan, library, header, data, manifest, pages, checksums)


@dataclass(frozen=True, slots=True)
class _StoredMember:
    """The header of the constants that stay in the file, and their bytes."""

    header: bytes
    data: Iterable[memoryview | bytes]


def _stored_data(sources: Sequence[ConstantSource], checksums: dict[str, object]) -> Iterator[memoryview | bytes]:
    """The constants in whole pages, in the order of their offsets; each leaves its checksum."""
    position = 0
    for source in sources:
        assert source.offset == position, f"constant {source.name} is not where the one before it ends"
        piece = whole_pages(np.asarray(source.load(), order="C")).data
        checksums[source.name] = checksum_of(piece)
        position += len(piece)
        yield piece


def save_program(path: str | os.PathLike[str], program: Program) -> None:
    """Write a program that was read from a file to another.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    with new_archive(Path(path)) as archive:
        write_program_members(archive, program)


def write_program_members(archive: zipfile.ZipFile, program: Program) -> str:
    """Write a program that was read from a file to an archive, which may be part of another. Returns the manifest's sha256."""
    data: tuple[memoryview] = (program.constants.data,)
    storage = program.storage
    pages = None if storage is None else _StoredMember(program.storage_header, _checked(storage))
    checksums = {} if storage is None else {stored.name: stored.checksum for stored in storage.constants.values()}
    plan, header = program.plan, program.constants_header
    return _write_members(archive, plan, program.library, header, data, program.manifest, pages, checksums)


def _checked(storage: Storage) -> Iterator[memoryview]:
    """The constants that stay in the file. Raises ProgramFileError if they are not what they were."""
    try:
        yield from storage.pieces()
    except StorageError as error:
        raise ProgramFileError(error.where, error.what, error.fix) from error


def constants_bytes(plan: Plan) -> int:
    """Bytes from the first constant that is loaded with the program to the end of the last."""
    return _end(buffer for buffer in plan.buffers if buffer.role is Role.CONSTANT and buffer.space != STORAGE)


def stored_bytes(plan: Plan) -> int:
    """Bytes from the first constant that stays in the file to the end of the last."""
    return _end(buffer for buffer in plan.buffers if buffer.space == STORAGE)


def _end(buffers: Iterable[Buffer]) -> int:
    return max((buffer.size_bytes + (buffer.offset or 0) for buffer in buffers), default=0)


def read_program(path: str | os.PathLike[str]) -> Program:
    """Read and check a program file and map its weights.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one for another CPU or version.
    """
    with reading(path), open(path, "rb") as file:
        return read_section(Section.whole(file))


def read_section(section: Section) -> Program:
    """As `read_program`, from part of a file. Its faults are errors of all kinds, which `reading` translates."""
    with zipfile.ZipFile(section) as archive:
        return _read(section, archive)


def _write_members(
    archive: zipfile.ZipFile,
    plan: Plan,
    library: bytes,
    header: bytes,
    data: Iterable[memoryview | bytes],
    manifest: Mapping[str, object],
    stored: _StoredMember | None,
    checksums: Mapping[str, object],
) -> str:
    """Write all members. `checksums` are of the stored constants, complete when these are written."""
    code = _code_member(Target.parse(plan.target))
    hashes = {
        PLAN: write_member(archive, PLAN, print_plan(plan).encode()),
        code: write_member(archive, code, library),
    }
    hashes.update(write_constants(archive, header, data))
    if stored is not None:
        hashes.update(write_constants(archive, stored.header, stored.data, STORED, PAGE))
    own = {
        "format": FORMAT,
        "prefuse": version("prefuse"),
        "tvm": version("apache-tvm"),
        "target": plan.target,
        "sha256": hashes,
        **({} if stored is None else {_CHECKSUMS: dict(checksums)}),
    }
    return write_member(archive, MANIFEST, manifest_text({**manifest, **own}))


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


def _read(section: Section, archive: zipfile.ZipFile) -> Program:
    members = _members(archive)
    manifest, hashes = _read_manifest(archive.read(members[MANIFEST]))
    code = next(name for name in members if name in CODE.values())
    plan_bytes, library = archive.read(members[PLAN]), archive.read(members[code])
    for name, content in ((PLAN, plan_bytes), (code, library)):
        check_hash(name, hashlib.sha256(content).hexdigest(), hashes)
    plan = parse_plan(plan_bytes.decode())
    if plan.target != manifest["target"]:
        raise ProgramFileError(MANIFEST, f"its target {manifest['target']!r} is not the plan's, {plan.target!r}", RECOMPILE)
    _check_target(plan.target, code, library)
    if faults := check_plan(plan):
        raise ProgramFileError(PLAN, str(faults[0]), RECOMPILE)
    is_limited = STORED in members
    # A program with states is called for a few rows, time after time, and takes as long as reading its weights: from large
    # pages that is a sixth faster than from the 4 KiB pages of a mapped file.
    is_copied = is_limited or bool(plan.states)
    header, constants = map_constants(section, members[CONSTANTS], hashes, is_copied=is_copied)
    if constants.size != constants_bytes(plan):
        raise ProgramFileError(CONSTANTS, f"{constants.size} bytes of weights, the plan needs {constants_bytes(plan)}", RECOMPILE)
    if is_limited is not bool(stored_bytes(plan)):
        raise ProgramFileError(STORED, f"the plan needs {stored_bytes(plan)} bytes of weights in the file", RECOMPILE)
    if not is_limited:
        return Program(plan, library, constants, manifest, header)
    storage_header, storage = _read_storage(section, members[STORED], plan, manifest, hashes)
    return Program(plan, library, constants, manifest, header, storage, storage_header)


def _read_storage(
    section: Section, info: zipfile.ZipInfo, plan: Plan, manifest: Mapping[str, object], hashes: Mapping[str, object]
) -> tuple[bytes, Storage]:
    """The safetensors header of the constants that stay in the file, and themselves, of which nothing is read yet."""
    header, data = _constants_section(section, info, hashes)
    if data.size_bytes != stored_bytes(plan):
        what = f"{data.size_bytes} bytes of weights, the plan needs {stored_bytes(plan)}"
        raise ProgramFileError(STORED, what, RECOMPILE)
    checksums = manifest.get(_CHECKSUMS)
    constants = {}
    for buffer in plan.buffers:
        if buffer.space == STORAGE and buffer.offset is not None:
            checksum = checksums.get(buffer.name) if isinstance(checksums, dict) else None
            if not isinstance(checksum, str):
                raise ProgramFileError(MANIFEST, f"it has no checksum of {buffer.name}", COPY_AGAIN)
            constants[buffer.offset] = Stored(buffer.name, buffer.offset, buffer.size_bytes, checksum)
    return header, Storage(data.fileno(), data.name, data.start, data.size_bytes, constants)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members, which are exactly ours, stored as they are, so that nothing can grow while it is read."""
    infos = archive.infolist()
    found = sorted(info.filename for info in infos if info.filename != STORED)
    is_double = sum(info.filename == STORED for info in infos) > 1
    if is_double or found not in [sorted((PLAN, code, CONSTANTS, MANIFEST)) for code in CODE.values()]:
        names = ", ".join(repr(info.filename) for info in infos[:5]) or "nothing"
        raise ProgramFileError("archive", f"it holds {names}, not the members of a program", NOT_OURS)
    check_members(archive, (PLAN, MANIFEST))
    return {info.filename: info for info in infos}


def _read_manifest(content: bytes) -> tuple[dict[str, object], dict[str, object]]:
    manifest, hashes = parse_manifest(content, "a program", FORMAT)
    if manifest.get("tvm") != version("apache-tvm"):
        installed = version("apache-tvm")
        what = f"made with apache-tvm {manifest.get('tvm')!r}; installed is {'none' if installed == 'unknown' else installed}"
        raise ProgramFileError(MANIFEST, what, f"{RECOMPILE}, or install that version")
    return manifest, hashes


def _code_member(target: Target) -> str:
    """The member with the native code."""
    return CODE[f"{target.kind}-sim" if target.is_simulated else target.kind]


def _check_target(text: str, code: str, library: bytes) -> None:
    try:
        target = Target.parse(text)
    except OptionError as error:
        raise ProgramFileError("target", error.what, RECOMPILE) from error
    if code != _code_member(target):
        raise ProgramFileError(code, f"no code for {text}", RECOMPILE)
    if target.is_gpu and not target.is_simulated:
        check_binary(library, target, code)
    missing = target.missing_features()
    if missing:
        raise ProgramFileError(
            "target", f"compiled for {text}; this CPU lacks {', '.join(missing)}", f"{RECOMPILE} on this machine"
        )


def map_constants(
    section: Section, info: zipfile.ZipInfo, hashes: Mapping[str, object], *, is_copied: bool = False
) -> tuple[bytes, np.ndarray]:
    """The safetensors header, without its length, and the data after it as bytes mapped from the file; or `is_copied` to memory.

    Raises:
        ProgramFileError: header or data are not those of the manifest, or not where they should be.
    """
    header, data = _constants_section(section, info, hashes)
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
    _check_constants(constants, hashes)
    return header, constants


def _constants_section(section: Section, info: zipfile.ZipInfo, hashes: Mapping[str, object]) -> tuple[bytes, Section]:
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


def page_in(constants: np.ndarray) -> None:
    """Have mapped constants in memory, and known to this process, so that the first call waits for none of them."""
    mapped = constants.base.obj if isinstance(constants.base, memoryview) else None
    if isinstance(mapped, mmap.mmap):
        with suppress(OSError):  # Linux knows it since 5.14; elsewhere the first call is slower
            mapped.madvise(_MADV_POPULATE_READ)


def _check_constants(constants: np.ndarray, hashes: Mapping[str, object]) -> None:
    checksum = Checksum()
    checksum.update(constants.data)
    check_hash(CONSTANTS, checksum.hexdigest(), hashes)
