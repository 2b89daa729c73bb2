"""What the tests of expansions share: a model after `decompose`, and what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.pipeline import Context, run_pipeline
from prefuse.passes.structure.decompose import Decompose
from prefuse.runtime.target import Target


def one_node(
    op_type: str,
    inputs: Mapping[str, np.ndarray],
    outputs: int = 1,
    *,
    domain: str = "",
    opset: int = onnx.defs.onnx_opset_version(),
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one operator. Inputs whose name begins with "c_" are initializers; an empty name leaves an input out."""
    names = [f"y{number}" for number in range(outputs)]
    node = onnx.helper.make_node(op_type, ["" if "none" in name else name for name in inputs], names, domain=domain, **attributes)
    given = {name: array for name, array in inputs.items() if "none" not in name}
    graph = onnx.helper.make_graph(
        [node],
        "main",
        [onnx.helper.make_tensor_value_info(k, _type(v), v.shape) for k, v in given.items() if not k.startswith("c_")],
        [onnx.helper.make_empty_tensor_value_info(name) for name in names],
        [onnx.numpy_helper.from_array(v, k) for k, v in given.items() if k.startswith("c_")],
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    if domain:
        imports.append(onnx.helper.make_opsetid(domain, onnx.defs.get_schema(op_type, domain=domain).since_version))
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model after `decompose`."""
    graph = import_model(model)
    run_pipeline(graph, [Decompose()], Context(Target("cpu", "avx2", 1)))
    return ir.to_proto(graph)


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def evaluate(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """What onnx.reference computes; `inputs` as for `one_node`."""
    wanted = {value.name for value in model.graph.input}
    results = ReferenceEvaluator(model).run(None, {k: v for k, v in inputs.items() if k in wanted})
    return [np.asarray(result) for result in results]


def compiled(model: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    """What the model computes, compiled."""
    results = prefuse.compile(model, cache=False)(*inputs)
    return [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]


def _type(array: np.ndarray) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
