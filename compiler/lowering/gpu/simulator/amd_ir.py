"""LLVM IR for AMD's GPUs, as TVM's compiler leaves it, as IR of the host that calls the simulator (include/amdsim.h).

The IR is that from which LLVM makes machine code, all optimizations done: address spaces become one, each access of LDS is told
to the simulator, and intrinsics of the GPU become its functions. Beside each kernel NAME are a function sim_NAME(blocks, threads,
shared bytes, arguments) and the number of its arguments, count_NAME.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from .....runtime.errors import CompileError

LDS_BYTES = 64 << 10  # of a block
_ALIGNMENT = 16  # of an array that names none
_NAME = r"[\w.$]+"
_KERNEL = re.compile(rf"^define (?:dllexport )?amdgpu_kernel void @({_NAME})\((.*?)\)[^()]*\{{$")
_LDS_ARRAY = re.compile(rf"^@({_NAME}) = .*addrspace\(3\) global (\[.*\]|\w+) (?:undef|poison)(?:.*align (\d+))?")
_ACCESS = re.compile(r"^(\s*)(?:(%\S+) = load|store) (?:(.+?), )?ptr addrspace\(([13])\) (.+), align (\d+)(?:, ![\w.]+ !\d+)*$")
# What would touch LDS unseen: anything but plain loads and stores, and pointers that do not say what they point to.
_UNSEEN = re.compile(r"\b(?:load|store|atomicrmw|cmpxchg|addrspacecast|@llvm\.mem\w+)\b.*addrspace\(3\)")
_ATOMIC = re.compile(r"^\s*%\S+ = (?:load atomic i32,|atomicrmw add) ptr addrspace\(1\)")  # of the barrier of a grid
_STORED = re.compile(r"^(<\d+ x \w+>|\w+) ")
_FENCE = re.compile(r"^\s*fence (?:syncscope\(\"[\w-]+\"\) )?(\w+)(?:, !mmra !\d+)?$")
_MFMA = re.compile(
    r"call <(16|4) x (float|i32)> @llvm\.amdgcn\.mfma\.(?:f32|i32)\.([\w]+?)(?:\.1k)?(\.i8)?\((<4 x half>|<4 x i16>|float|i64) "
)
_WMMA = re.compile(r"@llvm\.amdgcn\.wmma\.(f32|i32)\.16x16x16\.(f16|bf16|iu8)[\w.]*\(")
_TYPE = re.compile(r"^(?:<(\d+) x )?(i8|i16|i32|i64|i1|half|bfloat|float|double|ptr)>?$")
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}
_FUNCTIONS = {
    "workitem.id.x": "thread",
    "workgroup.id.x": "block",
    "s.barrier": "barrier",
    "mbcnt.lo": "lanes_low",
    "mbcnt.hi": "lanes_high",
    "ds.bpermute": "permute",
    "sched.barrier": "pin",
    "exp2.f32": "exp2",
    "s.sleep": "sleep",
}
_WAITING = "@llvm.amdgcn.s.sleep("  # for other blocks
_MEETING = re.compile(r"@llvm\.amdgcn\.(?:s\.barrier|ds\.bpermute|mfma|wmma)|prefuse_block_barrier")
_DECLARED = """
@sim_lds = external global [65536 x i8]
declare void @sim_reads(ptr, i32, i32)
declare void @sim_writes(ptr, i32, i32)
declare void @sim_aligned(ptr, i32)
declare void @sim_release()
declare void @sim_acquire()
declare i32 @sim_launch(ptr, i32, i32, i32, i1, i1, ptr)
"""


def host_ir(source: str) -> str:
    """The IR of the host.

    Raises:
        CompileError: the source has what the simulator does not know.
    """
    arrays = {
        one[1]: (_size_bytes(one[2]), int(one[3] or _ALIGNMENT)) for one in map(_LDS_ARRAY.match, source.splitlines()) if one
    }
    lines: list[str] = []
    kernel: list[str] = []
    for line in source.splitlines():
        if kernel or _KERNEL.match(line):
            kernel.append(line)
            if line == "}":
                lines += _kernel(kernel, arrays)
                kernel = []
        elif not _LDS_ARRAY.match(line) and not line.startswith("target "):
            lines.append(line)
    text = _without_spaces("\n".join(_host_line(line) for line in lines)) + _DECLARED
    text = _with_matrix_unit(text)
    for intrinsic, function in _FUNCTIONS.items():
        text = text.replace(f"@llvm.amdgcn.{intrinsic}(", f"@sim_{function}(")
    if unknown := sorted(set(re.findall(r"@(llvm\.amdgcn\.[\w.]+)", text))):
        raise CompileError("simulator", f"it does not know {', '.join(unknown)}", "compile for a GPU")
    return text


def _size_bytes(kind: str) -> int:
    """Bytes of a type such as [4 x [2 x float]]."""
    counts = [int(one) for one in re.findall(r"(\d+) x ", kind)]
    return prod(counts) * _BYTES[kind.rstrip("]>").split(" ")[-1]]


def _kernel(lines: list[str], arrays: dict[str, tuple[int, int]]) -> Iterator[str]:
    """A kernel, its arrays of LDS in the simulator's, and what launches it."""
    text, end = "\n".join(lines), 0
    found = _KERNEL.match(lines[0])
    assert found is not None
    for name, (size_bytes, alignment) in arrays.items():
        placed = re.compile(rf"@{re.escape(name)}(?![\w.$])")
        if placed.search(text):
            begin = -(-end // alignment) * alignment
            end = begin + size_bytes
            text = placed.sub(f"getelementptr (i8, ptr @sim_lds, i64 {begin})", text)
    if end > LDS_BYTES:
        raise CompileError("simulator", f"{found[1]} has {end} bytes of LDS, more than a block's {LDS_BYTES}", "report it")
    yield from text.splitlines()
    types = [one.split()[0] for one in _parameters(found[2])]
    name, meets = found[1], str(bool(end or _MEETING.search(text))).lower()
    cooperates = str(_WAITING in text).lower()
    yield f"define internal void @sim_call_{name}(ptr %a) {{"
    for i, kind in enumerate(types):
        yield f"  %p{i} = getelementptr ptr, ptr %a, i64 {i}"
        yield f"  %c{i} = load ptr, ptr %p{i}"
        yield f"  %v{i} = load {kind}, ptr %c{i}"
    yield f"  call void @{name}({', '.join(f'{kind} %v{i}' for i, kind in enumerate(types))})"
    yield "  ret void\n}"
    yield f"define i32 @sim_{name}(i32 %b, i32 %t, i32 %s, ptr %a) {{"
    yield f"  %r = call i32 @sim_launch(ptr @sim_call_{name}, i32 %b, i32 %t, i32 {end}, i1 {meets}, i1 {cooperates}, ptr %a)"
    yield "  ret i32 %r\n}"
    yield f"@count_{name} = constant i32 {len(types)}"
    yield f"@cooperates_{name} = constant i32 {int(_WAITING in text)}"


def _parameters(text: str) -> list[str]:
    """The parameters of a function, of which none has a comma in parentheses but in its attributes."""
    while (bare := re.sub(r"\([^()]*\)", "", text)) != text:
        text = bare
    return [one.strip() for one in text.split(",") if one.strip()]


def _host_line(line: str) -> str:
    """A line with what the simulator is told before it; what GPUs alone know is gone."""
    if line.startswith("attributes #"):
        return line.partition("=")[0] + "= { nounwind }"
    if fence := _FENCE.match(line):
        calls = {"release": ("release",), "acquire": ("acquire",)}.get(fence[1], ("release", "acquire"))
        return "\n".join(f"  call void @sim_{one}()" for one in calls)
    if line.startswith("declare") and ("llvm.amdgcn.mfma" in line or "llvm.amdgcn.wmma" in line):
        return ""
    if _ATOMIC.match(line):
        return line
    if access := _ACCESS.match(line):
        return _told(access)
    if _UNSEEN.search(line):
        raise _unknown(line)
    return line


def _told(access: re.Match[str]) -> str:
    """An access of memory, its alignment checked, or of LDS, told to the simulator. On the host it has none."""
    indent, result, before, space, pointer, alignment = access.groups()
    stored = _STORED.match(before)
    kind = before if result else stored[1] if stored else ""
    found = _TYPE.match(kind.removeprefix("volatile "))
    if not found:
        raise _unknown(access[0])
    size = int(found[1] or 1) * _BYTES[found[2]]
    plain = re.sub(r", align \d+(?:, ![\w.]+ !\d+)*$", ", align 1", access[0])
    if space == "3":
        return f"{indent}call void @sim_{'reads' if result else 'writes'}(ptr {pointer}, i32 {size}, i32 {alignment})\n{plain}"
    if int(alignment) <= _BYTES[found[2]]:
        return plain
    return f"{indent}call void @sim_aligned(ptr {pointer}, i32 {alignment})\n{plain}"


def _unknown(line: str) -> CompileError:
    return CompileError("simulator", f"it does not know the access {line.strip()}", "compile for a GPU")


def _without_spaces(text: str) -> str:
    """The text with one address space, no calling convention of GPUs, and names that the host's libraries do not have."""
    text = re.sub(r",? addrspace\(\d\)", "", text).replace("amdgpu_kernel ", "").replace("dllexport ", "")
    text = text.replace("addrspacecast ptr", "bitcast ptr").replace("immarg ", "")
    text = re.sub(r"\.p[135]\b", ".p0", text)
    return re.sub(r"@(__truncsfhf2|__extendhfsf2)\b", r"@gpu\1", text)


def _with_matrix_unit(text: str) -> str:
    """The text with functions for the instructions of the matrix unit that it has, which pass their operands in memory."""
    functions: dict[str, str] = {}

    def called(found: re.Match[str]) -> str:
        count, number, name, operand = found[1], found[2], found[3] + (found[4] or "").lstrip("."), found[5]
        sums = f"<{count} x {number}>"
        functions[name] = f"""
declare void @sim_mfma_{name}(ptr, ptr, ptr, ptr)
define internal {sums} @mfma_{name}({operand} %a, {operand} %b, {sums} %c, i32 %x, i32 %y, i32 %z) noinline {{
  %p = alloca {operand}, align 8
  %q = alloca {operand}, align 8
  %r = alloca {sums}, align 64
  store {operand} %a, ptr %p
  store {operand} %b, ptr %q
  store {sums} %c, ptr %r
  call void @sim_mfma_{name}(ptr %p, ptr %q, ptr %r, ptr %r)
  %d = load {sums}, ptr %r
  ret {sums} %d
}}
"""
        return f"call {sums} @mfma_{name}({operand} "

    text = _MFMA.sub(called, text)
    for number, name in sorted(set(_WMMA.findall(text))):
        functions[name] = _wmma_function(name, number == "f32")
    return _WMMA.sub(r"@wmma_\2(", text) + "".join(functions.values())


def _wmma_function(name: str, is_float: bool) -> str:
    """A function for an instruction of RDNA's matrix unit."""
    operand, sums = {"f16": "<16 x half>", "bf16": "<16 x i16>"}.get(name, "<4 x i32>"), f"<8 x {'float' if is_float else 'i32'}>"
    taken = (
        f"{operand} %a, {operand} %b, {sums} %c" if is_float else f"i1 %x, {operand} %a, i1 %y, {operand} %b, {sums} %c, i1 %z"
    )
    signs = "i32 1, i32 1" if is_float else "i32 %sx, i32 %sy"
    extended = "" if is_float else "  %sx = zext i1 %x to i32\n  %sy = zext i1 %y to i32\n"
    return f"""
declare void @sim_wmma_{name}(ptr, ptr, ptr, i32, i32)
define internal {sums} @wmma_{name}({taken}) noinline {{
  %p = alloca {operand}, align 32
  %q = alloca {operand}, align 32
  %r = alloca {sums}, align 32
  store {operand} %a, ptr %p
  store {operand} %b, ptr %q
  store {sums} %c, ptr %r
{extended}  call void @sim_wmma_{name}(ptr %p, ptr %q, ptr %r, {signs})
  %d = load {sums}, ptr %r
  ret {sums} %d
}}
"""
