"""Measuring what a processor is described by: `prefuse doctor --fit`.

Each number is the typical one of batches of short runs: their median, in which what other guests of a host take of the cores is
as it will be for kernels. Batches are repeated until the middle ones of each number agree, or the time is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np

from ...kernels.formats.format import F32
from ...runtime.errors import OptionError
from ...runtime.files.user_folder import user_folder
from ...runtime.fit_file import Fit
from ...runtime.hardware.machine import Machine, host_machine
from ...runtime.streaming.rate import SampleFile, cores_taken, read_rates, sample_file
from ...runtime.target import Target, host_cpu_model
from .machine_kernels import LATE_PRODUCTS, NEAR_SHARE, Probe, l3_reads, probe_program
from .roofline import multiply_add_program

_SECONDS = 10.0  # after which no batch begins
_RUNS = 12  # of a batch: a third of a second
_LEAST_BATCHES = 5  # two seconds: a host's other guests come and go
_AGREEMENT = 0.03  # between two estimates
_LARGE_SPREAD = 0.1  # between the two middle batches of a number that is not believed
_SLACK = 1.05  # by which a cache may seem faster than the one before it
_DIGITS = 3
_LEAST_CORES = 0.01  # that reads are said to take: less is not seen
# In the units of `Machine`: no core that we compile for is outside of these.
_PLAUSIBLE = {
    "ghz": (0.5, 7.0),
    "multiply_adds": (0.2, 4.5),
    "dots": (0.1, 4.5),
    "loads": (0.3, 6.0),
    "stores": (0.2, 4.5),
    "l1_bytes_per_cycle": (8.0, 400.0),
    "l2_bytes_per_cycle": (4.0, 200.0),
    "l3_bytes_per_cycle": (1.0, 100.0),
    "l3_size_bytes": (1 << 20, 1 << 30),
    "memory_bytes": (0.3, 50.0),
    "shared_memory_bytes": (0.3, 2000.0),
    "wake_cycles": (20.0, 200_000.0),
    "launch_cycles": (2.0, 2000.0),
    "tile_dot_cycles": (4.0, 200.0),
    "tile_l1_cycles": (4.0, 400.0),
    "tile_l2_cycles": (4.0, 1000.0),
    "tile_wake_cycles": (20.0, 200_000.0),
    "storage_gbs": (0.01, 200.0),
    "copy_cores": (0.0, 8.0),
}
_BY_DISTANCE = ("l1_bytes_per_cycle", "l2_bytes_per_cycle", "l3_bytes_per_cycle", "memory_bytes")
_PROBES = {"loads": "l1_bytes_per_cycle", "l3_size_bytes": "l3_bytes_per_cycle"}  # of numbers that have none of their own name
# In cycles; others are made in a cycle.
_OF_TIME = ("launch_cycles", "tile_dot_cycles", "tile_l1_cycles", "tile_l2_cycles", "tile_wake_cycles")
_TILES = ("tile_dot_cycles", "tile_l1_cycles", "tile_l2_cycles")  # the nearer the operands, the fewer

Times = Mapping[str, float]  # ns of a launch, by probe


def fit_host(target: Target, progress: Callable[[str, float], None] | None = None, seconds: float = _SECONDS) -> Fit:
    """What this machine's processor does with vectors of the target, on one core and on all threads of the target.

    Takes `seconds` and at most one batch more, less where estimates agree sooner, but for `_LEAST_BATCHES`: where L3 is large,
    each of them takes seconds. What is implausible, or differs from batch to
    batch, is refused with the reason: the row is the better guess.

    Raises:
        OptionError: the target is a GPU.
    """
    if target.is_gpu:
        raise OptionError("target", f"{target} has no row of numbers to fit", "leave it out: the CPU of this machine is measured")
    row = host_machine(host_cpu_model(), target.vector_lanes)
    batches = _batches(replace(target, machine=row), progress or (lambda stage, fraction: None), seconds)
    times, slower = _middle(batches)
    numbers = _numbers(times, row)
    spread = {name: _apart(times[probe], slower[probe]) for name in numbers for probe in [_PROBES.get(name, name)]}
    unread = _fit_storage(target, numbers, spread)
    refused = refusals(numbers, spread, row) | unread
    kept = {name: _rounded(number) for name, number in numbers.items() if name not in refused}
    if "memory_bytes" in kept:  # all cores together read no slower than one
        shared = max(kept.get("shared_memory_bytes", row.shared_memory_bytes), kept["memory_bytes"])
        kept |= {"shared_memory_bytes": shared} if "shared_memory_bytes" in kept or shared > row.shared_memory_bytes else {}
    spread = {name: _rounded(part) for name, part in spread.items() if name in kept}
    return Fit(datetime.now(UTC).isoformat(timespec="seconds"), kept, spread, refused)


def _fit_storage(target: Target, numbers: dict[str, float], spread: dict[str, float]) -> dict[str, str]:
    """Measure the file system of the cache, where programs lie, and what kernels on all threads of the target leave its copies.
    Returns why it was not."""
    folder = user_folder()
    names = ("storage_gbs", "copy_cores") if target.threads > 1 else ("storage_gbs",)
    try:
        with sample_file(folder) as file:
            if file is None:
                return dict.fromkeys(names, f"files in {folder} are read through the page cache only")
            rates = sorted(read_rates(file))
            if target.threads > 1:
                numbers["copy_cores"], spread["copy_cores"] = _copy_cores(file, target)
    except OSError as error:
        return dict.fromkeys(names, f"no file can be read back from {folder}: {error.strerror or error}")
    middle = len(rates) // 2
    numbers["storage_gbs"], spread["storage_gbs"] = rates[middle], _apart(rates[middle - 1], rates[middle])
    return {}


def _copy_cores(file: SampleFile, target: Target) -> tuple[float, float]:
    """The median of several turns, and how far apart its neighbours are, as a part of the time of kernels beside copies."""
    net, _ = multiply_add_program(target, F32)
    ones = np.ones(net.inputs[0].type.shape, np.float32).view(np.int32)
    net(ones)
    taken = sorted(max(one, _LEAST_CORES) for one in cores_taken(file, lambda: net(ones), target.threads))
    middle = len(taken) // 2
    times = [1 + taken[place] / target.threads for place in (middle - 1, middle + 1)]
    return taken[middle], _apart(*times)


def refusals(numbers: Mapping[str, float], spread: Mapping[str, float], row: Machine) -> dict[str, str]:
    """Which measured numbers are not to be believed, and why: by themselves, and beside those of nearer caches."""
    found: dict[str, str] = {}
    for name, number in numbers.items():
        least, most = _PLAUSIBLE[name]
        if not least <= number <= most:
            found[name] = f"{number:.3g} is not between {least:g} and {most:g}"
        elif spread[name] > _LARGE_SPREAD:
            found[name] = f"the two middle estimates differ by {spread[name]:.0%}: other work took the cores"
    ordered = [*pairwise(_BY_DISTANCE), *((far, near) for near, far in pairwise(_TILES))]  # the greater number first
    for greater, less in ordered:
        one, other = (numbers[name] if name not in found and name in numbers else row.as_fit()[name] for name in (greater, less))
        if other > _SLACK * one:
            what = f"{less} of {other:.3g} beside {greater} of {one:.3g}"
            found |= {name: what for name in (greater, less) if name in numbers and name not in found}
    return found


def _batches(target: Target, progress: Callable[[str, float], None], seconds: float) -> list[Times]:
    """The times of probes in each batch, a few batches at least."""
    progress("compile", 0.0)
    begin, batches = time.perf_counter(), list[Times]()
    net, probes = probe_program(target)
    x = np.zeros(1, np.int32)
    try:
        while len(batches) < _LEAST_BATCHES or (time.perf_counter() - begin < seconds and not _agree(batches)):
            progress("measure", min((time.perf_counter() - begin) / seconds, 0.99))
            batches.append(_times(net.profile(x, runs=_RUNS).stamps_ns, probes))
    finally:
        progress("measure", 1.0)
    return batches


def _times(stamps_ns: np.ndarray, probes: Sequence[Probe]) -> Times:
    """The mean of the launches in one call, as counters are coarse, without those that warm up; of the calls the median. Of
    those behind others, which may find them done or not, the median of all."""
    steps, found, at = np.diff(stamps_ns, axis=1), {}, 0
    for probe in probes:
        launched = steps[:, at : at + len(probe.sequence)][:, probe.counted]
        found[probe.name] = float(np.median(launched if probe.behind else launched.mean(axis=1))) / probe.amount
        at += len(probe.sequence)
    return found


def _agree(batches: Sequence[Times]) -> bool:
    """Whether the two middle batches of each probe are equally fast."""
    times, slower = _middle(batches)
    return all(_apart(times[name], slower[name]) <= _AGREEMENT for name in times)


def _middle(batches: Sequence[Times]) -> tuple[Times, Times]:
    """The median of the times of each probe, the lower of two, and the one above it."""
    ranked, at = {name: sorted(batch[name] for batch in batches) for name in batches[0]}, (len(batches) - 1) // 2
    return {name: times[at] for name, times in ranked.items()}, {name: times[at + 1] for name, times in ranked.items()}


def _numbers(times: Times, row: Machine) -> dict[str, float]:
    """As of `Machine.as_fit`; those that were not measured are left out, and so is what only prepared others."""
    ghz = 1 / times["ghz"]
    cycles = {name: time * ghz for name, time in times.items() if name in row.as_fit()}
    numbers = {name: time if name in _OF_TIME else 1 / time for name, time in cycles.items()} | {"ghz": ghz}
    numbers["loads"] = numbers["l1_bytes_per_cycle"] / row.vector_bytes
    numbers["l3_size_bytes"] = l3_size_bytes(times, row)
    if "tile_wake_cycles" in numbers:
        numbers["tile_wake_cycles"] -= LATE_PRODUCTS * numbers["tile_dot_cycles"]
    if "wake_cycles" in times:
        numbers["wake_cycles"] = (times["wake_cycles"] - times["launch_cycles"]) * ghz
    return numbers


def l3_size_bytes(times: Times, row: Machine) -> float:
    """The most of what was read again and again whose bytes took less than halfway between L3's and memory's time."""
    limit, held = (times["l3_bytes_per_cycle"] + times["memory_bytes"]) / 2, row.l3.size_bytes * NEAR_SHARE
    for name, size_bytes in l3_reads(row).items():
        if times[name] > limit:
            break
        held = size_bytes
    return float(held)


def _apart(best: float, second: float) -> float:
    """How far apart two times are, as a part of the longer one."""
    return 1 - best / second if second > 0 else 1.0


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
