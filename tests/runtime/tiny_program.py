"""A two-kernel program built with TVM alone: y = (x + b) * 2 in float32, with the sum in the arena."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tvm
from prefuse.compiler.lowering.native import compile_module, link_library
from prefuse.runtime.archive import ConstantSource
from prefuse.runtime.plan import Buffer, Kernel, Launch, Plan, Port, Region, Role, Space, TensorType
from prefuse.runtime.program_file import write_program
from prefuse.runtime.target import Target
from tvm import tirx
from tvm.ir import Call, GlobalVar, PointerType, PrimType, StringImm

ELEMENTS = 1000
BYTES = ELEMENTS * 4
ARENA_OFFSET, CONSTANT_OFFSET = 64, 128
_POINTER = PointerType(PrimType("float32"))


def tiny_plan(target: str | None = None) -> Plan:
    """x (input) and b (constant) -> h (arena) -> y (output)."""

    def whole(name: str) -> Region:
        return Region(name, 0, BYTES)

    return Plan(
        target=target or str(Target.parse("cpu", threads=2)),
        inputs=(Port("x", TensorType((ELEMENTS,), "float32"), "x"),),
        outputs=(Port("y", TensorType((ELEMENTS,), "float32"), "y"),),
        spaces=(Space("caller"), Space("constants", CONSTANT_OFFSET + BYTES), Space("arena", ARENA_OFFSET + BYTES)),
        buffers=(
            Buffer("x", Role.INPUT, BYTES, "caller"),
            Buffer("y", Role.OUTPUT, BYTES, "caller"),
            Buffer("a", Role.CONSTANT, 4, "constants", 0),
            Buffer("b", Role.CONSTANT, BYTES, "constants", CONSTANT_OFFSET),
            Buffer("h", Role.ACTIVATION, BYTES, "arena", ARENA_OFFSET),
        ),
        kernels=(Kernel("add", "elementwise", 3, ELEMENTS, 3 * BYTES), Kernel("double", "elementwise", 2, ELEMENTS, 2 * BYTES)),
        steps=(
            Launch("add", (whole("x"), whole("b")), (whole("h"),), label="add"),
            Launch("double", (whole("h"),), (whole("y"),), label="double"),
        ),
    )


def bias() -> np.ndarray:
    return np.linspace(-1, 1, ELEMENTS, dtype=np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = (x + bias()) * np.float32(2)
    return y


def _kernel(name: str, arity: int) -> tirx.PrimFunc:
    pointers = [tirx.Var(f"p{i}", _POINTER) for i in range(arity)]
    buffers = [
        tirx.decl_buffer((ELEMENTS,), "float32", data=pointer, name=f"B{i}", layout=None) for i, pointer in enumerate(pointers)
    ]
    index = tirx.Var("i", "int32")
    value = buffers[0][index] + (buffers[1][index] if arity == 3 else buffers[0][index])
    loop = tirx.For(index, 0, ELEMENTS, tirx.ForKind.PARALLEL, tirx.BufferStore(buffers[-1], value, [index]))
    body: tirx.Stmt = tirx.SeqStmt(
        [*(tirx.DeclBuffer(b, data=p) for b, p in zip(buffers, pointers, strict=True)), loop, tirx.Return(tirx.const(0, "int32"))]
    )
    for attribute in ("device_id", "device_type"):
        body = tirx.AttrStmt(StringImm("default"), attribute, tirx.const(int(attribute == "device_type"), "int32"), body)
    return tirx.PrimFunc(pointers, body, ret_type=PrimType("int32")).with_attr("tirx.noalias", True).with_attr("s_tir", True)


def build_library() -> bytes:
    """Compile the program's kernels and host function into a shared library."""
    add, double = GlobalVar("add"), GlobalVar("double")
    pointer, table = tirx.Var("addresses", PointerType(PrimType("int64"))), tirx.decl_buffer((4,), "int64", layout=None)
    arena, constants, x, y = (table[i] for i in range(4))

    def call(function: GlobalVar, *addresses: tirx.PrimExpr) -> tirx.Stmt:
        arguments = [tirx.reinterpret(_POINTER, address) for address in addresses]
        return tirx.Evaluate(Call(function, arguments, ret_ty=PrimType("int32")))

    steps = [call(add, x, constants + CONSTANT_OFFSET, arena + ARENA_OFFSET), call(double, arena + ARENA_OFFSET, y)]
    main = tirx.PrimFunc([pointer], tirx.SeqStmt([tirx.DeclBuffer(table, data=pointer), *steps]))
    main = main.with_attr("global_symbol", "prefuse_main").with_attr("calling_conv", 1).with_attr("s_tir", True)
    module = tvm.IRModule({add: _kernel("add", 3), double: _kernel("double", 2), GlobalVar("prefuse_main"): main})
    target = Target.parse(tiny_plan().target)
    return link_library(compile_module(module, target), target)


def write_tiny(path: Path, library: bytes, plan: Plan | None = None) -> Path:
    """Write the program to a file."""
    sources = (
        ConstantSource("b", TensorType((ELEMENTS,), "float32"), CONSTANT_OFFSET, bias),
        ConstantSource("a", TensorType((), "float32"), 0, lambda: np.array(3, np.float32)),
    )
    write_program(
        path, plan or tiny_plan(), library, sources, {"name": "tiny", "report": {"compile_seconds": 0.5, "slow_paths": ["none"]}}
    )
    return path
