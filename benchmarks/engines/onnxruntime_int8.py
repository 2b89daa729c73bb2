"""ONNX Runtime on what its own tools quantize: Q/DQ with a scale for each channel of weights, or ranges found at run time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxruntime import quantization
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target

from .calibration import calibration_batches
from .engine import Outputs, Run, Task

_FOLDING = "canonicalize,eliminate-dead,merge-equal,fold-batchnorm,canonicalize,eliminate-dead"


FileKind: TypeAlias = Literal["qdq", "qoperator", "dynamic"]
_SUFFIXES: dict[FileKind, str] = {"qdq": ".ort-int8.onnx", "qoperator": ".ort-qoperator.onnx", "dynamic": ".ort-dynamic.onnx"}


def prepare(task: Task) -> Run:
    """See `Engine`."""
    return _run(task, quantized_file(task, "qdq"))


def prepare_dynamic(task: Task) -> Run:
    """With ranges of activations that are found at run time."""
    return _run(task, quantized_file(task, "dynamic"))


def quantized_file(task: Task, kind: FileKind) -> Path:
    """The model quantized by ONNX Runtime's tools, weights by channels, beside the task's file; one that is there is taken."""
    path = task.onnx_path.with_suffix(_SUFFIXES[kind])
    if path.exists():
        return path
    if kind == "dynamic":
        quantization.quantize_dynamic(_folded(task), path, per_channel=True, weight_type=quantization.QuantType.QInt8)
        return path
    types = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
    form = quantization.QuantFormat.QDQ if kind == "qdq" else quantization.QuantFormat.QOperator
    quantization.quantize_static(_folded(task), path, _Reader(task), quant_format=form, per_channel=True, **types)
    return path


class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # which has no types
    def __init__(self, task: Task) -> None:
        self._batches: Iterator[dict[str, np.ndarray]] = iter(calibration_batches(task))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _folded(task: Task) -> Path:
    """The model with constants folded and batch normalizations in the weights, by our passes, for the tools quantize what they
    find: of the exported file they would leave convolutions float."""
    path = task.onnx_path.with_suffix(".folded.onnx")
    if not path.exists():
        model = import_model(task.onnx_path)
        run_pipeline(model, parse_pipeline(_FOLDING, PASSES), Context(Target.parse("cpu")))
        for value in model.graph.initializers.values():  # the tools move files that they cannot read then
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
        proto = ir.to_proto(model)
        del proto.graph.value_info[:]  # the dynamic tool transposes weights of Gemm, and not what is said of their shapes
        path.write_bytes(proto.SerializeToString())
    return path


def _run(task: Task, path: Path) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run() -> Outputs:
        outputs: Outputs = session.run(None, task.inputs)
        return outputs

    return run
