"""An operator of ai.onnx.ml against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime

from .expanding import compiled, evaluate, expanded, one_node, operators

_VERSION = 4  # of the domain: 5 withdraws the older operators on trees


def ml_model(op_type: str, inputs: Mapping[str, np.ndarray], outputs: int = 1, **attributes: Any) -> onnx.ModelProto:
    """A model of the operator alone; the types of its outputs are left to inference."""
    model = one_node(op_type, inputs, outputs, domain="ai.onnx.ml", opset=21, **attributes)
    model.opset_import[1].version = _VERSION
    for value in model.graph.output:
        value.type.Clear()
    return model


def agrees(
    op_type: str, inputs: Mapping[str, np.ndarray], outputs: int = 1, *, is_compiled: bool = False, **attributes: Any
) -> None:
    """Fail unless the body, evaluated by onnx.reference or compiled, has ONNX Runtime's results."""
    model = ml_model(op_type, inputs, outputs, **attributes)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, dict(inputs))
    assert op_type not in operators(expanded(model))
    found = compiled(model, *inputs.values()) if is_compiled else evaluate(expanded(model), inputs)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
