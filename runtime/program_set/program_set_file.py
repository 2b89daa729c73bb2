"""The `.prefuse` file of several programs of one model: one zip whose members are stored uncompressed.

    programs.json          the name of the model, and of each program which sizes are padded to its own, and how
    shared.safetensors     large weights of the programs, each once, where there are any
    sizes-N.prefuse        a program, as a file of its own would hold it but for these; its weights are mapped from here
    manifest.json          versions and hashes

Everything that is data is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..archive import (
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
from ..symbolic.dims import Dim
from ..symbolic.size_text import evaluator
from .member import Member, differences
from .padding import Cut, Padding

FORMAT = 1
PROGRAMS = "programs.json"


class _DataError(Exception):
    """What programs.json says is nothing that a set is."""


def save_set(path: str | os.PathLike[str], name: str, members: Sequence[Member]) -> None:
    """Write the programs of a set to a file, or leave whatever was at `path` untouched.

    Raises:
        ProgramFileError: the file cannot be written.
    """
    text = json.dumps({"name": name, "programs": [_data(member) for member in members]}, separators=(",", ":"))
    programs = [member.model.program for member in members]
    with new_archive(Path(path)) as archive:
        hashes = {PROGRAMS: write_member(archive, PROGRAMS, text.encode())}
        if any(one.shared for one in programs):
            hashes.update(write_shared(archive, programs))
        for number, one in enumerate(programs, 1):
            with archive_member(archive, _member(number)) as inner:
                hashes[_member(number)] = write_program_members(inner, one, has_shared=False)
        manifest = {"format": FORMAT, "name": name, "prefuse": version("prefuse"), "sha256": hashes}
        write_member(archive, MANIFEST, manifest_text(manifest))


def read_set(section: Section, archive: zipfile.ZipFile) -> tuple[str, list[Member]]:
    """Read and check the name and the programs of a set and map their weights. Faults are errors of all kinds (`reading`)."""
    members = {info.filename: info for info in archive.infolist()}
    fixed = {PROGRAMS, MANIFEST, *([SHARED_CONSTANTS] if SHARED_CONSTANTS in members else [])}
    names = [_member(number) for number in range(1, len(archive.infolist()) - len(fixed) + 1)]
    if members.keys() != {*fixed, *names} or not names:
        raise ProgramFileError("archive", "it does not hold the members of a set of programs", NOT_OURS)
    check_members(archive, (PROGRAMS, MANIFEST))
    _, hashes = parse_manifest(archive.read(members[MANIFEST]), "a set of programs", FORMAT)
    text = archive.read(members[PROGRAMS])
    check_hash(PROGRAMS, hashlib.sha256(text).hexdigest(), hashes)
    shared = read_shared(section, members[SHARED_CONSTANTS], hashes) if SHARED_CONSTANTS in members else {}
    models = [_program(name, member_section(section, members[name]), hashes, shared) for name in names]
    try:
        name, told = _told(json.loads(text), len(models))
        found = [_parsed(model, one) for model, one in zip(models, told, strict=True)]
        if fault := differences(found):
            raise _DataError(fault)
    except _DataError as error:
        raise ProgramFileError(PROGRAMS, str(error), RECOMPILE) from error
    return name, found


def _program(name: str, section: Section, hashes: Mapping[str, object], shared: Mapping[str, SharedConstant]) -> CompiledModel:
    with reading(name):
        program = read_section(section, shared)
        check_hash(MANIFEST, hashlib.sha256(manifest_text(program.manifest)).hexdigest(), {MANIFEST: hashes.get(name)})
        return CompiledModel(program)


def _member(number: int) -> str:
    return f"sizes-{number}.prefuse"


# ------------------------------------------------------------------------------------------------- what is padded, as JSON


def _data(member: Member) -> object:
    if member.padding is None:
        return None
    return {
        "padded": [[dim.name, dim.least, dim.greatest, dim.multiple] for dim in member.padded],
        "inputs": [sorted(axes.items()) for axes in member.padding.inputs],
        "outputs": [sorted([cut.name, cut.axis, cut.inner] for cut in cuts) for cuts in member.padding.outputs],
    }


def _told(data: object, count: int) -> tuple[str, list[object]]:
    """The name of the model, and what is said of each program."""
    if not isinstance(data, dict) or data.keys() != {"name", "programs"} or not isinstance(data["name"], str):
        raise _DataError("it holds no set of programs")
    told = data["programs"]
    if not isinstance(told, list) or len(told) != count:
        raise _DataError(f"it does not tell of {count} programs")
    return data["name"], told


def _parsed(model: CompiledModel, data: object) -> Member:
    """A program and what is padded for it, as its own inputs and outputs allow. Raises _DataError."""
    if data is None:
        return Member(model)
    if not isinstance(data, dict) or data.keys() != {"padded", "inputs", "outputs"}:
        raise _DataError("a program without padded sizes, inputs and outputs")
    dims = tuple(_dim(one) for one in _rows(data["padded"], (str, int, int, int)))
    inputs: list[dict[int, str]] = [dict(_rows(axes, (int, str))) for axes in _lists(data["inputs"], len(model.inputs))]
    cuts = [frozenset(Cut(*cut) for cut in _rows(one, (str, int, str))) for one in _lists(data["outputs"], len(model.outputs))]
    if not dims or {dim.name for dim in dims} & {dim.name for dim in model.plan.dims}:
        raise _DataError("padded sizes that are none")
    _check_inputs(model, dims, inputs)
    _check_cuts(model, dims, inputs, cuts)
    return Member(model, dims, Padding(tuple(inputs), tuple(cuts)))


def _check_inputs(model: CompiledModel, dims: Sequence[Dim], inputs: Sequence[Mapping[int, str]]) -> None:
    """The greatest of a padded size is that of the program, in each axis that has it."""
    sizes = {dim.name: dim.sizes[-1] for dim in dims}
    found = set()
    for port, axes in zip(model.inputs, inputs, strict=True):
        for axis, name in axes.items():
            if not 0 <= axis < len(port.type.shape) or sizes.get(name, port.type.shape[axis]) != port.type.shape[axis]:
                raise _DataError(f"{name}, which input {port.name} does not have along axis {axis}")
            found.add(name)
    if missing := sizes.keys() - found:
        raise _DataError(f"no input has {', '.join(sorted(missing))}")


def _check_cuts(
    model: CompiledModel, dims: Sequence[Dim], inputs: Sequence[Mapping[int, str]], cuts: Sequence[frozenset[Cut]]
) -> None:
    """Each axis of an output that is cut consists of whole parts."""
    greatest = {dim.name: dim.sizes[-1] for dim in dims}
    for port, axes in zip(model.inputs, inputs, strict=True):
        for axis, name in axes.items():
            greatest.setdefault(name, port.type.shape[axis])
    padded = {dim.name for dim in dims}
    for port, some in zip(model.outputs, cuts, strict=True):
        for cut in some:
            try:
                inner = evaluator(cut.inner)(greatest)
            except (NameError, ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
                raise _DataError(f"a size that cannot be computed: {error}") from error
            is_axis = cut.name in padded and 0 <= cut.axis < len(port.type.shape) and inner > 0
            if not is_axis or port.type.shape[cut.axis] % (inner * greatest[cut.name]):
                raise _DataError(f"{cut.name}, which output {port.name} does not have along axis {cut.axis}")


def _dim(row: Sequence[Any]) -> Dim:
    name, least, greatest, multiple = row
    if not (name.isidentifier() and 1 <= least <= greatest and multiple >= 1 and greatest % multiple == 0):
        raise _DataError(f"no range of sizes: {row}")
    return Dim(name, least, greatest, multiple)


def _lists(data: object, count: int) -> list[object]:
    if not isinstance(data, list) or len(data) != count:
        raise _DataError(f"no list of {count}")
    return data


def _rows(data: object, kinds: tuple[type, ...]) -> list[list[Any]]:
    """Lists of values of these types."""
    if not isinstance(data, list):
        raise _DataError("no list")
    for row in data:
        if not isinstance(row, list) or [type(one) for one in row] != list(kinds):
            raise _DataError(f"{row!r} where {', '.join(kind.__name__ for kind in kinds)} should be")
    return data
