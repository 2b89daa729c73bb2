"""The order of a small graph in which the fewest bytes live at once, found or proved by a search over sets of nodes.

What lives after some nodes have run depends on which they are, not on their order: so the search is for the path through sets of
nodes whose worst step is least (Dijkstra's algorithm with the maximum for the sum; Ahn et al.: Ordering Chaos, MLSys 2020, search
the same sets). A node that is ready, takes no more than the worst step so far while it runs and adds nothing after it runs at
once: no order that puts it later is better, for before it there would only be more bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from .dataflow import Dataflow


class _State(NamedTuple):
    """`peak`: the worst step on the way here; `left`: how many nodes have not run; as bits, `done`: those that have, and `ready`:
    those that may run next."""

    peak: int
    left: int
    live: int
    done: int
    ready: int


def best_order(flow: Dataflow, states: int, known: Sequence[int]) -> list[int] | None:
    """An order with a lower peak than the known one's, the lowest that there is; None if there is none, or none is found before
    so many sets of nodes have been looked at.
    """
    return _Search(flow, flow.peak_bytes(known)).run(states)


class _Search:
    def __init__(self, flow: Dataflow, known_peak: int) -> None:
        self.flow = flow
        self.count = len(flow.needs)
        self.known_peak = known_peak
        self.before = [0] * self.count  # of each node, the nodes it needs, as bits
        for node, followers in enumerate(flow.after):
            for follower in followers:
                self.before[follower] |= 1 << node
        readers = [sum(1 << reader for reader in readers) for readers in flow.readers]
        self.made = [sum(flow.sizes[tensor] for tensor in tensors) for tensors in flow.makes]  # bytes
        # Of each node, what may die with it: its size and its readers.
        touched = [reads + makes for reads, makes in zip(flow.reads, flow.makes, strict=True)]
        self.touched = [[(flow.sizes[tensor], readers[tensor]) for tensor in tensors] for tensors in touched]
        self.peaks: dict[int, int] = {}  # of the best way to each set
        self.came: dict[int, tuple[int, tuple[int, ...]]] = {}  # that way: from which set, by which nodes
        self.queue: list[_State] = []

    def run(self, states: int) -> list[int] | None:
        everything, looked_at = (1 << self.count) - 1, set[int]()
        first = sum(1 << node for node, needed in enumerate(self.before) if not needed)
        self._reach(_State(0, self.count, 0, 0, first), 0, ())
        while self.queue and len(looked_at) < states:
            state = heappop(self.queue)
            if state.done == everything:
                return self._path(everything)
            if state.done not in looked_at:
                looked_at.add(state.done)
                for node in _bits(state.ready):
                    self._go_on(state, node)
        return None

    def _path(self, done: int) -> list[int]:
        ways = []
        while done:
            done, way = self.came[done]
            ways.append(way)
        return [node for way in reversed(ways) for node in way]

    def _go_on(self, state: _State, node: int) -> None:
        """Run a node that is ready, unless that takes as much as the known order does."""
        peak = max(state.peak, state.live + self.made[node])
        if peak < self.known_peak:
            live, done = self._live_after(state, node), state.done | 1 << node
            self._reach(_State(peak, state.left - 1, live, done, self._ready_after(state, node)), state.done, (node,))

    def _reach(self, state: _State, origin: int, way: tuple[int, ...]) -> None:
        """Go on from a state, when all nodes have run that run at once, if this is the best way there so far."""
        ready = _bits(state.ready)
        while (node := next(ready, None)) is not None:
            if state.live + self.made[node] <= state.peak and (live := self._live_after(state, node)) <= state.live:
                done = state.done | 1 << node
                state, way = _State(state.peak, state.left - 1, live, done, self._ready_after(state, node)), (*way, node)
                ready = _bits(state.ready)
        if state.peak < min(self.known_peak, self.peaks.get(state.done, self.known_peak)):
            self.peaks[state.done] = state.peak
            self.came[state.done] = origin, way
            heappush(self.queue, state)

    def _live_after(self, state: _State, node: int) -> int:
        """The bytes that live when a node that is ready has run."""
        remaining, live = ~(state.done | 1 << node), state.live + self.made[node]
        for size, readers in self.touched[node]:
            if not readers & remaining:
                live -= size
        return live

    def _ready_after(self, state: _State, node: int) -> int:
        """What is ready when a node that is ready has run, as bits."""
        done, ready = state.done | 1 << node, state.ready & ~(1 << node)
        for follower in self.flow.after[node]:
            if self.before[follower] & ~done == 0:
                ready |= 1 << follower
        return ready


def _bits(mask: int) -> Iterator[int]:
    """The positions of ones, from the lowest."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
