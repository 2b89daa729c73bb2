"""What tests of searches share: the programs. Each search compiles one of every format, and most models here are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from prefuse.compiler import driver


@pytest.fixture(scope="session")
def kept_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(autouse=True)  # of a test, not of the package: without __init__.py that would last as long as the session
def kept_programs(kept_folder: Path) -> Iterator[None]:
    """What has been compiled once, from the same graph, with the same options and name, is its file again."""
    compile_model = driver.compile_model

    def compiled(model: ir.Model, options: Any, *, name: str, output: Path, **others: Any) -> None:
        what = ir.to_proto(model).SerializeToString(deterministic=True)
        kept = kept_folder / hashlib.sha256(what + repr((options, name)).encode()).hexdigest()
        if not kept.exists():
            compile_model(model, options, name=name, output=kept, **{**others, "constants": None})
        output.write_bytes(kept.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "compile_model", compiled)
        yield
