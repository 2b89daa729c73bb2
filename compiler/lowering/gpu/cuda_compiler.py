"""CUDA C to a cubin: by nvcc of a CUDA toolkit, or by NVRTC, a library that PyPI has too. Neither needs a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ....runtime.errors import CompileError
from ....runtime.temporary_folder import temporary_folder, write_temporary

_TOOLKIT = Path("/usr/local/cuda")
_FIX = "install a CUDA toolkit, or pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl"
_OPTIONS = ("-std=c++17", "-w")  # fast-math stays off: NaN, infinities and denormals are what ONNX says


def architecture_for(source: str, level: str) -> str:
    """What CUDA C is compiled for: a level, or where the source names such instructions its variant that no later GPU runs."""
    return f"{level}a" if level == "sm_90" and ("wgmma." in source or "setmaxnreg." in source) else level


def compile_cuda(source: str, architecture: str) -> bytes:
    """The cubin of CUDA C for an architecture such as "sm_90".

    Raises:
        CompileError: this machine has neither compiler, or the compiler does not know the architecture.
    """
    if nvcc := find_nvcc():
        return _by_nvcc(nvcc, source, architecture)
    if nvrtc := find_nvrtc():
        return _by_nvrtc(nvrtc, source, architecture)
    raise CompileError("CUDA compiler", "this machine has neither nvcc nor NVRTC", _FIX)


def find_nvcc() -> str:
    """Path of nvcc; empty if there is none."""
    return shutil.which("nvcc") or shutil.which(str(_TOOLKIT / "bin" / "nvcc")) or ""


def find_nvrtc() -> Path | None:
    """The NVRTC library of the package nvidia-cuda-nvrtc, or of a toolkit."""
    folders = [folder / "lib" for folder in _package_folders()] + [_TOOLKIT / "lib64"]
    libraries = (path for folder in folders for path in sorted(folder.glob("libnvrtc.so*[0-9]")))
    return next(libraries, None)


def _package_folders() -> Iterator[Path]:
    """Folders such as nvidia/cu13 in which PyPI's packages put their lib and include."""
    found = importlib.util.find_spec("nvidia")
    for root in (found.submodule_search_locations or ()) if found else ():
        yield from sorted(Path(root).glob("cu[0-9]*"), reverse=True)


def _by_nvcc(nvcc: str, source: str, architecture: str) -> bytes:
    with temporary_folder() as folder:
        code, cubin = folder / "kernels.cu", folder / "kernels.cubin"
        write_temporary(code, source.encode())
        command = [nvcc, "-cubin", f"-arch={architecture}", "-O3", *_OPTIONS, "-o", str(cubin), str(code)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise _failed("nvcc", result.stderr, architecture)
        return cubin.read_bytes()


def _by_nvrtc(path: Path, source: str, architecture: str) -> bytes:
    for part in sorted(path.parent.glob("libnvrtc-builtins.so*")):  # which NVRTC looks for by name only
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    includes = [folder / part for folder in _package_folders() for part in ("include", "include/cccl")]
    includes += [_TOOLKIT / "include", _TOOLKIT / "include" / "cccl"]
    options = [f"-arch={architecture}", *_OPTIONS, *(f"-I{one}" for one in includes if one.is_dir())]
    program = ctypes.c_void_p()
    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None):
        raise _failed("NVRTC", "it could not start", architecture)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), arguments):
            log = _output(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise _failed("NVRTC", log.rstrip(b"\0").decode(errors="replace"), architecture)
        return _output(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    """What NVRTC has for a program: its log or its cubin."""
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(max(size.value, 1))
    read(program, content)
    return content.raw[: size.value]


def _failed(compiler: str, log: str, architecture: str) -> CompileError:
    lines = [line for line in log.splitlines() if "error" in line or "fatal" in line] or log.strip().splitlines()[-1:]
    what = f"{compiler} failed for {architecture}: {'; '.join(lines[:3]) or 'it says nothing'}"
    return CompileError("CUDA compiler", what, "check that it knows the architecture and finds CUDA's headers; else report it")
