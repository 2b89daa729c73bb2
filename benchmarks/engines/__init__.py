"""The engines by name: one module each, imported only in the process that runs it, and the distribution whose version counts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .engine import Engine


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine lives: `module`, relative to this package, and the name of a function in it that is an `Engine`."""

    module: str
    distribution: str
    function: str = "prepare"

    def load(self) -> Engine:
        """Import the engine and its libraries. Raises ImportError where they are not installed."""
        engine: Engine = getattr(import_module(f".{self.module}", __package__), self.function)
        return engine


ENGINES: dict[str, EngineSpec] = {
    "prefuse": EngineSpec("prefuse_cpu", "prefuse"),
    "prefuse-fast": EngineSpec("prefuse_cpu", "prefuse", "prepare_fast"),
    "prefuse-bf16": EngineSpec("prefuse_cpu", "prefuse", "prepare_bfloat16"),
    "prefuse-unfused": EngineSpec("prefuse_cpu", "prefuse", "prepare_unfused"),
    "onnxruntime": EngineSpec("onnxruntime_cpu", "onnxruntime"),
    "openvino": EngineSpec("openvino_cpu", "openvino"),
    "openvino-bf16": EngineSpec("openvino_cpu", "openvino", "prepare_bfloat16"),
    "prefuse-int8": EngineSpec("prefuse_int8", "prefuse"),
    "prefuse-int8-plain": EngineSpec("prefuse_int8", "prefuse", "prepare_plain"),
    "prefuse-int8-rows": EngineSpec("prefuse_int8", "prefuse", "prepare_rows"),
    "prefuse-int8-within": EngineSpec("prefuse_int8", "prefuse", "prepare_within"),
    "openvino-int8": EngineSpec("openvino_int8", "nncf"),
    "onnxruntime-int8": EngineSpec("onnxruntime_int8", "onnxruntime"),
    "onnxruntime-int8-dynamic": EngineSpec("onnxruntime_int8", "onnxruntime", "prepare_dynamic"),
    "torch": EngineSpec("torch_eager", "torch"),
    "torch.compile": EngineSpec("torch_compile", "torch"),
    "torch.compile-bf16": EngineSpec("torch_compile", "torch", "prepare_bfloat16"),
}
INT8_ENGINES = tuple(name for name in ENGINES if "-int8" in name)
_OTHERS = (*INT8_ENGINES, *(name for name in ENGINES if name.startswith("prefuse-") or name.endswith("-bf16")))
DEFAULT_ENGINES = tuple(name for name in ENGINES if name not in _OTHERS)
