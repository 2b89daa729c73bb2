"""The `.prefuse` file: one compiled program, with its weights, in one zip whose members are stored uncompressed.

    plan.txt               the Plan (plan_text)
    library.so             native code, which trusts its caller: load only files that you would run. For a GPU it is the
                           kernels alone, kernels.cubin or kernels.hsaco
    constants.safetensors  the weights; their data starts at a multiple of 64 bytes in the file and each lies there at the offset
                           that the Plan gives it, so that the file is mapped once and shared by all contexts and processes
    manifest.json          versions, target, hashes and what the compiler reports

Everything that is data is checked before use; the hash of the weights only on request, because it reads them all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import mmap
import os
import secrets
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from .device_binary import check_binary
from .errors import OptionError, ProgramFileError
from .plan import ALIGNMENT, Plan, Role, TensorType
from .plan_checker import check_plan
from .plan_text import parse_plan, print_plan
from .target import Target

FORMAT = 1
PLAN, CONSTANTS, MANIFEST = "plan.txt", "constants.safetensors", "manifest.json"
CODE = {"cpu": "library.so", "cuda": "kernels.cubin", "rocm": "kernels.hsaco"}  # the member with the native code
_HEADER = (
    "constants.safetensors header"  # its own hash, so that the place of the weights is known to be right without reading them
)
_RECOMPILE = "compile the model again"
_COPY_AGAIN = "the file is corrupt or cut short; copy it again or compile the model again"
_LARGEST_TEXT_BYTES = 1 << 26  # thirty times the plan of a model of 5,000 nodes
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, name length, extra length
_SAFETENSORS_DTYPES = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True, slots=True)
class ConstantSource:
    """A constant to write: its buffer's name, its type, its offset in the Plan, and how to get its elements when they are due."""

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
    _write(
        Path(path),
        plan,
        library,
        _safetensors_header(ordered, constants_bytes(plan)),
        _data(ordered, constants_bytes(plan)),
        manifest,
    )


def save_program(path: str | os.PathLike[str], program: Program) -> None:
    """Write a program that was read from a file to another.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    data = (program.constants.data,)
    _write(Path(path), program.plan, program.library, program.constants_header, data, program.manifest)


def constants_bytes(plan: Plan) -> int:
    """Bytes from the first constant to the end of the last."""
    ends = (buffer.size_bytes + (buffer.offset or 0) for buffer in plan.buffers if buffer.role is Role.CONSTANT)
    return max(ends, default=0)


def read_program(path: str | os.PathLike[str], *, verify: bool = False) -> Program:
    """Read and check a program file and map its weights.

    Args:
        verify: also check the hash of the weights.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one for another CPU or version.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return _read(path, file, archive, verify)
    except ProgramFileError as error:
        raise ProgramFileError(_where(path, error.where), error.what, error.fix) from error
    except FileNotFoundError as error:
        raise ProgramFileError(str(path), "no such file", "check the path") from error
    except OSError as error:
        raise ProgramFileError(
            str(path), f"cannot be read: {error.strerror or error}", "check the path and its permissions"
        ) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, LookupError, struct.error) as error:
        raise ProgramFileError(str(path), f"not a sound program file ({error})", _COPY_AGAIN) from error


def _where(path: str | os.PathLike[str], where: str) -> str:
    return str(path) if where == str(path) else f"{path}: {where}"


def _write(
    path: Path, plan: Plan, library: bytes, header: bytes, data: Iterable[memoryview | bytes], manifest: Mapping[str, object]
) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                _write_members(archive, plan, library, header, data, manifest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ProgramFileError(
            str(path), f"cannot be written: {error.strerror or error}", "check the folder, its space and rights"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_members(
    archive: zipfile.ZipFile,
    plan: Plan,
    library: bytes,
    header: bytes,
    data: Iterable[memoryview | bytes],
    manifest: Mapping[str, object],
) -> None:
    code = CODE[Target.parse(plan.target).kind]
    hashes = {
        PLAN: _write_member(archive, PLAN, [print_plan(plan).encode()]),
        code: _write_member(archive, code, [library]),
    }
    file = archive.fp
    assert file is not None
    # The zip's local header of a large member is 30 bytes, its name and 20 bytes of zip64 sizes; then come 8 bytes of length.
    start = file.tell() + _LOCAL_HEADER.size + len(CONSTANTS) + 20 + 8
    header = header.rstrip(b" ")
    header += b" " * (-(start + len(header)) % ALIGNMENT)
    header = struct.pack("<Q", len(header)) + header
    hashes[_HEADER] = hashlib.sha256(header).hexdigest()
    hashes[CONSTANTS] = _write_member(archive, CONSTANTS, _chain(header, data))
    own = {
        "format": FORMAT,
        "prefuse": _version("prefuse"),
        "tvm": _version("apache-tvm"),
        "target": plan.target,
        "sha256": hashes,
    }
    text = json.dumps({**manifest, **own}, indent=1, sort_keys=True)
    _write_member(archive, MANIFEST, [text.encode()])


def _chain(header: bytes, data: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    yield header
    yield from data


def _write_member(archive: zipfile.ZipFile, name: str, pieces: Iterable[memoryview | bytes]) -> str:
    """Write a member piece by piece, with a fixed date so that equal programs are equal files. Returns its sha256."""
    digest = hashlib.sha256()
    with archive.open(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), "w", force_zip64=True) as member:
        for piece in pieces:
            digest.update(piece)
            member.write(piece)
    return digest.hexdigest()


def _safetensors_header(sources: Sequence[ConstantSource], size_bytes: int) -> bytes:
    """The header of safetensors. The format allows no gaps, so that padding between constants is a tensor too."""
    entries: dict[str, object] = {"__metadata__": {"format": "prefuse"}}
    position = 0

    def fill(end: int) -> None:
        if end > position:
            entries[f"padding {position}"] = {"dtype": "U8", "shape": [end - position], "data_offsets": [position, end]}

    for source in sources:
        fill(source.offset)
        position = source.offset + source.type.size_bytes
        dtype = _SAFETENSORS_DTYPES.get(source.type.dtype)
        shape = list(source.type.shape) if dtype else [source.type.size_bytes]
        entries[source.name] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [source.offset, position]}
    fill(size_bytes)
    return json.dumps(entries, separators=(",", ":")).encode()


def _data(sources: Sequence[ConstantSource], size_bytes: int) -> Iterator[memoryview | bytes]:
    """The constants' bytes in the order of their offsets, with zeros between them."""
    position = 0
    for source in sources:
        assert source.offset >= position, f"constant {source.name} overlaps the one before it"
        array = np.asarray(source.load(), order="C")
        assert (array.dtype.name, array.size) == (source.type.dtype, source.type.elements), (
            f"constant {source.name} is no {source.type}"
        )
        yield bytes(source.offset - position)
        yield array.reshape(-1).view(np.uint8).data
        position = source.offset + source.type.size_bytes
    yield bytes(size_bytes - position)


def _read(path: str | os.PathLike[str], file: IO[bytes], archive: zipfile.ZipFile, verify: bool) -> Program:
    members = _members(archive)
    manifest = _read_manifest(archive.read(members[MANIFEST]))
    code = next(name for name in members if name in CODE.values())
    plan_bytes, library = archive.read(members[PLAN]), archive.read(members[code])
    hashes = manifest["sha256"]
    assert isinstance(hashes, dict)
    for name, content in ((PLAN, plan_bytes), (code, library)):
        _check_hash(name, hashlib.sha256(content).hexdigest(), hashes)
    plan = parse_plan(plan_bytes.decode())
    if plan.target != manifest["target"]:
        raise ProgramFileError(MANIFEST, f"its target {manifest['target']!r} is not the plan's, {plan.target!r}", _RECOMPILE)
    _check_target(plan.target, code, library)
    if faults := check_plan(plan):
        raise ProgramFileError(PLAN, str(faults[0]), _RECOMPILE)
    header, constants = _map_constants(file, members[CONSTANTS], hashes)
    if constants.size != constants_bytes(plan):
        raise ProgramFileError(
            CONSTANTS, f"{constants.size} bytes of weights, the plan needs {constants_bytes(plan)}", _RECOMPILE
        )
    if verify:
        digest = hashlib.sha256(struct.pack("<Q", len(header)) + header)
        digest.update(constants.data)
        _check_hash(CONSTANTS, digest.hexdigest(), hashes)
    return Program(plan, library, constants, manifest, header)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members, which are exactly ours, stored as they are, so that nothing can grow while it is read."""
    infos = archive.infolist()
    if sorted(info.filename for info in infos) not in [sorted((PLAN, code, CONSTANTS, MANIFEST)) for code in CODE.values()]:
        names = ", ".join(repr(info.filename) for info in infos[:5]) or "nothing"
        raise ProgramFileError("archive", f"it holds {names}, not the members of a program", "give a file that prefuse wrote")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise ProgramFileError(info.filename, "the member is compressed or encrypted", "give a file that prefuse wrote")
        if info.filename in (PLAN, MANIFEST) and info.file_size > _LARGEST_TEXT_BYTES:
            raise ProgramFileError(info.filename, f"{info.file_size} bytes of text", "give a file that prefuse wrote")
    return {info.filename: info for info in infos}


def _read_manifest(content: bytes) -> dict[str, object]:
    manifest = json.loads(content)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), dict):
        raise ProgramFileError(MANIFEST, "not a program's manifest", _COPY_AGAIN)
    if manifest.get("format") != FORMAT:
        what = f"a program of format {manifest.get('format')!r}; this prefuse reads format {FORMAT}"
        raise ProgramFileError(MANIFEST, what, f"{_RECOMPILE} with prefuse {_version('prefuse')}")
    if manifest.get("tvm") != _version("apache-tvm"):
        what = f"made with apache-tvm {manifest.get('tvm')!r}; installed is {_version('apache-tvm')}"
        raise ProgramFileError(MANIFEST, what, f"{_RECOMPILE}, or install that version")
    return manifest


def _check_hash(name: str, found: str, hashes: Mapping[str, object]) -> None:
    if hashes.get(name) != found:
        raise ProgramFileError(name, "its hash is not the one in the manifest", _COPY_AGAIN)


def _check_target(text: str, code: str, library: bytes) -> None:
    try:
        target = Target.parse(text)
    except OptionError as error:
        raise ProgramFileError("target", error.what, _RECOMPILE) from error
    if code != CODE[target.kind]:
        raise ProgramFileError(code, f"no code for {text}", _RECOMPILE)
    if target.is_gpu:
        check_binary(library, target, code)
    missing = target.missing_features()
    if missing:
        raise ProgramFileError(
            "target", f"compiled for {text}; this CPU lacks {', '.join(missing)}", f"{_RECOMPILE} on this machine"
        )


def _map_constants(file: IO[bytes], info: zipfile.ZipInfo, hashes: Mapping[str, object]) -> tuple[bytes, np.ndarray]:
    """The safetensors header, without its length, and the data after it as bytes mapped from the file."""
    file.seek(info.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    file.seek(start)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    data = start + 8 + length
    size = info.file_size - 8 - length
    if signature != b"PK\x03\x04" or size < 0 or data % ALIGNMENT or data + size > os.fstat(file.fileno()).st_size:
        raise ProgramFileError(CONSTANTS, "the weights are not where they should be", _COPY_AGAIN)
    header = file.read(length)
    _check_hash(_HEADER, hashlib.sha256(prefix + header).hexdigest(), hashes)
    if not size:
        return header, np.empty(0, np.uint8)
    first_page = data - data % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file.fileno(), data + size - first_page, access=mmap.ACCESS_READ, offset=first_page)
    with suppress(OSError):  # only a hint: read ahead, the first call needs them all
        mapped.madvise(mmap.MADV_WILLNEED)
    return header, np.frombuffer(mapped, np.uint8, size, data - first_page)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
