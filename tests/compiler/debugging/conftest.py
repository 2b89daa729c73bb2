"""The compilation that most tests ask about, made once."""

from __future__ import annotations

import pytest
from prefuse.compiler.debugging.compilation import Compilation
from prefuse.tests.compiler.debugging.traced_models import TEXT, traced


@pytest.fixture(scope="session")
def compilation() -> Compilation:
    return traced(TEXT)
