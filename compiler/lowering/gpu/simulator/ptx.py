"""TVM's helpers of PTX instructions, each a function around one line of inline assembly, as C++ for the simulator.

An instruction is told by its text, so that what the simulator does not know is an error and no silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .....runtime.errors import CompileError

_HELPER = re.compile(r'^(__forceinline__ __device__ void \w+\(([^)]*)\) \{\n)  asm volatile\("([^"]*)".*\);$', re.MULTILINE)
_Body = Callable[["re.Match[str]", Sequence[str]], str]  # of an instruction's match and the names of the helper's parameters


def simulate_instructions(source: str) -> str:
    """The source with calls of the simulator where its helpers have assembly.

    Raises:
        CompileError: an instruction that the simulator does not know.
    """
    return _HELPER.sub(lambda found: found[1] + "  " + _simulated(found[3], _names(found[2])), source)


def _names(parameters: str) -> list[str]:
    return [one.strip().split(" ")[-1] for one in parameters.split(",")] if parameters.strip() else []


def _simulated(instruction: str, names: Sequence[str]) -> str:
    for pattern, body in _INSTRUCTIONS:
        if found := pattern.match(instruction):
            return body(found, names)
    raise CompileError("simulator", f"it does not know the instruction {instruction!r}", "compile for a GPU")


def _load_matrix(found: re.Match[str], names: Sequence[str]) -> str:
    count = int(found[1])
    registers = ", ".join(f"&{name}" for name in names[:count])
    operation = f"sim::load_matrix<{count}, {str(bool(found[2])).lower()}>"
    return f"sim::LoadMatrix o{{{{{registers}}}, {names[count]}}}; sim::together({operation}, o);"


def _multiply(found: re.Match[str], names: Sequence[str]) -> str:
    d, a, b, c = (", ".join(names[begin:end]) for begin, end in ((0, 4), (4, 8), (8, 10), (10, 14)))
    pointers = d.replace("__d", "&__d")
    return f"sim::Mma o{{{{{pointers}}}, {{{a}}}, {{{b}}}, {{{c}}}}}; sim::together(sim::mma_m16n8k16<sim::of_{found[1]}>, o);"


def _multiply_bytes(found: re.Match[str], names: Sequence[str]) -> str:
    d, a, b, c = (", ".join(names[begin:end]) for begin, end in ((0, 4), (4, 8), (8, 10), (10, 14)))
    pointers = d.replace("__d", "&__d")
    is_unsigned = str(found[1] == "u8").lower()
    return f"sim::ByteMma o{{{{{pointers}}}, {{{a}}}, {{{b}}}, {{{c}}}}}; sim::together(sim::mma_m16n8k32<{is_unsigned}>, o);"


def _copy(found: re.Match[str], names: Sequence[str]) -> str:
    valid = names[2] if len(names) > 2 else found[1]
    return f"sim::async_copy({names[0]}, {names[1]}, {found[1]}, {valid});"


def _store(found: re.Match[str], names: Sequence[str]) -> str:
    words = ", ".join(names[1:])
    return f"uint32_t words[] = {{{words}}}; sim::store_shared({names[0]}, words);"


def _convert(found: re.Match[str], names: Sequence[str]) -> str:
    result, high, low = names
    return f"{result} = sim::to_{found[1]}({low}) | (uint32_t)sim::to_{found[1]}({high}) << 16;"


def _try_wait(found: re.Match[str], names: Sequence[str]) -> str:
    result, address, parity = names
    return f"{result} = sim::try_wait({address}, {parity});"


def _tensor_copy(found: re.Match[str], names: Sequence[str]) -> str:
    to, tensor_map, *place, mbarrier = names
    return f"const int place[] = {{{', '.join(place)}}}; sim::tensor_copy<{found[1]}>({to}, {tensor_map}, place, {mbarrier});"


def _wgmma(found: re.Match[str], names: Sequence[str]) -> str:
    """D of n / 2 registers, A of four or a descriptor, B's descriptor, and whether D is added to; signs are as they are."""
    columns, number, has_registers = int(found[1]), found[2], found[3].startswith("{")
    count = columns // 2
    sums, rest = names[:count], names[count:]
    a, (b, keeps) = rest[:-2], rest[-2:]
    registers = ", ".join(a if has_registers else ("0",) * 4)
    turns = [one == "0" for one in re.findall(r"\d", found[4])]  # the immediates behind the two signs: whether along lines
    a_is_k_major, b_is_k_major = (True, *turns) if has_registers else turns
    fields = [
        "sums",
        str(columns),
        "0" if has_registers else a[0],
        b,
        f"{{{registers}}}",
        str(has_registers).lower(),
        f"(bool){keeps}",
        *(str(one).lower() for one in (a_is_k_major, b_is_k_major)),
        f"sim::of_{number}",
    ]
    pointers = ", ".join(f"&{one}" for one in sums)
    return f"float* sums[] = {{{pointers}}}; sim::Wgmma o{{{', '.join(fields)}}}; sim::together(sim::issue_wgmma, o);"


def _of_warp(operation: str) -> _Body:
    """An instruction of a warp without operands."""
    return lambda found, names: f"int none; sim::together(sim::{operation}, none);"


_INSTRUCTIONS: tuple[tuple[re.Pattern[str], _Body], ...] = (
    (re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16 "), _load_matrix),
    (re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32 "), _multiply),
    (re.compile(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.(u8|s8)\.s8\.s32 "), _multiply_bytes),
    (re.compile(r"cp\.async\.commit_group;"), lambda found, names: "sim::commit_copies();"),
    (re.compile(r"cp\.async\.wait_group (\d+);"), lambda found, names: f"sim::finish_copies({found[1]});"),
    (re.compile(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\d+B)? \[%0\], \[%1\], (4|8|16)(?:, %2)?;"), _copy),
    (re.compile(r"st\.shared(?:\.v[24])?\.b32 "), _store),
    (re.compile(r"cvt\.rn\.(bf16|f16)x2\.f32 "), _convert),
    (re.compile(r"mbarrier\.init\.shared\.b64 "), lambda found, names: f"sim::initialise_mbarrier({', '.join(names)});"),
    (
        re.compile(r"mbarrier\.arrive(?:\.expect_tx)?\.shared::cta\.b64 _, "),
        lambda found, names: f"sim::arrive({', '.join(names)});",
    ),
    (re.compile(r"\{ \.reg \.pred pd0; mbarrier\.try_wait\.parity\.shared::cta\.b64 pd0, \[%1\], %2;"), _try_wait),
    (re.compile(r"fence\.mbarrier_init\.release\.cluster;"), lambda found, names: "sim::fence_initialisation();"),
    (re.compile(r"fence\.proxy\.async\.shared::cta;"), lambda found, names: "sim::fence_proxy();"),
    (
        re.compile(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes "),
        lambda found, names: f"sim::bulk_copy({', '.join(names)});",
    ),
    (
        re.compile(r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cluster\.global\.mbarrier::complete_tx::bytes "),
        _tensor_copy,
    ),
    (re.compile(r"bar\.sync %0, %1;"), lambda found, names: f"sim::named_barrier({', '.join(names)});"),
    (
        re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32 (\d+);"),
        lambda found, names: f"sim::Registers o{{{found[1]}}}; sim::together(sim::set_registers, o);",
    ),
    (re.compile(r"wgmma\.fence\.sync\.aligned;"), _of_warp("fence_wgmma")),
    (re.compile(r"wgmma\.commit_group\.sync\.aligned;"), _of_warp("commit_wgmma")),
    (
        re.compile(r"wgmma\.wait_group\.sync\.aligned (\d+);"),
        lambda found, names: f"sim::WgmmaWait o{{{found[1]}}}; sim::together(sim::wait_wgmma, o);",
    ),
    (
        re.compile(
            r"\{ \.reg \.pred ps0; setp\.ne\.b32 ps0, %\d+, 0; "
            r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2 "
            r"\{[^}]*\}, ((?:\{[^}]*\}|%\d+), %\d+), ps0, 1, 1, ([^;]*); \}"
        ),
        _wgmma,
    ),
)
