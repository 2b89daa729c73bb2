"""What tests of kernels share: their random numbers do not depend on which tests ran before them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

_beginnings: dict[str, Any] = {}  # module -> state of its generator `rng` once it was collected


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Sets the generators of all these modules back: their cases are made by each other's functions."""
    package = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and isinstance(generator := getattr(module, "rng", None), np.random.Generator):
            generator.bit_generator.state = _beginnings.setdefault(name, generator.bit_generator.state)
