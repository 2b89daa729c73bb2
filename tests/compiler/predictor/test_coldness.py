"""Between near and far: what a launch's operands are, and the share that fits programs."""

from __future__ import annotations

from math import inf

import pytest
from prefuse.compiler.estimates.launches import Distances
from prefuse.compiler.predictor.coldness import Witness, farness, fitted_coldness
from prefuse.kernels.cost.estimate import Estimate
from prefuse.runtime.hardware.machine import row

ZEN3 = row("zen3", 8)  # 512 KiB of L2, 32 MiB of L3
PRODUCT = Estimate(1e6, 1 << 20, constant_bytes=1 << 18, streamed_bytes=1 << 16)


def test_what_a_core_keeps_is_near() -> None:
    assert farness(PRODUCT, Distances(ZEN3.l2.size_bytes, 0.0), ZEN3, 1) == 0.0


def test_constants_from_memory_and_activations_from_l3_are_far() -> None:
    assert farness(PRODUCT, Distances(inf, ZEN3.l3.size_bytes), ZEN3, 1) == 1.0
    assert farness(PRODUCT, Distances(inf, inf), ZEN3, 1) == 1.0


def test_constants_from_l3_are_between() -> None:
    """Of 262144 bytes at 14 a cycle for 6, each beyond 26; activations are near."""
    found = farness(PRODUCT, Distances(1 << 23, 0.0), ZEN3, 1)
    near, l3, memory = (2**18 / rate for rate in (26, 14, 6))
    more = 2**16 / 14 - 2**16 / 26
    assert found == pytest.approx((l3 - near) / (memory - near + more))


def test_two_threads_have_two_caches() -> None:
    touched = Distances(1.5 * ZEN3.l2.size_bytes, 0.0)
    assert farness(PRODUCT, touched, ZEN3, 2) == 0.0
    assert farness(PRODUCT, touched, ZEN3, 1) > 0.0


def test_what_no_core_keeps_is_near_in_l3() -> None:
    """A step of a decoder, whose 8 MiB of weights the step before has read, too: launched again and again it reads L3 as well."""
    step = Estimate(1e6, 1 << 20, constant_bytes=1 << 23, streamed_bytes=1 << 12)
    assert farness(step, Distances(1 << 24, 1 << 12), ZEN3, 1) == 0.0
    assert farness(step, Distances(1 << 26, 1 << 12), ZEN3, 1) == 1.0
    huge = Estimate(1e6, 1 << 20, constant_bytes=1 << 26, streamed_bytes=1 << 12)
    assert farness(huge, Distances(inf, inf), ZEN3, 1) == 0.0  # it comes from memory anyway


def test_a_launch_that_reads_nothing_is_near() -> None:
    assert farness(Estimate(1.0, 1), Distances(inf, inf), ZEN3, 1) == 0.0


def test_the_share_of_a_program_is_told() -> None:
    programs = [Witness(near + 0.4 * more, near, more) for near, more in ((100.0, 30.0), (2000.0, 100.0))]
    assert fitted_coldness(programs) == pytest.approx(0.4)


def test_each_program_counts_by_its_relative_error() -> None:
    """One that wants 0.2 and one that wants 0.6, a hundred times as long but otherwise alike: the share lies between."""
    programs = [Witness(scale * (100 + share * 30), scale * 100, scale * 30) for scale, share in ((1.0, 0.2), (100.0, 0.6))]
    share = fitted_coldness(programs)
    assert share is not None
    assert 0.35 < share < 0.42


def test_shares_are_parts() -> None:
    assert fitted_coldness([Witness(90.0, 100.0, 30.0)]) == 0.0
    assert fitted_coldness([Witness(200.0, 100.0, 30.0)]) == 1.0


def test_what_does_not_differ_tells_nothing() -> None:
    assert fitted_coldness([Witness(110.0, 100.0, 0.1)]) is None
    assert fitted_coldness([]) is None
