"""Register tiles of recurrences: where a step's weights come from decides how wide a single row's tile is."""

from __future__ import annotations

import pytest
from prefuse.kernels.recurrent.products import choose_gate_tile
from prefuse.runtime.hardware.machine import row

ZEN3 = row("zen3", 8)


@pytest.mark.parametrize("steps", [256, 512])
def test_a_single_row_reads_all_weights_in_wide_panels(steps: int) -> None:
    """No panel stays in L1 until the next step, however narrow: by three vectors FMAs wait for each other (0.73 the speed)."""
    assert choose_gate_tile(1, 3, 512, steps, ZEN3).tile.vectors == 6


def test_several_rows_read_a_panel_that_stays_near() -> None:
    tile = choose_gate_tile(32, 3, 512, 512, ZEN3)
    assert tile.tile.rows > 1
    assert tile.tile.rows * tile.tile.vectors + tile.tile.vectors < ZEN3.registers
