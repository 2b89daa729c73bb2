"""Packing: no overlaps ever, the lower bound where it is easy, and the published instances of minimalloc and idealloc."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import prefuse
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.passes.plan.plan_memory.best_fit import Block, Packing, lower_bound, pack
from prefuse.passes.plan.plan_memory.check import packing_faults

DATA = Path(prefuse.__path__[0]).parent / "shared" / "data"

lifetimes = st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 1000))
blocks = st.lists(lifetimes.map(lambda item: Block(item[0], item[0] + item[1], item[2])), max_size=40)


@settings(max_examples=150, deadline=None)
@given(blocks, st.sampled_from([1, 64]))
def test_packings_are_right(blocks: list[Block], alignment: int) -> None:
    packing = pack(blocks, alignment)
    assert packing_faults(blocks, packing, alignment) == ()
    assert lower_bound(blocks, alignment) <= packing.total_bytes <= sum(-(-b.size_bytes // alignment) * alignment for b in blocks)
    assert pack(blocks, alignment) == packing


@given(blocks)
def test_lower_bound_is_the_largest_live_sum(blocks: list[Block]) -> None:
    live = (sum(b.size_bytes for b in blocks if b.lower <= time < b.upper) for time in range(60))
    assert lower_bound(blocks) == max(live)


def test_chain_reaches_the_lower_bound() -> None:
    chain = [Block(i, i + 2, 100 + 7 * (i % 13)) for i in range(200)]
    assert pack(chain).total_bytes == lower_bound(chain)


@pytest.mark.parametrize(
    ("packing", "fault"),
    [
        (Packing((0, 64), 192), "share bytes"),
        (Packing((0, 128), 200), "ends at 228"),
        (Packing((0, 100), 300), "is at 100"),
        (Packing((-64, 128), 300), "is at -64"),
        (Packing((0,), 300), "1 offsets for 2 blocks"),
    ],
)
def test_checker_rejects(packing: Packing, fault: str) -> None:
    assert fault in packing_faults([Block(0, 2, 100), Block(1, 3, 100)], packing, 64)[0]


def published(path: str) -> list[Block]:
    if not (DATA / path).is_file():
        pytest.skip(f"published instance {path} is not in {DATA}")
    with open(DATA / path) as file:
        return [Block(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", "ACEGI")
def test_minimalloc_instances(name: str) -> None:
    """All fit in 1 MiB; greedy orders need 1.12 to 1.44 times that."""
    instance = published(f"minimalloc/{name}.1048576.csv")
    packing = pack(instance)
    assert packing_faults(instance, packing) == ()
    assert packing.total_bytes <= 1.32 * 1048576


@pytest.mark.parametrize("name", ["resnet50", "G_1"])
def test_idealloc_instances_are_packed_near_the_lower_bound(name: str) -> None:
    instance = published(f"idealloc/{name}.csv")
    packing = pack(instance)
    assert packing_faults(instance, packing) == ()
    assert packing.total_bytes <= 1.01 * lower_bound(instance)


def test_thousands_of_blocks_take_seconds_at_most() -> None:
    instance = [Block(i, i + 1 + i * 7919 % 11, 64 + i * 104729 % 100_000) for i in range(5000)]
    start = time.process_time()
    pack(instance, 64)
    assert time.process_time() - start < 5  # half a second on an idle machine
