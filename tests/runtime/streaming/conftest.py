"""Programs that keep to a part of the memory they would take: one whose weights are most of it, and one whose activations are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import prefuse
import pytest
from prefuse.runtime.executor import CompiledModel
from prefuse.tests.models.chains import chain_input, product_chain
from prefuse.tests.models.skips import skip_chain


@pytest.fixture(scope="session")
def limited_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = prefuse.compile(product_chain(), threads=2, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    path = tmp_path_factory.mktemp("limited") / "limited.prefuse"
    net.save(path)
    return path


@pytest.fixture(scope="session")
def spilled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = prefuse.compile(skip_chain(), threads=2, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    path = tmp_path_factory.mktemp("spilled") / "spilled.prefuse"
    net.save(path)
    return path


@pytest.fixture(scope="session")
def answer() -> np.ndarray:
    result = prefuse.compile(product_chain(), threads=2)(chain_input())
    assert isinstance(result, np.ndarray)
    return result
