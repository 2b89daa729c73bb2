"""What the harness asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Outputs = Sequence[npt.ArrayLike]
Run = Callable[[], Outputs]


@dataclass(frozen=True, slots=True)
class Task:
    """A model to run. It is the same for all engines: as an ONNX file, or rebuilt by `nets.build` where torch runs it."""

    model: str
    small: bool
    batch: int
    onnx_path: Path
    inputs: dict[str, np.ndarray]
    threads: int
    max_error: float = float("inf")  # of engines that are told how exact to be


class Engine(Protocol):
    """Makes a model ready to run in float32 on `task.threads` threads of the CPU; what it returns runs it once on the inputs."""

    def __call__(self, task: Task) -> Run: ...
