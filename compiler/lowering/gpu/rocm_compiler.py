"""TIR to an AMD code object: TVM's LLVM, with barriers that wait for LDS, and LLD. None of ROCm is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from ....kernels.codegen.grids import DeviceFunction
from ....runtime.errors import CompileError
from ....runtime.target import Target
from ....runtime.temporary_folder import temporary_folder, write_temporary
from .device_module import device_module, device_target

_HELPER = Path(__file__).with_name("rocm_helper.ll")
_BARRIER = "prefuse_block_barrier"  # of the helper
_EXPECTED = (b"Unable to detect ROCm version", b"Cannot get maximum number of threads for AMD codegen")
_stderr = threading.Lock()
_LINKERS = ("ld.lld-22", "ld.lld-21", "ld.lld-20", "ld.lld-19", "ld.lld")


@dataclass(frozen=True)
class RocmCode:
    """What the compiler made: the code object, and its assembly for people and tests."""

    code_object: bytes
    assembly: str


def compile_rocm(kernels: Mapping[str, DeviceFunction], target: Target) -> RocmCode:
    """The code object of the kernels.

    Raises:
        CompileError: this machine has no LLD, or it failed; LLVM has no instructions for an operation, or no such GPU.
    """
    linked: list[bytes] = []
    failed: list[CompileError] = []  # of the linker: TVM would make another exception of it

    def link(relocatable: Any) -> bytearray:
        try:
            linked.append(_link(bytes(relocatable)))
        except CompileError as error:
            failed.append(error)
            linked.append(b"")
        return bytearray(linked[-1])

    built = _built(kernels, target, link)
    if failed:
        raise failed[0]
    return RocmCode(linked[-1], str(built.inspect_source("asm")))


def rocm_ir(kernels: Mapping[str, DeviceFunction], target: Target) -> str:
    """The LLVM IR of the kernels, optimized, as LLVM makes instructions of it. It needs no linker.

    Raises:
        CompileError: LLVM has no instructions for an operation, or no such GPU.
    """
    return str(_built(kernels, target, bytearray).inspect_source("hip"))


def _built(kernels: Mapping[str, DeviceFunction], target: Target, link: Callable[[Any], bytearray]) -> Any:
    """TVM's module of the kernels, the linker being `link`."""
    tvm_ffi.register_global_func("tvm_callback_rocm_bitcode_path", lambda: tvm.runtime.convert([str(_HELPER)]), override=True)
    tvm_ffi.register_global_func("tvm_callback_rocm_link", link, override=True)
    try:
        with _without_warnings(), device_target(target) as native:
            module = _with_waiting_barriers(device_module(kernels, target))
            return tvm.get_global_func("target.build.rocm")(module, native)
    except tvm.error.InternalError as error:
        what = str(error).strip().splitlines()[-1]
        raise CompileError(
            "ROCm compiler", f"LLVM failed for {target.level}: {what}", "name an architecture that it knows"
        ) from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep from the user what TVM writes to the process's stderr, once a function, where it finds no AMD GPU to ask."""
    sys.stderr.flush()
    with _stderr, tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            os.write(2, b"".join(line for line in file if not any(known in line for known in _EXPECTED)))


def _with_waiting_barriers(module: Any) -> Any:
    """The module with the helper's barrier for TVM's."""
    sync = tvm.ir.Op.get("tirx.tvm_storage_sync")

    def replaced(statement: Any) -> Any:
        if isinstance(statement.value, tvm.ir.Call) and statement.value.op.same_as(sync):
            return tirx.Evaluate(tirx.call_extern("void", _BARRIER))
        return statement

    functions = {
        name: function.with_body(tvm_ffi.structural_map(function.body, (tirx.Evaluate, replaced), order="post"))
        for name, function in module.functions.items()
    }
    return tvm.IRModule(functions, attrs=module.attrs)


def _link(relocatable: bytes) -> bytes:
    with temporary_folder() as folder:
        source, output = folder / "kernels.o", folder / "kernels.hsaco"
        write_temporary(source, relocatable)
        command = [*find_lld(), "--no-undefined", "-shared", str(source), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompileError("linker", result.stderr.strip() or f"exit {result.returncode}", "see the message above")
        return output.read_bytes()


def find_lld() -> list[str]:
    """The command of an LLD that knows AMD's code objects.

    Raises:
        CompileError: there is none.
    """
    for name in _LINKERS:
        if path := shutil.which(name) or shutil.which(f"/opt/rocm/llvm/bin/{name}"):
            return [path]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    raise CompileError("linker", "this machine has no ld.lld", "pip install ziglang, or apt-get install lld-19")
