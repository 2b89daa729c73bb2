"""Runs the AMX instructions of this process in software, on machines without the unit: see amx_emulator.c."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")
_SOURCE = Path(__file__).with_suffix(".c")


def build_emulator(folder: Path) -> ctypes.CDLL:
    """The compiled emulator; the test is skipped where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("the AMX emulator needs a C compiler, which is absent")
    library = folder / "amx_emulator.so"
    command = [compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@contextmanager
def emulated_amx(emulator: ctypes.CDLL) -> Iterator[dict[str, int]]:
    """AMX instructions work inside; afterwards the result says how many of each ran."""
    counts: dict[str, int] = {}
    array = (ctypes.c_uint * len(INSTRUCTIONS))()
    emulator.install()
    try:
        yield counts
    finally:
        emulator.uninstall(array)
        counts.update(zip(INSTRUCTIONS, array, strict=True))
