"""Runs the AMX instructions of this process: by the unit where there is one, else in software (amx_emulator.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefuse.runtime.hardware import tile_state
from prefuse.runtime.target import Target, host_cpu_flags

# In the order of the emulator's counts.
INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps", "tdpbusd", "tdpbssd", "tdpbsud")
AMX = Target("cpu", "amx", 2)
_SOURCE = Path(__file__).with_suffix(".c")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """The compiled emulator, None where this CPU has the unit; the test is skipped where there is no C compiler."""
    if missing := [flag for flag in AMX.missing_features() if not flag.startswith("amx")]:
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    if "amx_tile" in host_cpu_flags() and not tile_state.refusal():  # which asks the system for leave
        return None
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("the AMX emulator needs a C compiler, which is absent")
    library = tmp_path_factory.mktemp("amx") / "amx_emulator.so"
    command = [compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@contextmanager
def running_amx(emulator: ctypes.CDLL | None) -> Iterator[dict[str, int] | None]:
    """AMX instructions work inside; afterwards the result says how many of each ran. It is None where the CPU ran them, which
    counts none."""
    if emulator is None:
        yield None
        return
    counts: dict[str, int] = {}
    array = (ctypes.c_uint * len(INSTRUCTIONS))()
    emulator.install()
    try:
        yield counts
    finally:
        emulator.uninstall(array)
        counts.update(zip(INSTRUCTIONS, array, strict=True))
