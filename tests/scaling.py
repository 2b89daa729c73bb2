"""How the time of a function grows, on a machine that has other work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_ROUNDS = 24  # at most: the limit is met in the first on a machine with nothing else to do


def assert_scales(prepare: Callable[[int], Callable[[], object]], small: int, large: int, limit: float) -> None:
    """The work of size `large` takes at most `limit` times that of size `small`, in processor time of this process.

    `prepare(size)` makes the work, untimed. Small and large runs alternate and the best of each counts, with the garbage
    collector off: what disturbs a run only ever adds time, so rounds are added while the limit is not met, up to a fixed number.
    Nothing is collected before a run: that walks through all that other tests have made, and takes longer than most passes.
    """

    def seconds(size: int) -> float:
        work = prepare(size)
        gc.disable()
        begin = time.process_time()
        try:
            work()
        finally:
            taken = time.process_time() - begin
            gc.enable()
        return taken

    best_small = best_large = float("inf")
    for _ in range(_ROUNDS):
        best_small, best_large = min(best_small, seconds(small)), min(best_large, seconds(large))
        if best_large <= limit * best_small:
            return
    raise AssertionError(f"{large / small:g} times the size takes {best_large / best_small:.2f} times as long, more than {limit}")
