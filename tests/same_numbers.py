"""Random numbers that do not depend on which tests ran before: of NumPy's generators in test modules, and of torch."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

_PACKAGES = ("prefuse.tests.", "tests.")  # pytest and absolute imports load the same files by two names


def begin_again(*, for_fixtures: bool) -> None:
    """Set the generators of all test modules back to where they were once these were collected, and torch's to a seed.

    Of all modules, for their cases are made by each other's functions. What fixtures draw are other numbers than those of tests.
    """
    for generator, state, other in _beginnings():
        generator.bit_generator.state = other if for_fixtures else state
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(int(for_fixtures))  # torch.manual_seed looks for GPUs, too


@cache
def _beginnings() -> list[tuple[np.random.Generator, Any, Any]]:
    """The generators of test modules, each with its state and one that is far from it."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES)]
    found = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, np.random.Generator)}
    bits: list[tuple[np.random.Generator, Any]] = [(one, one.bit_generator) for one in found.values()]
    return [(one, of.state, of.jumped().state) for one, of in bits]
