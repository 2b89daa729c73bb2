"""Turns: calls that are compared get theirs in rounds, each in an order of its own, and only ratios inside a round mean anything.

Between two engines there is a pause, until the threads of the one before sleep; and calls that do not count, as it has left the
caches and the cores as it needed them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from threading import Barrier, Thread

import numpy as np

Call = Callable[[], object]
Block = Callable[[], Sequence[float]]  # makes the calls of a turn; seconds of each that counts
Rounds = dict[str, list[list[float]]]  # by name: seconds of the calls of each round

PAUSE_SECONDS = 0.1
LEAST_ROUNDS = 5  # of what is to be compared: quartiles of fewer say nothing


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of ratios of rounds between their quartiles."""

    median: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether one side is ahead: the quartiles are on one side of 1."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def seconds_of(call: Call) -> float:
    """Of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def block_of(call: Call, calls: int, warm_up: int = 1, warm_seconds: float = 0.0) -> Block:
    """A turn of so many calls, behind others that do not count: so many, for so long, as a core that wakes is slow at first."""

    def block() -> list[float]:
        end = time.perf_counter() + warm_seconds
        made = 0
        while made < warm_up or time.perf_counter() < end:
            call()
            made += 1
        return [seconds_of(call) for _ in range(calls)]

    return block


def take_turns(blocks: Mapping[str, Block], rounds: int, pause: float = PAUSE_SECONDS, warm_up: int = 0) -> Rounds:
    """Rounds in which each block has its turn, in a drawn order; the first `warm_up` rounds do not count."""
    shuffle, found = random.Random(0), {name: list[list[float]]() for name in blocks}
    for number in range(warm_up + rounds):
        for name in shuffle.sample(list(blocks), len(blocks)):
            time.sleep(pause)
            times = list(blocks[name]())
            if number >= warm_up:
                found[name].append(times)
    return found


def together(*calls: Call) -> float:
    """Seconds until all of these calls, begun at the same moment and each made once, have ended. Raises what one of them does."""
    gate, failures = Barrier(len(calls)), list[BaseException]()

    def run(call: Call) -> None:
        gate.wait()
        try:
            call()
        except BaseException as error:  # which is raised in the caller's thread
            failures.append(error)

    threads = [Thread(target=run, args=(call,)) for call in calls[1:]]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.perf_counter()
    try:
        calls[0]()
    finally:
        for thread in threads:
            thread.join()
    seconds = time.perf_counter() - begin
    if failures:
        raise failures[0]
    return seconds


def medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Of each round."""
    return [median(times) for times in rounds]


def spread(ratios: Sequence[float]) -> Spread:
    """Of ratios of rounds."""
    low, middle, high = np.quantile(list(ratios), (0.25, 0.5, 0.75)).tolist()
    return Spread(middle, low, high)


def ratios(ones: Sequence[float], others: Sequence[float]) -> Iterator[float]:
    """Round by round."""
    return (one / other for one, other in zip(ones, others, strict=True))


def compared(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Spread:
    """How many times as long the calls of the one take as those of the other: ratios of the medians of rounds."""
    return spread(list(ratios(medians(ones), medians(others))))


def in_milliseconds(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Raw times for a file of results."""
    return [[round(1e3 * one, 6) for one in times] for times in rounds]
