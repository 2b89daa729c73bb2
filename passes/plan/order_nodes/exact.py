"""The order of a small graph in which the fewest bytes live at once, found or proved by a search over sets of nodes.

What lives after some nodes have run depends on which they are, not on their order: so the search is for the path through sets of
nodes whose worst step is least (Dijkstra's algorithm with the maximum for the sum; Ahn et al.: Ordering Chaos, MLSys 2020, search
the same sets). A node that is ready, takes no more than the worst step so far while it runs and adds nothing after it runs at
once: no order that puts it later is better, for before it there would only be more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from .dataflow import Dataflow


class _State(NamedTuple):
    """`peak`: the worst step on the way here; `left`: nodes that have not run; `done`: those that have, as bits."""

    peak: int
    left: int
    live: int
    done: int


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
        self.readers = [sum(1 << reader for reader in readers) for readers in flow.readers]
        self.peaks: dict[int, int] = {}  # of the best way to each set
        self.came: dict[int, tuple[int, tuple[int, ...]]] = {}  # that way: from which set, by which nodes
        self.queue: list[_State] = []

    def run(self, states: int) -> list[int] | None:
        everything, looked_at = (1 << self.count) - 1, set[int]()
        self._reach(_State(0, self.count, 0, 0), 0, ())
        while self.queue and len(looked_at) < states:
            state = heappop(self.queue)
            if state.done == everything:
                return self._path(everything)
            if state.done not in looked_at:
                looked_at.add(state.done)
                for node in self._ready(state.done):
                    self._reach(self._after(state, node), state.done, (node,))
        return None

    def _path(self, done: int) -> list[int]:
        ways = []
        while done:
            done, way = self.came[done]
            ways.append(way)
        return [node for way in reversed(ways) for node in way]

    def _reach(self, state: _State, origin: int, way: tuple[int, ...]) -> None:
        """Go on from a state, when all nodes have run that run at once, if this is the best way there so far."""
        ready = iter(self._ready(state.done))
        while (node := next(ready, None)) is not None:
            after = self._after(state, node)
            if after.peak == state.peak and after.live <= state.live:
                state, way = after, (*way, node)
                ready = iter(self._ready(state.done))
        if state.peak < min(self.known_peak, self.peaks.get(state.done, self.known_peak)):
            self.peaks[state.done] = state.peak
            self.came[state.done] = origin, way
            heappush(self.queue, state)

    def _ready(self, done: int) -> list[int]:
        return [node for node in range(self.count) if not done >> node & 1 and not self.before[node] & ~done]

    def _after(self, state: _State, node: int) -> _State:
        """What comes of running a node that is ready."""
        flow, done = self.flow, state.done | 1 << node
        working = state.live + sum(flow.sizes[tensor] for tensor in flow.makes[node])
        dead = (tensor for tensor in flow.reads[node] + flow.makes[node] if not self.readers[tensor] & ~done)
        live = working - sum(flow.sizes[tensor] for tensor in dead)
        return _State(max(state.peak, working), state.left - 1, live, done)
