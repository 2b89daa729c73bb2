"""The `.prefuse` file of a model in stages: one zip whose members are stored uncompressed.

    stages.json            the model's inputs and outputs and its Procedure (procedure_data), and where its constants lie
    constants.safetensors  what the host reads of the model's constants, as in the file of one program
    shared.safetensors     large weights of the programs, each once, where there are any
    stage-N.prefuse        a program, as a file of its own would hold it but for these; its weights are mapped from here
    manifest.json          versions and hashes

Everything that is data is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from ..archive import (
    CONSTANTS,
    MANIFEST,
    NOT_OURS,
    RECOMPILE,
    ConstantSource,
    Section,
    archive_member,
    check_hash,
    check_members,
    constants_data,
    constants_header,
    manifest_text,
    map_constants,
    member_section,
    new_archive,
    parse_manifest,
    reading,
    version,
    write_constants,
    write_member,
)
from ..constants.shared import SharedConstant
from ..errors import OptionError, ProgramFileError
from ..executor import CompiledModel
from ..plan import ALIGNMENT, TensorType
from ..program_file import (
    SHARED_CONSTANTS,
    read_section,
    read_shared,
    write_program_members,
    write_shared,
)
from .procedure import HostStep, Procedure, ProgramStep
from .procedure_checker import check_staged
from .procedure_data import DEEPEST, DataError, ProcedureReader, ProcedureWriter, tensor_type
from .staged import StagedProgram

FORMAT = 3
STAGES = "stages.json"


def save_staged(path: str | os.PathLike[str], program: StagedProgram) -> None:
    """Write a program in stages to a file, or leave whatever was at `path` untouched.

    Raises:
        OptionError: a stage or a step is nothing that a file could hold.
        ProgramFileError: the file cannot be written.
    """
    if obstacles := list(_obstacles(program.procedure, 1)):
        fix = "keep the ONNX file, whose compiled stages are in the cache, or make the shapes of its inputs static"
        raise OptionError("save", "; ".join(obstacles[:3]), fix)
    writer = ProcedureWriter()
    data = writer.model(program)
    entries, sources, size_bytes = _placed(writer.constants)
    text = json.dumps({"model": data, "constants": entries}, separators=(",", ":")).encode()
    with new_archive(Path(path)) as archive:
        hashes = {STAGES: write_member(archive, STAGES, text)}
        hashes.update(write_constants(archive, constants_header(sources, size_bytes), constants_data(sources, size_bytes)))
        programs = [stage.program for stage in writer.programs]
        if any(one.shared for one in programs):
            hashes.update(write_shared(archive, programs))
        for number, one in enumerate(programs, 1):
            with archive_member(archive, _stage(number)) as inner:
                hashes[_stage(number)] = write_program_members(inner, one, has_shared=False)
        manifest = {"format": FORMAT, "name": program.name, "prefuse": version("prefuse"), "sha256": hashes}
        write_member(archive, MANIFEST, manifest_text(manifest))


def _obstacles(procedure: Procedure, depth: int) -> Iterator[str]:
    """Why no file could hold a procedure that is inside `depth` - 1 others."""
    if depth > DEEPEST:
        yield f"more than {DEEPEST} branches and loops are in one another"
        return
    for step in procedure.steps:
        for body in step.bodies:
            yield from _obstacles(body, depth + 1)
        if isinstance(step, HostStep) and step.is_reference:
            yield f"{step.source} is computed by onnx.reference, which needs onnx and the node"
        elif isinstance(step, ProgramStep) and isinstance(step.program, StagedProgram):
            yield from _obstacles(step.program.procedure, depth + 1)
        elif isinstance(step, ProgramStep) and not isinstance(step.program, CompiledModel):
            yield f"{step.name} is compiled for the shapes of each run, which needs the compiler"


# ------------------------------------------------------------------------------------------------ constants of the host


def _placed(constants: Sequence[np.ndarray]) -> tuple[list[dict[str, object]], list[ConstantSource], int]:
    """What stages.json says of each constant, those that the member of the constants holds, and its size in bytes."""
    entries: list[dict[str, object]] = []
    sources: list[ConstantSource] = []
    end = 0
    for number, array in enumerate(constants):
        if array.dtype == object:
            entries.append({"shape": array.shape, "strings": [str(item) for item in array.flat]})
            continue
        offset = end + -end % ALIGNMENT
        kind = TensorType(array.shape, array.dtype.name)
        entries.append({"type": [kind.shape, kind.dtype], "offset": offset})
        sources.append(ConstantSource(str(number), kind, offset, partial(np.asarray, array)))
        end = offset + kind.size_bytes
    return entries, sources, end


def _constant(data: object, mapped: np.ndarray) -> np.ndarray:
    """The constant that an entry describes. Raises DataError."""
    if isinstance(data, dict) and data.keys() == {"shape", "strings"}:
        (shape, _), strings = tensor_type([data["shape"], "object"], "object"), data["strings"]
        if not isinstance(strings, list) or len(strings) != prod(shape) or not all(isinstance(item, str) for item in strings):
            raise DataError("strings that do not fill their shape")
        return np.array(strings, object).reshape(shape)
    if not isinstance(data, dict) or data.keys() != {"type", "offset"}:
        raise DataError("a constant without type and offset")
    kind, offset = TensorType(*tensor_type(data["type"])), data["offset"]
    if type(offset) is not int or offset < 0 or offset % ALIGNMENT or offset + kind.size_bytes > mapped.size:
        raise DataError(f"a constant {kind} that is not in {mapped.size} bytes")
    return mapped[offset : offset + kind.size_bytes].view(kind.dtype).reshape(kind.shape)


# ------------------------------------------------------------------------------------------------------------- reading


def read_stages(section: Section, archive: zipfile.ZipFile) -> StagedProgram:
    """Read and check a program in stages, map its weights and load its native code. Its faults are errors of all kinds, which
    `reading` translates.
    """
    members = {info.filename: info for info in archive.infolist()}
    fixed = {STAGES, CONSTANTS, MANIFEST, *([SHARED_CONSTANTS] if SHARED_CONSTANTS in members else [])}
    count = len(archive.infolist()) - len(fixed)
    stages = [_stage(number) for number in range(1, count + 1)]
    if members.keys() != {*fixed, *stages} or len(members) != count + len(fixed):
        raise ProgramFileError("archive", "it does not hold the members of a model in stages", NOT_OURS)
    check_members(archive, (STAGES, MANIFEST))
    _, hashes = parse_manifest(archive.read(members[MANIFEST]), "a model in stages", FORMAT)
    text = archive.read(members[STAGES])
    check_hash(STAGES, hashlib.sha256(text).hexdigest(), hashes)
    _, mapped = map_constants(section, members[CONSTANTS], hashes)
    shared = read_shared(section, members[SHARED_CONSTANTS], hashes) if SHARED_CONSTANTS in members else {}
    programs = [_program(name, member_section(section, members[name]), hashes, shared) for name in stages]
    return _model(json.loads(text), programs, mapped)


def _program(name: str, section: Section, hashes: Mapping[str, object], shared: Mapping[str, SharedConstant]) -> CompiledModel:
    with reading(name):
        program = read_section(section, shared)
        check_hash(MANIFEST, hashlib.sha256(manifest_text(program.manifest)).hexdigest(), {MANIFEST: hashes.get(name)})
        return CompiledModel(program)


def _model(data: object, programs: Sequence[CompiledModel], mapped: np.ndarray) -> StagedProgram:
    try:
        if not isinstance(data, dict) or data.keys() != {"model", "constants"} or not isinstance(data["constants"], list):
            raise DataError("it holds no model")
        constants = [_constant(entry, mapped) for entry in data["constants"]]
        model = ProcedureReader(programs, constants).model(data["model"])
    except DataError as error:
        raise ProgramFileError(STAGES, str(error), RECOMPILE) from error
    if fault := next(check_staged(model), None):
        raise ProgramFileError(STAGES, fault, RECOMPILE)
    return model


def _stage(number: int) -> str:
    return f"stage-{number}.prefuse"
