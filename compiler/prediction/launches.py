"""How long each launch of a program takes, by the estimates of its kernels: where its constants come from is known here.

A constant that one launch reads comes from memory in every call, unless all that a call touches has room in L3. What several
launches read stays in L3 between them, as far as there is room.
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
    for item in lowered:
        if (estimate := item.kernel.estimate) is None:
            continue
        again = all(readers[name] > 1 for name in _constants(item))
        cycles = estimate.wall_cycles(machine, target.threads, float(shared if again else touched))
        found[launch_label(item)] = cycles / machine.ghz / 1e3
    return found


def _constants(item: LoweredGroup) -> list[str]:
    """Those of a group, by their names in the graph."""
    return [name for name in item.group.inputs if name in item.group.constants]
