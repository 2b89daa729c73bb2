"""The engines by name: one module each, imported only in the process that runs it, and the distributions whose versions count."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import click

from .engine import Engine

Class = Literal["float32", "float32-fast", "bfloat16", "int8"]
MOST_ERROR: dict[Class, float] = {"float32": 1e-4, "float32-fast": 1e-3, "bfloat16": 5e-2, "int8": 0.3}  # that right results have
_EXACTNESS: dict[Class, int] = {"float32": 0, "float32-fast": 0, "bfloat16": 1, "int8": 2}  # the lesser, the more exact


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine lives: `module`, relative to this package, and the name of a function in it that is an `Engine`; and in
    what it computes."""

    module: str
    distribution: str
    function: str = "prepare"
    computes: Class = "float32"
    beside: tuple[str, ...] = ()  # other distributions that it runs

    def load(self) -> Engine:
        """Import the engine and its libraries. Raises ImportError where they are not installed."""
        engine: Engine = getattr(import_module(f".{self.module}", __package__), self.function)
        return engine

    def is_as_exact_as(self, other: EngineSpec) -> bool:
        """Whether it computes in what is as exact as another one's, or in that."""
        return _EXACTNESS[self.computes] <= _EXACTNESS[other.computes]


ENGINES: dict[str, EngineSpec] = {
    "prefuse": EngineSpec("prefuse_cpu", "prefuse"),
    "prefuse-fast": EngineSpec("prefuse_cpu", "prefuse", "prepare_fast", "float32-fast"),
    "prefuse-bf16": EngineSpec("prefuse_cpu", "prefuse", "prepare_bfloat16", "bfloat16"),
    "prefuse-unfused": EngineSpec("prefuse_cpu", "prefuse", "prepare_unfused"),
    "onnxruntime": EngineSpec("onnxruntime_cpu", "onnxruntime"),
    "openvino": EngineSpec("openvino_cpu", "openvino"),
    "openvino-unpinned": EngineSpec("openvino_cpu", "openvino", "prepare_unpinned"),
    "openvino-bf16": EngineSpec("openvino_cpu", "openvino", "prepare_bfloat16", "bfloat16"),
    "prefuse-int8": EngineSpec("prefuse_int8", "prefuse", "prepare", "int8"),
    "prefuse-int8-plain": EngineSpec("prefuse_int8", "prefuse", "prepare_plain", "int8"),
    "prefuse-int8-rows": EngineSpec("prefuse_int8", "prefuse", "prepare_rows", "int8"),
    "prefuse-int8-within": EngineSpec("prefuse_int8", "prefuse", "prepare_within", "int8"),
    "openvino-int8": EngineSpec("openvino_int8", "openvino", "prepare", "int8", ("nncf",)),
    "onnxruntime-int8": EngineSpec("onnxruntime_int8", "onnxruntime", "prepare", "int8"),
    "onnxruntime-int8-dynamic": EngineSpec("onnxruntime_int8", "onnxruntime", "prepare_dynamic", "int8"),
    "torch": EngineSpec("torch_eager", "torch"),
    "torch.compile": EngineSpec("torch_compile", "torch"),
    "torch.compile-max": EngineSpec("torch_compile", "torch", "prepare_max"),
    "torch.compile-bf16": EngineSpec("torch_compile", "torch", "prepare_bfloat16", "bfloat16"),
}
INT8_ENGINES = tuple(name for name, one in ENGINES.items() if one.computes == "int8")
_OTHERS = ("openvino-unpinned", "torch.compile-max")  # that are asked for by name
DEFAULT_ENGINES = tuple(
    name for name, one in ENGINES.items() if one.computes == "float32" and name not in _OTHERS and not name.startswith("prefuse-")
)


def distributions(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those that these engines run."""
    return tuple(dict.fromkeys(one for name in names for one in (ENGINES[name].distribution, *ENGINES[name].beside)))


def engine_names(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    """Names on a command line, separated by commas, each once."""
    names = tuple(dict.fromkeys(name for name in value.split(",") if name))
    if unknown := [name for name in names if name not in ENGINES]:
        raise click.BadParameter(f"unknown engine {unknown[0]!r}; use {', '.join(ENGINES)}")
    return names
