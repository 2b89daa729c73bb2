"""Estimated cycles of poolings: taps of windows for each vector, whichever way the vectors run.

Channels-first, the rows of a window are combined into one row, whose columns each output then combines; every n-th column is
picked with shuffles. Channels-last, a vector of channels meets all taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating
from .pointwise import LoopBody, covering_steps, vector_steps

_LINE_CYCLES = 20.0  # of a run of outputs: corners, borders, and waiting for the row that it reads again
_POSITION_CYCLES = 6.0  # of a window: its corner, and whether it lies inside
_COUNTED_CYCLES = 10.0  # of how many elements an average divides by, where that differs


@estimating
def pooling_cycles(
    lines: int,
    kernel: Sequence[int],
    stride: int,
    dilation: int,
    columns: int,
    most_picked: int,
    bodies: tuple[LoopBody, LoopBody, LoopBody],
    machine: Machine,
) -> float:
    """Of `lines` runs of `columns` outputs. `bodies` are for a vector: to read it, to combine it with another, to store a result.

    Strides of up to `most_picked` are picked with shuffles.
    """
    before, merged, after = bodies
    *rows, taps = kernel
    width = (columns - 1) * stride + (taps - 1) * dilation + 1
    combined = before.times(prod(rows)) + merged.times(prod(rows) - 1) + LoopBody(stores=1)
    result = merged.times(taps - 1) + after + LoopBody(loads=taps)
    picked = 0.0
    if 1 < stride <= most_picked:
        vector = LoopBody(2 * stride * (stride - 1), loads=stride, stores=stride)
        picked = ceil(width / (stride * machine.lanes)) * vector.cycles(machine)
    elif stride > 1:
        result += LoopBody(taps * machine.lanes, loads=taps * machine.lanes)
    line = covering_steps(width, machine.lanes) * combined.cycles(machine)
    line += covering_steps(columns, machine.lanes) * result.cycles(machine)
    return lines * (line + picked + _LINE_CYCLES)


@estimating
def channels_last_pooling_cycles(
    positions: int, channels: int, taps: int, bodies: tuple[LoopBody, LoopBody, LoopBody], machine: Machine, *, is_counted: bool
) -> float:
    """Of windows at so many positions. `bodies` as of `pooling_cycles`; `is_counted`: averages of windows that reach out."""
    before, merged, after = bodies
    body = before.times(taps) + merged.times(taps - 1) + after
    started = _POSITION_CYCLES + (_COUNTED_CYCLES if is_counted else 0.0)
    return positions * (vector_steps(channels, machine.lanes) * body.cycles(machine) + started)
