"""What a program is compiled for, and whether this machine is such a thing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .errors import OptionError, ProgramFileError
from .fit_file import find_fit
from .gpu.binary import architecture_of
from .hardware import machine as machines
from .hardware import tile_state
from .hardware.cores import usable_cores
from .hardware.gpu import gpu_machine, has_byte_products, has_matrix_unit
from .hardware.machine import Machine

_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI = ("avx512_vnni",)
# Instruction-set levels of x86-64, lowest first, with the /proc/cpuinfo flags that each needs.
_CPU_LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "avx_vnni"),  # without AVX-512: Alder Lake and what followed it, Sierra Forest
    "avx512": (*_AVX2, *_AVX512),
    "avx512vnni": (*_AVX2, *_AVX512, *_VNNI),
    "avx512bf16": (*_AVX2, *_AVX512, *_VNNI, "avx512_bf16"),
    "amx": (*_AVX2, *_AVX512, *_VNNI, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
}
AMX_EMULATED = "amx-emulated"  # the kernels of "amx", its tiles computed in loops: how machines without it test them; slow
# The kernels of "avx512bf16", compiled for AVX2: any machine of x86-64 tests them, with the results of the instructions; slow.
BFLOAT16_EMULATED = "avx512bf16-emulated"
VNNI_EMULATED = "avxvnni-emulated"  # the kernels of "avxvnni", in the same way
# For each level that no user asks for, the features that its kernels are written for.
_TEST_LEVELS = {
    AMX_EMULATED: _CPU_LEVELS["avx512"],
    BFLOAT16_EMULATED: _CPU_LEVELS["avx512bf16"],
    VNNI_EMULATED: _CPU_LEVELS["avxvnni"],
}
_ASSUMED = _CPU_LEVELS | _TEST_LEVELS  # by kernels, by level
_REQUIRED = _ASSUMED | {BFLOAT16_EMULATED: _AVX2, VNNI_EMULATED: _AVX2}  # of the machine that runs them
VNNI = "vnni"  # VPDPBUSD of the widest vectors: either of the features that have it
_EITHER = {VNNI: ("avx512_vnni", "avx_vnni")}
# Architectures of GPUs, as their makers write them: NVIDIA's compute capability, AMD's shader core.
_GPU_LEVELS: dict[str, re.Pattern[str]] = {"cuda": re.compile(r"sm_\d{2,3}[af]?"), "rocm": re.compile(r"gfx[0-9a-f]{3,4}")}
_SIMULATED = {"cuda-sim": ("cuda", "sm_90"), "rocm-sim": ("rocm", "gfx942")}  # kind, and level where none is named
_EXAMPLES = {"cuda": "cuda:sm_90", "rocm": "rocm:gfx942"}
_FIX = "use one of " + ", ".join(f'"{name}"' for name in ("cpu", *(f"cpu:{level}" for level in _CPU_LEVELS), *_EXAMPLES.values()))


@dataclass(frozen=True, slots=True)
class Target:
    """A device kind, its architecture or instruction-set level, and the CPU threads that one call uses (1 on a GPU).

    With `is_simulated`, programs of a GPU run in the simulator on the CPU (cuda-sim, rocm-sim).
    `machine` is what costs are estimated for, as a compiler's -mtune beside its -march: programs for the target run wherever its
    level does. `str(target)` says all but that, and round-trips through `Target.parse`.
    """

    kind: str
    level: str
    threads: int = 1
    machine: Machine = field(default=None)  # type: ignore[assignment]  # the generic core of the level where none is given
    is_simulated: bool = False

    def __post_init__(self) -> None:
        if self.machine is None:
            generic = (
                machines.gpu_lanes(gpu_machine(self.level))
                if self.is_gpu
                else machines.row(_generic_of(self.level), _lanes_of(self.level))
            )
            object.__setattr__(self, "machine", generic)

    @classmethod
    def parse(cls, text: str, threads: int | None = None) -> Target:
        """Read "cpu" (the best level of this machine), "cpu:avx2", "cpu:avxvnni", "cpu:avx512", "cpu:avx512vnni",
        "cpu:avx512bf16" or "cpu:amx", optionally with ",threads=N" and ",machine=zen4"; or "cuda" (the first GPU of this
        machine), "cuda:sm_90", "rocm:gfx942" and the like, or "cuda-sim" (kernels of sm_90 on the simulator), "cuda-sim:sm_80",
        "rocm-sim" (of gfx942).

        "cpu" alone is for this very processor, with the numbers that `prefuse doctor --fit` measured where it did; with a level,
        programs are for any that has it, and costs are those of a generic core unless a machine is named.

        Raises:
            OptionError: the text names no target, or the machine has none of the levels.
        """
        head, *tail = text.split(",")
        kind, _, level = head.partition(":")
        if kind in _SIMULATED and not tail:
            name, usual = _SIMULATED[kind]
            real = cls._parse_gpu(text, name, level or usual, threads)
            return cls(real.kind, real.level, is_simulated=True)
        if kind in _GPU_LEVELS and not tail:
            return cls._parse_gpu(text, kind, level, threads)
        options = dict(part.partition("=")[::2] for part in tail)
        if options.get("threads", "").isdecimal():
            in_text = int(options.pop("threads"))
            if threads not in (None, in_text):
                what = f"{threads} given beside the target {text!r}, which has {in_text}"
                raise OptionError("threads", what, "give one of them")
            threads = in_text
        named = options.pop("machine", None)
        if kind != "cpu" or options or (level and level not in _ASSUMED):
            raise OptionError("target", f"unknown target {text!r}", _FIX)
        if named is not None and named not in machines.names():
            raise OptionError("target", f"no processor {named!r} is known", f"use one of {', '.join(machines.names())}")
        if threads is not None and not 1 <= threads <= 1024:
            raise OptionError("threads", f"{threads} is not between 1 and 1024", "leave it out to use every core of this process")
        found = level or best_cpu_level()
        core = machines.row(named or _generic_of(found), _lanes_of(found))
        if not level and named is None:
            core = _host_core(_lanes_of(found))
        return cls(kind, found, threads or usable_cores(), core)

    @classmethod
    def _parse_gpu(cls, text: str, kind: str, level: str, threads: int | None) -> Target:
        if threads is not None:
            raise OptionError("threads", f"{text} has no CPU threads to choose", "leave the option out")
        level = level or _installed_gpu(kind)
        if not _GPU_LEVELS[kind].fullmatch(level):
            raise OptionError("target", f"unknown target {text!r}", f'write it as "{_EXAMPLES[kind]}"')
        return cls(kind, level)

    def __str__(self) -> str:
        kind = f"{self.kind}-sim" if self.is_simulated else self.kind
        return f"{kind}:{self.level}" + ("" if self.is_gpu else f",threads={self.threads}")

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def vector_lanes(self) -> int:
        """float32 lanes of one vector register; a GPU thread has none."""
        return 1 if self.is_gpu else 16 if self.has("avx512f") else 8

    @property
    def vector_registers(self) -> int:
        """Vector registers that a tile of sums may take; on a GPU, registers of one thread."""
        return 64 if self.is_gpu else 32 if self.has("avx512f") else 16

    @property
    def is_host(self) -> bool:
        """Whether costs are those of this very processor, so that what was measured on it may stand for what is assumed; whether
        the numbers that a fit replaces are those of its row, or of a fit, is no difference."""
        return not self.is_gpu and self.machine.is_fit_of(machines.host_machine(host_cpu_model(), _lanes_of(self.level)))

    @property
    def is_here(self) -> bool:
        """Whether what is measured on this machine may stand for what costs assume: they are those of this very processor, or of
        the generic core of the level, but not those of another processor that somebody named."""
        return self.is_host or (not self.is_gpu and self.machine.name == _generic_of(self.level))

    def has(self, flag: str) -> bool:
        """Whether kernels for this target may use a CPU feature, by its name in /proc/cpuinfo or `VNNI`, or what computes the
        same."""
        assumed = _ASSUMED.get(self.level, ())
        return any(one in assumed for one in _EITHER.get(flag, (flag,)))

    @property
    def has_tiles(self) -> bool:
        """Whether kernels may use a unit for products of tiles, or must pretend to."""
        return self.level in ("amx", AMX_EMULATED)

    @property
    def multiplies_pairs(self) -> bool:
        """Whether vectors multiply pairs of bfloat16 twice as fast as float32; CPUs with tiles do so at half the rate."""
        return self.has("avx512_bf16") and not self.has_tiles

    @property
    def reads_narrow(self) -> bool:
        """Whether kernels of products read operands of narrow types as they lie."""
        return not self.is_gpu or has_matrix_unit(self.level)

    @property
    def multiplies_bytes(self) -> bool:
        """Whether kernels of products multiply 8-bit integers, no slower than floats and from fewer bytes."""
        return not self.is_gpu or has_byte_products(self.level)

    @property
    def fuses_prologues(self) -> bool:
        """Whether kernels compute the operands of their anchors where they read them; on a GPU they read them from memory."""
        return not self.is_gpu

    @property
    def has_channels_last(self) -> bool:
        """Whether kernels compute convolutions and poolings of tensors whose channels are neighbours."""
        return not self.is_gpu or has_matrix_unit(self.level)

    def missing_features(self) -> tuple[str, ...]:
        """CPU features that this target needs and this machine lacks; empty where a program for it can be read.

        A program for a GPU can be read anywhere: its device says at the first call whether it can run.
        """
        return tuple(flag for flag in _REQUIRED.get(self.level, ()) if flag not in host_cpu_flags())


def _host_core(lanes: int) -> Machine:
    """The row of this machine's processor, with what was measured of it."""
    model = host_cpu_model()
    row, fit = machines.host_machine(model, lanes), find_fit(model, lanes)
    return row if fit is None else row.fitted(fit.numbers)


def _generic_of(level: str) -> str:
    """The core that stands for all that have a level: those with tiles are much alike."""
    return "sapphire-rapids" if level in ("amx", AMX_EMULATED) else machines.GENERIC


def _lanes_of(level: str) -> int:
    """float32 lanes of a vector of a CPU level."""
    return 16 if "avx512f" in _ASSUMED.get(level, ()) else 8


def _installed_gpu(kind: str) -> str:
    """The architecture of this machine's first GPU.

    Raises:
        OptionError: it has none, or none that can be asked.
    """
    fix = f'name one, as in "{_EXAMPLES[kind]}"'
    from .gpu.driver import DriverError
    from .gpu.installed import driver

    try:
        gpu = driver(kind)
        with gpu.active():
            return gpu.architecture()
    except DriverError as error:
        raise OptionError("target", f'"{kind}" is the GPU of this machine: {error}', fix) from error


def check_binary(binary: bytes, target: Target, where: str) -> None:
    """Raise ProgramFileError if a program's binary is not for its target's kind of GPU and architecture."""
    found = architecture_of(binary)
    wanted = f"{target.kind}:{target.level.rstrip('af') if target.kind == 'cuda' else target.level}"
    if found not in (wanted, "rocm") or not wanted.startswith(found.partition(":")[0]):
        what = f"a binary for {found}" if found else "no binary for a GPU"
        raise ProgramFileError(where, f"{what}, the plan is for {target}", "compile the model again")


@cache
def host_cpu_flags() -> frozenset[str]:
    """CPU feature flags as Linux names them; empty where /proc/cpuinfo cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


@cache
def host_cpu_model() -> str:
    """What distinguishes this CPU's design: maker, family and model number, as in "AuthenticAMD family 26 model 2"; the many
    names that one design is sold by do not count. "unknown" where /proc/cpuinfo cannot be read.

    Some hypervisors name an older design than it is: what has tiles where the named one has none gets " amx" behind it.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    if "vendor_id" not in facts:
        return "unknown"
    model = f"{facts['vendor_id']} family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    has_tiles = "amx_tile" in facts.get("flags", "").split()
    return f"{model} amx" if has_tiles and not machines.row(machines.core_of(model), 16).tile_dot_cycles else model


def best_cpu_level() -> str:
    """The highest level this machine runs, and its system lets this process run.

    Raises:
        OptionError: it has not even AVX2.
    """
    for level in reversed(_CPU_LEVELS):
        has_flags = all(flag in host_cpu_flags() for flag in _CPU_LEVELS[level])
        if has_flags and not (level == "amx" and tile_state.refusal()):
            return level
    raise OptionError("target", "this CPU has no AVX2", "prefuse needs an x86-64 CPU with AVX2 and FMA")
