"""What a processor can do, as numbers: the one description that everything which estimates time reads.

Rates are of one core and one cycle; a vector is as wide as the level that programs are compiled for. The rows are of the makers'
optimization guides and of uops.info (Abel, Reineke: uops.info, ASPLOS 2019), bytes a cycle beyond L1 as measured by reading in
order; tiles as measured on a core of Granite Rapids, whose clock falls by a tenth where it multiplies them. `prefuse doctor
--fit` measures what differs from machine to machine and replaces it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TypeGuard

from .gpu import GpuMachine

COPY_SECONDS = 5e-5  # that a copy from a file takes beside its bytes: a thread that wakes, a disk that is asked
PAGE_BYTES = 4096
LINE_BYTES = 64  # of a cache line, on every processor that we compile for
_KIB, _MIB = 1 << 10, 1 << 20
_MOST_L3_OF_CORE = 16 * _MIB  # more than any core has of an L3 that all use, but for those of few cores and stacked caches


@dataclass(frozen=True, slots=True)
class Cache:
    """One level: the bytes that a core can use of it, its ways, and the bytes a core reads from it in a cycle, in order."""

    size_bytes: int
    ways: int
    bytes_per_cycle: float

    def part_bytes(self, share: float) -> int:
        """A share of it, from 0 on."""
        return int(share * self.size_bytes)

    @property
    def set_stride_bytes(self) -> int:
        """Addresses so far apart share a set."""
        return self.size_bytes // self.ways


@dataclass(frozen=True, slots=True)
class Machine:
    """A core, the caches it reads through, and what all cores share.

    `multiply_adds`, `dots`, `loads` and `stores` are instructions of whole vectors that a core makes in a cycle; `dots` are those
    of pairs of bfloat16, 0 where there are none; `operations` those of any kind, as pipes add, compare and shuffle beside those
    that multiply, 0 where no more than multiply-adds were seen. A sum waits `*_latency` cycles for the one before it.
    `memory_bytes` come from memory to one core in a cycle, `shared_memory_bytes` to all cores together. Waking threads for a
    parallel region takes `wake_cycles`, calling a kernel `launch_cycles`. A tile unit multiplies two tiles in `tile_dot_cycles`;
    with a load for each product, from L1 or L2, both take `tile_l1_cycles` or `tile_l2_cycles` together. Where it was not used
    for a while it turns itself off, and the next product waits for `tile_wake_cycles`. 0 where there is none.

    Of the pages of 4 KiB on which constants lie translations are kept for `tlb_bytes`; each page takes `page_cycles` where more
    was touched since. `place_cycles` go by until the first line comes from a place in memory that nothing foretells, whose
    translation comes from there, too; `fault_cycles` until the system has given a page to who asked for memory. 0 where that was
    not measured.
    """

    name: str
    ghz: float
    vector_bytes: int
    registers: int  # of vectors
    multiply_adds: float
    dots: float
    loads: float
    stores: float
    sum_latency: float
    dot_latency: float
    l1: Cache
    l2: Cache
    l3: Cache
    memory_bytes: float
    shared_memory_bytes: float
    wake_cycles: float = 1000.0
    launch_cycles: float = 60.0
    tile_dot_cycles: float = 0.0
    tile_l1_cycles: float = 0.0
    tile_l2_cycles: float = 0.0
    tile_wake_cycles: float = 0.0
    operations: float = 0.0
    tlb_bytes: float = inf
    page_cycles: float = 0.0
    place_cycles: float = 0.0
    fault_cycles: float = 0.0
    storage_gbs: float = 2.0  # 10^9 bytes a second from the file system that holds programs, past the page cache
    copy_cores: float = 0.24  # that copies from there take of kernels on all cores, and of what these get of memory
    item_bytes: int = 4  # of the numbers that are counted
    resident: int = 1  # cores that parallel work is dealt to without waking any: of a GPU, lanes

    @property
    def lanes(self) -> int:
        """Numbers in a vector."""
        return max(self.vector_bytes // self.item_bytes, 1)

    @property
    def issued(self) -> float:
        """Instructions of vectors in a cycle, where they are of several kinds."""
        return max(self.operations, self.multiply_adds)

    @property
    def flops_per_second(self) -> float:
        """Of multiply-adds of float32, two each, on one core."""
        return 2 * self.multiply_adds * self.vector_bytes / 4 * self.ghz * 1e9

    def of_items(self, item_bytes: int) -> Machine:
        """The same core as it computes numbers of so many bytes, four at least."""
        return replace(self, item_bytes=max(item_bytes, 4))

    def level_of(self, size_bytes: float) -> Cache | None:
        """The nearest cache that holds so many bytes; None for memory."""
        return next((level for level in (self.l1, self.l2, self.l3) if size_bytes <= level.size_bytes), None)

    def read_cycles(self, size_bytes: float, source_bytes: float | None = None, threads: int = 1) -> float:
        """Cycles in which each of `threads` cores reads its share of `size_bytes` in order, when all of them touched
        `source_bytes` (those bytes themselves by default) since: from its own L1 or L2 if that holds a core's share of these,
        from L3 if that holds all, or from memory."""
        touched = size_bytes if source_bytes is None else source_bytes
        level = next((one for one in (self.l1, self.l2) if touched / threads <= one.size_bytes), self.l3)
        if level is not self.l3 or touched <= level.size_bytes:
            return size_bytes / threads / level.bytes_per_cycle
        return max(size_bytes / threads / self.memory_bytes, size_bytes / self.shared_memory_bytes)

    def walk_cycles(self, size_bytes: float, source_bytes: float, threads: int = 1) -> float:
        """Cycles in which each of `threads` cores looks up the pages of its share of `size_bytes` of constants, when
        `source_bytes` were touched since."""
        pages = size_bytes / PAGE_BYTES / threads
        return pages * self.page_cycles if source_bytes / threads > self.tlb_bytes else 0.0

    def slowed_by_copies(self, kernels: float, copies: float, threads: int) -> float:
        """How many times as long kernels on all of `threads` cores take that are beside copies from files, where both take so
        long alone.

        One thread leaves the copies a core. The rows' 0.24 cores are those of two threads on two cores of Zen 4
        (`benchmarks/results/2026-11-28-streaming-*`): a call took longer by 12% of its copies' time, 8 to 30%. Where a host's
        work for the copies runs on the same cores, it is up to one.
        """
        if threads == 1 or kernels <= 0:
            return 1.0
        return 1.0 + self.copy_cores / threads * min(copies / kernels, 1.0)

    def fitted(self, measured: Mapping[str, object]) -> Machine:
        """This machine with the numbers that `as_fit` wrote; what is no number that it knows is left out.

        Where multiply-adds were slower than the core can make them, another thread of it had the rest, which takes no less of
        the loads: else a tile of one vector, with a load for each multiply-add, would seem as good as any.
        """
        rates = {name: float(value) for name, value in measured.items() if name in self.as_fit() and _is_rate(value)}
        rates = self.as_fit() | rates
        rates["loads"] = min(rates["loads"], self.loads * max(rates["multiply_adds"] / self.multiply_adds, _LEAST_SHARE))
        return self._with(rates)

    def is_fit_of(self, row: Machine) -> bool:
        """Whether this is a row, or one with other numbers where a fit may have others."""
        return self._with(row.as_fit()) == row

    def _with(self, numbers: Mapping[str, float]) -> Machine:
        """This machine with all the numbers that a fit may replace."""
        rates = dict(numbers)
        sized = replace(self, l3=replace(self.l3, size_bytes=int(rates.pop(_L3_SIZE))))
        levels = {
            name: replace(getattr(sized, name), bytes_per_cycle=rates.pop(f"{name}_bytes_per_cycle"))
            for name in ("l1", "l2", "l3")
        }
        return replace(self, **rates, **levels)  # type: ignore[arg-type]

    def as_fit(self) -> dict[str, float]:
        """The numbers that a fit may replace, as JSON values."""
        numbers = {name: float(getattr(self, name)) for name in _FITTED} | {_L3_SIZE: float(self.l3.size_bytes)}
        return numbers | {f"{name}_bytes_per_cycle": getattr(self, name).bytes_per_cycle for name in ("l1", "l2", "l3")}


_LEAST_SHARE = 0.5  # of a core that two threads share
_L3_SIZE = "l3_size_bytes"  # of which a core is faster than memory: of a cache that others use, no one is told its share
_FITTED = (
    "ghz",
    "multiply_adds",
    "dots",
    "loads",
    "stores",
    "memory_bytes",
    "shared_memory_bytes",
    "wake_cycles",
    "launch_cycles",
    "tile_dot_cycles",
    "tile_l1_cycles",
    "tile_l2_cycles",
    "tile_wake_cycles",
    "storage_gbs",
    "copy_cores",
)


def _is_rate(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def _caches(l1: tuple[int, int, float], l2: tuple[int, int, float], l3: tuple[int, int, float]) -> tuple[Cache, Cache, Cache]:
    """L1 and L2 in KiB, L3 in MiB: size, ways, bytes a cycle."""
    return Cache(l1[0] * _KIB, *l1[1:]), Cache(l2[0] * _KIB, *l2[1:]), Cache(l3[0] * _MIB, *l3[1:])


def _core(
    name: str,
    ghz: float,
    vectors: Mapping[int, tuple[float, float, float, float]],
    latencies: tuple[float, float],
    caches: tuple[Cache, Cache, Cache],
    memory: tuple[float, float],
    tile: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    operations: tuple[tuple[int, float], ...] = (),
    pages: tuple[float, float, float, float] = (inf, 0.0, 0.0, 0.0),
) -> dict[int, Machine]:
    """One core by the lanes of its vectors: multiply-adds, dot products, loads and stores a cycle for each width it has.

    `operations` by lanes, where they are known. `pages`: MiB that translations are kept for, and cycles of what waits for pages.
    """
    return {
        lanes: Machine(
            name,
            ghz,
            4 * lanes,
            32 if lanes == 16 else 16,
            *rates,
            *latencies,
            *caches,
            *memory,
            tile_dot_cycles=tile[0],
            tile_l1_cycles=tile[1],
            tile_l2_cycles=tile[2],
            tile_wake_cycles=tile[3],
            operations=dict(operations).get(lanes, 0.0),
            tlb_bytes=pages[0] * _MIB,
            page_cycles=pages[1],
            place_cycles=pages[2],
            fault_cycles=pages[3],
        )
        for lanes, rates in vectors.items()
    }


# What is assumed of a core that is not known: two multiply-adds and two loads, caches that nothing newer has less of.
GENERIC = "generic"
_ROWS: dict[str, dict[int, Machine]] = {
    GENERIC: _core(
        GENERIC,
        3.0,
        {8: (2, 0, 2, 1), 16: (2, 2, 2, 1)},
        (4, 6),
        _caches((32, 8, 64), (1024, 8, 26), (16, 16, 16)),
        (5, 10),
        (16, 16, 22, 7500),
    ),
    "zen2": _core("zen2", 3.2, {8: (2, 0, 2, 1)}, (5, 5), _caches((32, 8, 64), (512, 8, 26), (16, 16, 14)), (6, 12)),
    "zen3": _core("zen3", 3.4, {8: (2, 0, 2, 1)}, (4, 4), _caches((32, 8, 64), (512, 8, 26), (32, 16, 14)), (6, 12)),
    "zen4": _core(
        "zen4",
        3.7,
        {8: (2, 2, 2, 1), 16: (1, 1, 1, 0.5)},
        (4, 6),
        _caches((32, 8, 64), (1024, 8, 26), (32, 16, 14)),
        (6, 12),
        operations=((16, 2),),
        pages=(12.28, 70, 1600, 1100),
    ),
    "zen5": _core(
        "zen5", 3.9, {8: (2, 2, 2, 1), 16: (2, 2, 2, 1)}, (4, 6), _caches((48, 12, 128), (1024, 16, 26), (32, 16, 16)), (5, 10)
    ),
    "haswell": _core("haswell", 3.0, {8: (2, 0, 2, 1)}, (5, 5), _caches((32, 8, 64), (256, 8, 26), (20, 16, 8)), (5, 10)),
    "skylake": _core("skylake", 3.4, {8: (2, 0, 2, 1)}, (4, 4), _caches((32, 8, 64), (256, 4, 30), (8, 16, 10)), (5, 9)),
    "skylake-x": _core(
        "skylake-x", 2.8, {8: (2, 0, 2, 1), 16: (2, 0, 2, 1)}, (4, 6), _caches((32, 8, 128), (1024, 16, 40), (16, 11, 8)), (5, 15)
    ),
    "icelake": _core(
        "icelake", 2.9, {8: (2, 0, 2, 1), 16: (2, 0, 2, 1)}, (4, 6), _caches((48, 12, 128), (1280, 20, 40), (24, 12, 8)), (5, 15)
    ),
    "sapphire-rapids": _core(
        "sapphire-rapids",
        3.0,
        {8: (2, 1, 2, 2), 16: (2, 0.5, 2, 1)},
        (4, 6),
        _caches((48, 12, 128), (2048, 16, 48), (32, 15, 8)),
        (5, 20),
        (16, 16, 22, 7500),
    ),
}
# By maker and family, the model numbers of each core.
_MODELS: tuple[tuple[str, int, range, str], ...] = (
    ("AuthenticAMD", 23, range(0x30, 0x100), "zen2"),
    ("AuthenticAMD", 25, range(0x10), "zen3"),
    ("AuthenticAMD", 25, range(0x20, 0x60), "zen3"),
    ("AuthenticAMD", 25, range(0x10, 0x20), "zen4"),
    ("AuthenticAMD", 25, range(0x60, 0xB0), "zen4"),
    ("AuthenticAMD", 26, range(0x100), "zen5"),
    *(("GenuineIntel", 6, range(model, model + 1), "haswell") for model in (60, 63, 69, 70, 61, 71, 79, 86)),
    *(("GenuineIntel", 6, range(model, model + 1), "skylake") for model in (78, 94, 142, 158, 165, 166)),
    ("GenuineIntel", 6, range(85, 86), "skylake-x"),
    *(("GenuineIntel", 6, range(model, model + 1), "icelake") for model in (106, 108, 125, 126, 140, 141, 167)),
    *(("GenuineIntel", 6, range(model, model + 1), "sapphire-rapids") for model in (143, 207, 173, 174)),
)
# A thread of a GPU, as the loop nests of CPUs are written for it; architectures get rows of their own.
_GPU_THREAD = replace(_ROWS[GENERIC][16], name="gpu-thread", vector_bytes=4, registers=64, storage_gbs=20.0)  # over PCIe 4


def names() -> tuple[str, ...]:
    """The cores that rows are known of."""
    return tuple(_ROWS)


def row(name: str, lanes: int) -> Machine:
    """The row of a core for vectors of `lanes` float32; the generic core's where the named one has no such vectors.

    Raises:
        KeyError: there is no core of that name.
    """
    return _ROWS[name].get(lanes) or _ROWS[GENERIC][lanes]


def gpu_thread() -> Machine:
    """What loop nests that each thread of a GPU runs are written for."""
    return _GPU_THREAD


def gpu_lanes(gpu: GpuMachine) -> Machine:
    """A GPU as a processor whose cores are its lanes, for estimates: parallel work is dealt to all of them, others are of
    the whole GPU. What a lane waits for, other threads hide."""
    lanes = gpu.multiprocessors * gpu.fma_flops // 2
    l2_bytes = gpu.multiprocessors * gpu.l2_bytes / lanes
    return replace(
        _GPU_THREAD,
        name=gpu.name,
        ghz=gpu.ghz,
        multiply_adds=1,
        loads=gpu.shared_bytes_a_clock * gpu.multiprocessors / lanes / 4,
        stores=gpu.shared_bytes_a_clock * gpu.multiprocessors / lanes / 4,
        sum_latency=1,
        l1=Cache(2 * _KIB, 4, l2_bytes),
        l2=Cache(2 * _KIB, 4, l2_bytes),
        l3=Cache(gpu.l2_size_bytes, 16, l2_bytes),
        memory_bytes=gpu.memory_bytes / lanes,
        shared_memory_bytes=gpu.memory_bytes,
        wake_cycles=0.0,
        launch_cycles=gpu.launch_cycles,
        resident=lanes,
    )


def core_of(cpu_model: str) -> str:
    """The name of the row for a processor as `target.host_cpu_model` writes it; "generic" for one that is not known."""
    found = re.fullmatch(r"(\w+) family (\d+) model (\d+)( amx)?", cpu_model)
    if found is None:
        return GENERIC
    if found[4]:
        return "sapphire-rapids"
    maker, family, model = found[1], int(found[2]), int(found[3])
    return next((core for one, kin, models, core in _MODELS if (one, kin) == (maker, family) and model in models), GENERIC)


def host_machine(cpu_model: str, lanes: int) -> Machine:
    """The row of this machine's processor, with the sizes and ways of caches that its system tells.

    Virtual machines are told all of an L3 that tens of cores of their host share; of it no more counts than `_MOST_L3_OF_CORE`
    for each core that is there.
    """
    machine = row(core_of(cpu_model), lanes)
    found = dict(system_caches())
    if "l3" in found:
        size_bytes, ways = found["l3"]
        found["l3"] = min(size_bytes, _MOST_L3_OF_CORE * (os.cpu_count() or 1)), ways
    return replace(
        machine,
        **{  # type: ignore[arg-type]
            name: replace(level, size_bytes=found[name][0], ways=found[name][1])
            for name in ("l1", "l2", "l3")
            if name in found and isinstance(level := getattr(machine, name), Cache)
        },
    )


@cache
def system_caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> Mapping[str, tuple[int, int]]:
    """Bytes and ways of the data caches of the first core, by "l1" to "l3"; those that Linux does not tell are not there."""
    found: dict[str, tuple[int, int]] = {}
    for index in sorted(folder.glob("index*")):
        try:
            kind, level, size, ways = (
                (index / name).read_text().strip() for name in ("type", "level", "size", "ways_of_associativity")
            )
        except OSError:
            continue
        numbers = re.fullmatch(r"(\d+)K", size), re.fullmatch(r"\d+", ways)
        if kind != "Instruction" and all(numbers) and level in ("1", "2", "3") and int(ways) > 0:
            found[f"l{level}"] = int(size[:-1]) * _KIB, int(ways)
    return found
