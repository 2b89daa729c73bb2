"""Packing of blocks with known lifetimes into one range of memory: offline dynamic storage allocation, which is NP-hard.

| file | what |
|---|---|
| `instance.py` | blocks, packings, and blocks as arrays |
| `skyline.py` | the lowest gap first: thousands of blocks in milliseconds |
| `exact.py` | a search for a capacity that ends with a packing or a proof |
| `best_fit.py` | block by block in several orders, and better ones made of these |
| `check.py` | whether a packing is right |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from . import best_fit, skyline
from .exact import Fitting, Problem
from .instance import MOST_BYTES, Block, Instance, Packing, lower_bound

__all__ = ["EFFORTS", "Block", "Effort", "Packing", "lower_bound", "pack"]

Effort: TypeAlias = Literal["quick", "default", "max"]
# What the exact search may take: nodes times blocks, of which a core visits some six million in a second, or less.
EFFORTS: dict[Effort, int] = {"quick": 0, "default": 4_000_000, "max": 300_000_000}
_NODE_COST = 300  # of a node beside its blocks, in blocks
_MOST_PAIRS = 4_000_000  # of blocks that meet, which the exact search lists
_FIRST_SHARE = 0.25  # of the nodes, for a search at the bound before blocks are ordered in other ways
_SECOND_SHARE = 0.6  # of what is left then; the rest is for less than the best so far


def pack(blocks: Sequence[Block], alignment: int = 1, *, capacity: int | None = None, effort: Effort = "default") -> Packing:
    """Give each block an offset, a multiple of `alignment`, such that no two blocks that live at one time share bytes.

    Where a `capacity` is given, any packing within it will do; else the least is looked for. Greedy packings come first, then the
    exact search, as long as `effort` lets it: about a second ("default") or a minute ("max"), counted in nodes, so that
    equal blocks are packed equally everywhere.

    Raises:
        ValueError: pinned blocks overlap, or are at no multiples of the alignment; or the blocks are larger than 2^60 bytes.
    """
    search = _Search(Instance(blocks, alignment), capacity, effort)
    _require_sound(search.instance, alignment)
    search.run()
    return Packing(tuple(search.offsets.tolist()), search.total, search.bound, search.nodes)


def _require_sound(instance: Instance, alignment: int) -> None:
    if float(instance.sizes.astype(np.float64).sum()) + float(instance.pins.max(initial=0)) > MOST_BYTES:
        raise ValueError("the blocks are larger than 2^60 bytes")
    if (instance.pins[instance.pins >= 0] % alignment).any():
        raise ValueError(f"a pinned block is at no multiple of {alignment}")
    pinned = [int(i) for i in np.flatnonzero((instance.pins >= 0) & (instance.sizes > 0))]
    ends = instance.pins + instance.sizes
    for rank, i in enumerate(pinned):
        others = np.array(pinned[rank + 1 :], np.int64)
        lives = (instance.lower[others] < instance.upper[i]) & (instance.upper[others] > instance.lower[i])
        meets = lives & (instance.pins[others] < ends[i]) & (ends[others] > instance.pins[i])
        if meets.any():
            raise ValueError(f"blocks {i} and {int(others[meets][0])} are pinned to the same bytes while both live")


class _Search:
    """The best packing so far, and what is left of the effort."""

    def __init__(self, instance: Instance, capacity: int | None, effort: Effort) -> None:
        self.instance = instance
        self.bound = instance.bound
        self._target = self.bound if capacity is None else max(self.bound, capacity)
        self._is_least = capacity is None
        self._left = EFFORTS[effort] // (_NODE_COST + instance.count)
        self.offsets = np.zeros(instance.count, np.int64)
        self.total = instance.total(self.offsets) if instance.count < 2 and not instance.has_pins else -1
        self.nodes = 0

    def run(self) -> None:
        if self.total >= 0:
            return
        if not self.instance.has_pins:
            for key in skyline.keys(self.instance):
                if not self._is_done:
                    self._take(skyline.place(self.instance, key))
        fitting = self._fitting()
        if fitting is not None and self._is_least:
            self._run(fitting, int(_FIRST_SHARE * self._left))
        if not self._is_done:
            self._take(best_fit.place(self.instance, self._target, improves=self._left > 0))
        if fitting is not None and not self._is_done:
            self._run(fitting, int(_SECOND_SHARE * self._left) if self._is_least else self._left)
            if self._is_least:
                self._bisect(fitting.problem)

    @property
    def _is_done(self) -> bool:
        return 0 <= self.total <= self._target

    def _take(self, offsets: np.ndarray | None) -> None:
        if offsets is None:
            return
        total = self.instance.total(offsets)
        if self.total < 0 or total < self.total:
            self.offsets, self.total = offsets, total

    def _fitting(self) -> Fitting | None:
        """The exact search at the target; None where there are too many blocks, some of zero bytes, or nothing to better."""
        is_small = Problem.pairs(self.instance) <= _MOST_PAIRS and bool(self.instance.sizes.all())
        return Fitting(Problem(self.instance), self._target) if is_small and not self._is_done else None

    def _run(self, fitting: Fitting, nodes: int) -> None:
        before = fitting.nodes
        self._take(fitting.run(nodes))
        self._left -= fitting.nodes - before
        self.nodes += fitting.nodes - before

    def _bisect(self, problem: Problem) -> None:
        """Search between what is not known to be possible and the best so far."""
        low = self._target
        while self.total - low > 1 and self._left > 1:
            middle, before = (low + self.total) // 2, self.total
            self._run(Fitting(problem, middle), self._left // 2)
            if self.total == before:
                low = middle
