"""The `.prefuse` file of a text generator: one zip whose members are stored uncompressed.

generator.json         its name, limits and notes, and how many tokens each program takes
library.so             the native code beside the programs
shared.safetensors     large weights of the programs, each once, where there are any
tokens-N.prefuse       the program that takes N tokens of each sequence, as a file of its own would hold it but for these
manifest.json          versions and hashes
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..archive import (
    COPY_AGAIN,
    MANIFEST,
    NOT_OURS,
    RECOMPILE,
    Section,
    archive_member,
    check_hash,
    check_members,
    manifest_text,
    member_section,
    new_archive,
    parse_manifest,
    reading,
    version,
    write_member,
)
from ..constants.shared import SharedConstant
from ..errors import ProgramFileError
from ..executor import CompiledModel
from ..program_file import SHARED_CONSTANTS, read_section, read_shared, write_program_members, write_shared
from ..target import Target
from .loop import GenerationLibrary
from .session import Limits

FORMAT = 2
GENERATOR, LIBRARY = "generator.json", "library.so"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a generator is made of: its programs by the number of tokens that they take of each sequence, that of 1 for steps; and
    notes of what makes texts slow."""

    name: str
    limits: Limits
    programs: Mapping[int, CompiledModel]
    library: GenerationLibrary
    notes: tuple[str, ...] = ()


def save_parts(path: str | os.PathLike[str], parts: Parts) -> None:
    """Write a generator to a file, or leave whatever was at `path` untouched. Raises ProgramFileError."""
    programs = parts.programs
    described = {"name": parts.name, "limits": asdict(parts.limits), "tokens": list(programs), "notes": parts.notes}
    text = json.dumps(described)
    with new_archive(Path(path)) as archive:
        hashes = {
            GENERATOR: write_member(archive, GENERATOR, text.encode()),
            LIBRARY: write_member(archive, LIBRARY, parts.library.content),
        }
        if any(one.program.shared for one in programs.values()):
            hashes.update(write_shared(archive, [one.program for one in programs.values()]))
        for count, program in programs.items():
            with archive_member(archive, _member(count)) as inner:
                hashes[_member(count)] = write_program_members(inner, program.program, has_shared=False)
        manifest = {"format": FORMAT, "name": parts.name, "prefuse": version("prefuse"), "sha256": hashes}
        write_member(archive, MANIFEST, manifest_text(manifest))


def read_parts(path: str | os.PathLike[str]) -> Parts:
    """Read and check a file, map the weights and load the native code, which runs with your rights.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one for another CPU or version.
    """
    with reading(path), open(path, "rb") as file:
        section = Section.whole(file)
        with zipfile.ZipFile(section) as archive:
            return _read(section, archive)


def _read(section: Section, archive: zipfile.ZipFile) -> Parts:
    members = {info.filename: info for info in archive.infolist()}
    if not {GENERATOR, LIBRARY, MANIFEST} <= members.keys():
        raise ProgramFileError("archive", "it does not hold the members of a generator", "prefuse.load reads programs")
    check_members(archive, (GENERATOR, MANIFEST))
    _, hashes = parse_manifest(archive.read(MANIFEST), "a generator", FORMAT)
    text, content = archive.read(GENERATOR), archive.read(LIBRARY)
    for member, found in ((GENERATOR, text), (LIBRARY, content)):
        check_hash(member, hashlib.sha256(found).hexdigest(), hashes)
    told = json.loads(text)
    match told:
        case {"name": str(name), "tokens": list(tokens), "limits": {"ends": list(ends), **most}, "notes": list(notes)}:
            counts = list(map(_number, tokens))
            numbers = {limit: _number(most.get(limit)) for limit in ("batch", "max_tokens", "vocabulary", "scratch")}
            limits = Limits(**numbers, ends=tuple(map(_number, ends)))
        case _:
            raise ProgramFileError(GENERATOR, "it does not describe a generator", COPY_AGAIN)
    has_shared = SHARED_CONSTANTS in members
    fixed = {GENERATOR, LIBRARY, MANIFEST, *([SHARED_CONSTANTS] if has_shared else [])}
    if members.keys() != {*fixed, *map(_member, counts)} or 1 not in counts:
        raise ProgramFileError("archive", "it does not hold the members of a generator", NOT_OURS)
    shared = read_shared(section, members[SHARED_CONSTANTS], hashes, is_copied=True) if has_shared else {}
    sections = {count: member_section(section, members[_member(count)]) for count in counts}
    programs = {count: _program(_member(count), one, hashes, shared) for count, one in sections.items()}
    for count, program in programs.items():
        shapes = [port.type.shape for port in (*program.inputs, *program.outputs)]
        if shapes != [(limits.batch, count), (limits.batch,), (limits.batch, limits.vocabulary)]:
            raise ProgramFileError(_member(count), "it is no program of this generator", RECOMPILE)
    threads = Target.parse(programs[1].plan.target).threads
    return Parts(name, limits, programs, GenerationLibrary(content, threads), tuple(map(str, notes)))


def _program(name: str, section: Section, hashes: Mapping[str, object], shared: Mapping[str, SharedConstant]) -> CompiledModel:
    with reading(name):
        program = read_section(section, shared)
        check_hash(MANIFEST, hashlib.sha256(manifest_text(program.manifest)).hexdigest(), {MANIFEST: hashes.get(name)})
        return CompiledModel(program)


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise ProgramFileError(GENERATOR, f"{value!r} is no number", COPY_AGAIN)
    return value


def _member(count: int) -> str:
    return f"tokens-{count}.prefuse"
