"""A graph in ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

_MAX_ONNXRUNTIME_IR = 13  # the newest file format that ONNX Runtime 1.31 reads; what it lacks of later ones changes no numbers
_MAX_PROTO_BYTES = 1_900_000_000  # protobuf holds less than 2 GiB; leave room for what is not weights


class OnnxRuntimeSession:
    """A model as ONNX Runtime runs it on the CPU, with its graph optimizations where `optimize`.

    Raises:
        Exception: whatever ONNX Runtime raises for a model that it cannot run.
    """

    def __init__(self, model: ir.Model, *, optimize: bool) -> None:
        import onnxruntime  # slow to import

        options = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        options.log_severity_level = 3  # errors only
        if model.ir_version > _MAX_ONNXRUNTIME_IR:
            model = model.clone()
            model.ir_version = _MAX_ONNXRUNTIME_IR
        with tempfile.TemporaryDirectory() as folder:
            source = serialized(model, folder)
            self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> Sequence[np.ndarray]:
        """The outputs of these names, all of them in the graph's order for None. Raises what ONNX Runtime raises."""
        results: Sequence[np.ndarray] = self._session.run(None if outputs is None else list(outputs), dict(inputs))
        return results


def serialized(model: ir.Model, folder: str) -> str | bytes:
    """One message, or a file in `folder` where the weights do not fit into a message or lie in files of their own."""
    weights = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    is_external = any(isinstance(tensor, ir.ExternalTensor) for tensor in weights)
    if not is_external and sum(tensor.nbytes for tensor in weights) <= _MAX_PROTO_BYTES:
        message: bytes = ir.to_proto(model).SerializeToString()
        return message
    path = Path(folder) / "model.onnx"
    ir.save(model, path, external_data="weights")
    return str(path)
