"""What a program is compiled for, and whether this machine is such a thing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import OptionError

# Instruction-set levels of x86-64, lowest first, with the /proc/cpuinfo flags that each needs.
_CPU_LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "avx512": ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
_FIX = "use one of " + ", ".join(['"cpu"', *(f'"cpu:{level}"' for level in _CPU_LEVELS)])


@dataclass(frozen=True, slots=True)
class Target:
    """A device kind, its instruction-set level and the threads that one call uses.

    `str(target)` is canonical and round-trips through `Target.parse`.
    """

    kind: str
    level: str
    threads: int

    @classmethod
    def parse(cls, text: str, threads: int | None = None) -> Target:
        """Read "cpu" (the best level of this machine), "cpu:avx2" or "cpu:avx512", optionally with ",threads=N".

        Raises:
            OptionError: the text names no target, or the machine has none of the levels.
        """
        head, _, tail = text.partition(",")
        kind, _, level = head.partition(":")
        if tail.startswith("threads=") and tail[8:].isdigit() and threads is None:
            threads, tail = int(tail[8:]), ""
        if kind != "cpu" or tail or (level and level not in _CPU_LEVELS):
            raise OptionError("target", f"unknown target {text!r}", _FIX)
        if threads is not None and not 1 <= threads <= 1024:
            raise OptionError("threads", f"{threads} is not between 1 and 1024", "leave it out to use every core of this process")
        return cls(kind, level or best_cpu_level(), threads or len(os.sched_getaffinity(0)))

    def __str__(self) -> str:
        return f"{self.kind}:{self.level},threads={self.threads}"

    @property
    def vector_lanes(self) -> int:
        """float32 lanes of one vector register."""
        return {"avx2": 8, "avx512": 16}[self.level]

    @property
    def vector_registers(self) -> int:
        return {"avx2": 16, "avx512": 32}[self.level]

    def missing_features(self) -> tuple[str, ...]:
        """CPU features that this target needs and this machine lacks; empty where a program for it can run."""
        return tuple(flag for flag in _CPU_LEVELS[self.level] if flag not in host_cpu_flags())


@cache
def host_cpu_flags() -> frozenset[str]:
    """CPU feature flags as Linux names them; empty where /proc/cpuinfo cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def best_cpu_level() -> str:
    """The highest level this machine runs.

    Raises:
        OptionError: it has not even AVX2.
    """
    for level in reversed(_CPU_LEVELS):
        if all(flag in host_cpu_flags() for flag in _CPU_LEVELS[level]):
            return level
    raise OptionError("target", "this CPU has no AVX2", "prefuse needs an x86-64 CPU with AVX2 and FMA")
