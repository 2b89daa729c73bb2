"""Nests of loops over k: each product is in one of them, once, and chains are short."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from prefuse.kernels.codegen.sum_loops import sum_loops
from prefuse.runtime.symbolic.sizes import Dim, Domain

_CHAIN = 1024


@pytest.mark.parametrize(
    "depth",
    [
        *[(k,) for k in (1, 1024, 1025, 1031, 1536, 1999, 4096, 5461, 9216, 12011)],
        *[(3, 3, 2048), (2, 1999), (3, 1031), (1031, 3), (401, 7), (5, 127, 31)],
    ],
)
@pytest.mark.parametrize("step_operations", [0, 48])
def test_products_are_added_up_once_in_short_chains(depth: tuple[int, ...], step_operations: int) -> None:
    nests = sum_loops(depth, _CHAIN, (), 12, step_operations)
    found = [loops.joined(ks) for loops in nests for ks in product(*map(range, loops.extents))]
    assert sorted(found) == list(product(*map(range, depth)))
    for loops in nests:
        assert prod(loops.extents[loops.outer :]) <= _CHAIN
        assert len(loops.kinds) == len(loops.extents)


def test_equal_blocks_need_no_second_nest() -> None:
    (loops,) = sum_loops((9216,), _CHAIN, (), 12, 48)
    assert loops.extents == (9, 256, 4)


def test_exact_sums_are_one_chain() -> None:
    (loops,) = sum_loops((12011,), None, (), 12, 48)
    assert (loops.extents, loops.outer) == ((12011,), 0)


def test_sums_whose_length_a_call_decides() -> None:
    """No size is cut off, and what is no whole block is the second nest's."""
    domain = Domain((Dim("K", 1, 4096),), {"K": 100})
    size = domain.size("K")
    first, second = sum_loops((size,), _CHAIN, (), 12, 48)
    assert domain.alive.all()
    assert [str(extent) for extent in second.extents] == [str(size % 512)]
    assert first.extents[1:] == (128, 4)
    (whole,) = sum_loops((size * 512,), _CHAIN, (), 12, 48)
    assert whole.outer == 1
    assert domain.alive.all()
