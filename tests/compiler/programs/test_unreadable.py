"""Folders that this process may not look into, wherever they are named. Tests may run as root, who may: here no one may."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
from onnx import parser
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.options import parse_options
from prefuse.compiler.quantization.batches import data_digest
from prefuse.runtime.errors import InputError, InvalidModelError, OptionError
from prefuse.runtime.fit_file import forget_fit

TEXT = '<ir_version: 8, opset_import: ["": 18]> main (float[2,4] x) => (float[2,4] y) { y = Relu(x) }'


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose contents may not be seen, nor opened."""
    folder = tmp_path / "closed"
    folder.mkdir()

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(str(folder)):
                raise PermissionError(13, "Permission denied", os.fsdecode(path))
            return function(path, *rest, **named)

        return call

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "open", "mkdir"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        patch.setattr("io.open", refusing(open))
        patch.setattr("builtins.open", refusing(open))
        yield folder


def test_caches_that_cannot_be_looked_into(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="compiling without one"):
        net = prefuse.compile(parser.parse_model(TEXT), cache=closed / "cache")
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(net(x), x)
    monkeypatch.setenv("PREFUSE_CACHE", str(closed / "user"))
    assert parse_options("cpu:avx2", "float32", {}).target.level == "avx2"
    assert not forget_fit("x", 8)


def test_paths_that_cannot_be_looked_into(closed: Path) -> None:
    with pytest.raises(InvalidModelError, match="Permission denied"):
        import_model(closed / "m.onnx")
    with pytest.raises(InputError, match="Permission denied"):
        data_digest(closed / "data.npz")
    with pytest.raises(OptionError, match="Permission denied"):
        parse_options("cpu:avx2", "float32", {"tuning": closed / "found.json"})
