"""ONNX Runtime on what its own tools quantize: Q/DQ with a scale for each channel of weights, or ranges found at run time."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from onnxruntime import quantization
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.compiler.programs.cache import compiler_version
from prefuse.runtime.files.whole_file import whole_file
from prefuse.runtime.target import Target, host_cpu_flags

from .calibration import calibration_batches, kept_path
from .engine import Ready, Task
from .onnxruntime_cpu import runner

_FOLDING = "canonicalize,eliminate-dead,merge-equal,fold-batchnorm,canonicalize,eliminate-dead"


FileKind: TypeAlias = Literal["qdq", "qoperator", "dynamic"]


def prepare(task: Task) -> Ready:
    """See `Engine`."""
    return _ready(task, "qdq")


def prepare_dynamic(task: Task) -> Ready:
    """With ranges of activations that are found at run time."""
    return _ready(task, "dynamic")


def _ready(task: Task, kind: FileKind) -> Ready:
    """Weights have 7 bits where products of bytes would saturate, as ONNX Runtime's documentation advises: without VNNI."""
    reduces = not {"avx_vnni", "avx512_vnni"} & set(host_cpu_flags())
    is_kept = _path(task, kind, reduces=reduces).exists()
    run = runner(task, quantized_file(task, kind, reduces=reduces))
    return Ready(run, is_kept=is_kept, facts={"weights": "7 bits" if reduces else "8 bits"})


def quantized_file(task: Task, kind: FileKind, *, reduces: bool = False) -> Path:
    """The model quantized by ONNX Runtime's tools, weights by channels, beside the task's file; one that is there is taken.
    `reduces`: weights have 7 bits."""
    path = _path(task, kind, reduces=reduces)
    if path.exists():
        return path
    with whole_file(path) as waiting:
        if kind == "dynamic":
            quantization.quantize_dynamic(
                _folded(task), waiting, per_channel=True, reduce_range=reduces, weight_type=quantization.QuantType.QInt8
            )
            return path
        types = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
        form = quantization.QuantFormat.QDQ if kind == "qdq" else quantization.QuantFormat.QOperator
        quantization.quantize_static(
            _folded(task), waiting, _Reader(task), quant_format=form, per_channel=True, reduce_range=reduces, **types
        )
    return path


def _path(task: Task, kind: FileKind, *, reduces: bool) -> Path:
    return kept_path(task, f"ort-{kind}{'-7' * reduces}", ".onnx", version("onnxruntime"), compiler_version()[:8])


class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # which has no types
    def __init__(self, task: Task) -> None:
        self._batches: Iterator[dict[str, np.ndarray]] = iter(calibration_batches(task))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _folded(task: Task) -> Path:
    """The model with constants folded and batch normalizations in the weights, by our passes, for the tools quantize what they
    find: of the exported file they would leave convolutions float."""
    path = kept_path(task, "folded", ".onnx", compiler_version()[:8])
    if not path.exists():
        model = import_model(task.onnx_path)
        run_pipeline(model, parse_pipeline(_FOLDING, PASSES), Context(Target.parse("cpu")))
        for value in model.graph.initializers.values():  # the tools move files that they cannot read then
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
        proto = ir.to_proto(model)
        del proto.graph.value_info[:]  # the dynamic tool transposes weights of Gemm, and not what is said of their shapes
        with whole_file(path) as waiting:
            waiting.write_bytes(proto.SerializeToString())
    return path
