"""Processors as data: rows, what the system tells of caches, what a fit replaces, and how targets name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prefuse.kernels.cost.register_tile import ranked_tiles
from prefuse.runtime.errors import OptionError
from prefuse.runtime.hardware import machine as machines
from prefuse.runtime.hardware.machine import Machine, core_of, host_machine, row, system_caches
from prefuse.runtime.target import Target


@pytest.mark.parametrize("name", machines.names())
@pytest.mark.parametrize("lanes", [8, 16])
def test_rows_are_plausible(name: str, lanes: int) -> None:
    """Caches grow and slow down from level to level; memory is slower than any of them."""
    one = row(name, lanes)
    assert one.lanes == lanes
    levels = (one.l1, one.l2, one.l3)
    assert sorted(levels, key=lambda level: level.size_bytes) == list(levels)
    rates = [level.bytes_per_cycle for level in levels] + [one.memory_bytes]
    assert sorted(rates, reverse=True) == rates
    assert one.shared_memory_bytes >= one.memory_bytes
    assert one.registers == (32 if lanes == 16 else 16)


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("AuthenticAMD family 25 model 1", "zen3"),
        ("AuthenticAMD family 25 model 17", "zen4"),
        ("AuthenticAMD family 26 model 2", "zen5"),
        ("GenuineIntel family 6 model 143", "sapphire-rapids"),
        ("GenuineIntel family 6 model 167", "icelake"),
        ("GenuineIntel family 6 model 167 amx", "sapphire-rapids"),
        ("GenuineIntel family 6 model 9999", "generic"),
        ("unknown", "generic"),
    ],
)
def test_processors_are_known_by_family_and_model(text: str, core: str) -> None:
    assert core_of(text) == core


def test_the_system_tells_sizes_of_caches(tmp_path: Path) -> None:
    for number, (kind, level, size, ways) in enumerate(
        [
            ("Data", "1", "48K", "12"),
            ("Instruction", "1", "32K", "8"),
            ("Unified", "2", "2048K", "16"),
            ("Unified", "3", "x", "16"),
        ]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size), ("ways_of_associativity", ways)):
            (folder / name).write_text(text + "\n")
    (tmp_path / "index9").mkdir()  # one that says nothing
    assert system_caches(tmp_path) == {"l1": (48 << 10, 12), "l2": (2048 << 10, 16)}


def test_the_host_has_the_caches_of_its_system() -> None:
    one, known = host_machine("AuthenticAMD family 25 model 1", 8), system_caches()
    assert one.name == "zen3"
    sizes = {name: (getattr(one, name).size_bytes, getattr(one, name).ways) for name in known if name != "l3"}
    assert sizes == {name: size for name, size in known.items() if name != "l3"}


@pytest.mark.parametrize(("cores", "counted"), [(2, 32), (8, 96), (None, 16)])
def test_of_a_host_s_l3_a_few_cores_have_a_part(cores: int | None, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "system_caches", lambda: {"l3": (96 << 20, 16)})
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    one = host_machine("AuthenticAMD family 25 model 1", 8)
    assert one.l3 == replace(row("zen3", 8).l3, size_bytes=counted << 20, ways=16)
    assert one.l2 == row("zen3", 8).l2


def test_bytes_come_from_the_level_that_holds_them() -> None:
    one = row("zen3", 8)
    assert one.read_cycles(1 << 14) == (1 << 14) / one.l1.bytes_per_cycle
    assert one.read_cycles(1 << 14, 1 << 20) == (1 << 14) / one.l3.bytes_per_cycle
    assert one.read_cycles(1 << 14, 1 << 19, threads=2) == one.read_cycles(1 << 13, 1 << 18)  # a core touched its share
    assert one.read_cycles(1 << 14, 40 << 20, threads=2) > one.read_cycles(1 << 13, 20 << 20)  # which no L3 keeps for all
    assert one.read_cycles(1 << 30, threads=2) == (1 << 30) / min(2 * one.memory_bytes, one.shared_memory_bytes)


def test_a_fit_replaces_numbers_and_nothing_else() -> None:
    one = row("zen3", 8)
    assert one.fitted(one.as_fit()) == one
    changed = one.fitted(
        {"memory_bytes": 7, "l2_bytes_per_cycle": 30.5, "name": "x", "loads": "2", "stores": -1, "l9": 3, "dots": True}
    )
    assert (changed.memory_bytes, changed.l2.bytes_per_cycle) == (7.0, 30.5)
    assert changed.fitted(one.as_fit()) == one
    assert changed.is_fit_of(one)
    assert one.fitted({"loads": 1.5, "multiply_adds": 1.0, "dots": 1.0, "l3_size_bytes": 1 << 24}).is_fit_of(one)
    assert not row("zen4", 8).is_fit_of(one)


def test_another_thread_of_the_core_takes_of_loads_what_it_takes_of_multiply_adds() -> None:
    """Tiles of 13 rows of one vector seemed as good as those of 6 rows of two, and took 1.4 times as long."""
    one = row("zen3", 8)
    shared = one.fitted({"multiply_adds": 1.4, "loads": 2.0})
    assert (shared.multiply_adds, shared.loads) == (1.4, 1.4)
    assert one.fitted({"multiply_adds": 1.4, "loads": 1.2}).loads == 1.2
    assert one.fitted({"multiply_adds": 0.3, "loads": 2.0}).loads == 1.0
    best = ranked_tiles(128, 768, 768, shared, shifted_loads=False, b_padded=True, streams_b=True, cuts_last=True)[0]
    assert (best.rows, best.vectors) == (6, 2)


def test_targets_name_machines() -> None:
    assert Target.parse("cpu:avx512,machine=zen4,threads=3").machine == row("zen4", 16)
    assert str(Target.parse("cpu:avx512,machine=zen4,threads=3")) == "cpu:avx512,threads=3"  # what runs it
    assert Target.parse("cpu:avx2").machine == Target("cpu", "avx2").machine == row("generic", 8)
    assert Target("cpu", "amx").machine == row("sapphire-rapids", 16)
    assert Target("cuda", "sm_90").machine.lanes == 1
    assert Target.parse("cpu").is_host
    with pytest.raises(OptionError, match="no processor 'zen9' is known"):
        Target.parse("cpu:avx2,machine=zen9")
    with pytest.raises(OptionError, match="unknown target"):
        Target.parse("cpu:avx2,machine=zen3,cores=2")


def test_numbers_of_eight_bytes_halve_the_lanes() -> None:
    one: Machine = row("zen5", 16)
    assert (one.of_items(8).lanes, one.of_items(2).lanes, one.of_items(8).vector_bytes) == (8, 16, 64)


def test_copies_take_a_core_from_kernels() -> None:
    """Some of its time, where all cores have a thread of kernels; no more than where copies are made all the time."""
    machine = row("zen4", 16)
    assert machine.slowed_by_copies(1.0, 0.5, threads=1) == machine.slowed_by_copies(0.0, 1.0, threads=2) == 1.0
    half, whole, longer = (machine.slowed_by_copies(1.0, copies, threads=2) for copies in (0.5, 1.0, 3.0))
    assert 1.0 < half < whole == longer < 1.2
    assert machine.slowed_by_copies(1.0, 1.0, threads=8) < half
    assert machine.fitted({"copy_cores": 1.0}).slowed_by_copies(1.0, 0.5, threads=2) == pytest.approx(1.25)
