"""Programs without their weights, small enough to carry: what takes their place are seeded numbers in the packed form."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from pathlib import Path

import numpy as np

from ...runtime.archive import ConstantSource
from ...runtime.plan import SHARED, Buffer, Role, TensorType
from ...runtime.plan_text import parse_plan, print_plan
from ...runtime.program_file import Program, SharedSource, write_program

_PLAN, _CODE, _MANIFEST, _HEADER = "plan.txt", "code.bin", "manifest.json", "constants.json"
_MEMBERS_OF_ARCHIVES = ("format", "hashes", "target", "contents", "stored")
_SMALL = 0x3C80  # the exponent of 2 ** -6 in bfloat16, and in the upper half of a float32


def strip_program(program: Program, path: Path) -> None:
    """Write all of a program but its constants to a compressed zip."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_PLAN, print_plan(program.plan))
        archive.writestr(_CODE, program.library)
        archive.writestr(_MANIFEST, json.dumps(dict(program.manifest)))
        archive.writestr(_HEADER, program.constants_header)


def fill_program(stripped: Path, path: Path) -> None:
    """Write a program file of what `strip_program` wrote, with other weights: the same for the same program.

    Floating-point numbers of any type, also where they are terms or in another order, are between 2 ** -6 and 2 ** -5 of either
    sign (float16: about 1); integers are zero, so that indices are in bounds.
    """
    with zipfile.ZipFile(stripped) as archive:
        plan, code = parse_plan(archive.read(_PLAN).decode()), archive.read(_CODE)
        manifest, header = json.loads(archive.read(_MANIFEST)), json.loads(archive.read(_HEADER))
    generator = np.random.default_rng(0)
    own, shared = list[ConstantSource](), list[SharedSource]()
    for buffer in plan.buffers:
        if buffer.role is not Role.CONSTANT:
            continue
        load = partial(_numbers, generator, buffer, str(header.get(buffer.name, {}).get("dtype", "U16")))
        if buffer.space == SHARED:
            content = str(manifest["contents"][buffer.name])
            shared.append(SharedSource(buffer.name, content, buffer.size_bytes, load))
        else:
            assert buffer.offset is not None
            own.append(ConstantSource(buffer.name, TensorType((buffer.size_bytes,), "uint8"), buffer.offset, load))
    kept = {name: value for name, value in manifest.items() if name not in _MEMBERS_OF_ARCHIVES}
    write_program(path, plan, code, own, kept, shared)


def _numbers(generator: np.random.Generator, buffer: Buffer, dtype: str) -> np.ndarray:
    """The bytes of a constant."""
    if dtype[0] in "IB" and dtype != "BF16":
        return np.zeros(buffer.size_bytes, np.uint8)
    bits = generator.integers(0, 1 << 16, -(-buffer.size_bytes // 2), dtype=np.uint16)
    return ((bits & 0x807F) | _SMALL).view(np.uint8)[: buffer.size_bytes]
