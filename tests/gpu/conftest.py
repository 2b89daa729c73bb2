"""Fixtures of the GPU tests."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from prefuse.compiler.lowering.gpu.simulator import library

from .simulator import simulated_gpu

__all__ = ["simulated_gpu"]


@pytest.fixture(scope="session", autouse=True)
def precompiled_header(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """g++ reads the simulator's header once for all kernels of these tests: half of the time of a small one."""
    if not (compiler := library.find_compiler()):
        yield
        return
    folder = tmp_path_factory.mktemp("simulator") / "include"
    shutil.copytree(library._INCLUDE, folder)
    header = str(folder / "cudasim.h")
    subprocess.run(
        [compiler, *library._FLAGS, library._KERNELS, f"-I{folder}", "-x", "c++-header", header, "-o", f"{header}.gch"],
        check=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_INCLUDE", folder)
        yield
