"""What a binary for a GPU says of itself in its ELF header: of which kind it is, and for which architecture."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<4sBB2xB7x2xH28xI")  # ELF64: magic, class, data, ABI version; machine; flags
_CUDA, _AMDGPU = 190, 224  # e_machine
_CUDA_FLAGS_IN_SECOND_BYTE = 8  # from this ABI version on the architecture lies in bits 8 to 15, before in 0 to 7
# EF_AMDGPU_MACH of e_flags, as in LLVM's AMDGPUUsage.
_AMD_MACHINES = {
    0x02C: "gfx900", 0x02F: "gfx906", 0x030: "gfx908", 0x033: "gfx1010", 0x035: "gfx1012", 0x036: "gfx1030", 0x037: "gfx1031",
    0x038: "gfx1032", 0x03F: "gfx90a", 0x041: "gfx1100", 0x044: "gfx1103", 0x046: "gfx1101", 0x047: "gfx1102", 0x048: "gfx1200",
    0x04A: "gfx1151", 0x04C: "gfx942", 0x04E: "gfx1201", 0x04F: "gfx950", 0x043: "gfx1150", 0x034: "gfx1011", 0x039: "gfx1033",
    0x03D: "gfx1035", 0x03E: "gfx1034", 0x042: "gfx1013", 0x045: "gfx1036", 0x055: "gfx1152",
}  # fmt: skip


def architecture_of(binary: bytes) -> str:
    """Such as "cuda:sm_90" or "rocm:gfx942"; only "rocm" for a machine that is not in our list; empty for anything else."""
    if len(binary) < _HEADER.size:
        return ""
    magic, bits, order, abi, machine, flags = _HEADER.unpack_from(binary)
    if magic != b"\x7fELF" or (bits, order) != (2, 1):
        return ""
    if machine == _CUDA:
        return f"cuda:sm_{(flags >> 8 if abi >= _CUDA_FLAGS_IN_SECOND_BYTE else flags) & 0xFF}"
    if machine == _AMDGPU:
        known = _AMD_MACHINES.get(flags & 0xFF)
        return f"rocm:{known}" if known else "rocm"
    return ""
