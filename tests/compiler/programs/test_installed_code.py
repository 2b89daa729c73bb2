"""Modules of an installed distribution have fingerprints, which change with whatever a user changes of its code or its state."""

import functools
import hashlib
import importlib
import importlib.util
import types
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prefuse.compiler.programs.installed_code import installed_as
from prefuse.compiler.programs.module_fingerprint import module_fingerprint
from torch import nn

LAYERS = """
import logging
import os
from pathlib import Path
import torch
from torch import nn
from . import functions
from .functions import double

logger = logging.getLogger(__name__)
REGISTRY = {"double": double}
OPTIONS = {object: 1.0}

class Base(nn.Module):
    def finish(self, x):
        return x + OPTIONS[object]
    def save(self, path):
        open(path, "w").write(repr(self))

class Layer(Base):
    def __init__(self, function="double"):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(2, 2)
    @torch.no_grad()
    def forward(self, x):
        from .late import halve
        if os.environ.get("FAKE_VERBOSE"):
            logger.warning(f"called in {Path.cwd()}")
        return getattr(self, "finish")(REGISTRY[self.function](functions.triple(halve(self.linear(x)))))
"""
FUNCTIONS = """
def double(x):
    return x * 2
def triple(x):
    return x * 3
"""
LATE = """
def halve(x):
    return x / 2
"""


def install(folder: Path, package: str, version: str = "1.0") -> Path:
    """Write a package as pip does, with RECORD; its folder."""
    sources = {"__init__.py": "", "layers.py": LAYERS, "functions.py": FUNCTIONS, "late.py": LATE}
    (folder / package).mkdir(parents=True)
    lines = [f"{package}-{version}.dist-info/RECORD,,"]
    for name, source in sources.items():
        (folder / package / name).write_text(source)
        digest = urlsafe_b64encode(hashlib.sha256(source.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{package}/{name},sha256={digest},{len(source)}")
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return folder / package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that no other test imports, installed where Python finds it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"fake_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"
    install(tmp_path, name)
    return name


@pytest.fixture
def layers(package: str) -> types.ModuleType:
    importlib.import_module(f"{package}.late")
    return importlib.import_module(f"{package}.layers")


def fingerprint(layers: types.ModuleType, **options: object) -> str | None:
    torch.manual_seed(0)
    return module_fingerprint(layers.Layer(**options))


def test_a_module_of_an_installed_distribution_has_a_fingerprint(layers: types.ModuleType) -> None:
    assert fingerprint(layers) is not None
    assert fingerprint(layers) == fingerprint(layers)


def test_a_user_s_module_around_it_has_one(layers: types.ModuleType) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers.Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.inner(x))

    assert module_fingerprint(Wrapper()) is not None


def test_code_that_no_distribution_installed_has_none(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}-1.0.dist-info" / "RECORD").unlink()
    assert fingerprint(importlib.import_module(f"{package}.layers")) is None


def test_a_file_edited_since_it_was_installed_has_none(package: str, tmp_path: Path) -> None:
    file = tmp_path / package / "layers.py"
    file.write_text(LAYERS.replace("OPTIONS[object]", "OPTIONS[object] + 1"))
    assert fingerprint(importlib.import_module(f"{package}.layers")) is None


def test_a_file_edited_after_its_import_has_none(layers: types.ModuleType) -> None:
    assert fingerprint(layers) is not None
    file = Path(str(layers.__file__))
    file.write_text(file.read_text() + "# an editor was here\n")
    assert fingerprint(layers) is None


def test_what_was_installed_counts(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.syspath_prepend(str(other))
    found = [installed_as(str(folder / "layers.py")) for folder in (tmp_path / package, install(other, package, "2.0"))]
    assert None not in found
    assert found[0] != found[1]
    assert installed_as(__file__) is None


def patched(x: torch.Tensor) -> torch.Tensor:
    return x * 5


def patch_function(layers: types.ModuleType) -> None:
    layers.functions.triple = patched


def swap_functions(layers: types.ModuleType) -> None:
    layers.functions.triple = layers.functions.double


def patch_code(layers: types.ModuleType) -> None:
    layers.double.__code__ = patched.__code__


def patch_method(layers: types.ModuleType) -> None:
    layers.Base.finish = lambda self, x: x + 2


def patch_forward(layers: types.ModuleType) -> None:
    layers.Layer.forward = functools.wraps(layers.Layer.forward)(lambda self, x: x + 2)


def register_function(layers: types.ModuleType) -> None:
    layers.REGISTRY["double"] = patched


def set_option(layers: types.ModuleType) -> None:
    layers.OPTIONS[object] = 2.0


def patch_what_is_imported_late(layers: types.ModuleType) -> None:
    importlib.import_module(f"{layers.__package__}.late").halve = patched  # type: ignore[attr-defined]  # what users do


CHANGES = [
    patch_function, swap_functions, patch_code, patch_method, patch_forward, register_function, set_option,
    patch_what_is_imported_late,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(layers: types.ModuleType, change: Callable[[types.ModuleType], None]) -> None:
    before = fingerprint(layers)
    change(layers)
    assert before is not None
    assert fingerprint(layers) not in (None, before)


def test_a_patch_is_read_as_a_user_s_code(layers: types.ModuleType) -> None:
    def reads_a_file(x: torch.Tensor) -> torch.Tensor:
        with open("factor") as file:
            return x * float(file.read())

    layers.functions.triple = reads_a_file
    assert fingerprint(layers) is None


def test_hugging_face_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}

    def of(**options: object) -> str | None:
        torch.manual_seed(0)
        return module_fingerprint(transformers.BertModel(transformers.BertConfig(**sizes, **options)).eval())

    found = [of(), of(), of(hidden_act="relu"), of(layer_norm_eps=1e-6)]
    assert None not in found
    assert found[0] == found[1]
    assert len(set(found)) == 3
