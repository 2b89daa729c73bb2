"""Measure on this machine's GPU what `prepare` compiled: `python -m benchmarks.gpu.run FOLDER RESULTS.json`, without TVM.

Phases in order, each written when it is complete, so that a run which is cut counts as far as it came: facts and the rate of a
copy; small models against what they must give; full-size programs by one graph and step by step, each distinct kernel beside its
prediction; torch, eager and compiled, beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ... import load
from ...runtime.executor import CompiledModel
from .stripped import fill_program

PROMISES = {"float32": 1e-5, "float32-fast": 2e-5, "bfloat16": 1e-2, "float16": 1e-2}
_PEER_SECONDS = 210.0  # of the whole run that are left for torch's compiler
_CALLS, _ROUNDS = 10, 7


@dataclass
class Run:
    """What was found so far, and until when there is time (time.monotonic)."""

    folder: Path
    results: Path
    end: float
    found: dict[str, Any] = field(default_factory=dict)

    def phase(self, name: str, measure: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Run a phase, keep each of its lines, and write all; a fault ends the phase and is kept, too."""
        lines: list[dict[str, Any]] = []
        self.found[name] = lines
        try:
            for line in measure():
                lines.append(line)
                self.write()
        except Exception as fault:
            lines.append({"fault": f"{type(fault).__name__}: {fault}"})
        self.write()

    def write(self) -> None:
        waiting = self.results.with_suffix(".part")
        waiting.write_text(json.dumps(self.found, indent=1))
        waiting.replace(self.results)

    def has_time(self, reserve: float = 0.0) -> bool:
        return time.monotonic() + reserve < self.end


def facts() -> Iterator[dict[str, Any]]:
    """The machine, and on a GPU the bytes a second that a copy reads and writes."""
    yield {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if not torch.cuda.is_available():
        return
    one = torch.cuda.get_device_properties(0)
    yield {"gpu": one.name, "multiprocessors": one.multi_processor_count, "memory_bytes": one.total_memory}
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    time_us = median_us(lambda: target.copy_(source))
    yield {"copied_gb_per_second": 2 * source.numel() * 4 / time_us / 1e3}


def small_models(run: Run) -> Iterator[dict[str, Any]]:
    """Each small model: the error relative to the norm of its results, and whether that is what its precision promises."""
    for path in sorted((run.folder / "small").glob("*.prefuse")):
        name, _, precision = path.stem.rpartition("-") if not path.stem.endswith("-fast") else path.stem.rpartition("-float32")
        arrays = np.load(run.folder / "small" / f"{name}.npz")
        inputs = [arrays[key] for key in arrays.files if key.startswith("input")]
        wanted = [arrays[key] for key in arrays.files if key.startswith("result")]
        net = load(path)
        got = net(*inputs)
        results = got if isinstance(got, tuple) else (got,)
        pairs = zip(results, wanted, strict=True)
        error = max(float(np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)) for y, exact in pairs)
        yield {"model": name, "precision": precision, "error": error, "right": error < PROMISES[precision]}


def programs(run: Run) -> Iterator[dict[str, Any]]:
    """Full-size programs: a call by one graph, the same launch by launch, and each distinct kernel beside its prediction."""
    for path in sorted((run.folder / "full").glob("*.zip"), key=lambda one: (int(one.stem.rpartition("-b")[2]), one.stem)):
        if not run.has_time(_PEER_SECONDS):
            yield {"program": path.stem, "skipped": "no time left"}
            continue
        with TemporaryDirectory() as folder:
            whole = Path(folder, "whole.prefuse")
            fill_program(path, whole)
            net = load(whole)
            assert isinstance(net, CompiledModel)
            inputs = [_input(port.type.shape, port.type.dtype) for port in net.inputs]
            line: dict[str, Any] = {"program": path.stem, "graph_us": median_us(lambda: net(*inputs))}  # noqa: B023 - called at once
            profile = net.profile(*inputs, runs=5)
            line |= {"launches_us": profile.time_us, "predicted_us": profile.predicted_us}
            kernels: dict[str, dict[str, Any]] = {}
            for step in profile.steps:
                one = kernels.setdefault(step.label, {"template": step.template, "times": 0, "us": 0.0, "predicted_us": 0.0})
                one["times"] += 1
                one["us"] += step.time_us
                one["predicted_us"] += step.group.predicted_us
            yield line | {"kernels": kernels}


def peers(run: Run) -> Iterator[dict[str, Any]]:
    """torch, eager and compiled with max-autotune, on the same models in float32 (TF32 off) and bfloat16."""
    if not torch.cuda.is_available():
        return
    from ...examples.models import MODELS

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for path in sorted((run.folder / "full").glob("*-b1.zip")):
        name, precision = path.stem.removesuffix("-b1").rsplit("-", 1)
        module, inputs = MODELS[name].build()
        kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        module = module.cuda().to(kind)
        given = [x.cuda().to(kind) if x.is_floating_point() else x.cuda() for x in inputs]
        with torch.no_grad():
            line: dict[str, Any] = {"model": name, "precision": precision, "eager_us": median_us(lambda: module(*given))}  # noqa: B023
            if run.has_time(60):
                compiled = torch.compile(module, mode="max-autotune")
                line["compiled_us"] = median_us(lambda: compiled(*given))  # noqa: B023
        yield line


def median_us(call: Callable[[], object]) -> float:
    """Microseconds of a call: the median of rounds of several calls each, the GPU's work with them."""
    for _ in range(2):
        call()
    times = []
    for _ in range(_ROUNDS):
        _wait()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        _wait()
        times.append((time.perf_counter() - begin) / _CALLS * 1e6)
    return float(np.median(times))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _input(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers of an input, on the GPU where there is one; integers are zero, so that indices are in bounds."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    made = torch.randn(shape, generator=generator).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)
    return made.cuda() if torch.cuda.is_available() else made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=570.0, help="of the whole run")
    options = parser.parse_args()
    run = Run(options.folder, options.results, time.monotonic() + options.seconds)
    run.phase("facts", facts)
    run.phase("small models", lambda: small_models(run))
    run.phase("programs", lambda: programs(run))
    run.phase("torch", lambda: peers(run))


if __name__ == "__main__":
    main()
