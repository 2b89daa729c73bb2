"""Cycles of products by tiles: what the numbers of a machine do to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefuse.kernels.cost.amx import BlockWalk, memory_share, tile_product_cycles, tile_step_cycles
from prefuse.runtime.hardware.machine import Machine, row

RAPIDS = row("sapphire-rapids", 16)


def cycles(m: int, n: int, k: int, machine: Machine = RAPIDS, terms: int = 1, k_pack: int = 2, b_passes: int = 1) -> float:
    how = {"packs_a": False, "packs_b": False}
    return tile_product_cycles(m, n, k, terms, machine, k_pack=k_pack, b_passes=b_passes, **how)


def dots(m: int, n: int, k: int) -> float:
    """Cycles of the products of whole tiles alone."""
    return m * n * k / (16 * 16 * 32) * RAPIDS.tile_dot_cycles


def test_operands_in_l1_take_their_products_and_stores() -> None:
    """Of three steps, between which no other block is stored."""
    stored = (2.2 + 1.0) * 64 * 32 / 16  # a line of 16 sums is stored from the tile, loaded and stored
    assert cycles(64, 32, 96) == pytest.approx(dots(64, 32, 96) + stored)


def test_tiles_from_l2_are_seen_beside_their_products() -> None:
    """128 rows of 1024 numbers are 256 KiB: both operands of a block come from L2, a load for each product."""
    slower = replace(RAPIDS, tile_l2_cycles=RAPIDS.tile_l2_cycles + 3)
    assert cycles(128, 64, 1024, slower) - cycles(128, 64, 1024) == 3 * dots(128, 64, 1024) / RAPIDS.tile_dot_cycles
    assert cycles(128, 64, 1024, slower, terms=2) == cycles(128, 64, 1024, terms=2)  # prefetched
    assert cycles(32, 32, 64, replace(RAPIDS, tile_l1_cycles=30.0)) > cycles(32, 32, 64)


def test_rows_streamed_past_l1_leave_the_weights_there() -> None:
    """128 rows of 384 numbers are 96 KiB, a panel of weights is 24: of the loads for each product half come from L2."""
    slower = replace(RAPIDS, tile_l2_cycles=RAPIDS.tile_l2_cycles + 3)
    assert cycles(128, 64, 384, slower) - cycles(128, 64, 384) == 3 * dots(128, 64, 384) / RAPIDS.tile_dot_cycles / 2


def test_an_epilogue_hides_behind_products() -> None:
    """All but a quarter, from four steps on, and of a long one no more than a short one."""

    def added(depth: int, beside: float) -> float:
        alone, longer = (
            tile_product_cycles(128, 64, depth, 1, RAPIDS, packs_a=False, packs_b=False, beside=one) for one in (0.0, beside)
        )
        return longer - alone

    assert added(384, 1000.0) == pytest.approx(250.0)
    assert added(96, 1000.0) == pytest.approx(1000.0)
    assert added(384, 20_000.0) - added(384, 10_000.0) == pytest.approx(10_000.0)


def test_the_operators_of_an_epilogue_are_not_slowed_by_several_terms() -> None:
    how = {"packs_a": False, "packs_b": False}
    one, three = (tile_product_cycles(64, 32, 32, terms, RAPIDS, beside=100_000.0, **how) for terms in (1, 3))
    assert three - one < 5_000


def test_sums_that_operands_evict_come_back_line_by_line() -> None:
    """Of twice as deep a product only the products double, but for what is seen of tiles and sums from L2."""
    assert cycles(32, 32, 1024) - dots(32, 32, 1024) > 1.5 * (cycles(32, 32, 512) - dots(32, 32, 512))


def test_loads_bound_blocks_of_few_rows() -> None:
    """A block of 16 x 16 loads two tiles for each product."""
    narrow = replace(RAPIDS, tile_dot_cycles=4.0, tile_l1_cycles=4.0, tile_l2_cycles=5.0)
    assert cycles(16, 16, 3200, narrow) >= 2 * 100 * 1024 / narrow.l2.bytes_per_cycle


def test_weights_beyond_l2_cost_for_each_pass() -> None:
    bytes_of_b = 2 * 4096 * 1024
    again = cycles(128, 1024, 4096, b_passes=3) - cycles(128, 1024, 4096)
    assert again == pytest.approx(2 * bytes_of_b / RAPIDS.l3.bytes_per_cycle)
    assert cycles(128, 64, 1024, b_passes=3) == cycles(128, 64, 1024)  # L2 keeps them


def test_bytes_take_half_of_what_pairs_take() -> None:
    pairs, bytes_ = (cycles(64, 64, 1024, k_pack=k_pack) for k_pack in (2, 4))
    assert 0.3 < bytes_ / pairs < 0.6
    steps = [tile_step_cycles(32, 96, 512, 1, RAPIDS, k_pack) for k_pack in (2, 4)]
    assert steps[1] < steps[0]


def test_rows_in_place_are_fetched_later_than_packed_ones() -> None:
    packed, apart = (
        tile_product_cycles(128, 64, 1024, 1, RAPIDS, packs_a=False, packs_b=False, is_a_apart=is_apart)
        for is_apart in (False, True)
    )
    assert 1.02 < apart / packed < 1.3


def test_gates_evict_each_other_s_sums() -> None:
    """The sums of three gates lie until a unit is computed, while panels of 48 KiB each are read."""
    together, alone = (tile_step_cycles(32, 1536, 256, 1, RAPIDS, gates=gates) for gates in (3, 1))
    assert together > 1.1 * alone


def test_three_terms_are_more_bytes() -> None:
    assert [memory_share(terms, is_prefetched=True) for terms in (1, 2, 3)] == pytest.approx([1.0, 1.0, 2 / 3])
    assert memory_share(1, is_prefetched=False) < 1.0


def test_the_loop_around_blocks_is_over_what_costs_less_to_wait_for() -> None:
    """Convolutions of ResNet-50, of three terms: with wide results and few weights; into few channels, whose image another core
    wrote in part; and a window whose weights are more than L2."""
    mib = 1 << 20
    wide = BlockWalk(25, 16, 0.38 * mib, 0.57 * mib, 3.1 * mib, threads=1)
    deep = BlockWalk(7, 8, 1.5 * mib, 1.15 * mib, 0.2 * mib, threads=1)
    window = BlockWalk(7, 8, 3.4 * mib, 0.3 * mib, 0.2 * mib, threads=2)
    assert not wide.goes_by_panel(RAPIDS)
    assert deep.goes_by_panel(RAPIDS)
    assert not replace(deep, threads=2).goes_by_panel(RAPIDS)
    assert window.goes_by_panel(RAPIDS)
    assert deep.cycles(RAPIDS) < wide.cycles(RAPIDS) < window.cycles(RAPIDS)
