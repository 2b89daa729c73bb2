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
from onnx.reference.op_run import OpRun
from prefuse.runtime.errors import CompileError

from .generated import Generated, captured_names
from .judge import Verdict

Answer = Sequence[Any]
_TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}  # of the norm; two units in the last place and more, as sums have
_DEFAULT = 1e-4


def judge_generated(sample: Generated) -> Verdict:
    """Compile and run a generated model twice.

    Wrong is a result that neither ONNX Runtime nor onnx.reference gives, if one of them answers; and two runs that are not
    bitwise equal.
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
        return _compared(model, feeds, first)


def _compared(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], found: Answer) -> Verdict:
    """Each output is asked for alone, so that an operator which a reference lacks or gets wrong hides no other."""
    for value, output in zip(found, model.graph.output, strict=True):
        part = _part(model, output)
        given = {name: feeds[name] for name in (info.name for info in part.graph.input)}
        answers = {"onnxruntime": _onnxruntime(part, given), "onnx.reference": _reference(part, given)}
        differences = {
            by: difference(value, answer) for by, answer in answers.items() if answer is not None and _fits(answer, output.type)
        }
        if differences and all(differences.values()) and not _is_ill_conditioned(part, given):
            by, text = " and ".join(differences), next(iter(differences.values()))
            return Verdict("wrong", f"{_operators(part)}: {output.name} differs from {by}: {text}")
    return Verdict("accepted")


def _is_ill_conditioned(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> bool:
    """Whether a reference's answer changes when the numbers change in their last places: then it decides nothing."""
    rng = np.random.default_rng(0)
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    for tensor in moved.graph.initializer:
        array = _moved(onnx.numpy_helper.to_array(tensor), rng)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    others = {name: _moved(array, rng) for name, array in feeds.items()}
    answers = [(run(model, feeds), run(moved, others)) for run in (_onnxruntime, _reference)]
    return any(a is not None and b is not None and bool(difference(a, b)) for a, b in answers)


def _moved(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Floats, each of them up to two units in the last place away."""
    if array.dtype.kind != "f":
        return array
    return np.asarray(array * (1 + rng.integers(-2, 3, array.shape) * np.finfo(array.dtype).eps), array.dtype)


def _part(model: onnx.ModelProto, output: onnx.ValueInfoProto) -> onnx.ModelProto:
    """What computes one output."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph, needed = part.graph, {output.name}
    nodes = []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed |= {*node.input, *captured_names(node)}
    del graph.node[:], graph.output[:], graph.input[:], graph.initializer[:]
    graph.node.extend(reversed(nodes))
    graph.output.append(output)
    graph.input.extend(info for info in model.graph.input if info.name in needed)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    return part


def _fits(answer: Any, kind: onnx.TypeProto) -> bool:
    """Whether an answer has the type that ONNX's inference gives it: ONNX Runtime's reductions of nothing do not."""
    if not kind.HasField("tensor_type"):
        return True
    dims, array = kind.tensor_type.shape.dim, np.asarray(answer)
    fits = array.ndim == len(dims) and all(
        not d.HasField("dim_value") or d.dim_value == n for d, n in zip(dims, array.shape, strict=True)
    )
    return fits and array.dtype == onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)


def difference(found: Any, expected: Any) -> str:
    """How two results differ; empty if they do not. Sequences are lists."""
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return "another length"
        return next((text for a, b in zip(found, expected, strict=True) if (text := difference(a, b))), "")
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


def _onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Any:
    if any(_is_wrong_in_onnxruntime(node, model.graph.output[0].name) for node in model.graph.node):
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, dict(feeds))
    except Exception:
        return None
    return found


def _reference(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Any:
    opset = model.opset_import[0].version
    if any(_is_wrong_in_reference(node, opset) for node in model.graph.node):
        return None
    try:
        own: list[type[OpRun]] = [Slice] if opset >= 10 else []
        (found,) = ReferenceEvaluator(model, new_ops=own).run(None, dict(feeds))
    except Exception:
        return None
    return found


class Slice(OpRun):
    """Slice as ONNX's text has it.

    Steps back from before the beginning find nothing in onnx.reference, and ONNX Runtime takes the greatest integer as the end of
    steps back for the beginning.
    """

    op_domain = ""

    def _run(
        self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: Answer = ()
    ) -> tuple[np.ndarray]:
        along = range(len(starts)) if axes is None else map(int, axes)
        for axis, start, end, step in zip(along, starts, ends, steps if len(steps) else [1] * len(starts), strict=True):
            size = data.shape[axis]
            low, high = (0, size) if step > 0 else (-1, size - 1)
            first, last = (int(bound) + size * int(bound < 0) for bound in (start, end))
            places = range(min(max(first, 0), high), min(max(last, low), high), int(step))
            data = np.take(data, np.array(places, np.int64), axis)
        return (data,)


def _is_wrong_in_onnxruntime(node: onnx.NodeProto, output: str) -> bool:
    """The mean of a row with one infinity that LayerNormalization gives is NaN, that of ONNX's function body the infinity."""
    return node.op_type == "LayerNormalization" and output in node.output[1:]


def _is_wrong_in_reference(node: onnx.NodeProto, opset: int) -> bool:
    """Softmax and BatchNormalization mean there what they do today at any opset. Recurrent operators ignore lengths; grouped
    transposed convolutions use one group's weights, the first norm signed numbers, LRN leaves out channels beyond the number of
    images, MaxPool counts its indices in one image, SequenceInsert takes the end for the beginning, and Unique always sorts.
    The place of an only element by pytorch_half_pixel is -0.5, not 0, and corners by scales are those of no whole element.
    """
    if node.op_type in ("RNN", "GRU", "LSTM"):
        return len(node.input) > 4 and bool(node.input[4])
    numbers = {each.name: each.i for each in node.attribute}
    return (
        (node.op_type == "ConvTranspose" and numbers.get("group", 1) > 1)
        or (node.op_type == "LpNormalization" and numbers.get("p") == 1)
        or (node.op_type in ("Softmax", "LogSoftmax", "Hardmax") and opset < 13)
        or (node.op_type == "BatchNormalization" and opset < 14)
        or node.op_type == "LRN"
        or (node.op_type == "MaxPool" and len(node.output) > 1)
        or (node.op_type == "SequenceInsert" and len(node.input) > 2)
        or (node.op_type == "Unique" and numbers.get("sorted", 1) == 0)
        or (node.op_type == "Resize" and any(each.s == b"pytorch_half_pixel" for each in node.attribute))
        or (node.op_type == "Resize" and len(node.input) < 4 and any(each.s == b"align_corners" for each in node.attribute))
    )


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same_bits, a, b))
    return bool(a.tobytes() == b.tobytes())


def _as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def _operators(model: onnx.ModelProto) -> str:
    counts = Counter(node.op_type for node in model.graph.node)
    return f"opset {model.opset_import[0].version}, " + " ".join(counts)
