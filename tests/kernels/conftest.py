"""What tests of kernels share: the libraries of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import forget_libraries


@pytest.fixture(scope="module", autouse=True)
def own_libraries() -> Iterator[None]:
    """What a module compiles is kept for its tests, and no longer: hundreds of libraries would fill the memory."""
    yield
    forget_libraries()
