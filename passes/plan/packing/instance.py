"""Blocks of bytes with known lifetimes, as they are given, as arrays, and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

MOST_BYTES = 1 << 60  # of all blocks together: sums of 64-bit integers stay far from their end


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are needed during the half-open interval [lower, upper) of time; at `offset`, where that is given (pinned)."""

    lower: int
    upper: int
    size_bytes: int
    offset: int | None = None

    def __post_init__(self) -> None:
        assert self.lower < self.upper, self
        assert self.size_bytes >= 0, self
        assert self.offset is None or self.offset >= 0, self


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each block lies, in the order in which the blocks were given, and the bytes that all of them need together.

    `bound_bytes`: no packing takes less. `nodes`: of the exact search, which were visited for it.
    """

    offsets: tuple[int, ...]
    total_bytes: int
    bound_bytes: int = field(default=0, compare=False)
    nodes: int = field(default=0, compare=False)


class Instance:
    """Blocks as arrays of int64: sizes are rounded up to the alignment, times count the moments at which anything changes.

    `contention` is, for each block, the largest sum of sizes while it lives; `pins` are offsets, -1 where there is none.
    """

    def __init__(self, blocks: Sequence[Block], alignment: int = 1) -> None:
        lower = np.array([block.lower for block in blocks], np.int64)
        upper = np.array([block.upper for block in blocks], np.int64)
        self.sizes = np.array([-(-block.size_bytes // alignment) * alignment for block in blocks], np.int64)
        self.pins = np.array([-1 if block.offset is None else block.offset for block in blocks], np.int64)
        self.duration = upper - lower
        times, index = np.unique(np.concatenate([lower, upper]), return_inverse=True)
        self.moments = len(times)
        self.lower, self.upper = index[: len(blocks)], index[len(blocks) :]
        change = np.zeros(len(times) + 1, np.int64)
        np.add.at(change, self.lower, self.sizes)
        np.subtract.at(change, self.upper, self.sizes)
        self._live = np.cumsum(change)

    @cached_property
    def contention(self) -> np.ndarray:
        pairs = zip(self.lower.tolist(), self.upper.tolist(), strict=True)
        return np.array([self._live[start:end].max() for start, end in pairs], np.int64)

    @property
    def mean_live(self) -> np.ndarray:
        """For each block, the sum of sizes while it lives, as a mean over the moments."""
        sums = np.concatenate([[0.0], np.cumsum(self._live.astype(np.float64))])
        return np.asarray((sums[self.upper] - sums[self.lower]) / (self.upper - self.lower))

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def bound(self) -> int:
        """The largest sum of sizes that live at one time, and the end of any pinned block."""
        ends = (self.pins + self.sizes)[self.pins >= 0]
        return max(int(self._live.max(initial=0)), int(ends.max(initial=0)))

    @property
    def has_pins(self) -> bool:
        return bool((self.pins >= 0).any())

    def total(self, offsets: np.ndarray) -> int:
        """The bytes that blocks at these offsets need."""
        return int((offsets + self.sizes).max(initial=0))


def lower_bound(blocks: Sequence[Block], alignment: int = 1) -> int:
    """The largest sum of sizes, rounded up to the alignment, that live at one time. No packing is smaller."""
    return Instance(blocks, alignment).bound
