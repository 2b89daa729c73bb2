"""TIR to native code: TVM's passes in an order of our own, LLVM, and the system's linker.

TVM's default pipeline is not used: on kernels that are already loop nests its scheduling passes do nothing useful, and some of
them are exponential in nested Let expressions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import tvm
from tvm import tirx

from ...kernels.codegen import cache_lines, lane_masks, thread_pool, work_stealing
from ...kernels.expressions import ldexp
from ...kernels.formats import bfloat16, bfloat16_emulation, digits, int8
from ...kernels.microkernels import amx_emulation
from ...runtime.errors import CompileError
from ...runtime.target import AMX_EMULATED, BFLOAT16_EMULATED, VNNI_EMULATED, Target
from ...runtime.temporary_folder import temporary_folder, write_temporary
from ...runtime.threads.pool import PARALLEL

C_CONVENTION = 1  # of tvm's CallingConv: other than its default, so that a function is left as it is
_AMX = ("+amx-tile", "+amx-bf16", "+amx-int8")
_LLVM: dict[str, dict[str, Any]] = {
    "avx2": {"mcpu": "x86-64-v3"},
    "avxvnni": {"mcpu": "x86-64-v3", "mattr": ["+avxvnni"]},
    "avx512": {"mcpu": "x86-64-v4", "mattr": ["-prefer-256-bit"]},
    "avx512vnni": {"mcpu": "x86-64-v4", "mattr": ["-prefer-256-bit", "+avx512vnni"]},
    "avx512bf16": {"mcpu": "x86-64-v4", "mattr": ["-prefer-256-bit", "+avx512vnni", "+avx512bf16"]},
    "amx": {"mcpu": "x86-64-v4", "mattr": ["-prefer-256-bit", "+avx512vnni", "+avx512bf16", *_AMX]},
}
_LLVM |= {AMX_EMULATED: _LLVM["avx512"], BFLOAT16_EMULATED: _LLVM["avx2"], VNNI_EMULATED: _LLVM["avx2"]}


# LLVM would hoist the constants of an epilogue (exp has a dozen) out of the tile loops, into the registers that the product's
# inner loop needs for its sums: four times slower, measured on a product with bias and tanh.
#
# And type-based alias information is not to be believed: TVM says by it that each pointer of a kernel is apart from all others
# that it has seen. That is true inside one kernel only; inlined one after the other, a kernel would load its input before the
# one before it has stored it. What holds inside a kernel, LLVM knows from its parameters.
#
# Unrolling is ours (builder.loop). LLVM would unroll a loop around that of a product's sum (3 columns of a window, say), and then
# keep one of the sums of each copy in memory: UNet took a quarter longer. These are the two thresholds that are options.
#
# Kernels are not inlined into the host function, where LLVM's registers ran out: an LSTM of 64 units had its sums in memory and
# took twice as long as in a program of its own. (The threshold itself is no option here; what must be inlined says so.)
_OPTIONS = [
    "-disable-machine-licm:bool=true",
    "-enable-tbaa:bool=false",
    "-unroll-threshold-default:uint=60",
    "-unroll-threshold-aggressive:uint=60",
    "-inline-instr-cost:int=1000",
]


def llvm_target(target: Target) -> Any:
    """TVM's description of the target's CPU: a level that many machines share, so that programs can move between them."""
    description = {"kind": "llvm", "num-cores": target.threads, "cl-opt": _OPTIONS, **_LLVM[target.level]}
    return tvm.target.Target(description, host=description)


def compile_module(module: Any, target: Target, imported: str = "") -> Any:
    """Compile an IRModule whose public functions become the library's symbols; a tvm runtime module with its object code.

    All buffers are flat: making them so took a tenth of the time, on kernels that have no others. Equal subexpressions, and loops
    that do nothing, are left to LLVM, which takes no longer with them and writes a fifth less code.
    """
    passes = tirx.transform
    native = llvm_target(target)
    pipeline = [
        passes.BindTarget(native),
        passes.BF16ComputeLegalize(),
        passes.NarrowDataType(32),
        passes.VectorizeLoop(True),
        passes.UnrollLoop(),
        passes.StmtSimplify(),
        passes.FP8ComputeLegalize(),
        passes.VerifyMemory(),
        passes.AnnotateEntryFunc(),
        passes.SplitHostDevice(),
        passes.MakePackedAPI(),
        passes.FP8StorageLegalize(),
        passes.BF16StorageLegalize(),
        passes.LowerTVMBuiltin(),
        passes.LowerIntrin(),
    ]
    with native:
        lowered = tvm.ir.transform.Sequential(pipeline)(module)
    _import_functions(lowered, _kernel_functions(target) + imported)
    return tvm.get_global_func("target.build.llvm")(lowered, native)


def _kernel_functions(target: Target) -> str:
    """The functions in LLVM's IR that kernels call, for instructions that TVM has not."""
    functions = cache_lines.LLVM_FUNCTIONS + lane_masks.LLVM_FUNCTIONS + ldexp.LLVM_FUNCTIONS + work_stealing.LLVM_FUNCTIONS
    functions += _bfloat16_functions(target) + int8.llvm_functions(target) + digits.llvm_functions(target)
    if target.level == AMX_EMULATED:
        functions += amx_emulation.LLVM_FUNCTIONS
    return functions


def compile_functions(functions: Mapping[str, Any], target: Target, imported: str = "") -> bytes:
    """The object code of PrimFuncs, under C names; `imported`: functions in LLVM's IR that they call beside those of kernels."""
    public = {}
    for name, function in functions.items():
        in_c = function.with_attr("global_symbol", name).with_attr("calling_conv", C_CONVENTION)
        public[tvm.ir.GlobalVar(name)] = in_c.with_attr("s_tir", True)
    return object_code(compile_module(tvm.IRModule(public), target, imported))


@cache
def _pool_object(target: Target) -> bytes:
    return compile_functions(thread_pool.pool_functions(), target, thread_pool.LLVM_FUNCTIONS)


def _bfloat16_functions(target: Target) -> str:
    """The functions that kernels call for the instructions of AVX512_BF16, where they do."""
    if target.level in (BFLOAT16_EMULATED, AMX_EMULATED):
        return bfloat16_emulation.LLVM_FUNCTIONS
    return bfloat16.LLVM_FUNCTIONS if target.has("avx512_bf16") else ""


def _import_functions(module: Any, functions: str) -> None:
    """Give LLVM functions in its IR. One function of a module imports for all."""
    variable, function = next(iter(module.functions.items()))
    text = tvm.ir.StringImm
    body = tirx.AttrStmt(text("default"), "pragma_import_llvm", text(functions), function.body)
    module.update_func(variable, function.with_body(body))


def link_library(module: Any, target: Target, objects: Sequence[bytes] = ()) -> bytes:
    """A shared library that holds the module's code, that of objects compiled before, and that of worker threads if one of them
    has parallel regions.

    Raises:
        CompileError: the machine has no linker, it failed, or the temporary folder is full.
    """
    with temporary_folder() as folder:
        library = folder / "program.so"
        codes = [object_code(module), *objects]
        if any(PARALLEL.encode() in code for code in codes):
            codes.append(_pool_object(target))
        sources = [folder / f"{number}.o" for number in range(len(codes))]
        for source, code in zip(sources, codes, strict=True):
            write_temporary(source, code)
        command = [*_linker(), "-shared", "-o", str(library), *map(str, sources)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompileError(
                f"linker {command[0]}", result.stderr.strip() or f"exit {result.returncode}", "see the message above"
            )
        return library.read_bytes()


def object_code(module: Any) -> bytes:
    """The module's object file, written to memory: LLVM ends the process where a disk is full."""
    with open(os.memfd_create("program.o"), "rb") as file:
        module.write_to_file(f"/proc/self/fd/{file.fileno()}", "o")
        return file.read()


def _linker() -> list[str]:
    """The first linker at hand: binutils, LLVM, a C compiler, or the one inside the ziglang package."""
    for name in ("ld", "ld.lld", "cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    raise CompileError(
        "linker", "this machine has none of ld, ld.lld, cc, gcc, clang", "pip install ziglang, or apt-get install binutils"
    )
