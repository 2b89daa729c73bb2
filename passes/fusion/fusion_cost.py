"""What a fusion saves: one function of numbers alone, for all passes that choose.

Cycles of one core, as `kernels/cost` counts them: bytes no longer moved and launches saved, against operations repeated and bytes
read again. Threads divide all of them alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.cost.memory import COPIED_BYTES

MAX_TENSORS = 16  # tensors of a kernel, at most, whose addresses stay in registers
LAUNCH_CYCLES = 60.0  # of a call of a kernel
REGION_CYCLES = 7_000.0  # where threads sleep they are woken, and the last one is always waited for


@dataclass(frozen=True, slots=True)
class Join:
    """What changes when groups become one kernel, or several: each figure is that of afterwards, less that of before.

    `saved_bytes` are written or read no more; `added_bytes` are read or written more often. `recomputed_operations` are scalar,
    negative where less is computed than before. `saved_regions` are the launches of `saved_launches` that wake threads.
    """

    saved_bytes: int
    added_bytes: int = 0
    recomputed_operations: float = 0.0
    saved_launches: int = 1
    saved_regions: int = 0
    tensors: int = 0  # that the largest kernel reads and writes afterwards
    operators: int = 0  # that it holds


def saved_cycles(join: Join, lanes: int, threads: int = 1) -> float:
    """Of a run, on each of the threads; negative where joining costs more than it saves."""
    travelled = (join.saved_bytes - join.added_bytes) / COPIED_BYTES
    computed = join.recomputed_operations / lanes
    return (travelled - computed) / threads + join.saved_launches * LAUNCH_CYCLES + join.saved_regions * REGION_CYCLES


def drawback(join: Join, lanes: int, max_operators: int, threads: int = 1) -> str:
    """Why groups should stay apart; empty if joining them pays."""
    if join.operators > max_operators:
        return f"the group would have more than {max_operators} nodes"
    if join.tensors > MAX_TENSORS:
        return f"the group would read and write {join.tensors} tensors, more than {MAX_TENSORS}"
    if (saved := saved_cycles(join, lanes, threads)) <= 0:
        again = [f"{join.recomputed_operations:.0f} operations"] if join.recomputed_operations > 0 else []
        again += [f"{join.added_bytes} bytes"] if join.added_bytes else []
        return f"{' and '.join(again) or 'nothing'} again for {join.saved_bytes} bytes saved costs {-saved:.0f} cycles"
    return ""
