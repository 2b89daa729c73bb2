"""The programs of ONNX files seen before, found by the bytes of the files, without parsing them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from .builder import Builder
from .digest import arrays_digest


class FileMemory:
    """Maps the content of an ONNX file and of its external data to the key of a program.

    Two notes lead there, because only parsing tells which files hold external data: the file's digest gives their names, and
    the digest of all of them gives the key.
    """

    def __init__(self, path: Path, builder: Builder) -> None:
        """Read the file's bytes, mapped.

        Raises:
            OSError: it cannot be read.
        """
        self._path = path
        self._builder = builder
        self._digest = _files_digest([path])

    def recall(self) -> str | None:
        """The key of the program that this content became; None if it is new, or has symbolic dimensions."""
        cache = self._builder.cache
        names = None if cache is None else cache.note(self._names_key())
        if cache is None or names is None:
            return None
        external = names.get("external")
        if not isinstance(external, list) or not all(isinstance(name, str) for name in external):
            return None
        try:
            note = cache.note(self._content_key(external))
        except OSError:
            return None
        program = None if note is None else note.get("program")
        return program if isinstance(program, str) else None

    def remember(self, external: Sequence[str], program: str) -> None:
        """Note the key of the program, and the names of the files with external data, relative to the model's folder."""
        if self._builder.cache is not None:
            self._builder.cache.write_note(self._names_key(), {"external": list(external)})
            self._builder.cache.write_note(self._content_key(external), {"program": program})

    def _names_key(self) -> str:
        return self._builder.key("external data", self._digest)

    def _content_key(self, external: Sequence[str]) -> str:
        return self._builder.key("file", self._digest, _files_digest([self._path.parent / name for name in external]))


def _files_digest(paths: Sequence[Path]) -> str:
    return arrays_digest((str(index), partial(_mapped, path)) for index, path in enumerate(paths))


def _mapped(path: Path) -> np.ndarray:
    """The bytes of a file."""
    if os.path.getsize(path) == 0:  # which cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")
