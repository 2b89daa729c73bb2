"""Which loop around register tiles is dealt to threads."""

from __future__ import annotations

from prefuse.kernels.microkernels.register_tile import split_options
from prefuse.runtime.hardware.machine import row

CORE, ORDER = row("zen4", 16), ["batch", "m", "n"]


def first(extents: dict[str, int], cut: dict[str, int], flops: int = 10**8, threads: int = 2) -> str:
    return next(iter(split_options(ORDER, extents, threads, flops, cut, CORE)))


def test_equally_balanced_loops_cut_the_larger_operand() -> None:
    """A convolution of 160 channels into 40 at 56 x 56: by channels each thread would read what the other one wrote."""
    extents, image, weights = {"batch": 1, "m": 4, "n": 98}, 2 << 20, 25600
    assert first(extents, {"m": weights, "n": image}) == "n"
    assert first(extents, {"m": image, "n": weights}) == "m"
    assert first(extents, {"m": image, "n": image}) == "m"


def test_balance_and_bytes_are_weighed() -> None:
    """Seven lines are four and three; of a thread's operations an eighth more, or all of the weights."""
    extents = {"batch": 1, "m": 7, "n": 20}
    assert first(extents, {"m": 1 << 20, "n": 1 << 10}, flops=10**9) == "n"
    assert first(extents, {"m": 1 << 20, "n": 1 << 10}, flops=10**6) == "m"


def test_one_thread_takes_the_outermost_loop() -> None:
    assert split_options(ORDER, {"batch": 3, "m": 7, "n": 20}, 1, 10**8, {}, CORE) == {"batch": "batch"}
    assert list(split_options(ORDER, {"batch": 1, "m": 7, "n": 1}, 4, 10**8, {}, CORE)) == ["m"]
