"""Kernels that each do one thing a processor is described by, as often as it takes to time it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from ...kernels.codegen.builder import KernelBuilder
from ...kernels.formats.format import BF16_DOT, F32
from ...kernels.microkernels.amx_unit import COLUMNS, TILE_WORDS, WORDS, tile_unit
from ...runtime.executor import CompiledModel
from ...runtime.hardware.machine import Machine
from ...runtime.plan import ARENA, CALLER, CONSTANTS, Buffer, Kernel, Launch, Plan, Port, Region, Role, Space, TensorType
from ...runtime.program_file import Program
from ...runtime.target import Target
from .program import build_library
from .roofline import ROUNDS, SUMS, TILE_ROUNDS, TILE_SUMS, multiply_add_kernel, multiply_tiles_kernel

LAUNCHES = 64  # of what is too short for one
_CHAIN = 64  # pairs of an addition and an exclusive or in a round: its loop hides behind them
_CHAIN_ROUNDS = 2000
LATE_PRODUCTS = 1200  # a multiple of the sums in registers
_PAUSE, _PAUSE_ROUNDS = "pause", 8000  # a third of a millisecond, in which tile units turn themselves off
_ACCUMULATORS = 8  # of what is read
_READ_BYTES = 4 << 20  # of a cache, in all rounds: tens of microseconds at least
_WARMING, _READS = 4, 9  # launches: a cache of what others evict has all of it only after some of them
_REWARMING, _REREADS = 1, 3  # of more than that
_L3_TIMES = (1, 2, 3)
_LEAST_FAR_BYTES, _MOST_FAR_BYTES = 128 << 20, 1 << 30
_FAR_CACHES = 12  # times L3: little of what was read stays there until it is read again, also of more than is told
NEAR_SHARE = 0.5  # of a cache that is read: it is a core's own, but for L3, which others use
_STORED_BYTES = 8 << 10
_STORE_ROUNDS = 2000
_TILE_BYTES = 32 << 20  # loaded into tiles from a cache, in all rounds: a third of a millisecond at least, as of products
_EVERY_THREAD = 1 << 30  # operations, which all threads pay for
_RESULTS = 1 << 10  # int32 that a thread stores, at most
# A step of a block of 2x2 tiles: the register that is loaded, then the products (sums, A, B) that it completes.
_BLOCK = ((4, ()), (6, ((0, 4, 6),)), (7, ((1, 4, 7),)), (5, ((2, 5, 6), (3, 5, 7))))
_BLOCK_TILES = len(_BLOCK)


@dataclass(frozen=True, slots=True)
class Probe:
    """A kernel of no operands but memory that it reads or writes, and how often it does what is counted: instructions or bytes.

    `launches` in a row are one measurement, of which the first `warming` do not count. Where `behind` names another probe, each
    comes behind a launch of that one, and what is usual counts.
    """

    name: str
    function: Any
    amount: float
    launches: int = 1
    warming: int = 0
    behind: str = ""

    @property
    def sequence(self) -> tuple[str, ...]:
        """All its launches, by the names of probes."""
        return self.launches * ((self.behind, self.name) if self.behind else (self.name,))

    @property
    def counted(self) -> slice:
        """Those of the sequence that count."""
        apart = 2 if self.behind else 1
        return slice(apart * (self.warming + 1) - 1, None, apart)


def probe_program(target: Target) -> tuple[CompiledModel, tuple[Probe, ...]]:
    """A program of one input, an int32, that launches each probe in order; the first one writes all memory that is read."""
    elements = far_bytes(target.machine) // 4
    probes = _probes(target, elements)
    plan = _plan(target, probes, elements)
    library = build_library(plan, {probe.name: probe.function for probe in probes}, target, profile=True)
    return CompiledModel(Program(plan, library, np.empty(0, np.uint8), {"name": "machine"})), probes


def far_bytes(machine: Machine) -> int:
    """Of what is read from memory: several times what caches hold."""
    return min(max(_FAR_CACHES * machine.l3.size_bytes, _LEAST_FAR_BYTES), _MOST_FAR_BYTES)


def l3_reads(machine: Machine) -> dict[str, int]:
    """Bytes that are read again and again, by the names of their probes, to see how much of L3 a core has: where its cores share
    it with those of others, more or less than the system says."""
    sizes = {f"l3_times_{times}": times * machine.l3.size_bytes for times in _L3_TIMES}
    return {name: size for name, size in sizes.items() if size < far_bytes(machine)}


def sweep_kernel(target: Target, size_bytes: int) -> tuple[Any, int]:
    """A kernel of (memory, result) in which each thread reads its share of so many bytes, 4 MiB at least: smaller caches hold
    nothing else then. And the int32 of its result."""
    return _Writer(target, size_bytes // 4).read("sweep", size_bytes).function, target.threads * _RESULTS


def _probes(target: Target, elements: int) -> tuple[Probe, ...]:
    """By the names of the numbers of `Machine.as_fit` that follow from them. What stores small integers comes after what
    multiplies, which would meet them as subnormal floats; what tiles multiply, at another clock, before what waits for memory."""
    one, all_threads = _Writer(replace(target, threads=1), elements), _Writer(target, elements)
    levels = {name: int(getattr(target.machine, name).size_bytes * NEAR_SHARE) for name in ("l1", "l2", "l3")}
    products = {"multiply_adds": F32} | ({"dots": BF16_DOT} if BF16_DOT.runs_on(target) else {})
    return (
        all_threads.fill(),
        one.chain("ghz", _CHAIN_ROUNDS),
        *(Probe(name, multiply_add_kernel(one.target, form), SUMS * ROUNDS) for name, form in products.items()),
        *(one.read(f"{name}_bytes_per_cycle", size, _READS, _WARMING) for name, size in levels.items()),
        *(one.tile_probes(levels) if target.has_tiles else ()),
        one.read("memory_bytes", 4 * elements),
        *((all_threads.read("shared_memory_bytes", 4 * elements),) if target.threads > 1 else ()),
        *(one.read(probe, size, _REREADS, _REWARMING) for probe, size in l3_reads(target.machine).items()),
        one.store(),
        one.nothing("launch_cycles"),
        *((all_threads.nothing("wake_cycles"),) if target.threads > 1 else ()),
        *((one.chain(_PAUSE, _PAUSE_ROUNDS), one.multiply_late()) if target.has_tiles else ()),
    )


class _Writer:
    """Writes kernels of (memory, result) for the threads of a target."""

    def __init__(self, target: Target, elements: int) -> None:
        self.target, self.elements, self.lanes = target, elements, target.machine.vector_bytes // 4

    def fill(self) -> Probe:
        """All memory becomes float32 ones."""
        builder, memory, _ = self._kernel()
        block = _ACCUMULATORS * self.lanes
        with builder.chunks(self.elements // block, _EVERY_THREAD) as i:
            for at in range(0, block, self.lanes):
                with builder.loop(self.lanes, "vectorized", "lane") as lane:
                    builder.store(memory, i * block + at + lane, tirx.const(0x3F800000, "int32"))
        return Probe("fill", builder.function(), 4 * self.elements)

    def chain(self, name: str, rounds: int) -> Probe:
        """Operations of one cycle, each of which waits for the one before it; they cannot be joined."""
        builder, memory, result = self._kernel()
        value = builder.local(1, "int32")
        added, flipped = builder.name(memory[0]), builder.name(memory[1])
        builder.store(value, 0, memory[2])
        with builder.loop(rounds, name="round"):
            for _ in range(_CHAIN):
                builder.store(value, 0, (value[0] + added) ^ flipped)
        builder.store(result, 0, value[0])
        return Probe(name, builder.function(), 2 * _CHAIN * rounds)

    def read(self, name: str, size_bytes: int, launches: int = 1, warming: int = 0) -> Probe:
        """So many bytes from the beginning of memory in order, each thread its share, again and again where they are few."""
        builder, memory, result = self._kernel()
        block, threads = _ACCUMULATORS * self.lanes, self.target.threads
        blocks, rounds = size_bytes // (4 * block * threads), max(_READ_BYTES // size_bytes, 1)
        with builder.chunks(threads, _EVERY_THREAD) as thread:
            sums = builder.local(block, "int32")
            self._each_vector(builder, lambda at: builder.store(sums, at, tirx.const(0, "int32")))
            with builder.loop(rounds, name="round"), builder.loop(blocks, name="block") as i:
                first = builder.bind((thread * blocks + i) * block)
                self._each_vector(builder, lambda at: builder.store(sums, at, sums[at] ^ memory[first + at]))
            self._each_vector(builder, lambda at: builder.store(result, thread * _RESULTS + at, sums[at]))
        return Probe(name, builder.function(), 4 * block * blocks * threads * rounds, launches, warming)

    def tile_probes(self, levels: Mapping[str, int]) -> tuple[Probe, ...]:
        """Products of tiles in registers, once the clock has fallen to theirs; and of tiles that are loaded before, from so many
        bytes of a cache."""
        registers = Probe("tile_dot_cycles", multiply_tiles_kernel(self.target), TILE_SUMS * TILE_ROUNDS, launches=4, warming=2)
        loaded = (self.multiply_loaded(f"tile_{name}_cycles", levels[name]) for name in ("l1", "l2"))
        return registers, *loaded

    def multiply_late(self) -> Probe:
        """`LATE_PRODUCTS` from registers, behind a chain of additions that is so long that the unit is off: a few products do not
        turn it on."""
        builder, memory, result = self._kernel()
        unit = tile_unit(builder, self.target)
        with builder.chunks(1, _EVERY_THREAD):
            unit.configure()
            for tile in range(TILE_SUMS):
                unit.zero(tile)
            for operand in (TILE_SUMS, TILE_SUMS + 1):
                unit.load(operand, memory, 0, WORDS)
            with builder.loop(LATE_PRODUCTS // TILE_SUMS, name="round"):
                for tile in range(TILE_SUMS):
                    unit.dot(tile, TILE_SUMS, TILE_SUMS + 1)
            unit.store(0, result, 0, COLUMNS)
            unit.release()
        return Probe("tile_wake_cycles", builder.function(), 1, launches=6, warming=2, behind=_PAUSE)

    def multiply_loaded(self, name: str, size_bytes: int) -> Probe:
        """Blocks of 2x2 tiles, as kernels multiply them (`amx_blocks.py`): four loads, each with a product behind it."""
        builder, memory, result = self._kernel()
        unit, steps = tile_unit(builder, self.target), size_bytes // (_BLOCK_TILES * TILE_WORDS * 4)
        rounds = _TILE_BYTES // (steps * _BLOCK_TILES * TILE_WORDS * 4)
        with builder.chunks(1, _EVERY_THREAD):
            unit.configure()
            for tile in range(4):
                unit.zero(tile)
            with builder.loop(rounds, name="round"), builder.loop(steps, name="step") as step:
                first = builder.bind(step * (_BLOCK_TILES * TILE_WORDS))
                for at, (register, products) in enumerate(_BLOCK):
                    unit.load(register, memory, first + at * TILE_WORDS, WORDS)
                    for sums, a, b in products:
                        unit.dot(sums, a, b)
            unit.store(0, result, 0, COLUMNS)
            unit.release()
        return Probe(name, builder.function(), rounds * steps * _BLOCK_TILES, launches=2, warming=1)

    def store(self) -> Probe:
        """Whole vectors to L1, in order, of what changes from round to round."""
        builder, memory, _ = self._kernel()
        block = _ACCUMULATORS * self.lanes
        blocks = _STORED_BYTES // (4 * block)
        with builder.loop(_STORE_ROUNDS, name="round") as number, builder.loop(blocks, name="block") as i:
            first = builder.bind(i * block)
            self._each_vector(builder, lambda at: builder.store(memory, first + at, number))
        return Probe("stores", builder.function(), _STORE_ROUNDS * blocks * _ACCUMULATORS)

    def nothing(self, name: str) -> Probe:
        """One number that each thread stores."""
        builder, _, result = self._kernel()
        with builder.chunks(self.target.threads, _EVERY_THREAD) as thread:
            builder.store(result, thread * _RESULTS, thread)
        return Probe(name, builder.function(), 1, LAUNCHES)

    def _kernel(self) -> tuple[KernelBuilder, Any, Any]:
        builder = KernelBuilder(self.target.machine, self.target.threads)
        memory = builder.parameter("memory", self.elements, "int32")
        return builder, memory, builder.parameter("result", self.target.threads * _RESULTS, "int32")

    def _each_vector(self, builder: KernelBuilder, body: Any) -> None:
        for at in range(0, _ACCUMULATORS * self.lanes, self.lanes):
            with builder.loop(self.lanes, "vectorized", "lane") as lane:
                body(at + lane)


def _plan(target: Target, probes: Sequence[Probe], elements: int) -> Plan:
    """Launches of all probes, on memory of the arena and one result."""
    size_bytes, results = 4 * elements, target.threads * _RESULTS
    memory, result = Region("memory", 0, size_bytes), Region("result", 0, 4 * results)
    return Plan(
        target=str(target),
        inputs=(Port("x", TensorType((1,), "int32"), "x"),),
        outputs=(Port("result", TensorType((results,), "int32"), "result"),),
        spaces=(Space(ARENA, size_bytes), Space(CONSTANTS), Space(CALLER)),
        buffers=(
            Buffer("x", Role.INPUT, 4, CALLER),
            Buffer("result", Role.OUTPUT, 4 * results, CALLER),
            Buffer("memory", Role.ACTIVATION, size_bytes, ARENA, 0),
        ),
        kernels=tuple(Kernel(probe.name, probe.name, 2, 0, 0) for probe in probes),
        steps=tuple(Launch(name, (memory,), (result,), label=name) for probe in probes for name in probe.sequence),
    )
