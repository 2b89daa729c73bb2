"""OpenVINO's CPU plugin in the precision asked for: it would take bfloat16 by itself where the CPU has matrix units.

What the plugin would read off the guest's topology is set: threads on cores of their own, on the hyperthreads that there are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from .engine import Outputs, Ready, Run, Task

_TRIAL_CALLS = 6
_TOLD = ("INFERENCE_PRECISION_HINT", "INFERENCE_NUM_THREADS", "NUM_STREAMS", "ENABLE_CPU_PINNING", "ENABLE_HYPER_THREADING")


def prepare(task: Task) -> Ready:
    """See `Engine`."""
    return _ready(Compiled(task.onnx_path, task.threads), task)


def prepare_unpinned(task: Task) -> Ready:
    """With threads that the system may move from a core that others take."""
    return _ready(Compiled(task.onnx_path, task.threads, is_pinned=False), task)


def prepare_bfloat16(task: Task) -> Ready:
    """With bfloat16 wherever OpenVINO has a kernel of it."""
    return _ready(Compiled(task.onnx_path, task.threads, "bf16"), task)


@dataclass(frozen=True)
class Compiled:
    """A model, by its file or in memory, compiled for one request at a time."""

    model: openvino.Model | Path | str
    threads: int
    precision: str = "f32"  # OpenVINO's hint
    is_pinned: bool = True
    net: openvino.CompiledModel = field(init=False)
    request: openvino.InferRequest = field(init=False)

    def __post_init__(self) -> None:
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": self.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": self.is_pinned,
            "ENABLE_HYPER_THREADING": True,
        }
        object.__setattr__(self, "net", openvino.Core().compile_model(self.model, "CPU", options))
        object.__setattr__(self, "request", self.net.create_infer_request())

    def __call__(self, inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The results, in memory of OpenVINO's until the next call: it copies nothing."""
        return list(self.request.infer(inputs, share_inputs=True, share_outputs=True).values())

    @property
    def facts(self) -> dict[str, str]:
        """The settings in effect."""
        return {name: str(self.net.get_property(name)) for name in _TOLD}


def hints() -> tuple[str, ...]:
    """The precisions that OpenVINO computes in on this CPU, by its hints."""
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ("f32", "bf16") if "BF16" in capabilities else ("f32",)


def least_seconds(run: Run) -> float:
    """The best of a few calls, to choose by."""
    times = []
    for _ in range(_TRIAL_CALLS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def save_whole(model: openvino.Model, path: Path, *, is_half: bool = False) -> None:
    """Write a model, `is_half` with weights in float16; the file of its graph is there only where that of its weights is."""
    waiting = path.with_name(f"part-{path.name}")
    openvino.save_model(model, waiting, compress_to_fp16=is_half)
    waiting.with_suffix(".bin").replace(path.with_suffix(".bin"))
    waiting.replace(path)


def _ready(compiled: Compiled, task: Task) -> Ready:
    inputs = list(task.inputs.values())

    def run() -> Outputs:
        return compiled(inputs)

    return Ready(run, facts=compiled.facts)
