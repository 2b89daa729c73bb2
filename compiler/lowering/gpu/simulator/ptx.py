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


def _copy(found: re.Match[str], names: Sequence[str]) -> str:
    valid = names[2] if len(names) > 2 else found[1]
    return f"sim::async_copy({names[0]}, {names[1]}, {found[1]}, {valid});"


def _store(found: re.Match[str], names: Sequence[str]) -> str:
    words = ", ".join(names[1:])
    return f"uint32_t words[] = {{{words}}}; sim::store_shared({names[0]}, words);"


def _convert(found: re.Match[str], names: Sequence[str]) -> str:
    result, high, low = names
    return f"{result} = sim::to_{found[1]}({low}) | (uint32_t)sim::to_{found[1]}({high}) << 16;"


_INSTRUCTIONS: tuple[tuple[re.Pattern[str], _Body], ...] = (
    (re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16 "), _load_matrix),
    (re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32 "), _multiply),
    (re.compile(r"cp\.async\.commit_group;"), lambda found, names: "sim::commit_copies();"),
    (re.compile(r"cp\.async\.wait_group (\d+);"), lambda found, names: f"sim::finish_copies({found[1]});"),
    (re.compile(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\d+B)? \[%0\], \[%1\], (4|8|16)(?:, %2)?;"), _copy),
    (re.compile(r"st\.shared(?:\.v[24])?\.b32 "), _store),
    (re.compile(r"cvt\.rn\.(bf16|f16)x2\.f32 "), _convert),
)
