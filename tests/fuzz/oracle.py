"""Whether a generated model's numbers are right: two other implementations say so."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import prefuse
from onnx.reference import ReferenceEvaluator
from prefuse.runtime.errors import CompileError

from .generated import Generated
from .judge import Verdict

Answer = Sequence[Any]
_TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}  # of the norm; two units in the last place and more, as sums have
_DEFAULT = 1e-4


def judge_generated(sample: Generated) -> Verdict:
    """Compile and run a generated model twice.

    Wrong is what differs from both ONNX Runtime and onnx.reference where these agree, or from the only one that answers;
    and two runs that are not bitwise equal.
    """
    model, feeds = sample.built()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            with tempfile.TemporaryDirectory() as folder:
                net = prefuse.compile(sample.write(Path(folder)), cache=False)
            first, second = (_as_list(net(**feeds)) for _ in range(2))
        except CompileError as error:
            return Verdict("refused", f"{_operators(model)}: {error}")
        except Exception as error:
            return Verdict("error", f"{_operators(model)}: {type(error).__name__}: {error}")
        if not all(_same_bits(a, b) for a, b in zip(first, second, strict=True)):
            return Verdict("wrong", f"{_operators(model)}: two runs differ")
        answers = {"onnxruntime": _onnxruntime(model, feeds), "onnx.reference": _reference(model, feeds)}
    return _compared(model, first, {name: answer for name, answer in answers.items() if answer is not None})


def _compared(model: onnx.ModelProto, found: Answer, answers: Mapping[str, Answer]) -> Verdict:
    for position, output in enumerate(model.graph.output):
        name = output.name
        given = {by: answer[position] for by, answer in answers.items() if _fits(answer[position], output.type)}
        differences = {by: _difference(found[position], expected) for by, expected in given.items()}
        if all(differences.values()) and differences:
            if len(given) == 2 and _difference(*given.values()):
                continue  # they do not agree with each other
            by = " and ".join(differences)
            return Verdict("wrong", f"{_operators(model)}: {name} differs from {by}: {next(iter(differences.values()))}")
    return Verdict("accepted")


def _fits(answer: Any, kind: onnx.TypeProto) -> bool:
    """Whether an answer has the type that ONNX's inference gives it: ONNX Runtime's reductions of nothing do not."""
    if not kind.HasField("tensor_type"):
        return True
    dims, array = kind.tensor_type.shape.dim, np.asarray(answer)
    fits = array.ndim == len(dims) and all(
        not d.HasField("dim_value") or d.dim_value == n for d, n in zip(dims, array.shape, strict=True)
    )
    return fits and array.dtype == onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)


def _difference(found: Any, expected: Any) -> str:
    """How two results differ; empty if they do not. Sequences are lists."""
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return "another length"
        return next((text for a, b in zip(found, expected, strict=True) if (text := _difference(a, b))), "")
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    if found.dtype.kind not in "f" and found.dtype != ml_dtypes.bfloat16:
        off = np.argwhere(found != expected)
        return f"{found[tuple(off[0])]} at {off[0].tolist()}, not {expected[tuple(off[0])]}" if len(off) else ""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    whole = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~whole], b[~whole], equal_nan=True):
        at = np.argwhere(~whole & ~((a == b) | (np.isnan(a) & np.isnan(b))))[0]
        return f"{a[tuple(at)]} at {at.tolist()}, not {b[tuple(at)]}"
    error, size = np.linalg.norm(a[whole] - b[whole]), np.linalg.norm(b[whole])
    if error <= _TOLERANCE.get(str(found.dtype), _DEFAULT) * size + 1e-6:
        return ""
    at = np.unravel_index(np.argmax(np.where(whole, abs(a - b), 0)), a.shape)
    return f"{a[at]} at {[int(i) for i in at]}, not {b[at]}"


def _onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Answer | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found: Answer = session.run(None, dict(feeds))
    except Exception:
        return None
    return found


def _reference(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Answer | None:
    try:
        found: Any = ReferenceEvaluator(model).run(None, dict(feeds))
    except Exception:
        return None
    return list(found)


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same_bits, a, b))
    return bool(a.tobytes() == b.tobytes())


def _as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def _operators(model: onnx.ModelProto) -> str:
    counts = Counter(node.op_type for node in model.graph.node)
    return f"opset {model.opset_import[0].version}, " + " ".join(counts)
