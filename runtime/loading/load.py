"""Loading `.prefuse` files."""

from __future__ import annotations

import os
import zipfile
from typing import TypeAlias

from ..archive import Section, reading
from ..errors import ProgramFileError
from ..executor import CompiledModel
from ..generation.generator_file import GENERATOR
from ..program_file import read_section
from ..program_set.program_set import ProgramSet
from ..program_set.program_set_file import PROGRAMS, read_set
from ..staged.staged_file import STAGES, read_stages
from ..staged.staged_model import StagedModel

Loaded: TypeAlias = CompiledModel | StagedModel | ProgramSet


def holds_generator(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of `load_generator`. Raises ProgramFileError if it is no archive."""
    with reading(path), open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        return GENERATOR in archive.namelist()


def load(path: str | os.PathLike[str]) -> Loaded:
    """Load a `.prefuse` file of one program, of a model in stages, or of programs for several sizes. They hold native code
    that runs with your rights.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one for another CPU or version.
    """
    with reading(path), open(path, "rb") as file:
        section = Section.whole(file)
        with zipfile.ZipFile(section) as archive:
            names = archive.namelist()
            if STAGES in names:
                return StagedModel(read_stages(section, archive))
            if PROGRAMS in names:
                return ProgramSet(*read_set(section, archive))
            if GENERATOR in names:
                raise ProgramFileError("archive", "it holds a text generator", "use prefuse.load_generator")
        return CompiledModel(read_section(section))
