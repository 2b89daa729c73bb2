"""How long each launch of a program takes, by the estimates of its kernels: where its operands come from is known here.

A constant that one launch reads comes from memory in every call, unless all that a call touches has room in L3. What several
launches read stays in L3 between them, as far as there is room. Activations come from the nearest cache with room for all that
was touched since they were written: the reuse distance of a cache that replaces what was not used for longest (Mattson et al.:
Evaluation techniques for storage hierarchies, IBM Systems Journal 9/2, 1970).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...runtime.target import Target
from ..lowering.planning import LoweredGroup, launch_label


def predicted_us(lowered: Sequence[LoweredGroup], target: Target) -> dict[str, float]:
    """Microseconds of each launch, by its label; none of a kernel without an estimate, nor on GPUs."""
    if target.is_gpu:
        return {}
    machine = target.machine
    readers = Counter(name for item in lowered for name in _constants(item))
    touched = sum(kind.size_bytes for kind in {n: item.group.types[n] for item in lowered for n in _constants(item)}.values())
    shared = sum({n: item.group.types[n].size_bytes for item in lowered for n in _constants(item) if readers[n] > 1}.values())
    found = {}
    for item, distance in zip(lowered, reuse_distances(lowered), strict=True):
        if (estimate := item.kernel.estimate) is None:
            continue
        again = all(readers[name] > 1 for name in _constants(item))
        cycles = estimate.wall_cycles(machine, target.threads, float(shared if again else touched), distance / target.threads)
        found[launch_label(item)] = cycles / machine.ghz / 1e3
    return found


def reuse_distances(lowered: Sequence[LoweredGroup]) -> list[float]:
    """For each launch the bytes that are touched from the time when its largest activation was written until it is through.

    Half of what the writer touches comes after an element of it. What no launch writes, as an alias or an input of the graph, is
    thought to be of the launch before; that of the first is the call before, whose memory it writes to.
    """
    sizes = [_touched_bytes(item) for item in lowered]
    clock, before, found = 0.0, -float(sum(sizes)), []
    written: dict[str, float] = {}
    for item, touched in zip(lowered, sizes, strict=True):
        group = item.group
        activations = [name for name in group.inputs if name not in group.constants]
        largest = max(activations, key=lambda name: group.types[name].size_bytes, default="")
        found.append(clock - written.get(largest, before) + touched)
        before = clock + touched / 2
        written |= dict.fromkeys(group.outputs, before)
        clock += touched
    return found


def _touched_bytes(item: LoweredGroup) -> int:
    """Of a launch, each once. Of a table no more than is chosen."""
    moved = item.kernel.estimate.bytes_moved if item.kernel.estimate else 0
    return item.kernel.workspace_bytes + moved


def _constants(item: LoweredGroup) -> list[str]:
    """Those of a group, by their names in the graph."""
    return [name for name in item.group.inputs if name in item.group.constants]
