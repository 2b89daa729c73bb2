"""What tests of kernels share: their random numbers do not depend on which tests ran before them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .harness import forget_libraries


@pytest.fixture(scope="module", autouse=True)
def own_libraries() -> Iterator[None]:
    """What a module compiles is kept for its tests, and no longer: hundreds of libraries would fill the memory."""
    yield
    forget_libraries()


@pytest.fixture(scope="session")
def beginnings() -> list[tuple[np.random.Generator, Any]]:
    """The generators `rng` of all these modules, each with its state once they were collected."""
    package = __name__.rpartition(".")[0]
    found = (getattr(module, "rng", None) for name, module in list(sys.modules.items()) if name.startswith(package))
    return [(one, one.bit_generator.state) for one in found if isinstance(one, np.random.Generator)]


@pytest.fixture(autouse=True)
def same_numbers(beginnings: list[tuple[np.random.Generator, Any]]) -> None:
    """Sets the generators of all these modules back: their cases are made by each other's functions."""
    for generator, state in beginnings:
        generator.bit_generator.state = state
