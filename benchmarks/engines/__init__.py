"""The engines by name: one module each, imported only in the process that runs it, and the distribution whose version counts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .engine import Engine


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine lives; `module` is relative to this package and holds a function `prepare` as `Engine` has it."""

    module: str
    distribution: str

    def load(self) -> Engine:
        """Import the engine and its libraries. Raises ImportError where they are not installed."""
        engine: Engine = import_module(f".{self.module}", __package__).prepare
        return engine


ENGINES: dict[str, EngineSpec] = {
    "prefuse": EngineSpec("prefuse_cpu", "prefuse"),
    "onnxruntime": EngineSpec("onnxruntime_cpu", "onnxruntime"),
    "openvino": EngineSpec("openvino_cpu", "openvino"),
    "torch": EngineSpec("torch_eager", "torch"),
    "torch.compile": EngineSpec("torch_compile", "torch"),
}
