"""Measure on this machine's GPU what `prepare` compiled: `python -m benchmarks.gpu.run FOLDER RESULTS.json`, without TVM.

Phases in order, each line written at once, so that a run which is cut counts as far as it came: facts and the rate of a copy;
small models against what they must give; kernels of each template and tile against torch; full-size programs by one graph and
step by step, each distinct kernel beside its prediction; torch, eager and compiled, beside them. Processes of their own measure,
as what fails on a GPU, or never ends, spoils all that follows in the same process (`workers`). The status is 1 where anything
failed, was skipped or gave wrong results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from ... import load
from ...runtime.executor import CompiledModel
from .checks import PROGRAM, compared, inputs_of, unpacked
from .stripped import fill_program
from .workers import Line, supervised, work

PROMISES = {"float32": 1e-5, "float32-fast": 2e-5, "bfloat16": 1e-2, "float16": 1e-2}
_COMPILE_SECONDS = 60.0  # that torch's compiler may need
_CALLS, _ROUNDS = 10, 7


@dataclass
class Run:
    """What was found so far, and until when there is time (time.monotonic)."""

    folder: Path
    results: Path
    end: float
    found: dict[str, Any] = field(default_factory=dict)

    def phase(self, name: str, measure: Callable[[], Iterator[Line]]) -> None:
        """Run a phase, keep each of its lines, and write all; a fault ends the phase and is kept, too."""
        lines: list[Line] = []
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


@dataclass(frozen=True)
class Phase:
    """Items that are measured one after the other, each for so many seconds at most.

    `reserve_seconds` of the whole run are left for the phases behind it. A line names its item under `key`.
    """

    key: str
    items: Callable[[Path], Sequence[str]]
    measure: Callable[[Run, str], Iterator[Line]]
    item_seconds: float
    reserve_seconds: float = 0.0

    def here(self, run: Run) -> Iterator[Line]:
        """In this process."""
        for item in self.items(run.folder):
            yield from self.measure(run, item) if run.has_time() else [{self.key: item, "skipped": "no time left"}]

    def apart(self, name: str, run: Run) -> Iterator[Line]:
        """In processes of their own, by the name of the phase."""
        end = run.end - self.reserve_seconds

        def command(writing: int, items: Sequence[str]) -> list[str]:
            given = [str(run.folder), str(run.results), "--end", str(run.end), "--worker", str(writing), name, *items]
            return [sys.executable, "-m", __spec__.name, *given]

        return supervised(command, self.items(run.folder), self.key, self.item_seconds, end)


def facts() -> Iterator[dict[str, Any]]:
    """The machine, and on a GPU the bytes a second that a copy reads and writes."""
    yield {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if not torch.cuda.is_available():
        yield {"fault": "torch finds no GPU"}
        return
    one = torch.cuda.get_device_properties(0)
    yield {"gpu": one.name, "multiprocessors": one.multi_processor_count, "memory_bytes": one.total_memory}
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    time_us = median_us(lambda: target.copy_(source))
    yield {"copied_gb_per_second": 2 * source.numel() * 4 / time_us / 1e3}


def small_model(run: Run, item: str) -> Iterator[Line]:
    """The error relative to the norm of its results, and whether that is what its precision promises."""
    name, _, precision = item.rpartition("-") if not item.endswith("-fast") else item.rpartition("-float32")
    arrays = np.load(run.folder / "small" / f"{name}.npz")
    inputs = [arrays[key] for key in arrays.files if key.startswith("input")]
    wanted = [arrays[key] for key in arrays.files if key.startswith("result")]
    got = load(run.folder / "small" / f"{item}.prefuse")(*inputs)
    results = got if isinstance(got, tuple) else (got,)
    pairs = zip(results, wanted, strict=True)
    error = max(float(np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)) for y, exact in pairs)
    yield {"model": name, "precision": precision, "error": error, "right": error < PROMISES[precision]}


def check(run: Run, item: str) -> Iterator[Line]:
    """A kernel against torch where it runs, and what it takes."""
    with TemporaryDirectory() as folder:
        one = unpacked(run.folder / "checks" / f"{item}.zip", Path(folder))
        net = load(Path(folder, PROGRAM))
        inputs = inputs_of(one, _device())
        found = compared(one, inputs, cast("torch.Tensor", net(*inputs)))
        yield {"check": item, **found, "graph_us": median_us(lambda: net(*inputs))}


def program(run: Run, item: str) -> Iterator[Line]:
    """A full-size program: a call by one graph, the same launch by launch, and each distinct kernel beside its prediction."""
    with TemporaryDirectory() as folder:
        whole = Path(folder, "whole.prefuse")
        fill_program(run.folder / "full" / f"{item}.zip", whole)
        net = load(whole)
        assert isinstance(net, CompiledModel)
        inputs = [_input(port.type.shape, port.type.dtype) for port in net.inputs]
        got = net(*inputs)
        line: Line = {"program": item, "is_finite": all(_is_finite(y) for y in (got if isinstance(got, tuple) else (got,)))}
        line["graph_us"] = median_us(lambda: net(*inputs))
        profile = net.profile(*inputs, runs=5)
        line |= {"launches_us": profile.time_us, "predicted_us": profile.predicted_us}
        kernels: dict[str, Line] = {}
        for step in profile.steps:
            one = kernels.setdefault(step.label, {"template": step.template, "times": 0, "us": 0.0, "predicted_us": 0.0})
            one["times"] += 1
            one["us"] += step.time_us
            one["predicted_us"] += step.group.predicted_us
        yield line | {"kernels": kernels}


def peer(run: Run, item: str) -> Iterator[Line]:
    """torch, eager and compiled with max-autotune, on the same model in float32 (TF32 off) or bfloat16, images channels-last."""
    if not torch.cuda.is_available():
        return
    from ...examples.models import MODELS

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    name, precision = item.rsplit("-", 1)
    module, inputs = MODELS[name].build()
    kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
    module = module.cuda().to(kind)
    given = [x.cuda().to(kind) if x.is_floating_point() else x.cuda() for x in inputs]
    if any(isinstance(one, torch.nn.Conv2d) for one in module.modules()):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which types of torch do not know
        given = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in given]
    with torch.no_grad():
        yield {"model": name, "precision": precision, "eager_us": median_us(lambda: module(*given))}
        if run.has_time(_COMPILE_SECONDS):
            compiled = torch.compile(module, mode="max-autotune")
            yield {"model": name, "precision": precision, "compiled_us": median_us(lambda: compiled(*given))}


def _stems(folder: str, pattern: str) -> Callable[[Path], Sequence[str]]:
    """Names of files in one of the carried folders, in order."""
    return lambda root: [path.stem for path in sorted((root / folder).glob(pattern))]


def _by_batch(root: Path) -> Sequence[str]:
    return sorted(_stems("full", "*.zip")(root), key=lambda stem: (int(stem.rpartition("-b")[2]), stem))


PHASES = {
    "facts": Phase("facts", lambda root: ["machine"], lambda run, item: facts(), 60, 450),
    "small models": Phase("item", _stems("small", "*.prefuse"), small_model, 40, 390),
    "checks": Phase("check", _stems("checks", "*.zip"), check, 40, 300),
    "programs": Phase("program", _by_batch, program, 60, 150),
    "torch": Phase("item", lambda root: [one.removesuffix("-b1") for one in _stems("full", "*-b1.zip")(root)], peer, 120),
}


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


def has_failed(found: dict[str, Any]) -> bool:
    """Whether anything went wrong, was not measured, or gave what it should not."""
    lines = [line for lines in found.values() for line in lines]
    return any("fault" in line or "skipped" in line or line.get("right") is False for line in lines)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_finite(result: Any) -> bool:
    """Whether all numbers of a result are: filled in weights may not give such, and what does not is no measure of speed."""
    return bool(torch.isfinite(torch.as_tensor(result)).all())


def _input(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers of an input, on the GPU where there is one; integers are zero, so that indices are in bounds."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    made = torch.randn(shape, generator=generator).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)
    return made.to(_device())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)  # a descriptor, a phase and its items
    options = parser.parse_args()
    run = Run(options.folder, options.results, options.end or time.monotonic() + options.seconds)
    if options.worker:
        writing, name, *items = options.worker
        phase = PHASES[name]
        sys.exit(work(lambda item: phase.measure(run, item), items, phase.key, int(writing)))
    for name, phase in PHASES.items():
        run.phase(name, lambda: phase.apart(name, run))  # noqa: B023 - called at once
    sys.exit(has_failed(run.found))


if __name__ == "__main__":
    main()
