"""The `.prefuse` file: one compiled program, with its weights, in one zip whose members are stored uncompressed.

    plan.txt               the Plan (plan_text)
    library.so             native code, which trusts its caller: load only files that you would run. For a GPU it is the
                           kernels alone, kernels.cubin or kernels.hsaco
    constants.safetensors  the weights; their data starts at a multiple of 64 bytes in the file and each lies there at the offset
                           that the Plan gives it, so that the file is mapped once and shared by all contexts and processes
    shared.safetensors     the weights that lie at addresses of their own, under the names of their contents. A program in a
                           cache has no such member where other programs read them, too: they are in files beside its own
    stored.safetensors     where a program has a memory limit: weights that it copies from the file while it runs, each from a
                           multiple of 4096 bytes in the file on, to a multiple
    manifest.json          versions, target, hashes, the contents of shared weights, and what the compiler reports

Everything that is data is checked before use: texts and code by their SHA-256, the weights by a `Checksum`, which adds about a
tenth of a second per gigabyte to what reading them takes anyway; those in the file when they are copied for the first time.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from .archive import (
    CONSTANTS,
    COPY_AGAIN,
    MANIFEST,
    NOT_OURS,
    RECOMPILE,
    ConstantSource,
    Section,
    check_hash,
    check_members,
    constants_data,
    constants_header,
    constants_section,
    manifest_text,
    map_constants,
    new_archive,
    parse_manifest,
    reading,
    version,
    write_constants,
    write_member,
    writing,
)
from .constants import shared
from .constants.shared import ConstantPool, SharedConstant
from .errors import OptionError, ProgramFileError
from .plan import ALIGNMENT, PAGE, SHARED, STORAGE, Buffer, Plan, Role, TensorType
from .plan_checker import plan_faults
from .plan_text import parse_plan, print_plan
from .streaming.storage import Storage, StorageError, Stored, checksum_of, whole_pages
from .target import Target, check_binary

FORMAT = 5
PLAN, SHARED_CONSTANTS, STORED = "plan.txt", "shared.safetensors", "stored.safetensors"
_SIMULATED = "simulated.so"
# The member with the native code.
CODE = {"cpu": "library.so", "cuda": "kernels.cubin", "rocm": "kernels.hsaco", "cuda-sim": _SIMULATED, "rocm-sim": _SIMULATED}
_OPTIONAL = (SHARED_CONSTANTS, STORED)
_CHECKSUMS = "stored"  # of the constants in STORED, by name, in the manifest
CONTENTS = "contents"  # of the shared constants, by name, in the manifest


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program. `constants` is read-only and 64-byte aligned; `constants_header` is their safetensors header.

    `storage` holds the constants that stay in the file, where there are such; `storage_header` is theirs. `shared` are those at
    addresses of their own, by the names of their buffers. `folder` is that of the file, None where there is none.
    """

    plan: Plan
    library: bytes
    constants: np.ndarray
    manifest: Mapping[str, object]
    constants_header: bytes = b"{}"
    storage: Storage | None = None
    storage_header: bytes = b"{}"
    shared: Mapping[str, SharedConstant] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class SharedSource:
    """A constant at an address of its own: its buffer's name, its content, and how to make its bytes where nobody has them."""

    name: str
    content: str
    size_bytes: int
    load: Callable[[], np.ndarray]


def write_program(
    path: str | os.PathLike[str],
    plan: Plan,
    library: bytes,
    constants: Sequence[ConstantSource],
    manifest: Mapping[str, object],
    shared_constants: Sequence[SharedSource] = (),
    pool: ConstantPool | None = None,
) -> None:
    """Write a program file, or leave whatever was at `path` untouched. One constant is in memory at a time.

    Args:
        manifest: what the compiler reports, as JSON values; format, versions, target and hashes are added.
        pool: who has the shared constants ready beside the file until it is read; None: they are in it.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers if buffer.role is Role.CONSTANT}
    placed = {name: buffer.offset for name, buffer in buffers.items() if buffer.space != SHARED}
    assert placed == {source.name: source.offset for source in constants}, "constants are not those of the plan"
    assert set(plan.shared) == {source.name for source in shared_constants}, "shared constants are not those of the plan"
    ordered = sorted(constants, key=lambda source: (source.offset, source.type.size_bytes))
    stored = [source for source in ordered if buffers[source.name].space == STORAGE]
    resident = [source for source in ordered if buffers[source.name].space != STORAGE]
    header, data = constants_header(resident, constants_bytes(plan)), constants_data(resident, constants_bytes(plan))
    checksums: dict[str, object] = {}
    pages = _StoredMember(constants_header(stored, stored_bytes(plan)), _stored_data(stored, checksums)) if stored else None
    if shared_constants:
        manifest = {**manifest, CONTENTS: {source.name: source.content for source in shared_constants}}
    own = [] if pool is not None else _placed((one.content, one.size_bytes, one.load) for one in shared_constants)
    if pool is not None:
        for source in shared_constants:
            with writing(Path(path)):
                pool.provide(Path(path).parent, source.content, source.size_bytes, source.load)
    with new_archive(Path(path)) as archive:
        _write_members(archive, plan, library, header, data, manifest, pages, checksums, own)


def _placed(constants: Iterable[tuple[str, int, Callable[[], np.ndarray]]]) -> list[ConstantSource]:
    """Where shared constants lie in a member of them, each once: their contents, sizes, and how to get their bytes."""
    found: dict[str, ConstantSource] = {}
    end = 0
    for content, size_bytes, load in constants:
        if content not in found:
            found[content] = ConstantSource(content, TensorType((size_bytes,), "uint8"), end, partial(_raw, load))
            end += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return list(found.values())


def _raw(load: Callable[[], np.ndarray]) -> np.ndarray:
    return np.asarray(load(), order="C").reshape(-1).view(np.uint8)


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
    """Write a program that was read from a file to another, with all of its weights.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    with new_archive(Path(path)) as archive:
        write_program_members(archive, program)


def write_program_members(archive: zipfile.ZipFile, program: Program, *, has_shared: bool = True) -> str:
    """Write a program that was read from a file to an archive, which may be part of another. Returns the manifest's sha256.

    Without `has_shared` its shared constants are elsewhere: in a member that several programs of a file have (`write_shared`).
    """
    data: tuple[memoryview] = (program.constants.data,)
    storage = program.storage
    pages = None if storage is None else _StoredMember(program.storage_header, _checked(storage))
    checksums = {} if storage is None else {stored.name: stored.checksum for stored in storage.constants.values()}
    plan, header, own = program.plan, program.constants_header, _placed_of([program]) if has_shared else []
    return _write_members(archive, plan, program.library, header, data, program.manifest, pages, checksums, own)


def write_shared(archive: zipfile.ZipFile, programs: Iterable[Program]) -> dict[str, str]:
    """Write the member with the shared constants of several programs, each once. Returns its hashes for the manifest."""
    return _write_shared(archive, _placed_of(programs))


def _placed_of(programs: Iterable[Program]) -> list[ConstantSource]:
    constants = (program.shared[name] for program in programs for name in program.plan.shared)
    return _placed((one.content, one.data.size, partial(np.asarray, one.data)) for one in constants)


def _write_shared(archive: zipfile.ZipFile, sources: Sequence[ConstantSource]) -> dict[str, str]:
    end = max((source.offset + source.type.size_bytes for source in sources), default=0)
    return write_constants(archive, constants_header(sources, end), constants_data(sources, end), SHARED_CONSTANTS)


def _checked(storage: Storage) -> Iterator[memoryview]:
    """The constants that stay in the file. Raises ProgramFileError if they are not what they were."""
    try:
        yield from storage.pieces()
    except StorageError as error:
        raise ProgramFileError(error.where, error.what, error.fix) from error


def constants_bytes(plan: Plan) -> int:
    """Bytes from the first constant that is loaded with the program to the end of the last."""
    return _end(b for b in plan.buffers if b.role is Role.CONSTANT and b.space not in (STORAGE, SHARED))


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


def read_section(section: Section, given: Mapping[str, SharedConstant] | None = None) -> Program:
    """As `read_program`, from part of a file. Its faults are errors of all kinds, which `reading` translates.

    `given` are shared constants by their contents, where a program has no member of its own for them (`read_shared`).
    """
    with zipfile.ZipFile(section) as archive:
        return _read(section, archive, given)


def read_shared(
    section: Section, info: zipfile.ZipInfo, hashes: Mapping[str, object], *, is_copied: bool = False
) -> dict[str, SharedConstant]:
    """The constants of a member that `write_shared` wrote, by their contents: those of this process where it has them all.

    Raises:
        ProgramFileError: they are not those of the manifest.
    """
    places = _places(info.filename, constants_section(section, info, hashes)[0])
    known = {name: shared.alive(name, end - begin, is_copied=is_copied) for name, (begin, end) in places.items()}
    found = {name: constant for name, constant in known.items() if constant is not None}
    if len(found) == len(places):
        return found
    _, data = map_constants(section, info, hashes, is_copied=is_copied)
    if any(begin % ALIGNMENT or not 0 <= begin <= end <= data.size for begin, end in places.values()):
        raise ProgramFileError(info.filename, "constants that are not inside it", COPY_AGAIN)
    return {name: shared.share(name, data[begin:end], is_copied=is_copied) for name, (begin, end) in places.items()}


def _places(name: str, header: bytes) -> dict[str, tuple[int, int]]:
    """Where the constants of a member begin and end in its data, by their contents."""
    entries, found = json.loads(header), {}
    for content, entry in entries.items() if isinstance(entries, dict) else ():
        if shared.is_content(content):
            match entry:
                case {"data_offsets": [int() as begin, int() as end]}:
                    found[content] = begin, end
                case _:
                    raise ProgramFileError(name, f"it does not say where {content} lies", COPY_AGAIN)
    return found


def _write_members(
    archive: zipfile.ZipFile,
    plan: Plan,
    library: bytes,
    header: bytes,
    data: Iterable[memoryview | bytes],
    manifest: Mapping[str, object],
    stored: _StoredMember | None,
    checksums: Mapping[str, object],
    shared_constants: Sequence[ConstantSource],
) -> str:
    """Write all members. `checksums` are of the stored constants, complete when these are written."""
    code = _code_member(Target.parse(plan.target))
    hashes = {
        PLAN: write_member(archive, PLAN, print_plan(plan).encode()),
        code: write_member(archive, code, library),
    }
    hashes.update(write_constants(archive, header, data))
    if shared_constants:
        hashes.update(_write_shared(archive, shared_constants))
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


def _read(section: Section, archive: zipfile.ZipFile, given: Mapping[str, SharedConstant] | None) -> Program:
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
    if fault := next(plan_faults(plan), None):
        raise ProgramFileError(PLAN, str(fault), RECOMPILE)
    is_limited = STORED in members
    # A program with states is called for a few rows, time after time, and takes as long as reading its weights: from large
    # pages that is a sixth faster than from the 4 KiB pages of a mapped file.
    is_copied = is_limited or bool(plan.states)
    header, constants = map_constants(section, members[CONSTANTS], hashes, is_copied=is_copied)
    if constants.size != constants_bytes(plan):
        raise ProgramFileError(CONSTANTS, f"{constants.size} bytes of weights, the plan needs {constants_bytes(plan)}", RECOMPILE)
    if is_limited is not bool(stored_bytes(plan)):
        raise ProgramFileError(STORED, f"the plan needs {stored_bytes(plan)} bytes of weights in the file", RECOMPILE)
    if SHARED_CONSTANTS in members:
        given = read_shared(section, members[SHARED_CONSTANTS], hashes, is_copied=is_copied)
    folder = Path(section.name).absolute().parent  # wherever the process goes
    found = _shared(plan, manifest, given, folder, is_copied=is_copied)
    if not is_limited:
        return Program(plan, library, constants, manifest, header, shared=found, folder=folder)
    storage_header, storage = _read_storage(section, members[STORED], plan, manifest, hashes)
    return Program(plan, library, constants, manifest, header, storage, storage_header, found, folder)


def _shared(
    plan: Plan, manifest: Mapping[str, object], given: Mapping[str, SharedConstant] | None, folder: Path, *, is_copied: bool
) -> dict[str, SharedConstant]:
    """The shared constants of a program by the names of their buffers: those given, else those beside its file."""
    sizes = {buffer.name: buffer.size_bytes for buffer in plan.buffers if buffer.space == SHARED}
    contents = manifest.get(CONTENTS, {})
    if not isinstance(contents, dict) or contents.keys() != sizes.keys() or not all(map(shared.is_content, contents.values())):
        raise ProgramFileError(MANIFEST, "its shared weights are not those of the plan", COPY_AGAIN)
    if given is None:
        try:
            given = shared.load(folder, {content: sizes[name] for name, content in contents.items()}, is_copied=is_copied)
        except shared.ConstantError as error:
            raise ProgramFileError(error.where, error.what, RECOMPILE) from error
    for name, content in contents.items():
        if content not in given or given[content].data.size != sizes[name]:
            raise ProgramFileError(SHARED_CONSTANTS, f"it does not hold {name}", COPY_AGAIN)
    return {name: given[content] for name, content in contents.items()}


def _read_storage(
    section: Section, info: zipfile.ZipInfo, plan: Plan, manifest: Mapping[str, object], hashes: Mapping[str, object]
) -> tuple[bytes, Storage]:
    """The safetensors header of the constants that stay in the file, and themselves, of which nothing is read yet."""
    header, data = constants_section(section, info, hashes)
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
    found = sorted(info.filename for info in infos if info.filename not in _OPTIONAL)
    is_double = len({info.filename for info in infos}) < len(infos)
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
        general = "" if "avx2" in missing else ', or with target="cpu:avx2", which this one runs, too'
        raise ProgramFileError(
            "target", f"compiled for {text}; this CPU lacks {', '.join(missing)}", f"{RECOMPILE} on this machine{general}"
        )
