"""One operator of com.microsoft against ONNX Runtime, or against given numbers where ONNX Runtime's CPU has no kernel for it.

The nodes that take its place are run by onnx.reference, which is quick, or as a compiled program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import prefuse
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.frontend.importer import import_model

Array = np.ndarray | None
_TYPES = {ml_dtypes.int4: onnx.TensorProto.INT4, ml_dtypes.uint4: onnx.TensorProto.UINT4}


@dataclass(frozen=True)
class Case:
    """A node: its inputs (None: left out), which of them are constants, and which outputs it has (0: left out).

    `tolerance` is relative to the largest expected number; integers may differ by `steps`.
    """

    op_type: str
    inputs: Sequence[Array]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[int] = (1,)
    constants: Sequence[int] = ()
    tolerance: float = 1e-5
    steps: int = 0
    domain: str = "com.microsoft"
    opset: int = 18

    def model(self) -> onnx.ModelProto:
        """The node alone in a model."""
        names = ["" if array is None else f"i{position}" for position, array in enumerate(self.inputs)]
        results = [f"o{position}" if wanted else "" for position, wanted in enumerate(self.outputs)]
        node = helper.make_node(self.op_type, names, results, domain=self.domain, **self.attributes)
        constants = [self._tensor(position) for position in self.constants if self.inputs[position] is not None]
        inputs = [helper.make_tensor_value_info(name, _type_of(array), array.shape) for name, array in self.feeds()]
        outputs = [helper.make_empty_tensor_value_info(name) for name in results if name]
        graph = helper.make_graph([node], "main", inputs, outputs, constants)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feeds(self) -> list[tuple[str, np.ndarray]]:
        """Names and values of the model's inputs."""
        return [
            (f"i{position}", array)
            for position, array in enumerate(self.inputs)
            if array is not None and position not in self.constants
        ]

    def _tensor(self, position: int) -> onnx.TensorProto:
        array = self.inputs[position]
        assert array is not None
        return numpy_helper.from_array(array, f"i{position}")


def rewritten(case: Case) -> tuple[np.ndarray, ...]:
    """What the nodes of ONNX give that take the operator's place."""
    model = import_model(case.model())
    assert all(node.domain == "" for node in model.graph.all_nodes())
    return tuple(np.asarray(one) for one in ReferenceEvaluator(ir.to_proto(model)).run(None, dict(case.feeds())))


def compiled(case: Case) -> tuple[np.ndarray, ...]:
    """What our program gives."""
    result = prefuse.compile(case.model(), cache=False)(**dict(case.feeds()))
    return tuple(np.asarray(one) for one in (result if isinstance(result, tuple) else (result,)))


def by_onnxruntime(case: Case) -> list[np.ndarray]:
    """What ONNX Runtime gives."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(case.model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(case.feeds())))


def check(case: Case, expected: Sequence[np.ndarray] | None = None, *, is_compiled: bool = False) -> None:
    """Fail unless the operator gives what is expected: by default what ONNX Runtime gives."""
    expected = by_onnxruntime(case) if expected is None else expected
    actual = compiled(case) if is_compiled else rewritten(case)
    for position, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert got.shape == wanted.shape, f"output {position}: {got.shape} instead of {wanted.shape}"
        assert got.dtype == wanted.dtype, f"output {position}: {got.dtype} instead of {wanted.dtype}"
        if wanted.dtype.kind in "biu":
            np.testing.assert_allclose(got.astype(np.int64), wanted.astype(np.int64), rtol=0, atol=case.steps)
        else:
            limit = case.tolerance * max(1.0, float(np.abs(wanted.astype(np.float64)).max(initial=0)))
            np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=limit)


def _type_of(array: np.ndarray) -> int:
    return _TYPES.get(array.dtype.type) or helper.np_dtype_to_tensor_dtype(array.dtype)
