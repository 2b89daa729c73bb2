"""Runs the AMX instructions of this process in software, on machines without the unit: see amx_emulator.c."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefuse.runtime.target import Target, host_cpu_flags

# In the order of the emulator's counts.
INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps", "tdpbusd", "tdpbssd")
AMX = Target("cpu", "amx", 2)
_SOURCE = Path(__file__).with_suffix(".c")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled emulator; the test is skipped where nothing is to emulate, or there is no C compiler."""
    if missing := [flag for flag in AMX.missing_features() if not flag.startswith("amx")]:
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    if "amx_tile" in host_cpu_flags():
        pytest.skip("this CPU has AMX: nothing to emulate")
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("the AMX emulator needs a C compiler, which is absent")
    library = tmp_path_factory.mktemp("amx") / "amx_emulator.so"
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
