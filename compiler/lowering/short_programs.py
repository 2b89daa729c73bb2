"""Programs so short that waking a thread may take longer than all that they do: their small kernels stay on the caller's thread.

A parallel region takes 0.1 to 0.4 us where the threads are awake, and tens of microseconds where one has gone to sleep. Threads
are awake as long as regions follow each other; a program of a few short ones wakes them in each call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm_ffi
from tvm import tirx

from .planning import LoweredGroup

SHORT_PROGRAM = 400_000  # scalar operations of all kernels: about 40 us
_WORTH_WAKING = 40_000  # of one kernel, which takes two microseconds or more by itself


def without_small_regions(lowered: list[LoweredGroup]) -> list[LoweredGroup]:
    """The groups with their kernels; those of a short program that have little to do are without parallel regions."""
    if sum(item.kernel.work for item in lowered) >= SHORT_PROGRAM:
        return lowered
    serial: dict[str, Any] = {}
    for item in lowered:
        if item.kernel.work < _WORTH_WAKING and item.symbol not in serial:
            serial[item.symbol] = on_one_thread(item.kernel.function)
    return [
        replace(item, kernel=replace(item.kernel, function=serial[item.symbol])) if item.symbol in serial else item
        for item in lowered
    ]


def on_one_thread(function: Any) -> Any:
    """A PrimFunc whose parallel loops run one iteration after the other."""

    def replaced(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, replaced), order="post"))
