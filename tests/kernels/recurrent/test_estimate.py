"""What a recurrence is estimated to take: by the unit that multiplies, and with all that is no product."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefuse.kernels.recurrent.recurrent import plan
from prefuse.kernels.template.contract import Candidate
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

from ..harness import Case
from .test_recurrent import of_torch

AMX, VECTORS = (Target.parse(f"cpu:{level},machine=sapphire-rapids", 1) for level in ("amx", "avx512"))


def cycles(case: Case, target: Target, precision: Precision = "float32") -> float:
    found = plan(replace(case.group, precision=precision), target)
    assert isinstance(found, Candidate)
    return found.estimate.cycles


def test_tiles_are_counted_where_they_multiply() -> None:
    case = of_torch("GRU", 4, 32, 128, 256)
    on_tiles = [cycles(case, AMX, precision) for precision in ("float32-fast", "float32")]
    assert on_tiles[0] < on_tiles[1] < cycles(case, VECTORS)


def test_a_single_row_takes_the_same_with_and_without_tiles() -> None:
    case = of_torch("GRU", 4, 1, 64, 128)
    assert cycles(case, AMX) == pytest.approx(cycles(case, VECTORS))


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_steps_add_up(op: str, gates: int) -> None:
    """Twice as many steps take twice as long, but for panels that more rows of the projection share."""
    short, long = (cycles(of_torch(op, steps, 8, 64, 128), VECTORS) for steps in (8, 16))
    assert 1.7 < long / short < 2.2
    products = 8 * 8 * gates * 128 * (64 + 128) / (16 * VECTORS.machine.multiply_adds)
    assert short > products


def test_weights_beyond_l2_are_read_again() -> None:
    """Of 1024 hidden units the weights of three gates are 12 MiB."""
    large = of_torch("GRU", 2, 1, 8, 1024)
    small = replace(AMX, machine=replace(AMX.machine, l2=replace(AMX.machine.l2, size_bytes=1 << 26)))
    assert cycles(large, AMX) > 1.05 * cycles(large, small)
