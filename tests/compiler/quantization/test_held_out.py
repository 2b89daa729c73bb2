"""Which batches calibrate, and which are held out."""

from __future__ import annotations

import numpy as np
from prefuse.compiler.quantization.held_out import Split


def test_batches_are_held_out() -> None:
    given = [{"x": np.full(1, number)} for number in range(9)]
    split = Split(given)
    assert (split.count, split.is_split) == (9, True)
    assert [int(batch["x"][0]) for batch in split] == [0, 1, 2, 4, 5, 6, 8]
    assert [int(batch["x"][0]) for batch in split.held_out()] == [3, 7]
    few = Split(given[:3])
    assert not few.is_split
    assert len(list(few)) == len(few.held_out()) == 3
    assert len(Split(given * 9).held_out()) == 8
