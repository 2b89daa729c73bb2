"""CUDA C, or LLVM IR for AMD's GPUs, as TVM writes them, to a shared library of the simulator.

It has a function sim_NAME(blocks, threads, shared bytes, arguments) a kernel, the number of its arguments, count_NAME, and
how many of them, the last, are tensor maps, maps_NAME (CUDA C). cooperates_NAME is 1 where its blocks wait for each other.
"""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from tempfile import mkdtemp

import tvm

from .....kernels.codegen.grids import GRID_BARRIER
from .....runtime.errors import CompileError
from .....runtime.temporary_folder import temporary_folder, write_temporary
from .amd_ir import host_ir
from .ptx import simulate_instructions

_INCLUDE = Path(__file__).with_name("include")
_SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+(?:, 1)?\) )?(\w+)\(([^)]*)\) \{')
_STATIC = re.compile(r"__shared__ alignas\((\d+)\) (\w+(?: \w+)?) (\w+)\[(\d+)\];")
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) (\w+(?: \w+)?) (\w+)\[\];")
_QUALIFIERS = re.compile(r"__restrict__|__grid_constant__ |const (?=__grid_constant__)")
_MEETING = re.compile(r"__syncthreads|__syncwarp|__shfl|tvm_builtin_|prefuse_grid_barrier")
_BYTES = {"char": 1, "uchar": 1, "signed char": 1, "bool": 1, "short": 2, "ushort": 2, "half": 2, "nv_bfloat16": 2}
_BYTES |= {"int": 4, "uint": 4, "float": 4, "int64_t": 8, "uint64_t": 8, "double": 8, "long long": 8}
_FLAGS = ("-std=c++17", "-O0", "-w", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off")
_KERNELS = "-DSIM_KERNELS"  # which are linked with the simulator
_PRECOMPILED_FROM = 3  # libraries of a process before this one: the header takes as long as three of them gain by it
_libraries = count()


def find_compiler() -> str:
    """Path of g++; empty if there is none."""
    return shutil.which("g++") or ""


@cache
def simulated_library(source: str) -> bytes:
    """The library of CUDA C.

    Raises:
        CompileError: this machine has no g++, or the source has what the simulator does not know.
    """
    _need_compiler()
    with temporary_folder() as folder:
        code, simulator, library = (folder / name for name in ("kernels.cpp", "simulator.o", "kernels.so"))
        write_temporary(code, simulated_source(source).encode())
        write_temporary(simulator, _simulator("cudasim.h"))
        precompiled = [f"-I{_precompiled_header()}"] if next(_libraries) >= _PRECOMPILED_FROM else []
        _run_compiler([*precompiled, *_flags(), _KERNELS, "-shared", str(code), str(simulator), "-o", str(library)])
        return library.read_bytes()


@cache
def simulated_rocm_library(source: str, lanes: int) -> bytes:
    """The library of LLVM IR for a GPU of AMD whose wavefronts have so many lanes. TVM's LLVM compiles it for the host.

    Raises:
        CompileError: this machine has no g++, or the source has what the simulator does not know.
    """
    _need_compiler()
    with temporary_folder() as folder:
        code, kernels, simulator, library = (folder / name for name in ("kernels.ll", "kernels.o", "simulator.o", "kernels.so"))
        write_temporary(code, host_ir(source).encode())
        tvm.runtime.load_module(str(code)).write_to_file(str(kernels), "o")
        write_temporary(simulator, _simulator("amdsim.h", lanes))
        _run_compiler(["-shared", str(kernels), str(simulator), "-lm", "-o", str(library)])
        return library.read_bytes()


@cache
def _simulator(header: str, lanes: int = 32) -> bytes:
    """The object file of what kernels call."""
    with temporary_folder() as folder:
        code, made = folder / "simulator.cpp", folder / "simulator.o"
        write_temporary(code, f'#include "{header}"\n'.encode())
        _run_compiler([*_flags(), "-O2", f"-DSIM_WARP={lanes}", "-c", str(code), "-o", str(made)])
        return made.read_bytes()


@cache
def _precompiled_header() -> str:
    """A folder, as long as this process lives, of the header of kernels as g++ reads it fastest, which it then takes first."""
    folder = Path(mkdtemp(prefix="prefuse-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _run_compiler([*_flags(), _KERNELS, "-x", "c++-header", str(_INCLUDE / "cudasim.h"), "-o", str(folder / "cudasim.h.gch")])
    return str(folder)


def _flags() -> tuple[str, ...]:
    return *_FLAGS, f"-I{_INCLUDE}"


def _need_compiler() -> None:
    if not find_compiler():
        raise CompileError("simulator", "it needs g++, which this machine lacks", "apt-get install g++")


def _run_compiler(arguments: Sequence[str]) -> None:
    result = subprocess.run([find_compiler(), *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompileError("simulator", f"g++ failed: {result.stderr[:2000]}", "report it")


def simulated_source(source: str) -> str:
    """The C++ of CUDA C."""
    starts = [one.start() for one in _SIGNATURE.finditer(source)]
    head = source[: starts[0] if starts else None]
    functions: list[str] = []
    for begin, end in pairwise([*starts, len(source)]):
        functions += _function(source[begin:end])
    return "\n".join(['#include "cudasim.h"', simulate_instructions(head), *functions, ""])


def _dynamic(array: re.Match[str]) -> str:
    """The array of the bytes that the launch asks for. Bytes are for instructions of PTX, which take addresses."""
    kind, name = array[1], array[2]
    return f"uchar* {name} = (uchar*)sim::shared.data();" if kind == "uchar" else f"sim::Array<{kind}> {name}{{0}};"


def _function(text: str) -> Iterator[str]:
    """One kernel, its shared arrays in the simulator's memory, and what launches it.

    Arrays of fixed size lie behind the bytes that the launch asks for.
    """
    found = _SIGNATURE.match(text)
    assert found is not None
    offset = 0

    def placed(array: re.Match[str]) -> str:
        nonlocal offset
        alignment, kind, name, elements = int(array[1]), array[2], array[3], int(array[4])
        begin = -(-offset // alignment) * alignment
        offset = begin + elements * _BYTES[kind]
        return f"sim::Array<{kind}> {name}{{sim::dynamic_bytes + {begin}}};"

    body = _STATIC.sub(placed, text)
    yield _DYNAMIC.sub(_dynamic, body)
    types = [_QUALIFIERS.sub("", one.strip().rpartition(" ")[0]) for one in found[2].split(",")]
    arguments = ", ".join(f"*({kind}*)a[{position}]" for position, kind in enumerate(types))
    meets = str(bool(_MEETING.search(text))).lower()
    cooperates = f"{GRID_BARRIER}(" in body
    call = (
        f"sim::launch(blocks, threads, bytes, {offset}, {meets}, {str(cooperates).lower()}, [=] {{ {found[1]}({arguments}); }})"
    )
    yield f"SIM_EXPORT int sim_{found[1]}(unsigned blocks, unsigned threads, unsigned bytes, void** a) {{ return {call}; }}"
    yield f"SIM_EXPORT const int count_{found[1]} = {len(types)};"
    yield f"SIM_EXPORT const int cooperates_{found[1]} = {int(cooperates)};"
    yield f"SIM_EXPORT const int maps_{found[1]} = {sum('CUtensorMap' in one for one in types)};"
