"""What prefuse does with a file from a stranger, and whether it may."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
import prefuse
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel

Outcome = Literal["refused", "accepted", "wrong", "error", "crash", "hang"]
GOOD: tuple[Outcome, ...] = ("refused", "accepted")
_RTOL = 1e-3  # of a mutated model, whose numbers may be odd


@dataclass(frozen=True)
class Sample:
    """A file that `write` makes in an empty folder, and whose path it returns: a model, or a program (.prefuse)."""

    name: str
    write: Callable[[Path], Path]
    has_answer: bool = True  # whether other engines may be asked: some crash on what is broken


@dataclass(frozen=True)
class Verdict:
    """How it went; the text of the error, or how the numbers differ."""

    outcome: Outcome
    detail: str = ""


def judge(sample: Sample) -> Verdict:
    """Compile or load a file, and run what comes out of it: only an error of ours, or a right answer, is good."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        path = sample.write(Path(folder))
        try:
            if path.suffix == ".prefuse":
                return _run(prefuse.load(path), None)
            return _run(prefuse.compile(path, cache=False), path if sample.has_answer else None)
        except CompileError as error:
            return Verdict("refused", str(error))
        except Exception as error:
            return Verdict("error", f"{type(error).__name__}: {error}")


def _run(net: object, path: Path | None) -> Verdict:
    """Run a compiled model on ones; a model with other inputs than static tensors is only compiled."""
    if not isinstance(net, CompiledModel) or any(port.type.size_bytes > 1 << 28 for port in (*net.inputs, *net.outputs)):
        return Verdict("accepted")
    inputs = {port.name: np.ones(port.type.shape, port.type.dtype) for port in net.inputs}
    found = net(**inputs)
    expected = None if path is None else _expected(path, inputs)
    if expected is None:
        return Verdict("accepted")
    for port, a, b in zip(net.outputs, found if isinstance(found, tuple) else (found,), expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return Verdict("wrong", f"{port.name}: {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}")
        if not np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=_RTOL, atol=1e-4, equal_nan=True):
            return Verdict("wrong", f"{port.name}: {a.ravel()[:3]}, not {b.ravel()[:3]}")
    return Verdict("accepted")


def _expected(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray] | None:
    """ONNX Runtime's answer, if it has one."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnx.checker.check_model(str(path), full_check=True)  # what breaks the specification has no right answer
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found: list[np.ndarray] = session.run(None, inputs)
    except Exception:
        return None
    return found if all(isinstance(array, np.ndarray) for array in found) else None
