"""Measuring this machine's processor: numbers that could be one's, and which are not believed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from prefuse.compiler.lowering import machine_fit
from prefuse.compiler.lowering.machine_fit import fit_host, l3_size_bytes, refusals
from prefuse.compiler.lowering.machine_kernels import LATE_PRODUCTS, l3_reads
from prefuse.runtime.errors import OptionError
from prefuse.runtime.hardware.machine import host_machine, row
from prefuse.runtime.target import Target, host_cpu_model

ZEN3 = row("zen3", 8)
NUMBERS = {name: number for name, number in ZEN3.as_fit().items() if number}  # it has neither pairs nor tiles
EQUAL = dict.fromkeys(NUMBERS, 0.0)
RAPIDS = row("sapphire-rapids", 16)
TILES = {"tile_dot_cycles", "tile_l1_cycles", "tile_l2_cycles"}


@pytest.mark.parametrize("threads", [1, 2])
def test_this_machine_is_measured(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else it does now: so the ranges are wide, and numbers may differ from batch to batch."""
    monkeypatch.setattr(machine_fit, "_RUNS", 3)
    monkeypatch.setattr(machine_fit, "_LARGE_SPREAD", 1.0)
    seen: list[tuple[str, float]] = []
    fit = fit_host(Target.parse("cpu", threads), lambda stage, fraction: seen.append((stage, fraction)), seconds=0.01)
    measured = {**fit.numbers, **dict.fromkeys(fit.refused, 0.0)}
    machine = host_machine(host_cpu_model(), Target.parse("cpu").vector_lanes)
    unmeasured = {"dots"} | ({"wake_cycles", "shared_memory_bytes", "copy_cores"} if threads == 1 else set())
    unmeasured |= set() if Target.parse("cpu").has_tiles else {*TILES, "tile_wake_cycles"}
    expected = set(machine.as_fit()) - unmeasured
    assert expected <= set(measured) <= set(machine.as_fit())
    assert machine.as_fit().keys() == machine.fitted(fit.numbers).as_fit().keys()
    assert 0.5 < fit.numbers["ghz"] < 7
    assert 0.3 < fit.numbers["multiply_adds"] < 4
    assert 0.3 < fit.numbers["loads"] < 5
    assert fit.spread.keys() <= fit.numbers.keys()
    assert seen[0] == ("compile", 0.0)
    assert seen[-1] == ("measure", 1.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_read_through_the_page_cache_is_refused(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_fit, "sample_file", lambda folder: nullcontext())
    numbers: dict[str, float] = {}
    refused = machine_fit._fit_storage(Target.parse("cpu", threads), numbers, {})
    assert refused.keys() == ({"storage_gbs", "copy_cores"} if threads > 1 else {"storage_gbs"})
    assert not numbers


def test_a_gpu_is_not_measured() -> None:
    with pytest.raises(OptionError, match="has no row of numbers to fit"):
        fit_host(Target("cuda", "sm_90"))


def test_a_plausible_machine_is_believed() -> None:
    assert refusals(NUMBERS, EQUAL, ZEN3) == {}


@pytest.mark.parametrize(
    ("ns", "expected"), [((0.034, 0.036, 0.043), 96), ((0.034, 0.05, 0.04), 32), ((0.055, 0.056, 0.057), 16)]
)
def test_l3_is_as_large_as_it_is_faster_than_memory(ns: tuple[float, ...], expected: int) -> None:
    """What is read again and again takes as long as half of the cache, or as all of memory, a byte."""
    times = {"l3_bytes_per_cycle": 0.034, "memory_bytes": 0.058, **dict(zip(l3_reads(ZEN3), ns, strict=True))}
    assert l3_size_bytes(times, ZEN3) == expected << 20
    assert ZEN3.fitted({"l3_size_bytes": expected << 20}).l3 == replace(ZEN3.l3, size_bytes=expected << 20)


def test_no_core_is_so_fast() -> None:
    refused = refusals(NUMBERS | {"multiply_adds": 400.0, "ghz": 0.01}, EQUAL, ZEN3)
    assert refused.keys() == {"multiply_adds", "ghz"}
    assert refused["multiply_adds"] == "400 is not between 0.2 and 4.5"


def test_what_differs_from_batch_to_batch_is_not_believed() -> None:
    refused = refusals(NUMBERS, EQUAL | {"wake_cycles": 0.4}, ZEN3)
    assert refused == {"wake_cycles": "the two middle estimates differ by 40%: other work took the cores"}


def test_no_cache_is_faster_than_a_nearer_one() -> None:
    """Of the two neither is believed; one beside the row's is the one that is wrong."""
    refused = refusals(NUMBERS | {"l2_bytes_per_cycle": 20.0, "l3_bytes_per_cycle": 25.0}, EQUAL, ZEN3)
    assert refused.keys() == {"l2_bytes_per_cycle", "l3_bytes_per_cycle"}
    assert refusals({"memory_bytes": 16.0}, {"memory_bytes": 0.0}, ZEN3).keys() == {"memory_bytes"}
    slow = replace(ZEN3, memory_bytes=1.0)
    assert refusals({"memory_bytes": 13.0}, {"memory_bytes": 0.0}, slow) == {}


def test_tiles_of_a_nearer_cache_take_no_longer() -> None:
    numbers = {name: RAPIDS.as_fit()[name] for name in TILES}
    alike = dict.fromkeys(TILES, 0.0)
    assert refusals(numbers, alike, RAPIDS) == {}
    refused = refusals(numbers | {"tile_l1_cycles": 30.0, "tile_l2_cycles": 25.0}, alike, RAPIDS)
    assert refused.keys() == {"tile_l1_cycles", "tile_l2_cycles"}
    assert refusals({"tile_l2_cycles": 10.0}, {"tile_l2_cycles": 0.0}, RAPIDS).keys() == {"tile_l2_cycles"}


def test_a_machine_takes_what_was_measured_of_its_tiles() -> None:
    numbers = {"tile_dot_cycles": 17.9, "tile_l1_cycles": 18.5, "tile_l2_cycles": 24.0, "tile_wake_cycles": 9000.0}
    assert numbers.items() <= RAPIDS.fitted(numbers).as_fit().items()


def test_how_long_tiles_wait_is_beside_their_products() -> None:
    """Those of a launch that turns the unit on take as long as any others."""
    ns = dict.fromkeys((*RAPIDS.as_fit(), *l3_reads(RAPIDS)), 1.0) | {"ghz": 0.25, "tile_dot_cycles": 4.5}
    numbers = machine_fit._numbers(ns | {"tile_wake_cycles": 4.5 * LATE_PRODUCTS + 2000.0}, RAPIDS)
    assert numbers["tile_wake_cycles"] == pytest.approx(8000)


def test_numbers_are_typical_ones() -> None:
    """Neither what a rare quiet moment shows, nor what a neighbour took for a while: what most batches agree on."""
    batches = [{"ghz": time} for time in (0.25, 0.4, 0.31, 0.3, 9.0)]
    assert machine_fit._middle(batches) == ({"ghz": 0.31}, {"ghz": 0.4})
    assert not machine_fit._agree(batches)
    assert machine_fit._agree([*batches, {"ghz": 0.31}])
