"""How long launches wait for the tile unit (AMX), which turns itself off.

A Granite Rapids core whose tiles nobody multiplies for a while turns their unit off, and the next product waits until it is on
again: 2.4 us, whatever is multiplied then, and 5 where it was just about to go off. How long it stays on depends on how much it
has been used in the last milliseconds: between 1 and 2 us where a call multiplies tiles once, 14 to 40 where it does so again and
again (benchmarks: a chain of additions before 32, 256 and 2048 products). `Machine.tile_wake_cycles` is measured by `prefuse
doctor --fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...kernels.template.contract import BuiltKernel
from ...runtime.target import AMX_EMULATED, Target
from ..lowering.planning import LoweredGroup

AWAKE_US = 14.0  # for which the unit stays on at least, in programs that use it again and again
_SHORT = 8  # times what waking takes: products that take longer save more
_VECTORS = "avx512bf16"  # the level of processors with tiles, but for these


def uses_tiles(kernel: BuiltKernel) -> bool:
    """Whether a kernel multiplies by the tile unit."""
    return kernel.multiplies.startswith("tiles")


def waiting_us(launches: Iterable[tuple[BuiltKernel, float]], target: Target) -> Iterator[float]:
    """How long each launch waits for the unit, of kernels in their order that take so many microseconds without that.

    What is between calls turns the unit off; the first launch on tiles of a call always waits.
    """
    wake_us = 0.0 if target.level == AMX_EMULATED else target.machine.tile_wake_cycles / target.machine.ghz / 1e3
    idle_us = AWAKE_US
    for kernel, time_us in launches:
        if not uses_tiles(kernel):
            idle_us += time_us
            yield 0.0
            continue
        yield wake_us if idle_us >= AWAKE_US else 0.0
        idle_us = 0.0


def target_without(lowered: Sequence[LoweredGroup], target: Target) -> Target | None:
    """The target without its unit, where a program multiplies so little by it that vectors may be done before it is on; None
    elsewhere, and where a database says that a kernel is faster by it."""
    on_tiles = [item for item in lowered if uses_tiles(item.kernel)]
    if target.level == AMX_EMULATED or not on_tiles or any(item.group.configuration for item in on_tiles):
        return None
    cycles = sum(item.kernel.estimate.wall_cycles(target.machine) for item in on_tiles if item.kernel.estimate is not None)
    return replace(target, level=_VECTORS) if cycles < _SHORT * target.machine.tile_wake_cycles else None
