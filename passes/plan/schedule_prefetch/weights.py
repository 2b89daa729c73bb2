"""Which weights stay in memory, and when the others come: a pure function of sizes, uses and times.

A call reads its weights in a fixed order. Those that stay cost no traffic; the rest pass through what is left of the memory, the
*window*, each from its copy to its last reader. A larger window lets copies run further ahead, a smaller one leaves more weights
where they are: of a few sizes of it the one is taken with which a call is simulated to be shortest. Resident weights lie evenly
between the others, so that neither the copies nor the kernels wait for long stretches of the other; what several distant steps
read stays first, for it would come several times; where it cannot, it stays over the shorter gaps between its readers.

Copies are made in the order of first use, each as soon as its bytes fit until its last reader is done beside all that is live
(Cao, Felten, Karlin, Li: A study of integrated prefetching and caching strategies, SIGMETRICS 1995: next missing first, first
opportunity, do no harm).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_WINDOWS = 24  # sizes of the window that are tried
_NEAR = 3  # steps from the first reader to the last, over which a weight stays anyway


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes, as they lie in memory, and the steps that read them, in order."""

    size_bytes: int
    uses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a call is made of: seconds and bytes of other things at each step, weights, and what there is for all of them.

    Bytes come at `bandwidth` a second, after `latency` seconds for each copy.
    """

    seconds: tuple[float, ...]
    live_bytes: tuple[int, ...]
    weights: tuple[Weight, ...]
    limit_bytes: int
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Stay:
    """A weight from its copy, which may begin when step `after` is complete (-1: with the call), to its reader `last`."""

    weight: int
    after: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The weights that stay, the others' stays in the order of their copies, and the simulated seconds of a call."""

    residents: frozenset[int]
    stays: tuple[Stay, ...]
    seconds: float
    stalls: tuple[float, ...]  # how long each step waits for copies


def choose(setting: Setting, *, runs_ahead: bool = True) -> Choice | None:
    """The best choice found; None where nothing fits. Unless it `runs_ahead`, a weight comes when its first reader is next."""
    if least_limit(setting)[0] > setting.limit_bytes:
        return None
    room = setting.limit_bytes - max(setting.live_bytes, default=0)
    windows = {*np.linspace(0, room, _WINDOWS).astype(np.int64).tolist()}
    windows |= {*np.geomspace(1, max(room, 1), _WINDOWS).astype(np.int64).tolist()}
    best: Choice | None = None
    for window in sorted(windows):
        residents = _residents(setting.weights, room - window)
        for reserve in sorted({0, window // 2, window}):
            choice = _stream(setting, residents, reserve, runs_ahead=runs_ahead)
            if choice is not None and (best is None or choice.seconds < best.seconds):
                best = choice
    return best


def least_limit(setting: Setting) -> tuple[int, int]:
    """The smallest limit that any schedule can keep, and the step that asks for it: which needs all its weights at once."""
    needed = np.array(setting.live_bytes, np.int64)
    for weight in setting.weights:
        needed[list(set(weight.uses))] += weight.size_bytes
    step = int(needed.argmax()) if needed.size else 0
    return int(needed.max(initial=0)), step


def _residents(weights: Sequence[Weight], room: int) -> frozenset[int]:
    """Weights of at most `room` bytes together: those that would come most often, then some of each stretch of the others."""
    chosen: set[int] = set()
    for index in sorted(range(len(weights)), key=lambda index: (-len(weights[index].uses), index)):
        size_bytes = weights[index].size_bytes
        if _comes_often(weights[index]) and size_bytes <= room:
            chosen.add(index)
            room -= size_bytes
    others = sorted((index for index in range(len(weights)) if index not in chosen), key=lambda index: weights[index].uses)
    left = sum(weights[index].size_bytes for index in others)
    share, due = min(room / left, 1.0) if left else 0.0, 0.0
    for number, index in enumerate(others):  # as Bresenham draws a line: the first, then whenever a whole one is due
        size_bytes = weights[index].size_bytes
        due += share * size_bytes
        if size_bytes <= room and (due >= size_bytes * (0.5 if number else 0.0)) and share > 0:
            chosen.add(index)
            room -= size_bytes
            due -= size_bytes
    return frozenset(chosen)


def _comes_often(weight: Weight) -> bool:
    return weight.uses[-1] - weight.uses[0] > _NEAR


def _stretches(setting: Setting, taken: np.ndarray, residents: frozenset[int], reserve: int) -> list[tuple[int, int, int]]:
    """The first and the last step of each stay, and the weight that stays, in order. `taken` are the bytes that are not theirs.

    Between two uses a weight stays if its bytes fit all the time beside what the steps read and what stays already, and `reserve`
    bytes more; the shortest gaps come first, for they keep the fewest bytes from others.
    """
    others = [index for index in range(len(setting.weights)) if index not in residents]
    filled = taken.copy()
    for index in others:
        filled[list(setting.weights[index].uses)] += setting.weights[index].size_bytes
    gaps = [(after - before, before, after, index) for index in others for before, after in pairwise(setting.weights[index].uses)]
    kept = set()
    for length, before, after, index in sorted(gaps):
        between, size_bytes = filled[before + 1 : after], setting.weights[index].size_bytes
        if length == 1 or between.max() + size_bytes + reserve <= setting.limit_bytes:
            between += size_bytes
            kept.add((index, before))
    found = []
    for index in others:
        first = before = setting.weights[index].uses[0]
        for use in setting.weights[index].uses[1:]:
            if (index, before) not in kept:
                found.append((first, before, index))
                first = use
            before = use
        found.append((first, before, index))
    return sorted(found)


def _stream(setting: Setting, residents: frozenset[int], reserve: int, *, runs_ahead: bool) -> Choice | None:
    """Let all weights but the residents come as early as they fit; None where one never does."""
    resident_bytes = sum(setting.weights[index].size_bytes for index in residents)
    taken = np.array(setting.live_bytes, np.int64) + resident_bytes
    if taken.max(initial=0) > setting.limit_bytes:
        return None
    stays: list[Stay] = []
    earliest = -1
    for first, last, index in _stretches(setting, taken, residents, reserve):
        size_bytes = setting.weights[index].size_bytes
        full = np.flatnonzero(taken[earliest + 1 : last + 1] + size_bytes > setting.limit_bytes)
        after = earliest if not full.size else earliest + 1 + int(full[-1])
        after = after if runs_ahead else max(after, first - 1)
        if after >= first:
            return None
        taken[after + 1 : last + 1] += size_bytes
        stays.append(Stay(index, after, first, last))
        earliest = after
    seconds, stalls = simulate(setting, stays)
    return Choice(residents, tuple(stays), seconds, stalls)


def simulate(setting: Setting, stays: Sequence[Stay]) -> tuple[float, tuple[float, ...]]:
    """Seconds of a call in which kernels and copies run side by side, and how long each step waits."""
    begins: dict[int, list[Stay]] = {}
    for stay in stays:
        begins.setdefault(stay.after, []).append(stay)
    arrivals: dict[int, float] = {}  # of what a step is the first to read
    copied, now = 0.0, 0.0
    stalls = []
    for index in range(-1, len(setting.seconds)):
        if index >= 0:
            begin = max(now, arrivals.get(index, 0.0))
            stalls.append(begin - now)
            now = begin + setting.seconds[index]
        for stay in begins.get(index, ()):
            seconds = setting.latency + setting.weights[stay.weight].size_bytes / setting.bandwidth
            copied = max(copied, now) + seconds
            arrivals[stay.first] = max(arrivals.get(stay.first, 0.0), copied)
    return max(now, copied), tuple(stalls)
