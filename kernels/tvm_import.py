"""TVM is imported without torch, which it would import, where it is installed, for the sake of tensors that we never give it.

That was 1.7 of the 2.4 s of processor time of `import tvm`: half of what a process took that compiles a small ONNX file. Where
torch is loaded already, TVM finds it; who imports it later finds it as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType


def import_tvm_without_torch() -> None:
    """From now on the first import of TVM will be one without torch."""
    if "tvm" not in sys.modules and not any(isinstance(finder, _TvmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TvmFinder())


class _TvmFinder(MetaPathFinder):
    """Finds TVM once, as it would be found without this."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "tvm":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None and "torch" not in sys.modules:
            spec.loader = _LoaderWithoutTorch(spec.loader)
        return spec


class _LoaderWithoutTorch(Loader):
    """Runs a module to which there is no torch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        refusal = _TorchRefusal()
        sys.meta_path.insert(0, refusal)
        try:
            self._loader.exec_module(module)
        finally:
            sys.meta_path.remove(refusal)


class _TorchRefusal(MetaPathFinder):
    """There is no torch to the thread that made this; others may import it meanwhile."""

    def __init__(self) -> None:
        self._thread = get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "torch" and get_ident() == self._thread:
            raise ModuleNotFoundError("TVM is imported without torch", name=fullname)
        return None
