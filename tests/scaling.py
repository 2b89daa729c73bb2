"""How the time of a function grows, on a machine that has other work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

_ROUNDS = 24  # at most: the limit is met in the first on a machine with nothing else to do
_ENOUGH = 5  # rounds whose median says something


def assert_scales(prepare: Callable[[int], Callable[[], object]], small: int, large: int, limit: float) -> None:
    """The work of size `large` takes at most `limit` times that of size `small`, in processor time of this process.

    `prepare(size)` makes the work, untimed. Small and large runs alternate, with the garbage collector off, and the best of each
    counts, or the median of the rounds' quotients: what disturbs a run only ever adds time, but where the processor's speed
    changes by seconds a small run finds a fast moment that no large one fits into, which the two runs of one round share. Rounds
    are added while neither meets the limit, up to a fixed number.
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

    rounds: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        rounds.append((seconds(small), seconds(large)))
        best = min(one for _, one in rounds) / min(one for one, _ in rounds)
        usual = median(after / before for before, after in rounds)
        if best <= limit or (len(rounds) >= _ENOUGH and usual <= limit):
            return
    raise AssertionError(f"{large / small:g} times the size takes {min(best, usual):.2f} times as long, more than {limit}")
