"""What convolutions cost in both layouts, and their tiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from prefuse.kernels.cost.convolution import (
    Convolution,
    channels_first_cycles,
    channels_last_cycles,
    channels_last_tile,
    channels_last_tiles,
    in_words,
    in_words_of_taps,
    loop_order,
    pays_to_fill_pairs,
    spread_pitch,
)
from prefuse.kernels.cost.winograd import winograd_choices
from prefuse.runtime.hardware.machine import Machine, row

ZEN5 = row("zen5", 16)  # that what stands here was measured on


def test_costs_are_of_both_layouts() -> None:
    """Deep layers of few positions are what channels-last is for; two output channels fill no vector."""
    deep = Convolution(1, 1, 512, 512, 7, 7, 7, 7, (3, 3), (1, 1), True)
    thin = Convolution(1, 1, 64, 2, 30, 30, 30, 30, (1, 1), (1, 1), False)
    assert channels_last_cycles(deep, ZEN5) < 0.9 * channels_first_cycles(deep, ZEN5)
    assert channels_last_cycles(thin, ZEN5) > 2 * channels_first_cycles(thin, ZEN5)
    first = Convolution(1, 1, 3, 64, 224, 224, 224, 224, (3, 3), (1, 1), True)  # 64 * 224 rows go to the epilogue one by one
    small = Convolution(1, 1, 6, 16, 14, 14, 10, 10, (5, 5), (1, 1), False)
    for one in (first, small):
        assert channels_last_cycles(one, ZEN5) < channels_first_cycles(one, ZEN5)
    for one in (deep, thin, first, small):
        floor = one.rows * one.columns * one.outputs * one.depth / 32
        assert min(channels_last_cycles(one, ZEN5), channels_first_cycles(one, ZEN5)) >= floor


@pytest.mark.parametrize("machine", [row("zen3", 8), ZEN5], ids=lambda machine: machine.name)
def test_tiles_fit_the_registers(machine: Machine) -> None:
    for positions, channels, depth, inputs in product((1, 7, 14, 500), (1, 17, 64), (9, 4608), (1, 64)):
        rows, vectors = channels_last_tile(positions, channels, depth, inputs, machine)
        assert rows * vectors + vectors + 1 <= machine.registers
        assert 1 <= rows <= positions


@pytest.mark.parametrize(
    ("images", "channels", "plane", "order"),
    [
        (1, 64, 112, "by line"),  # L2 holds the weights
        (1, 512, 28, "by panel"),  # 9 MB of weights, an image of 2 MB
        (1, 128, 512, "by line"),  # 134 MB of an image from memory eight times, or 590 KB of weights from L3 512 times
        (4, 256, 104, "by image"),  # L3 holds one image, but not four
    ],
)
def test_what_is_read_again_decides_the_order_of_loops(images: int, channels: int, plane: int, order: str) -> None:
    one = Convolution(images, 1, channels, channels, plane, plane, plane, plane, (3, 3), (1, 1), True)
    assert loop_order(one, 16, row("zen3", 8)) == order


def test_no_positions_have_a_tile() -> None:
    """Of a batch of none; windows of one element are looked at as one stretch of positions."""
    assert channels_last_tile(0, 5, 4, 4, ZEN5) == (1, 1)
    nothing = Convolution(0, 1, 4, 5, 1, 3, 1, 3, (1, 1), (1, 1), False)
    assert channels_last_cycles(nothing, ZEN5) == 0
    assert channels_first_cycles(Convolution(1, 1, 4, 0, 1, 3, 1, 3, (1, 1), (1, 1), False), ZEN5) < 100
    assert not winograd_choices(Convolution(0, 1, 4, 5, 8, 8, 8, 8, (3, 3), (1, 1), True), ZEN5, "float32-fast")


def test_rows_that_share_the_sets_of_a_cache_are_few() -> None:
    """Positions of 1024 channels of float32 lie 4 KiB apart."""
    assert channels_last_tile(196, 256, 1024, 1024, ZEN5) == (7, 2)
    assert channels_last_tile(196, 256, 960, 960, ZEN5) == (14, 2)
    assert channels_last_tile(28, 1024, 9216, 1024, ZEN5) == (14, 2)  # whose panels of weights come from beyond L2
    assert [spread_pitch(1024, 4, ZEN5), spread_pitch(1024, 2, ZEN5), spread_pitch(960, 4, ZEN5)] == [1040, 1024, 960]
    assert channels_last_tile(196, 256, 1024, 1024, ZEN5, pitch=1040) == (14, 2)
    assert channels_last_tile(196, 256, 640, 128, ZEN5, pitch=1024) == (7, 2)  # of one of eight groups


def test_pairs_of_odd_channels_cost_a_copy() -> None:
    """Which many results a position pay for; pairs of taps of a row are no more where channels are no more than they."""
    points = Convolution(1, 1, 37, 64, 56, 56, 56, 56, (1, 1), (1, 1), False, 2)
    assert channels_last_cycles(in_words(points, 2), ZEN5) > channels_last_cycles(replace(points, inputs=19), ZEN5)
    few, many, groups = (replace(points, outputs=16), replace(points, kernel=(3, 3), is_padded=True), replace(points, groups=2))
    assert [pays_to_fill_pairs(one, ZEN5) for one in (points, few, many, groups)] == [True, False, True, False]
    taps = [replace(many, inputs=inputs, kernel=(3, width)) for inputs, width in ((3, 3), (5, 3), (37, 2), (5, 5), (37, 1))]
    assert [in_words_of_taps(one, 2).depth <= in_words(one, 2).depth for one in taps] == [True, False, True, True, False]
    assert channels_last_cycles(in_words_of_taps(taps[0], 2), ZEN5) < channels_last_cycles(taps[0], ZEN5)


def test_wide_tiles_of_short_sums() -> None:
    """Of few channels, and of pairs while a panel of weights stays in L1; never of more sums than half of the registers."""
    assert channels_last_tile(112, 64, 147, 3, ZEN5) == (4, 4)
    assert channels_last_tiles(3136, 256, 32, 32, ZEN5, k_pack=2)[0] == (4, 4)
    assert channels_last_tiles(3136, 144, 12, 12, ZEN5, k_pack=2)[0] == (5, 3)
    assert channels_last_tiles(3136, 256, 32, 32, ZEN5)[0] == (7, 2)
    assert channels_last_tiles(32, 32, 216, 8, ZEN5, k_pack=2)[0] == (8, 2)
    assert channels_last_tiles(16, 32, 216, 216, ZEN5, k_pack=2)[0] == (6, 2)  # eight sums wait for the dot products before
    assert channels_last_tiles(3136, 256, 256, 256, ZEN5, k_pack=2)[0] == (7, 2)
