"""The tiny program of `tiny_program.py` and a model in stages, compiled once for all tests of the runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prefuse.runtime.executor import CompiledModel, load
from prefuse.runtime.staged.staged_model import StagedModel
from prefuse.tests.runtime.staged.staged_models import NESTED, compiled_stages
from prefuse.tests.runtime.tiny_program import ELEMENTS, build_library, write_tiny


@pytest.fixture(scope="session")
def tiny_library() -> bytes:
    return build_library()


@pytest.fixture(scope="session")
def tiny_file(tiny_library: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("program") / "tiny.prefuse", tiny_library)


@pytest.fixture(scope="session")
def tiny(tiny_file: Path) -> CompiledModel:
    return load(tiny_file)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(ELEMENTS, np.float32)


@pytest.fixture(scope="session")
def nested() -> StagedModel:
    return compiled_stages(NESTED)


@pytest.fixture(scope="session")
def nested_file(nested: StagedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nested") / "nested.prefuse"
    nested.save(path)
    return path
