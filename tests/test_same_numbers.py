"""Each test draws what it draws alone, and so does each fixture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

RNG = np.random.default_rng(3)
FIRST = np.random.default_rng(3).integers(1 << 40)


@pytest.mark.parametrize("time", range(2))
def test_numbers_do_not_depend_on_tests_before(time: int) -> None:
    assert RNG.integers(1 << 40) == FIRST
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def of_module() -> tuple[int, float]:
    return int(RNG.integers(1 << 40)), float(torch.rand(()))


def test_fixtures_draw_other_numbers_than_tests(of_module: tuple[int, float]) -> None:
    assert of_module[0] != RNG.integers(1 << 40)
    assert of_module[1] != torch.rand(())
