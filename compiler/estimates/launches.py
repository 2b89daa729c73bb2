"""How long each launch of a program takes, by the estimates of its kernels: where its operands come from is known here.

They come from the caches that keep them while all is touched that was since they were: the reuse distance of a cache that
replaces what was not used for longest (Mattson et al.: Evaluation techniques for storage hierarchies, IBM Systems Journal 9/2,
1970).
Constants were last read in the call before, unless an earlier launch reads them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx

from ...runtime.target import Target
from ..lowering.planning import LoweredGroup, launch_label


@dataclass(frozen=True, slots=True)
class Distances:
    """Bytes that are touched after a launch's largest constant, or activation, was, before it is again.

    A constant is read in the same order each time, so that half of the launch comes before an element of it; an activation, which
    may be written in another order than it is read, is counted until the launch is through.
    """

    constants: float
    activations: float


def predicted_us(lowered: Sequence[LoweredGroup], target: Target) -> dict[str, float]:
    """Microseconds of each launch, by its label; none of a kernel without an estimate. On GPUs nothing is known of caches."""
    if target.is_gpu:
        estimates = {launch_label(item): item.kernel.estimate for item in lowered}
        return {label: _us(one.wall_cycles(target.machine), target) for label, one in estimates.items() if one is not None}
    found = {}
    parallel = {item.symbol: has_parallel_loop(item.kernel.function) for item in lowered} if target.threads > 1 else {}
    for item, since in zip(lowered, reuse_distances(lowered), strict=True):
        if (estimate := item.kernel.estimate) is None:
            continue
        threads = target.threads if parallel.get(item.symbol) else 1
        cycles = estimate.wall_cycles(target.machine, threads, since.constants, since.activations)
        found[launch_label(item)] = _us(cycles, target)
    return found


def _us(cycles: float, target: Target) -> float:
    return cycles / target.machine.ghz / 1e3


def has_parallel_loop(function: Any) -> bool:
    """Whether a kernel deals its work to threads, as it was written: small ones do not, nor some of short programs."""

    def visit(loop: Any) -> Any:
        return tvm_ffi.VisitInterrupt(True) if loop.kind == tirx.ForKind.PARALLEL else None

    return tvm_ffi.structural_walk(function.body, (tirx.For, visit)) is not None


def reuse_distances(lowered: Sequence[LoweredGroup]) -> list[Distances]:
    """Of each launch. None is more than all the different bytes that a call touches.

    Half of what a launch touches comes after an element that it reads or writes. An alias, or an input of the graph, is thought
    to be of the launch before; that of the first is the call before, whose memory it writes to.
    """
    sizes = [_touched_bytes(item) for item in lowered]
    most, clock, before = _different_bytes(lowered), 0.0, -float(sum(sizes))
    touched = _last_read(lowered, sizes)
    found = []
    for item, size in zip(lowered, sizes, strict=True):
        constant, activation = (_largest(item, names) for names in (_constants(item), _activations(item)))
        middle = clock + size / 2
        read, written = (touched.get(name, before) for name in (constant, activation))
        found.append(Distances(min(middle - read, most), min(clock + size - written, most)))
        before = middle
        touched |= dict.fromkeys((*item.group.inputs, *item.group.outputs), before)
        clock += size
    return found


def _last_read(lowered: Sequence[LoweredGroup], sizes: Sequence[int]) -> dict[str, float]:
    """When the call before read each constant for the last time, in bytes touched before this call."""
    clock, found = -float(sum(sizes)), dict[str, float]()
    for item, size in zip(lowered, sizes, strict=True):
        found |= dict.fromkeys(_constants(item), clock + size / 2)
        clock += size
    return found


def _different_bytes(lowered: Sequence[LoweredGroup]) -> float:
    """Of all that a call touches: a constant once, however many launches read it."""
    constants = {name: item.group.types[name].size_bytes for item in lowered for name in _constants(item)}
    besides = sum(_touched_bytes(item) - (item.kernel.estimate.constant_bytes if item.kernel.estimate else 0) for item in lowered)
    return float(sum(constants.values()) + besides)


def _touched_bytes(item: LoweredGroup) -> int:
    """Of a launch, each once. Of a table no more than is chosen."""
    moved = item.kernel.estimate.bytes_moved if item.kernel.estimate else 0
    return item.kernel.workspace_bytes + moved


def _largest(item: LoweredGroup, names: Iterable[str]) -> str:
    """The value of the most bytes; empty if there is none."""
    return max(names, key=lambda name: item.group.types[name].size_bytes, default="")


def _constants(item: LoweredGroup) -> list[str]:
    """Those of a group, by their names in the graph."""
    return [name for name in item.group.inputs if name in item.group.constants]


def _activations(item: LoweredGroup) -> list[str]:
    return [name for name in item.group.inputs if name not in item.group.constants]
