"""What tests of kernels share: the libraries of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import forget_libraries, target_of


@pytest.fixture(scope="module", autouse=True)
def own_libraries() -> Iterator[None]:
    """What a module compiles is kept for its tests, and no longer: hundreds of libraries would fill the memory."""
    yield
    forget_libraries()


@pytest.fixture(autouse=True)
def at_levels_of_this_machine(request: pytest.FixtureRequest) -> None:
    """Tests that run kernels at their `level` alone are skipped where the machine has none before they make cases in vain."""
    level = getattr(request.node, "callspec", None) and request.node.callspec.params.get("level")
    if isinstance(level, str) and {"check_in_turn", "in_turn"} & {*request.function.__code__.co_names}:
        target_of(level)
