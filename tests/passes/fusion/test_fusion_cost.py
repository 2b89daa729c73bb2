"""What it is worth to compute one group inside of another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefuse.kernels.cost.product import product_rows_drawback
from prefuse.passes.fusion.fusion_cost import MAX_TENSORS, Join, drawback, saved_cycles
from prefuse.runtime.hardware.machine import row

ZEN5 = row("zen5", 16)  # that what stands here was measured on

PAYS = Join(saved_bytes=1 << 20, added_bytes=1 << 18, recomputed_operations=1 << 18, operators=5, tensors=6)


def test_each_figure_moves_the_cycles_in_its_direction() -> None:
    base = saved_cycles(PAYS, 16)
    assert saved_cycles(replace(PAYS, saved_bytes=1 << 21), 16) > base
    assert saved_cycles(replace(PAYS, added_bytes=1 << 19), 16) < base
    assert saved_cycles(replace(PAYS, recomputed_operations=1 << 19), 16) < base
    assert saved_cycles(replace(PAYS, recomputed_operations=-(1 << 19)), 16) > base
    assert saved_cycles(replace(PAYS, saved_launches=2), 16) > base
    assert saved_cycles(replace(PAYS, saved_regions=1), 16) > base


def test_wider_vectors_make_computing_again_cheaper() -> None:
    assert saved_cycles(PAYS, 16) > saved_cycles(PAYS, 8)


def test_threads_share_what_travels_but_not_the_launch() -> None:
    launch = Join(saved_bytes=0, saved_regions=1)
    assert saved_cycles(launch, 16, threads=8) == saved_cycles(launch, 16)
    assert saved_cycles(PAYS, 16, threads=2) < saved_cycles(PAYS, 16)


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (PAYS, ""),
        (replace(PAYS, operators=33), "more than 32 nodes"),
        (replace(PAYS, tensors=MAX_TENSORS + 1), f"more than {MAX_TENSORS}"),
        (replace(PAYS, recomputed_operations=1 << 30), "1073741824 operations and 262144 bytes again for 1048576 bytes saved"),
        (Join(saved_bytes=0, added_bytes=8192), "8192 bytes again for 0 bytes saved costs 964 cycles"),
        (Join(saved_bytes=0, saved_launches=0), "nothing again"),
    ],
)
def test_why_groups_stay_apart(join: Join, reason: str) -> None:
    found = drawback(join, 16, 32)
    assert reason in found
    assert bool(reason) == bool(found)


def test_products_are_computed_with_their_rows_where_weights_are_read_for_enough_of_them() -> None:
    """BERT's projections at 128 tokens, and what of them does not pay."""
    assert product_rows_drawback(128, 768, 768, threads=2, machine=ZEN5) == ""
    assert "for 16 rows" in product_rows_drawback(128, 768, 768, threads=8, machine=ZEN5)
    assert "768 KiB of a block's left operand" in product_rows_drawback(128, 3072, 768, threads=2, machine=ZEN5)
    assert product_rows_drawback(1024, 3072, 768, threads=2, machine=ZEN5) == ""
    assert "rows of 5000 columns" in product_rows_drawback(1024, 64, 5000, threads=2, machine=ZEN5)
