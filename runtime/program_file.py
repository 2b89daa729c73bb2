"""The `.prefuse` file: one compiled program, with its weights, in one zip whose members are stored uncompressed.

    plan.txt               the Plan (plan_text)
    library.so             native code, which trusts its caller: load only files that you would run. For a GPU it is the
                           kernels alone, kernels.cubin or kernels.hsaco
    constants.safetensors  the weights; their data starts at a multiple of 64 bytes in the file and each lies there at the offset
                           that the Plan gives it, so that the file is mapped once and shared by all contexts and processes
    manifest.json          versions, target, hashes and what the compiler reports

Everything that is data is checked before use: texts and code by their SHA-256, the weights by a `Checksum`, which adds about a
tenth of a second per gigabyte to what reading them takes anyway.
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
from .device_binary import check_binary
from .errors import OptionError, ProgramFileError
from .files.checksum import Checksum
from .plan import ALIGNMENT, Plan, Role, TensorType
from .plan_checker import check_plan
from .plan_text import parse_plan, print_plan
from .target import Target

FORMAT = 3
PLAN, CONSTANTS = "plan.txt", "constants.safetensors"
CODE = {"cpu": "library.so", "cuda": "kernels.cubin", "rocm": "kernels.hsaco"}  # the member with the native code
_HEADER = "constants.safetensors header"  # has a hash of its own: it says where the weights lie
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
    """A compiled program. `constants` is read-only and 64-byte aligned; `constants_header` is their safetensors header."""

    plan: Plan
    library: bytes
    constants: np.ndarray
    manifest: Mapping[str, object]
    constants_header: bytes = b"{}"


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
    placed = {buffer.name: buffer.offset for buffer in plan.buffers if buffer.role is Role.CONSTANT}
    assert placed == {source.name: source.offset for source in constants}, "constants are not those of the plan"
    ordered = sorted(constants, key=lambda source: (source.offset, source.type.size_bytes))
    header, data = constants_header(ordered, constants_bytes(plan)), constants_data(ordered, constants_bytes(plan))
    with new_archive(Path(path)) as archive:
        _write_members(archive, plan, library, header, data, manifest)


def save_program(path: str | os.PathLike[str], program: Program) -> None:
    """Write a program that was read from a file to another.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    with new_archive(Path(path)) as archive:
        write_program_members(archive, program)


def write_program_members(archive: zipfile.ZipFile, program: Program) -> str:
    """Write a program that was read from a file to an archive, which may be part of another. Returns the manifest's sha256."""
    data = (program.constants.data,)
    return _write_members(archive, program.plan, program.library, program.constants_header, data, program.manifest)


def constants_bytes(plan: Plan) -> int:
    """Bytes from the first constant to the end of the last."""
    ends = (buffer.size_bytes + (buffer.offset or 0) for buffer in plan.buffers if buffer.role is Role.CONSTANT)
    return max(ends, default=0)


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
) -> str:
    code = CODE[Target.parse(plan.target).kind]
    hashes = {
        PLAN: write_member(archive, PLAN, print_plan(plan).encode()),
        code: write_member(archive, code, library),
    }
    hashes.update(write_constants(archive, header, data))
    own = {
        "format": FORMAT,
        "prefuse": version("prefuse"),
        "tvm": version("apache-tvm"),
        "target": plan.target,
        "sha256": hashes,
    }
    return write_member(archive, MANIFEST, manifest_text({**manifest, **own}))


def write_constants(archive: zipfile.ZipFile, header: bytes, data: Iterable[memoryview | bytes]) -> dict[str, str]:
    """Write the member of the weights, whose data is aligned in the file. Returns its hashes for the manifest."""
    file = archive.fp
    assert file is not None
    start = file.tell() + LOCAL_HEADER.size + len(CONSTANTS) + ZIP64_BYTES + 8  # 8 bytes of length
    header = header.rstrip(b" ")
    header += b" " * (-(start + len(header)) % ALIGNMENT)
    header = struct.pack("<Q", len(header)) + header
    checksum = Checksum()
    write_pieces(archive, CONSTANTS, _constants_member(header, data, checksum))
    return {_HEADER: hashlib.sha256(header).hexdigest(), CONSTANTS: checksum.hexdigest()}


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
    header, constants = map_constants(section, members[CONSTANTS], hashes)
    if constants.size != constants_bytes(plan):
        raise ProgramFileError(CONSTANTS, f"{constants.size} bytes of weights, the plan needs {constants_bytes(plan)}", RECOMPILE)
    return Program(plan, library, constants, manifest, header)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members, which are exactly ours, stored as they are, so that nothing can grow while it is read."""
    infos = archive.infolist()
    if sorted(info.filename for info in infos) not in [sorted((PLAN, code, CONSTANTS, MANIFEST)) for code in CODE.values()]:
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


def _check_target(text: str, code: str, library: bytes) -> None:
    try:
        target = Target.parse(text)
    except OptionError as error:
        raise ProgramFileError("target", error.what, RECOMPILE) from error
    if code != CODE[target.kind]:
        raise ProgramFileError(code, f"no code for {text}", RECOMPILE)
    if target.is_gpu:
        check_binary(library, target, code)
    missing = target.missing_features()
    if missing:
        raise ProgramFileError(
            "target", f"compiled for {text}; this CPU lacks {', '.join(missing)}", f"{RECOMPILE} on this machine"
        )


def map_constants(section: Section, info: zipfile.ZipInfo, hashes: Mapping[str, object]) -> tuple[bytes, np.ndarray]:
    """The safetensors header, without its length, and the data after it as bytes mapped from the file.

    Raises:
        ProgramFileError: header or data are not those of the manifest, or not where they should be.
    """
    member = member_section(section, info)
    prefix = member.read(8)
    length = int.from_bytes(prefix, "little")
    data, size = member.start + 8 + length, info.file_size - 8 - length
    if size < 0 or data % ALIGNMENT:
        raise ProgramFileError(CONSTANTS, "the weights are not where they should be", COPY_AGAIN)
    header = member.read(length)
    check_hash(_HEADER, hashlib.sha256(prefix + header).hexdigest(), hashes)
    if not size:
        return header, np.empty(0, np.uint8)
    first_page = data - data % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(section.fileno(), data + size - first_page, access=mmap.ACCESS_READ, offset=first_page)
    with suppress(OSError):  # only a hint: read ahead, the first call needs them all
        mapped.madvise(mmap.MADV_WILLNEED)
    constants = np.frombuffer(mapped, np.uint8, size, data - first_page)
    _check_constants(constants, hashes)
    return header, constants


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
