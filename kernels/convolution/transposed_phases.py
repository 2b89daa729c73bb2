"""A transposed convolution as products: the phases of its output positions, and the taps that each uses.

Output positions `u * stride + phase` of one phase are a convolution of stride 1 with some of the taps. Phases that read the same
input are one product with as many times the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product as nest

import numpy as np

from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import SizeLike, greatest_of, maximum_of, minimum_of
from ..microkernels.packing import PackPanels, PackSums
from .window import Taps, Window, transposed_taps


@dataclass(frozen=True)
class PhaseRun:
    """`count` neighbouring phases of one dimension, from `first` on, that read the same input positions.

    `taps` are those of the first; those of each next phase begin one tap further. Each phase has `positions` outputs.
    """

    first: int
    count: int
    taps: Taps
    positions: SizeLike

    @property
    def places(self) -> tuple[int, ...]:
        """Indices in the kernel of the taps that the phases use, phase after phase."""
        taps = self.taps
        return tuple(taps.first + phase + i * taps.step for phase in range(self.count) for i in range(taps.count))


def phase_runs(window: Window, axis: int) -> list[PhaseRun]:
    """The phases of one dimension that have output positions."""
    runs: list[PhaseRun] = []
    stride, outputs = window.strides[axis], window.outputs[axis]
    for phase in range(greatest_of(minimum_of(stride, outputs))):
        taps = transposed_taps(window, axis, phase)
        if not taps.count:
            taps = Taps(0, 1, 0, 0, 0)  # outputs without taps are the bias alone
        positions = -(-maximum_of(outputs - phase, 0) // stride)
        last = runs[-1] if runs else None
        following = last and (replace(last.taps, first=last.taps.first + last.count) if taps.count else last.taps)
        if last and taps == following and positions == last.positions:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(PhaseRun(phase, 1, taps, positions))
    return runs


@dataclass(frozen=True)
class PhaseProduct:
    """Phases that are one product: a run of phases in each dimension."""

    runs: tuple[PhaseRun, ...]

    @property
    def phases(self) -> tuple[int, ...]:
        return tuple(run.count for run in self.runs)

    @property
    def positions(self) -> tuple[SizeLike, ...]:
        return tuple(run.positions for run in self.runs)

    @property
    def taps(self) -> tuple[Taps, ...]:
        return tuple(run.taps for run in self.runs)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        return tuple(run.places for run in self.runs)


def phase_products(window: Window) -> list[PhaseProduct]:
    """All products of a transposed convolution."""
    return [PhaseProduct(runs) for runs in nest(*(phase_runs(window, axis) for axis in range(len(window.kernel))))]


def reaches_of(products: Sequence[PhaseProduct]) -> tuple[list[int], list[SizeLike]]:
    """For each dimension how many positions before the input products begin to read, and how many they read from there on."""
    leads, reaches = [], []
    for axis in range(len(products[0].runs)):
        ends = [(one.taps[axis].reach, one.positions[axis]) for one in products if one.taps[axis].count]
        lead = max([0, *(-first for (first, _), _ in ends)])
        leads.append(lead)
        read = [lead + last + positions for (_, last), positions in ends]
        reaches.append(reduce(maximum_of, read, 1))  # one where nothing is read
    return leads, reaches


@dataclass(frozen=True)
class PackPhases:
    """Pack the weights of one product into panels, [groups * phases, panels, depth, tile], padded with zeros.

    `shape` is (groups, inputs, outputs, *kernel); `places` are for each dimension the indices of the taps that its phases use,
    phase after phase, equally many a phase.
    """

    shape: tuple[int, ...]
    phases: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    tile: int
    k_pack: int = 1  # neighbouring input channels side by side, as in PackPanels

    @property
    def panels(self) -> PackPanels:
        """The packing of the weights of all phases, once their taps are gathered."""
        shape = list(self.shape[:3])
        for phases, places in zip(self.phases, self.places, strict=True):
            shape += [phases, len(places) // phases]
        order = (0, *range(3, len(shape), 2), 2, *range(4, len(shape), 2), 1)
        return PackPanels(tuple(shape), order, 1 + len(self.phases), 1, self.tile, k_pack=self.k_pack)

    @property
    def sums(self) -> SumPhases:
        """What lays out the sums over k of the same lines."""
        return SumPhases(self)

    def packed_type(self, source: TensorType) -> TensorType:
        return self.panels.packed_type(source)

    def taken(self, array: np.ndarray) -> np.ndarray:
        """The taps of all phases, phase after phase in each dimension."""
        taken = array.reshape(self.shape)
        for axis, places in enumerate(self.places, 3):
            taken = taken.take(places, axis)
        return taken

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return self.panels(self.taken(array))

    def __str__(self) -> str:
        words = f",k_pack={self.k_pack}" if self.k_pack > 1 else ""
        return f"phases({self.shape},{self.phases},{self.places},{self.tile}{words})".replace(" ", "")


@dataclass(frozen=True)
class SumPhases:
    """The sums over k of what `phases` packs, integers, as int32: [groups * phases, lines], lines as many as panels have."""

    phases: PackPhases

    @property
    def sums(self) -> PackSums:
        """The sums of the weights of all phases, once their taps are gathered."""
        return self.phases.panels.sums

    def packed_type(self, source: TensorType) -> TensorType:
        return self.sums.packed_type(source)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return self.sums(self.phases.taken(array))

    def __str__(self) -> str:
        return f"sums of {self.phases}"
