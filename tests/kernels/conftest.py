"""What tests of kernels share: their random numbers do not depend on which tests ran before them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest


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
