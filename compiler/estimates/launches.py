"""How long each launch of a program takes, by the estimates of its kernels: where its operands come from is known here.

They come from the caches that keep them while all is touched that was since they were: the reuse distance of a cache that
replaces what was not used for longest (Mattson et al.: Evaluation techniques for storage hierarchies, IBM Systems Journal 9/2,
1970).
Constants were last read in the call before, unless an earlier launch reads them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import tvm_ffi
from tvm import tirx

from ...kernels.cost.estimate import Estimate, bytes_of_values
from ...runtime.hardware.machine import PAGE_BYTES
from ...runtime.target import Target
from ..lowering.planning import LoweredGroup, launch_label
from .tile_unit import waiting_us

_NEW_BYTES = 128 << 10  # of what a C library does not take from what was given back
_WORKSPACE = "/workspace"  # no value of a graph is called so


@dataclass(frozen=True, slots=True)
class Distances:
    """Bytes that are touched after a launch's largest constant, or activation, was, before it is again.

    A constant is read in the same order each time, so that half of the launch's other operands, and all of itself, come between
    two reads of an element; an activation, which may be written in another order than it is read, is counted until the launch is
    through.
    """

    constants: float
    activations: float


def predicted_us(lowered: Sequence[LoweredGroup], target: Target) -> dict[str, float]:
    """Microseconds of each launch, by its label; none of a kernel without an estimate. On GPUs nothing is known of caches."""
    if target.is_gpu:
        estimates = {launch_label(item): item.kernel.estimate for item in lowered}
        return {label: _us(one.wall_cycles(target.machine), target) for label, one in estimates.items() if one is not None}
    found: dict[str, float] = {}
    parallel = {item.symbol: has_parallel_loop(item.kernel.function) for item in lowered} if target.threads > 1 else {}
    for item, since in zip(lowered, reuse_distances(lowered), strict=True):
        if (estimate := item.kernel.estimate) is None:
            continue
        threads = target.threads if parallel.get(item.symbol) else 1
        cycles = estimate.wall_cycles(target.machine, threads, since.constants, since.activations)
        found[launch_label(item)] = _us(cycles, target)
    times = [(item.kernel, found.get(launch_label(item), 0.0)) for item in lowered]
    for item, wait_us in zip(lowered, waiting_us(times, target), strict=True):
        if wait_us and (label := launch_label(item)) in found:
            found[label] += wait_us
    for item in lowered:
        if (fault_us := faulting_us(item, target)) and (label := launch_label(item)) in found:
            found[label] += fault_us
    return found


def faulting_us(item: LoweredGroup, target: Target) -> float:
    """How long a launch waits for the pages of large results of the caller's, for which each call asks the system."""
    results = [item.group.types[value.name].size_bytes for value in item.node.outputs if value.name and value.is_graph_output()]
    pages = sum(size_bytes // PAGE_BYTES for size_bytes in results if size_bytes >= _NEW_BYTES)
    return _us(pages * target.machine.fault_cycles, target)


def walking_us(estimate: Estimate, since: Distances, target: Target, threads: int) -> float:
    """How long a launch looks up pages of constants, which it finds known where it is launched again and again."""
    if estimate.constant_bytes / threads > target.machine.tlb_bytes:
        return 0.0
    return _us(target.machine.walk_cycles(estimate.constant_bytes, since.constants, threads), target)


def _us(cycles: float, target: Target) -> float:
    return cycles / target.machine.ghz / 1e3


def has_parallel_loop(function: Any) -> bool:
    """Whether a kernel deals its work to threads, as it was written: small ones do not, nor some of short programs."""

    def visit(loop: Any) -> Any:
        return tvm_ffi.VisitInterrupt(True) if loop.kind == tirx.ForKind.PARALLEL else None

    return tvm_ffi.structural_walk(function.body, (tirx.For, visit)) is not None


def reuse_distances(lowered: Sequence[LoweredGroup]) -> list[Distances]:
    """Of each launch, in a call among many. None is more than all the different bytes that a call touches.

    Half of what a launch touches comes after an element that it reads or writes. An alias, or an input of the graph, is thought
    to be of the launch before; that of the first is the call before, whose memory it writes to.
    """
    count, most = len(lowered), _different_bytes(lowered)
    touched, found = _Touched(2 * count), list[Distances]()
    for time, item in enumerate((*lowered, *lowered)):
        sizes = _bytes_of(item)
        if time >= count:
            constant, activation = (_largest(item, names) for names in (_constants(item), _activations(item)))
            read, written = touched.last.get(constant, time - 1), touched.last.get(activation, 0)
            others = sum(size for name, size in sizes.items() if touched.last.get(name) != read)
            since = touched.between(read, sizes) - others / 2
            until = touched.between(written if written >= count else time - 1, sizes)
            found.append(Distances(min(since, most), min(until, most)))
        touched.touch(sizes, time)
    return found


class _Touched:
    """What launches have touched last, by their number: a tree of partial sums over launches (Fenwick: A new data structure for
    cumulative frequency tables, Software: Practice and Experience 24/3, 1994)."""

    def __init__(self, launches: int) -> None:
        self.last: dict[str, int] = {}  # that touched a value
        self._sizes: dict[str, int] = {}
        self._of_launch = [0] * launches  # bytes that no later one has touched
        self._sums = [0] * (launches + 1)
        self._total = 0

    def touch(self, sizes: Mapping[str, int], launch: int) -> None:
        for name, size in sizes.items():
            if name in self.last:
                self._add(self.last[name], -self._sizes[name])
            self.last[name], self._sizes[name] = launch, size
            self._add(launch, size)

    def between(self, launch: int, sizes: Mapping[str, int]) -> float:
        """Different bytes from the middle of a launch to the end of the next one, which touches `sizes`."""
        new = sum(size for name, size in sizes.items() if self.last.get(name, -1) <= launch)
        again = sum(self._sizes[name] for name in sizes if self.last.get(name) == launch)
        return self._since(launch) + new + (self._of_launch[launch] - again) / 2

    def _add(self, launch: int, size: int) -> None:
        self._of_launch[launch] += size
        self._total += size
        at = launch + 1
        while at < len(self._sums):
            self._sums[at] += size
            at += at & -at

    def _since(self, launch: int) -> int:
        """Bytes that were touched last by later launches."""
        at, found = launch + 1, self._total
        while at:
            found -= self._sums[at]
            at -= at & -at
        return found


def _different_bytes(lowered: Sequence[LoweredGroup]) -> float:
    """Of all that a call touches: constants once, and memory for what lives at the same time, as others take the place of what
    has been read for the last time."""
    constants: dict[str, int] = {}
    lives: dict[str, tuple[int, int, int]] = {}  # of activations: first and last launch, bytes
    for number, item in enumerate(lowered):
        for name, size in _bytes_of(item).items():
            if name in item.group.constants:
                constants[name] = max(size, constants.get(name, 0))
            else:
                begin, _, _ = lives.get(name, (max(number - (name in item.group.inputs), 0), 0, 0))
                lives[name] = begin, number, size
    change = [0] * (len(lowered) + 1)
    for begin, end, size in lives.values():
        change[begin] += size
        change[end + 1] -= size
    return float(sum(constants.values()) + max(accumulate(change), default=0))


def _bytes_of(item: LoweredGroup) -> dict[str, int]:
    """What a launch touches of each value, and of the workspace, which is thought to be in one place for all launches."""
    sizes = bytes_of_values(item.group)
    return {**sizes, _WORKSPACE: item.kernel.workspace_bytes} if item.kernel.workspace_bytes else sizes


def _largest(item: LoweredGroup, names: Iterable[str]) -> str:
    """The value of the most bytes; empty if there is none."""
    return max(names, key=lambda name: item.group.types[name].size_bytes, default="")


def _constants(item: LoweredGroup) -> list[str]:
    """Those of a group, by their names in the graph."""
    return [name for name in item.group.inputs if name in item.group.constants]


def _activations(item: LoweredGroup) -> list[str]:
    return [name for name in item.group.inputs if name not in item.group.constants]
