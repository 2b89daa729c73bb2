"""What the harness asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that is ready to run, with what there is to say of it. `build_seconds` are those of a module of torch, which
    others get as a file; `is_kept`: what an earlier run has compiled was taken."""

    run: Run
    build_seconds: float = 0.0
    is_kept: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Makes a model ready to run on `task.threads` threads of the CPU; what it returns runs it once on the inputs."""

    def __call__(self, task: Task) -> Run | Ready: ...


class Text(Protocol):
    """Texts that go on token by token."""

    def rewind(self) -> None:
        """Go back to where the texts began to be measured."""

    def step(self) -> object:
        """One token more of each text."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Settings in effect."""
        ...
