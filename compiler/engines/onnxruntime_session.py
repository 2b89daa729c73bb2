"""A graph in ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..ir.constants import contiguous

_MAX_ONNXRUNTIME_IR = 13  # the newest file format that ONNX Runtime 1.31 reads; what it lacks of later ones changes no numbers
_MAX_PROTO_BYTES = 1_900_000_000  # protobuf holds less than 2 GiB; leave room for what is not weights
_LENT_BYTES = 1 << 16  # weights from this size on are read by ONNX Runtime where they lie
_LENT_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32, ir.DataType.INT64)
_NO_FILE = "lent"  # the file that a lent weight is said to be in, which is not read


class OnnxRuntimeSession:
    """A model as ONNX Runtime runs it on the CPU, with its graph optimizations where `optimize`.

    Large weights are lent to it, neither written to a file nor copied into a message.

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
            message, self._lent = _lendable(model) or (serialized(model, folder), {})
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in self._lent.values()]
            options.add_external_initializers(list(self._lent), values)
            self._session = onnxruntime.InferenceSession(message, options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> Sequence[np.ndarray]:
        """The outputs of these names, all of them in the graph's order for None. Raises what ONNX Runtime raises."""
        results: Sequence[np.ndarray] = self._session.run(None if outputs is None else list(outputs), dict(inputs))
        return results


def _lendable(model: ir.Model) -> tuple[bytes, dict[str, np.ndarray]] | None:
    """A message that names the large weights only, and their arrays by name; None where some cannot be lent, nor be in it."""
    shell, lent, kept_bytes = model.clone(), dict[str, np.ndarray](), 0
    for name, value in shell.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.nbytes >= _LENT_BYTES and tensor.dtype in _LENT_TYPES:
            lent[name] = contiguous(tensor.numpy())
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(_NO_FILE, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy(), name=name, dtype=tensor.dtype)
            kept_bytes += tensor.nbytes
        else:
            kept_bytes += tensor.nbytes
    return None if kept_bytes > _MAX_PROTO_BYTES else (ir.to_proto(shell).SerializeToString(), lent)


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
