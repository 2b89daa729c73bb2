"""Estimated cycles of what only moves elements: strided copies, tiles transposed in registers, and rows that indices choose."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, gcd, log2, prod

from ...runtime.hardware.machine import LINE_BYTES, Machine
from ...runtime.symbolic.sizes import estimating, hint_of
from .pointwise import LoopBody, covering_steps, vector_steps

_ROW_CYCLES = 4.0  # of a row's address and its loop
_PICKED_STRIDE = 4  # up to which elements are picked from whole vectors
_CHOSEN_CYCLES = 10.0  # of an index: its bounds, and the place that it gives
_CHOSEN_ELEMENT_CYCLES = 2.3  # of an element that an index of its own chooses
_RESIZED_TAP_CYCLES = 1.2  # of an element that a table tells, and its weight
_LINES_ASKED = 32  # that a core waits for at once


@estimating
def copied_cycles(extents: Sequence[int], stride: int, lanes: int, body: LoopBody, machine: Machine) -> float:
    """Of a nest of loops whose last one stores vectors, and reads elements `stride` apart: neighbours, one for all, picked from
    as many vectors, or one by one."""
    *outer, last = map(hint_of, extents)
    lanes = min(lanes, 1 << max(last.bit_length() - 1, 0))
    steps = covering_steps(last, lanes)
    return prod(outer) * (steps * (reading(stride, lanes) + body).cycles(machine) + (_ROW_CYCLES if steps > 1 else 0.0))


@estimating
def reading(stride: int, lanes: int) -> LoopBody:
    """What reads a vector of elements that lie `stride` apart."""
    stride = hint_of(stride)
    apart = abs(stride) if 0 < stride <= _PICKED_STRIDE else lanes
    return LoopBody(2 * (apart - 1), loads=apart) if stride else LoopBody()


@estimating
def transposed_cycles(
    outer: int, extents: tuple[int, int], strides_bytes: tuple[int, int], side: int, body: LoopBody, machine: Machine
) -> float:
    """Of square tiles of `side` of an array, `outer` times: of `extents` down and along, which lie `strides_bytes` apart in the
    result and in the source.

    Tiles walk along, so that the source's lines are read again when the next ones walk below.
    """
    down, along = extents
    tiles = outer * ceil(down / side) * ceil(along / side)
    shuffled = LoopBody(side * log2(max(side, 1)), loads=side) + body.times(side)
    lines = tiles * side * LINE_BYTES
    again = sum(_again_cycles(lines, *one, machine) for one in zip((side, along), strides_bytes, strict=True))
    return tiles * (shuffled.cycles(machine) + side) + again


def _again_cycles(size_bytes: int, lines: int, stride_bytes: int, machine: Machine) -> float:
    """Of reading lines again, between two visits of which as many others come, from the first level whose sets have room."""
    for level in (machine.l1, machine.l2, machine.l3):
        stride = gcd(max(stride_bytes, LINE_BYTES), level.set_stride_bytes)
        sets = level.set_stride_bytes // max(stride, LINE_BYTES)  # a size that was measured is no multiple of lines
        if lines <= level.ways * sets:
            return 0.0 if level is machine.l1 else size_bytes / level.bytes_per_cycle
    return size_bytes / machine.memory_bytes


@estimating
def repeated_cycles(rows: int, extent: int, times: int, lanes: int, body: LoopBody, machine: Machine) -> float:
    """Of runs of elements each of which stands so often next to itself."""
    vector = LoopBody(loads=1) + (LoopBody(1) + body).times(times)
    return rows * (ceil(extent / lanes) * vector.cycles(machine) + _ROW_CYCLES)


@estimating
def chosen_rows_cycles(rows: int, length: int, lanes: int, body: LoopBody, machine: Machine) -> float:
    """Of rows that indices choose, copied in order."""
    return rows * (vector_steps(length, lanes) * body.cycles(machine) + _CHOSEN_CYCLES)


@estimating
def chosen_elements_cycles(elements: int, body: LoopBody, machine: Machine) -> float:
    """Of elements each of which an index chooses."""
    return elements * (_CHOSEN_ELEMENT_CYCLES + body.cycles(machine) / machine.lanes)


@estimating
def arrival_cycles(rows: int, table_bytes: int, machine: Machine) -> float:
    """What the first lines of rows that indices choose take, which nothing asks for ahead, where only memory holds the table.

    A core that waits for so many lines at once gets `memory_bytes` a cycle (Little's law). Where the machine says what places
    take, the time of an estimate has that: it is known there whether a program's table is near.
    """
    latency = 0.0 if machine.place_cycles else _LINES_ASKED * LINE_BYTES / machine.memory_bytes
    return rows * latency if machine.level_of(table_bytes) is None else 0.0


@estimating
def resized_cycles(rows: int, outputs: int, inputs: int, taps: tuple[int, int], body: LoopBody, machine: Machine) -> float:
    """Of so many rows of outputs, each mixed from rows of `inputs`, the first of `taps`, and then along itself, the second: from
    places in tables, one by one; 0 of those where rows keep their length."""
    mixing, along = taps
    mixed = vector_steps(inputs, machine.lanes) * LoopBody(mixing, loads=mixing, stores=1).cycles(machine)
    stored = vector_steps(outputs, machine.lanes) * body.cycles(machine)
    return rows * (mixed + stored + outputs * along * _RESIZED_TAP_CYCLES + _ROW_CYCLES)
