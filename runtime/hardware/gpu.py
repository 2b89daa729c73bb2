"""What is known of GPUs: the numbers that costs of their kernels are made of. No kernel of ours has been measured on one yet."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """A GPU by its multiprocessors (AMD: compute units), each of which does so much a clock.

    `half_flops` are those of dense 16-bit floats by the matrix unit with operands in registers (mma.sync, MFMA),
    `warpgroup_flops` with operands in shared memory (wgmma), `float_flops` of float32 (0: it has none), `fma_flops` without it.
    `l2_bytes` come from L2, which has `l2_size_bytes`, `shared_bytes_a_clock` from and to shared memory. A block has
    `block_bytes` of shared memory at most, a multiprocessor `shared_bytes` for all that it runs. `memory_latency` is in clocks,
    from a load to its data in DRAM; `launch_us` of a kernel behind another one. Warps have `lanes` threads; `lanes_a_clock` begin
    an instruction. `stages` of a software pipeline are the most that are of use: more hide more latency, and leave room for fewer
    blocks; two, where registers hold what is on its way. A warp's tile has `warp_sums` at
    most, and `deep_sums` where stages are twice as deep, for its registers. Bytes are multiplied `byte_factor` times as fast as
    16-bit floats. Of all GPUs of the row the smallest has the `fewest` multiprocessors: a cooperative grid has no more blocks.
    """

    name: str
    multiprocessors: int
    ghz: float
    half_flops: int
    fma_flops: int
    memory_gbs: float
    block_bytes: int
    shared_bytes: int
    shared_bytes_a_clock: int = 128
    l2_bytes: int = 64
    l2_size_bytes: int = 50 << 20
    memory_latency: int = 700
    launch_us: float = 2.2
    float_flops: int = 0
    lanes: int = 32
    lanes_a_clock: int = 128
    stages: tuple[int, ...] = (4, 6)
    warpgroup_flops: int = 0
    warp_sums: int = 128 * 64
    deep_sums: int = 64 * 32
    byte_factor: int = 2
    fewest: int = 1

    @property
    def memory_bytes(self) -> float:
        """Bytes from DRAM a clock, for all multiprocessors together."""
        return self.memory_gbs / self.ghz

    @property
    def launch_cycles(self) -> float:
        return self.launch_us * self.ghz * 1e3


# Whitepapers of V100, T4, A100, A10, L40S, H100, CDNA3, and AMD's figures of the Radeon RX 7900 XTX, without its pairs of float32
# operations. The fewest multiprocessors are those of V100, GTX 1650, A30, laptops' RTX 3050 and RTX 4050, H20, MI210, RX 7600.
# On Hopper mma.sync reaches 62.9% of what wgmma does (Luo et al.: Benchmarking and Dissecting
# the Nvidia Hopper GPU Architecture via Microbenchmarking, 2024); the memory's rate there is that of a measured copy.
_ROWS = {
    "sm_70": GpuMachine("sm_70", 80, 1.53, 1024, 128, 900, 96 << 10, 96 << 10, l2_size_bytes=6 << 20, fewest=80),
    "sm_75": GpuMachine("sm_75", 40, 1.59, 1024, 128, 320, 64 << 10, 64 << 10, l2_size_bytes=4 << 20, fewest=14),
    "sm_80": GpuMachine(
        "sm_80", 108, 1.41, 2048, 128, 1935, 163 << 10, 164 << 10, l2_size_bytes=40 << 20, memory_latency=600, fewest=56
    ),
    "sm_86": GpuMachine("sm_86", 72, 1.695, 1024, 256, 600, 99 << 10, 100 << 10, l2_size_bytes=6 << 20, fewest=16),
    "sm_89": GpuMachine("sm_89", 142, 2.52, 1024, 256, 864, 99 << 10, 100 << 10, l2_size_bytes=96 << 20, fewest=20),
    "sm_90": GpuMachine("sm_90", 132, 1.755, 2576, 256, 4300, 227 << 10, 228 << 10, warpgroup_flops=4096, fewest=78),
    "gfx942": GpuMachine(
        "gfx942",
        304,
        2.1,
        2048,
        256,
        4000,
        64 << 10,
        64 << 10,
        l2_size_bytes=256 << 20,
        memory_latency=800,
        float_flops=256,
        lanes=64,
        lanes_a_clock=64,
        stages=(2,),
        fewest=104,
    ),
    "gfx1100": GpuMachine(
        "gfx1100",
        96,
        2.5,
        512,
        128,
        960,
        64 << 10,
        64 << 10,
        l2_size_bytes=96 << 20,
        memory_latency=800,
        lanes_a_clock=64,
        stages=(2,),
        warp_sums=64 * 32,
        deep_sums=16 * 16,
        byte_factor=1,
        fewest=32,
    ),
}


# Rows by the first architecture of NVIDIA that they are for. Blocks have the shared memory that the table of compute capabilities
# in CUDA's programming guide says: the consumers' GPUs, sm_120 too, 99 KiB where the data centers' have more.
_FIRST = (
    (120, "sm_89"), (90, "sm_90"), (88, "sm_89"), (87, "sm_80"), (81, "sm_86"), (80, "sm_80"), (75, "sm_75"), (0, "sm_70"),
)  # fmt: skip


def gpu_machine(level: str) -> GpuMachine:
    """The row of an architecture such as "sm_86", or of the one that is known and most like it."""
    if not (found := re.fullmatch(r"sm_(\d+)[af]?", level)):
        return _ROWS["gfx942" if len(level) == len("gfx942") else "gfx1100"]  # CDNA, RDNA
    return _ROWS[next(row for first, row in _FIRST if int(found[1]) >= first)]


def has_half_products(level: str) -> bool:
    """Whether an architecture of NVIDIA has asynchronous copies and products of 16-bit floats (m16n8k16): from sm_80 on."""
    found = re.fullmatch(r"sm_(\d+)[af]?", level)
    return found is not None and int(found[1]) >= 80


def has_warpgroup_products(level: str) -> bool:
    """Whether an architecture of NVIDIA has products of warpgroups (wgmma): Hopper, and none before or after it."""
    return level in ("sm_90", "sm_90a")


def has_matrix_unit(level: str) -> bool:
    """Whether products on an architecture's matrix unit have kernels."""
    return has_half_products(level) or has_mfma(level) or has_wmma(level)


def has_byte_products(level: str) -> bool:
    """Whether those of bytes have."""
    return has_matrix_unit(level) and level != "gfx90a"  # whose v_mfma multiplies four bytes of a lane


def has_wmma(level: str) -> bool:
    """Whether an architecture of AMD has products of 16-bit floats and bytes by v_wmma as RDNA 3 has them."""
    return re.fullmatch(r"gfx11\d\d", level) is not None


def has_mfma(level: str) -> bool:
    """Whether an architecture of AMD has products of bfloat16, float16 and float32 by v_mfma as CDNA has from its second on."""
    return level in ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
